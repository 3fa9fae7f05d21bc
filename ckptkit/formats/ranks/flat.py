"""FSDP1's flat parameters: many parameters in one vector, whose names are stored nowhere in it.

They come from a file that ckptkit's training side writes beside a checkpoint, or are worked out
from the model's own parameters. Either has to account for every element of every vector.

Source: torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`, `_get_shard`),
_state_dict_utils.py (`_local_post_state_dict_hook`), torch 2.1 to 2.13.

The file that ckptkit's training side writes to tell what flat parameters are made of.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    MissingFileError,
    UnsupportedError,
)
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
    FileRef,
    Fqn,
    Key,
    KeyPath,
    Problem,
    Shape,
    Span,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.manifest import FLAT_LAYOUT, RUN_FACTS
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.pickle.torch_values import MAX_DIMENSIONS
from ckptkit.storage.base import Source

FLAT = "_flat_param"
SLICES: KeyPath = ("flat_parameters",)
"""Under which an index may have, by name, where parameters begin and end in their flat ones."""
NEEDED = (
    "holds flat parameters of FSDP1 (LOCAL_STATE_DICT), and nothing here tells which parameters"
    " they are made of"
)
ADVICE = (
    "name the folder of the model's config.json with --model-config DIR, or call"
    " `ckptkit.training.write_flat_layout(model, folder)` once in the training script, with the"
    " folder of the checkpoint, and keep the file that it writes there"
)


@dataclass(frozen=True, slots=True)
class FlatMember:
    """An original parameter: its names, the first to store it under, its shape and its start."""

    names: tuple[str, ...]
    shape: Shape
    start: int

    @property
    def stop(self) -> int:
        """The first element after it."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatVector:
    """A flat parameter: its name, its length with all padding, and its members."""

    name: str
    elements: int
    members: tuple[FlatMember, ...]


def flat_name(path: str) -> str:
    return f"{path}.{FLAT}" if path else FLAT


def is_flat(entry: TensorEntry) -> bool:
    return entry.part == "model" and entry.name.rpartition(".")[2] == FLAT


def flat_parameters(index: TensorIndex) -> list[TensorEntry]:
    return [entry for entry in index.tensors.values() if is_flat(entry)]


def has_flat(index: TensorIndex) -> bool:
    return any(map(is_flat, index.tensors.values()))


def with_problems(index: TensorIndex) -> TensorIndex:
    """Notes at each flat parameter that its names are missing."""
    problems = [
        Problem(UnsupportedError.code, str(entry.key), f"{NEEDED}; {ADVICE}")
        for entry in flat_parameters(index)
    ]
    return replace(index, problems=(*index.problems, *problems)) if problems else index


def unflattened(
    index: TensorIndex, entries: Sequence[TensorEntry], vectors: Sequence[FlatVector], where: str
) -> TensorIndex:
    """Puts the original parameters in the place of flat ones.

    Args:
        index: With flat parameters.
        entries: The flat ones among its tensors.
        vectors: What they are made of.
        where: What told it, for messages.
    """
    known = {vector.name: vector for vector in vectors}
    tensors: dict[Key, TensorEntry] = {}
    aliases: list[frozenset[Key]] = []
    flat = {entry.key for entry in entries}
    for key, entry in index.tensors.items():
        if key not in flat:
            _add(tensors, entry, where)
            continue
        vector = known.pop(entry.name, None)
        _check_length(entry, vector, where)
        _check_slices(index, vector, where)
        for member in vector.members if vector is not None else ():
            made = list(_entries(entry, member))
            aliases += [frozenset(one.key for one in made)] if len(made) > 1 else []
            for one in made:
                _add(tensors, one, where)
    if known:
        raise FormatError(
            f"describes the flat parameter {shown(next(iter(known)))}, which the checkpoint has"
            " not",
            where=where,
            hint="it is of another model, or of one that was wrapped in another way",
        )
    kept = tuple(problem for problem in index.problems if problem.where not in flat)
    values = {path: value for path, value in index.values.items() if path[:1] != SLICES}
    return replace(
        index,
        tensors=tensors,
        aliases=(*index.aliases, *aliases),
        problems=kept,
        values=values,
    )


def _add(tensors: dict[Key, TensorEntry], entry: TensorEntry, where: str) -> None:
    if tensors.setdefault(entry.key, entry) is not entry:
        raise FormatError(f"names {shown(str(entry.key))} twice", where=where)


def _check_length(entry: TensorEntry, vector: FlatVector | None, where: str) -> None:
    if vector is None:
        raise FormatError(
            f"does not tell what {shown(entry.name)} is made of",
            where=where,
            hint="it is of another model, or of one that was wrapped in another way",
        )
    if entry.shape != (vector.elements,):
        raise FormatError(
            f"says that {shown(entry.name)} has {vector.elements:,} elements, and the checkpoint"
            f" has {math.prod(entry.shape):,}: sizes do not add up",
            where=where,
            hint="it is of another model, or of one that was wrapped in another way",
        )


