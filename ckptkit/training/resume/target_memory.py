"""The memory of live tensors, as places that stored bytes are put into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import Box, Shape
from ckptkit.training.state.pieces import Piece

_BYTE_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


class TargetMemory:
    """One place of a piece: where its elements lie in a live tensor, on any device.

    Elements are moved as bytes, so that their type does not matter.
    """

    __slots__ = ("_array", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # Of a lazily conjugated or negated tensor the bytes are not the values.
        lazy = tensor.is_conj() or tensor.is_neg()
        self._array = _bytes_of(tensor) if tensor.device.type == "cpu" and not lazy else None

    def direct(self, box: Box) -> memoryview | None:
        """Returns the memory of a box as one writable run, or None where it is not one."""
        if self._array is None:
            return None
        part = self._array[slices_of(box)]
        return part.reshape(-1).view(np.uint8).data if part.flags.c_contiguous else None

    def put(self, box: Box, data: NDArray[Any]) -> None:
        """Copies elements, of the box's sizes and as unsigned numbers, to their place."""
        if self._array is not None:
            self._array[slices_of(box)] = data
            return
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        elements = flat.view(self._tensor.dtype).reshape(box.sizes)
        self._tensor[slices_of(box)].copy_(elements)


def memories_of(piece: Piece) -> list[TargetMemory]:
    """Returns the memory of each place of a piece, in the piece's order."""
    local = piece.local.detach()
    if local.device.type == "meta":
        raise ResumeError("is still on the meta device, so there is nothing to load into")
    if local.numel() != piece.elements:
        raise ResumeError(
            f"{local.numel():,} elements lie on this rank against {piece.elements:,} in its places"
        )
    if len(piece.places) == 1:
        return [TargetMemory(local.view(piece.places[0].sizes))]
    found, at = [], 0
    for place in piece.places:
        count = math.prod(place.sizes)
        found.append(TargetMemory(local[at : at + count].view(place.sizes)))
        at += count
    return found


def byte_type(itemsize: int) -> str:
    """Returns numpy's name of a type of that size that is copied without being looked at."""
    return _BYTE_TYPES[itemsize]


def _bytes_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns the tensor's own memory as an array of unsigned numbers of the same strides."""
    # numpy knows neither bfloat16 nor the 8-bit floats, so the way leads through the storage.
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    itemsize = tensor.element_size()
    return np.ndarray(
        _shape(tensor),
        byte_type(itemsize),
        buffer=storage.numpy().data,
        offset=tensor.storage_offset() * itemsize,
        strides=[stride * itemsize for stride in tensor.stride()],
    )


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape)


def slices_of(box: Box) -> tuple[Any, ...]:
    """Returns the index of a box in an array or tensor.

    Its ellipsis makes a view, and no scalar, of an array without dimensions.
    """
    return (
        *(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)),
        Ellipsis,
    )
