"""Which stored tensors each tensor of a live model is filled from.

Names are tried in turn: as the model has them, without what PEFT adds, with or without the prefix
that Transformers gives the model below its head, and as `save_pretrained` writes them. The first
that leave nothing over are taken, else those that leave the least.

The tensors of a live model as a checkpoint may have them, and its configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, field
from msgspec.structs import replace
from torch import nn
from torch.optim import Optimizer

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import LoadError, UnsupportedError, UsageError
from ckptkit.core.geometry import Tile, find_tile
from ckptkit.core.index import Fqn, Shape, TensorEntry, TensorIndex
from ckptkit.core.model_configs import parse_model_config
from ckptkit.core.text import a_kind, join_first
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.hub_names.disk_tensors import HubNames, HubTensor
from ckptkit.hub_names.known_models import is_counted_beyond_layers
from ckptkit.lora.dialects import holds_adapters, make_plain_name
from ckptkit.plan.ties import find_absent_tied_names
from ckptkit.plan.weight_kinds import find_dense_name, looks_packed
from ckptkit.training.load.materialise import is_wide_float, materialise
from ckptkit.training.state.collect import BoundModel
from ckptkit.training.state.dtensors import Copies, has_data
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import Piece
from ckptkit.training.step_names import (
    TensorPlaces,
    ask_disk_names,
    clean_fqn,
    innermost,
    parallel_prefixes,
)


class LiveTensor(Struct, frozen=True):
    names: tuple[Fqn, ...]  # all its names; several where weights are tied
    shape: Shape  # of the whole tensor, in elements
    dtype: DType
    pieces: tuple[Piece, ...]  # the parts that are on this rank

    @property
    def name(self) -> Fqn:
        return self.names[0]


class LiveModel:
    """A model as this rank holds it; looked at without communicating."""

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"{a_kind(module)} was found where a module was expected", where="model"
            )
        self.module = module  # the outermost module
        world = Copies()
        if dist.is_available() and dist.is_initialized():
            world = Copies(dist.get_world_size(), dist.get_rank())
        self._world = world
        self._read()

    def _read(self) -> None:
        view = ModelWalk(self.module, TensorPlaces("", ()), world=self._world).look()
        # other ranks hold other tensors, as those of a pipeline do
        self.is_stage = view.values.count < self._world.number
        self.extra = view.extra  # names of what else its state dict has, such as extra states
        self.tensors: tuple[LiveTensor, ...] = tuple(_tensors(view.pieces))

    @property
    def rank(self) -> int:
        return self._world.own

    @property
    def bound(self) -> BoundModel:
        """The model as an entry of a training state."""
        return BoundModel("model", None, self.module, TensorPlaces("", ()))

    @property
    def where(self) -> str:
        return type(innermost(self.module)).__name__.removeprefix("FSDP")

    @cached_property
    def base(self) -> Any:
        inner: Any = innermost(self.module)
        find = getattr(inner, "get_base_model", None)
        return find() if self.is_peft and callable(find) else inner

    @cached_property
    def is_peft(self) -> bool:
        """Whether it is a model of PEFT, whose names have segments of adapters."""
        inner: Any = innermost(self.module)
        return isinstance(getattr(inner, "peft_config", None), dict) and any(
            holds_adapters(part) for name in self.names() for part in name.split(".")
        )

    def names(self) -> Iterator[Fqn]:
        for tensor in self.tensors:
            yield from tensor.names

    def is_of_adapter(self, name: Fqn) -> bool:
        return self.is_peft and any(map(holds_adapters, name.split(".")))

    def plain_name(self, name: Fqn) -> Fqn:
        return Fqn(make_plain_name(name)) if self.is_peft and not self.is_of_adapter(name) else name

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The configuration of a model of Transformers, as `config.json` has it; else None."""
        to_json = getattr(getattr(self.base, "config", None), "to_json_string", None)
        if not callable(to_json):
            return None
        return parse_model_config(str(to_json()).encode(), where="the model's configuration")

    @property
    def base_prefix(self) -> str:
        """What Transformers puts before the names of the model without its head; may be empty."""
        prefix = getattr(self.base, "base_model_prefix", "")
        return f"{prefix}." if isinstance(prefix, str) and prefix else ""

    def ignores(self, name: str, kind: str) -> bool:
        """Whether `from_pretrained` ignores a tensor that is `missing` or `unexpected`."""
        patterns = getattr(self.base, f"_keys_to_ignore_on_load_{kind}", None) or ()
        if any(re.search(pattern, name) for pattern in patterns):
            return True
        # Classes list layers for further tokens by the numbers of released models.
        return kind == "unexpected" and is_counted_beyond_layers(name, self.config or {})

    def ask_disk_names(self, stored: Sequence[Fqn]) -> tuple[HubNames | None, str]:
        """Asks transformers for the names on disk; see `step_names.ask_disk_names`."""
        tensors = {
            self.plain_name(name): (tensor.dtype, tensor.shape)
            for tensor in self.tensors
            for name in tensor.names
            if not self.is_of_adapter(name)
        }
        return ask_disk_names(self.base, self.config, tensors, base=stored)

    def materialise(
        self, dtype: torch.dtype | None, leave: Iterable[Fqn], optimizers: Sequence[Optimizer]
    ) -> None:
        """Gives memory to tensors on the meta device.

        Those of floats become `dtype`; those named in `leave` stay there.
        """
        parallel, left = parallel_prefixes(self.module), frozenset(leave)
        named = (
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(),
        )
        leaving = {id(value) for name, value in named if clean_fqn(name, parallel) in left}
        materialise([self.module], optimizers, dtype=dtype, leave=leaving)
        self._read()

    def refuse_other(self, dtype: torch.dtype) -> None:
        """Refuses an element type that parameters with memory do not have."""
        parallel = parallel_prefixes(self.module)
        buffers = {clean_fqn(name, parallel) for name, _ in self.module.named_buffers()}
        for tensor in self.tensors:
            local = tensor.pieces[0].local
            is_other = is_wide_float(local.dtype) and local.dtype != dtype
            if is_other and not local.is_meta and tensor.name not in buffers:
                raise UsageError(
                    f"is {dtype}, and parameter {tensor.name!r} is {local.dtype} and has memory"
                    " already",
                    where="dtype",
                    hint="leave dtype out, which casts to what the model has; or build the model on"
                    " the meta device, or in that dtype",
                )


