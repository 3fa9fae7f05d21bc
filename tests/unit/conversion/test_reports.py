"""What inspect and verify say of unusual sources and of outputs, and buffers compared fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptkit
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import CannotPlanError
from ckptkit.core.index import Fqn, Key
from ckptkit.engine.reader import same_bytes
from ckptkit.plan.layouts.hf import layout_hf_weights
from ckptkit.plan.plan import SOURCE, Copy, Product, TensorSpec
from tests.command_line import run_command

ROOT = Path(__file__).parents[3]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def printed(*arguments: str | Path) -> str:
    result = run_command(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("config", "model_type", "architectures"),
    [
        ({"model_type": "llama", "architectures": ["A", "B"]}, "llama", ("A", "B")),
        ({"architectures": 5}, None, ()),
        ({"architectures": "A", "model_type": ["x"]}, None, ()),
        ({"architectures": ["A", {}], "model_type": {}}, None, ()),
        ({"architectures": None, "model_type": None}, None, ()),
    ],
)
def test_a_configuration_of_any_shape_is_shown_as_far_as_it_makes_sense(
    config: object, model_type: str | None, architectures: tuple[str, ...], tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = ckptkit.inspect(tmp_path)
    assert (found.model_type, found.architectures) == (model_type, architectures)
    assert "safetensors" in printed("inspect", tmp_path)


STORAGE = torch.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize(
    ("embedding", "head", "equal"),
    [
        (STORAGE, STORAGE, True),
        (STORAGE[:2], STORAGE[2:], False),
        (STORAGE, STORAGE.t(), False),
        (STORAGE[2:], STORAGE[2:], True),
    ],
    ids=["same", "halves", "transposed", "same half"],
)
def test_views_of_one_storage_are_tied_only_where_they_are_the_same_view(
    embedding: torch.Tensor, head: torch.Tensor, equal: bool, tmp_path: Path
) -> None:
    torch.save({EMBEDDING: embedding, HEAD: head}, tmp_path / "pytorch_model.bin")
    config = {"model_type": "llama", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tie,) = ckptkit.inspect(tmp_path).tied
    assert (tie.equal, tie.declared) == (equal, True)


@pytest.mark.parametrize(
    ("case", "of_source", "of_output"),
    [
        (
            "hf_tied",
            "11 tensors read whole, but no checksum was stored to compare with",
            "the source had no checksum for 11 tensors; the digests are of what was written",
        ),
        ("fsdp2_plain", "objects beside the tensors that have their CRC-32: 28", ""),
    ],
)
def test_verify_tells_whose_checksums_were_missing(
    case: str, of_source: str, of_output: str, real_checkpoints: Path, tmp_path: Path
) -> None:
    source, out = real_checkpoints / case / "checkpoint", tmp_path / "out"
    ckptkit.consolidate(source, out)
    for place, told in ((source, of_source), (out, of_output)):
        lines = printed("verify", place).splitlines()
        assert lines[0].startswith("ok")
        assert [line.strip() for line in lines[1:]] == ([told] if told else [])


def test_a_tensor_named_as_the_metadata_of_a_file_is_refused() -> None:
    spec = TensorSpec(Fqn("__metadata__"), dtype_named("int8"), (3,))
    with pytest.raises(CannotPlanError, match="keeps this name") as caught:
        layout_hf_weights([Product(spec, Copy(SOURCE, Key("__metadata__")))], 1_000)
    assert caught.value.where == "tensor '__metadata__'"
    assert "--exclude" in caught.value.hint


@settings(max_examples=100)
@given(st.binary(max_size=40), st.integers(0, 39), st.integers(0, 255))
def test_buffers_are_the_same_when_every_byte_is(data: bytes, place: int, value: int) -> None:
    other = bytearray(data)
    if place < len(other):
        other[place] = value
    assert same_bytes(memoryview(data), memoryview(other)) == (data == other)
