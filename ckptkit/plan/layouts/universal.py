"""A universal checkpoint of DeepSpeed: a file for each parameter and each of its states.

Engines of ZeRO 1 to 3 and any number of ranks load it with the setting `load_universal`. They take
weights from the float32 copies. Buffers and frozen parameters stay those of the model that the
engine was made of: they are written, and DeepSpeed does not load them.

Stages 1 and 2 ask for `mp_rank_00_model_states.pt` and for groups in `optimizer_state.pt`; stage 3
asks for `zero_pp_rank_0_mp_rank_00_model_states.pt`, and for the step and the first group in the
state dict of an optimizer. Both are written.

Source: deepspeed/checkpoint/universal_checkpoint.py (`load_hp_checkpoint_state`),
deepspeed/runtime/engine.py (`load_checkpoint`, `_get_all_ckpt_names`),
deepspeed/runtime/base_optimizer.py (`load_hp_checkpoint_state_from_checkpoint_dir`),
deepspeed/runtime/zero/stage3.py (`load_hp_checkpoint_state_from_checkpoint_dir_stage3`), 0.19.8.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec.structs import replace

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import RefusedError
from ckptkit.core.index import Fqn
from ckptkit.plan.layouts.torch import TensorRecord, build_archive, push_value
from ckptkit.plan.optimizer_states import (
    GROUPS,
    MEMBERS,
    STATE,
    STEP,
    OptimizerStates,
    list_groups,
)
from ckptkit.plan.plan import OutputFile, Product, TensorSpec, lay_out_file, literal_file

LATEST = "latest_universal"
_VERSION = "0.19.8"  # of the files' form, which DeepSpeed compares
_EMPTY = "empty"  # the storage of tensors without elements
_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def layout_universal(
    products: Sequence[Product],
    states: OptimizerStates,
    step: int | None,
    taken_steps: float,
    *,
    where: str,
) -> list[OutputFile]:
    """Lays weights and the states of their optimizer out.

    `products`: in float32. `states`: with plain values, and groups that list their members.
    `step`: of the run, if it is known. `taken_steps`: what the optimizer counted for a parameter.
    """
    tag = "universal" if step is None else f"global_step{step}_universal"
    groups = list_groups(states)
    members = [[str(name) for name in group[MEMBERS]] for group in groups]
    trained = {name for own in members for name in own}
    by_name = {str(product.spec.name): product for product in products}
    absent = sorted(trained - by_name.keys())
    if absent:
        raise RefusedError(
            f"the optimizer has a parameter {absent[0]!r}, and no weight of this name is written",
            where=where,
            hint="leave --include and --exclude out",
        )
    _refuse_uneven(states, members, where)
    files = [
        _file(f"{tag}/zero/{name}/fp32.pt", product)
        for name, product in by_name.items()
        if name in trained
    ]
    for path, product in states.tensors:
        kind = str(path[2])
        files.append(_file(f"{tag}/zero/{path[1]}/{kind}.pt", product, is_bare=kind == STEP))
    for path, value in states.values.items():
        if path[0] == STATE and path[-1] == STEP:
            rows = build_archive(STEP, push_value(value))
            files.append(lay_out_file(f"{tag}/zero/{path[1]}/{STEP}.pt", rows))
    # Where the optimizer keeps a tensor, it takes nothing else.
    has_tensor = any(path[-1] == STEP for path, _ in states.tensors)
    spec = TensorSpec(Fqn(STEP), BY_NAME["float32"], ())
    counted = TensorRecord(spec, STEP) if has_tensor else taken_steps
    plain = [
        {**{key: value for key, value in group.items() if key != MEMBERS}, MEMBERS: [number]}
        for number, group in enumerate(groups)
    ]
    shared = {
        "ds_version": _VERSION,
        GROUPS: plain,
        "optimizer_state_dict": {STATE: {0: {STEP: counted}}, GROUPS: plain},
    }
    data = struct.pack("<f", taken_steps)
    rows = build_archive("optimizer_state", push_value(shared), (), {STEP: data})
    files.append(lay_out_file(f"{tag}/zero/optimizer_state.pt", rows))
    others = [product for name, product in by_name.items() if name not in trained]
    model = {
        "buffer_names": [str(product.spec.name) for product in others],
        "param_shapes": [{name: by_name[name].spec.shape for name in own} for own in members],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": step or 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
    }
    # That of stage 3 is read here: it has the other tensors, and the types of parameters.
    held = {str(p.spec.name): TensorRecord(p.spec, str(at)) for at, p in enumerate(others)}
    held |= {
        name: TensorRecord(replace(by_name[name].spec, shape=(0,)), _EMPTY)
        for own in members
        for name in own
    }
    for file, module, inside in ((_MODELS[0], {}, []), (_MODELS[1], held, others)):
        content = push_value({"module": module, **model})
        rows = build_archive(file.removesuffix(".pt"), content, inside, {_EMPTY: b""})
        files.append(lay_out_file(f"{tag}/{file}", rows))
    return [*files, literal_file(LATEST, tag.encode())]


def _refuse_uneven(states: OptimizerStates, members: Sequence[Sequence[str]], where: str) -> None:
    """Refuses groups that DeepSpeed does not load: it has one step, and all states, for each."""
    kinds: dict[str, set[str]] = {name: set() for own in members for name in own}
    for path, _ in states.tensors:
        if path[0] != STATE or len(path) < len(("state", "name", "kind")):
            raise RefusedError(
                f"state {'.'.join(map(str, path))!r} is of no parameter",
                where=where,
                hint="go on with --to dcp, or from the weights alone",
            )
        kinds.setdefault(str(path[1]), set()).add(str(path[2]))
    for path in states.values:
        if path[0] == STATE and path[2:]:
            kinds.setdefault(str(path[1]), set()).add(str(path[2]))
    for own in members:
        uneven = [name for name in own if kinds[name] != kinds[own[0]]]
        if uneven:
            lacking = min((own[0], uneven[0]), key=lambda name: len(kinds[name]))
            raise RefusedError(
                f"parameter {lacking!r} has no states that others of its group have, as one that"
                " never had a gradient: DeepSpeed loads no such group",
                where=where,
                hint="go on with --to dcp, or train all parameters for a step",
            )


def _file(path: str, product: Product, *, is_bare: bool = False) -> OutputFile:
    record = TensorRecord(product.spec, "0")
    name = path.rpartition("/")[2].removesuffix(".pt")
    value = push_value(record if is_bare else {"param": record})
    return lay_out_file(path, build_archive(name, value, [product]))
