"""Two ranks with the Trainer, whose end does not depend on the Hub."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import TOKEN, HubServer
from tests.ranks import SETTINGS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("pushing_run.py")
REPO = "org/tiny"
STEPS = ["Step 2", "Step 4"]
LIMIT_SECONDS = 240.0
SOON_SECONDS = 5.0
FOR_EVER = 100_000


class Ranks:
    """Two ranks of one training, and what they leave."""

    def __init__(self, out: Path, hub: HubServer, given: dict[str, Any], token: str) -> None:
        out.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        self.environment = os.environ | SETTINGS | settings | {"HF_TOKEN": token}
        root = SCRIPT.parents[2]
        paths = (SCRIPT.with_name("pretending"), root, root / "cli")
        more = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(map(str, paths))}
        self.environment |= more
        ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        self.out = out
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(2):
            with (out / f"rank-{rank}.out").open("wb") as printed:
                process = subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(out), json.dumps(given)],
                    env=self.environment | ports | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def statuses(self) -> list[int]:
        """Waits for both; the output of what they printed is shown where a test fails."""
        try:
            found = [process.wait(LIMIT_SECONDS) for process in self.processes]
        finally:
            for rank, process in enumerate(self.processes):
                process.kill()
                print((self.out / f"rank-{rank}.out").read_text()[-4_000:])  # noqa: T201
                print(self.log(rank)[-4_000:])  # noqa: T201
        return found

    def log(self, rank: int) -> str:
        return (self.out / f"rank-{rank}.log").read_text()

    def check_ends(self) -> None:
        """Training ended soon after its last save, and collectives work, on both ranks."""
        for rank in range(2):
            found = json.loads((self.out / f"rank-{rank}.json").read_text())
            assert found["train"] < SOON_SECONDS
            assert found["sum"] == 2
            assert (self.out / f"rank-{rank}.end").exists()
            assert (self.out / f"rank-{rank}.txt").read_text() == "written at the end"
        assert list((self.out / "final").glob("*.safetensors"))

    def run_rest(self) -> None:
        """Runs the command that both logs print."""
        commands = {re.findall(r"`ckptkit (watch [^`]*)`", self.log(rank))[-1] for rank in range(2)}
        (command,) = commands
        self.run(command)

    def run(self, command: str) -> None:
        words = [sys.executable, "-m", "ckptkit_cli", *shlex.split(command)]
        environment = self.environment | {"HF_TOKEN": TOKEN}
        subprocess.run(words, env=environment, check=True, timeout=LIMIT_SECONDS)


Start = Callable[..., Ranks]


@pytest.fixture
def start(hub: HubServer, tmp_path: Path) -> Start:
    def started(token: str = TOKEN, **given: Any) -> Ranks:
        return Ranks(tmp_path / "out", hub, given, token)

    return started


def titles(hub: HubServer, repo_id: str = REPO) -> list[str]:
    return [commit.message.split(" (")[0] for commit in hub.repo(repo_id).commits]


def wait_until(check: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not check():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_where_the_hub_answers_503_for_ever_the_printed_command_pushes_the_rest_once(
    hub: HubServer, start: Start
) -> None:
    hub.fail("", [503] * FOR_EVER)
    ranks = start(save_total_limit=1)
    assert ranks.statuses() == [0, 0]
    ranks.check_ends()
    for rank in range(2):
        assert "steps 2, 4 not pushed to org/tiny yet" in ranks.log(rank)
    assert len(list(ranks.out.glob("run/checkpoint-*"))) == 2  # beyond the limit, and unpushed
    hub.clear()
    ranks.run_rest()
    assert titles(hub) == STEPS


def test_where_an_upload_is_slow_the_process_outlives_the_program(
    hub: HubServer, start: Start
) -> None:
    hub.before.append((re.compile("POST .*/commit/"), lambda: time.sleep(15)))
    ranks = start()
    assert ranks.statuses() == [0, 0]
    ranks.check_ends()
    assert not hub.has(REPO) or len(titles(hub)) < 2
    wait_until(lambda: hub.has(REPO) and len(titles(hub)) == 2)
    assert titles(hub) == STEPS


def test_where_the_token_is_wrong_rank_0_ends_with_a_status_of_its_own(
    hub: HubServer, start: Start
) -> None:
    ranks = start(token="hf_" + "Bb2" * 12, pause=20)
    assert ranks.statuses() == [7, 0]
    ranks.check_ends()
    assert "ERROR:ckptkit.training.pushing:the program ends with status 7" in ranks.log(0)
    told = "ERROR:ckptkit.training.pushing:steps 2, 4 not pushed to org/tiny: the token is wrong"
    assert told in ranks.log(0)
    assert told in ranks.log(1)
    ranks.run_rest()
    assert titles(hub) == STEPS


def test_where_writing_is_refused_the_next_start_pushes_everything_once(
    hub: HubServer, start: Start
) -> None:
    hub.fail("POST /api/repos/create|POST .*/commit/", [403] * FOR_EVER)
    ranks = start(install={"hub_timeout_seconds": 120})
    assert ranks.statuses() == [7, 0]
    ranks.check_ends()
    hub.clear()
    again = start(max_steps=6, install={"hub_timeout_seconds": 120})
    assert again.statuses() == [0, 0]
    assert titles(hub) == [*STEPS, "Step 6"]


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise SystemExit(3)"])
def test_a_status_of_the_script_stays(end: str, start: Start) -> None:
    ranks = start(token="hf_" + "Bb2" * 12, install={"hub_timeout_seconds": 60}, end=end)
    assert ranks.statuses() == [3, 3]


def test_where_the_hub_goes_away_in_the_middle_the_next_start_pushes_the_rest_once(
    hub: HubServer, start: Start
) -> None:
    def go_away() -> None:
        hub.fail("", ["drop"] * FOR_EVER)

    hub.before.append((re.compile("POST .*/tag/"), go_away))  # after the first commit
    ranks = start()
    assert ranks.statuses() == [0, 0]
    ranks.check_ends()
    assert "not pushed to org/tiny yet" in ranks.log(1)
    wait_until(lambda: hub.has(REPO))
    hub._faults.clear()
    hub.before.clear()
    again = start(max_steps=6, hub_strategy="checkpoint", install={"hub_timeout_seconds": 200})
    assert again.statuses() == [0, 0]
    assert titles(hub) == [*STEPS, "Step 6"]


def test_the_final_model_is_pushed_beside_and_its_failure_is_told(
    hub: HubServer, start: Start
) -> None:
    hub.fail("", [503] * FOR_EVER)
    ranks = start(pushes_model=True)
    assert ranks.statuses() == [7, 0]
    for rank in range(2):
        found = json.loads((ranks.out / f"rank-{rank}.json").read_text())
        assert found["sum"] == 2
        assert found["save_model"] < 30
    assert "a model that the Trainer uploads is not pushed to org/tiny" in ranks.log(0)
    hub.clear()
    (command,) = re.findall(r"`ckptkit (push [^`]*)`", ranks.log(0))
    ranks.run(command)
    assert "Push a model with ckptkit" in titles(hub)


def test_a_final_model_whose_upload_lasts_longer_than_the_program_is_pushed(
    hub: HubServer, start: Start
) -> None:
    # Before the client hashes the files, in threads of its own.
    hub.before.append((re.compile("POST .*/preupload/"), lambda: time.sleep(4)))
    other = "org/beside"  # the process of the test before goes on with its repository
    ranks = start(pushes_model=True, hub_model_id=other)
    assert ranks.statuses() == [0, 0]
    wait_until(lambda: hub.has(other) and len(titles(hub, other)) == 3)
    assert sorted(titles(hub, other)) == ["Model save", *STEPS]
