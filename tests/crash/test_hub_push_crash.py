"""A push that is killed, and run again, makes one commit and one tag, and sends nothing twice."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.hub import push
from tests.command_line import kill_command, run_command
from tests.hub_models import consolidated
from tests.hub_server import TOKEN, HubServer

XET = True


@pytest.mark.parametrize(
    "request_",
    [
        "POST .*/commit/",  # large files are in the store, and no commit names them
        "POST .*/tag/",  # the commit is made, and no tag names it
    ],
)
def test_a_push_killed_anywhere_is_completed_by_the_next(
    hub: HubServer, tmp_path: Path, request_: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("kills", 1)
    model = consolidated(tmp_path, seed=len(request_))
    hub.before.append((re.compile(request_), kill_command))
    words = ("push", model, "me/model", "--tag", "step-30")
    killed = run_command(*words, **hub.environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    hub.before.clear()
    sent = hub.sent_bytes()
    pushed = push(model, "me/model", tag="step-30", token=TOKEN, endpoint=hub.url)
    repo = hub.repo("me/model")
    assert [commit.oid for commit in repo.commits] == [pushed.commit]
    assert repo.tags == {"step-30": pushed.commit}
    assert hub.sent_bytes() == sent > 0
