"""What goes wrong between a node's own disk and the shared place: no step is lost or torn."""

from __future__ import annotations

import array
import dataclasses
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    MissingFileError,
    NoSpaceError,
    OutputError,
    RefusedError,
    TruncatedFileError,
    UsageError,
    WriterError,
)
from ckptkit.storage.local.disk import Disk
from ckptkit.training import Checkpointer
from ckptkit.training.save.writer_process import WriterProcess
from ckptkit.training.tiers.save import TieredCommitter
from ckptkit.writer.commit import commit
from ckptkit.writer.drain import Drainer
from ckptkit.writer.messages import ByteCounter, Drain, RecordProof
from tests.crash import troubles, writing
from tests.files import mounted, tmpfs

NATIVE = Disk()
SECONDS = 30.0
EVERY_PLATFORM = pytest.mark.parametrize(
    "disk", [NATIVE, dataclasses.replace(NATIVE, direct_io=False), Disk.portable()]
)


def fresh(seed: int) -> dict[str, Any]:
    return dict(troubles.state_of(troubles.network(seed), seed))


def opened(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder / "run", local=folder / "node", **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def processes(checkpointer: Checkpointer) -> tuple[WriterProcess, WriterProcess]:
    """Returns what commits on the node, and what drains."""
    backend = checkpointer._committer
    assert isinstance(backend, TieredCommitter)
    return backend._node_process, backend._drain_process


def stop(process: WriterProcess) -> int:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    return process.pid


def kill_when_asked(process: WriterProcess) -> None:
    """Kills a stopped process once a request is there that it does not read."""
    assert process.pid is not None
    until = time.monotonic() + SECONDS
    unread = array.array("i", [0])
    while not unread[0]:
        assert process._socket is not None
        assert time.monotonic() < until
        time.sleep(0.01)
        fcntl.ioctl(process._socket, termios.TIOCOUTQ, unread)
    os.kill(process.pid, signal.SIGKILL)


def lose_drain(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> Any:
    """Trains and saves a step whose drain is killed; returns what is durable on the node only."""
    drains = processes(checkpointer)[1]
    stop(drains)
    troubles.train(state)
    truth = troubles.facts(state)
    handle = checkpointer.save(step, state)
    assert handle.local_result(SECONDS).parent.name == "node"
    kill_when_asked(drains)
    troubles.fails(handle, WriterError, "SIGKILL")
    return truth


def test_a_drain_that_dies_fails_the_save_and_resume_drains_it_anew(tmp_path: Path) -> None:
    state = fresh(1)
    with opened(tmp_path) as checkpointer:
        troubles.saved(checkpointer, 1, state)
        truth = lose_drain(checkpointer, 2, state)
        assert names(tmp_path / "run") == ["checkpoint-1"]
        troubles.resumes(checkpointer, 2, truth, fresh(2))
        truth = troubles.saved(checkpointer, 3, state)
        troubles.resumes(checkpointer, 3, truth, fresh(3))
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert names(tmp_path / "node") == ["checkpoint-3"]


@pytest.mark.slow
def test_a_named_step_does_not_replace_one_that_could_not_be_drained(tmp_path: Path) -> None:
    state = fresh(1)
    with opened(tmp_path) as checkpointer:
        troubles.saved(checkpointer, 1, state)
        truth = lose_drain(checkpointer, 2, state)
        checkpointer.save(3, state, name="kept").result(SECONDS)
        assert names(tmp_path / "run") == ["checkpoint-1", "kept"]
        assert names(tmp_path / "node") == ["checkpoint-2", "kept"]
    with opened(tmp_path) as checkpointer:  # another job, which saves under a name first
        checkpointer.save(4, state, name="kept-too").result(SECONDS)
        troubles.resumes(checkpointer, 2, truth, fresh(2))
        truth = troubles.saved(checkpointer, 5, state)
    assert names(tmp_path / "run") == [
        *("checkpoint-1", "checkpoint-2", "checkpoint-5", "kept", "kept-too")
    ]
    assert names(tmp_path / "node") == ["checkpoint-5"]


@pytest.mark.slow
def test_a_committer_of_the_node_that_dies_fails_one_save(tmp_path: Path) -> None:
    state = fresh(1)
    with opened(tmp_path) as checkpointer:
        troubles.saved(checkpointer, 1, state)
        keeper = processes(checkpointer)[0]
        stop(keeper)
        handle = checkpointer.save(2, state)
        kill_when_asked(keeper)
        troubles.fails(handle, WriterError, "SIGKILL")
        with pytest.raises(WriterError):
            handle.local_result(SECONDS)
        truth = troubles.saved(checkpointer, 3, state)
        troubles.resumes(checkpointer, 3, truth, fresh(2))
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-3"]
    assert troubles.working_folders(tmp_path / "node") == []


@pytest.mark.slow
def test_a_step_saved_again_while_it_is_drained_waits_for_that(tmp_path: Path) -> None:
    state = fresh(1)
    with opened(tmp_path) as checkpointer:
        troubles.saved(checkpointer, 1, state)
        pid = stop(processes(checkpointer)[1])
        troubles.train(state)
        first = checkpointer.save(2, state)
        first.local_result(SECONDS)
        troubles.train(state)
        truth = troubles.facts(state)
        second = checkpointer.save(2, state)
        with pytest.raises(TimeoutError):
            second.local_result(0.5)
        os.kill(pid, signal.SIGCONT)
        assert first.result(SECONDS) == second.result(SECONDS)
        troubles.resumes(checkpointer, 2, truth, fresh(2))


def test_a_damaged_step_of_the_node_is_not_drained(tmp_path: Path) -> None:
    state = fresh(1)
    checkpointer = opened(tmp_path)
    truth = troubles.saved(checkpointer, 1, state)
    drains = processes(checkpointer)[1]
    stop(drains)
    handle = checkpointer.save(2, state)
    local = handle.local_result(SECONDS)
    kill_when_asked(drains)
    troubles.fails(handle, WriterError, "SIGKILL")
    checkpointer.close()
    file = local / "pytorch_model_fsdp_0/__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with opened(tmp_path) as checkpointer:
        troubles.resumes(checkpointer, 1, truth, fresh(2))
        assert names(tmp_path / "run") == ["checkpoint-1"]


def undrained(folder: Path, *steps: int, **named: str) -> list[dict[str, Any]]:
    """Leaves whole steps on the node that the shared place lacks, as a kill does."""
    state, truths = fresh(1), []
    with opened(folder) as checkpointer:
        troubles.saved(checkpointer, 1, state)
        drains = processes(checkpointer)[1]
        stop(drains)
        handles = []
        for step in steps:
            troubles.train(state)
            truths.append(troubles.facts(state))
            handles.append(checkpointer.save(step, state, name=named.get(f"at_{step}")))
            handles[-1].local_result(SECONDS)
        shutil.copytree(folder / "node", folder / "left")
        assert drains.pid is not None
        os.kill(drains.pid, signal.SIGKILL)
        for handle in handles:
            handle.exception(SECONDS)
    shutil.rmtree(folder / "node")
    (folder / "left").rename(folder / "node")
    for path in (folder / "run").iterdir():
        if path.name not in {".ckptkit", "checkpoint-1"}:
            shutil.rmtree(path)
    return truths


@pytest.mark.slow
def test_a_damaged_step_of_the_node_does_not_hide_the_one_before(tmp_path: Path) -> None:
    truth, _ = undrained(tmp_path, 2, 3)
    (tmp_path / "node/checkpoint-3/.ranks/0.json").write_bytes(b"{}" * 40)
    with troubles.listening() as log, opened(tmp_path) as checkpointer:
        troubles.resumes(checkpointer, 2, truth, fresh(2))
        assert "checkpoint-3" in "".join(log.lines(logging.WARNING))
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.slow
def test_a_step_with_a_name_of_its_own_is_drained_beside_the_newest_and_once(
    tmp_path: Path,
) -> None:
    best, newest = undrained(tmp_path, 2, 3, at_2="best")
    with opened(tmp_path) as checkpointer:
        troubles.resumes(checkpointer, 3, newest, fresh(2))
        assert names(tmp_path / "run") == ["best", "checkpoint-1", "checkpoint-3"]
        state = fresh(3)
        checkpointer.resume(state, folder=tmp_path / "run/best")
        assert troubles.facts(state) == best
        checkpointer.save(4, state, name="best").result(SECONDS)
    before = (tmp_path / "run/best").stat().st_ino
    opened(tmp_path).close()
    assert (tmp_path / "run/best").stat().st_ino == before


@pytest.mark.slow
def test_what_another_run_left_on_the_node_is_never_taken_for_a_step(tmp_path: Path) -> None:
    undrained(tmp_path, 2)
    with pytest.raises(RefusedError, match="'checkpoint-2', which was not drained") as caught:
        Checkpointer(tmp_path / "other", local=tmp_path / "node")
    assert str(tmp_path / "run") in str(caught.value)
    opened(tmp_path).close()  # drains it
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    with troubles.listening() as log:
        opened(tmp_path).close()
        assert "does not have it any more" in "".join(log.lines(logging.WARNING))
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    shutil.rmtree(tmp_path / "run")
    with opened(tmp_path) as checkpointer:  # begun anew in the same place
        assert checkpointer.resume(fresh(2)) is None
    assert names(tmp_path / "node") == []


@pytest.mark.slow
def test_a_shared_place_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    state = fresh(1)
    with opened(tmp_path) as checkpointer:
        troubles.saved(checkpointer, 1, state)
        (tmp_path / "run").rename(tmp_path / "away")
        troubles.train(state)
        truth = troubles.facts(state)
        troubles.fails(checkpointer.save(2, state), OutputError, "not exist any more")
        assert not (tmp_path / "run").exists()
        (tmp_path / "away").rename(tmp_path / "run")
        troubles.resumes(checkpointer, 2, truth, fresh(2))
        troubles.saved(checkpointer, 3, state)


@pytest.mark.slow
def test_a_write_and_a_drain_that_take_long_say_in_the_log_how_far_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptkit.training.save.writer_process")
    state, trouble = fresh(1), troubles.Trouble(tmp_path / "trouble")
    with trouble.writers(), opened(tmp_path) as checkpointer:
        troubles.saved(checkpointer, 1, state)
        assert not caplog.messages  # it was quick
        with trouble.of("slow"):
            troubles.saved(checkpointer, 2, state)
        pid = stop(processes(checkpointer)[1])
        handle = checkpointer.save(3, state)
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)
        handle.result(SECONDS)
    written, drained = caplog.messages
    line = r"writing step 2, rank 0: [1-9][\d.]*kB of 3\d\dkB \(\d+%\), [\d.]+kB/s, \d\d:\d\d left"
    assert re.fullmatch(line, written)
    assert re.match(r"draining step 3, rank 0: 0\.00B of 3\d\dkB \(0%\), ", drained)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_close_that_is_interrupted_in_a_drain_can_go_on_and_an_exit_leaves_it(
    tmp_path: Path,
) -> None:
    state = fresh(1)
    checkpointer = opened(tmp_path)
    troubles.saved(checkpointer, 1, state)
    pid = stop(processes(checkpointer)[1])
    handle = checkpointer.save(2, state)
    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not handle.done()
    os.kill(pid, signal.SIGCONT)
    checkpointer.close()
    assert handle.result().name == "checkpoint-2"

    checkpointer = opened(tmp_path, timeout_seconds=3.0)
    troubles.saved(checkpointer, 3, state)
    stop(processes(checkpointer)[1])
    troubles.train(state)
    truth = troubles.facts(state)
    handle = checkpointer.save(4, state)  # a further one would have the process started again
    handle.local_result(SECONDS)
    checkpointer._close_at_exit()
    assert handle.exception() is not None
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    with opened(tmp_path) as checkpointer:
        troubles.resumes(checkpointer, 4, truth, fresh(2))


def test_a_directory_within_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="or inside of it"):
        Checkpointer(tmp_path / "run", local=tmp_path / "run/nodes/0")
    assert names(tmp_path / "run") == []


