"""The states of an optimizer beside the weights of an output, under the names of these.

Under a map, a state that has an element for each of a parameter, such as a moment of Adam or the
momentum of SGD and Muon, is split, joined and transposed as the parameter is. A number for each
parameter, such as the step, is that of all parameters that a tensor is made of, which have the
same. Groups have the new names of their members.

torchtitan 0.3 trains queries, keys and values in one matrix. It stores three in the place of the
weight, and the states of the one.
Source: torchtitan/models/common/attention.py (`FusedQKVLinear`),
torchtitan/components/optimizer/utils.py (`get_flat_optim_state_dict`), 0.3.0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ckptkit.conversion.mapped_names import MappedModel
from ckptkit.conversion.names_on_disk import make_disk_products
from ckptkit.conversion.source.open import OpenedCheckpoint
from ckptkit.core.arrays import numpy_dtype
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import (
    FormatError,
    RefusedError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptkit.core.index import Fqn, Key, KeyPath, Shape, Span, TensorEntry
from ckptkit.core.text import join_first, quote
from ckptkit.engine.kernels import recast
from ckptkit.engine.reader import Origin, TensorReader, read_span, same_values
from ckptkit.formats.dcp.megatron import UNNAMED_GROUPS
from ckptkit.formats.dcp.reader import BlobRef, open_blob
from ckptkit.formats.optimizer_names import NUMBERED
from ckptkit.formats.pickle.torch_values import parse_values
from ckptkit.formats.pickle.torch_zip import open_archive
from ckptkit.formats.torch_files import TorchOptimizerReader, read_optimizer_file
from ckptkit.hub_names.disk_tensors import HubNames, HubTensor, NamingRequest, find_whole
from ckptkit.name_maps.apply import apply_map
from ckptkit.name_maps.language import invert, parse_map
from ckptkit.options import ConsolidateRequest
from ckptkit.plan.coverage import refuse_problems
from ckptkit.plan.layouts.frameworks import MegatronStates
from ckptkit.plan.optimizer_states import (
    GROUPS,
    MEMBERS,
    OPTIMIZER,
    STATE,
    STEP,
    OptimizerStates,
    drop_unwanted_members,
    give_to_twins,
    keep_states,
    list_groups,
    restore_groups,
    select_optimizer_states,
)
from ckptkit.plan.plan import SOURCE, Copy, Product, StackedPart
from ckptkit.storage.base import Source

_MAX_BLOB_BYTES = 64 << 20
_MAX_VALUES = 10_000_000  # names of parameters, and settings, over all groups
_MAX_DEPTH = 20
_LISTED = 5


def find_states(
    checkpoint: OpenedCheckpoint,
    request: ConsolidateRequest,
    model: Sequence[TensorEntry],
    config: Mapping[str, Any] | None,
    twins: Mapping[str, str],
) -> tuple[OptimizerStates, int, list[str]]:
    """Finds the states of the optimizer of a model, under the names of the model.

    Args:
        checkpoint: The checkpoint.
        request: Which parameters are wanted.
        model: The weights that are written.
        config: The configuration of the model, None where there is none.
        twins: From names that are not written to the tied weights that are, which have no states
            of their own in most optimizers.

    Returns:
        The states, the bytes of the source that they are made from, and notes for the user.
    """
    tree = model[0].tree if model else ""
    if next(checkpoint.index.of_part("optimizer"), None) is None:
        for unit in checkpoint.units:  # raises the error that is ignored without --optimizer
            if unit.candidate.format == TorchOptimizerReader.name:
                read_optimizer_file(checkpoint.source, unit.candidate)
    mapped = checkpoint.mapped

    def wants(name: str) -> bool:
        # Under a map, options see the names that it makes.
        return mapped is not None or request.wants(twins.get(name, name))

    stored, entries = select_optimizer_states(
        checkpoint.index, tree, wants, location=checkpoint.path
    )
    refuse_problems(checkpoint.index, entries, checkpoint.path)
    states, notes = _with_plain_values(stored, checkpoint.source)
    values = drop_unwanted_members(states.values, states.unwrapped, wants)
    states = replace(states, values=restore_groups(values, wants))
    if mapped is not None:
        origin, where = Origin(SOURCE, checkpoint.source, checkpoint.index), checkpoint.path
        states = split_qkv(states, mapped, config, origin, where=where)
        states = map_states(states, mapped, origin, where=where)
    held = {str(path[1]) for path, _ in states.tensors if path[0] == STATE}
    states = give_to_twins(states, {n: twin for n, twin in twins.items() if twin not in held})
    if mapped is not None:
        states = keep_states(states, {str(entry.name) for entry in model})
    _check_names(states, model, checkpoint.path)
    notes += [
        note
        for note in checkpoint.index.run.notes
        if NUMBERED in note or note.startswith(UNNAMED_GROUPS)
    ]
    return states, sum(entry.size_bytes for entry in entries), notes


def _check_names(states: OptimizerStates, model: Sequence[TensorEntry], location: str) -> None:
    names = {str(entry.name) for entry in model}
    twice = next((made for _, made in states.tensors if made.spec.name in names), None)
    if twice is not None:
        raise RefusedError(
            f"a weight of the model and a state of its optimizer are both called"
            f" {twice.spec.name!r}",
            where=f"optimizer of {location}",
            hint="write them one by one: once without --optimizer",
        )


def _with_plain_values(
    states: OptimizerStates, source: Source
) -> tuple[OptimizerStates, list[str]]:
    """Reads values from the source, and leaves out those that are not plain."""
    kept: dict[KeyPath, Any] = {}
    odd: list[str] = []
    left = iter(range(_MAX_VALUES))
    for path, value in states.values.items():
        try:
            stored = _value_at(value, source, path) if isinstance(value, BlobRef) else value
            kept[path] = _copy_plain(stored, left)
        except (UnsafePickleError, UnsupportedError, TypeError, UnicodeEncodeError):  # not plain
            odd.append(".".join(map(str, path)))
    notes = []
    if odd:
        notes.append(
            f"{join_first(map(repr, odd), len(odd), _LISTED)} of the optimizer hold more than"
            " numbers and texts, and are left out"
        )
    return replace(states, values=kept), notes


def _value_at(blob: BlobRef, source: Source, path: KeyPath) -> object:
    """Parses a python object of the source."""
    where = f"{blob.path}, object {'.'.join(map(str, path))!r}"
    size = blob.stop - blob.start
    if size > _MAX_BLOB_BYTES:
        raise FormatError(
            f"has {size:,} bytes, more than the {_MAX_BLOB_BYTES:,} that a setting may have",
            where=where,
        )
    archive = open_archive(*open_blob(source, blob, where=where), where=where)
    return parse_values(archive.pickle(), where=where)


def _copy_plain(value: object, left: Iterator[int], depth: int = 0) -> Any:
    """Returns a value made of python's own types, or raises a `TypeError`.

    `left` has an item for each value that an optimizer may still have.
    """
    if next(left, None) is None or depth > _MAX_DEPTH:
        raise TypeError
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair is no text
        return value
    if value is None or type(value) in {bool, int, float}:
        return value
    if isinstance(value, Mapping):
        items = value.items()
        return {_copy_plain(k, left, depth + 1): _copy_plain(v, left, depth + 1) for k, v in items}
    if isinstance(value, (list, tuple)):
        made = [_copy_plain(item, left, depth + 1) for item in value]
        return tuple(made) if isinstance(value, tuple) else made
    raise TypeError


def read_steps(states: OptimizerStates, origin: Origin) -> float:
    """Returns how many steps the optimizer took, as it counted them for a parameter; or 0."""
    for path, product in states.tensors:
        if path[-1] == STEP and isinstance(product.body, Copy) and not product.spec.shape:
            return _read_number(product.body.key, origin)
    counted = (value for path, value in states.values.items() if path[-1] == STEP)
    return next((value for value in counted if isinstance(value, int | float)), 0)


_HINT = "leave --optimizer out"
_FUSED_QKV = """
name = "torchtitan-fused-qkv"
source = "torchtitan"
target = "torchtitan"
model_types = ["llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss"]

