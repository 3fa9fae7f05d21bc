"""Checkpoints of Megatron-Core wherever a model is read: diff, open, merge and from-diff.

The tensors have the names of Transformers there, and are made when they are read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, RefusedError, UsageError
from ckptkit.storage.places import Place
from tests.command_line import run_command
from tests.object_store import ObjectStore
from tests.sampled import sampled

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = sorted(path.parent.name for path in FIXTURES.glob("megatron_model_*/config.json"))
LLAMA = FIXTURES / "megatron_model_llama_tp2_pp2"
GEMMA = FIXTURES / "megatron_model_gemma3"


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what fixtures were converted into."""
    return tmp_path_factory.mktemp("conversions")


@pytest.fixture
def converted(conversions: Path, tmp_path: Path) -> Callable[[Path], Path]:
    """Converts a fixture, once for all tests, and returns a copy that a test may change."""

    def convert(case: Path) -> Path:
        made, out = conversions / case.name, tmp_path / f"{case.name}-folder"
        if not made.exists():
            ckptkit.consolidate(case / "checkpoint", made, base=case)
        return Path(shutil.copytree(made, out))

    return convert


def write_adapter(folder: Path, model: Path, modules: tuple[str, ...]) -> Path:
    """Writes a LoRA adapter of rank 2 for the modules of a model folder."""
    folder.mkdir()
    tensors = {}
    generator = torch.Generator().manual_seed(3)
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            rows, columns = weight.shape
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.quick("megatron_model_gemma3", "megatron_model_gpt_oss_ep2")
def test_a_checkpoint_equals_the_folder_that_it_becomes(
    model: str, converted: Callable[[Path], Path]
) -> None:
    case = FIXTURES / model
    out = converted(case)
    count = len(load_file(case / "truth.safetensors"))
    for pair in ((case / "checkpoint", out), (out, case / "checkpoint")):
        difference = ckptkit.diff(*pair)
        assert difference.same
        assert difference.equal == count


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.quick("megatron_model_gpt_oss_ep2", "megatron_model_llama_tp2_pp2")
def test_single_tensors_are_read_under_converted_names(model: str) -> None:
    case = FIXTURES / model
    truth = load_file(case / "truth.safetensors")
    with ckptkit.open(case / "checkpoint", map="auto", base=case) as checkpoint:
        assert set(checkpoint) == truth.keys()
        for name, tensor in truth.items():
            assert checkpoint.shape(name) == tuple(tensor.shape)
            assert torch.equal(checkpoint[name], tensor)
    with ckptkit.open(case / "checkpoint") as checkpoint:
        assert not truth.keys() & set(checkpoint)


def test_arithmetic_of_a_map_is_applied_before_values_are_compared(
    converted: Callable[[Path], Path],
) -> None:
    out = converted(GEMMA)
    tensors = load_file(out / "model.safetensors")
    norm = tensors["model.norm.weight"]
    norm[3] += 1
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "ckptkit.json").unlink()
    difference = ckptkit.diff(GEMMA / "checkpoint", out)
    assert [(one.name, one.elements) for one in difference.changed] == [("model.norm.weight", 1)]


