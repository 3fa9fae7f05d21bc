"""Where the elements of each parameter lie among the flat tensors of the ranks.

Stages 1 and 2 cut every group of parameters, one after another in one vector, into equal parts,
one for each rank; each rank records which slice of which parameter it has. Stage 3 cuts every
parameter for itself, into parts that are padded to one length, and keeps those of a rank one
after another in a few vectors.

Source: deepspeed/utils/zero_to_fp32.py, deepspeed/runtime/zero/stage_1_and_2.py
(`_create_param_mapping`), deepspeed/runtime/zero/stage3.py (`_rigid_state_dict`), 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import FormatError, IncompleteCheckpointError, UnsupportedError
from ckptkit.core.index import Chunk, ChunkTable, Shape, Span
from ckptkit.formats.pickle.pickles import shown
from ckptkit.formats.pickle.torch_archives import ArchiveTable, Document
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.zero.files import ZeroFile

_SLICES = "param_slice_mappings"
_FLAT_SLICES = "single_partition_of_fp32_groups"
_FLAT = "fp32_flat_groups"


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a parameter that lie one after another in a file.

    Attributes:
        file: The file.
        tensor: The flat tensor that has them.
        group: Its position among the vectors of the file, 0 where a file has no list of them.
        first: The first of them, counted in that tensor.
        start: The first of them, counted row-major in the parameter.
        count: How many.
    """

    file: ZeroFile
    tensor: TensorRef
    group: int
    first: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or its master copy, that is spread over ranks.

    Attributes:
        shape: Its full shape.
        dtype: Element type of the runs.
        runs: Where its elements lie, each exactly once.
    """

    shape: Shape
    dtype: DType
    runs: tuple[Run, ...]


def chunks_of(table: ArchiveTable, parameter: Parameter) -> ChunkTable:
    """Returns the chunks that a parameter's runs are."""
    itemsize = parameter.dtype.itemsize
    chunks = [
        Chunk(
            Span(run.start, run.start + run.count),
            table.record(run.file.archive, run.tensor),
            byte_offset=(run.tensor.storage_offset + run.first) * itemsize,
            rank=run.file.name.rank,
        )
        for run in parameter.runs
    ]
    return ChunkTable.of(chunks, len(parameter.shape))


def partition_counts(optimizer: Document) -> set[int]:
    """Returns over how many ranks a file of optimizer states says that parameters are spread."""
    found = optimizer.values.get("partition_count")
    counts = found if isinstance(found, (list, tuple)) else [found]
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise optimizer.error("'partition_count' is not a number of ranks")
    return set(counts)


def sliced_parameters(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[tuple[ZeroFile, Document]]
) -> dict[str, Parameter]:
    """Finds the master copies of parameters as stages 1 and 2 spread them.

    Args:
        groups: The shapes of parameters, group by group.
        ranks: The files of optimizer states in the order of their ranks, with their states.
    """
    found: dict[str, list[Run]] = {name: [] for group in groups for name in group}
    for file, state in ranks:
        flat = state.vectors(_FLAT_SLICES)
        if state.values.get(_SLICES) is None:
            raise UnsupportedError(
                f"has no {_SLICES!r}: it does not tell which slices of parameters it has",
                where=state.where,
                hint="DeepSpeed has written them since 0.8; convert the checkpoint with the"
                " 'zero_to_fp32.py' beside it",
            )
        slices = state.inner_list(_SLICES)
        if not len(flat) == len(slices) == len(groups):
            raise state.error(
                f"has {len(flat)} vectors and slices for {len(slices)} groups of parameters,"
                f" where the weights have {len(groups)}"
            )
        for group, (vector, mapping) in enumerate(zip(flat, slices, strict=True)):
            for name, run in _slices_of(vector, mapping):
                if name not in groups[group]:
                    raise mapping.error(
                        f"has a slice of {shown(name)}, of which no shape is known in that group"
                    )
                before = found[name][-1] if found[name] else None
                start = before.start + before.count if before else 0
                found[name].append(Run(file, vector, group, run[0], start, run[1]))
    where = ranks[0][1].where
    return {
        name: _whole(name, shape, found[name], where)
        for group in groups
        for name, shape in group.items()
    }


