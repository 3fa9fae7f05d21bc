"""Two tensors that would get one name, or two files that are one on a file system without case."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError

PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)


def found_in(out: Path) -> dict[str, float]:
    return {
        name: float(tensor.reshape(-1)[0])
        for file in out.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("prefix", PREFIXES)
def test_no_tensor_is_lost_when_a_prefix_is_taken_off(prefix: str, source: Path, out: Path) -> None:
    """One name with the prefix, one without: both come out, or nothing does."""
    state = {f"{prefix}w": torch.full((2,), 1.0), "w": torch.full((2,), 2.0)}
    torch.save(state, source / "model.pt")
    try:
        ckptkit.consolidate(source, out)
    except CkptkitError:
        assert list(out.parent.iterdir()) == []
        return
    assert sorted(found_in(out).values()) == [1.0, 2.0]


def test_no_tensor_of_an_adapter_is_lost_when_its_prefix_is_taken_off(
    tmp_path: Path, out: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    layer = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"base_model.model.{layer}.lora_A.weight": np.ones((2, 4), np.float32),
        f"base_model.model.{layer}.lora_A.default.weight": np.full((2, 4), 9, np.float32),
        f"base_model.model.{layer}.lora_B.weight": np.ones((4, 2), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CkptkitError):
        ckptkit.extract_adapter(folder, out)
    assert list(out.parent.iterdir()) == []


def test_names_that_differ_in_case_are_two_tensors(source: Path, out: Path) -> None:
    save_file(
        {"W": np.ones(2, np.float32), "w": np.zeros(2, np.float32)}, source / "model.safetensors"
    )
    ckptkit.consolidate(source, out)
    assert found_in(out) == {"W": 1.0, "w": 0.0}


def shard(number: float) -> bytes:
    raw = json.dumps(
        {f"w{number}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<f", number)


def test_files_that_differ_in_case_do_not_replace_one_another(source: Path, out: Path) -> None:
    """The names of written files are ckptkit's own, so that no two are equal without case."""
    for name, number in (("A.safetensors", 1), ("a.safetensors", 2)):
        (source / name).write_bytes(shard(number))
    index = {"weight_map": {"w1": "A.safetensors", "w2": "a.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        ckptkit.consolidate(source, out, max_shard_size=4)
    except CkptkitError:  # the two are one file here, which the index contradicts
        assert list(out.parent.iterdir()) == []
        return
    names = [path.name for path in out.iterdir()]
    assert len({name.casefold() for name in names}) == len(names)
    assert found_in(out) == {"w1": 1.0, "w2": 2.0}


def test_side_files_that_differ_in_case_are_not_both_taken(source: Path, out: Path) -> None:
    (source / "model.safetensors").write_bytes(shard(1))
    (source / "tokenizer.json").write_text('{"right": 1}')
    (source / "Tokenizer.JSON").write_text('{"wrong": 1}')
    ckptkit.consolidate(source, out)
    names = [path.name for path in out.iterdir()]
    assert len({name.casefold() for name in names}) == len(names)
    assert (out / "tokenizer.json").read_text() == '{"right": 1}'


def test_two_ranks_that_hold_one_tensor_differently_are_refused(source: Path, out: Path) -> None:
    """Files of the same names from two runs, under prefixes that are both taken off."""
    state = {"model.module.w": torch.ones(2), "model._orig_mod.w": torch.zeros(2)}
    torch.save(state, source / "model.pt")
    try:
        ckptkit.consolidate(source, out)
    except CkptkitError:
        assert list(out.parent.iterdir()) == []
        return
    assert sorted(found_in(out).values()) == [0.0, 1.0]
