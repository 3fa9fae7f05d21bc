"""Finding an adapter's configuration and base, and refusing what would not be an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.adapters.sources import AdapterRequest, OpenedAdapter, open_adapter
from ckptkit.core.errors import (
    AdapterError,
    AmbiguousSourceError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    RefusedError,
    UnsupportedError,
)

P = "base_model.model.model."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
Tensors = dict[str, Any]


def stripped(*, scale: float = 1.0, module: str = "q_proj") -> Tensors:
    rng = np.random.default_rng(5)
    return {
        f"{P}{module}.lora_A.weight": rng.standard_normal((2, 8)).astype(np.float32),
        f"{P}{module}.lora_B.weight": (scale * rng.standard_normal((6, 2))).astype(np.float32),
    }


def live(*, adapter: str = "default") -> Tensors:
    named = {name.replace(".weight", f".{adapter}.weight"): one for name, one in stripped().items()}
    base = {f"{P}q_proj.base_layer.weight": np.ones((6, 8), np.float32)}
    return {**named, **base, f"{P}norm.weight": np.ones(8, np.float32)}


def put(folder: Path, tensors: Mapping[str, Any], name: str = "adapter_model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / name, metadata={"format": "pt"})
    return folder


def configure(folder: Path, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**CONFIG, **options}))
    return file


def alpha_of(out: Path) -> float:
    value: float = json.loads((out / "adapter_config.json").read_text())["lora_alpha"]
    return value


# Where configurations are found


@pytest.mark.parametrize(
    "place", ["pytorch_model_fsdp_0", "ckptkit", "pytorch_model_fsdp_0/ckptkit", ".", ".."]
)
def test_a_configuration_is_found_beside_the_weights_and_above_them(
    place: str, tmp_path: Path
) -> None:
    step = tmp_path / "run" / "checkpoint-5"
    put(step / "pytorch_model_fsdp_0", live(), "model.safetensors")
    configure(step / place, lora_alpha=7)
    ckptkit.extract_adapter(tmp_path / "run", tmp_path / "out")
    assert alpha_of(tmp_path / "out") == 7


def test_the_nearest_configuration_counts_and_a_given_one_most(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-5"
    put(step, live(), "model.safetensors")
    configure(step / "ckptkit", lora_alpha=7)
    configure(tmp_path / "run", lora_alpha=9)
    ckptkit.extract_adapter(step, tmp_path / "own")
    assert alpha_of(tmp_path / "own") == 7
    given = configure(tmp_path / "given", lora_alpha=11)
    ckptkit.extract_adapter(step, tmp_path / "file", adapter_config=given)
    ckptkit.extract_adapter(step, tmp_path / "folder", adapter_config=given.parent)
    assert (alpha_of(tmp_path / "file"), alpha_of(tmp_path / "folder")) == (11, 11)


def test_an_adapter_with_a_name_has_its_record_below_that_name(tmp_path: Path) -> None:
    step = put(tmp_path / "checkpoint-5", live(adapter="poet"), "model.safetensors")
    configure(step / "ckptkit", lora_alpha=7, r=5)
    configure(step / "ckptkit" / "adapters" / "poet", lora_alpha=9)
    ckptkit.extract_adapter(step, tmp_path / "out")
    assert alpha_of(tmp_path / "out") == 9


def test_the_sole_adapter_of_a_step_that_is_split_has_the_recorded_name(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-5"
    put(step / "pytorch_model_fsdp_0", stripped(), "model.safetensors")
    base = {name: one for name, one in live().items() if "lora" not in name}
    other = {name: one for name, one in live(adapter="old").items() if "lora" in name}
    put(step / "base_model_0", {**base, **other}, "model.safetensors")
    configure(step / "ckptkit" / "adapters" / "poet", lora_alpha=9)
    configure(step / "ckptkit" / "adapters" / "old", lora_alpha=3)
    with pytest.raises(AmbiguousSourceError, match="'poet', 'old'"):
        ckptkit.extract_adapter(step, tmp_path / "out")
    found = opened(step, adapter="poet")
    assert found.adapter.settings.lora_alpha == 9
    assert set(found.base) == {"model.q_proj.weight", "model.norm.weight"}
    ckptkit.extract_adapter(step, tmp_path / "old", adapter="old")
    assert alpha_of(tmp_path / "old") == 3


def test_of_several_recorded_names_none_is_taken_for_tensors_that_tell_none(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-5"
    put(step / "pytorch_model_fsdp_0", stripped(), "model.safetensors")
    configure(step / "ckptkit", lora_alpha=3)
    configure(step / "ckptkit" / "adapters" / "poet", lora_alpha=9)
    with pytest.raises(AmbiguousSourceError, match="'default', 'poet'"):
        ckptkit.extract_adapter(step, tmp_path / "out")
    ckptkit.extract_adapter(step, tmp_path / "out", adapter="poet")
    assert alpha_of(tmp_path / "out") == 9


def test_rows_of_both_ends_have_to_be_the_same_where_one_embedding_is_named(
    tmp_path: Path,
) -> None:
    delta = "token_adapter.trainable_tokens_delta"
    names = [f"base_model.model.{module}.{delta}" for module in ("lm_head", "embed_tokens")]
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    source = put(tmp_path / "step", {**stripped(), names[0]: rows, names[1]: rows})
    configure(source, trainable_token_indices=[4, 2])
    found = opened(source)
    assert names[1] in found.adapter.tensors
    assert names[0] not in found.adapter.tensors
    assert any("lm_head" in note and "repeats" in note for note in found.notes)
    put(source, {**stripped(), names[0]: rows, names[1]: rows + 1})
    refused(tmp_path, AdapterError, "differ, while the configuration names the rows of one")


def opened(path: Path, **options: Any) -> OpenedAdapter:
    with ExitStack() as stack:
        return open_adapter(stack, path, AdapterRequest(**options))


def test_a_module_called_module_stays_where_the_configuration_names_it(tmp_path: Path) -> None:
    tensors = {name.replace(".model.model.", ".model.module."): t for name, t in live().items()}
    source = put(tmp_path / "step", tensors, "model.safetensors")
    configure(source, target_modules=["module.q_proj"])
    assert opened(source).adapter.tensors.keys() == {
        "base_model.model.module.q_proj.lora_A.weight",
        "base_model.model.module.q_proj.lora_B.weight",
    }
    configure(source, target_modules=["q_proj"])
    found = opened(source)
    assert "base_model.model.q_proj.lora_A.weight" in found.adapter.tensors
    assert any("removed as those of a wrapper" in note for note in found.notes)


def test_a_module_called_module_stays_where_peft_wrote_it_or_it_tells_names_apart(
    tmp_path: Path,
) -> None:
    own = put(tmp_path / "peft", stripped(module="module.q_proj"))
    configure(own)
    assert set(opened(own).adapter.tensors) == set(stripped(module="module.q_proj"))
    inside = {name.replace("q_proj", "module.q_proj"): tensor for name, tensor in live().items()}
    both = put(tmp_path / "live", {**live(), **inside}, "model.safetensors")
    configure(both)
    found = opened(both)
    assert set(found.adapter.tensors) == {*stripped(), *stripped(module="module.q_proj")}
    assert not found.notes


def test_tokenizers_come_along_and_the_models_configuration_does_not(tmp_path: Path) -> None:
    source = put(tmp_path / "step", stripped())
    configure(source)
    for name in ("tokenizer.json", "config.json", "generation_config.json", "training_args.bin"):
        (source / name).write_text("{}")
    ckptkit.extract_adapter(source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "ckptkit.json", "tokenizer.json"),
    }


def test_an_extracted_adapter_is_verified_and_extracted_once_more_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    source = put(tmp_path / "step", stripped())
    configure(source)
    first = ckptkit.extract_adapter(source, tmp_path / "first")
    second = ckptkit.extract_adapter(tmp_path / "first", tmp_path / "second")
    assert {n: t.digest for n, t in first.tensors.items()} == {
        n: t.digest for n, t in second.tensors.items()
    }
    assert first.kind == "adapter"
    assert not ckptkit.verify(tmp_path / "second").problems
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("first", "second"))
    assert all(np.array_equal(one[name], two[name]) for name in stripped())


# What is refused


def refused(tmp_path: Path, kind: type[Exception], match: str, **options: Any) -> str:
    with pytest.raises(kind, match=match) as caught:
        ckptkit.extract_adapter(tmp_path / "step", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert str(tmp_path) in str(caught.value)
    return str(getattr(caught.value, "hint", ""))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numbers_that_are_not_finite_are_refused(value: float, dtype: Any, tmp_path: Path) -> None:
    tensors = {name: one.astype(dtype) for name, one in stripped().items()}
    tensors[f"{P}q_proj.lora_B.weight"][3, 1] = value
    configure(put(tmp_path / "step", tensors))
    refused(tmp_path, AdapterError, r"q_proj\.lora_B\.weight.*1 of its numbers are not finite")


def test_an_adapter_of_zeros_is_refused_unless_it_is_wanted(tmp_path: Path) -> None:
    configure(put(tmp_path / "step", stripped(scale=0.0)))
    hint = refused(tmp_path, RefusedError, "every lora_B of 1 modules is zero")
    assert "--allow-untrained" in hint
    ckptkit.extract_adapter(tmp_path / "step", tmp_path / "out", allow_untrained=True)


def test_a_scaling_of_zero_is_no_training(tmp_path: Path) -> None:
    configure(put(tmp_path / "step", stripped()), lora_alpha=0)
    hint = refused(tmp_path, RefusedError, "every scaling of 1 modules is zero")
    assert "--allow-untrained" in hint
    configure(tmp_path / "step", lora_alpha=0, alpha_pattern={"q_proj": 1})
    ckptkit.extract_adapter(tmp_path / "step", tmp_path / "out")
    configure(tmp_path / "step", lora_alpha=0)
    ckptkit.extract_adapter(tmp_path / "step", tmp_path / "wanted", allow_untrained=True)


def test_one_trained_layer_is_enough(tmp_path: Path) -> None:
    tensors = {**stripped(scale=0.0), **stripped(module="v_proj")}
    configure(put(tmp_path / "step", tensors), target_modules=["q_proj", "v_proj"])
    ckptkit.extract_adapter(tmp_path / "step", tmp_path / "out")


def test_an_embedding_whose_a_is_zero_is_untrained(tmp_path: Path) -> None:
    tensors = {
        f"{P}wte.lora_embedding_A": np.zeros((2, 9), np.float32),
        f"{P}wte.lora_embedding_B": np.ones((4, 2), np.float32),
    }
    configure(put(tmp_path / "step", tensors), target_modules=["wte"])
    refused(tmp_path, RefusedError, "was not trained")


def test_a_file_without_a_tensor_is_refused_unless_it_is_wanted(tmp_path: Path) -> None:
    configure(put(tmp_path / "step", {}))
    hint = refused(tmp_path, IncompleteCheckpointError, "no adapter")
    assert "--allow-untrained" in hint
    manifest = ckptkit.extract_adapter(tmp_path / "step", tmp_path / "out", allow_untrained=True)
    assert manifest.tensors == {}
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_checkpoint_with_nothing_trainable_in_it_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "step", {"model.norm.weight": np.ones(3, np.float32)}, "model.safetensors")
    hint = refused(tmp_path, RefusedError, "nothing that PEFT trained: none of 1 tensors")
    assert "ckptkit consolidate" in hint


@pytest.mark.parametrize("name", ["prompt_embeddings", f"{P}q_proj.ia3_l", "base_model.w"])
@pytest.mark.parametrize("method", ["PROMPT_TUNING", "IA3"])
def test_a_method_that_is_not_modelled_is_refused_by_name(
    method: str, name: str, tmp_path: Path
) -> None:
    configure(put(tmp_path / "step", {name: np.ones((2, 2), np.float32)}), peft_type=method)
    refused(tmp_path, UnsupportedError, rf"PEFT's method '({method}|ia3)'")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": "8"}'])
def test_a_configuration_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    source = put(tmp_path / "step", stripped())
    (source / "adapter_config.json").write_text(text)
    refused(tmp_path, FormatError, "adapter_config.json")


def test_a_configuration_that_is_not_there_is_told(tmp_path: Path) -> None:
    put(tmp_path / "step", stripped())
    with pytest.raises(MissingFileError, match=r"--adapter-config .*nowhere"):
        ckptkit.extract_adapter(
            tmp_path / "step", tmp_path / "out", adapter_config=tmp_path / "nowhere"
        )


def test_trained_parameters_that_no_adapter_has_are_refused(tmp_path: Path) -> None:
    """A save of what was trained alone, with a norm that PEFT does not know of."""
    tensors = {n: t for n, t in live().items() if "base_layer" not in n}
    configure(put(tmp_path / "step", tensors, "model.safetensors"))
    refused(tmp_path, AdapterError, r"norm\.weight")
