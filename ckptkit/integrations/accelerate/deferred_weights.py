"""Models on the meta device that each rank fills itself once accelerate has sharded them.

`defer_weights` of `ckptkit.integrations.transformers` makes such models, and keeps here where their
weights are. Without it accelerate shards a model that is in memory: each rank has the whole of it,
or the first has, and sends it to the others (`cpu_ram_efficient_loading`).

A script may edit weights right after `from_pretrained`: fill rows for new tokens, merge an adapter,
cast. On the meta device all of that succeeds and is lost, so parameters notice it, and it is
refused later.

Source: accelerate 1.15, `Accelerator.prepare`, `fsdp2_prepare_model` and `prepare_model`.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ckptkit.core.errors import (
    CkptkitError,
    LoadError,
    SourceChangedError,
    UnsupportedError,
    error_from_json,
)
from ckptkit.core.index import Fqn
from ckptkit.core.text import list_first
from ckptkit.integrations.patches import replaced
from ckptkit.training.load.load_into import ModelLoad
from ckptkit.training.load.materialise import find_unsaved, is_wide_float
from ckptkit.training.state.dtensors import DTensor
from ckptkit.training.state.models import check_modes, plain_torch
from ckptkit.training.state.optimizers import unwrap_optimizer
from ckptkit.training.step_names import clean_fqn

logger = logging.getLogger(__name__)

_KEEPS_VALUES = frozenset({"requires_grad_", "retain_grad"})
_SETS_ITEM = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_OWNER = "_ckptkit_owner"
_CHANGE = "_ckptkit_change"
_MAKES_NEW = ("empty", "zeros", "ones", "full", "rand", "new_")
_CALL_PLAIN: Any = torch.Tensor.__torch_function__  # its results are plain tensors
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def watch(parameters: Iterable[nn.Parameter]) -> None:
    """Makes parameters notice changes; those that have values are left as they are."""
    for parameter in parameters:
        if parameter.is_meta and type(parameter) is nn.Parameter:
            parameter.__class__ = _Watched


def is_watched(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, _Watched)


def find_changed(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """Yields the parameters without values that are not as `watch` has found them, and why."""
    for name, parameter in named:
        if type(parameter) is _Watched:
            change = getattr(parameter, _CHANGE, "")
            if change:
                yield name, change
        elif parameter.is_meta:
            yield name, "another parameter"


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Makes parameters plain again."""
    for parameter in parameters:
        if type(parameter) is _Watched:
            setattr(parameter, "__class__", nn.Parameter)  # noqa: B010  mypy refuses the other way


