"""A watch that is killed again and again still pushes each step once."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.crash.forked_commands import ForkedCommands, running_forks
from tests.fork_host import Child
from tests.hub_models import add_step
from tests.hub_server import HubServer

STEP = Path(__file__).parents[2] / "fixtures/peft_checkpointer/checkpoint/checkpoint-2"
REPO = "org/run"
REQUESTS, WRITES = range(3, 16), (3, 9, 15, 20, 22, 25, 26, 28, 29, 30, 31)
LEAST_KILLS = 20


def run_and_die(
    forks: ForkedCommands, hub: HubServer, folder: Path, *, at_request: int = 0, at_write: int = 0
) -> int:
    run, child, left = folder / "run", Future[Child](), [at_request]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(child.result().pid, signal.SIGKILL)

    answered = len(hub.log)
    hub.before[:] = [(re.compile(""), count)] if at_request else []
    words = ["watch", str(run), "--push", REPO, "--once", "--adapter", "default"]
    log, marks = folder / "log", run / ".ckptkit"
    child.set_result(forks.start(words, log, die_at=at_write, folder=marks))
    status = child.result().wait()
    assert status is not None
    while at_request and len(hub.log) < answered + at_request - left[0]:
        time.sleep(0.005)  # what was asked before the kill is still being done
    hub.before.clear()
    return status


def settings(hub: HubServer, folder: Path) -> dict[str, str]:
    off = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_OFFLINE": "0"}
    return hub.environment | off | {"HF_HOME": str(folder / "hf")}


def pushed(hub: HubServer) -> Counter[int]:
    if not hub.has(REPO):
        return Counter()
    titles = [re.match(r"Step (\d+) ", commit.message) for commit in hub.repo(REPO).commits]
    return Counter(int(title[1]) for title in titles if title)


@pytest.mark.slow
def test_kills_at_every_request_and_write_leave_one_commit_and_one_tag_per_step(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    steps, kills = 0, 0
    points = [{"at_request": n} for n in REQUESTS] + [{"at_write": n} for n in WRITES]
    with HubServer(xet=False) as hub, running_forks(**settings(hub, tmp_path)) as forks:
        for point in points:
            if pushed(hub)[steps] or steps == 0:  # a step stays until a kill has let it through
                steps += 1
                add_step(run, steps, STEP)
            status = run_and_die(forks, hub, tmp_path, **point)
            assert status in {0, -signal.SIGKILL}, (tmp_path / "log").read_text()
            kills += status != 0
            assert set(pushed(hub).values()) <= {1}
        assert run_and_die(forks, hub, tmp_path) == 0
        found, repo = pushed(hub), hub.repo(REPO)
    record_property("kills", kills)
    assert kills >= LEAST_KILLS
    assert found == Counter(range(1, steps + 1))
    assert steps > 3
    by_commit = {commit.oid: commit.message for commit in repo.commits}
    tags = {tag: by_commit[oid].split(" (")[0] for tag, oid in repo.tags.items()}
    assert tags == {f"step-{n}": f"Step {n}" for n in range(1, steps + 1)}
