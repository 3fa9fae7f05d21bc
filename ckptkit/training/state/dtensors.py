"""Where the local part of a DTensor is in the full tensor, and which other ranks hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.distributed import device_mesh
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptkit.core.errors import UnsupportedError
from ckptkit.core.index import Box, Shape
from ckptkit.training.state.pieces import Replicas, ShardLayout, whole_layout

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, empty
except ImportError:  # torch 2.4
    from torch.distributed._tensor import (  # type: ignore[attr-defined]
        DTensor,
        Replicate,
        Shard,
        empty,
    )

__all__ = [
    "Copies",
    "DTensor",
    "Meshes",
    "empty_like",
    "has_data",
    "inner_tensors",
    "is_composed",
    "local_part",
    "make_dtensor",
    "memory_layout",
    "unwrap_dtensor",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Copies(NamedTuple):
    """How many ranks hold the same elements as this one, and which of them this one is."""

    number: int = 1
    own: int = 0

    def times(self, number: int, own: int) -> Copies:
        return Copies(self.number * number, self.own * number + own)


_Cut = tuple[tuple[Box, ...], Shape, Replicas]
"""The places of this rank's part, its shape, and which other ranks hold it."""


class Meshes:
    """The device meshes of one model, and the layouts that follow from them, computed once.

    A model whose tensors are on meshes of different sizes (FSDP x TP, where some modules are not
    split by TP) holds the tensors of a smaller mesh once per coordinate of the largest one that
    the smaller one lacks. Dimensions that no tensor of the model spans, such as those of pipeline
    stages, do not count, since other parameters live there.

    The ranks of a data parallel wrapper (DDP) have a mesh each, as those of tensor parallelism,
    or all ranks of a mesh are among them, as those of experts that the wrapper ignores.
    """

    def __init__(self, around: Copies, ranks: Iterable[int] = ()) -> None:
        self._around = around
        self._ranks = frozenset(ranks)
        # the mesh that spans the model, None if no tensor is on any
        self.largest: DeviceMesh | None = None
        self._cuts: dict[tuple[Any, ...], _Cut] = {}
        self._replicas: dict[tuple[Any, ...], Replicas] = {}

    def learn(self, tensors: Iterable[object]) -> None:
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                if self.largest is None or mesh.size() > self.largest.size():
                    self.largest = mesh
                    self._cuts.clear()
                    self._replicas.clear()

    def extent(self) -> Copies | None:
        """Returns how many ranks hold parts of the model, None if no tensor is on a mesh."""
        if self.largest is None:
            return None
        if self._is_inside(self.largest):
            return self._around
        ranks = sorted(_ranks_of(self.largest))
        mine = self.largest.get_coordinate()
        if mine is None:
            return self._around.times(len(ranks) + 1, len(ranks))
        return self._around.times(len(ranks), ranks.index(int(self.largest.mesh[tuple(mine)])))

    def slot(
        self, fqn: str, tensor: torch.Tensor, values: Replicas, copies: Replicas | None = None
    ) -> ShardLayout:
        """Returns where a tensor's elements belong.

        One that is no DTensor is whole on each of the ranks of `copies`, or else of `values`.
        """
        if not isinstance(tensor, DTensor):
            return whole_layout(fqn, tensor, values if copies is None else copies, values)
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        shape = tuple(tensor.shape)
        key = (id(mesh), placements, shape)
        # One that says itself where its part is, as megatron-fsdp's uneven ones, is unlike others.
        is_declared = hasattr(tensor._local_tensor, "__create_chunk_list__")  # noqa: SLF001
        cut = None if is_declared else self._cuts.get(key)
        if cut is None:
            cut = self._cut(fqn, tensor)
            if not is_declared:
                self._cuts[key] = cut
        return ShardLayout(fqn, shape, *cut, values, sharded=True)

    def _cut(self, fqn: str, tensor: DTensor) -> _Cut:
        held = tuple(local_part(tensor, fqn).shape)
        mesh, placements = tensor.device_mesh, tensor.placements
        for dim, kind in enumerate(placements):
            if kind.is_partial():
                raise UnsupportedError(
                    "a sum that is not reduced yet has no elements of its own to save or load",
                    where=fqn,
                    hint="redistribute the tensor to Replicate() or Shard() first",
                )
            factor = getattr(kind, "split_factor", 1)
            inner = [
                mesh.size(later)
                for later in range(dim + 1, mesh.ndim)
                if getattr(placements[later], "dim", None) == getattr(kind, "dim", -1)
            ]
            if factor > 1 and factor != math.prod(inner):
                raise UnsupportedError(
                    f"the placements {placements} scatter a rank's elements over the tensor",
                    where=fqn,
                    hint="shard contiguous blocks, as fully_shard and parallelize_module do",
                )
        replicas = self._replicas_of(tensor)
        if mesh.get_coordinate() is None or 0 in held:
            return (), held, replicas
        chunk = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if box.sizes != held:
            raise UnsupportedError(
                f"a local part of shape {held} was found where the placements "
                f"{placements} give {box.sizes}",
                where=fqn,
                hint="make the DTensor by distribute_tensor, or give its shape to from_local",
            )
        return (box,), held, replicas

    def _replicas_of(self, tensor: DTensor) -> Replicas:
        mesh = tensor.device_mesh
        repeated = tuple(dim for dim, kind in enumerate(tensor.placements) if kind.is_replicate())
        key = (id(mesh), repeated)
        if key not in self._replicas:
            copies, at = self._around, mesh.get_coordinate()
            if self._is_inside(mesh):
                copies = _copies_among(mesh, self._ranks, (_root_of(mesh), mesh))
            elif self.largest is not None and self.largest is not mesh:
                # A mesh that was sliced out of another one, as that of experts is, has siblings
                # there: these hold the copies, as far as their ranks belong to the largest mesh.
                largest = self.largest
                if largest.get_coordinate() is not None:
                    grids = (_root_of(mesh), largest)
                    copies = copies.times(*_copies_among(mesh, _ranks_of(largest), grids))
            for dim in repeated:
                copies = copies.times(mesh.size(dim), at[dim] if at else 0)
            self._replicas[key] = Replicas(*copies, spread=True)
        return self._replicas[key]

    def _is_inside(self, mesh: DeviceMesh) -> bool:
        return mesh.size() > 1 and self._ranks.issuperset(_ranks_of(mesh))


