"""The processes of a save on disks: what writes, commits, and drains to the shared place."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import ckptkit
from ckptkit.core.manifest import MANIFEST_NAME
from ckptkit.writer import process
from ckptkit.writer.messages import (
    Channel,
    Discard,
    Drain,
    Failed,
    RecordProof,
    StepCommitted,
    Written,
)
from ckptkit.writer.sweep import leftovers, sweep
from tests.campaigns.chaos.scenes import LossError, contents, require
from tests.campaigns.chaos.system_calls import ERRORS, KILL, NO_SPACE, Fault, Reached, arm, struck
from tests.crash import writing

PROGRAM = """
from ckptkit.writer.process import main
from tests.campaigns.chaos.system_calls import Fault, arm
import ckptkit.writer.commit, ckptkit.writer.drain
arm(Fault(**{fault!r}))
main()
"""
OLD, NEW = 0, 1  # what the content of a step is made of
BEFORE, STEP = 400, 500
RANKS = 2


class Child:
    """A forked process, as `subprocess` shows one that it has started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def wait(self, _: float) -> None:
        os.waitpid(self._pid, 0)


class ForkedWriter(writing.Writer):
    """A writer that is a fork of this process, which has no other threads: it starts at once."""

    def __init__(self, fault: Fault | None) -> None:
        self.connection, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            self.connection.close()
            sys.argv = ["writer", str(theirs.detach()), "0"]
            if fault is not None:
                arm(fault)
            process.main()
            os._exit(0)
        theirs.close()
        self.connection.settimeout(60)
        self.process: Any = Child(child)
        self.channel = Channel(self.connection)
        self.heard = []


def doomed_writer(fault: Fault | None) -> writing.Writer:
    """Starts a writer with a fault in the middle of its work, or a healthy one."""
    if threading.active_count() == 1:
        return ForkedWriter(fault)
    if fault is None:
        return writing.Writer()
    return writing.Writer(PROGRAM.format(fault=vars(fault)))


def data_of(step: Path) -> dict[str, bytes]:
    """Returns the files of a step but the manifest, which has the number of the attempt."""
    return {path: data for path, data in contents(step).items() if path != MANIFEST_NAME}


@cache
def model_of(place: str) -> tuple[Path, dict[int, dict[str, bytes]]]:
    """Returns a run with two steps, and what the later one has, old and new."""
    run = Path(place) / "run"
    shutil.rmtree(run.parent, ignore_errors=True)
    with doomed_writer(None) as writer:
        writing.save_whole(writing.Save(run, "a-9", RANKS), writer, salt=NEW)
        new = data_of(run / f"checkpoint-{STEP}")
        shutil.rmtree(run)
        writing.save_whole(writing.Save(run, "a-0", RANKS, BEFORE), writer)
        writing.save_whole(writing.Save(run, "a-1", RANKS), writer, salt=OLD)
    return run, {OLD: data_of(run / f"checkpoint-{STEP}"), NEW: new}


class Dead(Exception):  # noqa: N818  no error: what the scene is about
    """The process is gone."""


def asked(writer: writing.Writer, request: Any) -> Written | StepCommitted | Failed:
    answer = writer.ask(request)
    if answer is None:
        raise Dead
    return answer


def persisted(writer: writing.Writer, save: writing.Save, ranks: Sequence[int]) -> Any:
    """Returns the proofs of ranks, or what failed."""
    proofs = []
    for rank in ranks:
        memory, request = save.persist(rank, writing.usual_units(rank, RANKS, salt=NEW))
        try:
            writer.share(memory)
        except OSError as error:
            raise Dead from error
        answer = asked(writer, request)
        if isinstance(answer, Failed):
            return answer
        assert isinstance(answer, Written)
        proofs.append(answer.proof)
    return proofs


def see_steps(run: Path, whole: dict[int, dict[str, bytes]], where: str) -> str:
    """Checks the steps that are visible; returns which content the later one has."""
    for path in run.iterdir():
        if not path.name.startswith("."):
            require(that=ckptkit.verify(path).ok, otherwise=f"{where}: {path.name} is not whole")
    before, step = run / f"checkpoint-{BEFORE}", run / f"checkpoint-{STEP}"
    require(that=before.is_dir() or step.is_dir(), otherwise=f"{where}: no step is left")
    if not step.is_dir():
        return "none"
    found = data_of(step)
    for kind, name in ((OLD, "old"), (NEW, "new")):
        if found == whole[kind]:
            kept = before.is_dir() or kind == NEW
            require(that=kept, otherwise=f"{where}: a step was retired before its successor")
            return name
    raise LossError(f"{where}: the step has neither the old bytes nor the new")