@pytest.mark.slow
def test_a_step_without_its_optimizer_is_united_without_it(tmp_path: Path) -> None:
    state = fresh(1)
    parameter = next(iter(state["model"].parameters()))
    with opened(tmp_path) as checkpointer:
        troubles.train(state)
        state["optimizer"].state[parameter]["odd"] = torch.zeros(2, 2).to_sparse()
        assert "optimizer" in checkpointer.save(1, state).report(SECONDS).lost
    whole, parts = (ckptkit.inspect(tmp_path / place) for place in ("run", "node"))
    assert whole.tensors == parts.tensors
    assert parts.problems == ()
    assert ckptkit.verify(tmp_path / "node").ok


def test_a_second_job_on_the_node_is_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path),
        pytest.raises(RefusedError, match="another job is writing"),
    ):
        Checkpointer(tmp_path / "other", local=tmp_path / "node")


def test_a_full_shared_place_fails_the_save_and_leaves_the_step_on_the_node(
    tmp_path: Path,
) -> None:
    state = fresh(1)
    with mounted(tmp_path / "run", *tmpfs("100k")), opened(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state)
        assert handle.local_result(SECONDS) == tmp_path / "node/checkpoint-1"
        troubles.fails(handle, NoSpaceError, "full")
        assert names(tmp_path / "run") == []
        assert troubles.working_folders(tmp_path / "run") == []
        with pytest.raises(NoSpaceError, match="full"):
            checkpointer.resume(fresh(2))
        assert ckptkit.verify(tmp_path / "node").ok


