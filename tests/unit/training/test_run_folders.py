"""The directory of a run: names, what lies in it, and its lock."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ckptkit.runs.steps as step_records
from ckptkit.core.errors import OutputError, RefusedError, UsageError
from ckptkit.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from ckptkit.runs.marks import ask_for_save, run_is_live, take_run_lock
from ckptkit.runs.retention import Retention, steps_to_remove
from ckptkit.storage.local.disk import Disk
from ckptkit.training.run_folders import RunFolder, saved_steps
from tests.command_line import started


def commit(run: RunFolder, step: int, /, **changes: Any) -> Path:
    folder = run.step_folder(step)
    folder.mkdir()
    (folder / "data").write_bytes(b"12345")
    source: dict[str, Any] = {"step": step, "metrics": {"loss": 1.5, "note": "text"}} | changes
    manifest = Manifest(
        kind=source.pop("kind", "training"),
        source=source,
        options={},
        versions={},
        tensors={},
        files={"data": FileRecord(5)},
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return folder


def test_the_directory_and_its_parents_are_made(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a" / "b")
    assert run.path.is_dir()
    assert run.steps() == ()
    assert RunFolder(str(run.path)).path == run.path


def test_names_of_attempts_are_not_those_of_checkpoints(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.step_folder(500) == tmp_path / "checkpoint-500"
    working = run.working_folder(run.step_folder(500), "abcd", 3)
    assert working == tmp_path / ".checkpoint-500.ckptkit-abcd-3"
    working.mkdir()
    assert run.steps() == ()


def test_complete_steps_are_told_with_their_metrics_in_order(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1000, 200, 30):
        commit(run, step)
    found = run.steps()
    assert [facts.step for facts in found] == [30, 200, 1000]
    assert all(facts.complete and not facts.problem for facts in found)
    assert found[0].metrics == {"loss": 1.5}
    assert Path(found[0].path) == tmp_path / "checkpoint-30"
    assert steps_to_remove(found, Retention(keep_last=2)) == (30,)


def test_what_is_damaged_is_marked_and_says_why(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (commit(run, 1) / MANIFEST_NAME).unlink()
    (commit(run, 2) / MANIFEST_NAME).write_bytes(b"{")
    (commit(run, 3) / "data").unlink()
    (commit(run, 4) / "data").write_bytes(b"1234")
    commit(run, 5, step=6)
    commit(run, 7, kind="model")
    folder = commit(run, 8)
    (folder / MANIFEST_NAME).unlink()
    (folder / MANIFEST_NAME).mkdir()
    commit(run, 9, metrics=[1])
    problems = {facts.step: facts.problem for facts in run.steps()}
    expected = {
        1: "no ckptkit.json",
        2: "not a ckptkit manifest",
        3: "'data' is missing",
        4: "4 bytes against 5",
        5: "step 6",
        7: "kind 'model'",
        8: "Is a directory",
    }
    assert all(text in problems[step] for step, text in expected.items())
    assert problems[9] == ""
    assert steps_to_remove(run.steps(), Retention(keep_last=1)) == ()


def test_a_name_that_leads_out_of_the_step_is_not_followed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "outside").write_bytes(b"12345")
    manifest = commit(run, 1) / MANIFEST_NAME
    document = json.loads(manifest.read_bytes().replace(b'"data"', b'"../outside"'))
    del document["checksum"]  # ckptkit 0.1 wrote none
    manifest.write_text(json.dumps(document))
    [found] = run.steps()
    assert not found.complete
    assert "'../outside' was found where a path inside" in found.problem


def test_a_step_is_looked_into_once_and_again_when_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    check = step_records._problem_of

    def counting(step: int, *rest: Any) -> str:
        looked.append(step)
        return check(step, *rest)

    monkeypatch.setattr(step_records, "_problem_of", counting)
    run = RunFolder(tmp_path)
    commit(run, 1)
    (commit(run, 2) / "data").unlink()
    first = run.steps()
    commit(run, 3)
    assert run.steps()[:2] == first
    assert looked == [1, 2, 2, 3]
    run.step_folder(1).rename(tmp_path / "away")
    assert [step.step for step in run.steps()] == [2, 3]
    commit(run, 1, metrics={"loss": 7.0})
    assert run.steps()[0].metrics == {"loss": 7.0}


def test_steps_that_training_went_back_from_come_before_all_others(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for number, step in enumerate((100, 200, 300, 210), 1):
        commit(run, step, save_number=number)
    assert [saved.step for saved in saved_steps(tmp_path)] == [300, 100, 200, 210]
    assert run.steps() == saved_steps(tmp_path)


@pytest.mark.parametrize("number", [None, "2", -1, 1.5, [], 10**400])
def test_a_save_number_that_is_none_is_ignored_or_taken_whole(number: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    commit(run, 1, save_number=number, metrics={"loss": number})
    assert run.last_save_number() == (number if number == 10**400 else 0)
    assert run.retired_by(2, {}, Retention(keep_last=1, keep_best="loss"))[1:] == ()


def test_the_steps_that_a_new_one_retires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder(tmp_path)
    for number, step in enumerate((200, 300), 1):
        commit(run, step, save_number=number)
    assert run.last_save_number() == 2
    assert run.retired_by(210, {}, Retention(keep_last=2)) == (tmp_path / "checkpoint-300",)
    best = Retention(keep_best="acc")
    assert len(run.retired_by(400, {"metrics": {"loss": None}}, best)) == 2
    assert len(run.retired_by(400, {}, best)) == 2
    assert caplog.text.count("keep_best='acc' keeps nothing") == 1
    monkeypatch.setattr(RunFolder, "steps", None)
    assert run.retired_by(400, {}, Retention()) == ()


def test_files_and_other_names_are_no_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "checkpoint-1").touch()
    for name in ("checkpoint-1-old", "checkpoint-", "Checkpoint-2", "checkpoint-x", "tmp"):
        (tmp_path / name).mkdir()
    assert run.steps() == ()


def test_a_path_that_cannot_be_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/run"):
        with pytest.raises(OutputError, match="found a file"):
            RunFolder(tmp_path / path)
    for url in (
        "s3://bucket/run",
        "hf://a/b",
        "file:///tmp/run",
        str(Path("s3://bucket/run").absolute()),
    ):
        with pytest.raises(UsageError, match="got a URL"):
            RunFolder(url)
    with pytest.raises(OutputError, match="cannot be used"):
        RunFolder("/proc/run")


def test_a_second_job_is_refused_and_told_who_has_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run_is_live(tmp_path) is False
    lock = run.lock()
    assert lock is not None
    assert run_is_live(tmp_path) is True
    with pytest.raises(RefusedError, match="another job is writing") as caught:
        RunFolder(tmp_path).lock()
    assert f"process {os.getpid()} on " in str(caught.value)
    assert "this process has opened" in caught.value.hint
    lock.close()
    lock.close()
    assert run_is_live(tmp_path) is False
    again = RunFolder(tmp_path).lock()
    assert again is not None
    again.close()


HOLDER = """
import sys, time
from pathlib import Path
from ckptkit.runs.marks import take_run_lock
lock = take_run_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_job_is_free(tmp_path: Path) -> None:
    with started(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        job.stdout.readline()
        assert run_is_live(tmp_path) is True
        job.kill()
        job.wait()
    again = RunFolder(tmp_path).lock()
    assert again is not None
    again.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunFolder(tmp_path).lock()
    assert lock is not None
    forking = multiprocessing.get_context("fork")
    lives = forking.Event()

    def live() -> None:
        lives.set()
        time.sleep(30)

    child = forking.Process(target=live)
    child.start()
    try:
        assert lives.wait(30)
        assert run_is_live(tmp_path) is True
        lock.close()
        assert run_is_live(tmp_path) is False
    finally:
        child.kill()
        child.join()


def test_a_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import errno
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert RunFolder(tmp_path).lock() is None
    assert RunFolder(tmp_path).lock() is None
    assert "has no locks" in caplog.text
    assert run_is_live(tmp_path) is None


def test_a_lock_whose_owner_cannot_be_written_is_released(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as failure:
            take_run_lock(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run_is_live(tmp_path) is False  # while the traceback still refers to the file
    assert failure.value.__traceback__ is not None


def test_a_platform_without_locks_has_none(tmp_path: Path) -> None:
    able = dataclasses.replace(Disk(), locks=False)
    assert take_run_lock(tmp_path, able) is None
    assert run_is_live(tmp_path, able) is None


def test_a_request_is_taken_once_and_says_whose_it_is(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.take_request() is None
    ask_for_save(tmp_path)
    ask_for_save(tmp_path)
    assert str(run.take_request()).startswith(f"process {os.getpid()} on ")
    assert run.take_request() is None


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"host": "a"}), "\0" * 10_000])
def test_a_request_made_by_hand_counts_as_well(text: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / ".ckptkit" / "save-now").write_text(text, encoding="utf-8")
    assert str(run.take_request()) == "an unknown process"
    assert run.take_request() is None