def test_without_a_configuration_two_checkpoints_are_compared_as_they_are_stored(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(LLAMA / "checkpoint", copy)
    difference = ckptkit.diff(LLAMA / "checkpoint", copy)
    assert difference.same
    assert "pass --base DIR" in difference.note
    assert ckptkit.diff(LLAMA / "checkpoint", copy, base=LLAMA).equal == len(
        load_file(LLAMA / "truth.safetensors")
    )


def test_a_diff_without_any_configuration_says_what_to_pass(
    converted: Callable[[Path], Path],
) -> None:
    out = converted(LLAMA)
    (out / "config.json").unlink()
    with pytest.raises(RefusedError, match="no configuration") as error:
        ckptkit.diff(LLAMA / "checkpoint", out)
    assert "--base" in error.value.hint
    assert ckptkit.diff(LLAMA / "checkpoint", out, base=LLAMA).same
    result = run_command("diff", LLAMA / "checkpoint", out, "--base", LLAMA)
    assert result.returncode == 0, result.stderr


def test_a_map_that_is_for_neither_side_is_refused(converted: Callable[[Path], Path]) -> None:
    out = converted(LLAMA)
    with pytest.raises(CkptkitError, match="no rule of map 'megatron-llama' takes"):
        ckptkit.diff(out, out, map="megatron-llama")
    with pytest.raises(UsageError, match="neither a file nor a map"):
        ckptkit.diff(LLAMA / "checkpoint", out, map="megatron-lama")
    assert ckptkit.diff(LLAMA / "checkpoint", out, map="megatron-llama").same
    assert not ckptkit.diff(LLAMA / "checkpoint", out, map="none").same


MODULES = {
    "megatron_model_deepseek_v3_pp2_ep2": ("o_proj", "kv_b_proj", "down_proj"),
    "megatron_model_gpt_oss_ep2": ("q_proj", "o_proj"),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.quick("megatron_model_llama_tp2_pp2")
def test_an_adapter_is_merged_into_a_checkpoint_as_into_its_folder(
    model: str, converted: Callable[[Path], Path], tmp_path: Path
) -> None:
    case = FIXTURES / model
    folder = converted(case)
    modules = MODULES.get(model, ("q_proj", "o_proj", "v_proj"))
    adapter = write_adapter(tmp_path / "adapter", folder, modules)
    ckptkit.merge_adapter(adapter, tmp_path / "expected", base=folder)
    manifest = ckptkit.merge_adapter(
        adapter, tmp_path / "merged", base=case / "checkpoint", model_config=case
    )
    for name in ("model.safetensors", "config.json"):
        expected, merged = (tmp_path / out / name for out in ("expected", "merged"))
        assert merged.read_bytes() == expected.read_bytes()
    assert any(name.startswith("map megatron-") for name in manifest.versions)
    assert not ckptkit.diff(case / "checkpoint", tmp_path / "merged").same


def test_a_base_without_a_configuration_is_refused_with_the_option_to_pass(
    converted: Callable[[Path], Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", converted(LLAMA), ("q_proj",))
    base = LLAMA / "checkpoint"
    with pytest.raises(RefusedError, match=r"--base .*no configuration") as error:
        ckptkit.merge_adapter(adapter, tmp_path / "out", base=base)
    assert "--model-config" in error.value.hint
    assert not (tmp_path / "out").exists()
    result = run_command(
        *("adapter", "merge", adapter, tmp_path / "out", "--base", base),
        *("--model-config", LLAMA, "--json"),
    )
    assert result.returncode == 0, result.stderr
    assert "names were converted by map 'megatron-llama'" in json.loads(result.stdout)["notes"]
    assert "note: names were converted by map 'megatron-llama'" in result.stderr


def test_an_adapter_is_made_of_two_checkpoints_whatever_their_names(
    converted: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = converted(LLAMA)
    adapter = write_adapter(tmp_path / "adapter", folder, ("q_proj", "o_proj"))
    ckptkit.merge_adapter(adapter, tmp_path / "tuned", base=folder)
    made = []
    for number, (tuned, base) in enumerate(
        [(tmp_path / "tuned", folder), (tmp_path / "tuned", LLAMA / "checkpoint")]
    ):
        out = tmp_path / f"made{number}"
        ckptkit.adapter_from_diff(tuned, out, base=base, rank=2)
        made.append((out / "adapter_model.safetensors").read_bytes())
    assert made[0] == made[1]
    with pytest.raises(RefusedError, match="holds the same numbers as the base"):
        ckptkit.adapter_from_diff(LLAMA / "checkpoint", tmp_path / "none", base=folder, rank=2)


@pytest.mark.parametrize("case", sampled([GEMMA, LLAMA], [GEMMA]), ids=lambda case: case.name)
@pytest.mark.slow
def test_a_checkpoint_in_a_bucket_is_one_like_any_other(
    case: Path, object_store: ObjectStore, converted: Callable[[Path], Path], tmp_path: Path
) -> None:
    object_store.bucket("megatron").put_tree(FIXTURES / case.name / "checkpoint", case.name)
    place = Place(f"s3://megatron/{case.name}", object_store.options)
    out = tmp_path / f"{case.name}-remote"
    ckptkit.consolidate(place, out, base=case)
    expected = converted(case) / "model.safetensors"
    assert (out / "model.safetensors").read_bytes() == expected.read_bytes()
    assert ckptkit.diff(place, out).same
    assert ckptkit.diff(out, place, src_options=object_store.options).same


@pytest.mark.slow
def test_an_output_in_a_bucket_is_copied_by_no_store_and_is_the_same(
    object_store: ObjectStore,
) -> None:
    bucket = object_store.bucket("converted")
    bucket.put_tree(LLAMA / "checkpoint", "checkpoint")
    place = Place("s3://converted/checkpoint", object_store.options)
    out = Place("s3://converted/out", object_store.options)
    ckptkit.consolidate(place, out, base=LLAMA)
    assert ckptkit.diff(out, LLAMA / "truth.safetensors").same
