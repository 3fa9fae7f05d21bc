"""Makes the input of `megatron_consolidate.py`: a Llama of random weights, saved by Megatron-Core.

    python benchmarks/make_megatron.py OUT --gigabytes 2 --tp 2 --pp 2

Megatron-Core itself writes the checkpoint, on one process of gloo for each rank: `torch_dist`, in
bfloat16, weights alone. It asks for a GPU while it saves; there is none, so three functions of
torch answer for the CPU. Beside the checkpoint there is the `config.json` of the same model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import distributed
from transformers import LlamaConfig

STEP = 100
_HIDDEN, _WIDTH, _HEADS, _GROUPS = 2048, 5632, 16, 8
_VOCABULARY, _PADDED = 32_000, 32_256
_BYTES = 2


def llama_config(gigabytes: float) -> LlamaConfig:
    """Returns a configuration with about that many bytes of bfloat16 weights."""
    attention = _HIDDEN * _HIDDEN * (2 + 2 * _GROUPS // _HEADS)
    per_layer = _BYTES * (attention + 3 * _HIDDEN * _WIDTH)
    outside = 2 * _BYTES * _VOCABULARY * _HIDDEN
    pairs = max(1, round((gigabytes * 1e9 - outside) / per_layer / 2))
    return LlamaConfig(
        hidden_size=_HIDDEN,
        intermediate_size=_WIDTH,
        num_hidden_layers=2 * pairs,
        num_attention_heads=_HEADS,
        num_key_value_heads=_GROUPS,
        vocab_size=_VOCABULARY,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def start(rank: int, tp: int, pp: int, port: str) -> None:
    """Joins the group of all ranks, as a part of the model, and hides that there is no GPU."""
    warnings.filterwarnings("ignore")
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(tp * pp)
    )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    from megatron.core import parallel_state

    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )


def build(config: LlamaConfig, tp: int, pp: int) -> Any:
    """Returns this rank's part of the model, its weights not initialized."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        use_cpu_initialization=True,
        perform_initialization=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    return GPTModel(
        settings,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=_PADDED,
        max_sequence_length=2048,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def _save(rank: int, config: LlamaConfig, tp: int, pp: int, out: str, port: str) -> None:
    start(rank, tp, pp, port)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    model = build(config, tp, pp)
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    folder = Path(out, "checkpoint", f"iter_{STEP:07d}")
    if rank == 0:
        folder.mkdir(parents=True)
    distributed.barrier()
    state = {"iteration": STEP, "model": model.sharded_state_dict(prefix="")}
    strategy = get_default_save_sharded_strategy("torch_dist", 1)
    dist_checkpointing.save(state, str(folder), strategy)
    distributed.barrier()
    if rank == 0:
        Path(out, "checkpoint", "latest_checkpointed_iteration.txt").write_text(str(STEP))
        config.save_pretrained(out)
    distributed.barrier()  # the store ends with rank 0
    for writer in multiprocessing.active_children():  # Megatron keeps them for the next save
        writer.kill()
    os._exit(0)  # the teardown of gloo's threads now and then aborts a process that is done


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    config = llama_config(options.gigabytes)
    torch.multiprocessing.start_processes(
        _save,
        args=(config, options.tp, options.pp, str(options.out), "29613"),
        nprocs=options.tp * options.pp,
        start_method="spawn",
    )


if __name__ == "__main__":
    main()