@dataclass
class Saving:
    """A process that writes the files of two ranks, commits them over a step, and retires one."""

    place: Path
    process: str = "writer and committer"
    work: str = "a save of two ranks that replaces a step and retires another"
    sends: bool = True
    committed: bool = False

    def prepare(self, folder: Path) -> None:
        shutil.copytree(model_of(str(self.place))[0], folder)

    def play(self, folder: Path, fault: Fault) -> None:
        save = writing.Save(folder, "a-2", RANKS)
        self.committed = False
        with doomed_writer(fault) as writer:
            try:
                proofs = persisted(writer, save, range(RANKS))
                failed = isinstance(proofs, Failed)
                retired = (str(folder / f"checkpoint-{BEFORE}"),)
                if not failed:
                    answer = asked(writer, save.commit(proofs, remove=retired))
                    self.committed = isinstance(answer, StepCommitted)
                if not self.committed and fault.act != NO_SPACE:
                    _go_on(writer, folder, save)
            except Dead:
                assert fault.act == KILL, "the process is gone"

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        whole = model_of(str(self.place))[1]
        seen = see_steps(folder, whole, "after the fault")
        if self.committed:
            require(that=seen == "new", otherwise=f"the step was reported, and is {seen}")
            check_reported(fault, reached)
        sweep(folder)
        require(that=leftovers(folder) == (), otherwise="something is left after a sweep")
        swept = see_steps(folder, whole, "after a sweep")
        require(that=swept != "none", otherwise="the step is gone")
        with doomed_writer(None) as writer:
            writing.save_whole(writing.Save(folder, "a-3", RANKS), writer, salt=NEW)
        require(that=see_steps(folder, whole, "again") == "new", otherwise="again: not saved")
        return 2


def _go_on(writer: writing.Writer, folder: Path, save: writing.Save) -> None:
    """After an error that has passed, the process saves the next step."""
    asked(writer, Discard(save.attempt, str(save.folder)))
    other = writing.Save(folder, "a-4", RANKS, STEP + 100)
    proofs = persisted(writer, other, range(RANKS))
    assert not isinstance(proofs, Failed), f"the next save failed: {proofs}"
    answer = asked(writer, other.commit(proofs))
    assert isinstance(answer, StepCommitted), f"the next save failed: {answer}"


_MAY_FAIL = {("write", "journal"), ("sync", "journal"), ("open", "journal"), ("open", ".metadata")}
"""An output is as good without what an interrupted command could go on with. To be locked, a file
that cannot be opened for writing is opened for reading."""


def check_reported(fault: Fault, reached: Sequence[Reached], beside: str = "") -> None:
    """What was written is reported durable: nothing that it is made of may have failed."""
    failed = struck(fault, reached)
    if fault.act not in ERRORS or failed is None:
        return
    kind, path = failed
    # Of what is replaced or retired, which notes say; and of folders that are there already.
    fine = {"remove", "send", "rename", "mkdir"}
    is_fine = kind in fine or (kind, Path(path).name) in _MAY_FAIL
    is_fine |= bool(beside) and path.startswith(beside)
    # A temporary file without a name, for which the library takes one with a name.
    is_fine |= kind == "open" and ".ckptkit-" in Path(path).name
    require(that=is_fine, otherwise="the error was passed over in silence")


@cache
def node_steps(place: str) -> tuple[Path, list[RecordProof], dict[str, bytes]]:
    """Returns the folders of two nodes, each with its part of a step, and what the step has."""
    nodes = Path(place) / "nodes"
    shutil.rmtree(nodes.parent, ignore_errors=True)
    proofs = []
    with doomed_writer(None) as writer:
        for rank in range(RANKS):
            proofs += keep_part(writer, nodes / str(rank), rank)
        whole = writing.Save(Path(place) / "whole", world_size=RANKS)
        writing.save_whole(whole, writer, salt=NEW)
    return nodes, proofs, data_of(whole.final)


def part_of(node: Path) -> writing.Save:
    return writing.Save(node, world_size=RANKS)


def keep_part(writer: writing.Writer, node: Path, rank: int) -> Any:
    """Has the part of a rank committed on its node; returns its proof, or what failed."""
    save = part_of(node)
    proofs = persisted(writer, save, [rank])
    if isinstance(proofs, Failed):
        return proofs
    whole = save.commit(proofs, node_ranks=(rank,))
    source = {"step": save.step, "attempt": save.attempt, "world_size": RANKS}
    answer = asked(writer, replace(whole, manifest={**whole.manifest, "source": source}))
    return proofs if isinstance(answer, StepCommitted) else answer


