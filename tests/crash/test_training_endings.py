"""Saves and Checkpointers that end in unusual ways: nothing is lost in silence, nothing hangs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    OutputError,
    PeerError,
    SaveError,
    UsageError,
    WriterError,
)
from ckptkit.training import Checkpointer
from ckptkit.training.agree.barrier import SaveBarrier
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.handle import SaveHandle
from ckptkit.training.save.saver import Save, SaveCommitter
from ckptkit.training.save.writer_process import WriterProcess
from ckptkit.writer.messages import StepCommitted
from tests.crash import troubles
from tests.ranks import RunRanks

SECONDS = 30.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def log() -> Iterator[Any]:
    with troubles.listening() as heard:
        yield heard


def writer_of(saver: Checkpointer) -> WriterProcess:
    return saver._slots[0]._writer


def pid_of(process: WriterProcess) -> int:
    assert process.pid is not None
    return process.pid


UNCLOSED = """
import sys, torch
from ckptkit.training import Checkpointer
model = torch.nn.Linear(1000, 1000)
saver = Checkpointer(sys.argv[1])
saver.prepare({"model": model})
saver.save(5, {"model": model})
"""


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_script_that_ends_without_close_loses_no_save(
    run: Path, tmp_path: Path, run_ranks: RunRanks, *, forked: bool
) -> None:
    """At the end of an interpreter, and of a fork, which ends as one does and starts at once."""
    script = tmp_path / "unclosed.py"
    script.write_text(UNCLOSED)
    if forked:
        run_ranks(script, 1, run, limit_seconds=60)
    else:
        subprocess.run([sys.executable, str(script), str(run)], check=True, timeout=60)
    assert ckptkit.verify(run / "checkpoint-5").ok
    assert not list((run / ".ckptkit").glob("[0-9a-f]*"))


HOPELESS = """
import logging, os, signal, sys, torch
from ckptkit.training import Checkpointer
logging.basicConfig(level=logging.ERROR)
model = torch.nn.Linear(10, 10)
saver = Checkpointer(sys.argv[1], timeout_seconds=1)
saver.prepare({"model": model})
os.kill(saver._slots[0]._writer.pid, signal.SIGSTOP)
saver.save(5, {"model": model})
"""


def test_a_save_that_is_lost_at_the_end_of_a_script_is_told_and_ends_it_in_time(
    run: Path, tmp_path: Path, run_ranks: RunRanks
) -> None:
    script = tmp_path / "hopeless.py"
    script.write_text(HOPELESS)
    began = time.monotonic()
    ended = run_ranks(script, 1, run, limit_seconds=60)
    assert time.monotonic() - began < SECONDS
    assert "step 5: the program ends before the save" in ended.stderr
    assert "Traceback" not in ended.stderr


class Interrupted(BaseException):
    """As `KeyboardInterrupt`, which pytest takes for its own."""


def test_a_close_that_is_interrupted_can_be_called_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    saver = Checkpointer(run, signals=["SIGUSR1"])
    saver.save(1, troubles.state_of(troubles.network(1), 1)).result(SECONDS)
    slot, waits = saver._slots[0], saver._slots[0].close

    def interrupt() -> None:
        raise Interrupted

    monkeypatch.setattr(slot, "close", interrupt)
    with pytest.raises(Interrupted):
        saver.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    monkeypatch.setattr(slot, "close", waits)
    saver.close()
    assert writer_of(saver).pid is None
    assert not any(thread.name == "ckptkit-saver" for thread in threading.enumerate())
    Checkpointer(run).close()  # the lock was given back


@pytest.mark.slow
def test_all_failures_that_nobody_asked_for_are_raised_at_the_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = troubles.state_of(troubles.network(1), 1)
    saver = Checkpointer(run)
    (run / "checkpoint-1").write_text("in the way")
    (run / "checkpoint-2").write_text("in the way")
    handles = [saver.save(step, state) for step in (1, 2, 3)]
    handles[2].result(SECONDS)
    with pytest.raises(CkptkitError, match=r"step.*; 1 later save failed as well"):
        saver.close()
    saver.close()
    for _ in range(2):  # the lock and all else is given back
        with pytest.raises(LookupError):
            fail_in_a_loop(run, state, monkeypatch)
    assert not any(thread.name.startswith("ckptkit-") for thread in threading.enumerate())


def fail_in_a_loop(run: Path, state: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(run) as saver:
        close = saver._sidecars.close

        def fail() -> None:
            close()
            raise RuntimeError("closing failed as well")

        monkeypatch.setattr(saver._sidecars, "close", fail)
        saver.save(1, state)
        raise LookupError("what ended the loop")


def test_nothing_can_be_asked_of_a_closed_one(run: Path) -> None:
    saver = Checkpointer(run)
    saver.close()
    for call in (
        lambda: saver.should_save(1),
        saver.request_save,
        saver.__enter__,
        lambda: saver.save(1, {}),
    ):
        with pytest.raises(UsageError, match="closed already"):
            call()


class _Odd:
    def save_pretrained(self, _: str) -> None:
        raise RuntimeError("no tokenizer today")


def test_errors_before_the_copy_are_those_of_the_save(run: Path, log: Any) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(run, sidecar={"tokenizer": _Odd()}) as saver:
        assert isinstance(saver.save(1, {"model": model}).exception(SECONDS), CkptkitError)
    log.records.clear()  # with the stack of the user's code
    with Checkpointer(run) as saver:
        with pytest.raises(UsageError, match="mapping"):
            saver.save(1, model)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="numbers by name"):
            saver.save(1, {"model": model}, metrics=3)  # type: ignore[arg-type]
        for step in (True, -1, 1.5, None, "1"):
            with pytest.raises(UsageError, match="count of steps"):
                saver.save(step, {"model": model})  # type: ignore[arg-type]
        saved = saver.save(
            np.int64(7),  # type: ignore[arg-type]
            {"model": model},
            metrics={"loss": float("nan"), "rate": np.float32(0.5)},  # type: ignore[dict-item]
        )
        assert saved.result(SECONDS).name == "checkpoint-7"
        (facts,) = saver._run.steps()
        assert facts.complete
        assert facts.metrics.get("loss") is None
        assert facts.metrics["rate"] == 0.5
    assert any("metrics loss" in line for line in log.lines(logging.WARNING))


def test_an_interrupted_save_fails_and_the_next_one_works(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = troubles.state_of(troubles.network(1), 1)

    def interrupt(*_: object) -> None:
        raise Interrupted

    with Checkpointer(run) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(saver._slots[0], "stage", interrupt)
            with pytest.raises(Interrupted):
                saver.save(1, state)
        error = saver._handles[-1].exception(SECONDS)
        assert isinstance(error, SaveError)
        assert "interrupted" in str(error)
        saver.save(2, state).result(SECONDS)


def test_a_listener_may_fail_in_any_way_and_comes_after_the_result(run: Path) -> None:
    state = {"model": nn.Linear(2, 2)}
    heard: list[int] = []
    may_go = threading.Event()

    def listen(report: Any) -> None:
        may_go.wait(SECONDS)
        heard.append(report.step)
        sys.exit(3)

    with Checkpointer(run, listener=listen) as saver:
        saver.save(1, state).result(SECONDS)
        assert heard == []
        may_go.set()
        saver.save(2, state).result(SECONDS)
    assert heard == [1, 2]


def test_a_save_that_was_asked_for_is_not_skipped(run: Path) -> None:
    state = troubles.state_of(troubles.network(1, 50_000), 1)
    with Checkpointer(run, in_flight="skip") as saver:
        saver.prepare(state)
        os.kill(pid_of(writer_of(saver)), signal.SIGSTOP)
        first = saver.save(1, state)
        assert saver.save(2, state).skipped
        saver.request_save()
        until = time.monotonic() + SECONDS
        step = 3
        while not saver.should_save(step) and time.monotonic() < until:
            step += 1
            time.sleep(0.02)
        threading.Timer(0.5, os.kill, (pid_of(writer_of(saver)), signal.SIGCONT)).start()
        handle = saver.save(step, state)
        report = handle.report(SECONDS)
        first.result(SECONDS)
    assert report.waited_seconds > 0.3
    assert report.blocked_seconds >= report.waited_seconds
    assert report.bytes_per_second > 10 * report.size_bytes
    assert "of it for an earlier save" in str(report)


def test_a_board_that_fails_when_skipping_is_asked_about_fails_the_save(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise PeerError("the store failed")

    state = {"model": nn.Linear(2, 2)}
    with Checkpointer(run, in_flight="skip") as saver:
        with monkeypatch.context() as patch:
            patch.setattr(saver._answers, "first", fail)
            assert "the store failed" in str(saver.save(1, state).exception(SECONDS))
        saver.save(2, state).result(SECONDS)


def test_a_save_that_is_complete_has_not_failed_though_the_others_cannot_be_told(
    run: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    with Checkpointer(run) as saver:
        barrier: Any = vars(saver._committer)["_barrier"]
        agree = barrier.agree_on

        def fail(*arguments: Any, **options: Any) -> None:
            agree(*arguments, **options)
            raise PeerError("the store failed")

        monkeypatch.setattr(barrier, "agree_on", fail)
        report = saver.save(1, {"model": nn.Linear(2, 2)}).report(SECONDS)
    assert report.total_bytes > 1000
    assert ckptkit.verify(report.path).ok
    (line,) = log.lines(logging.WARNING)
    assert line == "the outcome of step 1 could not be sent to all ranks: the store failed"


class _Process:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def request(self, request: Any, _stage: object = None) -> Any:
        self.asked.append((type(request).__name__, request.attempt))
        return StepCommitted(request.attempt, 1, 0.0)


def test_what_failed_saves_left_is_removed_when_nobody_waits_and_not_for_ever() -> None:
    process: Any = _Process()
    barrier = SaveBarrier(Peers(0, 1, LocalKeyValueStore(), "nonce"))
    committer = SaveCommitter(
        barrier, process, retire=lambda *_: (), timeout_seconds=1, listener=None
    )
    saves = [
        Save(n, f"a-{n}", n, Path(), Path(), {"source": {"metrics": {}}}, SaveHandle(n))
        for n in range(2)
    ]
    failure = {"error": SaveError("no").to_json()}
    assert "error" in committer._commit(saves[0], [failure])
    assert process.asked == []
    committer._remove_failed()
    proof = {"proof": {"rank": 0, "path": "x", "size_bytes": 1, "crc32": 0}}
    assert "committed" in committer._commit(saves[1], [proof])
    for _ in range(5):
        committer._remove_failed()
    discard = ("Discard", "a-0")
    assert process.asked == [discard, ("Commit", "a-1"), discard, discard]


def test_an_optimizer_that_accelerate_has_wrapped_is_guarded(run: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer)
    with Checkpointer(run) as saver:
        saver.prepare({"model": model, "optimizer": wrapped})
        saver.save(1, {"model": model, "optimizer": wrapped}).result(SECONDS)


@pytest.mark.slow
def test_a_writer_that_is_stopped_is_noticed_however_long_the_message(run: Path) -> None:
    model = nn.Module()
    for number in range(2_500):
        model.register_parameter(f"layer_{number:060}", nn.Parameter(torch.zeros(1)))
    with Checkpointer(run, stall_seconds=1) as saver:
        saver.prepare({"model": model})
        os.kill(pid_of(writer_of(saver)), signal.SIGSTOP)
        began = time.monotonic()
        error = saver.save(1, {"model": model}).exception(SECONDS)
        assert isinstance(error, WriterError)
        assert "no sign of life for 1 s" in str(error)
        assert time.monotonic() - began < 10
        saver.save(2, {"model": model}).result(SECONDS)


def test_signals_to_the_whole_job_leave_writers_alone(run: Path) -> None:
    state = {"model": nn.Linear(2, 2)}
    with Checkpointer(run) as saver:
        saver.save(1, state).result(SECONDS)
        for process in (writer_of(saver), saver._process):
            pid = pid_of(process)
            assert os.getsid(pid) == pid
            for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGINT", "SIGTERM"):
                os.kill(pid, getattr(signal, name))
        before = pid_of(writer_of(saver))
        saver.save(2, state).result(SECONDS)
        assert pid_of(writer_of(saver)) == before


def open_inodes() -> Iterator[int]:
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that by which the folder was listed
            yield path.stat().st_ino


@pytest.mark.slow
def test_a_forked_child_neither_delays_close_nor_keeps_writers_alive(run: Path) -> None:
    saver = Checkpointer(run)
    saver.save(1, {"model": nn.Linear(2, 2)}).result(SECONDS)
    processes = (writer_of(saver), saver._process)
    pids = [pid_of(process) for process in processes]
    inside = [process._socket for process in processes]
    there = {os.fstat(s.fileno()).st_ino for s in inside if s is not None}
    child = os.fork()
    if child == 0:
        is_clean = not there & set(open_inodes()) and writer_of(saver).pid is None
        saver.close()
        os._exit(0 if is_clean else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert saver._sidecars.folder.is_dir()
    saver.save(2, {"model": nn.Linear(2, 2)}).result(SECONDS)
    began = time.monotonic()
    saver.close()
    assert time.monotonic() - began < 3
    assert not any(map(_is_alive, pids))


ORPHANED = """
import os, signal, sys, time, torch
from ckptkit.training import Checkpointer
saver = Checkpointer(sys.argv[1])
saver.save(1, {"model": torch.nn.Linear(2, 2)}).result(30)
# A copy that no hook closes, as of a process that was started without one.
kept = [os.dup(p._socket.fileno()) for p in (saver._slots[0]._writer, saver._process)]
if os.fork() == 0:
    os.close(1)
    time.sleep(8)
    os._exit(0)
