"""What FSDP does with a model now, and which original parameters the flat ones of FSDP1 hold.

Neither can be asked for in public, and FSDP1 has no public way to its shards that does not
communicate. So this is the one place that reads FSDP's private attributes. Those of FSDP1 are the
same from torch 2.2 to 2.13.

A model cannot be read in some moments: in forward and backward passes, and while parameters are
whole. An exception leaves the attributes of a pass unchanged, so they count only where the pass is
still running.

`write_flat_layout` writes a file into a checkpoint of LOCAL_STATE_DICT that names the original
parameters, which the checkpoint itself does not.
"""

# ruff: noqa: SLF001 - the private attributes named above

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.core.arguments import check_names
from ckptkit.core.crc import crc32
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.index import Shape, Span
from ckptkit.core.manifest import FLAT_LAYOUT
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import replace_file
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.pieces import Replicas, ShardLayout, span_places, whole_places
from ckptkit.training.step_names import clean_fqn, parallel_prefixes

_CALL_HINT = "make the call between two steps: after optimizer.step(), and outside of hooks"
_CALL = nn.Module._call_impl.__code__


def check_unused(modules: Sequence[nn.Module]) -> None:
    """Refuses a sharded model while a forward or backward pass is using it."""
    flat = [m for m in modules if isinstance(m, FullyShardedDataParallel)]
    states = list(fsdp2_states(modules))
    if any(_name(m._handle, "_training_state") == "SUMMON_FULL_PARAMS" for m in flat):
        raise UsageError(
            "FSDP's parameters are whole, and what is changed in them is not in the shards yet",
            where="summon_full_params",
            hint="make the call after the `with` block",
        )
    if (flat or states) and torch._C._current_graph_task_id() != -1:
        raise UsageError(
            "the call came from a hook, while gradients are computed and reduced",
            where="backward pass of FSDP",
            hint=_CALL_HINT,
        )
    running = {
        id(module) for module, state in states if _name(state, "_training_state") == "FORWARD"
    }
    if running and _is_called(running):
        raise UsageError(
            "the call came from a hook, while parameters are gathered and in use",
            where="forward pass of FSDP",
            hint=_CALL_HINT,
        )


def check_registered(modules: Sequence[nn.Module]) -> None:
    """Refuses parameters that a module was given after FSDP2 began to work, which it never uses."""
    for _, state in fsdp2_states(modules):
        if state._is_root is None:  # its first forward pass registers the parameters then
            continue
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            for sharded in group.fsdp_params if group is not None else ():
                info = sharded._module_info
                if info.module._parameters.get(info.param_name) is not sharded.sharded_param:
                    raise UnsupportedError(
                        "the module has another parameter than fully_shard works on, which goes"
                        " on with the old one",
                        where=str(getattr(sharded, "_param_fqn", None) or info.param_name),
                        hint="copy the values in place, or give the model new ones by"
                        " load_state_dict(…, assign=True)",
                    )


def fsdp2_states(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the modules that fully_shard was applied to, each with its FSDP2 state."""
    for module in modules:
        find = getattr(module, "_get_fsdp_state", None)
        if callable(find):
            yield module, find()


def _name(holder: object, attribute: str) -> str:
    return str(getattr(getattr(holder, attribute, None), "name", ""))


def _is_called(modules: set[int]) -> bool:
    """Whether any thread is inside a call of one of the modules."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _CALL and id(at.f_locals.get("self")) in modules:
                return True
            at = at.f_back
    return False


class FlatPart(Struct, frozen=True):
    """One original parameter inside a flat one."""

    fqn: str  # its clean name
    aliases: tuple[str, ...]  # further names of the same parameter
    in_shard: ShardLayout  # where it is in the flat shard of this rank
    # where it is in the original parameter (`use_orig_params=True`), whose optimizer state is cut
    # likewise; None without
    on_its_own: ShardLayout | None
    parameter: nn.Parameter | None  # the original parameter that the optimizer has, None as before
    span: Span  # the elements on this rank, in the order of the flat parameter
    # the parameter that holds the elements instead of the flat one, until FSDP1 writes them back in
    # its next forward pass: `parameter.data` was set, or the module has a new parameter. None
    # mostly.
    assigned: nn.Parameter | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.fqn, *self.aliases)