@pytest.mark.slow
def test_a_state_too_large_for_the_memory_and_the_node_fails_clearly(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "node", *tmpfs("100k")),
        opened(tmp_path, staging_limit="3MB") as checkpointer,
    ):
        state = dict(troubles.state_of(troubles.network(1, 20_000), 1))
        troubles.train(state)
        troubles.fails(checkpointer.save(1, state), NoSpaceError, "full")
        truth = troubles.saved(checkpointer, 2, fresh(1))
        troubles.resumes(checkpointer, 2, truth, fresh(2))


def kept_on_nodes(folder: Path, attempts: tuple[str, str]) -> tuple[list[Any], list[RecordProof]]:
    """Makes a step of two ranks, of which each lies on a node of its own, not drained yet."""
    saves = [
        writing.Save(folder / node, world_size=2, attempt=attempt)
        for node, attempt in zip("ab", attempts, strict=True)
    ]
    proofs = []
    for rank, save in enumerate(saves):
        memory, request = save.persist(rank, writing.usual_units(rank, 2))
        proof = writing.persist(memory, request).proof
        assert proof is not None
        proofs.append(proof)
        whole = save.commit([proof], node_ranks=(rank,))
        source = {"step": save.step, "attempt": save.attempt, "world_size": 2}
        document = {**whole.manifest, "source": source}
        commit(replace(whole, manifest=document), NATIVE, ByteCounter())
    return saves, proofs


