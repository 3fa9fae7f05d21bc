"""Frozen weights are written once: later saves link the files, for as long as nothing raises doubt.

What does: another tensor, another place in memory, a version counter of torch that went on, a
state dict that was loaded, a hundredth of the bytes (another one in each save) whose CRC-32 is
not that of what was written, and a file that is not the one that was written any more.

Weights that change from save to save though they are not trained, such as an average of others,
are written like trained ones, so that the rest can be linked.
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ckptkit.core.crc import crc32
from ckptkit.runs.marks import MARKS_FOLDER
from ckptkit.training.save.attempts import SaveAttempt
from ckptkit.training.save.file_layout import SavePlan
from ckptkit.training.save.staging import Stager
from ckptkit.training.state.frozen_watch import FileMark, VersionWatch
from ckptkit.training.state.pieces import Entry, Piece
from ckptkit.writer.messages import Image, Link, Written

logger = logging.getLogger(__name__)
_FOLDER = "frozen"


@dataclass(frozen=True, slots=True)
class WaveFiles:
    """What the writer is told of the files of one wave.

    Attributes:
        images: Those to write from the buffer.
        links: Those to link, which an earlier save wrote.
        keeps: Those of the images that later saves may link.
        ranges: What of the buffer is to be summed up.
        heard: Is told the answer, in the thread that waited for it.
    """

    images: tuple[Image, ...]
    links: tuple[Link, ...] = ()
    keeps: tuple[Link, ...] = ()
    ranges: Sequence[tuple[int, int]] = ()
    heard: Callable[[Written], object] = lambda _: None


@dataclass(frozen=True, slots=True)
class SaveFiles:
    """How one save comes by its files.

    Attributes:
        waves: What is staged and written, wave after wave.
        frozen: Whether frozen weights are among it.
    """

    waves: tuple[WaveFiles, ...]
    frozen: bool


@dataclass(slots=True)
class _Kept:
    """Frozen weights on the disk under names of their own, and how they lay in memory.

    Attributes:
        folder: Where the files lie.
        run: The run's directory.
        epoch: When they were looked at.
        layout: Of the files, as `SavePlan.frozen` has it.
        watches: The weights as they were, in the order of their first bytes.
        links: The files.
        marks: By which the files are recognised.
        sums: The CRC-32 of each part of each weight.
        lent: Names of the attempts that were to link the files, and have not yet done so.
    """

    folder: Path
    run: Path
    epoch: object
    layout: tuple[object, ...]
    watches: tuple[VersionWatch, ...]
    links: list[Link] = field(default_factory=list)
    marks: list[FileMark] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    lent: set[str] = field(default_factory=set)


class _Doubt(NamedTuple):
    """Why files may not hold the weights, and which weights were seen to have changed."""

    reason: str
    changed: frozenset[Entry] = frozenset()

    @classmethod
    def about(cls, pieces: Sequence[Piece], what: str) -> _Doubt:
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return cls(f"{pieces[0].key}{more} {what}", frozenset(piece.entry for piece in pieces))


class FrozenFiles:
    """What the saves of one job have in common of this rank's frozen weights.

    One thread begins saves, others hear what came of them, and the garbage collector may call
    `forget` in the middle of anything: there is no lock, and every change is a single operation.

    Attributes:
        restless: The weights that were found changed in two saves in a row; plans made from now
            on have to take them for trained ones.
    """

    def __init__(self, nonce: str, rank: int, in_flight: int) -> None:
        """Makes nothing yet.

        Args:
            nonce: Names the job's folder in the run.
            rank: Of this process.
            in_flight: How many saves may be under way, the next one included.
        """
        self._place = Path(MARKS_FOLDER, nonce, _FOLDER)
        self._rank = rank
        self._in_flight = in_flight
        self.restless: frozenset[Entry] = frozenset()
        self._changed: frozenset[Entry] = frozenset()  # in the save before
        self._kept: _Kept | None = None
        self._epoch = object()
        self._forgotten = False  # since the last save
        self._refused = False
        self._round = 0
        self._folders: dict[Path, None] = {}
        self._recent: deque[Path | None] = deque(maxlen=in_flight)  # those of saves under way

    def forget(self) -> None:
        """Has the next save write everything, as after loading."""
        self._epoch = object()
        self._forgotten |= self._kept is not None
        self._kept = None

    def files_for(
        self, plan: SavePlan, pieces: Sequence[Piece], stager: Stager, attempt: SaveAttempt
    ) -> SaveFiles:
        """Returns how a save comes by its files.

        Args:
            plan: Where its bytes go.
            pieces: What it holds.
            stager: Of the buffer, which is not in use.
            attempt: What is tried.
        """
        kept = self._kept
        if not any(plan.samples):
            return self._written(plan, pieces, attempt)
        if kept is not None:
            doubt = next(self._doubts(kept, plan, pieces, stager, attempt), None)
            if doubt is None:
                self._changed = frozenset()
                return self._linking(kept, plan, attempt)
            self._mind(doubt, attempt)
        elif self._forgotten:
            self._mind(_Doubt("a state was loaded, or one of them is gone"), attempt)
        return self._written(plan, pieces, attempt)

    def close(self) -> None:
        """Removes the names under which files are kept; the steps have their own."""
        self.forget()
        self._recent.clear()
        above = {folder for path in self._folders for folder in list(path.parents)[:2]}
        self._clear()
        for folder in sorted(above, reverse=True):
            with suppress(OSError):  # other ranks have something there, or have removed it
                folder.rmdir()

    def _doubts(
        self,
        kept: _Kept,
        plan: SavePlan,
        pieces: Sequence[Piece],
        stager: Stager,
        attempt: SaveAttempt,
    ) -> Iterator[_Doubt]:
        """Yields why the files may not hold the weights; what takes longest is seen last."""
        if kept.epoch is not self._epoch:
            yield _Doubt("a state was loaded")
        if len(kept.lent) >= self._in_flight:  # more than can be under way
            yield _Doubt("they could not be linked")
        if kept.run != attempt.folder.parent or kept.layout != plan.frozen:
            yield _Doubt("they are other ones, or lie otherwise")
        there = zip(kept.watches, _frozen(plan, pieces), strict=True)
        changed = [piece for watch, piece in there if not watch.still_holds(piece)]
        if changed:
            yield _Doubt.about(changed, "changed, or became another tensor")
        for mark in kept.marks:
            if not mark.still_holds():
                yield _Doubt(f"{mark.path} was changed, or has as many links as it may have")
        changed = self._other_bytes(kept, plan, pieces, stager)
        if changed:
            yield _Doubt.about(changed, "changed, and torch did not count it")

    def _other_bytes(
        self, kept: _Kept, plan: SavePlan, pieces: Sequence[Piece], stager: Stager
    ) -> list[Piece]:
        """Returns weights that changed without torch's knowing; looks at one part of each."""
        changed: list[Piece] = []
        turn, at = self._round, 0
        self._round += 1
        for samples in plan.samples:  # waves lie in the same place of the buffer
            steps = [sample.part(turn % len(sample)) for sample in samples]
            found = stager.fetch(plan, pieces, steps)
            for sample, data in zip(samples, found, strict=True):
                if crc32(data) != kept.sums[at + turn % len(sample)]:
                    changed.append(pieces[sample.step.piece])
                at += len(sample)
        return changed

    def _mind(self, doubt: _Doubt, attempt: SaveAttempt) -> None:
        """Says why all is written, and notes which weights changed since the save before."""
        logger.info("step %d: frozen weights are written again: %s", attempt.step, doubt.reason)
        again = self._changed & doubt.changed
        self._changed = doubt.changed
        if again:
            self.restless |= again
            logger.info(
                "%d of them change from save to save, and are written with each from now on",
                len(again),
            )

    def _linking(self, kept: _Kept, plan: SavePlan, attempt: SaveAttempt) -> SaveFiles:
        kept.lent.add(attempt.name)
        self._recent.append(kept.folder)

        def heard(_: Written) -> None:
            kept.lent.discard(attempt.name)
            self._clear()

        waves = list(map(WaveFiles, plan.trained))
        waves[-1] = WaveFiles(plan.trained[-1], links=tuple(kept.links), heard=heard)
        return SaveFiles(tuple(waves), frozen=False)

    def _written(self, plan: SavePlan, pieces: Sequence[Piece], attempt: SaveAttempt) -> SaveFiles:
        self._kept, self._forgotten = None, False
        if any(plan.samples) and not self._refused:
            return self._keeping(plan, pieces, attempt)
        if not self._folders:
            return SaveFiles(tuple(map(WaveFiles, plan.images)), frozen=True)
        self._recent.append(None)
        last = WaveFiles(plan.images[-1], heard=lambda _: self._clear())
        return SaveFiles((*map(WaveFiles, plan.images[:-1]), last), frozen=True)

    def _keeping(self, plan: SavePlan, pieces: Sequence[Piece], attempt: SaveAttempt) -> SaveFiles:
        run = attempt.folder.parent
        folder = run / self._place / f"{attempt.name}-{self._rank}"
        self._folders[folder] = None
        self._recent.append(folder)
        watches = [VersionWatch.of(piece, forget=self.forget) for piece in _frozen(plan, pieces)]
        kept = _Kept(folder, run, self._epoch, plan.frozen, tuple(watches))
        waves = []
        for number, images in enumerate(plan.images):
            trained = len(plan.trained[number]) if number < len(plan.trained) else 0
            keeps = tuple(
                Link(image.path, str(folder / image.path), image.size_bytes)
                for image in images[trained:]
            )
            heard = partial(self._heard, kept, keeps, last=number == len(plan.images) - 1)
            waves.append(WaveFiles(images, (), keeps, plan.ranges[number], heard))
        return SaveFiles(tuple(waves), frozen=True)

    def _heard(self, kept: _Kept, keeps: Sequence[Link], answer: Written, *, last: bool) -> None:
        """Notes the frozen files of one wave, and uses them once they are all there."""
        self._refused |= not answer.kept
        kept.links += keeps
        kept.sums += answer.sums
        with suppress(OSError):  # gone already, so that they are written again
            kept.marks += [FileMark.of(Path(link.kept)) for link in keeps]
        if last and not self._refused and len(kept.marks) == len(kept.links):
            self._kept = kept
        self._clear()

    def _clear(self) -> None:
        """Removes files that no save will link any more."""
        kept = self._kept
        used = {*self._recent, *([kept.folder] if kept is not None else [])}
        for folder in list(self._folders):
            if folder not in used:
                self._folders.pop(folder, None)
                shutil.rmtree(folder, ignore_errors=True)


def _frozen(plan: SavePlan, pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the frozen pieces that this rank writes, in the order of their first bytes."""
    steps = (sample.step for sample in chain.from_iterable(plan.samples))
    return [pieces[number] for number in dict.fromkeys(step.piece for step in steps)]
