"""What a rank has to export: the tensors of its model, its own parts of them, and their files."""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckptkit.adapters.names import AdapterNames
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.index import Box, Fqn
from ckptkit.core.manifest import SIDE_FOLDER
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.planning.plan import TensorSpec
from ckptkit.training.dtensors import Copies, has_data
from ckptkit.training.export_plan import ADAPTER_CONFIG, Table
from ckptkit.training.modules import ModelWalk
from ckptkit.training.names import innermost
from ckptkit.training.ownership import owned
from ckptkit.training.pieces import Piece
from ckptkit.training.places import TensorPlaces, adapter_names
from ckptkit.training.sidecar import collect_sidecar
from ckptkit.training.state import BoundState

_ADAPTERS = "adapters"


@dataclass(frozen=True, slots=True)
class Exported:
    """A rank's view of what is exported.

    Attributes:
        table: The tensors that lie on this rank, whole or in part.
        pieces: This rank's parts of them, by each of their names.
        owned: The identities of the pieces that this rank writes.
        is_everywhere: Whether all ranks hold the same tensors.
        is_adapter: Whether it is the adapter of a PEFT model, and not a model.
    """

    table: Table
    pieces: Mapping[Fqn, tuple[Piece, ...]]
    owned: frozenset[int]
    is_everywhere: bool
    is_adapter: bool

    def parts(self, name: Fqn) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields what this rank writes of a tensor: boxes, and their elements in that shape."""
        for piece in self.pieces.get(name, ()):
            if id(piece) in self.owned:
                yield from boxes_of(piece)

    def same(self, one: Fqn, other: Fqn) -> bool | None:
        """Tells whether two tensors are equal as far as this rank sees; None if they are one."""
        first, second = self.pieces.get(one, ()), self.pieces.get(other, ())
        if first and len(first) == len(second) and all(map(_is, first, second)):
            return None
        if [piece.places for piece in first] != [piece.places for piece in second]:
            return False  # then both are written, which loads as well
        pairs = zip(first, second, strict=True)
        return all(_same_bytes(a.local, b.local) for a, b in pairs if a.places)


def parts_of_model(bound: BoundState) -> list[nn.Module]:
    """Returns the one model of a state; several modules where they are stages of a pipeline.

    Raises:
        UsageError: If there is none, or more than one.
    """
    if len({model.saved_as for model in bound.models}) != 1:
        raise UsageError(
            f"{len(bound.models)} models were found where one was expected",
            where="state",
            hint='give the one to export: export(out, state={"model": model})',
        )
    return [model.module for model in bound.models]


def is_adapter(bound: BoundState) -> bool:
    """Tells whether the model is a PEFT model, of which only the adapter is exported."""
    return adapter_names(parts_of_model(bound)[0]) is not None


def chosen_adapter(bound: BoundState) -> tuple[str, ...]:
    """Returns the options of a command that name the adapter to be exported, among several."""
    model: Any = innermost(parts_of_model(bound)[0])
    names = adapter_names(model)
    if names is None or len(model.peft_config) == 1:
        return ()
    return "--adapter", names.adapter


def look_at(bound: BoundState) -> Exported:
    """Returns what of the model lies on this rank, without any communication.

    Raises:
        UsageError: If the state does not hold one model.
        UnsupportedError: If a tensor is sparse, quantized or has no data.
    """
    modules, world = parts_of_model(bound), Copies(bound.world_size, bound.rank)
    walks = [ModelWalk(module, TensorPlaces("", ()), world=world) for module in modules]
    views = [walk.look(keep=True) for walk in walks]  # all that a save holds
    adapter = adapter_names(modules[0])
    named = list(_named([piece for view in views for piece in view.pieces], adapter))
    pieces: dict[Fqn, tuple[Piece, ...]] = {}
    for name, piece in named:
        pieces[name] = (*pieces.get(name, ()), piece)
    taken = list({id(piece): piece for _, piece in named}.values())
    mine = zip(taken, owned(taken), strict=True)
    return Exported(
        table={name: _spec(name, found[0]) for name, found in pieces.items()},
        pieces=pieces,
        owned=frozenset(id(piece) for piece, is_mine in mine if is_mine),
        is_everywhere=all(view.values.count >= bound.world_size for view in views),
        is_adapter=adapter is not None,
    )


def side_files(bound: BoundState, sidecar: Mapping[str, object]) -> dict[str, bytes]:
    """Returns what lies beside the weights, by name: all of it on rank 0.

    The other ranks need what the plan depends on: configurations, and not tokenizers.

    Raises:
        UsageError: If something given by the user cannot be stored.
    """
    modules = parts_of_model(bound)
    if bound.rank:
        sidecar = {key: value for key, value in sidecar.items() if _may_configure(value)}
    files = collect_sidecar(modules, sidecar)
    found = {file.path.removeprefix(f"{SIDE_FOLDER}/"): file.data for file in files}
    adapter = adapter_names(modules[0])
    own = found.get(f"{_ADAPTERS}/{adapter.adapter}/{ADAPTER_CONFIG}") if adapter else None
    return found if own is None else {**found, ADAPTER_CONFIG: own}


def _may_configure(value: object) -> bool:
    """Tells whether something beside the weights may be, or hold, a model's configuration."""
    return isinstance(value, (str, bytes, os.PathLike)) or hasattr(value, "to_json_string")


def boxes_of(piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yields the boxes of a piece, each with its elements in the shape of the box."""
    if len(piece.places) == 1:
        yield piece.places[0], piece.local
        return
    at = 0
    for box in piece.places:
        count = math.prod(box.sizes)
        yield box, piece.local.narrow(0, at, count).view(box.sizes)
        at += count


def packed_table(table: Table) -> str:
    """Returns a table as short text."""
    rows = [[spec.name, spec.dtype.name, spec.shape] for spec in table.values()]
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def unpacked_table(text: str) -> dict[Fqn, TensorSpec]:
    """Returns the table that was packed."""
    rows: list[Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return {
        Fqn(name): TensorSpec(Fqn(name), dtype_named(dtype), tuple(shape))
        for name, dtype, shape in rows
    }


def _named(pieces: Sequence[Piece], adapter: AdapterNames | None) -> Iterator[tuple[Fqn, Piece]]:
    """Yields each piece under the names that it has in the output."""
    for piece in pieces:
        for path in (piece.key_path, *piece.aliases):
            name = Fqn(".".join(map(str, path)))
            in_file = name if adapter is None else adapter.file_name(name)
            if in_file is not None and EXTRA_STATE not in name.split("."):
                yield Fqn(in_file), piece


def _spec(name: Fqn, piece: Piece) -> TensorSpec:
    local = piece.local
    if local.layout is not torch.strided or local.is_quantized or not has_data(local):
        raise UnsupportedError(
            "a tensor that is sparse, quantized or without data was found where a dense one was"
            " expected",
            where=name,
            hint="hold it in the model as a dense tensor",
        )
    return TensorSpec(name, dtype_named(str(local.dtype), where=name), piece.shape)


def _is(one: object, other: object) -> bool:
    return one is other


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(side.contiguous().view(-1).view(torch.uint8) for side in (one, other)))
