"""A scene is what a process does, and what must hold after a fault in the middle of it."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.campaigns.chaos.system_calls import (
    IO_ERROR,
    KILL,
    NO_SPACE,
    TERM,
    Fault,
    Reached,
    calls_of,
    can_happen,
    struck,
)

ACTS = (KILL, TERM, NO_SPACE, IO_ERROR)


class LossError(Exception):
    """Something is lost or wrong after a fault; the text says what."""


class Scene(Protocol):
    """A process at its work.

    Attributes:
        process: Which process it is, for the table.
        work: What it does meanwhile.
        sends: Whether what it sends through sockets counts as its calls.
    """

    process: str
    work: str
    sends: bool

    def prepare(self, folder: Path) -> None:
        """Makes what is there before, in a folder that does not exist yet."""

    def play(self, folder: Path, fault: Fault) -> None:
        """Runs the process to its end or death, and checks its answers."""

    def judge(self, folder: Path, fault: Fault, reached: Sequence[Reached]) -> int:
        """Checks what is left, does the same again, and checks that.

        Args:
            folder: As it was prepared.
            fault: What happened; its call is 0 if nothing did.
            reached: The calls that were reached.

        Returns:
            How many steps, outputs or repositories were compared bit by bit.

        Raises:
            LossError: Something is lost or wrong.
        """


@dataclass
class Played:
    """What came of a scene.

    Attributes:
        process: As of the scene.
        work: As of the scene.
        calls: The kinds of the calls without a fault.
        faults: How many happened, by what happened.
        verified: How many steps or outputs were compared afterwards, bit by bit.
        losses: What was lost or wrong, and after which fault.
    """

    process: str
    work: str
    calls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    losses: list[str] = field(default_factory=list)


Choice = Callable[[int], Iterable[int]]


def every_call(count: int) -> Iterable[int]:
    return range(1, count + 1)


def some_calls(seed: str, most: int) -> Choice:
    """Returns what chooses some of the calls, the same ones for the same seed."""

    def choose(count: int) -> Iterable[int]:
        numbers = range(1, count + 1)
        return sorted(random.Random(seed).sample(numbers, min(most, count)))

    return choose


def play(scene: Scene, place: Path, choose: Choice, acts: Sequence[str] = ACTS) -> Played:
    """Plays a scene once as it is, and then with a fault at each of the calls that are chosen."""
    played = Played(scene.process, scene.work)
    stage = _Stage(scene, place, played)
    whole = stage.perform(Fault(KILL, 0, str(place), ""))
    played.calls.update(call.kind for call in whole)
    for act in acts:
        for call in choose(sum(can_happen(act, call) for call in whole)):
            stage.perform(Fault(act, call, str(place), ""))
    return played


@dataclass
class _Stage:
    scene: Scene
    place: Path
    played: Played
    turn: int = 0

    def perform(self, fault: Fault) -> list[Reached]:
        """Plays once; returns the calls that were reached."""
        self.turn += 1
        folder = self.place / str(self.turn)
        log = self.place.with_name(f"{self.place.name}-{self.turn}.calls")
        fault = Fault(fault.act, fault.call, str(folder), str(log), self.scene.sends)
        reached: list[Reached] = []
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
        try:
            self.scene.prepare(folder)
            self.scene.play(folder, fault)
            reached = calls_of(log)
            self.played.verified += self.scene.judge(folder, fault, reached)
        except (LossError, AssertionError) as error:
            at = struck(fault, reached) or ("none", "nothing")
            where = f"{fault.act} at call {fault.call}, {' of '.join(at)}"
            self.played.losses.append(f"{where}: {error}")
        if struck(fault, reached):
            self.played.faults[fault.act] += 1
        log.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return reached


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def require(*, that: bool, otherwise: str) -> None:
    if not that:
        raise LossError(otherwise)
