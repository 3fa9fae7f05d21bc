"""The flat vectors of ranks and groups: parameters in slices of them, and the optimizer's states.

Stages 1 and 2 concatenate the parameters of a group and cut the vector into equal parts, one for
each rank; each rank stores the list of its slices of parameters. Stage 3 cuts every parameter by
itself, into parts that are padded to one length, and concatenates the parts of a rank in a few
vectors.

The optimizer that DeepSpeed wraps knows only the vectors: its element-wise states of a vector
belong to the parameters in it, at the same positions; a single number belongs to each of them.

Source: deepspeed/utils/zero_to_fp32.py, deepspeed/runtime/zero/stage_1_and_2.py
(`_create_param_mapping`, `state_dict`, `_get_base_optimizer_state`),
deepspeed/runtime/zero/stage3.py (`_rigid_state_dict`), deepspeed/runtime/bf16_optimizer.py, 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import FormatError, IncompleteCheckpointError, LimitError, UnsupportedError
from ckptkit.core.index import Chunk, ChunkTable, Fqn, KeyPath, Shape, Span, TensorEntry
from ckptkit.core.text import quote
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict, TorchArchive
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.trees import Membership, join_path

_SLICES = "param_slice_mappings"
_FLAT_SLICES = "single_partition_of_fp32_groups"
_FLAT = "fp32_flat_groups"


class VectorSlice(Struct, frozen=True):
    """Elements of a parameter that are contiguous in a file."""

    archive: TorchArchive
    rank: int | None
    tensor: TensorRef
    group: int  # position among the vectors of the file, 0 if it has no list of them
    first: int  # counted in the tensor
    start: int  # counted row-major in the parameter
    count: int


OfRank = tuple[TorchArchive, int | None, PickledDict]
"""A file of a rank, the rank, and a dictionary in the file."""


class FlatParameter(Struct, frozen=True):
    """A parameter, or its master copy, in slices of flat tensors."""

    shape: Shape
    dtype: DType
    slices: tuple[VectorSlice, ...]  # which contain each element exactly once


def make_chunks(table: ArchiveTable, parameter: FlatParameter) -> ChunkTable:
    itemsize = parameter.dtype.itemsize
    chunks = [
        Chunk(
            Span(part.start, part.start + part.count),
            table.record(part.archive, part.tensor),
            byte_offset=(part.tensor.storage_offset + part.first) * itemsize,
            rank=part.rank,
        )
        for part in parameter.slices
    ]
    return ChunkTable.of(chunks, len(parameter.shape))


def read_partition_counts(optimizer: PickledDict) -> set[int]:
    """Returns the numbers of ranks in a file of optimizer states; each group may have its own."""
    value = optimizer.values.get("partition_count")
    counts = value if isinstance(value, (list, tuple)) else [value]
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise optimizer.error("'partition_count' is not a number of ranks")
    return set(counts)


def find_sliced(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[OfRank]
) -> dict[str, FlatParameter]:
    """Finds the master copies of parameters in the vectors of stages 1 and 2."""
    slices: dict[str, list[VectorSlice]] = {name: [] for group in groups for name in group}
    for archive, rank, state in ranks:
        vectors = state.vectors(_FLAT_SLICES)
        if state.values.get(_SLICES) is None:
            raise UnsupportedError(
                f"has no {_SLICES!r}, the slices of parameters in its vectors",
                where=state.where,
                hint="DeepSpeed has written them since 0.8; convert the checkpoint with the"
                " 'zero_to_fp32.py' beside it",
            )
        mappings = state.inner_list(_SLICES)
        if not len(vectors) == len(mappings) == len(groups):
            raise state.error(
                f"has {len(vectors)} vectors and slices for {len(mappings)} groups of parameters,"
                f" where the weights have {len(groups)}"
            )
        for group, (vector, mapping) in enumerate(zip(vectors, mappings, strict=True)):
            for name, first, count in _parse_slices(vector, mapping):
                if name not in groups[group]:
                    raise mapping.error(
                        f"has a slice of {quote(name)}, and that group has no shape of it"
                    )
                before = slices[name][-1] if slices[name] else None
                start = before.start + before.count if before else 0
                slices[name].append(VectorSlice(archive, rank, vector, group, first, start, count))
    where = ranks[0][2].where
    return {
        name: _join_slices(name, shape, slices[name], where)
        for group in groups
        for name, shape in group.items()
    }


def _parse_slices(vector: TensorRef, mapping: PickledDict) -> Iterator[tuple[str, int, int]]:
    """Yields for each slice the parameter, its first element in the vector, and its length."""
    for name in mapping.values:
        if not isinstance(name, str):
            raise mapping.error("names a parameter by something that is not a text")
        address = mapping.inner(name)
        first, count = address.count("start"), address.count("numel")
        if first is None or count is None or first + count > vector.shape[0]:
            raise address.error(f"is outside the {vector.shape[0]:,} elements of its vector")
        yield name, first, count


def find_partitioned(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[OfRank]
) -> dict[str, FlatParameter]:
    """Finds the master copies of parameters in the vectors of stage 3."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    slices: dict[str, list[VectorSlice]] = {name: [] for name in shapes}
    for rank, (archive, _, state) in enumerate(ranks):
        vectors = state.vectors(_FLAT)
        sizes = [vector.shape[0] for vector in vectors]
        group = first = 0  # the next element
        for name, shape in shapes.items():
            elements = math.prod(shape)
            part = -(-elements // len(ranks))
            while part and group < len(sizes) and first == sizes[group]:
                group, first = group + 1, 0
            if group == len(sizes):
                raise state.error(f"ends before its part of {quote(name)}")
            if part > sizes[group] - first:
                raise state.error(
                    f"{_FLAT!r} has {sizes[group] - first:,} elements where the part of"
                    f" {quote(name)} has {part:,}: sizes do not add up"
                )
            start = rank * part
            count = max(0, min(part, elements - start))
            if count:
                held = VectorSlice(archive, rank, vectors[group], group, first, start, count)
                slices[name].append(held)
            first += part
        left = sum(sizes[group:]) - first
        if left:
            raise state.error(
                f"{_FLAT!r} has {left:,} elements more than its parameters: sizes do not add up"
            )
    where = ranks[0][2].where
    return {name: _join_slices(name, shape, slices[name], where) for name, shape in shapes.items()}


def find_frozen(models: Sequence[OfRank]) -> dict[str, FlatParameter]:
    """Finds the frozen parameters of stage 3; each rank has a part of each."""
    where = models[0][2].where
    frozen: dict[str, FlatParameter] = {}
    for name, shape in models[0][2].inner("frozen_param_shapes").shapes().items():
        elements = math.prod(shape)
        part = -(-elements // len(models))
        slices = []
        for rank, (archive, _, content) in enumerate(models):
            tensor = content.inner("frozen_param_fragments").tensor(name)
            held = math.prod(tensor.shape)
            if held != part or not tensor.row_major:
                raise content.error(
                    f"has {held:,} elements of the frozen {quote(name)}, where its part has"
                    f" {part:,}: sizes do not add up"
                )
            count = max(0, min(part, elements - rank * part))
            slices.append(VectorSlice(archive, rank, tensor, 0, 0, rank * part, count))
        frozen[name] = _join_slices(name, shape, slices, where)
    return frozen


def _join_slices(
    name: str, shape: Shape, slices: Sequence[VectorSlice], where: str
) -> FlatParameter:
    """Checks that consecutive slices are all elements of a parameter, of one element type."""
    elements = math.prod(shape)
    held = sum(part.count for part in slices)
    if held != elements:
        raise IncompleteCheckpointError(
            f"{quote(name)} has {elements:,} elements, and the ranks hold {held:,} of them",
            where=where,
        )
    dtypes = {part.tensor.dtype for part in slices} or {BY_NAME["float32"]}
    if len(dtypes) != 1:
        names = " and ".join(sorted(dtype.name for dtype in dtypes))
        raise FormatError(f"{quote(name)} is stored by the ranks as {names}", where=where)
    return FlatParameter(shape, dtypes.pop(), tuple(slices))


OPTIMIZER = "optimizer"
_STATE = "state"
_STEP = "step"
_GROUPS = "param_groups"
_WHOLE = "base_optimizer_state"  # stages 1 and 2
_PARTITIONED = "optimizer_state_dict"  # stage 3
_MAX_KINDS = 64  # of states of one vector; each occurs again for every parameter in it
_PLAIN = (bool, int, float, str, type(None))


class RankStates(Struct, frozen=True):
    archive: TorchArchive
    vectors: Mapping[int, PickledDict]  # the states of each vector, by its position
    groups: Sequence[PickledDict]  # the parameter groups; empty if the file has none


def find_rank_states(archive: TorchArchive, state: PickledDict) -> RankStates:
    base = state.values.get(_WHOLE)
    if isinstance(base, (list, tuple)):  # with `elastic_checkpoint`
        states = RankStates(archive, dict(enumerate(state.inner_list(_WHOLE))), ())
    else:
        inner = state.inner(_WHOLE if _WHOLE in state.values else _PARTITIONED)
        held = inner.inner(_STATE)
        vectors = {number: held.inner(number) for number in held.values if type(number) is int}
        states = RankStates(archive, vectors, inner.inner_list(_GROUPS))
    for vector in states.vectors.values():
        if len(vector.values) > _MAX_KINDS:
            raise LimitError(
                f"keeps {len(vector.values):,} kinds of states of one vector, more than"
                f" {_MAX_KINDS}",
                where=vector.where,
            )
    return states


States = tuple[Sequence[TensorEntry], Mapping[KeyPath, Any], Sequence[str]]
"""The state of an optimizer: tensors, other values, and notes on what is left out."""


def collect_states(
    table: ArchiveTable,
    ranks: Sequence[RankStates],
    parameters: Mapping[str, FlatParameter],
    names: Mapping[str, Fqn],
    groups: Sequence[Sequence[str]],
) -> States:
    """Collects the states of every trained parameter under its name in the index."""
    seen: dict[int, tuple[object, str]] = {}
    for rank in ranks:
        for number, vector in rank.vectors.items():
            step = fingerprint_step(rank.archive, vector.values.get(_STEP))
            if step is None:
                continue
            before = seen.setdefault(number, (step, vector.where))
            if before[0] != step:
                raise FormatError(
                    f"was stepped another number of times than {before[1]}: the files are of two"
                    " saves",
                    where=vector.where,
                    hint="a save was cut short, or went into the folder of another one; take an"
                    " earlier checkpoint",
                )
    by_path = {rank.archive.path: rank for rank in ranks}
    entries: list[TensorEntry] = []
    values: dict[KeyPath, Any] = {}
    left_out: dict[str, Fqn] = {}  # kinds of states, each with an example
    for own_name, parameter in parameters.items():
        name = names[own_name]
        states = [
            by_path[part.archive.path].vectors.get(part.group)
            or PickledDict({}, part.archive.where)
            for part in parameter.slices
        ]
        for state in states:
            if state.values.keys() != states[0].values.keys():
                raise state.error(
                    f"does not keep the states of {quote(name)} that other ranks keep"
                )
        for kind in states[0].values if states else ():
            path = (OPTIMIZER, _STATE, name, str(kind))
            held = [state.values[kind] for state in states]
            entry = _join_state(table, path, parameter, held)
            if entry is not None:
                entries.append(entry)
            elif isinstance(held[0], _PLAIN):
                values[path] = held[0]
            else:
                left_out.setdefault(str(kind), name)
    if ranks:
        values |= collect_group_values(ranks[0], [[names[n] for n in group] for group in groups])
    notes = [
        f"the optimizer keeps {kind!r} of each rank's own part of {name!r} and others, which means"
        " nothing for the whole: it is left out"
        for kind, name in left_out.items()
    ]
    return entries, values, notes


def fingerprint_step(file: TorchArchive, value: object) -> object:
    """Returns a value that is equal for equal steps, or None if the step is unknown.

    A step may be a tensor of one number, which its checksum identifies as well as its bytes.
    """
    if isinstance(value, TensorRef):
        if value.shape != () or value.storage.elements != 1:
            return None
        crc32 = file.archive.extent(value.storage)[2]
        return None if crc32 is None else (value.dtype.name, crc32)
    return value if isinstance(value, (int, float)) else None


def _join_state(
    table: ArchiveTable, path: KeyPath, parameter: FlatParameter, held: Sequence[object]
) -> TensorEntry | None:
    """Returns the state that the slices of a parameter have; None if it is no tensor."""
    first, of_first = held[0], parameter.slices[0]
    if isinstance(first, TensorRef) and first.shape == ():
        chunk = table.chunk(of_first.archive, first, rank=of_first.rank)
        return make_state_entry(path, first, (), ChunkTable.of([chunk], 0))
    if not all(map(_is_elementwise, held, parameter.slices)):
        return None
    tensors = [tensor for tensor in held if isinstance(tensor, TensorRef)]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise FormatError(
            f"{quote(str(path[-1]))} has several element types", where=of_first.archive.where
        )
    parts = zip(parameter.slices, tensors, strict=True)
    slices = tuple(replace(part, tensor=tensor) for part, tensor in parts)
    chunks = make_chunks(table, replace(parameter, dtype=dtypes.pop(), slices=slices))
    return make_state_entry(path, tensors[0], parameter.shape, chunks)


def make_state_entry(
    path: KeyPath, like: TensorRef, shape: Shape, chunks: ChunkTable
) -> TensorEntry:
    """Returns an entry; `path` is `optimizer`, `state`, the parameter's name, the kind of state."""
    membership = Membership(OPTIMIZER, "optimizer", Fqn(join_path(path[1:])))
    return membership.entry(path, like.dtype, shape, chunks)


def _is_elementwise(tensor: object, part: VectorSlice) -> bool:
    """Returns whether a state has a value for each element of a slice's vector."""
    return (
        isinstance(tensor, TensorRef)
        # The codes of a quantized state mean nothing without their scales.
        and tensor.dtype.kind == "float"
        and len(tensor.shape) == 1
        and tensor.row_major
        and tensor.shape[0] >= max(part.tensor.shape[0], part.first + part.count)
    )


def collect_group_values(rank: RankStates, groups: Sequence[Sequence[Fqn]]) -> dict[KeyPath, Any]:
    """Returns the settings of groups, with vectors replaced by the names of their parameters."""
    values: dict[KeyPath, Any] = {}
    seen: set[int] = set()
    # Groups may share values over and over; every real setting takes bytes of its own.
    limit = rank.archive.pickle_bytes
    counts = (len(group.values) + len(group.sequence("params")) for group in rank.groups)
    if any(count > limit for count in accumulate(counts)):
        raise LimitError(
            f"groups of the optimizer unfold into more than {limit:,} values",
            where=rank.archive.where,
        )
    for number, group in enumerate(rank.groups):
        for key, value in group.values.items():
            if key == "params" or not isinstance(key, str):
                continue
            values[OPTIMIZER, _GROUPS, number, key] = value
        members: list[Fqn] = []
        for vector in group.sequence("params"):
            if type(vector) is not int or not 0 <= vector < len(groups):
                continue
            if vector in seen:
                raise group.error(f"has vector {vector}, which is in two groups")
            seen.add(vector)
            members += groups[vector]
        values[OPTIMIZER, _GROUPS, number, "params"] = members
    return values