def check_part(node: Path, rank: int, place: str) -> None:
    """Sees that a node's part of the step is there, bit by bit."""
    expected = node_steps(place)[0] / str(rank)
    name = part_of(node).final.name
    require(
        that=data_of(node / name) == data_of(expected / name),
        otherwise=f"the part of node {rank} is not what it was",
    )


@dataclass
class Keeping:
    """A process that commits a rank's part of a step on its node's own disk."""

    place: Path
    process: str = "committer of a node"
    work: str = "a rank's part of a step on the node's own disk"
    sends: bool = True
    committed: bool = False

    def prepare(self, folder: Path) -> None:
        folder.mkdir()

    def play(self, folder: Path, fault: Fault) -> None:
        self.committed = False
        with doomed_writer(fault) as writer:
            try:
                answer = keep_part(writer, folder, 0)
                self.committed = not isinstance(answer, Failed)
            except Dead:
                assert fault.act == KILL, "the process is gone"

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        final = part_of(folder).final
        if final.exists():
            check_part(folder, 0, str(self.place))
        elif self.committed:
            raise LossError("the part was reported, and is not there")
        if self.committed:
            check_reported(fault, reached)
        sweep(folder)
        shutil.rmtree(final, ignore_errors=True)
        with doomed_writer(None) as writer:
            assert not isinstance(keep_part(writer, folder, 0), Failed)
        check_part(folder, 0, str(self.place))
        return 1 + self.committed


@dataclass
class Draining:
    """A process that copies the parts of two nodes to the shared place, and commits the step."""

    place: Path
    process: str = "drain"
    work: str = "a step from two nodes to the shared place, and its commit there"
    sends: bool = True
    committed: bool = False

    def prepare(self, folder: Path) -> None:
        shutil.copytree(node_steps(str(self.place))[0], folder / "nodes")
        shutil.copytree(model_of(str(self.place.with_name("model")))[0], folder / "run")

    def play(self, folder: Path, fault: Fault) -> None:
        self.committed = False
        with doomed_writer(fault) as writer:
            try:
                self.committed = self._drain(writer, folder, "0123abcd-1", fault)
            except Dead:
                assert fault.act == KILL, "the process is gone"

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        whole = model_of(str(self.place.with_name("model")))[1]
        seen = see_steps(folder / "run", whole, "after the fault")
        if self.committed:
            require(that=seen == "new", otherwise=f"the step was reported, and is {seen}")
            check_reported(fault, reached)
        for rank in range(RANKS):
            check_part(folder / "nodes" / str(rank), rank, str(self.place))
        sweep(folder / "run")
        require(that=leftovers(folder / "run") == (), otherwise="something is left after a sweep")
        with doomed_writer(None) as writer:
            assert self._drain(writer, folder, "0123abcd-1", dataclasses.replace(fault, call=0))
        seen = see_steps(folder / "run", whole, "again")
        require(that=seen == "new", otherwise=f"again: the step is {seen}")
        return RANKS + 2

    def _drain(self, writer: writing.Writer, folder: Path, attempt: str, fault: Fault) -> bool:
        shared = writing.Save(folder / "run", attempt, RANKS)
        for rank in range(RANKS):
            source = str(part_of(folder / "nodes" / str(rank)).final)
            request = Drain(attempt, source, str(shared.folder), (f".ranks/{rank}.json",))
            if isinstance(asked(writer, request), Failed):
                assert fault.act in ERRORS
                return False
        retired = (str(folder / "run" / f"checkpoint-{BEFORE}"),)
        proofs = node_steps(str(self.place))[1]
        return isinstance(asked(writer, shared.commit(proofs, remove=retired)), StepCommitted)


@dataclass
class Discarding:
    """A process that removes the working folder of an attempt that failed."""

    place: Path
    process: str = "committer"
    work: str = "the removal of a failed attempt"
    sends: bool = True

    def prepare(self, folder: Path) -> None:
        shutil.copytree(model_of(str(self.place))[0], folder)
        with doomed_writer(None) as writer:
            assert not isinstance(persisted(writer, self._attempt(folder), [0, 1]), Failed)

    def play(self, folder: Path, fault: Fault) -> None:
        attempt = self._attempt(folder)
        with doomed_writer(fault) as writer:
            try:
                asked(writer, Discard(attempt.attempt, str(attempt.folder)))
            except Dead:
                assert fault.act == KILL, "the process is gone"

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:  # noqa: ARG002
        whole = model_of(str(self.place))[1]
        require(
            that=see_steps(folder, whole, "after the fault") == "old",
            otherwise="the step changed",
        )
        sweep(folder)
        require(that=leftovers(folder) == (), otherwise="something is left after a sweep")
        return 1

    def _attempt(self, folder: Path) -> writing.Save:
        return writing.Save(folder, "a-5", RANKS)
