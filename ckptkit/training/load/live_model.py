"""The tensors of a live model as a checkpoint may have them, and its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.index import Fqn, Shape
from ckptkit.core.model_configs import parse_model_config
from ckptkit.core.text import a_kind
from ckptkit.formats.trees import EXTRA_STATE
from ckptkit.hub_names.disk_tensors import HubNames
from ckptkit.lora.dialects import holds_adapters, make_plain_name
from ckptkit.training.resume.materialise import is_wide_float, materialise
from ckptkit.training.state.bound import BoundModel
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
        return any(re.search(pattern, name) for pattern in patterns)

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