def _call(func: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Calls a function of torch; notes in parameters that it writes to."""
    name = getattr(func, "__name__", "")
    is_write = name in _SETS_ITEM or (
        name.endswith("_") and not name.endswith("__") and name not in _KEEPS_VALUES
    )
    first = arguments[0] if arguments else options.get("tensor")  # of functions of `nn.init`
    if func is torch.empty_like and isinstance(first, _Watched):
        _refuse_memory(options.get("device"))
    written = [*(first if isinstance(first, list | tuple) else [first])] if is_write else []
    if "out" in options:
        written.append(options["out"])
    if func == _SET_DATA:
        written, name = [first], "an assignment to its data"
    for value in written:
        owner = getattr(value, _OWNER, value) if isinstance(value, _Watched | _Alias) else None
        if owner is not None:
            setattr(owner, _CHANGE, name)
    found = _CALL_PLAIN(func, (), arguments, options)
    owner = getattr(first, _OWNER, first)
    # On the meta device it does not matter what shares memory and what is a copy without values.
    if isinstance(owner, _Watched) and not name.startswith(_MAKES_NEW):
        return tree_map(partial(_alias, owner), found)
    return found


def _refuse_memory(device: Any) -> None:
    """Refuses memory for a parameter that nothing would fill, as `to_empty` and FSDP1 give it."""
    if device is not None and torch.device(device).type != "meta":
        raise UnsupportedError(
            "the model gets memory, and its weights were deferred: nothing would fill it",
            where=f"memory on {device}",
            hint="load a model that the Trainer, or an accelerator with install, does not prepare"
            " outside of the block with defer_weights, such as a reference model; or fill it by"
            " ckptkit.training.load_into",
        )


class _Watching(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})


class _Watched(_Watching, nn.Parameter):
    pass


class _Alias(_Watching):
    """What was made from a parameter that is watched, and may share its memory."""


def _alias(owner: nn.Parameter, found: object) -> object:
    if type(found) is not torch.Tensor:
        return found
    alias = found.as_subclass(_Alias)
    setattr(alias, _OWNER, owner)
    return alias


_NO_MODEL = "has no model on the meta device"
_HINT = (
    "add adapters in the block with defer_weights too, and pass dtype to from_pretrained instead of"
    " casting later; a model whose weights are changed before training is loaded without it"
)


class DeferredWeights(Struct, frozen=True):
    """The files of the weights of a model, in one folder, as they were when it was made."""

    # Path, size in bytes and time of the last change in nanoseconds of each
    files: tuple[tuple[Path, int, int], ...]

    @classmethod
    def record(cls, paths: Sequence[str]) -> DeferredWeights:
        whole = [Path(path).absolute() for path in paths]
        states = [path.stat() for path in whole]
        pairs = zip(whole, states, strict=True)
        return cls(tuple((path, state.st_size, state.st_mtime_ns) for path, state in pairs))

    @property
    def folder(self) -> Path:
        return self.files[0][0].parent

    def refuse_changes(self) -> None:
        """Refuses files that are others than when the model was made."""
        for path, size, time in self.files:
            try:
                state = path.stat()
            except OSError as error:
                raise SourceChangedError(f"{error.strerror or error}", where=str(path)) from error
            if (state.st_size, state.st_mtime_ns) != (size, time):
                raise SourceChangedError(
                    "changed after from_pretrained had read its header", where=str(path)
                )


DEFERRED: weakref.WeakKeyDictionary[nn.Module, DeferredWeights] = weakref.WeakKeyDictionary()
"""Where the weights of models on the meta device are."""


def fill_when_prepared(accelerator: Any, *, reads: bool) -> AbstractContextManager[None]:
    """Makes `accelerator.prepare` fill models, until the block ends."""
    stock = accelerator.prepare
    return replaced(accelerator, prepare=partial(prepare_and_fill, accelerator, stock, reads=reads))


def prepare_and_fill(
    accelerator: Any,
    prepare: Callable[..., Any],
    *objects: Any,
    reads: bool = True,
    **options: Any,
) -> Any:
    """Calls `prepare`, and then fills the model if its weights were deferred on every rank.

    All ranks have to call it. What they communicate is whether they can do so, whether tensors that
    have values already are equal, and whether they succeeded; weights are not sent.
    """
    models = [value for value in objects if isinstance(value, nn.Module)]
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if len(models) != 1 or kind != "FSDP":
        return prepare(*objects, **options)
    optimizers = [value for value in objects if isinstance(value, Optimizer)]
    filling = _Filling(accelerator, models[0], optimizers)
    if not filling.is_possible():
        return prepare(*objects, **options)
    if reads:
        filling.check()
    release(filling.parameters)
    with _kept_on_meta(accelerator):
        prepared = prepare(*objects, **options)
    results = prepared if isinstance(prepared, tuple | list) else (prepared,)
    filling.finish(next(v for v in results if isinstance(v, nn.Module)), reads=reads)
    return prepared


class _Filling:
    """One model between its preparation and its filling."""

    def __init__(self, accelerator: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._accelerator = accelerator
        self._model = model
        self._is_fsdp2 = getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 1
        self._optimizers = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        found = (DEFERRED[module] for module in model.modules() if module in DEFERRED)
        self._weights = next(found, None)
        tensors = model.state_dict(keep_vars=True)
        self._valued: Mapping[str, torch.Tensor] = {
            name: tensor.detach()
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta
        }
        self._is_on_meta = any(tensor.is_meta for tensor in model.parameters())
        self._dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        self._groups = [
            [names.get(id(parameter)) for parameter in group["params"]]
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def is_possible(self) -> bool:
        """Returns whether the model is to be filled, in which all ranks agree.

        Tensors that have values already, such as a new head, become those of rank 0 where ranks
        have drawn others.
        """
        obstacle, digests = self._obstacle(), dict[str, str]()
        if not obstacle:
            digests = {name: _digest(tensor) for name, tensor in self._valued.items()}
        every = _gather((obstacle, self._weights is not None and self._is_on_meta, digests))
        reasons = sorted({reason for reason, *_ in every if reason})
        if reasons and any(is_deferred for _, is_deferred, _ in every):
            raise LoadError(
                f"weights were deferred, and a rank {reasons[0]}",
                where=type(self._model).__name__,
                hint="use defer_weights on all ranks, and FSDP1 before the optimizer is made",
            )
        if reasons:
            if reasons != [_NO_MODEL] and self._accelerator.is_main_process:
                logger.warning("the model is prepared as without ckptkit: a rank %s", reasons[-1])
            return False
        if any(found.keys() != digests.keys() for *_, found in every):
            raise LoadError("ranks have models with other tensors on the meta device")
        unlike = [name for name in digests if len({found[name] for *_, found in every}) > 1]
        for name in unlike:
            sent = self._valued[name].to(self._accelerator.device, copy=True).contiguous()
            dist.broadcast(sent, src=0)
            self._valued[name].copy_(sent)
        if unlike and self._accelerator.is_main_process:
            logger.warning("ranks had drawn other values, and have those of rank 0 now: %s", unlike)
        return True

    def _obstacle(self) -> str:
        """Returns why this rank does not fill the model; empty where it does."""
        if not self._is_on_meta:
            return _NO_MODEL
        if self._weights is None:
            return (
                "has a model on the meta device, and it is not known where its weights are:"
                " call from_pretrained in a block `with defer_weights():` of"
                " ckptkit.integrations.transformers"
            )
        if not self._is_fsdp2 and self._optimizers:
            return "has an optimizer of a model that FSDP1 has not wrapped yet"
        return ""

    def check(self) -> None:
        """Refuses files that do not fit the model, on every rank if they do not on one."""

        def work() -> None:
            changed = dict(find_changed(self._model.named_parameters()))
            if changed:
                name, change = next(iter(changed.items()))
                further = f", and {len(changed) - 1:,} more" if len(changed) > 1 else ""
                raise LoadError(
                    "parameters were changed while their weights were deferred:"
                    f" {name!r} by {change}{further}",
                    where=type(self._model).__name__,
                    hint=_HINT,
                )
            release(self.parameters)
            self._load(self._model, fills=False)

        _together(work)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._model.parameters())

    def finish(self, prepared: nn.Module, *, reads: bool) -> None:
        """Fills the model, and puts its parameters into the optimizers."""
        if self._is_fsdp2:
            # accelerate finds parameters by their addresses, which are equal on the meta device.
            new = {clean_fqn(name): tensor for name, tensor in prepared.named_parameters()}
            groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
            for group, names in zip(groups, self._groups, strict=True):
                pairs = zip(group["params"], names, strict=True)
                group["params"] = [old if name is None else new[name] for old, name in pairs]
        if reads:
            _together(lambda: self._load(prepared, fills=True))

    def _load(self, model: nn.Module, *, fills: bool) -> None:
        assert self._weights is not None  # noqa: S101  see _obstacle
        self._weights.refuse_changes()
        with plain_torch() as unsuited:
            check_modes(unsuited, "prepare")
            kept = frozenset(map(Fqn, self._valued))
            with ModelLoad(model, self._weights.folder, kept=kept) as load:
                load.check(strict=False)
                _refuse_unfilled(model, load.unfilled)
                if not fills:
                    return
                result = load.fill(self._optimizers)
        self._round(model)
        self._weights.refuse_changes()
        left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
        _refuse_unfilled(model, left)
        if self._accelerator.is_main_process:
            logger.info("read %s bytes of %s", f"{result.bytes_read:,}", self._weights.folder)

    def _round(self, model: nn.Module) -> None:
        """Rounds parameters that accelerate has widened to what from_pretrained makes of them."""
        first, *others = {t for t in self._dtypes.values() if is_wide_float(t)} or {torch.float32}
        for name, parameter in model.named_parameters():
            dtype = self._dtypes.get(clean_fqn(name))
            if not is_wide_float(parameter.dtype):
                continue
            if dtype is None and others and parameter.dtype not in {first, *others}:
                raise UnsupportedError("has elements of several types", where=name)
            dtype = first if dtype is None else dtype
            if dtype != parameter.dtype:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                with torch.no_grad():
                    local.copy_(local.to(dtype))


def refuse_empty(model: nn.Module) -> None:
    """Refuses a model that still has parameters on the meta device, on this rank."""
    _refuse_unfilled(model, [name for name, tensor in model.named_parameters() if tensor.is_meta])


def _refuse_unfilled(model: nn.Module, names: Collection[str]) -> None:
    left = [*names, *(name for group in find_unsaved(model) for name, _ in group.buffers())]
    if left:
        raise LoadError(
            f"{len(left):,} tensors on the meta device are not in the files: {list_first(left)}",
            where=type(model).__name__,
            hint=_HINT,
        )


def _kept_on_meta(accelerator: Any) -> AbstractContextManager[None]:
    """Makes accelerate shard a model without values, instead of sending those of rank 0."""
    memory: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    return replaced(
        accelerator.state.fsdp_plugin,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
        param_init_fn=partial(_give_memory, accelerator.device, memory),
    )


def _give_memory(
    device: torch.device,
    memory: dict[int, tuple[nn.Parameter, nn.Parameter]],
    module: nn.Module,
) -> nn.Module:
    """Gives the tensors of one module memory on a device, as FSDP1 asks for it."""
    for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(old) not in memory:
            new = nn.Parameter(_filled(old.detach(), device), requires_grad=old.requires_grad)
            memory[id(old)] = old, new
        setattr(module, name, memory[id(old)][1])
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        setattr(module, name, _filled(buffer, device))
    return module


def _filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=16).hexdigest()


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _together(work: Callable[[], None]) -> None:
    """Does something on all ranks; if it fails on one, it raises on all."""
    own: CkptkitError | None = None
    try:
        work()
    except CkptkitError as error:
        own = error
    every = _gather(None if own is None else own.to_json())
    if own is not None:
        raise own
    for rank, document in enumerate(every):
        if document is not None:
            failure = error_from_json(document)
            failure.add_note(f"on rank {rank}")
            raise failure
