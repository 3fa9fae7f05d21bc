"""Frozen weights are written once; later saves link the files unless the weights may have changed.

They are written again after any of these: another tensor, another address in memory, a larger
version counter of torch, a state dict that was loaded, a CRC-32 that differs in one hundredth of
the bytes (another one in each save), and a file that was modified or replaced.

Weights that change from save to save without being trained, such as an average of others, are
written like trained ones, so that the rest can be linked.
"""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import Struct, field

from ckptkit.core.crc import crc32
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.training.save.attempts import SaveAttempt
from ckptkit.training.save.file_layout import SavePlan
from ckptkit.training.save.staging import Stager
from ckptkit.training.state.dtensors import memory_layout, unwrap_dtensor
from ckptkit.training.state.pieces import Entry, Piece
from ckptkit.writer.messages import Image, Link, Written

logger = logging.getLogger(__name__)
_FOLDER = "frozen"
_MOST_LINKS = 1000  # fewer than any file system allows that has hard links at all


class WaveFiles(Struct, frozen=True):
    """The files of one wave.

    Attributes:
        images: Files to write from the buffer.
        links: Files of an earlier save to link.
        keeps: Files among the images that later saves may link.
        ranges: Byte ranges of the buffer to checksum.
        on_written: Called with the writer's answer, in the thread that waited for it.
    """

    images: tuple[Image, ...]
    links: tuple[Link, ...] = ()
    keeps: tuple[Link, ...] = ()
    ranges: Sequence[tuple[int, int]] = ()
    on_written: Callable[[Written], object] = lambda _: None


class SaveFiles(Struct, frozen=True):
    """The files of one save.

    Attributes:
        waves: What is staged and written, in order.
        frozen: Whether frozen weights are staged.
    """

    waves: tuple[WaveFiles, ...]
    frozen: bool


