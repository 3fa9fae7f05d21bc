"""Models of which each step is the same on any number of ranks, bit by bit, and their shadows.

The gradient of a parameter is a function of its name and the step alone, and a power of two: a mean
over ranks does not change it. AdamW's factors are powers of two as well, so that it rounds the
same wherever an element is in a vector.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.dataloaders import Data

Tensors = dict[str, torch.Tensor]
SERIAL = "serial"  # the entry of the optimizer's state that tells saves of a step apart
_GRADIENTS = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.25, -0.25, 2.0, -2.0])
_VOCABULARY = 40


class Plain(nn.Module):
    """Sizes that divide by no number of ranks, and a frozen part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 6)
        self.up = nn.Linear(6, width)
        self.norm = nn.LayerNorm(13)
        self.base = nn.Linear(width, 29).requires_grad_(False)
        self.down = nn.Linear(13, 1)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    model: nn.Module = get_peft_model(_llama(), config)
    return model


_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": lambda: Plain(13),
    "wide": lambda: Plain(15_001),
    "llama": _llama,
    "lora": _lora,
}
# What is wrapped by itself, where it is there; "base" is frozen and has to be, in flat parameters.
_UNITS = ("up", "base", "model.layers.0", "model.layers.1", "base_model.model.model.layers.0")


def build(kind: str, seed: int) -> nn.Module:
    """Returns a model, the same for a kind and a seed, whose forward pass takes the step."""
    torch.manual_seed(seed)
    model = _MODELS[kind]()
    known = set(dict(model.named_modules()))
    paths = [path for path in _UNITS if path in known]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for path in paths:
        prefix = f"{path}."
        own = [name for name in names if name.startswith(prefix)]
        names = [name for name in names if name not in own]
        _replace_forward(model.get_submodule(path), [(model, name) for name in own], (), model)
    _replace_forward(model, [(model, name) for name in names], tuple(paths), model)
    return model


def _replace_forward(
    module: nn.Module, names: list[tuple[nn.Module, str]], paths: tuple[str, ...], root: nn.Module
) -> None:
    """Makes a module compute the sum of its parameters times the gradients they are to have."""
    homes = [(root.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2], n) for _, n in names]

    def forward(_: nn.Module, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for home, attribute, name in homes:
            value = getattr(home, attribute)
            total = total + (value * gradient(step, name, value.shape)).sum()
        for path in paths:
            part = root.get_submodule(path)
            if any(p.requires_grad for p in part.parameters()) or path == "base":
                total = total + part(step)
        return total

    module.forward = MethodType(forward, module)


def gradient(step: int, name: str, shape: torch.Size) -> torch.Tensor:
    source = torch.Generator().manual_seed(1_000 * step + zlib.crc32(name.encode()) % 2**40)
    return _GRADIENTS[torch.randint(0, len(_GRADIENTS), shape, generator=source)]


def wrap(model: nn.Module, strategy: str) -> nn.Module:
    world = torch.distributed.get_world_size()
    units = [path for path in _UNITS if path in dict(model.named_modules())]
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy in {"fsdp2", "hsdp"}:
        mesh = init_device_mesh("cpu", (world,))
        if strategy == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for path in units:
            fully_shard(model.get_submodule(path), mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    kinds = {"grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD", "hybrid": "HYBRID_SHARD"}
    kind = kinds.get(strategy.removeprefix("fsdp1_"), "FULL_SHARD")
    shard: Any = partial(
        FullyShardedDataParallel,
        sharding_strategy=ShardingStrategy[kind],
        use_orig_params=strategy == "fsdp1_orig",
        device_id=torch.device("cpu"),
    )
    if kind == "HYBRID_SHARD":
        names = ("replicate", "shard")
        shard = partial(shard, device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    for path in units:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).register_module(name, shard(model.get_submodule(path)))
    wrapped: nn.Module = shard(model)
    return wrapped


def make_state(model: nn.Module) -> dict[str, Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=2.0**-6, betas=(0.5, 0.75), weight_decay=0.25, foreach=False
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5),
        "dataloader": Data(),
        "progress": {"step": 0, "serial": 0},
    }


def train(state: dict[str, Any], step: int, rank: int) -> None:
    """Trains one step; `step` is the number of the step that ends here."""
    state["model"](step).backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["dataloader"].at = place_of(step, rank)
    state["progress"]["step"] = step
    sow(step, rank)


def place_of(step: int, rank: int) -> int:
    return 100 * step + rank + 1


def sow(step: int, rank: int) -> None:
    """Sets the random numbers to what they are after a step on a rank."""
    number = 1_000 * step + rank
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def random_numbers() -> str:
    held: Any = np.random.get_state()
    parts = (repr(random.getstate()), repr(held[1].tolist()), repr(held[2:]))
    torch_part = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    return f"{zlib.crc32(''.join(parts).encode()):08x}{torch_part:08x}"


def stamp(state: dict[str, Any], serial: int) -> None:
    """Puts the number of a save into the optimizer's state, beside each element."""
    state["progress"]["serial"] = serial
    for held in state["optimizer"].state.values():
        moments = held["exp_avg"]
        if SERIAL not in held:
            held[SERIAL] = torch.zeros_like(moments)
        local = getattr(held[SERIAL], "_local_tensor", held[SERIAL])
        local.fill_(float(serial))


class Shadow:
    """What a plain run on one process computes, step by step."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.state = make_state(build(kind, seed))
        self._steps: list[Tensors] = [self._tensors()]

    def tensors(self, step: int) -> Tensors:
        """Returns model and optimizer after a step, under the names that steps have on disk."""
        while len(self._steps) <= step:
            train(self.state, len(self._steps), 0)
            self._steps.append(self._tensors())
        return self._steps[step]

    def model(self, step: int) -> Tensors:
        """Returns the model alone, under its own names."""
        return {
            name.removeprefix("model."): tensor
            for name, tensor in self.tensors(step).items()
            if name.startswith("model.")
        }

    def merged(self, step: int) -> Tensors:
        """Returns the model after PEFT has merged the adapter into it."""
        model: Any = build(self.kind, self.seed)
        model.load_state_dict(self.model(step))
        whole = model.merge_and_unload()
        return {name: tensor.detach() for name, tensor in whole.state_dict().items()}

    def _tensors(self) -> Tensors:
        model, held = self.state["model"], self.state["optimizer"].state
        found = {f"model.{name}": t.detach().clone() for name, t in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for key, value in held.get(parameter, {}).items():
                found[f"optimizer.state.{name}.{key}"] = value.detach().clone()
        return found
