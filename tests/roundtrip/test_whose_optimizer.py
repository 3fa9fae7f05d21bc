"""Which optimizer belongs to a model of a file, and what is refused where nothing says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.errors import CkptkitError, UsageError


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def saved(state: Mapping[str, Any], folder: Path) -> Path:
    torch.save(dict(state), folder / "run.pt")
    return folder / "run.pt"


def converted(source: Path, out: Path, select: str | None) -> dict[str, Any]:
    ckptkit.convert(source, out, to="torch", optimizer=True, select=select)
    found: dict[str, Any] = torch.load(out / "optimizer.bin")  # noqa: TID251
    states: dict[str, Any] = found["state"]
    return states


def test_the_optimizer_beside_a_model_is_its_own(tmp_path: Path) -> None:
    runs = {name: trained(seed) for seed, name in enumerate(("student", "teacher"))}
    state = {
        name: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for name, (model, optimizer) in runs.items()
    }
    source = saved(state, tmp_path)
    for name, (model, optimizer) in runs.items():
        states = converted(source, tmp_path / name, f"{name}.model")
        for parameter, tensor in model.named_parameters():
            assert torch.equal(states[parameter]["exp_avg"], optimizer.state[tensor]["exp_avg"])


@pytest.mark.parametrize(
    ("first", "second", "of_second"),
    [
        ("generator", "discriminator", "optimizer_d"),
        ("student", "teacher", "teacher_optimizer"),
    ],
)
def test_the_optimizer_of_another_model_is_not_taken(
    first: str, second: str, of_second: str, tmp_path: Path
) -> None:
    (one, _), (two, optimizer) = trained(0), trained(1)
    state = {first: one.state_dict(), second: two.state_dict()}
    source = saved({**state, of_second: optimizer.state_dict()}, tmp_path)
    with pytest.raises(CkptkitError, match=f"nothing says that optimizer '{of_second}' is of"):
        converted(source, tmp_path / "out", first)
    assert not (tmp_path / "out").exists()


def test_one_of_several_optimizers_of_a_model_is_not_taken_for_all(tmp_path: Path) -> None:
    model, _ = trained(0)
    halves = [
        torch.optim.AdamW([(name, p) for name, p in model.named_parameters() if name[0] == half])
        for half in "01"
    ]
    for half in halves:
        half.step()  # the gradients are still there
    state = {f"optimizer_{n}": half.state_dict() for n, half in enumerate(halves)}
    source = saved({"model": model.state_dict(), **state}, tmp_path)
    with pytest.raises(CkptkitError, match="holds several optimizers"):
        converted(source, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_an_average_beside_the_model_changes_nothing(tmp_path: Path) -> None:
    (model, optimizer), (average, _) = trained(0), trained(1)
    state = {"model": model.state_dict(), "ema": average.state_dict()}
    source = saved({**state, "optimizer": optimizer.state_dict()}, tmp_path)
    assert converted(source, tmp_path / "out", "model").keys() == model.state_dict().keys()


def test_rows_are_not_cut_from_weights_alone(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    source = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    with pytest.raises(UsageError, match="cannot be combined with --optimizer"):
        ckptkit.consolidate(source, tmp_path / "out", optimizer=True, vocab_size=3)
