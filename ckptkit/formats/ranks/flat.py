"""FSDP1's flat parameters: vectors of many parameters, whose names are not stored in them.

The names come from a file that ckptkit's training side writes next to a checkpoint, or are computed
from the model's own parameters. Both have to account for every element of every vector.

FSDP1 takes the parameters of a module in the order of its modules, without those of wrapped modules
inside, and concatenates them. With `use_orig_params=True` each begins at a multiple of 16 bytes of
the element type of the computation, and the vector is padded to a multiple of the number of ranks.
The flat parameters' own names show which modules were wrapped.

Source: torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`, `_get_shard`),
_state_dict_utils.py (`_local_post_state_dict_hook`), torch 2.1 to 2.13.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CannotPlanError, ChecksumError, FormatError, UnsupportedError
from ckptkit.core.index import (
    Chunk,
    ChunkTable,
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
from ckptkit.core.text import quote
from ckptkit.formats.base import errors_at
from ckptkit.formats.parsing import MAX_DIMENSIONS, is_count, read_limited, stat_or_missing
from ckptkit.storage.base import Source

FLAT = "_flat_param"
SLICES: KeyPath = ("flat_parameters",)
"""The path in an index of the ranges of parameters, by name, in their flat parameters."""
LAYOUT_VERSION = 1
_MAX_LAYOUT_BYTES = 256 << 20
_MAX_ELEMENTS = 2**62
_UNNAMED = (
    "holds flat parameters of FSDP1 (LOCAL_STATE_DICT), and nothing here shows which parameters"
    " they consist of"
)
_NAME_THEM = (
    "name the folder of the model's config.json with --model-config DIR, or call"
    " `ckptkit.training.write_flat_layout(model, folder)` once in the training script, with the"
    " folder of the checkpoint, and keep the file that it writes there"
)
_OTHER_MODEL = "it is of another model, or of one that was wrapped in another way"
_ALIGNMENTS = (1, 2, 4, 8, 16)  # elements: none, or 16 bytes of elements of 8 to 1
_CONFIG_HINT = (
    "give the config.json that the trained model has, from the folder it was loaded from; if its"
    " modules were changed, call `ckptkit.training.write_flat_layout` in the training script"
)


class FlatMember(Struct, frozen=True):
    """An original parameter: its names, the one that it is stored under first, shape and start."""

    names: tuple[str, ...]
    shape: Shape
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


class FlatVector(Struct, frozen=True):
    """A flat parameter: its name, its length with all padding, and its members."""

    name: str
    elements: int
    members: tuple[FlatMember, ...]


def is_flat(entry: TensorEntry) -> bool:
    return entry.part == "model" and entry.name.rpartition(".")[2] == FLAT


def find_flat_parameters(index: TensorIndex) -> list[TensorEntry]:
    return [entry for entry in index.tensors.values() if is_flat(entry)]


def unflatten(
    index: TensorIndex, entries: Sequence[TensorEntry], vectors: Sequence[FlatVector], where: str
) -> TensorIndex:
    """Replaces flat parameters by the original parameters in them."""
    with errors_at(where):
        remaining = {vector.name: vector for vector in vectors}
        tensors: dict[Key, TensorEntry] = {}
        aliases: list[frozenset[Key]] = []
        flat = {entry.key for entry in entries}
        for key, entry in index.tensors.items():
            if key not in flat:
                _add(tensors, entry)
                continue
            vector = _check_vector(index, entry, remaining.pop(entry.name, None))
            for member in vector.members:
                originals = list(_entries(entry, member))
                if len(originals) > 1:
                    aliases.append(frozenset(original.key for original in originals))
                for original in originals:
                    _add(tensors, original)
        if remaining:
            raise FormatError(
                f"describes the flat parameter {quote(next(iter(remaining)))}, which the checkpoint"
                " does not have",
                hint=_OTHER_MODEL,
            )
        return replace(
            index,
            tensors=tensors,
            aliases=(*index.aliases, *aliases),
            problems=tuple(problem for problem in index.problems if problem.where not in flat),
            values={path: value for path, value in index.values.items() if path[:1] != SLICES},
        )


def _add(tensors: dict[Key, TensorEntry], entry: TensorEntry) -> None:
    if tensors.setdefault(entry.key, entry) is not entry:
        raise FormatError(f"names {quote(str(entry.key))} twice")


def _check_vector(index: TensorIndex, entry: TensorEntry, vector: FlatVector | None) -> FlatVector:
    """Compares a vector with the checkpoint: its length, and the ranges of slices if there are."""
    if vector is None:
        raise FormatError(
            f"does not describe the parameters in {quote(entry.name)}", hint=_OTHER_MODEL
        )
    if entry.shape != (vector.elements,):
        raise FormatError(
            f"says that {quote(entry.name)} has {vector.elements:,} elements, and the checkpoint"
            f" has {math.prod(entry.shape):,}: sizes do not add up",
            hint=_OTHER_MODEL,
        )
    for member in vector.members:
        stored = index.values.get((*SLICES, member.names[0]), (member.start, member.stop))
        if stored != (member.start, member.stop):
            raise FormatError(
                f"puts {quote(member.names[0])} at [{member.start:,}, {member.stop:,}), and the"
                f" checkpoint at [{stored[0]:,}, {stored[1]:,}) of its flat parameter",
                hint=_OTHER_MODEL,
            )
    return vector


def _entries(flat: TensorEntry, member: FlatMember) -> Iterator[TensorEntry]:
    """Yields an original parameter, once under each of its names."""
    chunks = ChunkTable.of(list(_chunks(flat, member)), len(member.shape))
    for name in member.names:
        path = (*flat.key_path[:-1], name)
        yield replace(
            flat,
            key=Key(".".join(map(str, path))),
            key_path=path,
            name=Fqn(name),
            shape=member.shape,
            chunks=chunks,
        )


def _chunks(flat: TensorEntry, member: FlatMember) -> Iterator[Chunk]:
    """Yields the parts of a vector's chunks with elements of a parameter."""
    table = flat.chunks
    starts = table.offsets[:, 0].tolist()
    counts = table.sizes[:, 0].tolist()
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        low, high = max(start, member.start), min(start + count, member.stop)
        if low < high:
            chunk = table[row]
            skipped = (low - start) * flat.dtype.itemsize
            yield replace(
                chunk,
                place=Span(low - member.start, high - member.start),
                byte_offset=(chunk.byte_offset or 0) + skipped,
            )


