"""Computes the buffers of models on the meta device that no checkpoint holds.

Such a buffer, as the frequencies of a rotary embedding, is computed when its module is built; on
the meta device that gives it no content. It is computed again as `from_pretrained` of Transformers
does it: by the `_init_weights` of the innermost model of Transformers that the module is in, or of
one that it is in, or else by a `reset_parameters` of its own. Either may initialise parameters too:
while they run, all parameters and saved buffers of the model are replaced by others on the meta
device, so that nothing that is loaded changes and no DTensor communicates.

Source: transformers 5.23, `PreTrainedModel.initialize_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from msgspec import Struct
from torch import nn

from ckptkit.core.errors import ResumeError
from ckptkit.training.state.models import members_of


class UnsavedBuffers(Struct, frozen=True):
    """The buffers of one module that are on the meta device and in no checkpoint."""

    path: str  # the name of the module in the model; empty for the model
    owner: nn.Module
    names: tuple[str, ...]  # the names of the buffers in the module

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now: a module may replace them when it computes them."""
        return {name: getattr(self.owner, name) for name in self.names}


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
    flags = [b for group in unsaved for b in group.buffers.values() if b.dtype is torch.bool]
    with _without_saved(model, unsaved), torch.no_grad():
        _mark(unsaved, flag=False)
        reasons = _initialise(model, unsaved)
        left = {full: reasons.get(full, "") for full in _marked(unsaved)}
        if flags:  # either value may be what is computed
            left |= dict.fromkeys(_flags_not_computed(model, unsaved), "")
    if left:
        listed = ", ".join(f"{full} ({why})" if why else full for full, why in left.items())
        raise ResumeError(
            f"buffers on the meta device that no checkpoint holds cannot be computed: {listed}",
            hint="build them on a real device, as accelerate's"
            " `init_empty_weights(include_buffers=False)` does, or give the module that owns them"
            " a reset_parameters()",
        )


def _flags_not_computed(model: nn.Module, unsaved: Sequence[UnsavedBuffers]) -> Iterator[str]:
    """Yields the buffers of booleans that keep what they are filled with, where it matters."""
    first = {
        _full(group, name): buffer.clone()
        for group in unsaved
        for name, buffer in group.buffers.items()
        if buffer.dtype is torch.bool
    }
    _mark(unsaved, flag=True)
    _initialise(model, unsaved)
    for group in unsaved:
        for name, buffer in group.buffers.items():
            before = first.get(_full(group, name))
            if before is not None and not torch.equal(buffer, before):
                yield _full(group, name)


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
            for name in groups[path].names if path in groups else ():
                failures[_full(groups[path], name)] = f"{type(error).__name__}: {error}"

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


def _full(group: UnsavedBuffers, name: str) -> str:
    return f"{group.path}.{name}" if group.path else name


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
        for buffer in group.buffers.values():
            if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
                buffer.fill_(float("nan"))
            else:
                is_flag = buffer.dtype is torch.bool
                buffer.fill_(flag if is_flag else torch.iinfo(buffer.dtype).max)


def _marked(unsaved: Sequence[UnsavedBuffers]) -> Iterator[str]:
    """Yields the buffers that still have what `_mark` filled them with, booleans left out."""
    for group in unsaved:
        for name, buffer in group.buffers.items():
            if not buffer.numel() or buffer.dtype is torch.bool:
                continue
            if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
                is_marked = buffer.isnan().all()
            else:
                is_marked = (buffer == torch.iinfo(buffer.dtype).max).all()
            if is_marked:
                yield _full(group, name)
