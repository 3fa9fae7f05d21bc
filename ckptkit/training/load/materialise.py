"""Allocates memory to load into: models on the meta device, optimizers that never stepped.

A buffer that no checkpoint holds, as the frequencies of a rotary embedding, is computed when its
module is built; on the meta device that gives it no content. It is computed again as
`from_pretrained` of Transformers does it: by the `_init_weights` of the innermost model of
Transformers that the module is in, or of one that it is in, or else by a `reset_parameters` of its
own. Either may initialise parameters too: while they run, all parameters and saved buffers of the
model are replaced by others on the meta device, so that nothing that is loaded changes and no
DTensor communicates.

Source: transformers 5.23, `PreTrainedModel.initialize_weights`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer

from ckptkit.core.errors import ResumeError
from ckptkit.core.index import KeyPath, TensorEntry, TensorIndex
from ckptkit.training.state.dtensors import DTensor, empty_like
from ckptkit.training.state.fsdp import fsdp2_states
from ckptkit.training.state.models import members_of
from ckptkit.training.state.optimizers import STATE, below, unwrap_optimizer
from ckptkit.training.state.pieces import ShardLayout

Slots = Mapping[int, tuple[ShardLayout, ...]]
_Named = tuple[nn.Module, str]


_FIRST_STEPS = 2  # in which an optimizer makes its state


def materialise(
    modules: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    dtype: torch.dtype | None = None,
    leave: Container[int] = (),
) -> None:
    """Allocates all tensors on the meta device; everything else is unchanged.

    Parameters and persistent buffers are left without content, to be loaded. Buffers that no
    checkpoint holds get theirs from the module that made them. Tensors of floats that are left
    without content become `dtype`. Those whose identities are in `leave` stay on the meta device.
    """
    for module in modules:
        if not any(tensor.is_meta for tensor in _tensors(module)):
            continue
        renewed = _give_memory(module, dtype, leave)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [renewed.get(old, old) for old in group["params"]]
            for old in [key for key in optimizer.state if key in renewed]:
                optimizer.state[renewed[old]] = optimizer.state.pop(old)


def is_wide_float(dtype: torch.dtype) -> bool:
    """Whether elements are floats that are not packed into a byte."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _give_memory(
    module: nn.Module, dtype: torch.dtype | None, leave: Container[int]
) -> dict[torch.Tensor, nn.Parameter]:
    """Returns the new parameter of each old one."""
    before: dict[torch.Tensor, list[_Named]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in members_of(owner)[0].items():
            if parameter is not None:
                before[parameter].append((owner, name))
    unsaved = find_unsaved(module)
    device = _device_of(module)
    computed = {id(buffer) for group in unsaved for _, buffer in group.buffers()}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or id(tensor) in leave:
            return tensor
        kept = dtype is None or id(tensor) in computed or not is_wide_float(tensor.dtype)
        wanted = tensor.dtype if kept else dtype
        # Detached, as parameters of `defer_weights` refuse memory that nothing would fill.
        return torch.empty_like(tensor.detach(), device=device, dtype=wanted)

    # As `to_empty` does: FSDP2 overrides this private method to register the new parameters.
    module._apply(real)  # type: ignore[no-untyped-call]  # noqa: SLF001
    for (owner, name), *tied in before.values():
        for other, alias in tied:
            members_of(other)[0][alias] = members_of(owner)[0][name]
    fill_unsaved(module, unsaved)
    return {old: getattr(*places[0]) for old, places in before.items()}


def _device_of(module: nn.Module) -> torch.device:
    """Returns the device of the parameters: that of real tensors, or of the mesh."""
    # No public property says that FSDP2 keeps the parameters on the CPU.
    states = (state for _, state in fsdp2_states(module.modules()))
    groups = (getattr(state, "_fsdp_param_group", None) for state in states)
    group = next((group for group in groups if group is not None), None)
    if group is not None and getattr(group.fsdp_params[0], "offload_to_cpu", False):
        return torch.device("cpu")
    devices = {tensor.device for tensor in _tensors(module) if not tensor.is_meta}
    if len(devices) == 1:
        return devices.pop()
    sharded = (tensor for tensor in module.parameters() if isinstance(tensor, DTensor))
    first = next(sharded, None)
    if first is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = first.device_mesh.device_type
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())


