"""Low-bit optimizers under sharding, and state that one rank lacks or cannot save."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.core.errors import ResumeError
from ckptkit.training import Checkpointer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("odd_optimizers_run.py")
CASES = 12


@pytest.fixture(scope="module")
def saved(run_ranks: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved, each case under its name in a run, and resumed from."""
    folder = tmp_path_factory.mktemp("odd")
    done = run_ranks(SCRIPT, 2, folder)
    output = f"{done.stdout}{done.stderr}"  # type: ignore[attr-defined]
    assert output.count("SAME") == 2 * CASES
    assert output.count("KEPT") == 2 * 2
    assert output.count("rank 1 passed it, and rank 0, which writes it, did not") >= 2
    assert output.count("MISSED") == output.count("WRAPPED") == 2
    refusals = [line for line in output.splitlines() if line.startswith("REFUSED")]
    assert len(refusals) == 4
    assert all("rank 1: " in line and "sparse" in line for line in refusals)
    return folder


class Net(nn.Module):
    """The one of the script, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 160)
        self.long = nn.Parameter(torch.zeros(145, 64))
        self.short = nn.Linear(64, 4)


class Two(torch.optim.Optimizer):
    """Stands in for the optimizers of bitsandbytes, which take seconds to import."""

    def __init__(self, parameters: Any, lr: float) -> None:
        names = ("betas", "eps", "weight_decay", "alpha", "t_alpha", "t_beta3")
        super().__init__(parameters, {"lr": lr, **dict.fromkeys(names)})


@pytest.mark.parametrize("case", ["ao8_fsdp2", "bnb8_fsdp1", "bnb8_fsdp1_flat"])
def test_state_that_belongs_to_ranks_is_refused_elsewhere_or_reset(
    saved: Path, tmp_path: Path, case: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, about deprecated parts of torch
        low_bit: Any = importlib.import_module("torchao.optim")
    model = Net()
    make = Two if case.startswith("bnb") else low_bit.AdamW8bit
    optimizer = make(model.parameters(), lr=5.0)
    state = {"model": model, "optimizer": optimizer}
    checkpointer, step = Checkpointer(tmp_path), saved / "run" / case
    with checkpointer, pytest.raises(ResumeError, match="2 ranks saved it, and 1") as caught:
        checkpointer.resume(state, folder=step)
    assert "unfit_optimizer='reset'" in str(caught.value.hint)
    assert not model.long.any()
    with Checkpointer(tmp_path, unfit_optimizer="reset") as checkpointer:
        assert checkpointer.resume(state, folder=step) == 2
    assert model.long.all()
    assert not optimizer.state
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)


def test_state_of_paged_32_bit_optimizers_goes_on_anywhere(saved: Path, tmp_path: Path) -> None:
    model = Net()
    optimizer = Two(model.parameters(), lr=5.0)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume(state, folder=saved / "run" / "bnb32_paged_fsdp1") == 2
    found = optimizer.state[model.long]
    assert found["step"] == 2
    assert found["state1"].shape == found["state2"].shape == model.long.shape
    assert found["state2"].any()


def test_a_number_is_no_part_of_a_tensor_where_a_rank_holds_one_element(
    saved: Path, tmp_path: Path
) -> None:
    heads = nn.ModuleList(nn.Linear(64, outputs) for outputs in (1, 2, 3))
    model = nn.Module()
    model.heads = heads
    optimizer = torch.optim.Optimizer(model.parameters(), {"lr": 5.0})
    with Checkpointer(tmp_path) as checkpointer:
        state = {"model": model, "optimizer": optimizer}
        assert checkpointer.resume(state, folder=saved / "run" / "counting_fsdp2") == 2
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["count"], torch.tensor([2.0]))
        assert optimizer.state[parameter]["m"].shape == parameter.shape