print(saver._slots[0]._writer.pid, saver._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_writers_of_a_killed_trainer_end_though_a_child_of_it_lives(
    run: Path, tmp_path: Path, run_ranks: RunRanks
) -> None:
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    ended = run_ranks(script, 1, run, status=1, limit_seconds=60)
    assert ended.stderr == ""
    pids = [int(text) for text in ended.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 4
    while time.monotonic() < until and any(map(_is_alive, pids)):
        time.sleep(0.05)
    assert not any(map(_is_alive, pids))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_what_lies_beside_the_shards_goes_to_a_new_folder_when_it_changes(
    run: Path, tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("0")
    with Checkpointer(run, sidecar={"note": note}) as saver:
        folders = []
        for step in (1, 2, 3):
            note.write_text(str(step // 2))
            path = saver.save(step, {"model": nn.Linear(2, 2)}).result(SECONDS)
            assert (path / "ckptkit/note.txt").read_text() == str(step // 2)
            folders.append(saver._sidecars.folder)
        assert folders[1] == folders[2] != folders[0]
        assert not folders[0].exists()
        assert folders[2].is_dir()


def test_descriptions_of_killed_jobs_are_swept_and_steps_that_cannot_be_listed_stay(
    run: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    old = run / ".ckptkit/0123abcd/1/ckptkit"
    old.mkdir(parents=True)
    with Checkpointer(run, keep_last=5) as saver:
        assert not old.parents[1].exists()

        def fail() -> Mapping[str, Any]:
            raise OutputError("the run cannot be listed")

        monkeypatch.setattr(saver._run, "steps", fail)
        saver.save(4, {"model": nn.Linear(2, 2)}).result(SECONDS)
    assert any("no step is retired" in line for line in log.lines(logging.WARNING))
    assert not list((run / ".ckptkit").glob("[0-9a-f]*"))


STORE_HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
# Its end takes as long as that of a large program, so that an answer of the store comes within it.
RANK_THAT_ENDS = """
import sys, threading, time
from torch.distributed import TCPStore
from ckptkit.training.agree.key_values import TorchKeyValueStore
store = TorchKeyValueStore(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), "test")
class SlowToEnd:
    def __init__(self, sleep=time.sleep):
        self.sleep = sleep
    def __del__(self):
        self.sleep(3)
slow_to_end = SlowToEnd()
print("ready", flush=True)
sys.stdin.readline()
threading.Thread(target=lambda: store.get("key"), daemon=True).start()
time.sleep(0.2)
store.close()
"""


@pytest.mark.slow
def test_a_rank_ends_well_while_the_store_is_slow_to_answer() -> None:
    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    with start(STORE_HOST) as host:
        assert host.stdout is not None
        port = host.stdout.readline().strip()
        with start(RANK_THAT_ENDS, port) as rank:
            assert rank.stdout is not None
            assert rank.stdin is not None
            assert rank.stdout.readline() == "ready\n"
            os.kill(host.pid, signal.SIGSTOP)
            try:
                rank.stdin.write("\n")
                rank.stdin.flush()
                time.sleep(2.5)
            finally:
                os.kill(host.pid, signal.SIGCONT)
            _, errors = rank.communicate(timeout=SECONDS)
            assert (rank.returncode, errors) == (0, "")
        host.communicate(timeout=SECONDS)
