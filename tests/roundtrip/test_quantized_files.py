"""Files of tensors that torch or torchao quantized are called that, and not unsafe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.errors import UnsupportedError
from tests.live_truth import refuse

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own quantization is deprecated


def of_one_scale() -> Any:
    return torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)


def of_many_scales() -> Any:
    scales, zeros = torch.full((4,), 0.1), torch.zeros(4)
    return torch.quantize_per_channel(torch.randn(4, 4), scales, zeros, 0, torch.quint8)


def of_wide_numbers() -> Any:
    return torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint32)


@pytest.mark.parametrize("make", [of_one_scale, of_many_scales, of_wide_numbers])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
def test_quantized_tensors_are_refused_as_what_they_are(
    make: Callable[[], Any], is_zip: bool, name: str, tmp_path: Path
) -> None:
    state = {"fc.weight": make(), "fc.bias": torch.randn(4)}
    source = tmp_path / "source"
    source.mkdir()
    torch.save(state, source / name, _use_new_zipfile_serialization=is_zip)
    caught = refuse("tensors that torch quantized", source, tmp_path / "out", kind=UnsupportedError)
    assert "dequantize()" in caught.value.hint
    assert caught.value.exit_status == 3
    assert not (tmp_path / "out").exists()


def test_tensors_of_torchao_are_refused_as_what_they_are(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="tensors that torchao quantized"):
        ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out")
    (problem,) = ckptkit.inspect(tmp_path).problems
    assert (problem.code, problem.where) == ("unsupported", "0.weight")


def test_the_hint_for_four_bits_of_torchao_gives_the_weight(tmp_path: Path) -> None:
    """These classes have no `dequantize`, and their order is that of a kernel."""
    four_bits = pytest.importorskip("torchao.prototype.quantization.int4")
    model = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False))
    original = model[0].weight.detach().clone()
    config = four_bits.PrototypeInt4WeightOnlyConfig(group_size=32)
    pytest.importorskip("torchao.quantization").quantize_(model, config)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(UnsupportedError, match="tensors that torchao quantized") as caught:
        ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out")
    proposed = str(caught.value.hint).split("`")[1]
    tensor = model.state_dict()["0.weight"]
    unpacked = eval(proposed, {"torch": torch, "tensor": tensor})  # noqa: S307 - as the hint says
    assert type(unpacked) is torch.Tensor
    assert unpacked.shape == original.shape
    assert (unpacked - original).norm() < 0.1 * original.norm()
