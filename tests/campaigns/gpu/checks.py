"""What a save, a resume and a merge have to get right where tensors are on a device."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import ckptkit
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.index import Key, Span
from ckptkit.engine.bitsandbytes import RequantizedFourBit
from ckptkit.engine.kernels import StoredOperand
from ckptkit.lora.quantized import FourBitType
from ckptkit.training import Checkpointer, load_into

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: torch.device  # `cuda`, or `cpu` to see that the checks themselves work
    folder: Path
    width: int  # of the square matrices of a model; on a device, copies of several milliseconds

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


class SkippedError(Exception):
    """Raised where a check needs what is not there; the text says what."""


def bits(value: Any) -> torch.Tensor:
    """Returns a copy of the bytes of a tensor, on the CPU."""
    local = value.full_tensor() if isinstance(value, DTensor) else value
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def bits_of(model: nn.Module, optimizer: Any = None) -> Tensors:
    """Returns the bytes of all parameters, buffers and states of the optimizer."""
    found = {f"model.{name}": bits(value) for name, value in model.state_dict().items()}
    states = [] if optimizer is None else list(optimizer.state.values())
    for number, state in enumerate(states):
        tensors = {n: v for n, v in state.items() if isinstance(v, torch.Tensor)}
        found |= {f"optimizer.{number}.{name}": bits(value) for name, value in tensors.items()}
    return found


def demand_equal(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
    differing = [name for name, value in truth.items() if not torch.equal(found[name], value)]
    assert not differing, f"{len(differing)} of {len(truth)} differ: {differing[:5]}"


def network(place: Place, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    width = place.width
    layers = [nn.Linear(width, width, dtype=dtype) for _ in range(4)]
    norm = nn.BatchNorm1d(width, dtype=dtype)  # its buffers change in each forward pass
    return nn.Sequential(*layers[:2], norm, *layers[2:]).to(place.device)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def train(place: Place, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        dtype = next(model.parameters()).dtype
        model(torch.randn(8, place.width, dtype=dtype).to(place.device)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


Make = Callable[[int], tuple[nn.Module, Any]]


def save_and_resume(place: Place, make: Make, saves: int = 4) -> str:
    """Saves in a row, each followed at once by a training step, and resumes all of them."""
    model, optimizer = make(0)
    train(place, model, optimizer, range(2))
    run, truths, handles = place.folder / "run", [], []
    with Checkpointer(run) as saver:
        state = {"model": model, "optimizer": optimizer}
        saver.prepare(state)
        used = []
        for number in range(saves):
            truths.append(bits_of(model, optimizer))
            handles.append(saver.save(number, state))
            train(place, model, optimizer, range(10 + number, 11 + number))
            if place.is_cuda:
                torch.cuda.synchronize()
                used.append(torch.cuda.memory_allocated())
        for handle in handles:
            handle.result(120)
        assert len(set(used[1:])) <= 1, f"the device's memory went from {used[1]} to {used[-1]}"
        for number, truth in enumerate(truths):
            other, states = make(1)
            train(place, other, states, range(1))
            assert saver.resume({"model": other, "optimizer": states}, step=number) == number
            demand_equal(bits_of(other, states), truth)
    return f"{saves} saves, {sum(map(torch.numel, truths[0].values())) / 1e6:,.1f} MB each"


def plain(place: Place) -> str:
    def make(seed: int) -> tuple[nn.Module, Any]:
        model = network(place, seed)
        return model, adamw(model)

    return save_and_resume(place, make)


def fused(place: Place) -> str:
    """Counts of steps are on the device, too."""

    def make(seed: int) -> tuple[nn.Module, Any]:
        model = network(place, seed)
        return model, adamw(model, fused=True)

    return save_and_resume(place, make)


def sharded_by_fsdp2(place: Place) -> str:
    def make(seed: int) -> tuple[nn.Module, Any]:
        model = network(place, seed)
        for layer in model:
            fully_shard(layer, mesh=mesh_of(place.device))
        fully_shard(model, mesh=mesh_of(place.device))
        return model, adamw(model)

    return save_and_resume(place, make)


def offloaded_by_fsdp2(place: Place) -> str:
    from torch.distributed.fsdp import CPUOffloadPolicy

    policy = CPUOffloadPolicy(pin_memory=place.is_cuda)

    def make(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        layers = [nn.Linear(place.width, place.width) for _ in range(4)]
        model = nn.Sequential(*layers)
        for layer in model:
            fully_shard(layer, mesh=mesh_of(place.device), offload_policy=policy)
        fully_shard(model, mesh=mesh_of(place.device), offload_policy=policy)
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        return model, adamw(model)

    return save_and_resume(place, make)


def sharded_by_fsdp1(place: Place) -> str:
    def make(seed: int) -> tuple[nn.Module, Any]:
        model = FullyShardedDataParallel(
            network(place, seed), use_orig_params=True, device_id=place.device
        )
        return model, adamw(model)

    run = place.folder / "run"
    model, optimizer = make(0)
    train(place, model, optimizer, range(2))
    truth = [bits(parameter) for parameter in model.parameters()]
    with Checkpointer(run) as saver:
        handle = saver.save(1, {"model": model, "optimizer": optimizer})
        train(place, model, optimizer, range(2, 3))
        handle.result(120)
        other, states = make(1)
        assert saver.resume({"model": other, "optimizer": states}) == 1
    found = [bits(parameter) for parameter in other.parameters()]
    demand_equal(dict(enumerate(found)), dict(enumerate(truth)))  # type: ignore[arg-type]
    return f"{len(truth)} parameters"


def mesh_of(device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (1,))


DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
]


class Odd(nn.Module):
    """Buffers of every element type, and of shapes that copies may get wrong."""

    def __init__(self, place: Place, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in DTYPES:
            dtype = getattr(torch, name)
            data = torch.randint(0, 2 if name == "bool" else 256, (64 * 8,), dtype=torch.uint8)
            self.register_buffer(f"of_{name}", data.view(dtype).reshape(4, -1).to(place.device))
        wide = torch.randn(96, 64).to(place.device)
        self.register_buffer("scalar", wide[0, 0].clone())
        self.register_buffer("empty", wide[:0].clone())
        self.transposed = nn.Parameter(wide.t())
        self.sliced = nn.Parameter(wide[:, 1:33])
        self.every_second = nn.Parameter(wide.bfloat16()[::2])


def element_types(place: Place) -> str:
    model = Odd(place, 0)
    truth = bits_of(model)
    with Checkpointer(place.folder / "run") as saver:
        saver.save(1, {"model": model}).result(60)
        other = Odd(place, 1)
        saver.resume({"model": other})
    demand_equal(bits_of(other), truth)
    return f"{len(truth)} tensors of {len(DTYPES)} types, two with strides"


def read_by_torch(place: Place) -> str:
    """What a device staged is read by `dcp.load` alone."""
    model = network(place)
    truth = bits_of(model)
    with Checkpointer(place.folder / "run", layout="dcp") as saver:
        path = saver.save(1, {"model": model}).result(60)
    other = network(place, 1)
    state: dict[str, Any] = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    demand_equal({f"model.{name}": bits(value) for name, value in state["model"].items()}, truth)
    return f"{len(truth)} tensors"


def continued(place: Place) -> str:
    """Five steps in a row, and three with a resume before the other two, end with equal bits."""
    model = network(place)
    optimizer = adamw(model)
    train(place, model, optimizer, range(3))
    with Checkpointer(place.folder / "run") as saver:
        saver.save(3, {"model": model, "optimizer": optimizer})
        train(place, model, optimizer, range(3, 5))
        other = network(place, 1)
        states = adamw(other)
        saver.resume({"model": other, "optimizer": states})
    train(place, other, states, range(3, 5))
    demand_equal(bits_of(other, states), bits_of(model, optimizer))
    return "equal after a resume"


def random_numbers(place: Place) -> str:
    torch.manual_seed(7)
    torch.rand(3, device=place.device)
    model = network(place)
    with Checkpointer(place.folder / "run") as saver:
        saver.save(1, {"model": model}).result(60)
        expected = torch.rand(100, device=place.device)
        saver.resume({"model": model})
        assert torch.equal(torch.rand(100, device=place.device), expected)
    return "the next 100 numbers"


def exported(place: Place) -> str:
    """The model folder that ranks write, and the one that a conversion makes of a save."""
    model = network(place, dtype=torch.bfloat16)
    truth = bits_of(model)
    with Checkpointer(place.folder / "run") as saver:
        saver.save(1, {"model": model}).result(60)
        saver.export(place.folder / "model").result(120)
    ckptkit.consolidate(place.folder / "run", place.folder / "again", names="live")
    for folder in ("model", "again"):
        files = sorted((place.folder / folder).glob("*.safetensors"))
        found = {f"model.{n}": bits(v) for file in files for n, v in load_file(file).items()}
        demand_equal(found, truth)
    return f"{len(truth)} tensors"


def loaded(place: Place) -> str:
    """`load_into` fills the memory of a device, also while a save copies from it."""
    model, other = network(place), network(place, 1)
    source = place.folder / "source"
    source.mkdir()
    state = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, source / "model.safetensors")
    before, pointers = bits_of(other), [p.data_ptr() for p in other.parameters()]
    with Checkpointer(place.folder / "run") as saver:
        handle = saver.save(1, {"model": other})
        load_into(other, source)
        demand_equal(bits_of(other), bits_of(model))
        assert [p.data_ptr() for p in other.parameters()] == pointers
        handle.result(60)
        saver.resume({"model": other})
    demand_equal(bits_of(other), before)
    return f"{len(before)} tensors"


def replayed(place: Place) -> str:
    """An optimizer step in a CUDA graph, which calls no hook, does not tear a save."""
    if not place.is_cuda:
        raise SkippedError("needs CUDA")
    model = nn.Sequential(*[nn.Linear(place.width, place.width) for _ in range(4)]).cuda()
    optimizer = adamw(model, capturable=True)
    batch = torch.randn(8, place.width, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).pow(2).mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with Checkpointer(place.folder / "run") as saver:
        for number in range(4):
            torch.cuda.synchronize()
            truth = bits_of(model)
            handle = saver.save(number, {"model": model, "optimizer": optimizer})
            graph.replay()
            graph.replay()
            handle.result(120)
            other = nn.Sequential(*[nn.Linear(place.width, place.width) for _ in range(4)]).cuda()
            saver.resume({"model": other, "optimizer": adamw(other, capturable=True)}, step=number)
            demand_equal(bits_of(other), truth)
    return "4 saves, each followed by two replays"


def numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return flat.numpy()


def packed(place: Place) -> str:
    """Bytes and scales of bitsandbytes on the device, against those that a merge assumes."""
    bnb: Any = importlib.import_module("bitsandbytes.functional")
    kinds: list[FourBitType] = ["nf4", "fp4"]
    compared = differing = 0
    for kind in kinds:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            torch.manual_seed(compared)
            weight = torch.randn(256, 512).mul(0.02).to(dtype).to(place.device)
            found, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind)
            name = str(dtype).removeprefix("torch.")
            stored = StoredOperand("memory", Key("weight"), BY_NAME[name])
            ours = RequantizedFourBit(*(stored, BY_NAME[name], 64, weight.numel()), quant_type=kind)
            whole, inputs = Span(0, weight.numel()), [numbers(weight)]
            bytes_here = ours.packed(whole, inputs, on_gpu=place.is_cuda)
            theirs = numbers(found).view(np.uint8)
            differing += int(np.count_nonzero(bytes_here != theirs))
            assert np.array_equal(ours.maxima(whole, inputs), numbers(state.absmax).reshape(-1))
            unpacked = bnb.dequantize_4bit(found, state)
            differing += int(np.count_nonzero(ours.values(whole, inputs) != numbers(unpacked)))
            compared += weight.numel()
    assert not differing, f"{differing:,} of {compared:,} differ"
    return f"{compared:,} elements of nf4 and fp4 in three types"


def merged(place: Place) -> str:
    """An adapter of a base that the device packed, against its merge into the unpacked base."""
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    bnb: Any = importlib.import_module("bitsandbytes.functional")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(place.folder / "base")
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place.folder / "base", quantization_config=quantization, dtype=torch.bfloat16,
        device_map={"": place.device},
    )  # fmt: skip
    weights = load_file(place.folder / "base/model.safetensors")
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            whole = bnb.dequantize_4bit(module.weight.data, state).cpu()
            weights[f"{name}.weight"] = whole.to(torch.bfloat16).contiguous()
    (place.folder / "plain").mkdir()
    save_file(weights, place.folder / "plain/model.safetensors", {"format": "pt"})
    config.save_pretrained(place.folder / "plain")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    with Checkpointer(place.folder / "run") as saver:
        step = saver.save(1, {"model": model}).result(120)
    ckptkit.merge_adapter(step, place.folder / "ours")
    ckptkit.extract_adapter(step, place.folder / "adapter")
    options: Any = {"base": place.folder / "plain", "qlora_base": "original"}
    ckptkit.merge_adapter(
        place.folder / "adapter", place.folder / "theirs", allow_other_base=True, **options
    )
    found, truth = (
        {name: bits(value) for name, value in load_file(file).items()}
        for file in (place.folder / f"{n}/model.safetensors" for n in ("ours", "theirs"))
    )
    demand_equal(found, truth)
    facts = json.loads((place.folder / "ours/ckptkit.json").read_text())["source"]["quantization"]
    return f"{len(found)} tensors, {facts['weights']} of them packed"


CHECKS: dict[str, tuple[str, Callable[[Place], str]]] = {
    "plain": ("saves in a row, while training goes on, and their resumes", plain),
    "fused": ("the same with a fused optimizer", fused),
    "fsdp2": ("the same with FSDP2", sharded_by_fsdp2),
    "offload": ("the same with FSDP2 and offloading to the CPU", offloaded_by_fsdp2),
    "fsdp1": ("a save and a resume with FSDP1", sharded_by_fsdp1),
    "graph": ("saves before replays of a CUDA graph with the optimizer step", replayed),
    "types": ("element types, shapes and strides", element_types),
    "torch": ("read by stock dcp.load", read_by_torch),
    "continue": ("training that is resumed, against training that is not", continued),
    "random": ("generators of the device", random_numbers),
    "export": ("an export, and a consolidation of a save", exported),
    "load": ("load_into, while a save copies", loaded),
    "packed": ("4-bit weights of bitsandbytes, against those that a merge assumes", packed),
    "merge": ("QLoRA: a merge, against one into the unpacked base", merged),
}
"""What is checked, by name: its title, and the function."""
