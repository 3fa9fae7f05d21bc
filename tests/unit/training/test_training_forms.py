"""Forms of a step: names of folders, further files, and what the Trainer's layout looks like."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptkit
from ckptkit.core.errors import ResumeError, UsageError
from ckptkit.training import Checkpointer


def trained(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def with_adapter(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["0"], r=2, modules_to_save=["1"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(1 + len(name))
    return model


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()  # noqa: S311


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.iterdir()}


def test_a_step_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    state, other = trained(), trained(1)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, state, name="epoch_0").result()
        checkpointer.save(1, state).result()
        checkpointer.save(2, state).result()
        assert files_of(tmp_path) == {"epoch_0", "checkpoint-2", ".ckptkit"}
        assert checkpointer.resume(other, folder=tmp_path / "epoch_0") == 1
    assert torch.equal(other["model"][0].weight, state["model"][0].weight)


@pytest.mark.parametrize("name", ["", "..", "a/b", "checkpoint-7", "checkpoint_7", ".hidden"])
def test_a_name_is_that_of_a_folder_in_the_run(tmp_path: Path, name: str) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="name"):
        checkpointer.save(1, trained(), name=name)


def test_steps_may_be_called_as_accelerate_calls_them(tmp_path: Path) -> None:
    state, other = trained(), trained(1)
    with Checkpointer(tmp_path, prefix="checkpoint_", keep_last=2) as checkpointer:
        for step in (0, 1, 2):
            checkpointer.save(step, state).result()
        assert files_of(tmp_path) == {"checkpoint_1", "checkpoint_2", ".ckptkit"}
        assert checkpointer.resume(other) == 2


def test_further_files_lie_in_the_step_and_are_in_its_manifest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        step = checkpointer.save(3, trained(), files={"notes/a.json": b"{}"}).result()
    assert (step / "notes" / "a.json").read_bytes() == b"{}"
    assert json.loads((step / "ckptkit.json").read_bytes())["files"]["notes/a.json"]["digest"]


@pytest.mark.parametrize("layout", ["accelerate", "dcp", "trainer"])
def test_further_files_do_not_take_the_names_of_others(tmp_path: Path, layout: Any) -> None:
    names = [
        *("", ".", "..", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a.", "a ", "a./b", "a\\b"),
        *("a\0b", "a\nb", "a\ud800"),
        *("ckptkit.json", "CkptKit.JSON", "a/ckptkit.json", "ckptkit", "ckptkit/config.json"),
        *(".ckptkit", ".ckptkit-x/a", ".metadata", "a/.METADATA", ".ranks/0.json"),
        *("__0_0.distcp", "a/b.DISTCP", "optimizer_0", "optimizer_0/a", "Optimizer_12/a"),
        *(
            "pytorch_model_fsdp_0/a",
            "base_model_1/a",
            "random_states_0.pkl",
            "RANDOM_states_17.pkl",
        ),
        *("scheduler.bin", "scheduler_1.bin", "scheduler.pt", "scaler.pt", "scaler_2.pt"),
        *("custom_checkpoint_0.pkl", "rng_state.pth", "rng_state_3.pth"),
    ]
    with Checkpointer(tmp_path, layout=layout) as checkpointer:
        for name in names:
            with pytest.raises(UsageError, match="files"):
                checkpointer.save(3, trained(), files={name: b""})
        with pytest.raises(UsageError, match=r"files.*mapping|files.*by file name"):
            checkpointer.save(3, trained(), files=cast("Any", [("a", b"")]))
        for pair in (("a", "A"), ("a", "a/b"), ("A/c", "a")):
            with pytest.raises(UsageError, match="cannot be in one directory"):
                checkpointer.save(3, trained(), files=dict.fromkeys(pair, b""))
        fine = dict.fromkeys((".env/a", "optimizer.txt", "random_states.pkl", "a/b", "a/c"), b"x")
        step = checkpointer.save(4, trained(), files=fine).result()
        assert checkpointer.resume(trained(1)) == 4
    assert ckptkit.verify(step).ok


def test_a_file_in_the_place_of_an_object_is_refused(tmp_path: Path) -> None:
    state = trained() | {"ema": {"weights": [1]}}
    with Checkpointer(tmp_path) as checkpointer:
        for name in ("ema_0", "EMA_0/a"):
            with pytest.raises(UsageError, match="taken"):
                checkpointer.save(3, state, files={name: b""})


def test_a_step_that_would_not_be_found_again_is_refused(tmp_path: Path) -> None:
    state = trained()
    with Checkpointer(tmp_path) as checkpointer:
        for step in (10**18, 10**25):
            with pytest.raises(UsageError, match="at most 18 digits"):
                checkpointer.save(step, state)
        checkpointer.save(10**18 - 1, state).result()
        assert checkpointer.resume(trained(1)) == 10**18 - 1
        with pytest.raises(UsageError, match="name of a step"):
            checkpointer.save(1, state, name="Checkpoint-7")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ResumeError, match="no directory"):
        checkpointer.resume(trained(), folder=tmp_path / "absent")


def test_the_trainers_layout_has_the_trainers_names(tmp_path: Path) -> None:
    random.seed(7)
    np.random.seed(7)
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, trained(), files={"trainer_state.json": b"{}"}).result()
        expected = drawn()
        assert checkpointer.resume(trained(1)) == 5
    assert drawn() == expected
    assert files_of(step) == {
        *("pytorch_model_fsdp_0", "optimizer_0", "scheduler.pt", "rng_state.pth"),
        *("trainer_state.json", "ckptkit.json", "ckptkit"),
    }
    states = torch.load(step / "rng_state.pth", weights_only=True)  # noqa: TID251
    assert set(states) == {"python", "numpy", "cpu"}


def test_a_model_alone_comes_without_random_numbers(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, {"model": trained()["model"]}).result()
    assert files_of(step) == {"pytorch_model_fsdp_0", "ckptkit.json", "ckptkit"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_adapter_lies_apart_under_the_names_of_its_files(tmp_path: Path) -> None:
    model, other = with_adapter(), with_adapter(1)
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, {"model": model}).result()
        assert checkpointer.resume({"model": other}) == 5
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    expected = {
        f"model.{name}": value.clone()
        for name, value in peft.get_peft_model_state_dict(
            model, save_embedding_layers=False
        ).items()
    }
    found = {name: torch.full_like(value, 7) for name, value in expected.items()}
    reader = dcp.FileSystemReader(step / "pytorch_model_fsdp_0")
    assert set(reader.read_metadata().state_dict_metadata) == set(expected)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    base = dcp.FileSystemReader(step / "base_model_0").read_metadata().state_dict_metadata
    assert "model.base_model.model.0.base_layer.weight" in base


def test_a_step_with_the_adapter_alone_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    model, other = with_adapter(), with_adapter(1)
    with Checkpointer(tmp_path, layout="trainer") as checkpointer:
        step = checkpointer.save(5, {"model": model}).result()
        foreign = tmp_path / "checkpoint-9"
        shutil.copytree(step / "pytorch_model_fsdp_0", foreign / "pytorch_model_fsdp_0")
        (foreign / "trainer_state.json").write_text("{}")
        before = other.state_dict()["base_model.model.0.base_layer.weight"].clone()
        assert checkpointer.resume({"model": other}, folder=foreign) == 9
    after, saved = other.state_dict(), model.state_dict()
    assert torch.equal(after["base_model.model.0.base_layer.weight"], before)
    lora = "base_model.model.0.lora_A.default.weight"
    assert torch.equal(after[lora], saved[lora])
