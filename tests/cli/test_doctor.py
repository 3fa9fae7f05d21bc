"""`ckptkit doctor` as a shell sees it: statuses, services, and what a kill leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run_command
from tests.object_store import SECRET, ObjectStore

ROOT = Path(__file__).parents[2]
RUN = ROOT / "fixtures" / "written_by_0_1" / "run"


def findings(stdout: str) -> dict[str, dict[str, Any]]:
    return {finding["id"]: finding for finding in json.loads(stdout)["findings"]}


def test_a_sound_run_is_0_and_an_error_is_6(tmp_path: Path) -> None:
    sound = run_command("doctor", RUN, "--no-probe", "--json")
    assert sound.returncode == 0, sound.stderr
    assert json.loads(sound.stdout)["errors"] == 0
    far = run_command("doctor", tmp_path / "runs" / "new", "--model-size", "900T", "--keep-last", 3)
    assert far.returncode == 6
    assert "error" in far.stdout
    assert "900" not in far.stderr
    assert "do      make room" in far.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["absent.yaml"], 3, "absent.yaml: cannot be read: no such file or directory"),
        (["--model-size", "many"], 2, "'many' is not a number of parameters"),
        (["--model-size", "8"], 2, "'8' is not a number of parameters: no model has 8"),
        (["--keep-last", "0"], 2, "'0' is not a positive whole number"),
        (["a", "b"], 2, "names 2 runs, where one was expected"),
        ([ROOT / "pyproject.toml"], 3, "pyproject.toml"),
        ([RUN / "checkpoint-4"], 3, "is a step, where a run was expected"),
        ([""], 2, "names no directory and no file"),
        (["hf://org/model"], 2, "runs cannot be saved there"),
        (["s3://me:secret@bucket/x"], 2, "password"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[Any], status: int, message: str) -> None:
    done = run_command("doctor", *arguments)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "secret" not in done.stderr


def test_a_store_is_tried_and_left_as_it_was(object_store: ObjectStore) -> None:
    bucket = object_store.bucket("doctor")
    bucket.put("other/x", b"x")
    begun = object_store.client.create_multipart_upload(Bucket="doctor", Key="run/dead")
    done = run_command(
        "doctor", f"{bucket.url}/run", "--json", *object_store.arguments("--src-option")
    )
    assert done.returncode == 0, done.stderr
    found = findings(done.stdout)
    assert found["store-conditions"]["severity"] == "ok"
    assert found["store-checksums"]["severity"] == "ok"
    assert found["store-uploads"]["found"].startswith("1 unfinished uploads")
    assert bucket.keys() == ["other/x"]
    assert bucket.unfinished_uploads() == ["run/dead"]
    assert SECRET not in done.stdout + done.stderr
    object_store.client.abort_multipart_upload(
        Bucket="doctor", Key="run/dead", UploadId=begun["UploadId"]
    )
    refused = run_command(
        "doctor", "s3://no-such-bucket/run", "--json", *object_store.arguments("--src-option")
    )
    assert refused.returncode == 6
    assert findings(refused.stdout)["store"]["severity"] == "error"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
@pytest.mark.quick("9--9")
def test_nothing_is_left_of_a_probe_that_is_stopped(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    started = subprocess.Popen(
        [sys.executable, "-m", "ckptkit_cli", "doctor", run],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _wait_for_open_file(started.pid, run)
        started.send_signal(number)
        assert started.wait(20) == status
    finally:
        started.kill()
        started.communicate()
    assert list(run.iterdir()) == []


def test_a_directory_that_is_gone_is_an_error_and_no_bug(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = "import os; os.rmdir(os.getcwd()); from ckptkit_cli.main import main; main(['doctor'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the current directory was removed" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def _wait_for_open_file(process: int, folder: Path) -> None:
    """Waits until a process has a file open below a folder, with or without a name."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if target.startswith(f"{folder}/"):
                return
        time.sleep(0.002)
    raise AssertionError("no probe was begun")
