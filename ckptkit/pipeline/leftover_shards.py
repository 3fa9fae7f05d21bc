"""A model that torch consolidated, and the shards that it left beside: are they the same?

Torch's consolidation writes headers first and fills in data later, drops what its mapping does not
name, and writes 0 for tensors without dimensions. So what it wrote is taken only where it is whole
and has what the shards have; else the user chooses.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.errors import AmbiguousSourceError, InputError
from ckptkit.core.index import TensorEntry, TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import Found, Unit
from ckptkit.formats.precedence import is_left_of
from ckptkit.storage.base import Source

Read = Callable[[Candidate], TensorIndex]


@dataclass(frozen=True, slots=True)
class LeftShards:
    """Compares the model of a step with the shards beside it.

    Attributes:
        source: Where both lie.
        location: The path as the user typed it.
        candidates: Everything that was recognised there.
        read: Parses one of them.
    """

    source: Source
    location: str
    candidates: Sequence[Candidate]
    read: Read

    def settle(self, found: Found, select: str | None) -> Found:
        """Returns what was found, with a note of the shards that are left alone.

        Args:
            found: What a path stands for.
            select: What the user selected, or None.

        Raises:
            AmbiguousSourceError: If the model is not whole, or not what the shards hold, and
                was not selected by its name.
        """
        notes = [
            self._compared(unit, shards, found.folder)
            for unit in found.units
            if unit.candidate.format == "safetensors" and not _is_named(unit, select)
            for shards in self.candidates
            if is_left_of(shards, {unit.candidate.folder})
        ]
        return replace(found, notes=(*found.notes, *notes))

    def _compared(self, unit: Unit, shards: Candidate, step: str) -> str:
        name = _label(shards, step)
        try:
            reason = next(self._differences(unit.candidate, shards), "")
        except InputError as error:
            reason = f"it is not whole ({error.message})"
        if not reason:
            return f"{name!r} holds the shards of the same model: left alone"
        raise AmbiguousSourceError(
            f"holds the model {unit.label!r} and the shards in {name!r} that it was made from, and"
            f" {reason}",
            where=posixpath.join(self.location, step),
            hint=f"pass --select {name} to have the model made anew, or"
            f" --select {unit.label} to take it as it is",
        )

    def _differences(self, model: Candidate, shards: Candidate) -> Iterator[str]:
        whole = self.read(model)
        try:
            parts = self.read(shards)
        except InputError:
            return  # of the shards some are gone, and the model is whole by itself
        for key in [*parts.tensors, *whole.tensors]:
            one, other = whole.tensors.get(key), parts.tensors.get(key)
            if one is None or other is None:
                yield f"it {'lacks' if one is None else 'alone has'} tensor {key!r}"
            elif (one.dtype, one.shape) != (other.dtype, other.shape):
                yield (
                    f"has tensor {key!r} as {one.dtype.name} {list(one.shape)} against"
                    f" {other.dtype.name} {list(other.shape)}"
                )
            elif not one.shape and self._number(whole, one) != self._number(parts, other):
                yield f"has another number in {key!r}, as torch's consolidation writes 0 there"

    def _number(self, index: TensorIndex, entry: TensorEntry) -> bytes:
        """Returns the bytes of a tensor without dimensions, of which there are few."""
        record = index.records[int(entry.chunks.record[0])]
        return self.source.read(index.files[record.file].path, record.start, record.stop)


def _label(shards: Candidate, step: str) -> str:
    """Names shards as `--select` does."""
    relative = posixpath.relpath(shards.folder or ".", step or ".")
    name = posixpath.basename(shards.files[0])
    return name if relative == "." else relative


def _is_named(unit: Unit, select: str | None) -> bool:
    return select is not None and (select == unit.label or select.endswith(f"/{unit.label}"))