def local_part(tensor: torch.Tensor, where: str = "") -> torch.Tensor:
    """Returns this rank's own plain tensor, without copying and outside of autograd."""
    tensor = unwrap_dtensor(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if is_composed(tensor):
        raise UnsupportedError(
            f"a {type(tensor).__name__} was found, which consists of several tensors, where a plain"
            " tensor was expected",
            where=where,
            hint="convert it to a plain tensor, or leave what holds it out of the state",
        )
    return tensor.detach() if tensor.requires_grad else tensor


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether this rank's part consists of several tensors, as a quantised one does."""
    tensor = unwrap_dtensor(tensor)
    if type(tensor) in _PLAIN or isinstance(tensor, AsyncCollectiveTensor):
        return False
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yields the plain tensors that this rank's part consists of, each with its name in it.

    A plain one has no name. They are the very tensors that training works on.
    """
    tensor = unwrap_dtensor(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if not is_composed(tensor):
        yield (), tensor
        return
    composed: Any = tensor
    for name in composed.__tensor_flatten__()[0]:
        for rest, inner in inner_tensors(getattr(composed, name)):
            yield (name, *rest), inner


def make_dtensor(
    like: DTensor, shape: Sequence[int], placements: Sequence[str], dtype: torch.dtype
) -> torch.Tensor | None:
    """Returns a DTensor without content on the mesh of another one, without communicating.

    Returns None if no placement has one of the texts.
    """
    if tuple(shape) == tuple(like.shape) and list(placements) == list(map(repr, like.placements)):
        return empty_like(like, dtype)
    known = {repr(kind): kind for kind in (Replicate(), *map(Shard, range(len(shape))))}
    if len(placements) != len(like.placements) or not all(text in known for text in placements):
        return None
    found = [known[text] for text in placements]
    return empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=found)


def unwrap_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, and any other tensor itself.

    Of one that wraps a single tensor of its own shape and type, as float8 training of torchao has
    them, it is the wrapped one. What `detach` drops, such as a scale that was computed from the
    elements, does not count.
    """
    local: Any = tensor
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor  # noqa: SLF001 - to_local() records an autograd node
    while type(local) not in _PLAIN and not isinstance(local, AsyncCollectiveTensor):
        if not bool(is_traceable_wrapper_subclass(local)):
            break
        names = local.detach().__tensor_flatten__()[0]
        inner = getattr(local, names[0]) if len(names) == 1 else None
        if inner is None or (inner.shape, inner.dtype) != (local.shape, local.dtype):
            break
        local = inner
    found: torch.Tensor = local
    return found


def empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor without content that is cut like another one, and wraps no plain one."""
    local = unwrap_dtensor(tensor)
    if not isinstance(tensor, DTensor):
        return torch.empty_like(local.detach(), dtype=dtype)
    if type(local) is type(tensor._local_tensor):  # noqa: SLF001 - see `unwrap_dtensor`
        return torch.empty_like(tensor.detach(), dtype=dtype)
    return DTensor.from_local(
        torch.empty_like(local.detach(), dtype=dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def has_data(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def memory_layout(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns address, shape, strides and type of this rank's elements; None without memory."""
    local = unwrap_dtensor(tensor)
    if isinstance(local, FakeTensor):  # which warns when it is asked for its memory
        return None
    try:
        return local.data_ptr(), local.shape, local.stride(), local.dtype
    except RuntimeError:  # a sparse tensor, which is refused later by its name
        return None


def _ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _copies_among(mesh: DeviceMesh, around: frozenset[int], grids: Iterable[DeviceMesh]) -> Copies:
    """Returns how often tensors of `mesh` exist on some ranks, as one of the grids has them."""
    if mesh.get_coordinate() is None:
        return Copies()
    ranks = _ranks_of(mesh)
    for grid in grids:
        siblings = [sibling for sibling in _siblings(grid, ranks) if around.issuperset(sibling)]
        if len(siblings) * len(ranks) == len(around):
            return Copies(len(siblings), siblings.index(ranks))
    return Copies()


def _siblings(grid: DeviceMesh, ranks: frozenset[int]) -> list[frozenset[int]]:
    """Returns the ranks of all slices of a mesh that are like the one with these ranks."""
    table = np.asarray(grid.mesh.tolist())
    at = np.nonzero(np.isin(table, list(ranks)))
    if len(at[0]) != len(ranks):
        return []
    varying = [dim for dim, values in enumerate(at) if len(set(values.tolist())) > 1]
    last = np.moveaxis(table, varying, range(table.ndim - len(varying), table.ndim))
    if math.prod(table.shape[dim] for dim in varying) != len(ranks):
        return []
    return [frozenset(row.tolist()) for row in last.reshape(-1, len(ranks))]


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that another one was sliced out of, for which there is no public way."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is None:  # torch before 2.10
        resources = getattr(device_mesh, "_mesh_resources", None)
        find = None if resources is None else partial(resources.get_root_mesh, mesh)
    root = mesh if find is None else find()
    return root if isinstance(root, DeviceMesh) else mesh
