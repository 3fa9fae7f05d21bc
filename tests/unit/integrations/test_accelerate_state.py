"""What follows from an Accelerator without sharding: where it saves, and who saves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

from ckptkit.core.errors import ResumeError, UsageError
from ckptkit.core.manifest import SEALED, FileRecord, Manifest
from ckptkit.integrations.accelerate import install, load_state, save_model, save_state
from ckptkit.integrations.accelerate.accelerator_state import (
    SaveTarget,
    examine_folder,
    find_newest_folder,
    obstacle,
    source_of,
    stock_reason,
    target_of,
    with_limit,
)


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Accelerator]:
    yield Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=str(tmp_path)))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accelerate_itself_saves_and_loads_what_only_it_can(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator.project_configuration.save_on_each_node = True
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    truth = model.weight.detach().clone()
    for _ in range(2):
        assert save_state(accelerator, tmp_path / "out").result() == tmp_path / "out"
    assert (tmp_path / "out/model.safetensors").is_file()
    torch.nn.init.zeros_(model.weight)
    load_state(accelerator, tmp_path / "out")
    assert torch.equal(model.weight, truth)
    told = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert told == [
        "accelerate itself saves: save_on_each_node is set, so that the nodes share no file system",
        "accelerate itself loads: save_on_each_node is set, so that the nodes share no file system",
    ]


def test_folders_are_named_as_accelerate_names_them(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator.project_configuration.iteration = 4
    named = {
        "out/checkpoint-500": (500, "checkpoint-", None),
        "out/checkpoint_7": (7, "checkpoint_", None),
        "out/step_20": (20, "checkpoint-", "step_20"),
        "out/latest": (4, "checkpoint-", "latest"),
    }
    for path, (step, prefix, name) in named.items():
        assert target_of(accelerator, path) == SaveTarget(tmp_path / "out", step, prefix, name)
        assert target_of(accelerator, path).folder == tmp_path / path
    with pytest.raises(UsageError, match="automatic_checkpoint_naming is off"):
        target_of(accelerator, None)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    found = target_of(accelerator, "ignored")
    assert found.folder == tmp_path / "checkpoints/checkpoint_4"


def test_a_load_looks_where_the_user_or_the_project_says(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source_of(accelerator, "~/out/checkpoint_7").folder == tmp_path / "out/checkpoint_7"
    assert source_of(accelerator, "~/out/last").folder == tmp_path / "out/last"
    with pytest.raises(UsageError, match="input_dir: was not passed"):
        source_of(accelerator, None)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    assert source_of(accelerator, None).run == tmp_path / "checkpoints"
    assert source_of(accelerator, tmp_path / "out/checkpoint_7").run == tmp_path / "out"
    with pytest.raises(UsageError, match="in_flights"):
        load_state(accelerator, tmp_path, in_flights="wait")  # type: ignore[call-arg]


def test_a_model_that_is_not_sharded_is_accelerates_to_save(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="it has no sharded parameter"):
        save_model(accelerator, model, tmp_path / "out")
    install(accelerator)
    accelerator.save_model(model, tmp_path / "out", "1GB", safe_serialization=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, {}), (3, {"keep_last": 3}), (0, {"keep_last": 1})]
)
def test_the_only_good_folder_always_stays(limit: int | None, kept: dict[str, int]) -> None:
    accelerator: Any = SimpleNamespace(project_configuration=SimpleNamespace(total_limit=limit))
    assert with_limit(accelerator, {}) == kept


def test_an_accelerator_of_another_kind_is_left_alone(accelerator: Accelerator) -> None:
    odd: Any = SimpleNamespace(**{k: v for k, v in vars(accelerator).items() if k != "_models"})
    assert "has no _models" in stock_reason(odd)
    accelerator.state.distributed_type = "FSDP"
    accelerator.state.fsdp_plugin = SimpleNamespace(state_dict_type="FULL_STATE_DICT")
    assert stock_reason(accelerator).endswith("FULL_STATE_DICT, not SHARDED_STATE_DICT")
    accelerator.state.fsdp_plugin.state_dict_type = "SHARDED_STATE_DICT"
    accelerator.project_configuration.save_on_each_node = True
    assert "the nodes share no file system" in stock_reason(accelerator)
    accelerator.project_configuration.save_on_each_node = False
    assert stock_reason(accelerator) == "no model was prepared"


def manifest(*files: str) -> bytes:
    records = {name: FileRecord(1) for name in files}
    return Manifest("training", {}, {}, {"ckptkit": "0"}, {}, files=records).to_json()


def test_only_a_folder_with_nothing_of_the_users_may_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = SaveTarget(tmp_path, 3, "checkpoint-", "latest")
    assert not obstacle(target)
    target.folder.mkdir()
    assert not obstacle(target)
    (target.folder / "scheduler.bin").write_bytes(b"1")
    assert "holds scheduler.bin" in obstacle(target)
    (target.folder / "ckptkit.json").write_bytes(manifest("scheduler.bin"))
    assert not obstacle(target)
    (target.folder / "notes.txt").touch()
    assert "holds notes.txt, which ckptkit did not write" in obstacle(target)
    (target.folder / "ckptkit.json").write_bytes(b"{")
    assert "cannot be read" in obstacle(target)
    (tmp_path / "link").symlink_to(target.folder)
    assert "a link" in obstacle(SaveTarget(tmp_path, 3, "checkpoint-", "link"))
    assert not obstacle(SaveTarget(tmp_path, 3, "checkpoint-", "checkpoint-003"))
    assert "no step can have" in obstacle(SaveTarget(tmp_path, 3, "checkpoint-", ".hidden"))
    target = SaveTarget(tmp_path, 3, "checkpoint-", "used")
    (target.folder / "below").mkdir(parents=True)
    for folder in (target.folder, target.folder / "below"):
        monkeypatch.chdir(folder)
        assert "the directory that this program runs in" in obstacle(target)


def put_stock(folder: Path, *, whole: bool = True) -> Path:
    for unit in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / unit).mkdir(parents=True)
        (folder / unit / ".metadata").touch()
    if whole:
        (folder / "random_states_0.pkl").touch()
    return folder


def test_the_newest_whole_folder_is_found_whoever_wrote_it(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="no complete folder"):
        find_newest_folder(tmp_path / "nowhere", 1, 1)
    first = put_stock(tmp_path / "checkpoint_9")
    put_stock(tmp_path / "checkpoint_10", whole=False)
    (tmp_path / "checkpoint_11").mkdir()
    found = find_newest_folder(tmp_path, 1, 1)
    assert found == {"folder": str(first), "ours": False, "newest": False}
    with pytest.raises(ResumeError, match="no complete folder"):
        find_newest_folder(tmp_path, 2, 1)


def test_a_named_folder_is_loaded_by_whoever_can(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="no such directory"):
        examine_folder(tmp_path / "nowhere")
    (tmp_path / "full").mkdir()
    assert examine_folder(tmp_path / "full") is None
    stock = examine_folder(put_stock(tmp_path / "stock"))
    assert stock is not None
    assert not stock["ours"]
    sealed = Manifest("training", {"step": 11, SEALED: {}}, {}, {}, {}).to_json()
    folder = put_stock(tmp_path / "checkpoint_11")
    (folder / "ckptkit.json").write_bytes(sealed)  # which does not make it one of ckptkit's
    expected = {"folder": str(folder), "ours": False, "newest": False}
    assert examine_folder(folder) == find_newest_folder(tmp_path, 1, 1) == expected
    (folder / "ckptkit.json").write_bytes(manifest())
    assert examine_folder(folder) == {**expected, "ours": True}


def test_a_layout_that_accelerate_does_not_read_is_refused(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    for call in (
        lambda: install(accelerator, layout="dcp"),
        lambda: save_state(accelerator, tmp_path / "step", layout="dcp"),
        lambda: load_state(accelerator, tmp_path / "step", layout="dcp"),
    ):
        with pytest.raises(UsageError, match="layout='dcp' is not an option for an accelerator"):
            call()
    assert "save_state" not in vars(accelerator)
    assert not (tmp_path / "step").exists()