def drained(save: Any, rank: int, target: Path, disk: Disk = NATIVE) -> int:
    records = (f".ranks/{rank}.json",)
    request = Drain(save.attempt, str(save.final), str(target), records)
    return Drainer(disk).drain(request, ByteCounter()).size_bytes


@EVERY_PLATFORM
def test_drained_parts_commit_to_what_was_written(tmp_path: Path, disk: Disk) -> None:
    saves, proofs = kept_on_nodes(tmp_path, ("0123abcd-1", "0123abcd-1"))
    shared = writing.Save(tmp_path / "run", world_size=2)
    shared.run.mkdir()
    for rank, save in enumerate(saves):
        held = [path for path in save.final.rglob("*") if path.is_file()]
        size_bytes = sum(path.stat().st_size for path in held if path.name != "ckptkit.json")
        assert drained(save, rank, shared.folder, disk) == size_bytes
    commit(shared.commit(proofs), NATIVE, ByteCounter())
    assert ckptkit.verify(shared.final).ok
    for save in saves:
        for path in save.final.rglob("*.distcp"):
            there = shared.final / path.relative_to(save.final)
            assert there.read_bytes() == path.read_bytes()
    assert ckptkit.diff(shared.final, tmp_path / "run").same


def test_parts_of_two_saves_are_not_united(tmp_path: Path) -> None:
    saves, _ = kept_on_nodes(tmp_path, ("0123abcd-1", "0123abcd-2"))
    with pytest.raises(CkptkitError, match="where copies of one save were expected"):
        ckptkit.consolidate(saves[0].run, tmp_path / "out", also=[saves[1].run])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("world_size", 10**15, "ranks 2, 3, .* and 999,999,999,999,990 more"),
        ("world_size", 0, "does not say how many ranks"),
        ("node_ranks", ["x", None], "the files of rank 0 of 2"),
    ],
)
def test_a_part_that_tells_nonsense_is_not_united(
    tmp_path: Path, key: str, value: object, text: str
) -> None:
    saves, _ = kept_on_nodes(tmp_path, ("0123abcd-1", "0123abcd-1"))
    file = saves[0].final / "ckptkit.json"
    document = json.loads(file.read_text())
    document["source"][key] = value
    document.pop("checksum", None)
    file.write_text(json.dumps(document))
    with pytest.raises(CkptkitError, match=text):
        ckptkit.verify(saves[0].run, also=[saves[1].run])
    record = saves[1].final / ".ranks/1.json"
    record.write_bytes(record.read_bytes().replace(b'"chunks"', b'"junks"'))
    document["source"] |= {"world_size": 2, "node_ranks": [0]}
    document.pop("checksum", None)
    file.write_text(json.dumps(document))
    with pytest.raises(CkptkitError, match=r"garbled .*\.ranks/1\.json"):
        ckptkit.verify(saves[0].run, also=[saves[1].run])