def _tensors(pieces: Iterable[Piece]) -> Iterator[LiveTensor]:
    found: dict[Fqn, list[Piece]] = {}
    for piece in pieces:
        if EXTRA_STATE not in piece.key.split("."):
            found.setdefault(Fqn(piece.key), []).append(piece)
    for name, parts in found.items():
        first = parts[0]
        if first.local.layout is not torch.strided or first.local.is_quantized:
            raise UnsupportedError(
                "a sparse or quantized tensor was found where a dense one was expected",
                where=name,
                hint="give the model a dense tensor of this name before",
            )
        if not first.local.is_meta and not has_data(first.local):
            raise UnsupportedError(
                "has no memory of its own to load into",
                where=name,
                hint="make the model outside of FakeTensorMode; on the meta device it may be",
            )
        names = (name, *(Fqn(".".join(map(str, path))) for path in first.aliases))
        dtype = dtype_named(str(first.local.dtype), where=name)
        yield LiveTensor(names, first.shape, dtype, tuple(parts))


_LISTED = 20  # keys in a message
Stored = Mapping[Fqn, TensorEntry]
Rename = Callable[[Fqn], Fqn]


class PartSource(Struct, frozen=True):
    """A stored tensor that holds a live one, or a part of it."""

    name: Fqn  # of the stored tensor
    shape: Shape  # that it has to have
    # the elements that both have; None where these are all, in the same order
    tile: Tile | None = None


Parts = tuple[PartSource, ...]


class Naming(Struct, frozen=True):
    """One way to find a model in a checkpoint."""

    parts: Mapping[Fqn, Parts]  # by the live name, what the tensor is made of
    unsaved: frozenset[Fqn] = frozenset()  # live tensors that are in no file of such a model
    # stored tensors without elements, which no live tensor is made of
    empty: frozenset[Fqn] = frozenset()


