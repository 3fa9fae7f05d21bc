"""The values of `get_extra_state`, which modules save besides tensors, and their restoring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ckptkit.core.index import Key, KeyPath, TensorIndex
from ckptkit.training.resume.load_pieces import list_first
from ckptkit.training.resume.restore import ValueLocation, unflatten
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.state.collect import BoundModel
from ckptkit.training.state.dtensors import local_part
from ckptkit.training.state.fsdp1 import has_flat_parameters
from ckptkit.training.state.objects import flatten
from ckptkit.training.state.pieces import Piece
from ckptkit.training.step_names import clean_fqn, parallel_prefixes

logger = logging.getLogger(__name__)

_EXTRA = "_extra_state"  # as `nn.Module.state_dict` calls it
_PLAIN = frozenset((torch.Tensor, nn.Parameter))


def extra_state_changes(
    stored: StoredStep, model: BoundModel, pieces: list[Piece], *, rank: int
) -> Iterator[Callable[[], object]]:
    """Reads the extra state of a model's modules.

    Args:
        stored: The step.
        model: The model.
        pieces: Gets the sharded tensors in it, to be filled before.
        rank: Of this process.

    Yields:
        Functions that restore it.
    """
    index = stored.index(model.unit)
    left = set(_extra_paths(index, model.path))
    missing: list[str] = []
    for name, module in _modules(model.module):
        path = (*model.path, name)
        stored_paths = {other for other in left if other[: len(path)] == path}
        left -= stored_paths
        live = module.get_extra_state()
        if stored_paths or stored.structure(model.unit, path) is not None:
            where = f"{model.key}, {name}"
            restored = unflatten(stored, ValueLocation(model.unit, path, where), live, saved=True)
            pieces += restored.pieces
            state = restored.value
            yield lambda module=module, state=state: module.set_extra_state(state)  # type: ignore[misc]
        elif list(flatten(live)) != [((), None)]:
            missing.append(name)
    if rank == 0:
        _warn("was not saved with the step, and stays as it is", model.key, missing)
        keys = sorted(".".join(map(str, path)) for path in left)
        _warn("was saved, and no module of the model takes it", model.key, keys)


def copied_changes(
    model: BoundModel, pieces: Mapping[str, Sequence[Piece]]
) -> Iterator[Callable[[], object]]:
    """Finds tensors that `state_dict` of a module copies, so that filling them changes nothing.

    Modules of torchmetrics copy their states, and hooks may cast parameters.

    Args:
        model: The model.
        pieces: What is filled, by directory.

    Yields:
        A function that passes the copies, once they are filled, to `load_state_dict`.
    """
    raw_names = () if has_flat_parameters(model.module) else _copied(model.module)
    if not raw_names:
        return
    parallel = parallel_prefixes(model.module)
    filled = {
        (unit, path): piece
        for unit in model.places.units
        for piece in pieces.get(unit, ())
        for path in (piece.key_path, *piece.aliases)
    }
    copies: dict[str, torch.Tensor] = {}
    for raw in raw_names:
        piece = filled.get(model.places.of(clean_fqn(raw, parallel)))
        if piece is not None and piece.local.shape == piece.shape:
            copies[raw] = piece.local
    if copies:
        yield partial(model.module.load_state_dict, copies, strict=False)


def _copied(model: nn.Module) -> list[str]:
    """Returns the names under which a state dict has memory of its own."""
    own = {_memory(tensor) for tensor in chain(model.parameters(), model.buffers())}
    # Other tensors may be a module's own too: then a second state dict has the same memory.
    strange = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if type(value) in _PLAIN and value.numel() and _memory(value) not in own
    }
    strange = {name: v for name, v in strange.items() if name.rpartition(".")[2] != _EXTRA}
    again: Mapping[str, Any] = model.state_dict(keep_vars=True) if strange else {}
    return [
        name
        for name, value in strange.items()
        if type(again.get(name)) in _PLAIN and _memory(again[name]) != _memory(value)
    ]


def _memory(tensor: torch.Tensor) -> int:
    local = local_part(tensor)
    return local.untyped_storage().data_ptr() if type(local) in _PLAIN else 0


def is_extra(path: KeyPath, model: KeyPath) -> bool:
    """Whether a key path of a model is that of an extra state, or of something in it."""
    if path[: len(model)] != model or len(path) == len(model):
        return False
    return str(path[len(model)]).rpartition(".")[2] == _EXTRA


def without_extra(pieces: Iterable[Piece], model: BoundModel) -> list[Piece]:
    """Leaves out tensors that modules get through `set_extra_state`."""
    return [
        piece
        for piece in pieces
        if piece.unit != model.unit or not is_extra(piece.key_path, model.path)
    ]


def extra_keys(index: TensorIndex, model: KeyPath) -> set[Key]:
    return {key for key, entry in index.tensors.items() if is_extra(entry.key_path, model)}


def _extra_paths(index: TensorIndex, model: KeyPath) -> Iterator[KeyPath]:
    """Yields the key paths of a model's values that are no tensors of its own."""
    for path in index.values:
        if path[: len(model)] == model:
            yield path
    for key in extra_keys(index, model):
        yield index.tensors[key].key_path


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that have an extra state, with its key, under each of their names."""
    parallel = parallel_prefixes(model)
    for raw, module in model.named_modules(remove_duplicate=False):
        if _overrides(module, "get_extra_state") and _overrides(module, "set_extra_state"):
            prefix = clean_fqn(raw, parallel)
            yield f"{prefix}.{_EXTRA}" if prefix else _EXTRA, module


def _overrides(module: nn.Module, method: str) -> bool:
    own: Any = getattr(type(module), method, None)
    return own is not getattr(nn.Module, method)


def _warn(what: str, key: str, names: list[str]) -> None:
    if names:
        logger.warning("%s: the extra state %s %s", key, list_first(names), what)
