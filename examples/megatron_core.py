"""A training loop of one's own: Megatron-Core with tensor parallelism, saved as `torch_dist`.

    torchrun --nproc-per-node=2 examples/megatron_core.py runs/megatron
    torchrun --nproc-per-node=2 examples/on_cpu.py examples/megatron_core.py runs/megatron

The second line is for machines without a GPU.

The script does not use ckptkit. Kill it at any time and run the same command again: it resumes
from the newest save, and reaches the same final loss. Folders and common state are as in
Megatron-LM.

Megatron-Core stores no configuration that Transformers reads: the script puts one into a folder,
with the tokenizer. Neither Megatron-Core nor a GPU is needed to make a model that Transformers
loads:

    ckptkit consolidate runs/megatron runs/megatron-model --base runs/megatron-base
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import toy

BATCH = 4
Batches = Iterator[torch.Tensor]


def make_model(llama: Any, tp: int) -> Any:
    """Makes this rank's part of a Llama of this configuration, the same values each time."""
    config = TransformerConfig(
        num_layers=llama.num_hidden_layers,
        hidden_size=llama.hidden_size,
        ffn_hidden_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_query_groups=llama.num_key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=llama.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=llama.vocab_size,
        max_sequence_length=llama.max_position_embeddings,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=llama.rope_parameters["rope_theta"],
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())


def batches(windows: torch.Tensor, step: int) -> Batches:
    """Yields what this data parallel rank trains on in this step, the same each time."""
    seed = step * parallel_state.get_data_parallel_world_size()
    generator = torch.Generator().manual_seed(seed + parallel_state.get_data_parallel_rank())
    yield windows[torch.randint(len(windows), (BATCH,), generator=generator)]


def forward(data: Batches, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Returns the loss of each token, and what makes one loss of them."""
    windows = next(data).cuda()
    inputs, labels = windows[:, :-1], windows[:, 1:]
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.item()}

    return model(inputs, positions, None, labels=labels), mean


def run(model: Any, data: Batches, *, is_training: bool) -> float:
    """Goes forward, in training backward too, and returns the loss."""
    (done,) = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=data,
        model=model,
        num_microbatches=1,
        seq_length=toy.WINDOW - 1,
        micro_batch_size=BATCH,
        forward_only=not is_training,
    )
    return float(done["loss"])


def sharded_state(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Returns what is saved of the model and the optimizer, as Megatron-LM arranges it."""
    weights = model.module.sharded_state_dict()
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading)
    return {"model": weights, "optimizer": moments}


def save(step: int, model: Any, optimizer: Any, arguments: argparse.Namespace) -> None:
    """Saves a step in a folder of its own, and then names it in the tracker file."""
    folder = Path(arguments.run, f"iter_{step:07d}")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)  # an interrupted save may have left it
    dist.barrier()
    state = sharded_state(model, optimizer, is_loading=False)
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": step}
    dist_checkpointing.save({**common, **state}, str(folder))
    if dist.get_rank() == 0:
        part = tracker(arguments.run).with_suffix(".part")
        part.write_text(str(step))
        part.replace(tracker(arguments.run))


def resume(model: Any, optimizer: Any, run: str) -> int:
    """Loads the step that the tracker file names, and returns its number, or 0."""
    if not tracker(run).exists():
        return 0
    folder = Path(run, f"iter_{int(tracker(run).read_text()):07d}")
    state = sharded_state(model, optimizer, is_loading=True)
    stored = dist_checkpointing.load(state, str(folder))
    model.module.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    return int(stored["iteration"])


def tracker(run: str) -> Path:
    """Returns where Megatron-LM looks for the step to go on from."""
    return Path(run, "latest_checkpointed_iteration.txt")


def main() -> None:
    """Reads the command line, trains, and evaluates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="where the checkpoints go")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share a layer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=arguments.tp)
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)

    llama = toy.model().config
    if dist.get_rank() == 0:
        toy.write_base(f"{arguments.run}-base")
    model = make_model(llama, arguments.tp)
    # Megatron-Core clips gradients on GPUs only.
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=0.0)
    optimizer = get_megatron_optimizer(settings, [model])
    windows = toy.windows()

    for step in range(resume(model, optimizer, arguments.run) + 1, arguments.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(model, batches(windows, step), is_training=True)
        optimizer.step()
        if step % arguments.save_every == 0:
            save(step, model, optimizer, arguments)

    model.eval()
    loss = run(model, iter([windows[:8]]), is_training=False)
    if dist.get_rank() == 0:
        print(f"final loss {loss:.10f}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
