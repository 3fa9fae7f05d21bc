"""Frozen weights are written once; later saves link the files unless the weights may have changed.

They are written again after any of these: another tensor, another address in memory, a larger
version counter of torch, a state dict that was loaded, a CRC-32 that differs in one hundredth of
the bytes (another one in each save), and a file that was modified or replaced.

Weights that change from save to save without being trained, such as an average of others, are
written like trained ones, so that the rest can be linked.
"""

from __future__ import annotations

import logging
import shutil
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field

from ckptkit.core.crc import crc32
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.training.save.file_layout import SavePlan
from ckptkit.training.save.staging import Stager
from ckptkit.training.state.dtensors import memory_layout, unwrap_dtensor
from ckptkit.training.state.pieces import Entry, Piece
from ckptkit.writer.messages import Image, Link, Written

if TYPE_CHECKING:
    from ckptkit.training.save.saver import Save

logger = logging.getLogger(__name__)
_FOLDER = "frozen"
_MOST_LINKS = 1000  # fewer than any file system allows that has hard links at all


class WaveFiles(Struct, frozen=True):
    """The files of one wave."""

    images: tuple[Image, ...]  # files to write from the buffer
    links: tuple[Link, ...] = ()  # files of an earlier save to link
    keeps: tuple[Link, ...] = ()  # files among the images that later saves may link
    ranges: tuple[tuple[int, int], ...] = ()  # byte ranges of the buffer to checksum
    # The frozen weights that are linked, or written to be linked later
    kept: _KeptFiles | None = None
    is_last: bool = False  # whether it is the last wave of the save


class _KeptFiles(Struct):
    """Files of frozen weights that later saves may link."""

    folder: Path  # has the files
    run: Path  # the run's directory
    epoch: object  # replaced by each load of a state dict
    layout: tuple[object, ...]  # of the files, as in `SavePlan.frozen`
    watches: tuple[VersionWatch, ...]  # the weights as they were, in the order of their first bytes
    links: list[Link] = field(default_factory=list)  # the files
    # Numbers by which the files are recognised; see `_mark_of`
    marks: dict[Path, tuple[int, ...] | None] = field(default_factory=dict)
    sums: list[int] = field(default_factory=list)  # the CRC-32 of each part of each weight
    # Names of the attempts that are to link the files and have not done so yet
    lent: set[str] = field(default_factory=set)


