"""Runs under torchrun: models that were changed since a step resume from it; see `run_cases`.

What a step holds is read by torch's own conversion to a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from ckptkit.core.errors import ResumeError, UsageError
from ckptkit.training import Checkpointer
from tests.distributed.cases import Tensors, fsdp2, grid, run_cases, same
from tests.distributed.stages_run import Layer

ROWS, MORE = 23, 28  # which two ranks hold 12 and 11 of, or 14 each
GROWN = ["*embed_tokens.weight", "*lm_head.weight"]


class Policy(nn.Module):
    """A Llama under a name of the caller's, with experts in one tensor, and a head or none."""

    def __init__(
        self, seed: int, *, rows: int = ROWS, name: str = "actor", tied: bool = False, **more: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 12, "tie_word_embeddings": tied}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        layers = more.get("layers", 2)
        llama = LlamaForCausalLM(
            LlamaConfig(vocab_size=ROWS, num_hidden_layers=layers, **sizes, **heads)
        )
        if rows != ROWS:
            llama.resize_token_embeddings(rows)
        self.add_module(name, llama)
        self.name = name
        self.experts = nn.Parameter(torch.randn(more.get("experts", 3), 4, 8))
        self.value = nn.Linear(8, 1) if more.get("value", True) else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.get_submodule(self.name)(tokens, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        loss: torch.Tensor = (
            out.logits.pow(2).mean() + (hidden @ self.experts.mean((0, 1))).pow(2).mean()
        )
        return loss if self.value is None else loss + self.value(hidden).pow(2).mean()


def wrap(model: Policy, kind: str) -> nn.Module:
    llama: Any = model.get_submodule(model.name)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        orig, device = "orig" in kind, torch.device("cpu")
        for number, layer in enumerate(llama.model.layers):
            wrapped = FullyShardedDataParallel(layer, use_orig_params=orig, device_id=device)
            llama.model.layers[number] = wrapped
        return FullyShardedDataParallel(model, use_orig_params=orig, device_id=device)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
            "model.layers.*.mlp.up_proj": ColwiseParallel(),
            "model.layers.*.mlp.gate_proj": ColwiseParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(llama, mesh, plan)
        return model
    by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 2 else None}
    over = grid() if kind == "hsdp" else None
    return fsdp2(model, *llama.model.layers, mesh=over, **by_columns)


def state_of(kind: str, seed: int, *, fused: bool = False, **options: Any) -> dict[str, Any]:
    model = wrap(Policy(seed, **options), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any], steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        state["model"](torch.randint(0, ROWS, (2, 5), generator=generator)).backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"{path}{key}", item
        elif isinstance(item, dict | list):
            yield from flatten(item, f"{path}{key}.")


def content(step: Path) -> Tensors:
    """Returns what stock torch reads of a step; empty on other ranks than rank 0."""
    found: Tensors = {}
    if dist.get_rank() == 0:
        file = step.with_suffix(".pt")
        dcp_to_torch_save(step, file)
        whole = torch.load(file, weights_only=False)  # noqa: TID251  torch is the oracle
        found = {n: t for n, t in flatten(whole) if n.startswith(("model.", "optimizer.state."))}
    dist.barrier()
    return found


