"""Runs under torchrun: trains an adapter, and sees that its frozen base is written only once.

Usage: frozen_run.py FOLDER CASE... Cases are `base:KIND` and, with 4-bit weights, `packed`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ckptkit.training import Checkpointer
from ckptkit.training.handle import SaveReport
from tests.distributed.cases import FULL, Tensors, fsdp1, fsdp2, run_cases, same

BASE = 4 * (1500 * 301 + 301)


class Net(nn.Module):
    """A frozen base, whose rows divide by no number of ranks, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1500, 301)
        self.down = nn.Linear(1500, 4, bias=False)
        self.up = nn.Linear(4, 301, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.base(rows) + self.up(self.down(rows))
        return hidden


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "fsdp2": lambda model: fsdp2(model, model.base),
    "fsdp1_flat": lambda model: fsdp1(model, "base", orig=False),
    "fsdp1_orig": lambda model: fsdp1(model, orig=True),
    "ddp": DistributedDataParallel,
}


def make(kind: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = WRAPPERS[kind](Net())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=1e-2)}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.randn(3, 1500)).pow(2).mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def gathered(state: dict[str, Any]) -> Tensors:
    found = get_model_state_dict(state["model"], options=FULL)
    return {name: value.clone() for name, value in found.items() if torch.is_tensor(value)}


def loaded(step: Path) -> Tensors:
    """Reads the model of a step with stock torch."""
    with torch.random.fork_rng():
        like = {name: torch.full_like(value, 9.0) for name, value in Net().state_dict().items()}
    dcp.load({"model": like}, checkpoint_id=step / "pytorch_model_fsdp_0", no_dist=True)
    return like


class Session:
    """Saves step after step, each of which has to hold the live model."""

    def __init__(self, checkpointer: Checkpointer, state: dict[str, Any]) -> None:
        self.checkpointer = checkpointer
        self.state = state
        self.step = 0

    def save(self) -> SaveReport:
        self.step += 1
        truth = gathered(self.state)
        report = self.checkpointer.save(self.step, self.state).report(120)
        if dist.get_rank() == 0:
            found = loaded(report.path)
            assert truth.keys() == found.keys()
            for name, tensor in truth.items():
                assert torch.equal(tensor, found[name]), name
        return report

    def writes_all(self) -> None:
        report = self.save()
        assert not report.linked_bytes
        assert summed(report.size_bytes) > BASE

    def links(self) -> None:
        report = self.save()
        assert report.linked_bytes > 0
        assert BASE < summed(report.linked_bytes) < 1.1 * BASE
        assert summed(report.size_bytes) < BASE / 8


def summed(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def base(folder: Path, kind: str) -> None:
    state, run = make(kind, 1), folder / "run"
    with Checkpointer(run, keep_last=2) as checkpointer:
        session = Session(checkpointer, state)
        checkpointer.prepare(state)
        train(state)
        session.writes_all()
        for _ in range(3):  # which retire the step that wrote the base
            train(state)
            session.links()
        evaluate(state["model"])
        session.links()
        doubts(session)
        resumed(session, make(kind, 2))
        session.writes_all()
    assert [p.name for p in (run / ".ckptkit").iterdir()] == ["lock"] or dist.get_rank()
    with Checkpointer(run) as checkpointer:
        session.checkpointer = checkpointer
        resumed(session, make(kind, 3))


def doubts(session: Session) -> None:
    model = session.state["model"]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    with torch.no_grad():
        for parameter in frozen:
            parameter.add_(1)
    train(session.state)
    session.writes_all()
    session.links()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=True), torch.no_grad():
            next(p for p in model.parameters() if p.shape == (301, 1500))[7, 8] += 1
        session.writes_all()
        session.links()
    # Behind the back of torch, as when adapters are merged and taken apart again.
    for parameter in frozen:
        getattr(parameter, "_local_tensor", parameter).data.mul_(1.001)
    session.writes_all()
    session.links()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 1500))
    model.train()


def resumed(session: Session, other: dict[str, Any]) -> None:
    assert session.checkpointer.resume(other) == session.step
    same(gathered(other), gathered(session.state))


class Packed(nn.Module):
    """A layer of 4-bit weights, as QLoRA has it, and one that is trained."""

    def __init__(self, layers: Any, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        settings = {"bias": False, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
        storage = torch.bfloat16  # as FSDP needs it
        self.packed = layers.Linear4bit(512, 512, **settings, quant_storage=storage).to("cpu")
        self.trained = nn.Linear(512, 4, dtype=torch.bfloat16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.trained(self.packed(rows))
        return hidden


PACKED: tuple[Callable[[Packed], nn.Module], ...] = (
    lambda model: fsdp1(model, "packed", orig=False),
    lambda model: fsdp2(model, model.packed),
    lambda model: model,
    lambda model: fsdp1(model, orig=True),
)


def packed(folder: Path, _: str) -> None:
    """Saves packed weights with all that it takes to unpack them, and resumes them elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import
        library: Any = importlib.import_module("bitsandbytes")
    truth, rows = unpacked(library, Packed(library.nn).state_dict()), torch.ones(2, 512)
    for number, wrap in enumerate(PACKED):
        # Its base is another one each time: the resume has to replace scales and offsets too.
        model, reports = wrap(Packed(library.nn, seed=1 + number)), []
        with Checkpointer(folder, keep_last=2) as checkpointer:
            assert checkpointer.resume({"model": model}) == (2 * number or None)
            for step in (2 * number + 1, 2 * number + 2):
                model(rows.bfloat16())  # after which the memory of flat parameters is given back
                reports.append(checkpointer.save(step, {"model": model}).report(120))
        assert summed(reports[1].linked_bytes) > 512 * 512 // 2 + 512 * 512 // 64  # scales included
        if dist.get_rank() == 0:
            stored = reports[1].path / "pytorch_model_fsdp_0"
            keys: Any = dcp.FileSystemReader(stored).read_metadata().state_dict_metadata
            like: dict[str, Any] = {
                key: torch.zeros(found.size, dtype=found.properties.dtype)
                for key, found in keys.items()
            }
            dcp.load(like, checkpoint_id=stored, no_dist=True)
            found = {key.removeprefix("model."): value for key, value in like.items()}
            assert torch.equal(unpacked(library, found), truth), number


def unpacked(library: Any, state: Tensors) -> torch.Tensor:
    start = "packed.weight"
    scales = {k.removeprefix(f"{start}."): v for k, v in state.items() if k.startswith(f"{start}.")}
    weight = library.nn.Params4bit.from_prequantized(state[start], scales, device="cpu")
    found: torch.Tensor = library.functional.dequantize_4bit(weight.data, weight.quant_state)
    return found


if __name__ == "__main__":
    run_cases({"base": base, "packed": packed})
