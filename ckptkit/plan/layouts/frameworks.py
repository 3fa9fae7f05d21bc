"""Checkpoints that other frameworks start training from: Megatron-Core's and torchtitan's.

Both are DCP. Tensors that the framework stacks have one chunk for each layer or expert, since a
rank that loads reads whole chunks.

Megatron-LM finds the weights in the folder `release`, which `latest_checkpointed_iteration.txt`
names; it starts at iteration 0 then, with an optimizer of its own. The padding of vocabularies
depends on the tensor parallel size; Megatron-Core loads embeddings without it.

With the states of an optimizer, the folder is that of an iteration. They have the form
`fully_reshardable`: tensors like the weights, for any parallel size. Groups are looked up by
factors, since 0.17 also by the bounds of the learning rate; the schedule that is written keeps it
constant.

Sources: `save_checkpoint`, `load_checkpoint`, `check_checkpoint_args` and
`load_args_from_checkpoint` in megatron/training/checkpointing.py;
`DistributedOptimizer.load_state_dict` in megatron/core/optimizer/distrib_optimizer.py;
megatron/core/optimizer_param_scheduler.py;
core.py, serialization.py and strategies/common.py of megatron/core/dist_checkpointing;
`TransformerBlock.sharded_state_dict` in megatron/core/transformer/transformer_block.py;
scripts/checkpoint_conversion/convert_from_hf.py and torchtitan/components/optimizer/utils.py of
torchtitan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ckptkit.core.index import Fqn, KeyPath
from ckptkit.plan.layouts.dcp_metadata import push_dict, push_global, push_scalar, push_text
from ckptkit.plan.layouts.torch import build_archive, lay_out_dcp, push_value
from ckptkit.plan.optimizer_states import (
    GROUPS,
    MEMBERS,
    OPTIMIZER,
    OptimizerStates,
    list_groups,
)
from ckptkit.plan.plan import OutputFile, Product, StackedPart, lay_out_file, literal_file

_FOLDER = "release"
_TRACKER = "latest_checkpointed_iteration.txt"
_KIND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_ARGUMENTS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_base": "rope_theta",
}
_HAS_STATE = re.compile(r"(decoder\..*(?:\.linear_\w+|layernorm))\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


# What torch's AdamW has in a group besides, which other libraries do not store; torchtitan asks for
# each. Its schedule of the learning rate adds `initial_lr`.
_ADAMW = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def _list_further_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a group of Adam lacks of the settings that torchtitan asks for."""
    if "betas" not in group or "lr" not in group:
        return {}
    return {k: v for k, v in {**_ADAMW, "initial_lr": group["lr"]}.items() if k not in group}


def layout_torchtitan(
    products: Sequence[Product],
    parts: Mapping[Fqn, StackedPart],
    max_file_bytes: int,
    states: OptimizerStates | None = None,
) -> list[OutputFile]:
    """Lays tensors out as torchtitan's `checkpoint.initial_load_path` takes them.

    `products`: by torchtitan's names; stacked ones in parts. `parts`: where these are in the
    stacked tensors. `max_file_bytes`: the most bytes of tensors in a file. `states`: those of the
    optimizer, which torchtitan flattens: each parameter has the settings of its group.
    """
    keys: list[tuple[KeyPath, Product]] = [*_with_keys(products, parts)]
    values: dict[KeyPath, Any] = {}
    if states is not None:
        parts = {**parts, **states.parts}
        keys += [((OPTIMIZER, ".".join(map(str, p))), product) for p, product in states.tensors]
        for path, value in states.values.items():
            group, setting = path[:2], ".".join(map(str, path[2:]))
            if path[0] != GROUPS:
                values[OPTIMIZER, ".".join(map(str, path))] = value
            elif setting != MEMBERS:
                for name in states.values[*group, MEMBERS]:
                    values[OPTIMIZER, f"{GROUPS}.{name}.{setting}"] = value
        for settings in list_groups(states):
            for key, value in _list_further_settings(settings).items():
                for name in settings[MEMBERS]:
                    values[OPTIMIZER, f"{GROUPS}.{name}.{key}"] = value
    return lay_out_dcp("", keys, max_file_bytes, values=values, parts=parts)


class MegatronStates(Struct, frozen=True):
    """The states of an optimizer as Megatron-Core loads them."""

    tensors: tuple[tuple[Fqn, Product], ...]  # with their keys
    parts: Mapping[Fqn, StackedPart]  # where tensors are in stacked ones, by their names
    # The settings of matrices, and those of biases and vectors.
    groups: tuple[Mapping[str, Any], ...]
    step: int  # how many steps it took

    @property
    def lr(self) -> float:
        """The learning rate by which groups are looked up."""
        return float(self.groups[0].get("initial_lr", self.groups[0]["lr"]))


