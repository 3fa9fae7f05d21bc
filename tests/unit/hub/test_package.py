"""Which files are published, and which are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import ckptkit
from ckptkit.consumers.table import TRANSFORMERS
from ckptkit.core.errors import AccessError
from ckptkit.hub.package import (
    PushOptions,
    choose_files,
    choose_step_files,
    find_stale_files,
    prepare_package,
)
from ckptkit.storage.local.source import LocalSource
from tests.other_user import as_nobody, needs_root, open_folder

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config/checkpoint"


def test_files_of_a_model_go_and_all_others_stay_with_a_reason() -> None:
    model = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "README.md",
        "LICENSE",
        "ckptkit.json",
        "reward/adapter_config.json",
        "reward/adapter_model.safetensors",
    ]
    other = [
        "training_args.bin",
        "optimizer.bin",
        "rng_state_0.pth",
        "trainer_state.json",
        "modeling_llama.py",
        ".env",
        "runs/events.out.tfevents",
        "wandb/run.log",
        "notes.txt",
    ]
    chosen, skipped = choose_files([*model, *other], TRANSFORMERS, code=False, optimizer=False)
    assert set(chosen) == set(model)
    assert {one.path for one in skipped} == set(other)
    assert all(one.reason for one in skipped)


def test_options_let_more_files_through_but_never_the_training_arguments() -> None:
    paths = [
        "training_args.bin",
        "optimizer.bin",
        "modeling_x.py",
        "a.txt",
        "old/optimizer.bin",
    ]
    chosen, _ = choose_files(
        paths, TRANSFORMERS, code=True, optimizer=True, include=["*.txt", "training_args.bin"]
    )
    assert chosen == ["a.txt", "modeling_x.py", "optimizer.bin"]


def test_weights_of_an_earlier_layout_go_with_a_new_model() -> None:
    remote = [
        "model-00001-of-00003.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "adapter_config.json",
        "adapter_model.bin",
        "ckptkit.json",
        "README.md",
        "model.onnx",
        "gguf/model.safetensors",
    ]
    assert find_stale_files(remote, ["model.safetensors", "config.json", "ckptkit.json"]) == [
        "adapter_config.json",
        "adapter_model.bin",
        "model-00001-of-00003.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ]


def test_an_adapter_takes_the_place_of_an_adapter_and_leaves_a_model_alone() -> None:
    remote = ["model.safetensors", "adapter_model.bin", "adapter_config.json", "ckptkit.json"]
    new = ["adapter_model.safetensors", "adapter_config.json"]
    assert find_stale_files(remote, new) == ["adapter_model.bin", "ckptkit.json"]


def test_what_a_step_is_made_of_goes_and_strangers_stay() -> None:
    strangers = [".env", "train.sh", "train.log", "id.pem", "secrets.json", "a/b/c.txt", "core.1"]
    for folder in sorted(FIXTURES.glob("*/checkpoint")):
        paths = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        chosen, skipped = choose_step_files([*paths, *strangers], ())
        left = {one.path for one in skipped} - set(strangers)
        assert {path for path in left if not path.startswith(".ckptkit/")} == set(), folder
        assert set(chosen).isdisjoint(strangers)


def test_files_of_the_manifest_and_those_asked_for_go_with_a_step() -> None:
    paths = ["notes/a.json", "notes/b.log", ".env", "training_args.bin", "ckptkit.json"]
    assert choose_step_files(paths, ())[0] == ["ckptkit.json"]
    assert choose_step_files(paths, paths)[0] == ["ckptkit.json", "notes/a.json"]
    _, skipped = choose_step_files(paths, (), ["*"])
    assert [one.path for one in skipped] == ["training_args.bin"]


@needs_root
def test_a_folder_that_may_not_be_entered_is_named_and_never_left_out_of_a_step() -> None:
    def push(model: Path, options: PushOptions) -> list[str]:
        try:
            with LocalSource(model) as source:
                package = prepare_package(source, "me/model", options, [])
        except AccessError as error:
            return [str(error)]
        return [f"{skipped.path} {skipped.reason}" for skipped in package.skipped]

    with open_folder() as folder:
        ckptkit.consolidate(STEP, folder / "model", names="live")
        shutil.copytree(STEP, folder / "model" / "step")
        push(folder / "model", {"whole": "step"})  # another user cannot import what it needs
        (folder / "model" / "notes").mkdir(mode=0o700)
        (folder / "model" / "step" / "pytorch_model_fsdp_0").chmod(0)
        skipped = as_nobody(lambda: push(folder / "model", {}))
        whole = as_nobody(lambda: push(folder / "model", {"whole": "step"}))
    assert "notes/ may not be entered" in skipped
    assert "step/pytorch_model_fsdp_0: cannot be read: permission denied" in whole[0]