def allocate_state(
    optimizer: Optimizer,
    slots: Slots,
    index: TensorIndex,
    path: KeyPath,
    *,
    leave: Container[int] = (),
) -> None:
    """Gives an optimizer the state tensors that a checkpoint has for it, without content.

    Tensors that are there stay, to be filled in place; state of parameters for which the checkpoint
    has none is removed. The state of parameters whose identities are in `leave` stays as it is.
    """
    stored = _stored_states(index, path)
    parameters = [
        (parameter, bool(group.get("capturable") or group.get("fused")))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in leave
    ]
    # State of a sharded parameter that is neither a number nor of its shape.
    odd = [
        (parameter, name)
        for parameter, _ in parameters
        for slot in slots[id(parameter)]
        if isinstance(parameter, DTensor) or not slot.whole
        for name, entry in stored.get(slot.fqn, {}).items()
        if entry.shape != slot.shape and entry.elements != 1
    ]
    if odd:
        step_without_effect(
            optimizer, lambda: all(name in optimizer.state.get(p, {}) for p, name in odd)
        )
    # Of a parameter of one element, a number looks like a part.
    numbers = {
        name
        for parameter, _ in parameters
        for slot in slots[id(parameter)]
        for name, entry in stored.get(slot.fqn, {}).items()
        if entry.elements == 1 and math.prod(slot.shape) > 1
    }
    for parameter, on_device in parameters:
        own = slots[id(parameter)]
        slot = next((slot for slot in own if slot.fqn in stored), None)
        if slot is None or not has_state(parameter, own):
            optimizer.state.pop(parameter, None)
            continue
        state: dict[str, Any] = optimizer.state[parameter]
        for name, entry in stored[slot.fqn].items():
            is_part = entry.shape == slot.shape and name not in numbers
            value, is_number = state.get(name), entry.elements == 1
            # What a later step has made of it, in a resume from an earlier one.
            is_other = (is_part or is_number) and (
                isinstance(value, torch.Tensor) and (value.numel() == 1) != is_number
            )
            if is_other or not isinstance(value, torch.Tensor):
                state[name] = _empty(
                    parameter, slot, name, entry, on_device=on_device, is_part=is_part
                )


def _stored_states(index: TensorIndex, path: KeyPath) -> dict[str, dict[str, TensorEntry]]:
    states: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    entries = {entry.key_path: entry for entry in index.tensors.values()}
    for rest, key_path in below(entries, path, STATE):
        if len(rest) == 2:  # noqa: PLR2004
            states[str(rest[0])][str(rest[1])] = entries[key_path]
    for rest, _ in below(index.values, path, STATE):
        if len(rest) > 1:
            states.setdefault(str(rest[0]), {})
    return dict(states)


def has_state(parameter: torch.Tensor, slots: Sequence[ShardLayout]) -> bool:
    """Whether an optimizer has state here; FSDP1's ranks without elements may have none.

    They have some of a flat parameter, which is padded, and of what is not sharded.
    """
    if isinstance(parameter, DTensor):
        return True
    return any(slot.elements or slot.start is not None or not slot.sharded for slot in slots)


def _empty(
    parameter: torch.Tensor,
    slot: ShardLayout,
    name: str,
    entry: TensorEntry,
    *,
    on_device: bool,
    is_part: bool,
) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype.name)
    if is_part and (entry.shape or name != "step"):
        if slot.start is not None:  # with padding, which no checkpoint holds
            return torch.zeros(slot.held, dtype=dtype, device=parameter.device)
        if isinstance(parameter, DTensor) or tuple(parameter.shape) == slot.held:
            return empty_like(parameter, dtype)
        return torch.empty(slot.held, dtype=dtype, device=parameter.device)
    # As torch's load_state_dict does: only counts of steps are not on the parameter's device.
    is_count = name == "step" and entry.elements == 1 and not on_device
    device = torch.device("cpu") if is_count else parameter.device
    return torch.empty(entry.shape, dtype=dtype, device=device)


def step_without_effect(optimizer: Optimizer, is_made: Callable[[], bool]) -> None:
    """Lets an optimizer make its own state, by a step with gradients of zero, or by two.

    The parameters are loaded afterwards. Gradients and hyperparameters are put back. An optimizer
    that has state already keeps it. What `torch.compile` does in its step is not worth while here,
    and left out. Some make a part of their state in the second step only, as `is_made` says.
    """
    if optimizer.state:
        return
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    gradients = [(p, p.grad) for g in optimizer.param_groups for p in g["params"]]
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group in optimizer.param_groups:
        lr = group["lr"]
        group["lr"] = torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6 and later
    try:
        with nullcontext() if set_stance is None else set_stance("force_eager"):
            for _ in range(_FIRST_STEPS):
                unwrap_optimizer(optimizer).step()
                if is_made():
                    break
    except Exception as error:
        raise ResumeError(
            f"{type(optimizer).__name__} has state of other shapes than its parameters, and could"
            f" not make it by a step: {type(error).__name__}: {error}",
            hint="take a step with it before resuming, or resume without the optimizer",
        ) from error
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