class _KeptFiles(Struct):
    """Files of frozen weights that later saves may link.

    Attributes:
        folder: Has the files.
        run: The run's directory.
        epoch: Replaced by each load of a state dict.
        layout: Of the files, as in `SavePlan.frozen`.
        watches: The weights as they were, in the order of their first bytes.
        links: The files.
        marks: Numbers by which the files are recognised.
        sums: The CRC-32 of each part of each weight.
        lent: Names of the attempts that are to link the files and have not done so yet.
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
    """Why the files may not have the weights any more, and which weights have changed."""

    reason: str
    changed: frozenset[Entry] = frozenset()

    @classmethod
    def about(cls, pieces: Sequence[Piece], what: str) -> _Doubt:
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return cls(f"{pieces[0].key}{more} {what}", frozenset(piece.entry for piece in pieces))


class FrozenFiles:
    """The files of this rank's frozen weights, shared by the saves of one job.

    One thread starts saves, and others get their answers: there is no lock, and every change is a
    single operation.

    Attributes:
        restless: Weights that changed in two saves in a row; new plans have to treat them as
            trained ones.
    """

    def __init__(self, nonce: str, rank: int, in_flight: int) -> None:
        """Creates nothing yet.

        Args:
            nonce: Names the job's folder in the run.
            rank: Of this process.
            in_flight: How many saves may be under way, including the next one.
        """
        self._place = Path(MARKS_FOLDER, nonce, _FOLDER)
        self._rank = rank
        self._in_flight = in_flight
        self.restless: frozenset[Entry] = frozenset()
        self._changed: frozenset[Entry] = frozenset()  # in the save before
        self._kept: _KeptFiles | None = None
        self._epoch = object()
        self._forgotten = False  # since the last save
        self._refused = False
        self._round = 0
        self._folders: dict[Path, None] = {}
        self._recent: deque[Path | None] = deque(maxlen=in_flight)  # those of saves under way

    def forget(self) -> None:
        """Makes the next save write everything, as after loading."""
        self._epoch = object()
        self._forgotten |= self._kept is not None
        self._kept = None

    def files_for(
        self, plan: SavePlan, pieces: Sequence[Piece], stager: Stager, attempt: SaveAttempt
    ) -> SaveFiles:
        """Returns the files of a save.

        Args:
            plan: Of the save.
            pieces: The pieces that were planned.
            stager: Of the buffer, which is not in use.
            attempt: The attempt.
        """
        kept = self._kept
        if not any(plan.samples):
            return self._written(plan, pieces, attempt)
        if kept is not None:
            doubt = next(self._doubts(kept, plan, pieces, stager, attempt), None)
            if doubt is None:
                self._changed = frozenset()
                kept.lent.add(attempt.name)
                self._recent.append(kept.folder)
                waves = list(map(WaveFiles, plan.trained))
                linked = partial(self._on_linked, kept, attempt.name)
                waves[-1] = WaveFiles(plan.trained[-1], tuple(kept.links), on_written=linked)
                return SaveFiles(tuple(waves), frozen=False)
            self._log_doubt(doubt, attempt)
        elif self._forgotten:
            self._log_doubt(_Doubt("a state was loaded"), attempt)
        return self._written(plan, pieces, attempt)

    def close(self) -> None:
        """Removes the kept files; the steps have links of their own."""
        self.forget()
        self._recent.clear()
        above = {folder for path in self._folders for folder in list(path.parents)[:2]}
        self._clear()
        for folder in sorted(above, reverse=True):
            with suppress(OSError):  # other ranks have files there, or have removed it
                folder.rmdir()

    def _doubts(
        self,
        kept: _KeptFiles,
        plan: SavePlan,
        pieces: Sequence[Piece],
        stager: Stager,
        attempt: SaveAttempt,
    ) -> Iterator[_Doubt]:
        """Yields why the files may not have the weights; the slowest check comes last."""
        if kept.epoch is not self._epoch:
            yield _Doubt("a state was loaded")
        if len(kept.lent) >= self._in_flight:  # more than can be under way
            yield _Doubt("they could not be linked")
        if kept.run != attempt.folder.parent or kept.layout != plan.frozen:
            yield _Doubt("other weights are frozen, or their layout differs")
        there = zip(kept.watches, _frozen(plan, pieces), strict=True)
        changed = [piece for watch, piece in there if not watch.still_holds(piece)]
        if changed:
            yield _Doubt.about(changed, "changed or was replaced by another tensor")
        for mark in kept.marks:
            if not mark.still_holds():
                yield _Doubt(f"{mark.path} was changed, or has the maximum number of links")
        changed = self._other_bytes(kept, plan, pieces, stager)
        if changed:
            yield _Doubt.about(changed, "changed without a new version counter")

    def _other_bytes(
        self, kept: _KeptFiles, plan: SavePlan, pieces: Sequence[Piece], stager: Stager
    ) -> list[Piece]:
        """Returns weights whose bytes changed; checks one part of each."""
        changed: list[Piece] = []
        turn, at = self._round, 0
        self._round += 1
        for samples in plan.samples:  # all waves use the same bytes of the buffer
            steps = [sample.part(turn % len(sample)) for sample in samples]
            parts = stager.fetch(plan, pieces, steps)
            for sample, data in zip(samples, parts, strict=True):
                if crc32(data) != kept.sums[at + turn % len(sample)]:
                    changed.append(pieces[sample.step.piece])
                at += len(sample)
        return changed

    def _log_doubt(self, doubt: _Doubt, attempt: SaveAttempt) -> None:
        """Logs why everything is written, and stores which weights changed since the last save."""
        logger.info("%s: frozen weights are written again: %s", attempt, doubt.reason)
        again = self._changed & doubt.changed
        self._changed = doubt.changed
        if again:
            self.restless |= again
            logger.info(
                "%d of them change from save to save and are written with each one from now on",
                len(again),
            )

    def _written(self, plan: SavePlan, pieces: Sequence[Piece], attempt: SaveAttempt) -> SaveFiles:
        """Returns the files of a save that writes everything; later ones may link the frozen."""
        self._kept, self._forgotten = None, False
        if not any(plan.samples) or self._refused:
            if not self._folders:
                return SaveFiles(tuple(map(WaveFiles, plan.images)), frozen=True)
            self._recent.append(None)
            last = WaveFiles(plan.images[-1], on_written=lambda _: self._clear())
            return SaveFiles((*map(WaveFiles, plan.images[:-1]), last), frozen=True)
        run = attempt.folder.parent
        folder = run / self._place / f"{attempt.name}-{self._rank}"
        self._folders[folder] = None
        self._recent.append(folder)
        watches = [VersionWatch.of(piece) for piece in _frozen(plan, pieces)]
        kept = _KeptFiles(folder, run, self._epoch, plan.frozen, tuple(watches))
        waves = []
        for number, images in enumerate(plan.images):
            trained = len(plan.trained[number]) if number < len(plan.trained) else 0
            keeps = tuple(
                Link(image.path, str(folder / image.path), image.size_bytes)
                for image in images[trained:]
            )
            on_written = partial(self._on_written, kept, keeps, last=number == len(plan.images) - 1)
            waves.append(WaveFiles(images, (), keeps, plan.ranges[number], on_written))
        return SaveFiles(tuple(waves), frozen=True)

    def _on_linked(self, kept: _KeptFiles, attempt: str, _: Written) -> None:
        kept.lent.discard(attempt)
        self._clear()

    def _on_written(
        self, kept: _KeptFiles, keeps: Sequence[Link], answer: Written, *, last: bool
    ) -> None:
        """Adds the frozen files of one wave, and uses them once all are written."""
        self._refused |= not answer.kept
        kept.links += keeps
        kept.sums += answer.sums
        with suppress(OSError):  # removed already, so they are written again
            kept.marks += [FileMark.of(Path(link.kept)) for link in keeps]
        if last and not self._refused and len(kept.marks) == len(kept.links):
            self._kept = kept
        self._clear()

    def _clear(self) -> None:
        """Removes files that no save links any more."""
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


class VersionWatch(Struct, frozen=True):
    """The state of a frozen weight at a save, as plain values.

    Attributes:
        layout: Where its elements are in memory, and how.
        identities: Of the tensors whose version counters are compared.
        versions: How often each of them was changed in place; None where torch does not count.
        storages: Their memory. The references are weak; those to tensors would keep torch from
            swapping the contents of these.
    """

    layout: tuple[Any, ...] | None
    identities: tuple[int, ...]
    versions: tuple[int, ...] | None
    storages: tuple[weakref.ref[torch.UntypedStorage], ...]

    @classmethod
    def of(cls, piece: Piece) -> VersionWatch:
        """Records the versions of a frozen piece as they are now."""
        storages = map(weakref.ref, map(_storage, piece.watched))
        return cls(
            memory_layout(piece.local),
            tuple(map(id, piece.watched)),
            _versions(piece),
            tuple(storages),
        )

    def still_holds(self, piece: Piece) -> bool:
        """Whether a piece has the same elements in the same memory, not changed by torch.

        Another tensor may have the identity and the address of one that is gone, but no storage.
        """
        return (
            self.versions is not None
            and self.versions == _versions(piece)
            and self.identities == tuple(map(id, piece.watched))
            and all(
                ref() is _storage(t) for ref, t in zip(self.storages, piece.watched, strict=True)
            )
            and self.layout == memory_layout(piece.local)
        )


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return unwrap_dtensor(tensor).untyped_storage()


class FileMark(Struct, frozen=True):
    """The identity of a file at a save."""

    path: Path
    status: tuple[int, ...]

    @classmethod
    def of(cls, path: Path) -> FileMark:
        return cls(path, _status(path.stat()))

    def still_holds(self) -> bool:
        """Whether the file is unchanged, and may be linked once more."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return _status(status) == self.status and status.st_nlink < _MOST_LINKS


def _status(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _versions(piece: Piece) -> tuple[int, ...] | None:
    """Returns the version counters, None where they are not known."""
    try:
        return tuple(tensor._version for tensor in piece.watched)  # noqa: SLF001 - there is no public way
    except RuntimeError:  # made in inference mode, where nothing is counted
        return None