def apply_layout_file(index: TensorIndex, source: Source, folder: str) -> TensorIndex:
    """Replaces flat parameters by the original ones, if a file describes them; else notes it.

    The file is in the folder of the ranks' files, or in that of the step above it.
    """
    for home in dict.fromkeys((folder, posixpath.dirname(folder))):
        for name in (FLAT_LAYOUT, RUN_FACTS):
            file = stat_or_missing(source, posixpath.join(home, name))
            if file.size_bytes < 0:
                continue
            where = posixpath.join(source.location, file.path)
            data = read_limited(source, file.path, _MAX_LAYOUT_BYTES, "layout of flat parameters")
            vectors = parse_layout(data, where)
            if vectors:
                index = unflatten(index, find_flat_parameters(index), vectors, where)
                return replace(index, files=(*index.files, file))
    problems = (
        Problem(UnsupportedError.code, str(entry.key), _UNNAMED, _NAME_THEM)
        for entry in find_flat_parameters(index)
    )
    return replace(index, problems=(*index.problems, *problems))


def parse_layout(data: bytes, where: str) -> list[FlatVector]:
    """Parses a file that ckptkit's training side wrote; empty if it has no flat parameters."""
    with errors_at(where):
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError("is not JSON") from error
        units = document.get("flat_parameters") if isinstance(document, dict) else None
        version = (
            document.get("layout_version", LAYOUT_VERSION) if isinstance(document, dict) else 0
        )
        if version != LAYOUT_VERSION:
            raise UnsupportedError(
                f"has the layout version {version!r}, expected {LAYOUT_VERSION}",
                hint="use a newer ckptkit",
            )
        if not isinstance(units, list):
            return []
        stored, computed = document.get("crc32"), crc32(json.dumps(units, sort_keys=True).encode())
        if stored is not None and stored != computed:
            raise ChecksumError(f"has CRC-32 {computed:#010x}, {stored!r} was stored")
        try:
            return [_parse_vector(unit) for unit in units]
        except FormatError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError("does not describe flat parameters") from error


