"""The same folder the way of Megatron-LM: the model is built and loaded, then exported by a loop.

    python benchmarks/megatron_own_way.py CHECKPOINT CONFIG_FOLDER OUT

One process builds the model with tensor and pipeline parallel sizes of 1,
`dist_checkpointing.load` fills it, and each parameter is renamed and split as the converters of
Megatron-LM and slime do, before `save_file` writes all of them. What it writes is not durable.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from make_megatron import build, start
from safetensors.torch import save_file
from transformers import LlamaConfig

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_INSIDE = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


def _export(
    name: str, tensor: torch.Tensor, config: LlamaConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what a parameter becomes."""
    found = _LAYER.fullmatch(name)
    if found is None:
        yield _OUTSIDE[name], tensor[: config.vocab_size] if "norm" not in name else tensor
        return
    prefix, rest = f"model.layers.{found[1]}", found[2]
    if rest == "self_attention.linear_qkv.weight":
        groups, heads = config.num_key_value_heads, config.num_attention_heads
        rows = tensor.view(groups, heads // groups + 2, -1, config.hidden_size)
        parts = rows.split([heads // groups, 1, 1], dim=1)
        for letter, part in zip("qkv", parts, strict=True):
            whole = part.reshape(-1, config.hidden_size)
            yield f"{prefix}.self_attn.{letter}_proj.weight", whole
    elif rest == "mlp.linear_fc1.weight":
        for kind, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{prefix}.mlp.{kind}_proj.weight", half
    else:
        yield f"{prefix}.{_INSIDE[rest]}", tensor


def main() -> None:
    """Loads the checkpoint, and writes the folder."""
    checkpoint, home, out = map(Path, sys.argv[1:])
    start(0, 1, 1, "29614")
    from megatron.core import dist_checkpointing

    config = LlamaConfig.from_pretrained(home)
    model = build(config, 1, 1)
    loaded = dist_checkpointing.load(
        {"model": model.sharded_state_dict(prefix="")}, str(checkpoint)
    )
    model.load_state_dict(loaded["model"], strict=False)
    tensors = {}
    for name, tensor in model.named_parameters():
        for exported, part in _export(name, tensor.detach(), config):
            tensors[exported] = part.contiguous()
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    shutil.copy(home / "config.json", out)


if __name__ == "__main__":
    main()
