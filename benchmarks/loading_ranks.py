"""Fills a sharded Llama from a folder, or from shards of another mesh, in turns with other tools.

Started by loading.py under torchrun; prints one JSON line. What is on each rank afterwards is
compared by checksum.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from rank_figures import hand_over
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from ckptkit.training import load_into

Model = Any


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded(folder: Path, device: str) -> Model:
    """Returns the model cut by FSDP2; with memory that was written to before, unless on meta."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if device != "meta":
        model.to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).fill_(1)
    return model


def by_ckptkit(source: Path) -> Callable[[Model], dict[str, int]]:
    def load(model: Model) -> dict[str, int]:
        result = load_into(model, source)
        return {"read": result.bytes_read, "needed": result.bytes_needed}

    return load


def by_dcp(source: Path) -> Callable[[Model], dict[str, int]]:
    def load(model: Model) -> dict[str, int]:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=source / "pytorch_model_fsdp_0")
        set_model_state_dict(model, state["model"])
        return {}

    return load


def by_transformers(source: Path) -> Callable[[Model], dict[str, int]]:
    """Its own sharded loading is for tensor parallelism; each rank holds whole embeddings."""

    def load(_: Model) -> dict[str, int]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        held.append(AutoModelForCausalLM.from_pretrained(source, tp_plan="auto", device_mesh=mesh))
        return {}

    return load


def by_accelerate(source: Path) -> Callable[[Model], dict[str, int]]:
    """What it does for FSDP2 with cpu_ram_efficient_loading; by itself on accelerators only."""

    def load(_: Model) -> dict[str, int]:
        from accelerate import Accelerator
        from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

        accelerator, whole = Accelerator(cpu=True), {}
        if accelerator.is_main_process:
            whole = AutoModelForCausalLM.from_pretrained(source).state_dict()
        model = sharded(source, "meta")
        fsdp2_load_full_state_dict(accelerator, model, whole)
        held.append(model)
        return {}

    return load


held: list[Any] = []  # models that a tool made itself


def facts_of_process() -> tuple[int, int]:
    """Returns the bytes that this process has read, and those that it holds."""
    read = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(read["rchar"]), int(status["VmRSS"].split()[0]) * 1024


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) * 1024


def checksum(model: Model) -> int:
    crc = 0
    for name, value in sorted(model.state_dict().items()):
        data = local(value).detach().contiguous().view(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(data.data, zlib.crc32(name.encode(), crc))
    return crc


def measure(load: Callable[[Model], dict[str, int]], model: Model | None) -> dict[str, float]:
    """Loads once, on all ranks at the same time."""
    held.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would be taken again, and not be counted
    dist.barrier()
    read, held_bytes = facts_of_process()
    has_memory = model is not None and not any(p.is_meta for p in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began = time.perf_counter()
    found: dict[str, float] = dict(load(model))
    found["seconds"] = time.perf_counter() - began
    filled = held[0] if held else model
    own = sum(local(value).nbytes for value in filled.parameters())
    found["beyond"] = peak_bytes() - held_bytes - (0 if has_memory else own)
    found["taken"] = facts_of_process()[0] - read
    found["own"] = own
    dist.barrier()
    found["crc"] = checksum(filled)
    return found


def main() -> None:
    """Prints what every rank found in every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="one model folder")
    parser.add_argument("shards", type=Path, help="shards of another mesh")
    parser.add_argument("same", type=Path, help="shards of the same mesh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--others", type=int, default=1, help="rounds of the slow tools")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"
    dist.init_process_group("gloo")
    folder, shards = arguments.folder, arguments.shards
    ways = {
        "ckptkit, folder": by_ckptkit(folder),
        "ckptkit, shards of another mesh": by_ckptkit(shards),
        "dcp.load, shards of another mesh": by_dcp(shards),
        "dcp.load, shards of the same mesh": by_dcp(arguments.same),
    }
    model = sharded(folder, "cpu")
    rounds: list[dict[str, dict[str, float]]] = []
    names = list(ways)
    for number in range(arguments.rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        found = {name: measure(ways[name], model) for name in order}
        if number:  # the first one is for warming up
            rounds.append(found)
    del model
    for number in range(arguments.others):
        on_meta = sharded(folder, "meta")
        rounds[number]["ckptkit, folder, from meta"] = measure(ways["ckptkit, folder"], on_meta)
        del on_meta
        for name, way in (
            ("accelerate, cpu_ram_efficient_loading", by_accelerate(folder)),
            ("transformers, tp_plan", by_transformers(folder)),
        ):
            rounds[number][name] = measure(way, None)
    hand_over(rounds)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