def _parse_vector(unit: Mapping[str, Any]) -> FlatVector:
    aliases = unit.get("aliases", {})
    rows = zip(unit["names"], unit["shapes"], unit["starts"], strict=True)
    members = []
    for name, sizes, start in rows:
        shape = tuple(map(_count, sizes))
        if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
            raise ValueError
        names = (_text(name), *map(_text, aliases.get(name, ())))
        members.append(FlatMember(names, shape, _count(start)))
    if any(unit.get("axes", ())):
        raise UnsupportedError("a parameter was not flattened row by row")
    path = _text(unit["path"], empty=True)
    vector = FlatVector(f"{path}.{FLAT}" if path else FLAT, _count(unit["size"]), tuple(members))
    at = 0
    for member in members:
        if member.start < at or member.stop > vector.elements:
            raise FormatError(
                f"parameter {quote(member.names[0])} overlaps another, or is outside its vector"
            )
        at = member.stop
    return vector


def _text(value: object, *, empty: bool = False) -> str:
    if isinstance(value, str) and (value or empty):
        return value
    raise TypeError


def _count(value: object) -> int:
    if is_count(value, _MAX_ELEMENTS):
        return value
    raise TypeError


class ModelParameter(Struct, frozen=True):
    """A parameter of a model: its names, the first one first, and its shape."""

    names: tuple[str, ...]
    shape: Shape


def compute_vectors(
    parameters: Sequence[ModelParameter],
    flat: Mapping[str, int],
    world_size: int,
    slices: Mapping[str, tuple[int, int]],
) -> list[FlatVector]:
    """Computes the positions of a model's parameters in its flat parameters.

    Parameters are in the order of the model's modules, without those that the checkpoint has by
    themselves; `flat` are the lengths in elements, and `slices` the ranges that are known.
    """
    members = _assign(parameters, list(flat))
    layouts: dict[tuple[FlatVector, ...], None] = {}
    for alignment in _ALIGNMENTS:
        vectors = []
        for (name, elements), inside in zip(flat.items(), members, strict=True):
            at, placed = 0, []
            for parameter in inside:
                start = -(-at // alignment) * alignment
                placed.append(FlatMember(parameter.names, parameter.shape, start))
                at = start + math.prod(parameter.shape)
            vectors.append(FlatVector(name, elements, tuple(placed)))
        if all(_fits(vector, alignment, world_size, slices) for vector in vectors):
            layouts[tuple(vectors)] = None
    if not layouts:
        totals = [sum(math.prod(parameter.shape) for parameter in inside) for inside in members]
        rows = zip(flat.items(), members, totals, strict=True)
        (name, elements), inside, total = max(rows, key=lambda row: abs(row[0][1] - row[2]))
        raise CannotPlanError(
            f"{quote(name)} has {elements:,} elements, and the {len(inside)} parameters of the"
            f" model that would be in it have {total:,}: sizes do not add up",
            where="--model-config",
            hint=_CONFIG_HINT,
        )
    if len(layouts) > 1:
        raise CannotPlanError(
            f"parameters can be laid out in {len(layouts)} ways in flat ones of these lengths, and"
            " nothing shows in which they were",
            where="--model-config",
            hint=_CONFIG_HINT,
        )
    return list(next(iter(layouts)))


def _assign(
    parameters: Sequence[ModelParameter], flat: Sequence[str]
) -> list[list[ModelParameter]]:
    """Assigns each parameter to the innermost wrapped module that contains it."""
    paths = [name.removesuffix(FLAT).removesuffix(".") for name in flat]
    members: list[list[ModelParameter]] = [[] for _ in flat]
    for parameter in parameters:
        name = parameter.names[0]
        homes = [path for path in paths if not path or name.startswith(f"{path}.")]
        if not homes:
            raise CannotPlanError(
                f"parameter {quote(name)} of the model is in none of {len(flat)} flat parameters,"
                " and not on its own in the checkpoint",
                where="--model-config",
                hint=_CONFIG_HINT,
            )
        members[paths.index(max(homes, key=len))].append(parameter)
    return members


def _fits(
    vector: FlatVector, alignment: int, world_size: int, slices: Mapping[str, tuple[int, int]]
) -> bool:
    """Returns whether a vector has the length, and its members the ranges, of the checkpoint."""
    for member in vector.members:
        if slices.get(member.names[0], (member.start, member.stop)) != (member.start, member.stop):
            return False
    end = vector.members[-1].stop if vector.members else 0
    if end == vector.elements:
        return True
    # Only aligned vectors are padded at the end, to a multiple of the ranks that share them.
    ranks = (n for n in range(2, world_size + 1) if world_size % n == 0)
    return alignment > 1 and any(-(-end // n) * n == vector.elements for n in ranks)
