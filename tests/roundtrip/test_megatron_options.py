"""Options of a conversion where a map gives the tensors other names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, RefusedError
from tests.live_truth import refuse
from tests.roundtrip.test_megatron import FIXTURES, LLAMA

GEMMA = FIXTURES / "megatron_model_gemma3"
TRUTH = load_file(LLAMA / "truth.safetensors")


def written(case: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    ckptkit.consolidate(case / "checkpoint", out, base=case, **options)
    return load_file(out / "model.safetensors")


def plain_copy(folder: Path, case: Path, extra: Mapping[str, torch.Tensor]) -> Path:
    """Writes the tensors of a case under their own names, and further ones, as one file."""
    ckptkit.consolidate(case / "checkpoint", folder / "stored", map="none")
    tensors = load_file(folder / "stored/model.safetensors")
    save_file({**tensors, **extra}, folder / "model.safetensors")
    return folder / "model.safetensors"


PATTERNS: Mapping[str, tuple[dict[str, Any], set[str]]] = {
    "names that are written": (
        {"include": ["model.layers.0.*"]},
        {name for name in TRUTH if name.startswith("model.layers.0.")},
    ),
    "names of the checkpoint": (
        {"include": ["decoder.layers.*"]},
        {name for name in TRUTH if name.startswith("model.layers.")},
    ),
    "all but a written name": (
        {"exclude": ["model.norm.weight"]},
        {*TRUTH} - {"model.norm.weight"},
    ),
    "all but a name of the checkpoint": (
        {"exclude": ["decoder.final_layernorm.weight"]},
        {*TRUTH} - {"model.norm.weight"},
    ),
}


@pytest.mark.parametrize("what", PATTERNS)
@pytest.mark.quick("all but a name of the checkpoint", "names that are written")
def test_patterns_fit_names_before_and_after(what: str, tmp_path: Path) -> None:
    options, names = PATTERNS[what]
    tensors = written(LLAMA, tmp_path / "out", **options)
    assert tensors.keys() == names
    assert all(torch.equal(tensor, TRUTH[name]) for name, tensor in tensors.items())


def test_a_part_of_what_a_tensor_is_made_of_is_not_left_out(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "own"\nsource = "Own"\ntarget = "Other"\nmodel_types = []\n\n'
        '[[rule]]\nfrom = ["a", "b"]\nto = "both"\nsteps = [{ concat = [2, 3] }]\n'
    )
    source = tmp_path / "model.safetensors"
    halves = {"a": torch.arange(2.0), "b": torch.arange(3.0)}
    save_file(halves, source)
    with pytest.raises(RefusedError, match="'both' is made of 'a' and 'b', and one of them is"):
        ckptkit.consolidate(source, tmp_path / "out", map=own, exclude=["b"])
    assert not (tmp_path / "out").exists()
    ckptkit.consolidate(source, tmp_path / "out", map=own)
    both = load_file(tmp_path / "out/model.safetensors")["both"]
    assert torch.equal(both, torch.cat([*halves.values()]))


def test_a_tensor_that_no_rule_takes_can_be_left_out(tmp_path: Path) -> None:
    source = plain_copy(tmp_path, LLAMA, {"decoder.odd.weight": torch.ones(3)})
    with pytest.raises(CkptkitError, match=r"no rule .* takes tensor 'decoder\.odd\.weight'") as e:
        ckptkit.consolidate(source, tmp_path / "out", base=LLAMA)
    assert "--exclude" in e.value.hint
    ckptkit.consolidate(source, tmp_path / "out", base=LLAMA, exclude=["decoder.odd.*"])
    assert ckptkit.diff(tmp_path / "out", LLAMA / "truth.safetensors").same


@pytest.mark.parametrize("pattern", ["model.layers.1.input_layernorm.weight", "*layer_norm_weight"])
def test_types_are_kept_by_names_before_and_after(pattern: str, tmp_path: Path) -> None:
    tensors = written(LLAMA, tmp_path / "out", dtype="float16", keep_dtype=[pattern])
    kept = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    layers = {"1"} if "model" in pattern else {"0", "1"}
    kinds = (
        {"input_layernorm"}
        if "model" in pattern
        else {"input_layernorm"} | {"post_attention_layernorm"}
    )
    assert kept == {f"model.layers.{n}.{kind}.weight" for n in layers for kind in kinds}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_cast_comes_after_the_arithmetic_of_a_map(dtype: Any, tmp_path: Path) -> None:
    tensors = written(GEMMA, tmp_path / "out", dtype=dtype)
    for name, tensor in load_file(GEMMA / "truth.safetensors").items():
        assert torch.equal(tensors[name], tensor.to(getattr(torch, dtype))), name


def test_rows_are_cut_of_the_vocabulary_without_padding(tmp_path: Path) -> None:
    tensors = written(LLAMA, tmp_path / "out", vocab_size=20)
    name = "model.embed_tokens.weight"
    assert torch.equal(tensors[name], TRUTH[name][:20])
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 20
    with pytest.raises(RefusedError, match="the embeddings have 30 rows"):
        written(LLAMA, tmp_path / "more", vocab_size=32)


def test_files_and_types_are_those_of_another_folder(tmp_path: Path) -> None:
    like, out = tmp_path / "like", tmp_path / "out"
    ckptkit.consolidate(
        LLAMA / "checkpoint", like, base=LLAMA, dtype="float16", max_shard_size="8KB"
    )
    (like / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    (like / "ckptkit.json").unlink()  # it has the digest of the other configuration
    ckptkit.consolidate(LLAMA / "checkpoint", out, base=like, like=like, dtype="base")
    files = sorted(path.name for path in like.glob("*.safetensors"))
    assert len(files) > 2
    assert all((out / name).read_bytes() == (like / name).read_bytes() for name in files)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_other_layouts_have_the_same_tensors(to: Any, tmp_path: Path) -> None:
    ckptkit.convert(LLAMA / "checkpoint", tmp_path / "out", to=to, base=LLAMA)
    assert ckptkit.diff(tmp_path / "out", LLAMA / "truth.safetensors").same


def test_a_source_is_removed_that_stored_a_tied_weight_twice(tmp_path: Path) -> None:
    embedding = plain_copy(tmp_path, LLAMA, {})
    tensors = load_file(embedding)
    tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"].clone()
    source, base = tmp_path / "run" / "model.safetensors", tmp_path / "base"
    for folder in (source.parent, base):
        folder.mkdir()
    save_file(tensors, source)
    config = json.loads((LLAMA / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    ckptkit.consolidate(source, tmp_path / "out", base=base, delete_source=True)
    assert not source.exists()
    assert ckptkit.diff(tmp_path / "out", LLAMA / "truth.safetensors").same


def test_a_source_with_more_than_the_output_stays(tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(LLAMA / "checkpoint", copy)
    with pytest.raises(RefusedError, match="hold what is not in the output"):
        ckptkit.consolidate(
            copy, tmp_path / "out", base=LLAMA, delete_source=True, exclude=["model.norm.weight"]
        )
    ckptkit.consolidate(copy, tmp_path / "out", base=LLAMA, delete_source=True)
    assert not list(copy.rglob("*.distcp"))
    assert ckptkit.diff(tmp_path / "out", LLAMA / "truth.safetensors").same


def test_a_missing_rank_is_refused_under_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(LLAMA / "checkpoint", copy)
    next(copy.rglob("__2_0.distcp")).unlink()
    refuse(r"__2_0\.distcp.*is not there.*decoder", copy, tmp_path / "out", base=LLAMA)


def test_states_of_an_optimizer_are_not_written_beside_other_names(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="--optimizer"):
        written(LLAMA, tmp_path / "out", optimizer=True)


def test_a_truncated_byte_is_found_when_it_is_converted(tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(LLAMA / "checkpoint", copy)
    file = next(copy.rglob("__0_1.distcp"))
    data = bytearray(file.read_bytes())
    at = data.index(
        TRUTH["model.layers.0.mlp.gate_proj.weight"][0].view(torch.uint8).numpy().tobytes()
    )
    data[at] ^= 1
    file.write_bytes(bytes(data))
    refuse(r"CRC-32|checksum", copy, tmp_path / "out", base=LLAMA)


def test_a_tensor_without_elements_stays_one(tmp_path: Path) -> None:
    own, source = tmp_path / "own.toml", tmp_path / "model.safetensors"
    own.write_text(
        'name = "own"\nsource = "Own"\ntarget = "Other"\nmodel_types = []\n\n'
        '[[rule]]\nfrom = "a"\nto = "b"\nsteps = [{ transpose = [1, 0] }]\n'
    )
    save_file({"a": torch.empty(0, 4)}, source)
    ckptkit.consolidate(source, tmp_path / "out", map=own)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"b": (4, 0)}