def _check_slices(index: TensorIndex, vector: FlatVector | None, where: str) -> None:
    """Compares with where the checkpoint itself says that parameters lie, if it does."""
    for member in () if vector is None else vector.members:
        told = index.values.get((*SLICES, member.names[0]), (member.start, member.stop))
        if told != (member.start, member.stop):
            raise FormatError(
                f"puts {shown(member.names[0])} at [{member.start:,}, {member.stop:,}), and the"
                f" checkpoint at [{told[0]:,}, {told[1]:,}) of its flat parameter",
                where=where,
                hint="it is of another model, or of one that was wrapped in another way",
            )


def _entries(flat: TensorEntry, member: FlatMember) -> Iterator[TensorEntry]:
    """Yields an original parameter, once under each of its names."""
    container = flat.key_path[:-1]
    chunks = ChunkTable.of(list(_chunks(flat, member)), len(member.shape))
    for name in member.names:
        path = (*container, name)
        yield replace(
            flat,
            key=Key(".".join(map(str, path))),
            key_path=path,
            name=Fqn(name),
            shape=member.shape,
            chunks=chunks,
        )


def _chunks(flat: TensorEntry, member: FlatMember) -> Iterator[Chunk]:
    """Cuts the elements of a parameter out of the chunks of its vector."""
    table = flat.chunks
    first = table.offsets[:, 0].tolist()
    length = table.sizes[:, 0].tolist()
    for row, (start, count) in enumerate(zip(first, length, strict=True)):
        low, high = max(start, member.start), min(start + count, member.stop)
        if low < high:
            chunk = table[row]
            skipped = (low - start) * flat.dtype.itemsize
            yield replace(
                chunk,
                place=Span(low - member.start, high - member.start),
                byte_offset=(chunk.byte_offset or 0) + skipped,
            )


LAYOUT_VERSION = 1
_MAX_ELEMENTS = 2**62
_MAX_BYTES = 256 << 20


def with_layout_beside(index: TensorIndex, source: Source, folder: str) -> TensorIndex:
    """Puts original parameters in the place of flat ones, if a file beside them tells how.

    Args:
        index: With flat parameters.
        source: Where the checkpoint lies.
        folder: Of the files of the ranks.
    """
    for file in _beside(source, folder):
        where = posixpath.join(source.location, file.path)
        if file.size_bytes > _MAX_BYTES:
            raise LimitError(f"has {file.size_bytes:,} bytes", where=where)
        vectors = parse_layout(source.read(file.path, 0, file.size_bytes), where)
        if vectors:
            return replace(
                unflattened(index, flat_parameters(index), vectors, where),
                files=(*index.files, file),
            )
    return with_problems(index)


def _beside(source: Source, folder: str) -> Iterator[FileRef]:
    """Yields the files that are there, in the folder itself or in the one of the step above."""
    for home in dict.fromkeys((folder, posixpath.dirname(folder))):
        for name in (FLAT_LAYOUT, RUN_FACTS):
            try:
                yield source.stat(posixpath.join(home, name))
            except MissingFileError:
                continue


def parse_layout(data: bytes, where: str) -> list[FlatVector]:
    """Returns what a file says that ckptkit's training side wrote; none where it tells nothing."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON", where=where) from error
    units = document.get("flat_parameters") if isinstance(document, dict) else None
    version = document.get("layout_version", LAYOUT_VERSION) if isinstance(document, dict) else 0
    if version != LAYOUT_VERSION:
        raise UnsupportedError(
            f"has the layout version {version!r}, and this ckptkit knows {LAYOUT_VERSION}",
            where=where,
            hint="use a newer ckptkit",
        )
    if not isinstance(units, list):
        return []
    told = document.get("crc32")
    found = crc32(json.dumps(units, sort_keys=True).encode())
    if told is not None and told != found:
        raise ChecksumError(f"has CRC-32 {found:#010x}, {told!r} was stored", where=where)
    try:
        return [_vector(unit, where) for unit in units]
    except FormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError("does not describe flat parameters", where=where) from error


def _vector(unit: Mapping[str, Any], where: str) -> FlatVector:
    aliases = unit.get("aliases", {})
    rows = zip(unit["names"], unit["shapes"], unit["starts"], strict=True)
    members = tuple(
        FlatMember((_text(name), *map(_text, aliases.get(name, ()))), _shape(shape), _count(start))
        for name, shape, start in rows
    )
    if any(unit.get("axes", ())):
        raise UnsupportedError("a parameter was not flattened row by row", where=where)
    vector = FlatVector(flat_name(_text(unit["path"], empty=True)), _count(unit["size"]), members)
    at = 0
    for member in members:
        if member.start < at or member.stop > vector.elements:
            raise FormatError(
                f"parameter {shown(member.names[0])} lies over another, or outside its vector",
                where=where,
            )
        at = member.stop
    return vector


def _text(value: object, *, empty: bool = False) -> str:
    if isinstance(value, str) and (value or empty):
        return value
    raise TypeError


def _count(value: object) -> int:
    if type(value) is int and 0 <= value <= _MAX_ELEMENTS:
        return value
    raise TypeError


def _shape(value: Sequence[object]) -> Shape:
    shape = tuple(map(_count, value))
    if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        raise ValueError
    return shape