class UnsavedBuffers(Struct, frozen=True):
    """The buffers of one module that are on the meta device and in no checkpoint."""

    path: str  # the name of the module in the model; empty for the model
    owner: nn.Module
    names: tuple[str, ...]  # the names of the buffers in the module

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the buffers as they are now: a module may replace them when it computes them."""
        for name in self.names:
            yield f"{self.path}.{name}" if self.path else name, getattr(self.owner, name)


def find_unsaved(model: nn.Module) -> list[UnsavedBuffers]:
    """Finds the buffers on the meta device that no checkpoint holds, by their modules."""
    found = []
    for path, owner in model.named_modules():
        names = tuple(
            name
            for name, buffer in members_of(owner)[1].items()
            if buffer is not None and buffer.is_meta and name in members_of(owner)[3]
        )
        if names:
            found.append(UnsavedBuffers(path, owner, names))
    return found


def fill_unsaved(model: nn.Module, unsaved: Sequence[UnsavedBuffers]) -> None:
    if not unsaved:
        return
    with _without_saved(model, unsaved), torch.no_grad():
        _mark(unsaved, flag=False)
        reasons = _initialise(model, unsaved)
        left = {full: reasons.get(full, "") for full in _marked(unsaved)}
        flags = {full: flag.clone() for full, flag in _flags(unsaved)}
        if flags:  # either value may be what is computed: they are computed from the other as well
            _mark(unsaved, flag=True)
            _initialise(model, unsaved)
            left |= {f: "" for f, flag in _flags(unsaved) if not torch.equal(flag, flags[f])}
    if left:
        listed = ", ".join(f"{full} ({why})" if why else full for full, why in left.items())
        raise ResumeError(
            f"buffers on the meta device that no checkpoint holds cannot be computed: {listed}",
            hint="build them on a real device, as accelerate's"
            " `init_empty_weights(include_buffers=False)` does, or give the module that owns them"
            " a reset_parameters()",
        )


def _flags(unsaved: Sequence[UnsavedBuffers]) -> Iterator[tuple[str, torch.Tensor]]:
    buffers = (pair for group in unsaved for pair in group.buffers())
    return ((full, buffer) for full, buffer in buffers if buffer.dtype is torch.bool)


def _initialise(model: nn.Module, unsaved: Sequence[UnsavedBuffers]) -> dict[str, str]:
    """Lets modules compute their buffers; returns what failed, by the buffers of the module."""
    modules = dict(model.named_modules())
    groups = {group.path: group for group in unsaved}
    wanted = {parent for group in unsaved for parent in _parent_paths(group.path)}
    failures: dict[str, str] = {}

    def call(path: str, initialise: Callable[[], object]) -> None:
        try:
            initialise()
        except Exception as error:  # noqa: BLE001  the code is the model's
            for full, _ in groups[path].buffers() if path in groups else ():
                failures[full] = f"{type(error).__name__}: {error}"

    for path in reversed([path for path in modules if path in wanted]):  # children first
        module = modules[path]
        methods = (getattr(modules[p], "_init_weights", None) for p in _parent_paths(path))
        of_library = next(filter(callable, methods), None)
        if of_library is not None:
            call(path, partial(of_library, module))
        own = getattr(module, "reset_parameters", None)
        if callable(own) and path in groups and (not of_library or any(_marked([groups[path]]))):
            call(path, own)
    return failures


def _parent_paths(path: str) -> Iterator[str]:
    """Yields the path of a module, and those of the modules that it is in, the innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


@contextmanager
def _without_saved(model: nn.Module, unsaved: Sequence[UnsavedBuffers]) -> Iterator[None]:
    """Replaces all parameters of a model, and its saved buffers, by some without content."""
    computed = {group.owner: group.names for group in unsaved}
    kept = []
    for module in model.modules():
        own, held, *_ = members_of(module)
        kept.append((module, dict(own), dict(held)))
    try:
        for module, parameters, buffers in kept:
            own, held, *_ = members_of(module)
            for name, parameter in parameters.items():
                if parameter is not None:
                    own[name] = nn.Parameter(_on_meta(parameter), requires_grad=False)
            for name, buffer in buffers.items():
                if buffer is not None and name not in computed.get(module, ()):
                    held[name] = _on_meta(buffer)
        yield
    finally:
        for module, parameters, buffers in kept:
            own, held, *_ = members_of(module)
            own.update(parameters)
            names = buffers.keys() - set(computed.get(module, ()))
            held.update({name: buffers[name] for name in names})


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _mark(unsaved: Sequence[UnsavedBuffers], *, flag: bool) -> None:
    """Fills buffers with values that none is expected to have; those of booleans with `flag`."""
    for group in unsaved:
        for _, buffer in group.buffers():
            buffer.fill_(flag if buffer.dtype is torch.bool else _mark_of(buffer.dtype))


def _mark_of(dtype: torch.dtype) -> float:
    is_float = dtype.is_floating_point or dtype.is_complex
    return float("nan") if is_float else torch.iinfo(dtype).max


def _marked(unsaved: Sequence[UnsavedBuffers]) -> Iterator[str]:
    """Yields the buffers that still have what `_mark` filled them with, booleans left out."""
    for full, buffer in (pair for group in unsaved for pair in group.buffers()):
        if buffer.numel() and buffer.dtype is not torch.bool:
            mark = _mark_of(buffer.dtype)
            if (buffer.isnan() if mark != mark else buffer == mark).all():  # noqa: PLR0124  NaN
                yield full
