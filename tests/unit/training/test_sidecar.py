"""What is put beside the shards so that a step describes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ckptkit.core.errors import UsageError
from ckptkit.training.sidecar import check_sidecar, collect_sidecar, run_facts

TARGETS = ["q_proj"]
UNKNOWN = "<unk>"
pytestmark = [  # what torch, PEFT and transformers say to each other
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({UNKNOWN: 0, "shard": 1}, unk_token=UNKNOWN))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN)


def collected(*modules: nn.Module, **sidecar: object) -> dict[str, bytes]:
    return {file.path: file.data for file in collect_sidecar(modules, sidecar)}


def test_a_models_configuration_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    found = collected(model)
    assert sorted(found) == ["ckptkit/config.json", "ckptkit/generation_config.json"]
    ours, theirs = (json.loads(x) for x in (found["ckptkit/config.json"], read(tmp_path)))
    assert ours | {"dtype": None} == theirs | {"dtype": None}
    assert ours["architectures"] == ["LlamaForCausalLM"]
    generation = (tmp_path / "generation_config.json").read_bytes()
    assert json.loads(found["ckptkit/generation_config.json"]) == json.loads(generation)


def read(folder: Path, name: str = "config.json") -> bytes:
    return (folder / name).read_bytes()


def test_collecting_changes_nothing_about_the_model() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=TARGETS))
    before = model.base_model.model.config.architectures, model.peft_config["default"].to_dict()
    collected(model)
    after = model.base_model.model.config.architectures, model.peft_config["default"].to_dict()
    assert after == before


@pytest.mark.parametrize(
    "wrap", [torch.compile, lambda model: torch.compile(nn.DataParallel(model))]
)
def test_a_wrapped_model_is_looked_into(wrap: Any) -> None:
    assert collected(wrap(llama())) == collected(llama())


def test_the_first_model_with_a_configuration_counts_and_a_plain_one_adds_nothing() -> None:
    assert collected(nn.Linear(2, 2)) == {}
    assert collected(nn.Linear(2, 2), llama(), nn.Linear(2, 2)) == collected(llama())


def test_adapters_are_described_as_peft_writes_them(tmp_path: Path) -> None:
    base = llama()
    base.config.name_or_path = base.name_or_path = "acme/llama"
    config = LoraConfig(r=2, target_modules=TARGETS, revision="v2", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.add_adapter("other", LoraConfig(r=4, target_modules=TARGETS))
    model.save_pretrained(tmp_path)
    found = collected(model)
    assert found["ckptkit/adapter_config.json"] == read(tmp_path, "adapter_config.json")
    other = found["ckptkit/adapters/other/adapter_config.json"]
    assert other == read(tmp_path / "other", "adapter_config.json")
    described = json.loads(found["ckptkit/adapter_config.json"])
    assert described["base_model_name_or_path"] == "acme/llama"
    assert described["revision"] == "v2"
    assert json.loads(found["ckptkit/config.json"])["architectures"] == ["LlamaForCausalLM"]


def test_the_commit_of_the_base_is_the_adapters_revision_and_told_of_the_run() -> None:
    base = llama()
    base.config.name_or_path = base.name_or_path = "acme/llama"
    base.config._commit_hash = "a1b2"
    model = get_peft_model(base, LoraConfig(target_modules=TARGETS))
    other = LoraConfig(target_modules=TARGETS, base_model_name_or_path="acme/another")
    model.add_adapter("other", other)
    model.add_adapter("named", LoraConfig(target_modules=TARGETS, revision="v2"))
    found = collected(model)
    revisions = {
        name: json.loads(data)["revision"] for name, data in found.items() if "adapter_" in name
    }
    assert revisions == {
        "ckptkit/adapter_config.json": "a1b2",
        "ckptkit/adapters/other/adapter_config.json": None,
        "ckptkit/adapters/named/adapter_config.json": "v2",
    }
    assert model.peft_config["default"].revision is None
    facts = json.loads(run_facts({"a": 1}, [nn.Linear(1, 1), model]).data)
    assert facts == {"a": 1, "base_model": {"id": "acme/llama", "commit_hash": "a1b2"}}
    assert json.loads(run_facts({"a": 1}, [nn.Linear(1, 1), llama()]).data) == {"a": 1}


def test_a_tokenizer_is_saved_by_itself(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    found = collected(processing_class=tokenizer())
    assert found == {f"ckptkit/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    assert "ckptkit/tokenizer.json" in found


def test_files_and_folders_keep_their_names_and_secrets_stay_out(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("notes.txt", "more/chat.jinja", ".env", "training_args.bin"):
        (tmp_path / name).write_text(name)
    assert collected(folder=tmp_path) == {
        "ckptkit/more/chat.jinja": b"more/chat.jinja",
        "ckptkit/notes.txt": b"notes.txt",
    }
    assert collected(file=str(tmp_path / "notes.txt")) == {"ckptkit/notes.txt": b"notes.txt"}
    assert collected(**{"seed.txt": b"7"}) == {"ckptkit/seed.txt": b"7"}
    with pytest.raises(UsageError, match=r"training_args\.bin"):
        collected(file=tmp_path / "training_args.bin")


def test_two_contents_for_one_file_are_refused_and_equal_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"sidecar\['old'\]: has another 'config\.json'"):
        collected(llama(), old=tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(collected(llama())["ckptkit/config.json"])
    assert collected(llama(), old=tmp_path / "config.json") == collected(llama())


@pytest.mark.parametrize(
    ("sidecar", "text"),
    [
        ({"x": 3}, "got an int"),
        ({"x": nn.Linear(1, 1)}, "got a Linear"),
        ({"x": "/nowhere/at/all"}, "no such file or folder"),
        ({"../x": b""}, "was found where the name of a file"),
        ({"/x": b""}, "was found where the name of a file"),
        ({"run.json": b""}, "has another 'run.json'"),
    ],
)
def test_what_cannot_be_stored_is_refused(sidecar: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        collect_sidecar([], sidecar)


@pytest.mark.parametrize(
    ("sidecar", "text"),
    [
        ([tokenizer], r"sidecar: .* got a list"),
        ("tokenizer", r"sidecar: .* got a str"),
        ({1: b""}, r"sidecar\[1\]: expected a name, got an int"),
        ({"x": None}, r"sidecar\['x'\]: .* got None"),
        ({"x": PreTrainedTokenizerFast}, r"sidecar\['x'\]: .* got a type"),
    ],
)
def test_a_kind_that_cannot_be_stored_is_told_early(sidecar: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_sidecar(sidecar)


def test_paths_of_any_kind_are_taken(tmp_path: Path) -> None:
    class Place:
        def __fspath__(self) -> str:
            return str(tmp_path / "notes.txt")

    (tmp_path / "notes.txt").write_text("x")
    given = check_sidecar({"a": Place(), "b": b"1", "c": tokenizer(), "d": str(tmp_path)})
    assert collected(a=given["a"]) == {"ckptkit/notes.txt": b"x"}
    assert check_sidecar(None) == {}


def test_a_folder_with_weights_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="holds more than"):
        collected(folder=tmp_path)