class TensorSources(Struct, frozen=True):
    parts: Mapping[Fqn, Parts]  # what each live tensor is made of, by its first name
    # the live tensors that the checkpoint does not have, by their first names
    missing: tuple[Fqn, ...] = ()
    unexpected: tuple[Fqn, ...] = ()  # the stored tensors that the model does not have
    # live tensors that no checkpoint of this kind holds, such as those of an adapter where a base
    # model is loaded
    left_alone: tuple[Fqn, ...] = ()
    # where the checkpoint has a tied tensor once more under another of its names
    further: Mapping[Fqn, tuple[Parts, ...]] = field(default_factory=dict)
    why_live: str = ""  # why the names on disk are not known, where that may matter; else empty

    def all_parts(self) -> Iterator[tuple[Fqn, PartSource]]:
        """Yields every stored tensor that is read, with the first name of the live one."""
        for name, parts in self.parts.items():
            for form in (parts, *self.further.get(name, ())):
                yield from ((name, part) for part in form)

    def without(self, gone: Container[str], stored: Container[Fqn] = ()) -> TensorSources:
        """Returns the same without some live tensors, and the stored ones they are filled from."""
        return replace(
            self,
            parts={name: parts for name, parts in self.parts.items() if name not in gone},
            missing=tuple(name for name in self.missing if name not in gone),
            unexpected=tuple(name for name in self.unexpected if name not in stored),
            left_alone=tuple(name for name in self.left_alone if name not in gone),
            further={name: forms for name, forms in self.further.items() if name not in gone},
        )

    @property
    def rest(self) -> int:
        return len(self.missing) + len(self.unexpected)


class SourceSearch:
    def __init__(self, model: LiveModel, stored: Stored) -> None:
        self._model = model
        self._stored = stored

    def find(self) -> TensorSources:
        best: TensorSources | None = None
        for naming in self._namings():
            found = self._match(naming)
            if best is None or found.rest < best.rest:
                best = found
            if not best.rest:
                break
        assert best is not None  # noqa: S101  there always is a first one
        _, why = self._disk_names if best.rest else (None, "")
        return replace(best, why_live=why)

    @cached_property
    def _disk_names(self) -> tuple[HubNames | None, str]:
        return self._model.ask_disk_names(tuple(self._stored))

    def _namings(self) -> Iterator[Naming]:
        plain = self._model.plain_name
        renames: list[Rename] = [lambda name: name]
        renames += [plain] if self._model.is_peft else []
        prefixed: list[Rename] = []
        prefix = self._model.base_prefix
        if prefix:
            prefixed += [
                lambda name: Fqn(f"{prefix}{name}"),
                lambda name: Fqn(name.removeprefix(prefix)),
            ]
        for rename in renames:
            yield self._renamed(rename)
        for rename in prefixed:
            yield self._renamed(lambda name, rename=rename: rename(plain(name)))  # type: ignore[misc]
        names, _ = self._disk_names
        if names is not None:
            for rename in (renames[0], *prefixed):
                yield self._on_disk(names, rename)

    def _renamed(self, rename: Rename) -> Naming:
        return Naming(
            {
                name: (PartSource(rename(name), tensor.shape),)
                for tensor in self._model.tensors
                for name in tensor.names
            }
        )

    def _on_disk(self, names: HubNames, rename: Rename) -> Naming:
        """Returns live tensors as parts of the tensors on disk."""
        parts: dict[Fqn, list[PartSource]] = {}
        held: dict[Fqn, int] = {}
        for tensor in names.tensors.values():
            for source, tile in _tiles(tensor, names.live):
                held[source] = held.get(source, 0) + math.prod(loop.size for loop in tile.loops)
                part = PartSource(rename(tensor.name), tensor.shape, tile)
                parts.setdefault(source, []).append(part)
        whole = {
            name: tuple(parts.get(name, ()))
            for name, shape in names.live.items()
            if held.get(name, 0) == math.prod(shape)
        }
        called = {name: self._model.plain_name(name) for name in self._model.names()}
        return Naming(
            {live: whole[plain] for live, plain in called.items() if plain in whole},
            frozenset(live for live, plain in called.items() if plain in names.unsaved),
            frozenset(rename(name) for name, tensor in names.tensors.items() if 0 in tensor.shape),
        )

    def _match(self, naming: Naming) -> TensorSources:
        parts: dict[Fqn, Parts] = {}
        further: dict[Fqn, tuple[Parts, ...]] = {}
        missing: list[LiveTensor] = []
        used = set(naming.empty)
        for tensor in self._model.tensors:
            forms = [naming.parts[name] for name in tensor.names if name in naming.parts]
            present = [form for form in forms if all(part.name in self._stored for part in form)]
            used.update(part.name for form in present for part in form)
            if present:
                parts[tensor.name] = present[0]
                others = tuple(form for form in present[1:] if form != present[0])
                further |= {tensor.name: others} if others else {}
            else:
                missing.append(tensor)
        has_adapter = any(self._model.is_of_adapter(name) for name in parts)
        lost: list[Fqn] = []
        alone: list[Fqn] = []
        twins = find_absent_tied_names(self._model.config, self._stored) if missing else {}
        for tensor in missing:
            twin = self._twin(tensor, naming, twins)
            of_adapter = self._model.is_of_adapter(tensor.name) and not has_adapter
            if twin is not None:
                parts[tensor.name] = (twin,)
            elif of_adapter or tensor.name in naming.unsaved:
                alone.append(tensor.name)
            else:
                lost.append(tensor.name)
        ignores = self._model.ignores
        unexpected = (
            name
            for name in self._stored
            if name not in used
            and EXTRA_STATE not in name.split(".")
            and not ignores(name, "unexpected")
        )
        return TensorSources(
            parts,
            tuple(name for name in lost if not ignores(name, "missing")),
            tuple(unexpected),
            (*alone, *(name for name in lost if ignores(name, "missing"))),
            further,
        )

    def _twin(
        self, tensor: LiveTensor, naming: Naming, twins: Mapping[Fqn, Fqn]
    ) -> PartSource | None:
        """Returns the tensor that the configuration ties a missing one to."""
        for name in tensor.names:
            for part in naming.parts.get(name, ()):
                twin = twins.get(part.name)
                if twin is not None and self._stored[twin].shape == tensor.shape:
                    return PartSource(twin, tensor.shape)
        return None


