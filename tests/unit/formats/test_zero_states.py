"""Optimizer states and universal checkpoints of DeepSpeed that are odd, mixed or damaged.

They are real ones that were changed, through torch, before they are read.
"""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CkptkitError,
    FormatError,
    LimitError,
    MissingFileError,
    UnsafePickleError,
    UnsupportedError,
)

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
ONE, THREE = "universal_small_zero1", "universal_small_zero3"
TAG = "global_step2_universal"
STATES = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _deepspeeds_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.utils"):
        module(name)
    module("deepspeed.runtime.zero")
    module("deepspeed.runtime.zero.config", ZeroStageEnum=int)
    scaler = type("LossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
    module("deepspeed.runtime.fp16.loss_scaler", LossScaler=scaler)
    fragment = type("fragment_address", (), {"__module__": "deepspeed.utils.tensor_fragment"})
    module("deepspeed.utils.tensor_fragment", fragment_address=fragment)


def changed(case: str, folder: Path, changes: Mapping[str, Change | None]) -> Path:
    """Copies a checkpoint; files are changed, or left out where the change is None."""
    source = folder / "source"
    shutil.copytree(FIXTURES / case / "checkpoint", source)
    for pattern, change in changes.items():
        (path,) = source.glob(f"*/{pattern}")
        if change is None:
            path.unlink()
            continue
        document = torch.load(path, weights_only=False)  # noqa: TID251 - our own fixture
        torch.save(change(document), path)
    return source


def states(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the optimizer's states in a file of a rank, in place."""

    def applied(document: dict[str, Any]) -> dict[str, Any]:
        change(document["optimizer_state_dict"])
        return document

    return applied


def optimizer_of(source: Path, out: Path) -> dict[str, Any]:
    ckptkit.convert(source, out, to="torch", names="live", optimizer=True)
    found: dict[str, Any] = torch.load(  # noqa: TID251 - our own output
        out / "optimizer.bin", weights_only=True
    )
    return found


def vectors(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    key = "base_optimizer_state" if "base_optimizer_state" in state else "optimizer_state_dict"
    found: dict[int, dict[str, Any]] = state[key]["state"]
    return found


@pytest.mark.parametrize("case", ["zero1_adam", "zero3_adam"])
@pytest.mark.parametrize("step", [torch.tensor(3.0), 3])
def test_ranks_that_were_stepped_differently_often_are_refused(
    case: str, step: object, tmp_path: Path
) -> None:
    def stepped(state: dict[str, Any]) -> None:
        vectors(state)[1]["step"] = step

    source = changed(case, tmp_path, {f"*{STATES}": states(stepped)})
    with pytest.raises(FormatError, match="another number of times than"):
        ckptkit.consolidate(source, tmp_path / "out", names="live")


def test_what_one_rank_alone_keeps_is_refused(tmp_path: Path) -> None:
    def lost(state: dict[str, Any]) -> None:
        del vectors(state)[0]["exp_avg_sq"]

    source = changed("zero1_adam", tmp_path, {f"*{STATES}": states(lost)})
    with pytest.raises(
        FormatError, match=r"does not keep the states of 'embed\.weight' that other"
    ):
        ckptkit.inspect(source)


def test_states_of_elastic_checkpoints_and_steps_that_are_numbers_are_read(tmp_path: Path) -> None:
    def elastic(state: dict[str, Any]) -> None:
        held = state["base_optimizer_state"]["state"]
        state["base_optimizer_state"] = [held[number] | {"step": 2} for number in sorted(held)]

    both = {f"*rank_{rank}_mp_rank_00_optim_states.pt": states(elastic) for rank in (0, 1)}
    found = optimizer_of(changed("zero1_adam", tmp_path, both), tmp_path / "out")
    truth = load_file(FIXTURES / "zero1_adam" / "truth_optimizer.safetensors")
    assert torch.equal(found["state"]["up.weight"]["exp_avg"], truth["state.up.weight.exp_avg"])
    assert found["state"]["up.weight"]["step"] == 2
    assert "param_groups" not in found  # DeepSpeed does not keep them so


def test_states_of_a_ranks_own_part_are_left_out_and_named(tmp_path: Path) -> None:
    def blockwise(state: dict[str, Any]) -> None:
        for vector in vectors(state).values():
            vector["absmax"] = torch.ones(2)
            vector["state1"] = torch.zeros(vector["exp_avg"].shape, dtype=torch.uint8)

    both = {f"*rank_{rank}_mp_rank_00_optim_states.pt": states(blockwise) for rank in (0, 1)}
    source = changed("zero3_adam", tmp_path, both)
    assert set(optimizer_of(source, tmp_path / "out")["state"]["short"]) == {
        *("step", "exp_avg", "exp_avg_sq")
    }
    notes = " ".join(ckptkit.inspect(source).notes)
    assert "keeps 'absmax' of each rank's own part" in notes
    assert "keeps 'state1'" in notes


def test_a_universal_checkpoint_without_the_file_of_a_rank_or_a_parameter_is_refused(
    tmp_path: Path,
) -> None:
    for case in (ONE, THREE):
        lost = list((FIXTURES / case / "checkpoint" / TAG).rglob("*.pt"))
        for number, path in enumerate(lost):
            below = path.relative_to(FIXTURES / case / "checkpoint" / TAG)
            source = changed(case, tmp_path / f"{case}{number}", {str(below): None})
            with pytest.raises(MissingFileError):
                ckptkit.inspect(source)


def _shorter(document: Any) -> Any:
    if isinstance(document, dict):
        return document | {"param": document["param"].flatten()[:-1].clone()}
    return document[:-1].clone()


WRONG: dict[str, tuple[str, str, Change, type[CkptkitError], str]] = {
    "sizes": (ONE, "zero/weight/fp32.pt", _shorter, FormatError, "sizes do not add up"),
    "flat sizes": (THREE, "zero/weight/exp_avg.pt", _shorter, FormatError, "do not add up"),
    "a step": (
        *(ONE, "zero/optimizer_state.pt", lambda d: d | {"optimizer_state_dict": {}}),
        *(FormatError, "are of different stages"),
    ),
    "no tensor": (ONE, "zero/bias/exp_avg.pt", lambda _: {"param": 1}, FormatError, "no tensor"),
    "no value": (ONE, "zero/bias/step.pt", lambda _: [1], FormatError, "neither a tensor nor"),
    "columns": (
        *(ONE, "zero/weight/fp32.pt", lambda d: d | {"param": d["param"].t().contiguous().t()}),
        *(UnsupportedError, "are not stored contiguously"),
    ),
    "a rank of another step": (
        *(THREE, "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda d: d | {"global_steps": 9}),
        *(FormatError, "several 'global_steps'"),
    ),
    "a larger world": (
        *(THREE, "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda d: d | {"dp_world_size": 3}),
        *(FormatError, "several 'dp_world_size'"),
    ),
    "an unknown weight": (
        *(ONE, "mp_rank_00_model_states.pt", lambda d: d | {"module": {}}),
        *(FormatError, "master copy of 'weight' but not"),
    ),
    "slices": (
        *(ONE, "mp_rank_00_model_states.pt", lambda d: d | {"mp_world_size": 2}),
        *(MissingFileError, "model-parallel weights of rank 1 of 2 are not there"),
    ),
    "a hostile parameter": (
        *(ONE, "zero/bias/fp32.pt", lambda d: d | {"more": shutil.rmtree}),
        *(UnsafePickleError, "rmtree"),
    ),
    "hostile states": (
        *(ONE, "zero/optimizer_state.pt", lambda d: d | {"more": shutil.rmtree}),
        *(UnsafePickleError, "rmtree"),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_files_of_a_universal_checkpoint_that_contradict_each_other_are_refused(
    what: str, tmp_path: Path
) -> None:
    case, file, change, error, message = WRONG[what]
    source = changed(case, tmp_path, {file: change})
    with pytest.raises(error, match=message):
        ckptkit.consolidate(source, tmp_path / "out", names="live")
    assert not (tmp_path / "out").exists()


def test_parameters_of_one_group_with_different_steps_are_refused(tmp_path: Path) -> None:
    name = "zero/up.bias/step.pt"
    source = changed("universal_zero1", tmp_path, {name: lambda _: torch.tensor(7.0)})
    with pytest.raises(FormatError, match="was stepped another number of times"):
        ckptkit.inspect(source)


def test_a_model_rank_that_a_smaller_run_does_not_have_is_named(tmp_path: Path) -> None:
    source = changed(THREE, tmp_path, {})
    one = source / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(one, one.with_name("zero_pp_rank_2_mp_rank_00_model_states.pt"))
    with pytest.raises(FormatError, match="of a rank that a run with 2 ranks does not have"):
        ckptkit.inspect(source)


def test_rows_that_padded_the_vocabulary_stay_with_the_weights(tmp_path: Path) -> None:
    def cut(document: dict[str, Any]) -> dict[str, Any]:
        return document | {"param": document["param"][:4], "vocab_tensor": True}

    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    source = changed(ONE, tmp_path, {f"zero/weight/{kind}.pt": cut for kind in kinds})
    ckptkit.consolidate(source, tmp_path / "out", names="live", dtype="float32")
    written = load_file(tmp_path / "out" / "model.safetensors")
    live = load_file(FIXTURES / ONE / "truth.safetensors")
    masters = load_file(FIXTURES / ONE / "truth_fp32.safetensors")
    assert torch.equal(written["weight"], live["weight"].float())
    assert torch.equal(written["bias"], masters["bias"])
    assert any("padded the vocabulary" in note for note in ckptkit.inspect(source).notes)
    found = optimizer_of(source, tmp_path / "states")["state"]["weight"]["exp_avg"]
    truth = load_file(FIXTURES / ONE / "truth_optimizer.safetensors")
    assert torch.equal(found, truth["state.weight.exp_avg"][:4])


def test_a_universal_checkpoint_beside_its_origin_yields_to_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "zero1_adam" / "checkpoint", run)
    shutil.copytree(FIXTURES / "universal_zero1" / "checkpoint" / TAG, run / TAG)
    (run / "latest_universal").write_text(TAG, encoding="utf-8")
    found = ckptkit.inspect(run)
    assert found.format == "zero"
    assert any("was made of a checkpoint beside it" in note for note in found.notes)
    assert ckptkit.inspect(run, select=TAG).format == "universal"
    assert ckptkit.inspect(run / TAG).step == 2


def test_among_universal_checkpoints_the_file_latest_universal_chooses(tmp_path: Path) -> None:
    for name, case in (("one", ONE), ("three", THREE)):
        shutil.copytree(FIXTURES / case / "checkpoint" / TAG, tmp_path / "run" / name)
    with pytest.raises(AmbiguousSourceError, match="'one', 'three'"):
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", names="live")
    (tmp_path / "run" / "latest_universal").write_text("three", encoding="utf-8")
    assert "stage 3" in ckptkit.inspect(tmp_path / "run").writer


def _groups(groups: list[Any]) -> Change:
    return states(lambda state: state["base_optimizer_state"].update(param_groups=groups))


_SHARED: dict[str, Any] = dict.fromkeys(map(str, range(2000)), 0) | {"params": []}
_KINDS = {f"kind{number}": torch.tensor(1.0) for number in range(65)}
_SHAPES = {f"name{number}": torch.Size([0]) for number in range(2000)}
UNFOLDING: dict[str, tuple[str, Change, type[CkptkitError], str]] = {
    "settings": (
        "*zero_pp_rank_0_*optim*",
        _groups([_SHARED] * 2000),
        LimitError,
        "unfold into more than",
    ),
    "members": (
        *("*zero_pp_rank_0_*optim*", _groups([{"params": [0] * 2000}] * 2)),
        *(FormatError, "vector 0, which is in two groups"),
    ),
    "kinds": (
        "*zero_pp_rank_0_*optim*",
        states(lambda state: vectors(state)[0].update(_KINDS)),
        *(LimitError, "kinds of states of one vector, more than 64"),
    ),
    "shapes": (
        "*model_states.pt",
        lambda document: document | {"param_shapes": [_SHAPES] * 2000},
        *(FormatError, "'name0' in two groups"),
    ),
}


@pytest.mark.parametrize("what", UNFOLDING)
def test_what_is_shared_to_unfold_without_end_is_refused_at_once(what: str, tmp_path: Path) -> None:
    file, change, error, message = UNFOLDING[what]
    source = changed("zero1_adam", tmp_path, {file: change})
    with pytest.raises(error, match=message):
        ckptkit.inspect(source)
