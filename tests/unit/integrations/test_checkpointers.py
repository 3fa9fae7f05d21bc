"""A model that is whole goes to where it belongs, in place of an earlier one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.errors import OutputError, OutputExistsError, OverflowRefusedError
from ckptkit.core.manifest import Manifest
from ckptkit.integrations import checkpointers as model_folders
from ckptkit.integrations.checkpointers import _move_into, export_into
from ckptkit.training import Checkpointer

ONE = {"model.safetensors"}
PARTS = {
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
}
THREE = {
    *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    "model.safetensors.index.json",
}


def put(folder: Path, names: set[str], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(text, encoding="utf-8")


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("old", "new"),
    [(PARTS, ONE), (ONE, PARTS), (PARTS, THREE), (ONE, {"adapter_model.safetensors"})],
)
def test_of_the_old_weights_nothing_is_left_that_belongs_to_no_model(
    tmp_path: Path, old: set[str], new: set[str]
) -> None:
    put(tmp_path, old | {"config.json", "notes.txt"}, "old")
    put(tmp_path / ".ckptkit-model", new | {"config.json", "ckptkit.json"}, "new")
    _move_into(tmp_path)
    kept = old if "adapter_model.safetensors" in new else set()
    expected = dict.fromkeys(kept | {"notes.txt"}, "old")
    assert texts(tmp_path) == expected | dict.fromkeys(new | {"config.json", "ckptkit.json"}, "new")


def test_a_move_that_is_cut_short_joins_no_old_part_to_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, PARTS, "old")
    put(tmp_path / ".ckptkit-model", PARTS, "new")
    monkeypatch.setattr(model_folders, "_weights_first", lambda names: sorted(names)[:1])
    monkeypatch.setattr(shutil, "rmtree", lambda _: None)
    _move_into(tmp_path)
    assert "model.safetensors.index.json" not in {path.name for path in tmp_path.iterdir()}


def test_the_manifest_of_a_step_stays_where_training_looks_for_it(tmp_path: Path) -> None:
    step = Manifest("training", {}, {}, {"ckptkit": "0"}, {}).to_json()
    put(tmp_path / ".ckptkit-model", {"model.safetensors", "ckptkit.json"}, "new")
    (tmp_path / "ckptkit.json").write_bytes(step)
    _move_into(tmp_path)
    assert (tmp_path / "ckptkit.json").read_bytes() == step
    assert (tmp_path / "model.safetensors").read_text(encoding="utf-8") == "new"
    assert not (tmp_path / ".ckptkit-model").exists()


def test_a_model_that_cannot_go_to_its_place_is_said_to_be_whole_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "model.safetensors/in-the-way").mkdir(parents=True)
    model = nn.Linear(2, 2)
    with (
        Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(OutputError, match=r"complete in '\.ckptkit-model'.*directory") as caught,
    ):
        export_into(checkpointer, out, model, is_first=True)
    assert caught.value.where == str(out)
    with ckptkit.open(out / ".ckptkit-model") as weights:
        assert torch.equal(weights["weight"], model.weight)


def test_messages_name_the_folder_that_the_user_gave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, model = tmp_path / "out", nn.Linear(2, 2)
    with caplog.at_level("INFO"), Checkpointer(tmp_path / "run") as checkpointer:
        export_into(checkpointer, out, model, is_first=True)
        with torch.no_grad():
            model.weight[0, 0] = 1e9
        with pytest.raises(OverflowRefusedError) as caught:
            export_into(checkpointer, out, model, is_first=True, dtype="float16")
        (tmp_path / "file").touch()
        with pytest.raises(OutputError) as blocked:
            export_into(checkpointer, tmp_path / "file", model, is_first=True)
    assert f"exported to {out}: " in caplog.text
    assert ".ckptkit-" not in f"{caplog.text} {caught.value} {blocked.value} {blocked.value.hint}"


def test_a_save_without_a_number_in_its_name_is_called_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"model": nn.Linear(2, 2)}
    with caplog.at_level("INFO"), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state, name="final").result(60)
        checkpointer.save(5, state).result(60)
        checkpointer.resume(state, folder=tmp_path / "final")
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "notes.txt").touch()
        with pytest.raises(OutputExistsError):
            checkpointer.save(0, state, name="taken").result(60)
    assert f"'final' saved in {tmp_path / 'final'}: " in caplog.text
    assert f"step 5 saved in {tmp_path / 'checkpoint-5'}: " in caplog.text
    assert "resumed from 'final'" in caplog.text
    assert "'taken' was not saved: " in caplog.text
    assert "step 0" not in caplog.text
