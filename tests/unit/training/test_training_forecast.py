"""How much memory optimizers that have never stepped will need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ckptkit.training.state.collect import bind, expected_state_bytes
from ckptkit.training.state.optimizers import state_types
from ckptkit.training.state.pieces import Piece, Replicas, select_owned

HEADERS = 3 * 2048  # of the two moments and the count of steps


def expected(state: dict[str, Any]) -> int:
    bound = bind(state, layout="accelerate", rank=0, world_size=1)
    pieces = bound.holdings(0).pieces
    return expected_state_bytes(bound, pieces, select_owned(pieces))


def test_only_what_an_optimizer_trains_counts_and_each_optimizer_for_itself() -> None:
    base, head, other = nn.Linear(300, 300), nn.Linear(300, 4), nn.Linear(50, 50)
    base.requires_grad_(requires_grad=False)
    model = nn.Sequential(base, head)
    first = torch.optim.AdamW(model.parameters())
    second = torch.optim.SGD(other.parameters(), momentum=0.9)
    of_first = 2 * 4 * (300 * 4 + 4) + 2 * HEADERS
    of_second = 4 * (50 * 50 + 50) + 2 * (2048 + 2048)
    assert expected({"model": model, "optimizer": first}) == of_first
    state = {"model": [model, other], "optimizer": [first, second]}
    assert expected(state) == of_first + of_second
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert expected({"model": model, "optimizer": plain}) == 0


def test_the_forecast_is_what_the_first_step_adds() -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 7).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    state = {"model": model, "optimizer": optimizer}
    guess = expected(state)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    bound = bind(state, layout="accelerate", rank=0, world_size=1)
    added = sum(p.size_bytes for p in bound.pieces() if p.unit == "optimizer_0")
    assert added <= guess <= added + 4 * 4 * 2048
    assert expected(state) == 0


def test_state_counts_where_it_will_be_written() -> None:
    model = nn.Linear(100, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    found = []
    for rank in range(2):
        bound = bind(
            {"model": model, "optimizer": optimizer}, layout="dcp", rank=rank, world_size=2
        )
        (piece,) = bound.pieces()
        group = Replicas(2, rank)
        shared = Piece("", piece.key_path, piece.shape, piece.places, piece.local, group)
        found.append(expected_state_bytes(bound, [shared], select_owned([shared])))
    assert found == [2048, 400 + 2 * 2048]  # rank 0 writes the weight, rank 1 its momentum


@pytest.mark.filterwarnings("ignore")  # FSDP1 warns of one rank, and that it is deprecated
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_count_for_what_lies_in_them(*, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(
        nn.Linear(30, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    guess = expected({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert guess == 2 * 4 * (30 * 4 + 4) + 2 * HEADERS


class Unknown(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002  the form of the base class
        raise AssertionError("was stepped")


def test_a_probe_calls_no_hooks_and_draws_no_numbers() -> None:
    calls: list[object] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(1)),
        register_optimizer_step_post_hook(lambda *_: calls.append(2)),
    ]
    model = nn.Linear(2, 2).bfloat16()
    before = torch.get_rng_state()
    try:
        types = state_types(torch.optim.AdamW(model.parameters()))
        unknown = state_types(Unknown(model.parameters(), lr=0.1))
        closure = state_types(torch.optim.LBFGS(model.parameters()))
    finally:
        for hook in hooks:
            hook.remove()
    assert types == unknown == closure == (torch.bfloat16, torch.bfloat16)
    assert not calls
    assert torch.equal(before, torch.get_rng_state())
