"""`ckptkit save-now` as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.runs.marks import take_request, take_run_lock
from tests.command_line import Result, run_command

ROOT = Path(__file__).parents[2]


def save_now(*arguments: str | Path) -> Result:
    return run_command("save-now", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run whose lock a job has."""
    lock = take_run_lock(tmp_path)
    assert lock is not None
    yield tmp_path
    lock.close()


def commit(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST_NAME).write_text("{}", encoding="utf-8")
    return folder


def serve(run: Path, step: int) -> threading.Thread:
    """Plays the job: takes the request up, and saves."""

    def work() -> None:
        deadline = time.monotonic() + 30
        while take_request(run) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        (run / f".checkpoint-{step}.ckptkit-abcd-1").mkdir(exist_ok=True)
        commit(run, step)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_request_is_left_for_the_job_that_holds_the_lock(run: Path) -> None:
    result = save_now(run)
    assert result.returncode == 0
    expected = f"requested a save of {run}; the run saves at its next step\n"
    assert (result.stdout, result.stderr) == (expected, "")
    owner = take_request(run)
    assert owner is not None
    assert owner.pid > 0
    assert sorted(path.name for path in (run / ".ckptkit").iterdir()) == ["lock"]


@pytest.mark.parametrize("before", [900, 1000])  # a step that is saved again is new
def test_with_wait_the_new_step_is_printed(run: Path, before: int) -> None:
    commit(run, before)
    for words in ((), ("--json",)):
        job = serve(run, 1000)
        result = save_now(run, "--wait", "30", *words)
        job.join()
        assert result.returncode == 0
        saved = str(run / "checkpoint-1000")
        if words:
            found = json.loads(result.stdout)
            assert found == {"run": str(run), "asked": True, "saved": saved}
        else:
            assert result.stdout == f"saved {saved}\n"


def test_a_save_that_does_not_come_in_time_is_refused(run: Path) -> None:
    result = save_now(run, "--wait", "0.2", "--json")
    assert result.returncode == 4
    error = json.loads(result.stdout)["error"]
    assert error["message"] == "no new step was complete within 0.2 s of the request"
    assert error["hint"]


def test_without_a_job_nothing_is_left_behind(tmp_path: Path) -> None:
    result = save_now(tmp_path)
    assert result.returncode == 4
    assert "error[refused]: " in result.stderr
    assert "no job is writing to the run" in result.stderr
    assert "hint: start the training first" in result.stderr
    assert take_request(tmp_path) is None


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf"])
def test_a_wait_that_is_no_time_is_wrong_usage(seconds: str, tmp_path: Path) -> None:
    result = save_now(tmp_path, f"--wait={seconds}")
    assert result.returncode == 2
    assert "--wait: " in result.stderr


def test_the_command_never_loads_torch() -> None:
    code = (
        "import sys; from ckptkit_cli.main import main; main(['save-now', '/missing']);"
        "print('torch' in sys.modules, 'ckptkit.training' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "False False\n"
