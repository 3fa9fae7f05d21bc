"""Adapters as runs really leave them: several in a folder, biases, targets that were left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.adapters import base_model
from ckptkit.adapters.array_reader import ArrayReader
from ckptkit.adapters.merge import are_changed_alike
from ckptkit.conversion.names_on_disk import DiskNames
from ckptkit.core.index import Fqn, Key
from ckptkit.lora.changes import AdapterSource, Change, LowRankChange, Replacement, TokenRowsChange
from tests.adapter_tensors import make_origin

GENERATIONS = Path(__file__).resolve().parents[3] / "fixtures" / "peft_generations"
BASE = GENERATIONS / "bases" / "llama"
PREFIX = "base_model.model."
Q_PROJ = "model.layers.0.self_attn.q_proj"
Arrays = dict[str, NDArray[Any]]


def tensors_of(folder: Path) -> Arrays:
    return load_file(folder / "adapter_model.safetensors")


def write(folder: Path, tensors: Arrays, config: dict[str, Any], file: str) -> Path:
    folder.mkdir()
    save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return dict(json.loads((folder / "adapter_config.json").read_text()) | changes)


def live(base: Arrays, adapter: Arrays) -> Arrays:
    """Returns the state dict of the PEFT model that an adapter was saved from."""
    adapted = {name.rpartition(".lora_")[0] for name in adapter if ".lora_" in name}
    found = {}
    for name, value in base.items():
        module, _, kind = f"{PREFIX}{name}".rpartition(".")
        found[f"{module}.base_layer.{kind}" if module in adapted else f"{module}.{kind}"] = value
    for name, value in adapter.items():
        head, is_lora, tail = name.rpartition(".lora_")
        factor, _, kind = tail.partition(".")
        found[f"{head}.lora_{factor}.default.{kind}" if is_lora else name] = value
    return found


def test_the_adapter_beside_those_with_names_has_the_configuration_beside_it(
    tmp_path: Path,
) -> None:
    """`save_pretrained` of a model with two puts the second into a folder inside the first's."""
    pair = GENERATIONS / "peft_0_21" / "lora_then_dora"
    shutil.copytree(pair / "adapter_0", tmp_path / "saved")
    shutil.copytree(pair / "adapter_1", tmp_path / "saved" / "second")
    for name, folder in (("default", pair / "adapter_0"), ("second", pair / "adapter_1")):
        ckptkit.extract_adapter(tmp_path / "saved", tmp_path / name, adapter=name)
        assert config_of(tmp_path / name) == config_of(folder)
        assert tensors_of(tmp_path / name).keys() == tensors_of(folder).keys()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "layers_to_transform": [0]},
    ],
)
def test_targets_that_peft_leaves_out_need_no_tensors(
    options: dict[str, Any], tmp_path: Path
) -> None:
    saved = GENERATIONS / "peft_0_12" / "dora" / "adapter_0"
    file = "adapter_model.safetensors"
    adapter = write(tmp_path / "a", tensors_of(saved), config_of(saved, **options), file)
    ckptkit.extract_adapter(adapter, tmp_path / "out")


def test_a_target_that_was_saved_as_it_is_needs_no_factors(tmp_path: Path) -> None:
    """PEFT passes over a module that both lists name, and trains it as it is."""
    saved = GENERATIONS / "peft_0_21" / "lora" / "adapter_0"
    config = config_of(saved, target_modules=["q_proj", "embed_tokens", "lm_head"])
    adapter = write(tmp_path / "a", tensors_of(saved), config, "adapter_model.safetensors")
    ckptkit.extract_adapter(adapter, tmp_path / "out")


def test_trained_biases_do_not_make_another_base(tmp_path: Path) -> None:
    case = GENERATIONS / "peft_0_7" / "bias_all"
    base = load_file(BASE / "model.safetensors")
    trained = live(base, tensors_of(case / "adapter_0"))
    source = write(tmp_path / "a", trained, config_of(case / "adapter_0"), "model.safetensors")
    ckptkit.merge_adapter(source, tmp_path / "out", base=BASE)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name, truth in (base | load_file(case / "merged.safetensors")).items():
        assert np.array_equal(merged[name], truth), name