def layout_megatron(
    products: Sequence[Product],
    parts: Mapping[Fqn, StackedPart],
    max_file_bytes: int,
    config: Mapping[str, Any] | None,
    states: MegatronStates | None = None,
    step: int | None = None,
) -> list[OutputFile]:
    """Lays tensors out as a `torch_dist` checkpoint.

    `products`: by Megatron-Core's names; stacked ones in parts. `parts`: where these are in the
    stacked tensors. `max_file_bytes`: the most bytes of tensors in a file. `config`: the
    configuration of the model, for the sizes among the arguments. `states`: of the optimizer.
    `step`: of the run, if it is known.
    """
    keys: list[tuple[KeyPath, Product]] = [*_with_keys(products, parts)]
    is_apart = any(_LAYER.search(str(path[0])) for path, _ in keys)
    objects = _list_states(keys, parts)
    arguments = _list_arguments(config or {})
    content: dict[str, Any] = {"singleton_local_shards": False, "non_homogeneous_layers": is_apart}
    folder, tracked, iteration = _FOLDER, _FOLDER, 0
    further: dict[str, Any] = {}
    if states is not None:
        iteration = step or states.step
        folder, tracked = f"iter_{iteration:07d}", str(iteration)
        keys += [((key,), product) for key, product in states.tensors]
        parts = {**parts, **states.parts}
        arguments |= {"iteration": iteration, "no_save_rng": True}
        content |= _RESHARDABLE
        further = _list_optimizer(states)
    namespace = push_global("argparse", "Namespace")
    state = [
        (push_text("checkpoint_version"), push_scalar(3.0)),
        (push_text("iteration"), push_scalar(iteration)),
        (push_text("args"), namespace + b")\x81" + push_value(dict(arguments)) + b"b"),
        (push_text("content_metadata"), push_value(content)),
        *((push_text(key), push_value(value)) for key, value in further.items()),
    ]
    common = build_archive("common", push_dict(state))
    return [
        *lay_out_dcp(folder, keys, max_file_bytes, values=objects, parts=parts),
        lay_out_file(f"{folder}/common.pt", common),
        literal_file(f"{folder}/metadata.json", json.dumps(_KIND).encode()),
        literal_file(_TRACKER, tracked.encode()),
    ]


_RESHARDABLE: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
MIN_LR = 0.0  # Megatron-LM's default, by which groups are looked up too


def _list_optimizer(states: MegatronStates) -> dict[str, Any]:
    """Returns what Megatron-Core keeps of an optimizer and its schedule beside the tensors."""
    bounds = {"max_lr": states.lr, "min_lr": MIN_LR}
    groups = [
        {
            **settings,
            **bounds,
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "bias_correction": settings.get("bias_correction", True),
            "step": states.step,
        }
        for settings, wd_mult in zip(states.groups, (1.0, 0.0), strict=True)
    ]
    decay = states.groups[0]["weight_decay"]
    schedule = {
        **bounds,
        "lr_decay_style": "constant",
        "lr_warmup_steps": 0,
        "lr_decay_steps": 1,
        "num_steps": 0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }
    kind = _RESHARDABLE["distrib_optim_sharding_type"]
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": kind}
    return {"optimizer": optimizer, "opt_param_scheduler": schedule}


def _with_keys(
    products: Sequence[Product], parts: Mapping[Fqn, StackedPart]
) -> list[tuple[tuple[Fqn], Product]]:
    names = {product.spec.name: product.spec.name for product in products}
    names |= {name: part.name for name, part in parts.items()}
    return [((names[product.spec.name],), product) for product in products]


def _list_states(
    keys: Sequence[tuple[KeyPath, Product]], parts: Mapping[Fqn, StackedPart]
) -> dict[KeyPath, list[None]]:
    """Returns the empty states of layers, which Megatron-Core loads beside their weights.

    A state is one object for each layer and expert, `MODULE._extra_state/shard_INDEX_COUNTS`. Its
    own layers have one where they are linear, those of Transformer Engine also where they are
    norms or compute attention; a loader ignores those that it does not know.
    """
    states: dict[KeyPath, list[None]] = {}
    for path, product in keys:
        found = _HAS_STATE.fullmatch(str(path[0]))
        part = parts.get(product.spec.name)
        index, counts = (part.index, part.counts) if part else ((0,), (1,))
        shard = f"{'.'.join(map(str, index))}_{'.'.join(map(str, counts))}"
        modules = [found[1]] if found else []
        if found and found[1].endswith("self_attention.linear_proj"):
            modules.append(found[1].replace("linear_proj", "core_attention"))
        states |= {(f"{module}._extra_state/shard_{shard}",): [None] for module in modules}
    return states


def _list_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that Megatron-LM compares with its own, or takes from a checkpoint."""
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, dict) else {})}
    rope = values.get("rope_parameters")
    values = {**(rope if isinstance(rope, dict) else {}), **values}
    found = {name: values.get(key) for name, key in _ARGUMENTS.items()}
    sizes = {n: v for n, v in found.items() if isinstance(v, (int, float)) and v is not True}
    return sizes | {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "add_position_embedding": False,
        "position_embedding_type": "rope",
        "ckpt_format": "torch_dist",
    }
