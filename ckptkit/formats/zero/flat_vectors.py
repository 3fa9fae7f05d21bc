"""The slices of flat vectors, one vector per rank and group, that hold each parameter.

Stages 1 and 2 concatenate the parameters of a group and cut the vector into equal parts, one for
each rank; each rank stores which slices of which parameters it has. Stage 3 cuts every parameter by
itself, into parts that are padded to one length, and concatenates the parts of a rank in a few
vectors.

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
from ckptkit.core.text import quote
from ckptkit.formats.pickle.torch_archives import ArchiveTable, PickledDict
from ckptkit.formats.pickle.torch_values import TensorRef
from ckptkit.formats.zero.tag_files import ZeroFile

_SLICES = "param_slice_mappings"
_FLAT_SLICES = "single_partition_of_fp32_groups"
_FLAT = "fp32_flat_groups"


@dataclass(frozen=True, slots=True)
class VectorSlice:
    """Elements of a parameter that are contiguous in a file.

    Attributes:
        file: The file.
        tensor: The flat tensor with the elements.
        group: Its position among the vectors of the file, 0 if the file has no list of them.
        first: The first element, counted in that tensor.
        start: The first element, counted row-major in the parameter.
        count: The number of elements.
    """

    file: ZeroFile
    tensor: TensorRef
    group: int
    first: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A parameter, or its master copy, in slices of flat tensors.

    Attributes:
        shape: Its full shape.
        dtype: Element type of the slices.
        slices: Slices that contain each element exactly once.
    """

    shape: Shape
    dtype: DType
    slices: tuple[VectorSlice, ...]


def make_chunks(table: ArchiveTable, parameter: FlatParameter) -> ChunkTable:
    """Returns the slices of a parameter as chunks."""
    itemsize = parameter.dtype.itemsize
    chunks = [
        Chunk(
            Span(part.start, part.start + part.count),
            table.record(part.file.archive, part.tensor),
            byte_offset=(part.tensor.storage_offset + part.first) * itemsize,
            rank=part.file.info.rank,
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
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[tuple[ZeroFile, PickledDict]]
) -> dict[str, FlatParameter]:
    """Finds the master copies of parameters in the vectors of stages 1 and 2.

    Args:
        groups: The shapes of parameters, group by group.
        ranks: The files of optimizer states in the order of their ranks, with their states.
    """
    slices: dict[str, list[VectorSlice]] = {name: [] for group in groups for name in group}
    for file, state in ranks:
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
                        f"has a slice of {quote(name)}, of which no shape is known in that group"
                    )
                before = slices[name][-1] if slices[name] else None
                start = before.start + before.count if before else 0
                slices[name].append(VectorSlice(file, vector, group, first, start, count))
    where = ranks[0][1].where
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
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[tuple[ZeroFile, PickledDict]]
) -> dict[str, FlatParameter]:
    """Finds the master copies of parameters in the vectors of stage 3.

    Args:
        groups: The shapes of parameters, group by group.
        ranks: The files of optimizer states in the order of their ranks, with their states.
    """
    shapes = {name: shape for group in groups for name, shape in group.items()}
    slices: dict[str, list[VectorSlice]] = {name: [] for name in shapes}
    for rank, (file, state) in enumerate(ranks):
        cursor = _VectorCursor(state)
        for name, shape in shapes.items():
            elements = math.prod(shape)
            part = -(-elements // len(ranks))
            group, first = cursor.take(name, part)
            start = rank * part
            count = max(0, min(part, elements - start))
            if count:
                vector = cursor.vectors[group]
                slices[name].append(VectorSlice(file, vector, group, first, start, count))
        cursor.check_end()
    where = ranks[0][1].where
    return {name: _join_slices(name, shape, slices[name], where) for name, shape in shapes.items()}


class _VectorCursor:
    """Takes the parts of one parameter after another from the vectors of a rank.

    Attributes:
        vectors: All of them.
    """

    def __init__(self, state: PickledDict) -> None:
        self._state = state
        self.vectors = state.vectors(_FLAT)
        self._number = 0
        self._at = 0

    def take(self, name: str, count: int) -> tuple[int, int]:
        """Returns the number of the vector with the next elements, and the first of them in it."""
        while count and self._left() == 0 and self._number < len(self.vectors):
            self._number, self._at = self._number + 1, 0
        if self._number == len(self.vectors):
            raise self._state.error(f"ends before its part of {quote(name)}")
        if count > self._left():
            raise self._state.error(
                f"{_FLAT!r} has {self._left():,} elements where the part of"
                f" {quote(name)} has {count:,}: sizes do not add up"
            )
        first, self._at = self._at, self._at + count
        return self._number, first

    def _left(self) -> int:
        at_end = self._number == len(self.vectors)
        return 0 if at_end else self.vectors[self._number].shape[0] - self._at

    def check_end(self) -> None:
        """Refuses elements that belong to no parameter."""
        left = sum(vector.shape[0] for vector in self.vectors[self._number :]) - self._at
        if left:
            raise self._state.error(
                f"{_FLAT!r} has {left:,} elements more than its parameters: sizes do not add up"
            )


def find_frozen(models: Sequence[ZeroFile]) -> dict[str, FlatParameter]:
    """Finds the frozen parameters of stage 3, of which each rank has a part.

    Args:
        models: The files of weights in the order of their ranks.
    """
    shapes = models[0].content.inner("frozen_param_shapes").shapes()
    frozen: dict[str, FlatParameter] = {}
    for name, shape in shapes.items():
        elements = math.prod(shape)
        part = -(-elements // len(models))
        slices = []
        for rank, file in enumerate(models):
            tensor = file.content.inner("frozen_param_fragments").tensor(name)
            held = math.prod(tensor.shape)
            if held != part or not tensor.row_major:
                raise file.content.error(
                    f"has {held:,} elements of the frozen {quote(name)}, where its part has"
                    f" {part:,}: sizes do not add up"
                )
            count = max(0, min(part, elements - rank * part))
            slices.append(VectorSlice(file, tensor, 0, 0, rank * part, count))
        frozen[name] = _join_slices(name, shape, slices, models[0].content.where)
    return frozen


def _join_slices(
    name: str, shape: Shape, slices: Sequence[VectorSlice], where: str
) -> FlatParameter:
    """Checks that consecutive slices are all elements of a parameter, of one element type."""
    elements = math.prod(shape)
    held = sum(part.count for part in slices)
    if held != elements:
        raise IncompleteCheckpointError(
            f"{quote(name)} has {elements:,} elements, of which the ranks hold {held:,}",
            where=where,
        )
    dtypes = {part.tensor.dtype for part in slices} or {BY_NAME["float32"]}
    if len(dtypes) != 1:
        names = " and ".join(sorted(dtype.name for dtype in dtypes))
        raise FormatError(f"{quote(name)} is stored by the ranks as {names}", where=where)
    return FlatParameter(shape, dtypes.pop(), tuple(slices))
