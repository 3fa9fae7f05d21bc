"""What is said between a command and the program that asks transformers, as JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.index import Box, Fqn, Shape
from ckptkit.planning.hub_names import Computation, HubNames, HubTensor, Piece


@dataclass(frozen=True, slots=True)
class NamingRequest:
    """What the names of a model on disk depend on.

    Attributes:
        config: A parsed `config.json` of a model type that transformers itself has.
        tensors: Element types and shapes by live name, or None for those of the model as its
            class makes it.
        base: The disk names of the model that training began from, where they are known. They
            tell which of several forms that it can load the model keeps.
    """

    config: Mapping[str, Any]
    tensors: Mapping[Fqn, tuple[DType, Shape]] | None
    base: Sequence[Fqn] = ()

    def to_json(self) -> bytes:
        """Returns it as bytes of JSON."""
        tensors = self.tensors
        listed = (
            None if tensors is None else [[n, d.name, list(s)] for n, (d, s) in tensors.items()]
        )
        document = {"config": self.config, "tensors": listed, "base": list(self.base)}
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, data: bytes) -> NamingRequest:
        """Returns the request that bytes of JSON hold."""
        return cls.from_document(json.loads(data))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> NamingRequest:
        """Returns the request that plain values hold."""
        listed = document["tensors"]
        tensors = (
            None
            if listed is None
            else {Fqn(n): (dtype_named(d), tuple(shape)) for n, d, shape in listed}
        )
        return cls(document["config"], tensors, tuple(map(Fqn, document["base"])))


def names_to_json(names: HubNames) -> dict[str, Any]:
    """Returns names as plain values."""
    number = {name: i for i, name in enumerate(names.live)}
    return {
        "library": names.library,
        "live": [[name, list(shape)] for name, shape in names.live.items()],
        "tensors": [_tensor_to_json(tensor, number) for tensor in names.tensors.values()],
        "unsaved": list(names.unsaved),
        "unknown": list(names.unknown),
    }


def names_from_json(document: Mapping[str, Any]) -> HubNames:
    """Returns the names that plain values hold."""
    live = {Fqn(name): tuple(shape) for name, shape in document["live"]}
    reader = _Reader(list(live))
    return HubNames(
        library=document["library"],
        live=live,
        tensors={Fqn(row[0]): reader.tensor(*row) for row in document["tensors"]},
        unsaved=tuple(map(Fqn, document["unsaved"])),
        unknown=tuple(map(Fqn, document["unknown"])),
    )


def _tensor_to_json(tensor: HubTensor, number: Mapping[Fqn, int]) -> list[Any]:
    computed = tensor.computed
    row: list[Any] = [tensor.name, tensor.shape]
    if computed is not None:
        sources = [number[source] for source in computed.sources]
        return [*row, None, [], [computed.dtype.name, sources]]
    grid = None if tensor.grid == tensor.shape else tensor.grid
    return [*row, grid, [_piece_to_json(piece, number) for piece in tensor.pieces], None]


def _piece_to_json(piece: Piece, number: Mapping[Fqn, int]) -> list[Any]:
    box = piece.box
    return [number[piece.source], piece.start, piece.steps, box.offsets, box.sizes]


class _Reader:
    """Makes tensors; shapes that come again, as those of experts do, are kept once."""

    def __init__(self, live: Sequence[Fqn]) -> None:
        self._live = live
        self._shapes: dict[Shape, Shape] = {}
        self._boxes: dict[Box, Box] = {}

    def tensor(
        self, name: str, shape: list[int], grid: list[int] | None, pieces: Any, computed: Any
    ) -> HubTensor:
        dense = self._shape(shape)
        finer = dense if grid is None else self._shape(grid)
        made = None if computed is None else self._computation(*computed)
        return HubTensor(Fqn(name), dense, finer, tuple(self._piece(*row) for row in pieces), made)

    def _computation(self, dtype: str, sources: list[int]) -> Computation:
        return Computation(dtype_named(dtype), tuple(self._live[i] for i in sources))

    def _piece(
        self, source: int, start: int, steps: list[int], offsets: list[int], sizes: list[int]
    ) -> Piece:
        box = Box(self._shape(offsets), self._shape(sizes))
        box = self._boxes.setdefault(box, box)
        return Piece(box, self._live[source], start, self._shape(steps))

    def _shape(self, numbers: list[int]) -> Shape:
        shape = tuple(numbers)
        return self._shapes.setdefault(shape, shape)
