"""Runs under torchrun: ranks of a group read for each other; see `run_cases` for the arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptkit.core.errors import CkptkitError, LoadError, PartlyFilledError, UsageError
from ckptkit.training import Checkpointer, load_into
from tests.built_modules import local, same_bits
from tests.distributed.cases import fsdp2, grid, run_cases
from tests.files import flip_bit

WIDTH, LAYERS = 64, 8


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    model.register_buffer("seen", torch.arange(3) > seed)
    return model


def wrap(kind: str, seed: int) -> tuple[nn.Module, Any]:
    """Returns a model and the group of those ranks that hold alike what this one holds."""
    model = make_model(seed)
    if kind == "ddp":
        layer: Any = model[1]
        layer.weight = nn.Parameter(layer.weight.detach().t())  # it is not contiguous
        return DistributedDataParallel(model), dist.group.WORLD
    mesh = grid()
    group = dist.group.WORLD if kind == "world" else mesh["replicate"].get_group()
    return fsdp2(model, *model, mesh=mesh), group


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: local(value).clone() for name, value in state.items()}


def gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def put_model(folder: Path) -> Path:
    if dist.get_rank() == 0:
        save_file(
            {n: v.contiguous() for n, v in make_model(7).state_dict().items()},
            folder / "model.safetensors",
        )
    dist.barrier()
    return folder


def loads(folder: Path, kind: str) -> None:
    """A model is read once by all, and has the bits that each rank reads for itself."""
    source = put_model(folder)
    alone, _ = wrap(kind, 1)
    single = load_into(alone, source)
    model, group = wrap(kind, 2)
    result = load_into(model, source, group=group)
    for name, value in alone.state_dict().items():
        assert same_bits(local(model.state_dict()[name]), local(value)), name
    size = (source / "model.safetensors").stat().st_size
    assert single.bytes_shared == 0 < result.bytes_shared + result.bytes_read
    reads = gather(result.bytes_read)
    assert sum(reads) < 1.1 * size
    assert max(reads) < 1.5 * size / dist.get_world_size()
    needed = gather(result.bytes_needed)
    shared = gather(result.bytes_shared)
    assert all(r + s >= n for r, s, n in zip(reads, shared, needed, strict=True))


def resumes(folder: Path, kind: str) -> None:
    """A step is read once by all, the states of its optimizer too."""
    model, group = wrap(kind, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(folder / "run") as checkpointer:
        for step in (1, 2):
            model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    expected = values(model.state_dict())
    moments = [dict(optimizer.state[p]) for p in model.parameters()]
    model, group = wrap(kind, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(folder / "run") as checkpointer:
        assert checkpointer.resume({"model": model, "optimizer": optimizer}, group=group) == 2
    for name, value in values(model.state_dict()).items():
        assert same_bits(value, expected[name]), name
    for parameter, moment in zip(model.parameters(), moments, strict=True):
        for name, value in optimizer.state[parameter].items():
            assert same_bits(local(value), local(moment[name])), name


def damaged(folder: Path, kind: str) -> None:
    """A flipped bit, which one rank finds, is an error on all, and leaves none waiting."""
    if dist.get_rank() == 0:
        state = make_model(7).state_dict()
        dcp.save(state, checkpoint_id=folder / "step", no_dist=True)
        shard = folder / "step" / "__0_0.distcp"
        weight = state["3.weight"].view(torch.uint8).numpy().tobytes()
        flip_bit(shard, shard.read_bytes().index(weight) + 99)
    dist.barrier()
    model, group = wrap(kind, 2)
    with pytest.raises(CkptkitError) as caught:
        load_into(model, folder / "step", group=group)
    found = [error for error, alike in gather((caught.type, kind)) if alike == kind]
    assert PartlyFilledError in found
    assert all(error is PartlyFilledError for error in found)


def differs(folder: Path, kind: str) -> None:
    """What does not fit on one rank is refused on all, and the models are unchanged."""
    source = put_model(folder)
    model, _ = wrap(kind, 2)
    before = values(model.state_dict())
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    if dist.get_rank() == 1:
        plain.register_buffer("more", torch.zeros(3))
    with pytest.raises(LoadError, match=r"more|rank 1 of the group could not load"):
        load_into(model, source, group=dist.group.WORLD)
    after = values(model.state_dict())
    assert all(same_bits(after[name], value) for name, value in before.items())


def apart(folder: Path, kind: str) -> None:
    """Ranks that name different files are not sent what they did not ask for."""
    own = folder / str(dist.get_rank() % 2)
    if dist.get_rank() < 2:
        own.mkdir()
        tensors = make_model(dist.get_rank()).state_dict()
        save_file({n: v.contiguous() for n, v in tensors.items()}, own / "model.safetensors")
    dist.barrier()
    model, _ = wrap(kind, 2)
    load_into(model, own, group=dist.group.WORLD)
    alone, _ = wrap(kind, 3)
    load_into(alone, own)
    for name, value in values(model.state_dict()).items():
        assert same_bits(value, local(alone.state_dict()[name])), name


def outside(folder: Path, kind: str) -> None:
    """A rank that is not in the group is told so."""
    source = put_model(folder)
    group = dist.new_group([0])
    model, _ = wrap(kind, 2)
    if dist.get_rank() == 0:
        load_into(model, source, group=group)
    else:
        with pytest.raises(UsageError, match="does not have rank"):
            load_into(model, source, group=group)


if __name__ == "__main__":
    own = (loads, resumes, damaged, differs, apart, outside)
    run_cases({case.__name__: case for case in own})
