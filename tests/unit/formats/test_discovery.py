"""Of many candidates the one that is meant.

A run is its steps: a final model beside them is named, and taken where it is selected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit import inspect
from ckptkit.conversion.source.search import ResolvedSource
from ckptkit.core.errors import (
    AmbiguousSourceError,
    CannotPlanError,
    NotACheckpointError,
    UnsupportedError,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import parse_step
from ckptkit.formats.registry import recognise
from tests.searching import Chooser, dcp


def among(candidates: list[Candidate]) -> ResolvedSource:
    return Chooser().resolve(candidates, None)


def found(*folders: str, select: str | None = None, broken: tuple[str, ...] = ()) -> ResolvedSource:
    return Chooser(broken).resolve([dcp(folder) for folder in folders], select)


def labels(found: ResolvedSource) -> list[str]:
    return [unit.label for unit in found.units]


@pytest.mark.parametrize(
    ("folder", "step"),
    [
        ("checkpoint-500", 500),
        ("runs/a/checkpoint-500", 500),
        ("checkpoint-500/pytorch_model_fsdp_0", 500),
        ("step_00012", 12),
        ("global_step7", 7),
        ("iter_0000100", 100),
        ("epoch=3", 3),
        ("42", 42),
        ("ckpt-1", 1),
        ("pytorch_model_fsdp_0", None),
        ("model", None),
        ("checkpoint-best", None),
        ("checkpoint-" + "9" * 30, None),
        ("", None),
    ],
)
def test_a_folders_name_tells_its_step(folder: str, step: int | None) -> None:
    assert parse_step(folder) == step


def test_what_lies_in_one_step_belongs_together() -> None:
    chosen = found("checkpoint-5/pytorch_model_fsdp_0", "checkpoint-5/optimizer_0")
    assert chosen.folder == "checkpoint-5"
    assert labels(chosen) == ["pytorch_model_fsdp_0", "optimizer_0"]
    assert [unit.is_optimizer for unit in chosen.units] == [False, True]


def test_an_incomplete_newest_step_is_passed_over_with_a_note() -> None:
    chosen = found("checkpoint-1", "checkpoint-2", "checkpoint-3", broken=("checkpoint-3",))
    assert chosen.folder == "checkpoint-2"
    assert chosen.notes == (
        "checkpoint-3 was passed over: a file",
        "checkpoint-2 is used; 1 older step left alone",
    )


def test_the_only_step_is_taken_though_incomplete_so_that_its_reader_can_say_why() -> None:
    assert found("checkpoint-1", broken=("checkpoint-1",)).folder == "checkpoint-1"


def test_a_run_of_incomplete_steps_is_refused() -> None:
    with pytest.raises(NotACheckpointError, match="none of 2 steps is complete"):
        found("checkpoint-1", "checkpoint-2", broken=("checkpoint-1", "checkpoint-2"))


def test_an_older_step_can_be_selected() -> None:
    assert found("checkpoint-1", "checkpoint-2", select="checkpoint-1").folder == "checkpoint-1"


def test_a_selected_step_is_taken_even_where_it_is_incomplete() -> None:
    chosen = found("checkpoint-1", "checkpoint-2", select="checkpoint-2", broken=("checkpoint-2",))
    assert chosen.folder == "checkpoint-2"


def test_two_runs_are_ambiguous_until_one_is_selected() -> None:
    folders = ("a/checkpoint-1", "a/checkpoint-2", "b/checkpoint-3")
    with pytest.raises(AmbiguousSourceError, match="'a', 'b'") as caught:
        found(*folders)
    assert caught.value.hint == "choose one with --select a, or --select b, or give its path"
    assert found(*folders, select="a").folder == "a/checkpoint-2"


def test_a_model_beside_a_run_is_ambiguous_until_one_is_selected() -> None:
    folders = ("final", "run/checkpoint-1")
    with pytest.raises(AmbiguousSourceError, match="'final', 'run'"):
        found(*folders)
    assert labels(found(*folders, select="final")) == ["final"]
    assert found(*folders, select="run").folder == "run/checkpoint-1"


def test_a_selection_that_names_nothing_is_refused_with_the_names() -> None:
    with pytest.raises(CannotPlanError, match="holds no 'c'; found 'a', 'b'"):
        found("a/checkpoint-1", "b/checkpoint-3", select="c")


def test_a_file_of_any_name_beside_deepspeeds_steps_is_not_taken_for_the_model() -> None:
    paths = ["weights.pt", "global_step2/mp_rank_00_model_states.pt"]
    with pytest.raises(AmbiguousSourceError, match=r"'weights.pt', 'global_step2'"):
        among(recognise(paths))


def test_the_bin_form_of_a_model_is_left_out_beside_its_safetensors_form() -> None:
    chosen = among(recognise(["model.safetensors", "pytorch_model.bin"]))
    assert [unit.candidate.format for unit in chosen.units] == ["safetensors"]


def test_loose_torch_files_beside_shards_are_left_out() -> None:
    paths = ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "extra.pt"]
    chosen = among(recognise(paths))
    assert labels(chosen) == ["pytorch_model_fsdp_0"]


FOLDERS = st.sampled_from(
    ["", "a", "b", "a/checkpoint-1", "a/checkpoint-2", "checkpoint-1", "checkpoint-10/model", "7"]
)


@settings(max_examples=150)
@given(
    st.lists(FOLDERS, unique=True, min_size=1, max_size=5), st.none() | FOLDERS, st.sets(FOLDERS)
)
def test_whatever_lies_there_one_step_is_found_or_the_refusal_says_how_to_choose(
    folders: list[str], select: str | None, broken: set[str]
) -> None:
    try:
        chosen = found(*folders, select=select, broken=tuple(broken))
    except (AmbiguousSourceError, CannotPlanError, NotACheckpointError) as refused:
        told = refused.where, bool(refused.hint)
    else:
        told = _told(chosen, folders)
    assert told == ("here", True)


def _told(chosen: ResolvedSource, folders: list[str]) -> tuple[str, bool]:
    """Checks what was found, and answers as a good refusal would."""
    taken = {unit.candidate.folder for unit in chosen.units}
    assert set() < taken <= set(folders)
    assert all(folder.startswith(chosen.folder) for folder in taken)
    assert len({unit.label for unit in chosen.units}) == len(chosen.units)
    return "here", True


def test_a_run_in_the_root_itself_beside_another_checkpoint_is_selected_by_its_steps() -> None:
    folders = ("checkpoint-1", "checkpoint-2", "best")
    with pytest.raises(AmbiguousSourceError, match="'best', 'checkpoint-2'") as caught:
        found(*folders)
    assert caught.value.hint.startswith("choose one with --select best, or --select checkpoint-2")
    assert found(*folders, select="checkpoint-2").folder == "checkpoint-2"


def test_steps_within_epochs_are_followed_down() -> None:
    chosen = found("epoch_1/step_300", "epoch_2/step_100", "epoch_2/step_200")
    assert chosen.folder == "epoch_2/step_200"


def test_a_step_and_a_part_of_it_are_selected_together() -> None:
    folders = ("global_step_1/actor", "global_step_1/critic", "global_step_2/actor")
    chosen = found(*folders, select="global_step_1/critic")
    assert (chosen.folder, labels(chosen)) == ("global_step_1", ["critic"])


@pytest.mark.parametrize("name", ["data.pt", "train_meta.pt"])
def test_files_that_nobody_asked_for_do_not_make_a_step_incomplete(name: str) -> None:
    stray = Candidate("torch", "checkpoint-2", (f"checkpoint-2/{name}",), name)
    candidates = [dcp("checkpoint-1/pytorch_model_fsdp_0"), dcp("checkpoint-2/x"), stray]
    chosen = Chooser(stray.files, "its class").resolve(candidates, None)
    assert chosen.folder == "checkpoint-2"
    assert f"left alone beside the model: checkpoint-2/{name}" in chosen.notes


def test_a_full_model_beside_shards_that_are_not_read_is_taken() -> None:
    shard = "checkpoint-5/global_step5/mp_rank_00_model_states.pt"
    paths = ["checkpoint-5/model.safetensors", shard]
    chosen = among(recognise(paths))
    assert labels(chosen) == ["model.safetensors"]


def test_a_newer_step_that_is_a_link_is_not_passed_over_silently() -> None:
    with pytest.raises(AmbiguousSourceError, match="'checkpoint-9' is newer") as caught:
        Chooser().resolve([dcp("checkpoint-5")], None, ["checkpoint-4", "checkpoint-9"])
    assert caught.value.hint == "give its own path: here/checkpoint-9"


@pytest.mark.parametrize(
    "name",
    ["optim_world_size_2_rank_0.pt", "extra_state_world_size_2_rank_1.pt", "optimizer_rank0.bin"],
)
def test_what_ranks_wrote_beside_their_weights_is_refused_by_name_where_the_weights_are_gone(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedError, match="of ranks, without their weights") as told:
        inspect(tmp_path)
    assert told.value.where.rstrip("/") == str(tmp_path)
    assert "model_world_size_2_rank_0.pt" in str(told.value.hint)


def _choose(
    paths: list[str], select: str | None = None, location: str = "run", broken: str = "-"
) -> ResolvedSource:
    candidates = recognise(paths)
    lacking = (path for one in candidates for path in one.files if path.startswith(broken))
    return Chooser(tuple(lacking), location=location).resolve(candidates, select)


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
    for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
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