def saved(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> tuple[Path, Tensors]:
    path = checkpointer.save(step, state).result()
    return path, content(path)


def proposed(error: pytest.ExceptionInfo[ResumeError]) -> dict[str, Any]:
    found = re.search(r"Checkpointer\.resume\(…, (.*)\) takes it$", error.value.hint or "")
    assert found is not None, str(error.value)
    options: dict[str, Any] = eval(f"dict({found[1]})")  # noqa: S307  as a user would write it
    return options


def assert_continues(
    now: Tensors, before: Tensors, made: Tensors, names: dict[str, str], *, flat: bool = False
) -> None:
    """Compares a resumed state with the step that it comes from, whose names have changed.

    Parameters of one flat one have a state together, so that new ones have one of zeros.
    """
    called: Tensors = {}
    for name, tensor in before.items():
        found = next((old for old in names if f".{old}." in name), None)
        new = name if found is None else name.replace(f".{found}.", f".{names[found]}.")
        called[new] = tensor
    for name, tensor in now.items():
        is_moment = name.startswith("optimizer.")
        expected = torch.zeros_like(tensor) if is_moment else made[name].clone()
        old = called.get(name)
        if old is not None:
            expected[tuple(map(slice, old.shape))] = old
        else:
            assert not is_moment or flat, name
        assert name.endswith(".step") or torch.equal(tensor, expected), name
    lost = {name for name in called.keys() - now.keys() if ".value." not in name}
    assert not lost, lost


def grows(folder: Path, kind: str) -> None:
    """A larger vocabulary, tied or not, and more experts; the next step runs."""
    fused = kind in {"fsdp2", "ddp"}  # torch refuses it for DTensors beside other tensors
    for tied in (False, True):
        run = folder / f"tied_{tied}"
        with Checkpointer(run, layout="dcp") as checkpointer:
            state = state_of(kind, 1, tied=tied, fused=fused)
            train(state)
            path, before = saved(checkpointer, 1, state)
        with Checkpointer(folder / f"other_{tied}", layout="dcp") as checkpointer:
            options: dict[str, Any] = {"tied": tied, "fused": fused, "rows": MORE, "experts": 5}
            fresh = state_of(kind, 2, **options)
            _, made = saved(checkpointer, 1, fresh)
            with pytest.raises(ResumeError, match=r"was found in the checkpoint") as caught:
                checkpointer.resume(fresh, folder=path)
            assert not fresh["optimizer"].state
            assert checkpointer.resume(fresh, folder=path, **proposed(caught)) == 1
            _, now = saved(checkpointer, 2, fresh)
            assert_continues(now, before, made, {})
            train(fresh)
            _, later = saved(checkpointer, 3, fresh)
            again = state_of(kind, 3, **options)
            assert checkpointer.resume(again, grow=[*GROWN, "experts"]) == 3
            same(saved(checkpointer, 4, again)[1], later)


def changes(folder: Path, kind: str) -> None:
    """Another name, a further layer, no head, a larger vocabulary, from a step of FSDP2."""
    with Checkpointer(folder / "run", layout="dcp") as checkpointer:
        state = state_of("fsdp2", 1)
        train(state)
        path, before = saved(checkpointer, 1, state)
    options: dict[str, Any] = {"rows": MORE, "layers": 3, "name": "policy", "value": False}
    with Checkpointer(folder / "other", layout="dcp") as checkpointer:
        fresh = state_of(kind, 2, **options)
        _, made = saved(checkpointer, 1, fresh)
        given: dict[str, Any] = {
            "grow": [*GROWN, "policy.model.layers.2.*"],
            "renamed": {"actor": "policy", "value": None},
        }
        group = grid()["replicate"].get_group() if kind == "hsdp" else None
        assert checkpointer.resume(fresh, folder=path, group=group, **given) == 1
        flat = kind == "fsdp1_flat"
        assert_continues(
            saved(checkpointer, 2, fresh)[1], before, made, {"actor": "policy"}, flat=flat
        )
        train(fresh)
        _, later = saved(checkpointer, 3, fresh)
        again = state_of(kind, 3, **options)
        assert checkpointer.resume(again, **given) == 3
        same(saved(checkpointer, 4, again)[1], later)


def stock(folder: Path, kind: str) -> None:
    """A step as accelerate writes it."""
    state = state_of(kind, 1)
    train(state)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    step = folder / "checkpoint_3"
    dcp.save({"model": model}, checkpoint_id=step / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer}, checkpoint_id=step / "optimizer_0")
    with Checkpointer(folder / "run", layout="dcp") as checkpointer:
        _, before = saved(checkpointer, 1, state)
        fresh = state_of(kind, 2, rows=MORE, name="policy", value=False)
        _, made = saved(checkpointer, 2, fresh)
        names = {"actor": "policy", "value": None}
        assert checkpointer.resume(fresh, folder=step, grow=GROWN, renamed=names) == 3
        assert_continues(saved(checkpointer, 3, fresh)[1], before, made, {"actor": "policy"})
        train(fresh)


def stages(folder: Path, kind: str) -> None:
    """A layer is new on the stage of one rank, and its pattern fits nothing on the others."""
    del kind
    rank = dist.get_rank()

    def stage(seed: int, *names: str) -> dict[str, Any]:
        torch.manual_seed(seed)
        part = nn.Sequential()
        for name in names:
            part.add_module(name, Layer())
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
        model: Any = fully_shard(part, mesh=mesh)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": [model], "optimizer": [optimizer]}

    state = stage(1, f"layer{rank}")
    state["optimizer"][0].step()
    with Checkpointer(folder / "run", layout="dcp") as checkpointer:
        path, before = saved(checkpointer, 1, state)
    with Checkpointer(folder / "other", layout="dcp") as checkpointer:
        # A layer in front: that of rank 0 is new, and that of rank 1 was the first one.
        fresh = stage(2, *(("layer0", "layer1") if rank == 0 else ("layer2",)))
        _, made = saved(checkpointer, 1, fresh)
        names: dict[str, Any] = {"layer0": "layer1", "layer1": "layer2"}
        options: dict[str, Any] = {"folder": path, "renamed": names}
        with pytest.raises(UsageError, match=r"fits 'layer7'"):
            checkpointer.resume(fresh, grow=["layer0.*", "layer7"], **options)
        assert checkpointer.resume(fresh, grow=["layer0.*"], **options) == 1
        assert_continues(saved(checkpointer, 2, fresh)[1], before, made, names)


def differs(folder: Path, kind: str) -> None:
    """Ranks with other options are told so, all of them."""
    with Checkpointer(folder / "run", layout="dcp") as checkpointer:
        state = state_of(kind, 1)
        path, _ = saved(checkpointer, 1, state)
        patterns = ["*"] if dist.get_rank() else ["*embed*"]
        places: list[dict[str, Any]] = [{"folder": path}, {}]
        for place in places:
            with pytest.raises(UsageError, match=r"grow: is \['\*'\] on rank 1"):
                checkpointer.resume(state, grow=patterns, **place)


CASES = {
    "grows": grows,
    "changes": changes,
    "stock": stock,
    "stages": stages,
    "differs": differs,
}

if __name__ == "__main__":
    run_cases(CASES, kind="fsdp2")