[sizes]
layer = "num_hidden_layers"
heads = "num_attention_heads"
groups = ["num_key_value_heads", "heads"]
head_dim = ["head_dim", "hidden_size / heads"]
query = "heads / groups * head_dim"

[[rule]]
from = "layers.{layer}.attention.qkv_linear.wqkv.weight"
to = [
  "layers.{layer}.attention.qkv_linear.wq.weight",
  "layers.{layer}.attention.qkv_linear.wk.weight",
  "layers.{layer}.attention.qkv_linear.wv.weight",
]
steps = [{ split = ["query", "head_dim", "head_dim"], groups = "groups" }]
optional = true

[[rule]]
from = "layers.{layer}.attention.qkv_linear.wqkv.bias"
to = [
  "layers.{layer}.attention.qkv_linear.wq.bias",
  "layers.{layer}.attention.qkv_linear.wk.bias",
  "layers.{layer}.attention.qkv_linear.wv.bias",
]
steps = [{ split = ["query", "head_dim", "head_dim"], groups = "groups" }]
optional = true
"""
_QKV = re.compile(r"\.attention\.qkv_linear\.w(q|k|v|qkv)\.(?:weight|bias)$")
_OF_MEGATRON = ("exp_avg", "exp_avg_sq")


def prepare_for_megatron(
    states: OptimizerStates,
    weights: Sequence[Product],
    parts: Mapping[Fqn, StackedPart],
    origin: Origin,
    *,
    where: str,
) -> MegatronStates:
    """Returns states as Megatron-Core's distributed optimizer loads them.

    It asks for both moments and a float32 copy of each parameter, counts one step, and has a group
    of biases and vectors beside one of all else.

    Args:
        states: Under Megatron-Core's names.
        weights: The same in float32; stacked ones in parts.
        parts: Where these are in the stacked tensors.
        origin: What the states are read from.
        where: The place for errors.
    """
    place, hint = f"optimizer of {where}", f"{_HINT}, or go on with --to dcp"
    held: dict[str, dict[str, Product]] = {kind: {} for kind in _OF_MEGATRON}
    for path, product in states.tensors:
        kind = str(path[2])
        if kind == STEP:
            continue
        if kind not in held:
            raise RefusedError(
                f"state {kind!r} of {quote(str(path[1]))}: Megatron-Core's distributed optimizer"
                f" loads the states of Adam alone, which are {' and '.join(_OF_MEGATRON)}",
                where=place,
                hint=hint,
            )
        name = product.spec.name.removeprefix(f"{OPTIMIZER}.{STATE}.").removesuffix(f".{kind}")
        held[kind][name] = product
    tensors: list[tuple[Fqn, Product]] = []
    of_tensors: dict[Fqn, StackedPart] = {}
    is_vector: dict[str, bool] = {}
    for weight in weights:
        name, shape = weight.spec.name, weight.spec.shape
        if name.endswith(".expert_bias"):  # a buffer
            continue
        part = parts.get(name) or StackedPart(name, (), ())
        is_vector[part.name] = part.name.endswith(".bias") or len(shape) - len(part.index) <= 1
        for kind in (*held, "param"):
            state = weight if kind == "param" else held[kind].get(name)
            if state is None:
                raise RefusedError(
                    f"parameter {quote(part.name)} has no state {kind!r}, as a frozen one, and"
                    " Megatron-Core loads one for each",
                    where=place,
                    hint=hint,
                )
            if state.spec.shape != shape:
                raise RefusedError(
                    f"state {kind!r} of {quote(part.name)} is {list(state.spec.shape)}, and the"
                    f" parameter {list(shape)}: Megatron-Core loads states of its shape",
                    where=place,
                    hint=hint,
                )
            full = Fqn(f"{OPTIMIZER}.{STATE}.{kind}.{name}")
            spec = replace(state.spec, name=full)
            key = Fqn(f"{OPTIMIZER}.{STATE}.{kind}.{part.name}")
            tensors.append((key, recast(replace(state, spec=spec), dtype_named("float32"))))
            if part.index:
                of_tensors[full] = replace(part, name=key)
    steps = list_steps(states, origin)
    if len(set(steps.values())) != 1:
        least, most = min(steps, key=lambda n: steps[n]), max(steps, key=lambda n: steps[n])
        counted = f"{steps[least]:g} steps of {quote(least)} and {steps[most]:g} of {quote(most)}"
        found = f"counts {counted}" if steps else "counts no steps"
        raise RefusedError(
            f"{found}, and Megatron-Core has one number for all", where=place, hint=hint
        )
    step = int(next(iter(steps.values())))
    groups = tuple(
        _merge_groups(states, [n for n, is_one in is_vector.items() if is_one == flat], place, hint)
        for flat in (False, True)
    )
    return MegatronStates(tuple(tensors), of_tensors, groups, step)


def _merge_groups(
    states: OptimizerStates, names: Sequence[str], where: str, hint: str
) -> dict[str, Any]:
    """Returns the settings that parameters have in common, or refuses different ones."""
    of_names = {
        str(name): {key: value for key, value in group.items() if key != MEMBERS}
        for group in list_groups(states)
        for name in group[MEMBERS]
    }
    for name in names:
        own, first = of_names.get(name), of_names.get(names[0])
        lacking = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in (own or {})]
        if own is None or lacking:
            found = "is in no group" if own is None else f"has no setting {lacking[0]!r}"
            raise RefusedError(f"parameter {quote(name)} {found}", where=where, hint=hint)
        if own != first:
            raise RefusedError(
                f"parameters {quote(names[0])} and {quote(name)} have different settings, and"
                " Megatron-Core has one group of biases and vectors and one of all others",
                where=where,
                hint=hint,
            )
    return of_names[names[0]] if names else {}


def list_steps(states: OptimizerStates, origin: Origin) -> dict[str, float]:
    """Returns how many steps the optimizer took, by parameter."""
    counted = {
        str(path[1]): float(value)
        for path, value in states.values.items()
        if path[0] == STATE and path[-1] == STEP and isinstance(value, int | float)
    }
    for path, product in states.tensors:
        if path[-1] == STEP and isinstance(product.body, Copy) and not product.spec.shape:
            counted[str(path[1])] = _read_number(product.body.key, origin)
    return counted


def _read_number(key: Key, origin: Origin) -> float:
    entry = origin.index.tensors[key]
    data = read_span(origin, entry, Span(0, 1))
    return float(np.frombuffer(data, numpy_dtype(entry.dtype))[0])


def split_qkv(
    states: OptimizerStates,
    mapped: MappedModel,
    config: Mapping[str, Any] | None,
    origin: Origin,
    *,
    where: str,
) -> OptimizerStates:
    """Splits the states of torchtitan's fused queries, keys and values, as its weights are split.

    `mapped`: the map, as it was applied to the weights. `config`: of the model.
    """
    qkv = {name for name in _list_parameters(states) if _QKV.search(name)}
    fused = {name for name in qkv if name.removeprefix(mapped.wrapper) not in mapped.live}
    if not fused:
        return states
    rest, own = _split(states, lambda name: name in fused)
    # What ckptkit writes has the states in both forms.
    return rest if qkv - fused else _join(rest, _map_qkv(own, config, origin, where))


def fuse_qkv(
    states: OptimizerStates, config: Mapping[str, Any] | None, origin: Origin, *, where: str
) -> OptimizerStates:
    """Adds the states of torchtitan's fused queries, keys and values to those of single ones.

    `states`: under torchtitan's names. `config`: of the model.
    """
    _, own = _split(states, lambda name: _QKV.search(name) is not None)
    is_fused = (config or {}).get("model_type") in parse_map(_FUSED_QKV, where="").model_types
    if not own.tensors or not is_fused:
        return states
    return _join(states, _map_qkv(own, config, origin, where, is_inverse=True))


def _map_qkv(
    states: OptimizerStates,
    config: Mapping[str, Any] | None,
    origin: Origin,
    where: str,
    *,
    is_inverse: bool = False,
) -> OptimizerStates:
    name_map = parse_map(_FUSED_QKV, where="queries, keys and values of torchtitan")
    name_map = invert(name_map) if is_inverse else name_map
    wrapper = name_map.find_wrapper(_list_parameters(states))
    live = {
        Fqn(str(path[1]).removeprefix(wrapper)): (product.spec.dtype, product.spec.shape)
        for path, product in states.tensors
        if product.spec.shape
    }
    names = apply_map(name_map, config or {}, live, where=f"optimizer of {where}", extent="layers")
    return map_states(states, MappedModel(name_map, names, live, wrapper), origin, where=where)


def _list_parameters(states: OptimizerStates) -> dict[str, None]:
    paths = [path for path, _ in states.tensors] + list(states.values)
    return dict.fromkeys(str(path[1]) for path in paths if path[0] == STATE and path[1:])


def _split(
    states: OptimizerStates, is_own: Callable[[str], bool]
) -> tuple[OptimizerStates, OptimizerStates]:
    """Splits states into those of other parameters, and those of some."""
    names = _list_parameters(states)
    members = [m for path, own in states.values.items() if path[-1] == MEMBERS for m in own]
    own = {name for name in dict.fromkeys([*names, *map(str, members)]) if is_own(name)}
    others = {*names, *map(str, members)} - own
    return keep_states(states, others), keep_states(states, own)


def _join(states: OptimizerStates, others: OptimizerStates) -> OptimizerStates:
    """Joins the states of different parameters, whose groups are the same."""
    values = {**others.values, **states.values}
    for path, members in others.values.items():
        if path[-1] == MEMBERS:
            values[path] = [*states.values[path], *members]
    return replace(states, tensors=(*states.tensors, *others.tensors), values=values)


def map_states(
    states: OptimizerStates, mapped: MappedModel, origin: Origin, *, where: str
) -> OptimizerStates:
    """Returns the states of the tensors that a map makes.

    Args:
        states: With plain values, and groups that list their members.
        mapped: The map, as it was applied to the weights.
        origin: What the states are read from: numbers of several parameters are compared.
        where: The place for errors.
    """
    live = {name: shape for name, (_, shape) in mapped.live.items()}
    targets = mapped.names.tensors
    kinds: dict[str, dict[Fqn, Product]] = defaultdict(dict)  # of states, by parameter
    values: dict[str, dict[Fqn, Any]] = defaultdict(dict)
    kept: dict[KeyPath, Any] = {}

    def parameter(saved: object) -> Fqn:
        name = Fqn(str(saved).removeprefix(mapped.wrapper))
        if name not in live:
            raise RefusedError(
                f"holds states of {quote(str(saved))}, which is no tensor of the model",
                where=f"optimizer of {where}",
                hint=_HINT,
            )
        return name

    for path, product in states.tensors:
        match path:
            case (str() as key, name, kind) if key == STATE:
                kinds[str(kind)][parameter(name)] = product
            case _:
                raise RefusedError(
                    f"state {quote('.'.join(map(str, path)))} is not that of one parameter",
                    where=f"optimizer of {where}",
                    hint=_HINT,
                )
    for path, value in states.values.items():
        if path[0] == STATE and path[2:]:
            values[".".join(map(str, path[2:]))][parameter(path[1])] = value
        elif path[-1] == MEMBERS:
            kept[path] = list(value)
        else:
            kept[path] = value
    parts = mapped.names.parts

    def stacked(name: Fqn) -> Fqn:
        return parts[name].name if name in parts else name

    for path in [path for path in kept if path[0] == GROUPS and path[-1] == MEMBERS]:
        own = {Fqn(str(member).removeprefix(mapped.wrapper)): True for member in kept[path]}
        made = _of(targets, own, "place in the same group", where)
        kept[path] = list(dict.fromkeys(str(stacked(name)) for name in made))
    tensors: dict[str, tuple[KeyPath, Product]] = {}
    of_states: dict[Fqn, StackedPart] = {}
    numbers: dict[tuple[Fqn, str], Product] = {}
    for kind, held in kinds.items():
        made_of_kind = _map_kind(kind, held, targets, live, origin, where)
        whole = {parts[name].name for name in made_of_kind if name in parts}
        lacking = [n for n in parts if parts[n].name in whole and n not in made_of_kind]
        if lacking:
            raise RefusedError(
                f"{quote(lacking[0])}, a part of {quote(stacked(lacking[0]))}, has no state"
                f" {kind!r}, as a frozen one, and other parts have one",
                where=f"optimizer of {where}",
                hint=_HINT,
            )
        for name, product in made_of_kind.items():
            path = (STATE, stacked(name), kind)
            if not product.spec.shape and name in parts:
                first = numbers.setdefault((stacked(name), kind), product)
                if first is product:
                    tensors[product.spec.name] = path, product
                elif not _is_same(first, product, origin):
                    raise _differing(kind, stacked(name), where)
                continue
            tensors[product.spec.name] = path, product
            if name in parts:
                full = Fqn(f"{OPTIMIZER}.{STATE}.{stacked(name)}.{kind}")
                of_states[product.spec.name] = replace(parts[name], name=full)
    for kind, own_values in values.items():
        for name, tensor in _of(targets, own_values, f"state {kind!r}", where).items():
            first_value, *others = (own_values[source] for source in tensor.sources)
            before = kept.setdefault((STATE, stacked(name), kind), first_value)
            if any(other != before for other in (first_value, *others)):
                raise _differing(kind, stacked(name), where)
    _check_groups(kept, where)
    return replace(states, tensors=tuple(tensors.values()), values=kept, parts=of_states)


def _check_groups(values: Mapping[KeyPath, Any], where: str) -> None:
    """Refuses a tensor whose parts are in several groups."""
    seen: set[str] = set()
    for path, members in values.items():
        if path[0] == GROUPS and path[-1] == MEMBERS:
            twice = next((name for name in members if name in seen), None)
            if twice is not None:
                raise RefusedError(
                    f"tensor {quote(twice)} is made of parameters of several groups",
                    where=f"optimizer of {where}",
                    hint=_HINT,
                )
            seen.update(members)


def _of(
    targets: Mapping[Fqn, HubTensor], held: Mapping[Fqn, object], what: str, where: str
) -> dict[Fqn, HubTensor]:
    """Returns the tensors all of whose parameters are held; refuses one with some that are not."""
    found = {}
    for name, tensor in targets.items():
        missing = [source for source in tensor.sources if source not in held]
        if missing and len(missing) < len(tensor.sources):
            there = next(source for source in tensor.sources if source in held)
            raise RefusedError(
                f"tensor {quote(name)} is made of {quote(there)} and {quote(missing[0])}, and the"
                f" second has no {what}",
                where=f"optimizer of {where}",
                hint=_HINT,
            )
        if tensor.sources and not missing:
            found[name] = tensor
    return found


def _map_kind(
    kind: str,
    held: Mapping[Fqn, Product],
    targets: Mapping[Fqn, HubTensor],
    live: Mapping[Fqn, Shape],
    origin: Origin,
    where: str,
) -> dict[Fqn, Product]:
    """Returns one kind of state of each tensor that is made of parameters with such a state."""
    made: dict[Fqn, Product] = {}
    moved: dict[Fqn, HubTensor] = {}
    for name, tensor in _of(targets, held, f"state {kind!r}", where).items():
        states = [held[source] for source in tensor.sources]
        first = states[0]
        # A parameter that has another name alone keeps states of any shape.
        is_renamed = find_whole(tensor, live) == tensor.sources[0] and (
            tensor.shape == live[tensor.sources[0]]
        )
        if is_renamed:
            made[name] = _named(first, name, kind)
            continue
        if all(not state.spec.shape for state in states):
            if not all(_is_same(first, other, origin) for other in states[1:]):
                raise _differing(kind, name, where)
            made[name] = _named(first, name, kind)
            continue
        for source, state in zip(tensor.sources, states, strict=True):
            if (state.spec.shape, state.spec.dtype) != (live[source], first.spec.dtype):
                raise RefusedError(
                    f"state {kind!r} of {quote(source)} is {state.spec.dtype.name}"
                    f" {list(state.spec.shape)}, and the parameter {list(live[source])}: only"
                    " states of the parameter's own shape, of one type, can be rearranged with it",
                    where=f"optimizer of {where}",
                    hint=_HINT,
                )
        moved[name] = tensor
    names = HubNames("", live, moved)
    products, _ = make_disk_products(names, NamingRequest({}, None), held)
    return made | {p.spec.name: _named(p, p.spec.name, kind) for p in products}


def _named(product: Product, name: Fqn, kind: str) -> Product:
    full = Fqn(f"{OPTIMIZER}.{STATE}.{name}.{kind}")
    return replace(product, spec=replace(product.spec, name=full))


def _is_same(first: Product, other: Product, origin: Origin) -> bool:
    index = origin.index
    bodies = [p.body for p in (first, other)]
    keys = [body.key for body in bodies if isinstance(body, Copy)]
    if len(keys) < len(bodies):
        return False
    one, two = (index.tensors[key] for key in keys)
    return one.dtype == two.dtype and same_values(TensorReader(origin), one, two)


def _differing(kind: str, name: str, where: str) -> RefusedError:
    return RefusedError(
        f"state {kind!r} differs between the parameters that tensor {quote(name)} is made of",
        where=f"optimizer of {where}",
        hint=_HINT,
    )