def _tiles(tensor: HubTensor, live: Mapping[Fqn, Shape]) -> Iterator[tuple[Fqn, Tile]]:
    """Yields what a tensor on disk has of live ones; nothing where it is computed."""
    if 0 in tensor.shape:
        return
    for source, piece in tensor.pieces:
        tile = find_tile(piece, live[source])
        if tile is not None:
            yield source, tile


def refuse_misfits(
    model: LiveModel,
    sources: TensorSources,
    stored: Stored,
    dtypes: Mapping[Fqn, DType],
    *,
    strict: bool,
) -> None:
    """Refuses what torch's `load_state_dict` refuses, and casts between numbers of other kinds.

    What packed weights need has no place in a model that has them unpacked, strictly or not.
    """
    plain = {*sources.missing, *(name for name, _ in sources.all_parts())}
    weights = {n: find_dense_name(n) for n in sources.unexpected if not looks_packed(n, ())}
    packed = [(n, dense) for n, dense in weights.items() if dense != n and dense in plain]
    problems = [
        f"{name!r} belongs to a packed weight, and the model has {dense!r} unpacked."
        for name, dense in packed[:1]
    ]
    if strict and sources.missing:
        problems.append(f"Missing key(s) in state_dict: {_quoted(sources.missing)}.")
    if strict and sources.unexpected and not model.is_stage:  # others may be of other stages
        problems.append(f"Unexpected key(s) in state_dict: {_quoted(sources.unexpected)}.")
    for name, part in sources.all_parts():
        entry = stored[part.name]
        if entry.shape != part.shape:
            problems.append(
                f"size mismatch for {name}: copying a param with shape {list(entry.shape)} from"
                f" checkpoint, the shape in current model is {list(part.shape)}."
            )
        elif not _is_castable(entry.dtype, dtypes[name]):
            problems.append(
                f"dtype mismatch for {name}: {entry.dtype.name} was found in the checkpoint, and"
                f" the model has {dtypes[name].name}: only floats of two bytes and more are cast."
            )
    if problems:
        more = len(problems) - _LISTED
        shown = [*problems[:_LISTED], *([f"And {more:,} more."] if more > 0 else [])]
        hint = "build the model that was saved, or pass strict=False for a part of it"
        if packed:
            hint = (
                "unpack the checkpoint first, with `ckptkit consolidate SRC OUT --dtype bfloat16`,"
                " and load that"
            )
        if sources.why_live:
            hint += f"; names on disk are not known, as {sources.why_live}"
        raise LoadError(
            f"Error(s) in loading state_dict for {model.where}: {' '.join(shown)}", hint=hint
        )


def _is_castable(stored: DType, live: DType) -> bool:
    kinds = {stored.kind, live.kind}
    return stored == live or (kinds == {"float"} and min(stored.itemsize, live.itemsize) > 1)


def _quoted(names: Sequence[Fqn]) -> str:
    return join_first((f'"{name}"' for name in names), len(names), _LISTED)


def best_entry(index: TensorIndex, entry: TensorEntry, dtype: DType) -> TensorEntry:
    """Returns where the values of a tensor are, as a type has them: unrounded if there are such."""
    if entry.dtype == dtype or entry.master is None:
        return entry
    return index.tensors[entry.master.key]
