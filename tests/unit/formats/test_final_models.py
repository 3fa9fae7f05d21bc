"""A run is its steps: a final model beside them is named, and taken where it is selected."""

from __future__ import annotations

import pytest

from ckptkit.core.errors import AmbiguousSourceError, CannotPlanError, NotACheckpointError
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import CandidateChooser, ResolvedSource
from ckptkit.formats.registry import recognise


class _Chooser(CandidateChooser):
    def __init__(self, location: str, broken: str) -> None:
        super().__init__(location)
        self._broken = broken

    def describe_missing(self, candidate: Candidate) -> str:
        return "a file" if any(path.startswith(self._broken) for path in candidate.files) else ""

    def read_step(self, candidate: Candidate) -> int | None:
        return 9 if "last" in candidate.files[0] else None


def _choose(
    paths: list[str], select: str | None = None, location: str = "run", broken: str = "-"
) -> ResolvedSource:
    return _Chooser(location, broken).resolve(recognise(paths), select)


_TRAINER = ["checkpoint-2/model.safetensors", "checkpoint-10/model.safetensors"]
_FSDP = ["checkpoint-2/pytorch_model_fsdp_0/.metadata", "checkpoint-10/optimizer_0/.metadata"]
_FSDP += ["checkpoint-10/pytorch_model_fsdp_0/.metadata"]
_VERL = [
    f"global_step_{step}/actor/model_world_size_2_rank_{rank}.pt"
    for step in (2, 10)
    for rank in range(2)
]
_LIGHTNING = ["epoch=0-step=2.ckpt", "epoch=1-step=10.ckpt"]
_SHARDED = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
_SHARDED += ["model.safetensors.index.json"]
_DEEPSPEED = [
    f"global_step{step}/{name}"
    for step in (2, 10)
    for name in (
        "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
]
_OF_PEFT = ("pytorch_model_fsdp_0", "base_model_0")
_PEFT = [path.replace("model.", "adapter_model.") for path in _TRAINER]


@pytest.mark.parametrize(
    ("steps", "final", "select"),
    [
        (_TRAINER, ["model.safetensors"], "."),
        (_TRAINER, _SHARDED, "."),
        (_TRAINER, ["pytorch_model.bin"], "."),
        (_PEFT, ["adapter_model.safetensors"], "."),
        (_FSDP, ["model.safetensors"], "."),
        (_FSDP, ["adapter_model.safetensors"], "."),
        (_FSDP, ["pytorch_model_fsdp_0/.metadata"], "."),
        (_FSDP, ["final_model/.metadata"], "final_model"),
        (_TRAINER, ["final/model.safetensors"], "final"),
        (_TRAINER, ["merged/model.safetensors"], "merged"),
        (_TRAINER, ["export/hf/model.safetensors"], "export/hf"),
        (_TRAINER, ["unet/diffusion_pytorch_model.safetensors"], "unet"),
        (_VERL, ["merged_hf_model/model.safetensors"], "merged_hf_model"),
        (_VERL, ["model.safetensors"], "."),
        (_LIGHTNING, ["model.safetensors"], "."),
        (_LIGHTNING, ["final/model.safetensors"], "final"),
        (["checkpoint_2.pt", "checkpoint_10.pt"], ["model.safetensors"], "."),
        (_DEEPSPEED, ["model.safetensors"], "."),
        (_DEEPSPEED, ["final/model.safetensors"], "final"),
        ([f"checkpoints/{path}" for path in _FSDP], ["model.safetensors"], "."),
        ([f"checkpoints/{path}" for path in _FSDP], ["final/model.safetensors"], "final"),
        (
            [f"lightning_logs/version_0/checkpoints/{path}" for path in _LIGHTNING],
            ["hf/model.safetensors"],
            "hf",
        ),
        (
            [f"checkpoints/{path}" for path in _TRAINER],
            ["checkpoints/model.safetensors"],
            "checkpoints/.",
        ),
    ],
)
def test_the_newest_step_is_taken_and_the_final_model_where_it_is_selected(
    steps: list[str], final: list[str], select: str
) -> None:
    chosen = _choose([*steps, *final])
    taken = {path for unit in chosen.units for path in unit.candidate.files}
    assert taken <= {path for path in steps if "10" in path}
    assert taken
    assert chosen.finals == {select: ""}
    assert any(f"--select {select} takes it" in note for note in chosen.notes)
    alone = _choose([*steps, *final], select=select)
    assert {path for unit in alone.units for path in unit.candidate.files} <= set(final)
    assert alone.finals == {select: ""}


def test_a_lightning_run_goes_on_to_its_last_step_beside_a_final_model() -> None:
    chosen = _choose([*_LIGHTNING[:1], "last.ckpt", "model.safetensors"])
    assert [unit.candidate.files for unit in chosen.units] == [("last.ckpt",)]


def test_several_final_models_are_all_named() -> None:
    chosen = _choose([*_TRAINER, "model.safetensors", "final/model.safetensors"])
    assert chosen.folder == "checkpoint-10"
    assert set(chosen.finals) == {".", "final"}
    assert any("'final'" in note for note in chosen.notes)


def test_steps_and_their_parts_are_selected_beside_a_final_model_as_without_one() -> None:
    paths = [*_TRAINER, "final/model.safetensors"]
    assert _choose(paths, select="checkpoint-2").folder == "checkpoint-2"
    of_peft = [f"checkpoint-{n}/{part}/.metadata" for n in (2, 10) for part in _OF_PEFT]
    chosen = _choose([*of_peft, "adapter_model.safetensors"], select="base_model_0")
    assert chosen.folder == "checkpoint-10"
    assert [unit.label for unit in chosen.units] == ["base_model_0"]


@pytest.mark.parametrize("final", [[], ["model.safetensors"]])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(final: list[str]) -> None:
    with pytest.raises(CannotPlanError, match="found 'checkpoint-10', 'checkpoint-2'") as caught:
        _choose([*_TRAINER, *final], "checkpoint-9")
    assert caught.value.hint == "choose one with --select checkpoint-10"


def test_a_final_model_that_is_not_whole_is_named_and_not_proposed() -> None:
    chosen = _choose([*_TRAINER, "final/model.safetensors"], broken="final")
    assert chosen.folder == "checkpoint-10"
    assert "'final' beside the steps is not whole: a file" in chosen.notes
    assert not any("--select" in note for note in chosen.notes)


@pytest.mark.parametrize("steps", [_TRAINER, _TRAINER[:1]])
def test_where_no_step_is_whole_the_final_model_is_proposed_and_not_taken(steps: list[str]) -> None:
    with pytest.raises(NotACheckpointError, match="is complete") as caught:
        _choose([*steps, "model.safetensors"], broken="checkpoint-")
    assert "with --select .;" in caught.value.hint


@pytest.mark.parametrize(
    ("location", "paths"),
    [
        ("run", ["model.safetensors"]),
        ("run", ["model.safetensors", "global_step5/mp_rank_00_model_states.pt"]),
        ("run", ["model.safetensors", "optimizer_step_5.pt"]),
        ("run", ["model.safetensors", "original/consolidated.00.pth"]),
        ("run/checkpoint-5", ["model.safetensors", "step_5.pt"]),
    ],
)
def test_a_folder_that_holds_only_a_model_stays_a_model(location: str, paths: list[str]) -> None:
    chosen = _choose(paths, location=location)
    assert [unit.candidate.files for unit in chosen.units] == [("model.safetensors",)]
    assert not chosen.finals


@pytest.mark.parametrize(
    "others",
    [
        ["best/.metadata"],  # the state of a training, which may be newer than the steps
        ["last.ckpt", "best/.metadata"],
        ["a/checkpoint-3/model.safetensors", "model.safetensors"],  # a second run
    ],
)
def test_what_may_be_newer_than_the_steps_is_for_the_user_to_choose(others: list[str]) -> None:
    with pytest.raises(AmbiguousSourceError):
        _choose([*_TRAINER, *others])


@pytest.mark.parametrize(
    ("paths", "select"),
    [
        (_TRAINER, "."),
        (_LIGHTNING, "."),
        (_DEEPSPEED, "."),
        (_FSDP, "."),
        ([*_TRAINER, "final/model.safetensors"], "."),
        ([*_TRAINER, "last/.metadata"], "."),
        ([*_TRAINER, "best/.metadata"], "."),
        ([*_FSDP, "final/model.safetensors"], "."),
        ([f"a/{path}" for path in _TRAINER], "."),
        ([f"a/{path}" for path in _TRAINER], "a/."),
        (["actor/.metadata", "critic/.metadata"], "."),
        (["weights/.metadata"], "."),
        (["final/model.safetensors"], "."),
        ([*_TRAINER, "model.safetensors"], "nowhere/."),
    ],
)
def test_a_dot_is_refused_where_the_folder_itself_holds_no_model(
    paths: list[str], select: str
) -> None:
    with pytest.raises(CannotPlanError, match=r"holds no model in .* itself; found '") as caught:
        _choose(paths, select)
    proposed = caught.value.hint.removeprefix("choose one with --select ")
    assert _choose(paths, proposed).units


_BESIDE = ["best/.metadata"]  # leaves the choice among steps, it and the final model


@pytest.mark.parametrize(
    ("others", "own", "select"),
    [
        ([*_TRAINER, *_BESIDE], ["model.safetensors"], "."),
        ([*_TRAINER, *_BESIDE], _SHARDED, "."),
        ([*_TRAINER, "last.ckpt"], ["model.safetensors"], "."),
        (["a/checkpoint-3/model.safetensors", *_TRAINER], ["model.safetensors"], "."),
        (["sub/model.safetensors"], ["model.safetensors"], "."),
        (_FSDP, ["checkpoint-2/pytorch_model_fsdp_0/.metadata"], "checkpoint-2/."),
        (_TRAINER, ["checkpoint-2/model.safetensors"], "checkpoint-2/."),
        ([*_TRAINER, *_BESIDE], ["final/model.safetensors"], "final/."),
        ([], ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"], "."),
        ([], [".metadata"], "."),
        ([], ["weights.pt"], "."),
    ],
)
def test_a_dot_is_the_model_in_the_folder_itself(
    others: list[str], own: list[str], select: str
) -> None:
    chosen = _choose(list(dict.fromkeys([*others, *own])), select)
    taken = {path for unit in chosen.units for path in unit.candidate.files}
    assert taken == set(own)
