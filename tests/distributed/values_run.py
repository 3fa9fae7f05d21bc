"""Runs under torchrun: FSDP2 with values of every type beside its tensors, saved and resumed.

Usage: values_run.py RUN LAYOUT.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptkit.training import Checkpointer

KEPT: dict[Any, Any] = {1: 0.5, "1": [{}, {None: torch.Size([2])}], False: Counter({3: 1})}


class Holder:
    """An object whose state has sharded tensors under keys that are no texts."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def build(seed: int, *, filled: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {
        "model": model,
        "optimizer": optimizer,
        "average": Holder({1: average, "note": KEPT if filled else None}),
        "plain": {"k": KEPT} if filled else {},
    }
    if filled:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        group, own = optimizer.param_groups[0], optimizer.state
        group["k"], own["k"], own[group["params"][0]]["k"] = KEPT, KEPT, KEPT  # type: ignore[index]
    return state


def main() -> None:
    run, layout = sys.argv[1:]
    dist.init_process_group("gloo")
    with Checkpointer(run, layout=layout) as checkpointer:  # type: ignore[arg-type]
        saved, fresh = build(0, filled=True), build(1, filled=False)
        assert not checkpointer.save(1, saved).report(60).lost
        assert checkpointer.resume(fresh) == 1
    group, own = fresh["optimizer"].param_groups[0], fresh["optimizer"].state
    for found in (
        group["k"],
        own["k"],
        own[group["params"][0]]["k"],
        fresh["plain"]["k"],
        fresh["average"].state["note"],
    ):
        assert repr(found) == repr(KEPT), found
    assert torch.equal(group["lr"], saved["optimizer"].param_groups[0]["lr"])
    for name, tensor in saved["average"].state[1].items():
        assert torch.equal(tensor.to_local(), fresh["average"].state[1][name].to_local())
    for one, other in zip(saved["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    sys.stdout.write("KEPT\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