class FlatUnit(Struct, frozen=True):
    """A flat parameter."""

    # the flat parameter itself, which the optimizer has with `use_orig_params=False`
    parameter: nn.Parameter
    shard: torch.Tensor  # this rank's part of it with its padding, in full precision
    parts: tuple[FlatPart, ...]  # the original parameters, in their order
    sharing: int  # how many ranks share the flat parameter's elements; 1 if each has them all
    extent: Copies  # the number of ranks that hold some of it, and which of them this is
    path: str  # the clean name of the module that has it
    # where the original parameters begin in the whole flat one, in elements
    starts: tuple[int, ...]
    elements: int  # how many it has on all ranks together, with padding between parameters


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether some module is wrapped by FSDP1."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def cast_buffers(
    model: nn.Module, parallel: Sequence[str] = ()
) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Returns the buffers that mixed precision casts in the first forward pass, by clean name.

    Of each the dtype that it had when it was wrapped, in which state dicts have it, and the one
    that it is cast to.

    Source: `_common_unshard_post_state_dict_hook` in `torch.distributed.fsdp._state_dict_utils`.
    """
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for raw, module in model.named_modules(remove_duplicate=False):
        cast = isinstance(module, FullyShardedDataParallel) and module.mixed_precision.buffer_dtype
        if not cast:
            continue
        ignored: Any = getattr(module, "_ignored_buffer_names", ())
        originals: Mapping[str, torch.dtype] = getattr(module, "_buffer_name_to_orig_dtype", {})
        for name, dtype in originals.items():
            if dtype.is_floating_point and name not in ignored:
                fqn = clean_fqn(f"{raw}.{name}" if raw else name, parallel)
                dtypes[fqn] = dtype, cast  # the innermost wrapper comes last
    return dtypes


def strategy_of(model: nn.Module) -> str:
    """Returns the name of the outermost FSDP1 wrapper's sharding strategy."""
    wrappers = (m for m in model.modules() if isinstance(m, FullyShardedDataParallel))
    return str(next(wrappers).sharding_strategy.name)


def managed_parameters(units: Sequence[FlatUnit]) -> frozenset[int]:
    """Returns the identities of all parameters whose elements are those of a flat one."""
    flats = {id(unit.parameter) for unit in units}
    parts = {
        id(parameter)
        for unit in units
        for part in unit.parts
        for parameter in (part.parameter, part.assigned)
        if parameter is not None
    }
    return frozenset(flats | parts)


def flat_units(model: nn.Module, parallel: Sequence[str] = ()) -> tuple[FlatUnit, ...]:
    """Returns all flat parameters of a model, as they are on this rank now.

    Where a flat parameter alone was widened, its original ones are widened too.
    """
    named: dict[int, tuple[Any, list[str]]] = {}
    for raw, module in model.named_modules(remove_duplicate=False):
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            named.setdefault(id(handle), (module, []))[1].append(clean_fqn(raw, parallel))
    for module, _ in named.values():
        _widen_originals(module._handle)
    shared: dict[tuple[Any, ...], Replicas] = {}
    return tuple(_unit(module, prefixes, shared) for module, prefixes in named.values())


def layout_facts(units: Sequence[FlatUnit]) -> list[dict[str, Any]]:
    """Returns the layout of the flat parameters as plain values."""
    return [
        {
            "names": [part.fqn for part in unit.parts],
            "shapes": [list(part.in_shard.shape) for part in unit.parts],
            "elements": [math.prod(part.in_shard.shape) for part in unit.parts],
            "aliases": {part.fqn: list(part.aliases) for part in unit.parts if part.aliases},
            "sharing": unit.sharing,
            "path": unit.path,
            "starts": list(unit.starts),
            "size": unit.elements,
            "axes": [list(part.in_shard.axes) for part in unit.parts],
        }
        for unit in units
    ]


