"""A watch that is killed again and again still pushes each step once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hub_models import add_step
from tests.hub_server import TOKEN, HubServer

SCRIPT = Path(__file__).with_name("command_host.py")
STEP = Path(__file__).parents[2] / "fixtures/peft_checkpointer/checkpoint/checkpoint-2"
REPO = "org/run"
REQUESTS, WRITES = range(3, 16), (3, 9, 15, 20, 22, 25, 26, 28, 29, 30, 31)
LEAST_KILLS = 20


class Lives:
    """Runs of the command in children of one process, which has imported all they need."""

    def __init__(self, process: subprocess.Popen[str], hub: HubServer, folder: Path) -> None:
        self._process = process
        self._hub = hub
        self._folder = folder
        self.log = folder / "log"

    def run(self, *, die_at_request: int = 0, die_at_write: int = 0) -> int:
        """Runs it to its end, and returns its status: -9 if it was killed."""
        run = self._folder / "run"
        arguments = ["watch", str(run), "--push", REPO, "--once", "--adapter", "default"]
        self._ask(
            {
                "arguments": arguments,
                "die_at": die_at_write,
                "folder": str(run / ".ckptkit"),
                "log": str(self.log),
            }
        )
        pid, left = self._answer()["pid"], [die_at_request]

        def count() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(pid, signal.SIGKILL)

        answered = len(self._hub.log)
        self._hub.before[:] = [(re.compile(""), count)] if die_at_request else []
        status: int = self._answer()["status"]
        while die_at_request and len(self._hub.log) < answered + die_at_request - left[0]:
            time.sleep(0.005)  # what was asked before the kill is still being done
        self._hub.before.clear()
        return status

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def lives(hub: HubServer, folder: Path) -> Iterator[Lives]:
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Lives(process, hub, folder)
        assert process.stdin is not None
        process.stdin.close()


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
    points = [{"die_at_request": n} for n in REQUESTS] + [{"die_at_write": n} for n in WRITES]
    with HubServer(xet=False) as hub, lives(hub, tmp_path) as watch:
        for point in points:
            if pushed(hub)[steps] or steps == 0:  # a step stays until a kill has let it through
                steps += 1
                add_step(run, steps, STEP)
            status = watch.run(**point)
            assert status in {0, -signal.SIGKILL}, watch.log.read_text()
            kills += status != 0
            assert set(pushed(hub).values()) <= {1}
        assert watch.run() == 0
        found, repo = pushed(hub), hub.repo(REPO)
    record_property("kills", kills)
    assert kills >= LEAST_KILLS
    assert found == Counter(range(1, steps + 1))
    assert steps > 3
    by_commit = {commit.oid: commit.message for commit in repo.commits}
    tags = {tag: by_commit[oid].split(" (")[0] for tag, oid in repo.tags.items()}
    assert tags == {f"step-{n}": f"Step {n}" for n in range(1, steps + 1)}
