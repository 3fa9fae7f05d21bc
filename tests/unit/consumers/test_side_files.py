"""Configurations and tokenizers beside the weights; ties, which a configuration declares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.consumers.side_files import (
    choose_side_files,
    sum_bytes_by_dtype,
    update_config,
)
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.errors import FormatError, NotACheckpointError
from ckptkit.core.model_configs import parse_json_object, to_json
from ckptkit.options import ConsolidateRequest

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 0,
    "hidden_size": 2,
    "num_attention_heads": 1,
    "vocab_size": 4,
}
F32, BF16, I64 = (dtype_named(name) for name in ("float32", "bfloat16", "int64"))
F8, E8M0 = dtype_named("float8_e4m3fn"), dtype_named("float8_e8m0fnu")


def chosen(*folders: Mapping[str, int], allow_code: bool = False) -> tuple[list[str], list[str]]:
    listed = [(f"origin{i}", names) for i, names in enumerate(folders)]
    files, code = choose_side_files(listed, allow_code=allow_code)
    return [f"{file.origin}:{file.path}" for file in files], code


def test_each_file_comes_from_the_nearest_folder_that_has_it() -> None:
    near, far = {"config.json": 2}, {"config.json": 9, "tokenizer.json": 9}
    assert chosen(near, far)[0] == ["origin0:config.json", "origin1:tokenizer.json"]


def test_a_tokenizer_is_never_put_together_from_two_folders() -> None:
    near = {"tokenizer.json": 1, "tokenizer_config.json": 1}
    far = {"special_tokens_map.json": 9, "added_tokens.json": 9, "chat_template.jinja": 9}
    far |= {"generation_config.json": 9, "preprocessor_config.json": 9}
    assert chosen(near, far)[0] == [
        "origin1:generation_config.json",
        "origin1:preprocessor_config.json",
        "origin0:tokenizer.json",
        "origin0:tokenizer_config.json",
    ]


def test_a_template_alone_is_taken_where_no_tokenizer_is() -> None:
    assert chosen({"chat_template.jinja": 1})[0] == ["origin0:chat_template.jinja"]


@pytest.mark.parametrize(
    "name",
    [
        "training_args.bin",
        "optimizer.pt",
        "rng_state_0.pth",
        "trainer_state.json",
        "random_states_0.pkl",
        "README.md",
        ".env",
        "config.json.bak",
        "wandb/config.json",
        "additional_chat_templates/a/b.txt",
        "MODEL.safetensors",
    ],
)
def test_what_is_not_on_the_list_is_left_alone(name: str) -> None:
    assert chosen({name: 1}, allow_code=True) == ([], [])


@pytest.mark.parametrize("data", [b"", b"[1]", b"nonsense", b"\xff", b"[" * 100_000, b"1"])
def test_a_configuration_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        parse_json_object(data, where="config.json")
    assert caught.value.where == "config.json"


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_json_object(data, where="x"), dict)
    except FormatError:
        return


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1}, {"a": 1, "dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": 1, "dtype": 2}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
    ],
)
def test_the_dtype_of_most_bytes_is_written_under_the_key_that_is_there(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    sizes = sum_bytes_by_dtype([(F32, 10), (BF16, 8), (BF16, 8), (I64, 1_000)])
    assert update_config(before, sizes, allow_code=False) == after


@pytest.mark.parametrize("sizes", [{I64: 5}, {F8: 5}, {F8: 5, E8M0: 2, I64: 9}])
def test_weights_that_nothing_computes_with_leave_the_dtype_as_it_was(
    sizes: dict[DType, int],
) -> None:
    assert update_config({"dtype": "x"}, sizes, allow_code=False) == {"dtype": "x"}
    assert update_config({}, sizes, allow_code=False) == {}


def test_scales_beside_packed_weights_do_not_decide_on_a_dtype() -> None:
    packed = {"quantization_config": {"quant_method": "fp8"}}
    sizes = {F8: 1_000, F32: 20, BF16: 10}
    stated = {**packed, "torch_dtype": "bfloat16"}
    assert update_config(stated, sizes, allow_code=False) == stated
    assert update_config(packed, sizes, allow_code=False) == {**packed, "dtype": "float32"}


def test_configurations_keep_their_order_and_their_letters() -> None:
    assert to_json({"b": "é", "a": 1}) == '{\n  "b": "é",\n  "a": 1\n}\n'.encode()


# The same through the whole pipeline


def make_source(folder: Path, files: Mapping[str, Any], *, head: float = 1.0) -> Path:
    folder.mkdir()
    embedding = torch.ones(4, 2)
    tensors = {EMBEDDING: embedding, HEAD: embedding * head, NORM: torch.ones(2)}
    save_file(tensors, folder / "model.safetensors")
    for name, content in files.items():
        data = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(data, encoding="utf-8")
    return folder


def names_in(out: Path) -> set[str]:
    return set(load_file(out / "model.safetensors"))


def config_in(out: Path) -> Any:
    return json.loads((out / "config.json").read_text(encoding="utf-8"))


def test_weights_that_are_equal_and_declared_tied_are_written_once(tmp_path: Path) -> None:
    source = make_source(tmp_path / "s", {"config.json": LLAMA | {"tie_word_embeddings": True}})
    manifest = ckptkit.consolidate(source, tmp_path / "out")
    assert names_in(tmp_path / "out") == {EMBEDDING, NORM}
    assert dict(manifest.tied) == {HEAD: EMBEDDING}
    assert config_in(tmp_path / "out")["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "files",
    [{"config.json": LLAMA | {"tie_word_embeddings": False}}, {}],
    ids=["not_declared", "no_config"],
)
def test_weights_that_are_equal_by_accident_are_both_written(
    files: dict[str, Any], tmp_path: Path
) -> None:
    manifest = ckptkit.consolidate(make_source(tmp_path / "s", files), tmp_path / "out")
    assert names_in(tmp_path / "out") == {EMBEDDING, HEAD, NORM}
    assert not manifest.tied


def test_weights_that_are_declared_tied_but_differ_are_both_written_and_untied(
    tmp_path: Path,
) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    source = make_source(tmp_path / "s", {"config.json": config}, head=2.0)
    manifest = ckptkit.consolidate(source, tmp_path / "out")
    assert names_in(tmp_path / "out") == {EMBEDDING, HEAD, NORM}
    assert not manifest.tied
    assert config_in(tmp_path / "out")["tie_word_embeddings"] is False


def test_a_sharded_output_for_training_keeps_every_tied_name(tmp_path: Path) -> None:
    source = make_source(tmp_path / "s", {"config.json": LLAMA | {"tie_word_embeddings": True}})
    manifest = ckptkit.convert(source, tmp_path / "out", to="dcp")
    assert set(manifest.tensors) == {EMBEDDING, HEAD, NORM}


CODE = {
    "config.json": LLAMA | {"auto_map": {"AutoModel": "modeling_x.X"}},
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tok.T", None]}, "pad": "x"},
    "modeling_x.py": "raise SystemExit",
    "training_args.bin": "secret",
    "generation_config.json": {"max_length": 3},
}


def test_code_is_left_behind_with_everything_that_would_run_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptkit.consolidate(make_source(tmp_path / "s", CODE), out)
    assert {path.name for path in out.iterdir()} == {
        "ckptkit.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
    }
    assert "auto_map" not in config_in(out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"pad": "x"}
    assert json.loads((out / "generation_config.json").read_text()) == {"max_length": 3}


def test_code_comes_along_where_it_is_allowed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptkit.consolidate(make_source(tmp_path / "s", CODE), out, allow_code=True)
    assert (out / "modeling_x.py").read_text() == "raise SystemExit"
    assert "auto_map" in config_in(out)
    assert "auto_map" in json.loads((out / "tokenizer_config.json").read_text())
    assert not (out / "training_args.bin").exists()


def test_the_dtype_in_the_configuration_is_that_of_the_weights(tmp_path: Path) -> None:
    source = make_source(tmp_path / "s", {"config.json": LLAMA | {"dtype": "float32"}})
    ckptkit.consolidate(source, tmp_path / "out", dtype="bfloat16")
    assert config_in(tmp_path / "out")["dtype"] == "bfloat16"


def test_what_the_source_lacks_comes_from_the_base_and_the_rest_stays(tmp_path: Path) -> None:
    base = make_source(tmp_path / "base", {"config.json": LLAMA | {"a": 1}, "tokenizer.json": "{}"})
    source = make_source(tmp_path / "s", {"config.json": LLAMA | {"a": 2}}, head=3.0)
    ckptkit.consolidate(source, tmp_path / "out", base=base)
    assert config_in(tmp_path / "out")["a"] == 2
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert load_file(tmp_path / "out" / "model.safetensors")[HEAD][0, 0] == 3.0


def test_a_base_that_is_no_directory_is_refused_by_its_option(tmp_path: Path) -> None:
    source = make_source(tmp_path / "s", {})
    with pytest.raises(NotACheckpointError) as caught:
        ckptkit.consolidate(source, tmp_path / "out", base=tmp_path / "nowhere")
    assert caught.value.where.startswith("--base")
    assert not (tmp_path / "out").exists()


def test_a_damaged_configuration_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = make_source(tmp_path / "s", {"config.json": '{"a": '})
    with pytest.raises(FormatError) as caught:
        ckptkit.consolidate(source, tmp_path / "out")
    assert "config.json" in caught.value.where
    assert not (tmp_path / "out").exists()


# Folders above the source

ABOVE = {"tokenizer.json": {}, "chat_template.jinja": "x", "train.py": "", "config.json": LLAMA}


def put_above(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in ABOVE.items():
        data = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(data, encoding="utf-8")


def notes_of(source: Path) -> list[str]:
    job = ConversionJob(source, None, ConsolidateRequest())
    with job.plan_output() as planned:
        return [note for note in planned.plan.notes if "above" in note or "python" in note]


@pytest.mark.parametrize("name", ["model", "checkpoint-5", "actor"])
def test_a_model_folder_takes_nothing_from_the_folder_above_it(name: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / name, {"config.json": LLAMA})
    put_above(tmp_path)
    ckptkit.consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert notes_of(source) == []


def test_weights_in_a_folder_called_model_alone_are_no_part_of_a_step(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", {})
    put_above(tmp_path)
    ckptkit.consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_an_output_of_ours_that_is_named_as_a_step_takes_nothing_from_above(tmp_path: Path) -> None:
    ckptkit.consolidate(make_source(tmp_path / "s", {}), tmp_path / "checkpoint-5")
    put_above(tmp_path)
    ckptkit.consolidate(tmp_path / "checkpoint-5", tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "beside"),
    [("model", "optimizer"), ("checkpoint-5", "checkpoint-5"), ("checkpoint-5/model", "")],
)
def test_what_a_step_takes_from_above_the_source_is_named_with_its_folder(
    name: str, beside: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    source.parent.mkdir(exist_ok=True)
    make_source(source, {})
    (tmp_path / beside).mkdir(exist_ok=True)
    put_above(tmp_path)
    ckptkit.consolidate(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    named = f"from {tmp_path}, above the source: chat_template.jinja, config.json, tokenizer.json"
    assert notes_of(source)[0] == named


def test_a_step_of_a_trainer_has_the_tokenizer_of_its_run(tmp_path: Path) -> None:
    files = {"config.json": LLAMA, "trainer_state.json": {}}
    source = make_source(tmp_path / "checkpoint-5", files)
    put_above(tmp_path)
    ckptkit.consolidate(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_python_files_are_listed_once_in_few_words_and_from_one_folder(tmp_path: Path) -> None:
    files = {"config.json": LLAMA, **{f"m{number}.py": "" for number in range(9)}}
    source = make_source(tmp_path / "s", files)
    (source / "ckptkit").mkdir()
    (source / "ckptkit" / "api.py").write_text("")
    assert notes_of(source) == [
        "python files were left out: m0.py, m1.py, m2.py and 6 more; pass --allow-code to copy them"
    ]
