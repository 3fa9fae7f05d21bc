"""Files beside a checkpoint, shown in few words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ckptkit
from ckptkit.core.errors import MissingFileError
from ckptkit.formats.registry import FileGroup, group_files

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
SAVED = "peft_checkpointer/checkpoint/checkpoint-2"


def shown(*paths: str, base: str = "", known: tuple[str, ...] = ()) -> list[str]:
    return [str(group) for group in group_files(paths, base=base, recognised=known)]


def test_names_that_differ_in_numbers_are_one_group() -> None:
    assert shown("rng_0.pth", "rng_1.pth", "rng_10.pth", "a.pt") == ["a.pt", "rng_*.pth (3)"]


def test_a_number_that_does_not_differ_is_kept() -> None:
    assert shown("part_7.bin") == ["part_7.bin"]


def test_a_folder_without_anything_known_is_shown_as_one() -> None:
    paths = ("logs/a", "logs/deep/b", "model/stray")
    assert shown(*paths, known=("model/.metadata",)) == ["logs/ (2)", "model/stray"]


def test_names_are_relative_to_the_folder() -> None:
    assert shown("run/step/x", "run/step/logs/y", base="run/step") == ["logs/", "x"]


def test_too_many_groups_are_counted() -> None:
    names = [chr(ord("a") + i) * 3 for i in range(26)]
    assert shown(*names)[-2:] == ["xxx", "2 more"]
    assert group_files(names)[-1] == FileGroup("", 2)


def test_inspect_tells_what_it_ignored_in_the_folder_of_the_step_alone() -> None:
    run = FIXTURES / "trainer_fsdp2" / "checkpoint"
    found = ckptkit.inspect(run)
    names = ["rng_state_*.pth", "scheduler.pt", "trainer_state.json"]
    assert [group.name for group in found.ignored] == names
    document = json.loads(json.dumps(found.to_json()))
    assert document["ignored"][0] == {"name": "rng_state_*.pth", "files": 2}


def test_a_stale_file_among_the_shards_is_ignored_by_name(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(FIXTURES / "fsdp2_plain" / "checkpoint", tmp_path / "run")
    shutil.copy(checkpoint / "__1_0.distcp", checkpoint / "__7_0.distcp")
    assert [group.name for group in ckptkit.inspect(checkpoint).ignored] == ["__7_0.distcp"]


def test_side_files_that_consolidation_takes_along_are_not_ignored() -> None:
    found = ckptkit.inspect(FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint")
    assert [group.name for group in found.ignored] == ["random_states_*.pkl"]


def test_files_that_choose_a_tag_are_not_ignored() -> None:
    assert ckptkit.inspect(FIXTURES / "universal_zero1/checkpoint").ignored == ()


def test_a_step_of_ours_tells_its_version_and_its_mesh() -> None:
    found = ckptkit.inspect(FIXTURES / SAVED)
    assert (found.writer, found.version) == ("ckptkit", "0.1.0")
    assert [(axis.name, axis.size) for axis in found.mesh] == [("", 2)]
    assert json.loads(json.dumps(found.to_json()))["mesh"] == [{"name": "", "size": 2}]


@pytest.mark.parametrize(
    "mesh", [None, 3, {}, {"names": ["dp"], "shape": ["2"]}, {"names": "dp", "shape": [-2]}]
)
def test_a_mesh_that_is_none_is_left_out(mesh: object, tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / SAVED, tmp_path / "checkpoint-2")
    facts = json.loads((step / "ckptkit" / "run.json").read_text())
    facts["models"]["model"]["mesh"] = mesh
    (step / "ckptkit" / "run.json").write_text(json.dumps(facts))
    assert ckptkit.inspect(step).mesh == ()


@pytest.mark.parametrize("layout", ["hf", "dcp", "torch"])
def test_an_output_of_ours_says_who_wrote_it(layout: str, tmp_path: Path) -> None:
    run = FIXTURES / "trainer_fsdp2" / "checkpoint"
    ckptkit.convert(run, tmp_path / "out", to=layout)  # type: ignore[arg-type]
    found = ckptkit.inspect(tmp_path / "out")
    assert (found.writer, found.version, found.step) == ("ckptkit", ckptkit.__version__, 4)
    assert found.ignored == ()


@pytest.mark.parametrize(
    "path",
    ["model.safetensors", "pytorch_model.bin", "checkpoint/.metadata", "model-1.safetensors"],
)
def test_a_pointer_of_git_lfs_is_named_as_one(path: str, tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
    clone = tmp_path / "clone"
    (clone / path).parent.mkdir(parents=True)
    (clone / path).write_text(pointer)
    with pytest.raises(MissingFileError, match="is a pointer of Git LFS") as caught:
        ckptkit.consolidate(clone, tmp_path / "out")
    assert caught.value.where == str(clone / path)