def flat_shards(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns this rank's parts of all flat parameters, and what holds elements instead of them.

    The second value has the parameters themselves: the flat ones, and the original ones.
    """
    wrappers = (m for m in model.modules() if isinstance(m, FullyShardedDataParallel))
    handles = [m._handle for m in wrappers if m._handle is not None]
    shards = [_shard(handle.flat_param) for handle in handles]
    assigned = (_assigned(h, index) for h in handles for index in range(len(h.flat_param._fqns)))
    parameters = [p for h in handles for p in (h.flat_param, *(h.flat_param._params or ()))]
    return [*shards, *(tensor for tensor in assigned if tensor is not None)], parameters


@torch.no_grad()
def _widen_originals(handle: Any) -> None:
    """Makes original parameters parts of a flat one that was given another element type.

    accelerate gives float32 to flat parameters that are trained in mixed precision. The original
    ones are then what they were, until FSDP1's first forward pass copies them over the flat one;
    what is loaded meanwhile would be lost, or rounded. So that copy is made here.

    Source: `Accelerator.prepare_model` of accelerate 1.15, `FlatParamHandle._writeback_orig_params`
    and `_use_sharded_views`.
    """
    flat = handle.flat_param
    if flat._params is None or flat.is_meta or hasattr(flat, "_local_shard"):
        return
    pairs = zip(flat._params, flat._shard_param_infos, strict=True)
    held = [(parameter, info.numel_in_shard) for parameter, info in pairs if info.in_shard]
    is_narrow = all(p.dtype != flat.dtype and p.numel() == count for p, count in held)
    if is_narrow and len({_memory(p) for p, _ in held}) == 1:  # no one was replaced
        handle._writeback_orig_params()
        handle._use_sharded_views()


def _shard(flat: Any) -> torch.Tensor:
    """Returns the shard, the same object each time; before a forward pass, flat holds it itself."""
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard


def _assigned(handle: Any, index: int) -> torch.Tensor | None:
    """Returns the tensor that FSDP1's next forward pass would write back to the flat parameter.

    It is read, and loaded, where it is: the write-back itself would overwrite the elements that
    a user has put aside as `parameter.data`, which are those of the flat parameter.

    Source: `FlatParamHandle._writeback_orig_params`.
    """
    flat = handle.flat_param
    checked = flat._params is not None and not getattr(handle, "_skip_writeback_check", False)
    if not checked or not flat._shard_param_infos[index].in_shard:
        return None
    owner = flat._param_infos[index]
    held: torch.Tensor | None = getattr(owner.module, owner.param_name, None)
    if held is None:
        return None
    if _is_between_passes(handle):
        whole = handle._unsharded_flat_param_for_skipped_views
        return None if _share_memory(held, whole) else held
    # In a pass the modules have views of the whole flat parameter, which are no parameters.
    in_pass = handle.uses_sharded_strategy and not handle.is_sharded(flat)
    if in_pass or not isinstance(held, nn.Parameter):
        return None
    return None if held is flat._params[index] and _share_memory(held, flat) else held


def _is_between_passes(handle: Any) -> bool:
    """Whether parameters are left whole after a forward pass, for the backward pass."""
    return bool(handle.uses_sharded_strategy and handle._skipped_use_sharded_views)


def _share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return _memory(tensor) == _memory(other)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_assigned(tensor: torch.Tensor, handle: Any, index: int, fqn: str) -> nn.Parameter:
    """Refuses a tensor returned by `_assigned` that FSDP1 could not write back."""
    flat, sharded = handle.flat_param, handle.uses_sharded_strategy
    if _is_between_passes(handle):
        raise UnsupportedError(
            "the parameter was replaced between the forward and the backward pass, which FSDP1 does"
            f" not support with {handle._sharding_strategy.name}",
            where=fqn,
            hint="replace parameters after the backward pass",
        )
    shape = (flat._shard_param_infos[index].numel_in_shard,) if sharded else flat._shapes[index]
    here = (tuple(tensor.shape), tensor.dtype, tensor.device)
    expected = (tuple(shape), flat.dtype, flat.device)
    if here != expected or not isinstance(tensor, nn.Parameter):
        raise UnsupportedError(
            f"the parameter was replaced by one of {_described(*here)}, where"
            f" {_described(*expected)} was expected",
            where=fqn,
            hint="set `parameter.data` to a tensor like the one that it had",
        )
    return tensor


def _described(shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {list(shape)} in {str(dtype).removeprefix('torch.')} on {device}"


def _refuse_dropped(handle: Any, fqn: str) -> None:
    """Refuses a flat parameter whose `.data` was set: FSDP1 undoes that after the next pass."""
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", None)
    is_idle = getattr(handle._training_state, "name", "") == "IDLE"
    if shard is None or not is_idle or _share_memory(flat, shard):
        return
    if flat.shape == shard.shape and flat.dtype == shard.dtype and not flat.equal(shard):
        raise UnsupportedError(
            "`.data` of a flat parameter was set, which FSDP1 undoes after the next forward pass",
            where=fqn,
            hint="copy the values in place, or wrap the model with use_orig_params=True",
        )


def _unit(
    module: Any, prefixes: Sequence[str], interned: dict[tuple[Any, ...], Replicas]
) -> FlatUnit:
    handle = module._handle
    flat = handle.flat_param
    sharded, inter = bool(handle.uses_sharded_strategy), getattr(module, "_inter_node_pg", None)
    is_hybrid = module.sharding_strategy.name.lstrip("_").startswith("HYBRID")
    copies = Copies() if sharded else Copies(handle.world_size, handle.rank)
    # HYBRID_SHARD over groups of one rank becomes NO_SHARD, of that rank and those with copies.
    if inter is not None and (is_hybrid or not sharded):
        copies = Copies(dist.get_world_size(inter), dist.get_rank(inter))
    sharing = handle.world_size if sharded else 1
    rank = handle.rank if sharded else 0
    groups = id(inter), id(handle.process_group)

    def shared(holders: Copies, *, spread: bool) -> Replicas:
        """The same object for all pieces of the same ranks."""
        replicas = Replicas(*holders, spread=spread)
        return interned.setdefault((*groups, replicas), replicas)

    shard = _shard(flat)
    names = _names(flat, prefixes)
    if flat._params is None:
        _refuse_dropped(handle, names[0][0])
    starts: list[int] = []  # of the original parameters, in the unsharded flat parameter
    at = 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        starts += [] if is_padding else [at]
        at += numel
    contiguities: Sequence[bool] | Mapping[int, bool] = getattr(flat, "_contiguities", ())
    parts: list[FlatPart] = []
    for index, info in enumerate(flat._shard_param_infos):
        fqn, *aliases = names[index]
        if flat._param_extensions[index] is not None:
            raise UnsupportedError(
                "FSDP1 over tensor parallelism is not modelled",
                where=fqn,
                hint="use fully_shard (FSDP2) for two dimensions of parallelism",
            )
        shape = tuple(flat._shapes[index])
        axes: tuple[int, ...] = ()
        if contiguities and not contiguities[index]:  # it was flattened in the order of its strides
            strides = flat._strides[index]
            axes = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
        span = Span(0, 0)
        if info.in_shard:
            span = Span(info.intra_param_start_idx, info.intra_param_end_idx + 1)
        # The rank with the parameter's first element comes first.
        first_rank = starts[index] // max(shard.numel(), 1) if sharing > 1 else 0
        slot = ShardLayout(
            fqn,
            shape,
            span_places(span, shape, axes),
            tuple(shard.shape),
            shared(copies, spread=True),
            shared(copies.times(sharing, (rank - first_rank) % sharing), spread=False),
            info.offset_in_shard or 0,
            axes,
            sharded=True,
        )
        parameter, own = None, None
        if flat._params is not None:
            parameter = flat._params[index]
            # A range of one dimension, unless each rank has the whole flat parameter.
            own = replace(slot, held=(slot.elements,), start=None)
            if sharing == 1:
                places = whole_places(shape)
                own = replace(own, places=places, held=shape, axes=(), sharded=False)
        tensor = _assigned(handle, index)
        assigned = None if tensor is None else _check_assigned(tensor, handle, index, fqn)
        parts.append(FlatPart(fqn, tuple(aliases), slot, own, parameter, span, assigned))
    return FlatUnit(
        flat,
        shard,
        tuple(parts),
        sharing,
        copies.times(sharing, rank),
        prefixes[0],
        tuple(starts),
        math.prod(flat._unpadded_unsharded_size),
    )


def _names(flat: Any, prefixes: Sequence[str]) -> list[list[str]]:
    """Returns the names of each original parameter, the one to save it under first."""
    relative = [[fqn] for fqn in flat._fqns]
    position = {(info.module, info.param_name): i for i, info in enumerate(flat._param_infos)}
    for info in flat._shared_param_infos:
        name = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        relative[position[info.prim_module, info.prim_param_name]].append(name)
    return [
        list(
            dict.fromkeys(
                clean_fqn(f"{prefix}.{name}" if prefix else name)
                for prefix in prefixes
                for name in names
            )
        )
        for names in relative
    ]


_VERSION = 1


@check_names
def write_flat_layout(model: nn.Module, folder: str | os.PathLike[str]) -> Path | None:
    """Writes which parameters the flat parameters of FSDP1 hold.

    A checkpoint of LOCAL_STATE_DICT holds flat parameters alone, without names or shapes. Call
    this once with the model as it is wrapped, and with the folder that the files of all ranks are
    saved to; `ckptkit consolidate` finds the file there. It may be called on every rank: nothing
    is communicated, and only rank 0 writes.

    Args:
        model: The model, wrapped by FSDP1, by itself or through accelerate.
        folder: Of the checkpoint; made where it is not there.

    Returns:
        The file, or None on other ranks than 0.

    Raises:
        UsageError: If no module is wrapped by FSDP1.
        OSError: If the file cannot be written.
    """
    units = flat_units(model, parallel_prefixes(model))
    if not units:
        raise UsageError(
            "no module of the model is wrapped by FSDP1",
            where="write_flat_layout",
            hint="pass the model that FullyShardedDataParallel, or accelerate's prepare, returned",
        )
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    facts = layout_facts(units)
    document = {
        "layout_version": _VERSION,
        "flat_parameters": facts,
        "crc32": crc32(json.dumps(facts, sort_keys=True).encode()),
    }
    path = Path(folder, FLAT_LAYOUT)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
    # In the place of an earlier one, whole or not at all.
    replace_file(path, data, LOCAL_DISK, draft=path.with_name(f".{path.name}.{os.getpid()}"))
    return path