def test_what_is_missing_or_cut_short_on_the_node_is_not_drained(tmp_path: Path) -> None:
    saves, _ = kept_on_nodes(tmp_path, ("0123abcd-1", "0123abcd-1"))
    file = next(saves[0].final.rglob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(TruncatedFileError) as caught:
        drained(saves[0], 0, tmp_path / "x")
    assert caught.value.where == str(file)
    file.unlink()
    with pytest.raises(MissingFileError):
        drained(saves[0], 0, tmp_path / "y")
    (saves[0].final / ".ranks/0.json").unlink()
    with pytest.raises(MissingFileError):
        drained(saves[0], 0, tmp_path / "z")


def test_files_of_any_size_are_drained_as_they_are(tmp_path: Path) -> None:
    sizes = (0, 1, 4096, (8 << 20) - 1, (8 << 20) + 4097)
    folder, target = tmp_path / "node", tmp_path / "shared"
    (folder / ".ranks").mkdir(parents=True)
    for size in sizes:
        (folder / str(size)).write_bytes(os.urandom(size))
    files = [{"path": str(size), "size_bytes": size, "crc32": None} for size in sizes]
    record = {"rank": 0, "world_size": 1, "attempt": "x", "units": {}, "files": files}
    (folder / ".ranks/0.json").write_text(json.dumps(record))
    request = Drain("x", str(folder), str(target), (".ranks/0.json",), ("1",))
    Drainer(NATIVE).drain(request, ByteCounter())
    for size in sizes:
        assert (target / str(size)).read_bytes() == (folder / str(size)).read_bytes()
    assert (target / ".ranks/beside/1").read_bytes() == (folder / "1").read_bytes()


@pytest.mark.slow
def test_files_that_steps_have_in_common_are_linked_at_the_shared_place_too(
    tmp_path: Path,
) -> None:
    state = fresh(1)
    state["model"][0].requires_grad_(requires_grad=False)
    run = tmp_path / "run"
    with opened(tmp_path) as checkpointer:
        for step in (1, 2):
            troubles.saved(checkpointer, step, state)
        with torch.no_grad():
            state["model"][0].weight.add_(1)
        truth = troubles.saved(checkpointer, 3, state)
        troubles.resumes(checkpointer, 3, truth, fresh(2))
    inodes = [
        {file.stat().st_ino for file in (run / f"checkpoint-{step}/pytorch_model_fsdp_0").iterdir()}
        for step in (1, 2, 3)
    ]
    assert len(inodes[0] & inodes[1]) == 1
    assert not inodes[1] & inodes[2]
    for step in (1, 2, 3):
        assert ckptkit.verify(run / f"checkpoint-{step}").ok