def _slices_of(vector: TensorRef, mapping: Document) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields for each slice the parameter, its first element in the vector, and its length."""
    for name in mapping.values:
        if not isinstance(name, str):
            raise mapping.error("names a parameter by something that is not a text")
        address = mapping.inner(name)
        first, count = address.count("start"), address.count("numel")
        if first is None or count is None or first + count > vector.shape[0]:
            raise address.error(f"lies outside the {vector.shape[0]:,} elements of its vector")
        yield name, (first, count)


def partitioned_parameters(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[tuple[ZeroFile, Document]]
) -> dict[str, Parameter]:
    """Finds the master copies of parameters as stage 3 spreads them.

    Args:
        groups: The shapes of parameters, group by group.
        ranks: The files of optimizer states in the order of their ranks, with their states.
    """
    shapes = {name: shape for group in groups for name, shape in group.items()}
    found: dict[str, list[Run]] = {name: [] for name in shapes}
    for rank, (file, state) in enumerate(ranks):
        cursor = _Cursor(state)
        for name, shape in shapes.items():
            elements = math.prod(shape)
            part = -(-elements // len(ranks))
            group, first = cursor.take(name, part)
            start = rank * part
            count = max(0, min(part, elements - start))
            if count:
                vector = cursor.vectors[group]
                found[name].append(Run(file, vector, group, first, start, count))
        cursor.finish()
    where = ranks[0][1].where
    return {name: _whole(name, shape, found[name], where) for name, shape in shapes.items()}


class _Cursor:
    """Goes through the vectors of one rank, which hold its part of one parameter after another.

    Attributes:
        vectors: All of them.
    """

    def __init__(self, state: Document) -> None:
        self._state = state
        self.vectors = state.vectors(_FLAT)
        self._number = 0
        self._at = 0

    def take(self, name: str, count: int) -> tuple[int, int]:
        """Returns the position of the vector that has the next elements, and theirs in it."""
        while count and self._left() == 0 and self._number < len(self.vectors):
            self._number, self._at = self._number + 1, 0
        if self._number == len(self.vectors):
            raise self._state.error(f"ends before its part of {shown(name)}")
        if count > self._left():
            raise self._state.error(
                f"{_FLAT!r} has {self._left():,} elements where the part of"
                f" {shown(name)} has {count:,}: sizes do not add up"
            )
        first, self._at = self._at, self._at + count
        return self._number, first

    def _left(self) -> int:
        at_end = self._number == len(self.vectors)
        return 0 if at_end else self.vectors[self._number].shape[0] - self._at

    def finish(self) -> None:
        """Refuses elements that belong to no parameter."""
        left = sum(vector.shape[0] for vector in self.vectors[self._number :]) - self._at
        if left:
            raise self._state.error(
                f"{_FLAT!r} has {left:,} elements more than its parameters: sizes do not add up"
            )


def partitioned_frozen(models: Sequence[ZeroFile]) -> dict[str, Parameter]:
    """Finds the frozen parameters of stage 3, of which each rank has a part.

    Args:
        models: The files of weights in the order of their ranks.
    """
    shapes = models[0].content.inner("frozen_param_shapes").shapes()
    found: dict[str, Parameter] = {}
    for name, shape in shapes.items():
        elements = math.prod(shape)
        part = -(-elements // len(models))
        runs = []
        for rank, file in enumerate(models):
            tensor = file.content.inner("frozen_param_fragments").tensor(name)
            held = math.prod(tensor.shape)
            if held != part or not tensor.row_major:
                raise file.content.error(
                    f"has {held:,} elements of the frozen {shown(name)}, where its part has"
                    f" {part:,}: sizes do not add up"
                )
            count = max(0, min(part, elements - rank * part))
            runs.append(Run(file, tensor, 0, 0, rank * part, count))
        found[name] = _whole(name, shape, runs, models[0].content.where)
    return found


def _whole(name: str, shape: Shape, runs: Sequence[Run], where: str) -> Parameter:
    """Proves that runs, which follow one another, make up a parameter of one element type."""
    elements = math.prod(shape)
    held = sum(run.count for run in runs)
    if held != elements:
        raise IncompleteCheckpointError(
            f"{shown(name)} has {elements:,} elements, of which the ranks hold {held:,}",
            where=where,
        )
    types = {run.tensor.dtype for run in runs} or {BY_NAME["float32"]}
    if len(types) != 1:
        named = " and ".join(sorted(dtype.name for dtype in types))
        raise FormatError(f"{shown(name)} is stored by the ranks as {named}", where=where)
    return Parameter(shape, types.pop(), tuple(runs))
