"""Runs a training script, as it is for GPUs, on a machine without one.

    torchrun --nproc-per-node=2 examples/on_cpu.py examples/trainer.py runs/trainer
    torchrun --nproc-per-node=2 examples/on_cpu.py -m ckptkit.run examples/unmodified.py runs/a

accelerate shards models on GPUs only; on CPU processes it trains with DDP instead, without a
message. Here each process is presented to it as one with a GPU, to Transformers as one that has
bfloat16, and to bitsandbytes as a CPU without AVX-512. DeepSpeed and Megatron-Core are prepared
if the script imports them. Scripts need no change for this, and none for GPUs.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import re
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.overrides import TorchFunctionMode
from transformers import training_args

from ckptkit.training.pushing import program_end


class CudaIsCpu(TorchFunctionMode):
    """While it is entered, tensors are made on the CPU, and stay there, wherever CUDA is named."""

    def __torch_function__(
        self,
        function: Any,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        options = dict(kwargs or {})
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return function(*args, **options)


def prepare_for(command: list[str]) -> None:
    """Prepares what the script in a command imports for a machine without a GPU, if this is one."""
    if torch.cuda.is_available():
        return
    shard_without_gpus()
    script = next((Path(part) for part in command if part.endswith(".py")), None)
    text = script.read_text(encoding="utf-8") if script else ""
    for package, prepare in PREPARED.items():
        if re.search(rf"^(import|from) {package}\b", text, re.MULTILINE):
            prepare()


def shard_without_gpus() -> None:
    """Has accelerate shard over CPU processes, where there is no GPU."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    stock = PartialState.__init__

    def init(self: Any, *_: object, **options: Any) -> None:
        stock(self, **{**options, "cpu": True})
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self._shared_state["device"] = torch.device("cpu")  # FSDP1 refuses "cpu:0"

    PartialState.__init__ = init
    training_args.is_torch_bf16_gpu_available = lambda: True
    if importlib.util.find_spec("bitsandbytes") is not None:
        # In an evaluation, bitsandbytes packs 4-bit weights anew for CPUs with AVX-512. FSDP
        # brings the old ones back, and from then on they are read as if they were the new ones.
        layers: Any = importlib.import_module("bitsandbytes.nn.modules")
        layers.has_avx512bf16 = lambda: False


def compile_no_kernels() -> None:
    """Has DeepSpeed run on CPUs, without kernels that it would compile for them first."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    kernels: Any = importlib.import_module("deepspeed.ops")
    kernels.__compatible_ops__ = {}


def compute_without_cuda() -> None:
    """Has Megatron-Core compute on CPUs: it names CUDA wherever it makes a tensor."""
    changed: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_, **__: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    }
    for name, function in changed.items():
        setattr(torch.cuda, name, function)
    torch.cuda.random.get_rng_state = changed["get_rng_state"]
    mode: Any = CudaIsCpu()
    mode.__enter__()


# What is prepared for scripts that import these packages, besides accelerate.
PREPARED = {"deepspeed": compile_no_kernels, "megatron": compute_without_cuda}


def main() -> None:
    """Runs the script, or the module after `-m`, that the command line names."""
    sys.argv = sys.argv[1:]
    prepare_for(sys.argv)
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    leave()


def leave() -> None:
    """Ends the process as Python does, but for objects: the end of gloo's threads may abort it."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(program_end().status)  # 0, unless pushes to the Hub have failed


if __name__ == "__main__":
    main()
