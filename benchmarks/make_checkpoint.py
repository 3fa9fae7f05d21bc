"""Makes the input of the benchmarks: a Llama of random weights, sharded with FSDP2, saved by DCP.

    python benchmarks/make_checkpoint.py OUT --gigabytes 2 --ranks 4 [--saver ckptkit]

What lies in OUT afterwards is what accelerate leaves: `pytorch_model_fsdp_0/` with keys
`model.…`, and the model's `config.json` beside it. `--saver ckptkit` saves with a Checkpointer
instead: OUT is then a run with one step.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

_HIDDEN, _VOCABULARY = 2048, 32000


def llama_config(gigabytes: float, hidden: int) -> LlamaConfig:
    """Returns a configuration with about that many bytes of float32 weights."""
    intermediate = hidden * 11 // 4
    per_layer = 4 * (4 * hidden * hidden + 3 * hidden * intermediate)
    vocabulary = _VOCABULARY if gigabytes >= hidden / _HIDDEN else _VOCABULARY // 8
    outside = 2 * 4 * vocabulary * hidden
    layers = max(1, round((gigabytes * 1e9 - outside) / per_layer))
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


def _save(rank: int, ranks: int, config: LlamaConfig, out: str, port: str, saver: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.02)
    if saver == "ckptkit":
        from ckptkit.training import Checkpointer

        config.architectures = ["LlamaForCausalLM"]
        with Checkpointer(out) as checkpointer:
            checkpointer.save(step=1, state={"model": model}).report()
        os._exit(0)
    state = {"model": get_model_state_dict(model)}
    dcp.save(state, checkpoint_id=Path(out) / "pytorch_model_fsdp_0")
    if rank == 0:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(out)
    distributed.barrier()  # the store ends with rank 0
    os._exit(0)  # the teardown of gloo's threads now and then aborts a process that is done


def make_checkpoint(
    out: Path, gigabytes: float, ranks: int, hidden: int = _HIDDEN, saver: str = "torch"
) -> None:
    """Writes a checkpoint, replacing what is there."""
    shutil.rmtree(out, ignore_errors=True)
    torch.multiprocessing.start_processes(
        _save,
        args=(ranks, llama_config(gigabytes, hidden), str(out), "29611", saver),
        nprocs=ranks,
        start_method="spawn",
    )


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=_HIDDEN)
    parser.add_argument("--saver", choices=("torch", "ckptkit"), default="torch")
    made = parser.parse_args()
    make_checkpoint(made.out, made.gigabytes, made.ranks, made.hidden, made.saver)


if __name__ == "__main__":
    main()
