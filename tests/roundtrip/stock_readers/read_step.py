"""Reads a saved step with the stock readers of whatever torch and accelerate run this.

    read_step.py dcp STEP TRUTH                 dcp.load and dcp_to_torch_save, one process
    read_step.py merge STEP TRUTH               accelerate merge-weights, one process
    torchrun ... read_step.py accelerate STEP TRUTH VERSION   accelerator.load_state under FSDP

Every tensor has to equal its truth, bit for bit. Needs no ckptkit: torch 2.6, 2.13 and what lies
between take it as it is. Prints `read N tensors`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from net import Net  # type: ignore[import-not-found]  # beside this script
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def compare(found: Tensors, truth: Tensors, what: str) -> None:
    assert sorted(found) == sorted(truth), (what, sorted(set(found) ^ set(truth)))
    for name, tensor in truth.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), (what, name)
        assert torch.equal(other, tensor), (what, name)
    tell(f"{what}: read {len(truth)} tensors")


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def truth_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}.safetensors")


def tensors_in(nested: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of nested dictionaries by dotted key, whole ones."""
    found: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, torch.Tensor):
            found[key] = getattr(value, "full_tensor", lambda whole=value: whole.clone())()
        elif isinstance(value, Mapping):
            found |= {f"{key}.{inner}": tensor for inner, tensor in tensors_in(value).items()}
    return found


def read_dcp(step: Path, truth: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    everything = {
        top: {f"{top}.{name}": tensor for name, tensor in truth_of(truth, top).items()}
        for top in ("model", "optimizer")
    }
    units = {MODEL: everything["model"], OPTIMIZER: everything["optimizer"]}
    if not (step / MODEL).exists():
        units = {"": everything["model"] | everything["optimizer"]}
    for unit, expected in units.items():
        empty = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        dcp.load(empty, checkpoint_id=str(step / unit))
        compare(empty, expected, f"dcp.load of {unit}")
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/whole.pt"
            dcp_to_torch_save(step / unit, file)
            # Our own file; numpy's random states, which are in it, are not on torch's allow-list.
            whole = torch.load(file, weights_only=False)  # noqa: TID251
        found = {key: value for key, value in tensors_in(whole).items() if key in expected}
        compare(found, expected, f"dcp_to_torch_save of {unit}")


def read_merged(step: Path, truth: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
        subprocess.run([*command, str(step / MODEL), folder], check=True)
        (file,) = Path(folder).rglob("*.safetensors")
        compare(load_file(file), truth_of(truth, "model"), "accelerate merge-weights")


def read_into_accelerate(step: Path, truth: Path, version: int) -> None:
    accelerator = accelerator_on_cpu(version)
    torch.manual_seed(5)
    net = Net()
    if version == 1:
        model = accelerator.prepare(net)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1.0))
    else:
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1.0))
    if version == 1:  # of its optimizer accelerate loads only what is there already
        accelerator.backward(model(torch.randn(4, 6)))
        optimizer.step()
    accelerator.load_state(str(step))
    states, moments = whole_state(model, optimizer.optimizer, version)
    if accelerator.process_index == 0:
        compare(states, truth_of(truth, "model"), f"load_state under FSDP{version}")
        compare(moments, truth_of(truth, "optimizer"), "its optimizer")
        rates = {group["lr"] for group in optimizer.param_groups}
        assert rates == {0.01}, rates
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)


def whole_state(model: Any, optimizer: Any, version: int) -> tuple[Tensors, Tensors]:
    """Both state dicts, gathered by torch itself."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    if version == 2:
        states, moments = get_state_dict(model, optimizer)
        return tensors_in(states), tensors_in(moments)
    # To the CPU it would return views of memory that it then gives back.
    kept = {"offload_to_cpu": False, "rank0_only": False}
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(**kept),
        FullOptimStateDictConfig(**kept),
    ):
        whole = tensors_in(model.state_dict())
        return whole, tensors_in(FullyShardedDataParallel.optim_state_dict(model, optimizer))


def accelerator_on_cpu(version: int) -> Any:
    """accelerate uses FSDP only on accelerators, so its state claims to have some."""
    os.environ |= {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": str(version),
    }
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    construct = PartialState.__init__

    def construct_for_cpu(self: Any, *_: Any, **settings: Any) -> None:
        settings.pop("cpu", None)
        construct(self, cpu=True, **settings)
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self._shared_state["device"] = torch.device("cpu")  # FSDP1 takes "cpu:0" for another

    PartialState.__init__ = construct_for_cpu
    PartialState(cpu=True)
    settings: dict[str, Any] = {
        "fsdp_version": version,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        "cpu_ram_efficient_loading": False,
    }
    if version == 1:
        settings |= {"use_orig_params": True, "sync_module_states": False}
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**settings))


def main() -> None:
    kind, step, truth, *version = sys.argv[1:]
    torch.set_num_threads(1)
    tell(f"torch {torch.__version__}")
    if kind == "dcp":
        read_dcp(Path(step), Path(truth))
    elif kind == "merge":
        read_merged(Path(step), Path(truth))
    else:
        read_into_accelerate(Path(step), Path(truth), int(*version))


if __name__ == "__main__":
    main()
