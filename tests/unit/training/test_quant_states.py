"""Scales of packed weights are saved as bitsandbytes would unpack with them, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from safetensors.torch import save_file
from torch import nn

from ckptkit.core.errors import LoadError, ResumeError
from ckptkit.training import Checkpointer, load_into
from ckptkit.training.state.quant_states import lost_scales, packed_weights
from tests.sampled import sampled


def test_scales_that_an_evaluation_on_a_cpu_has_rounded_are_not_saved() -> None:
    layers: Any = bnb.nn
    layer = layers.Linear4bit(
        *(64, 64), bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16
    ).to("cpu")
    state, packed = layer.weight.quant_state, layer.weight.data
    layer.weight = nn.Parameter(packed, requires_grad=False)  # as sharding leaves it
    found = dict(lost_scales(packed_weights(layer, ()), {"weight"}))
    assert "weight.absmax" in found
    # What `forward` of a model in evaluation does where the processor has AVX-512.
    _convert_weight_packed_for_cpu(packed.clone(), state)
    assert packed_weights(layer, ()) == {}


def packed_model(seed: int, *, nested: bool, blocksize: int = 64) -> Any:
    layers: Any = bnb.nn
    torch.manual_seed(seed)
    layer = layers.Linear4bit(64, 64, bias=False, compress_statistics=nested, quant_type="nf4")
    layer.weight = layers.Params4bit(
        torch.randn(64, 64) * seed,
        requires_grad=False,
        compress_statistics=nested,
        blocksize=blocksize,
        quant_type="nf4",
    ).to("cpu")
    return nn.Sequential(layer)


def write(model: Any, folder: Path) -> None:
    """Writes a folder as `save_pretrained` does, and a step."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(1, {"model": model}).result(60)


@pytest.mark.parametrize("nested", sampled([False, True], [True]))
def test_a_base_that_was_packed_from_other_weights_gets_scales_and_offsets(
    tmp_path: Path, nested: bool
) -> None:
    truth = packed_model(1, nested=nested)
    write(truth, tmp_path / "stored")
    rows = torch.randn(3, 64)
    for seed in range(2, 8):  # the JSON of their offsets has other lengths
        loaded, resumed = packed_model(seed, nested=nested), packed_model(seed, nested=nested)
        before = loaded(rows)
        load_into(loaded, tmp_path / "stored/model.safetensors")
        with Checkpointer(tmp_path / "stored/run") as checkpointer:
            assert checkpointer.resume({"model": resumed}) == 1
        assert torch.equal(loaded(rows), truth(rows))
        assert torch.equal(resumed(rows), truth(rows))
        assert not torch.equal(before, truth(rows))


def test_a_base_that_was_packed_in_another_way_is_refused_and_unchanged(tmp_path: Path) -> None:
    write(packed_model(1, nested=False, blocksize=128), tmp_path / "stored")
    model = packed_model(2, nested=False, blocksize=64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(LoadError, match=r"size mismatch|blocksize"):
        load_into(model, tmp_path / "stored/model.safetensors")
    with Checkpointer(tmp_path / "stored/run") as checkpointer, pytest.raises(ResumeError):
        checkpointer.resume({"model": model})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    other = packed_model(1, nested=False, blocksize=64)
    other[0].weight.quant_state.dtype = torch.float16
    other[0].weight.quant_state.blocksize = 128
    other[0].weight.quant_state.absmax = other[0].weight.quant_state.absmax[:32].clone()
    with pytest.raises(LoadError, match="dtype 'float32' was found, and the model has 'float16'"):
        load_into(other, tmp_path / "stored/model.safetensors")
