"""Runs that go on in another framework: from FSDP2 and torch to DeepSpeed, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.command_line import run_command
from tests.distributed.universal_run import FIRST, NEXT, Net, make_groups, train

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]
SCRIPT = Path(__file__).with_name("universal_run.py")


def saved_by_torch(folder: Path, *, is_one: bool = False) -> list[float]:
    """Returns the losses after the step that is saved."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(make_groups(model, is_one=is_one), lr=0.01)
    train(model, optimizer, 0, FIRST)
    weights, states = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": states},
        checkpoint_id=folder / f"step-{FIRST}",
        no_dist=True,
    )
    return train(model, optimizer, FIRST, NEXT)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 2)])
def test_deepspeed_goes_on_from_a_run_of_torch(
    run_ranks: Callable[..., object], tmp_path: Path, stage: int, ranks: int
) -> None:
    # ZeRO 3 gives all groups the settings of the first one, and one count of steps.
    losses = saved_by_torch(tmp_path, is_one=stage == 3)
    ckptkit.convert(tmp_path / f"step-{FIRST}", tmp_path / "universal", to="universal")
    assert ckptkit.verify(tmp_path / "universal").ok
    run_ranks(SCRIPT, ranks, tmp_path, stage)
    theirs = json.loads((tmp_path / f"losses_{stage}_{ranks}.json").read_text())
    assert theirs == pytest.approx(losses, abs=2e-6)
    assert len(theirs) == NEXT


def test_torch_goes_on_from_a_run_of_deepspeed(
    run_ranks: Callable[..., object], tmp_path: Path
) -> None:
    run_ranks(SCRIPT, 2, tmp_path, 0)
    ckptkit.convert(tmp_path / "zero", tmp_path / "dcp", to="dcp", optimizer=True)
    model = Net()
    optimizer = torch.optim.AdamW(make_groups(model), lr=1.0)
    weights, states = get_state_dict(model, optimizer)
    for key, state in (("model", weights), ("optimizer", states)):
        folder = "pytorch_model_fsdp_0" if key == "model" else "optimizer_0"
        dcp.load({key: state}, checkpoint_id=tmp_path / "dcp" / folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    theirs = json.loads((tmp_path / "losses_0_2.json").read_text())
    assert train(model, optimizer, FIRST, NEXT) == pytest.approx(theirs, abs=2e-6)


def test_parameters_that_are_left_out_have_no_files(tmp_path: Path) -> None:
    saved_by_torch(tmp_path)
    source, out = tmp_path / f"step-{FIRST}", tmp_path / "out"
    ckptkit.convert(source, out, to="universal", exclude=("up.*",), include=("embed.*", "up.*"))
    assert {path.parent.name for path in out.rglob("fp32.pt")} == {"embed.weight"}


def test_a_note_says_which_stage_does_not_load_plain_numbers_of_steps(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(3)}
    for step, is_noted in ((7, True), (torch.tensor(7.0), False)):
        state = {"weight": {"step": step, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}
        optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}
        torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "step.pt")
        out = tmp_path / f"out_{is_noted}"
        done = run_command("convert", tmp_path / "step.pt", out, "--to", "universal")
        assert done.returncode == 0
        assert ("counts no steps in tensors" in done.stderr) == is_noted


class TestRefused:
    def test_copies_of_another_type(self, tmp_path: Path) -> None:
        saved_by_torch(tmp_path)
        with pytest.raises(CkptkitError, match="float32 copies"):
            ckptkit.convert(
                tmp_path / f"step-{FIRST}", tmp_path / "out", to="universal", dtype="bfloat16"
            )
        assert not (tmp_path / "out").exists()

    def test_a_parameter_without_the_states_of_its_group(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = Net()
        model.unused = torch.nn.Parameter(torch.ones(11))  # without a gradient
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        train(model, optimizer, 0, FIRST)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, tmp_path / "step.pt")
        with pytest.raises(CkptkitError, match="'unused' has no states that others of its group"):
            ckptkit.convert(tmp_path / "step.pt", tmp_path / "out", to="universal")
        assert not (tmp_path / "out").exists()

    def test_states_of_no_parameter(self, tmp_path: Path) -> None:
        source = Path(__file__).parents[2] / "fixtures" / "orbax_manager" / "checkpoint"
        with pytest.raises(CkptkitError, match="is of no parameter"):
            ckptkit.convert(source, tmp_path / "out", to="universal", names="live")
        assert not (tmp_path / "out").exists()

    def test_a_checkpoint_without_an_optimizer(self, tmp_path: Path) -> None:
        torch.save(Net().state_dict(), tmp_path / "model.pt")
        with pytest.raises(CkptkitError, match="no states of an optimizer"):
            ckptkit.convert(tmp_path / "model.pt", tmp_path / "out", to="universal")
        assert not (tmp_path / "out").exists()