class FrozenFiles:
    """The files of this rank's frozen weights, shared by the saves of one job.

    One thread starts saves, and others get their answers: there is no lock, and every change is a
    single operation.

    Attributes:
        changing: Weights that changed in two saves in a row; new plans have to treat them as
            trained ones.
    """

    def __init__(self, nonce: str, rank: int, in_flight: int) -> None:
        """Creates nothing yet."""
        self._place = Path(MARKS_FOLDER, nonce, _FOLDER)
        self._rank = rank
        self._in_flight = in_flight
        self.changing: frozenset[Entry] = frozenset()
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
        self, plan: SavePlan, pieces: Sequence[Piece], stager: Stager, save: Save
    ) -> tuple[list[WaveFiles], bool]:
        """Returns the files of each wave of a save, and whether frozen weights are staged.

        The pieces are those that were planned, and the stager's buffer is not in use.
        """
        kept = self._kept
        if any(plan.samples):
            if kept is not None:
                doubt = next(self._doubts(kept, plan, pieces, stager, save), None)
                if doubt is None:
                    self._changed = frozenset()
                    kept.lent.add(save.name)
                    self._recent.append(kept.folder)
                    waves = list(map(WaveFiles, plan.trained))
                    links = tuple(kept.links)
                    waves[-1] = WaveFiles(plan.trained[-1], links, kept=kept, is_last=True)
                    return waves, False
                self._log_doubt(*doubt, save)
            elif self._forgotten:
                self._log_doubt("a state was loaded", (), save)
        return self._written(plan, pieces, save), True

    def take_answer(self, files: WaveFiles, save: Save, answer: Written) -> None:
        """Takes what the writer says of a wave, in the thread that waited for it.

        Frozen files are used for later saves once those of all waves are written.
        """
        kept = files.kept
        if kept is not None and files.links:
            kept.lent.discard(save.name)
        elif kept is not None:
            self._refused |= not answer.kept
            kept.links += files.keeps
            kept.sums += answer.sums
            kept.marks |= {path: _mark_of(path) for path in (Path(k.kept) for k in files.keeps)}
            if files.is_last and not self._refused and None not in kept.marks.values():
                self._kept = kept
        if kept is not None or files.is_last:
            self._remove_unused()

    def close(self) -> None:
        """Removes the kept files; the steps have links of their own."""
        self.forget()
        self._recent.clear()
        above = {folder for path in self._folders for folder in list(path.parents)[:2]}
        self._remove_unused()
        for folder in sorted(above, reverse=True):
            with suppress(OSError):  # other ranks have files there, or have removed it
                folder.rmdir()

    def _doubts(
        self,
        kept: _KeptFiles,
        plan: SavePlan,
        pieces: Sequence[Piece],
        stager: Stager,
        save: Save,
    ) -> Iterator[tuple[str, Sequence[Piece]]]:
        """Yields why the files may not have the weights, and which have changed.

        The slowest check comes last.
        """
        if kept.epoch is not self._epoch:
            yield "a state was loaded", ()
        if len(kept.lent) >= self._in_flight:  # more than can be under way
            yield "they could not be linked", ()
        if kept.run != save.folder.parent or kept.layout != plan.frozen:
            yield "other weights are frozen, or their layout differs", ()
        there = zip(kept.watches, _frozen(plan, pieces), strict=True)
        changed = [piece for watch, piece in there if not watch.still_holds(piece)]
        if changed:
            yield "changed or was replaced by another tensor", changed
        for path, mark in kept.marks.items():
            if _mark_of(path) != mark:
                yield f"{path} was changed, or has the maximum number of links", ()
        changed = self._other_bytes(kept, plan, pieces, stager)
        if changed:
            yield "changed without a new version counter", changed

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

    def _log_doubt(self, reason: str, pieces: Sequence[Piece], save: Save) -> None:
        """Logs why everything is written, and stores which weights changed since the last save."""
        if pieces:
            more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
            reason = f"{pieces[0].key}{more} {reason}"
        logger.info("%s: frozen weights are written again: %s", save, reason)
        changed = frozenset(piece.entry for piece in pieces)
        again = self._changed & changed
        self._changed = changed
        if again:
            self.changing |= again
            logger.info(
                "%d of them change from save to save and are written with each one from now on",
                len(again),
            )

    def _written(self, plan: SavePlan, pieces: Sequence[Piece], save: Save) -> list[WaveFiles]:
        """Returns the files of a save that writes everything; later ones may link the frozen."""
        self._kept, self._forgotten = None, False
        if not any(plan.samples) or self._refused:
            waves = list(map(WaveFiles, plan.images))
            if self._folders:
                self._recent.append(None)
                waves[-1] = WaveFiles(plan.images[-1], is_last=True)
            return waves
        run = save.folder.parent
        folder = run / self._place / f"{save.name}-{self._rank}"
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
            is_last = number == len(plan.images) - 1
            waves.append(WaveFiles(images, (), keeps, plan.ranges[number], kept, is_last))
        return waves

    def _remove_unused(self) -> None:
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
    """The state of a frozen weight at a save, as plain values."""

    layout: tuple[Any, ...] | None  # where its elements are in memory, and how
    identities: tuple[int, ...]  # of the tensors whose version counters are compared
    # How often each of them was changed in place; None where torch does not count
    versions: tuple[int, ...] | None
    # Their memory. The references are weak; those to tensors would keep torch from swapping the
    # contents of these.
    storages: tuple[weakref.ref[torch.UntypedStorage], ...]

    @classmethod
    def of(cls, piece: Piece) -> VersionWatch:
        """Records the versions of a frozen piece as they are now."""
        inner = [unwrap_dtensor(tensor) for tensor in piece.watched]
        versions: tuple[int, ...] | None = None
        with suppress(RuntimeError):  # made in inference mode, where nothing is counted
            versions = tuple(t._version for t in piece.watched)  # noqa: SLF001 - there is no public way
        return cls(
            memory_layout(piece.local),
            tuple(map(id, piece.watched)),
            versions,
            tuple(weakref.ref(tensor.untyped_storage()) for tensor in inner),
        )

    def still_holds(self, piece: Piece) -> bool:
        """Whether a piece has the same elements in the same memory, not changed by torch.

        Another tensor may have the identity and the address of one that is gone, but no storage.
        """
        return self.versions is not None and self == VersionWatch.of(piece)


def _mark_of(path: Path) -> tuple[int, ...] | None:
    """Returns numbers by which a file is recognised, None if it cannot be linked once more."""
    try:
        status = path.stat()
    except OSError:
        return None
    if status.st_nlink >= _MOST_LINKS:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