def test_a_bias_of_lora_is_added_to_the_bias_that_was_trained_beside_it(tmp_path: Path) -> None:
    saved = GENERATIONS / "peft_0_16" / "lora_bias" / "adapter_0"
    tensors = tensors_of(saved)
    trained = np.arange(16, dtype=np.float32)
    tensors[f"{PREFIX}{Q_PROJ}.base_layer.bias"] = trained
    config = config_of(saved, bias="lora_only")
    adapter = write(tmp_path / "a", tensors, config, "adapter_model.safetensors")
    ckptkit.merge_adapter(adapter, tmp_path / "out", base=BASE)
    merged = load_file(tmp_path / "out" / "model.safetensors")[f"{Q_PROJ}.bias"]
    added = np.float32(5 / 2) * tensors[f"{PREFIX}{Q_PROJ}.lora_B.bias"]
    assert np.allclose(merged, trained + added, rtol=1e-6)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The configurations for which Transformers was asked for names; it knows none."""
    configs: list[object] = []

    def disk_names(config: object, *_arguments: object, **_options: object) -> DiskNames:
        configs.append(config)
        return DiskNames(None, ())

    monkeypatch.setattr(base_model, "find_disk_names", disk_names)
    return configs


def test_a_prefix_that_explains_some_modules_only_is_not_taken(asked: list[object]) -> None:
    """Half of a vision model differs from its files by a prefix, the other half by more."""
    names = ["vision_tower.fc1.weight", "language_model.model.layers.0.q_proj.weight"]
    base = SimpleNamespace(entries=dict.fromkeys(names), is_live=False)
    modules = ["model.vision_tower.fc1", "model.language_model.layers.0.q_proj"]
    config = {"model_type": "gemma3"}
    base_model.align(cast("base_model.BaseSource", base), modules, config, folder=None)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("module", "times"), [("score", 0), ("classifier.dense", 0), ("model.layers.0.mlp.gate", 1)]
)
def test_names_on_disk_are_asked_for_modules_inside_the_model_and_not_for_a_new_head(
    module: str, times: int, asked: list[object]
) -> None:
    names = ["model.layers.0.q_proj.weight", "model.layers.0.block_sparse_moe.gate.weight"]
    base = SimpleNamespace(entries=dict.fromkeys(names), is_live=False)
    config, saved = {"model_type": "mixtral"}, [module]
    given = cast("base_model.BaseSource", base)
    base_model.align(given, ["model.layers.0.q_proj"], config, folder=None, saved=saved)
    assert len(asked) == times


def test_tied_names_are_changed_alike_where_their_changes_have_the_same_numbers() -> None:
    """The factors of a tied head may be those of the embedding, transposed."""
    noise = np.random.default_rng(1).standard_normal
    arrays: Arrays = {
        "A": noise((2, 8)).astype(np.float32),
        "B": noise((4, 2)).astype(np.float32),
        "rows": noise((1, 4)).astype(np.float32),
        "whole": noise((9, 4)).astype(np.float32),
        "short": noise((8, 4)).astype(np.float32),
    }
    arrays |= {f"{name}.T": np.ascontiguousarray(array.T) for name, array in arrays.items()}
    arrays |= {f"other.{name}": array * 2 for name, array in arrays.items()}
    arrays |= {f"same.{name}": array for name, array in arrays.items()}
    origin = make_origin("adapter", arrays)
    source, entries = AdapterSource(0, "adapter", "adapter"), origin.index.tensors

    def low_rank(weight: str, form: Any, down: str, up: str, **more: Any) -> LowRankChange:
        factors = {"down": entries[Key(down)], "up": entries[Key(up)]}
        fixed = {"magnitude": None, "rank": 2, "scaling": 2.0}
        return LowRankChange(source, Fqn(weight), weight, form, **(factors | fixed | more))

    def rows(weight: str, name: str, *indices: int) -> TokenRowsChange:
        return TokenRowsChange(source, Fqn(weight), weight, entries[Key(name)], indices)

    def whole(weight: str, name: str) -> Replacement:
        return Replacement(source, Fqn(weight), weight, entries[Key(name)], frozen=False)

    embedding = low_rank("e", "embedding", "A", "B")
    cases: list[tuple[Change, Change, list[Change]]] = [
        (
            embedding,
            low_rank("h", "linear", "B.T", "A.T"),
            [
                low_rank("h", "linear", "B.T", "other.A.T"),
                low_rank("h", "linear", "B.T", "A.T", scaling=1.0),
                low_rank("h", "linear", "B.T", "A.T", magnitude=entries[Key("rows")]),
                low_rank("h", "transposed", "B.T", "A.T"),
                rows("h", "rows", 1),
            ],
        ),
        (
            embedding,
            low_rank("h", "embedding", "same.A", "same.B"),
            [low_rank("h", "embedding", "A", "other.B")],
        ),
        (
            rows("e", "rows", 1),
            rows("h", "same.rows", 1),
            [rows("h", "rows", 2), rows("h", "other.rows", 1)],
        ),
        (
            whole("e", "whole"),
            whole("h", "same.whole"),
            [whole("h", "other.whole"), whole("h", "short")],
        ),
    ]
    for theirs, alike, others in cases:
        assert are_changed_alike([alike], [theirs], ArrayReader(origin))
        assert not are_changed_alike([alike, alike], [theirs], ArrayReader(origin))
        for other in others:
            assert not are_changed_alike([other], [theirs], ArrayReader(origin)), other
