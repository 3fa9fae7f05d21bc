"""Allocates memory to load into, for models on the meta device.

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

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer

from ckptkit.core.errors import ResumeError
from ckptkit.training.state.dtensors import DTensor
from ckptkit.training.state.fsdp import fsdp2_states
from ckptkit.training.state.models import members_of

_Named = tuple[nn.Module, str]


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
