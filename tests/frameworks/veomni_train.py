"""A script for VeOmni: its TextTrainer with FSDP2, on two CPU processes.

Usage: veomni_train.py true|false FOLDER INPUTS, the first for `save_async`, from the newest
checkpoint of the folder on; veomni_train.py prepare INPUTS writes a model and texts.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

TOY = Path(__file__).resolve().parents[2] / "examples/toy.py"
# What VeOmni asks of a device, and `torch.cpu` does not have.
LACKING = {
    "empty_cache": None,
    "get_device_name": "cpu",
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "memory_stats": {"num_alloc_retries": 0},
}
KERNELS = (
    *("moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb"),
    *("load_balancing_loss", "rms_norm_gated", "causal_conv1d", "chunk_gated_delta_rule"),
)


def prepare(inputs: Path) -> None:
    toy = runpy.run_path(str(TOY))
    model = toy["model"]()
    model.config.attention_dropout = 0.0  # VeOmni resumes with other random numbers
    model.save_pretrained(inputs / "base")
    toy["tokenizer"]().save_pretrained(inputs / "base")
    lines = [json.dumps({"text": text[start:]}) for start in range(16) for text in toy["TEXTS"]]
    (inputs / "data").mkdir()
    (inputs / "data/train.jsonl").write_text("\n".join(lines), encoding="utf-8")


def main(save_async: str, folder: str, inputs: str) -> None:
    for name, value in LACKING.items():
        setattr(torch.cpu, name, lambda value=value: value)
    dist.init_process_group("gloo")  # VeOmni would ask for NCCL
    from veomni.arguments import VeOmniArguments, parse_args
    from veomni.trainer.text_trainer import TextTrainer

    settings = {
        **{f"model.{name}_path": f"{inputs}/base" for name in ("config", "model", "tokenizer")},
        **{f"model.ops_implementation.{name}_implementation": "eager" for name in KERNELS},
        "model.ops_implementation.attn_implementation": "sdpa",
        "data.train_path": f"{inputs}/data",
        "data.data_type": "plaintext",
        "data.text_keys": "text",
        "data.max_seq_len": 32,
        "data.dataloader.num_workers": 0,
        "data.dataloader.pin_memory": "false",
        "train.micro_batch_size": 2,
        "train.global_batch_size": 4,
        "train.max_steps": 8,
        "train.dyn_bsz": "false",
        "train.init_device": "meta",
        "train.gradient_checkpointing.enable": "false",
        "train.accelerator.fsdp_config.fsdp_mode": "fsdp2",
        "train.accelerator.fsdp_config.mixed_precision.enable": "false",
        "train.wandb.enable": "false",
        "train.checkpoint.output_dir": folder,
        "train.checkpoint.load_path": "auto",
        "train.checkpoint.save_async": save_async,
        "train.checkpoint.save_steps": 2,
        "train.checkpoint.save_hf_weights": "false",
    }
    sys.argv[1:] = [f"--{name}={value}" for name, value in settings.items()]
    TextTrainer(parse_args(VeOmniArguments)).train()


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
