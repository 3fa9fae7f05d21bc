"""Numbers of models that PEFT trains: an adapter and its base, together and apart."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ckptkit
from ckptkit.conversion.inspect import run_inspection
from ckptkit.report.page import plan_inspection_report
from ckptkit_cli.main import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
APART = FIXTURES / "peft_trl_fsdp2_ckptkit/checkpoint"  # base and adapter in two state dicts
PARTS = ("base_model_0", "pytorch_model_fsdp_0")
TOGETHER = FIXTURES / "peft_fsdp2/checkpoint"
PACKED = FIXTURES / "peft_qdora_fsdp2_ckptkit/checkpoint"


@pytest.mark.parametrize("source", [APART, TOGETHER, PACKED])
@pytest.mark.quick("source0")
def test_an_adapter_and_its_base_are_measured_together_and_shown_apart(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = ckptkit.stats(source)
    assert set(found.norms) == {"adapter", "base"}
    assert {tensor.role for tensor in found.tensors} == {"adapter", "base"}
    for role, norm in found.norms.items():
        own = [tensor.norm or 0 for tensor in found.tensors if tensor.role == role]
        assert norm == pytest.approx(math.hypot(*own))
    assert all(tensor.role == "adapter" for tensor in found.tensors if "lora_" in tensor.name)
    assert all(tensor.role == "base" for tensor in found.tensors if "base_layer" in tensor.name)
    assert main(["stats", str(source), "--all"]) == 0
    lines = [line.split()[:4] for line in capfd.readouterr().out.splitlines()]
    assert ["total", "of", "the", "adapter"] in lines
    assert ["total", "of", "the", "base"] in lines


def test_each_of_both_is_selected() -> None:
    whole = ckptkit.stats(APART)
    parts = [ckptkit.stats(APART, select=part) for part in PARTS]
    assert len(whole.tensors) == sum(len(part.tensors) for part in parts)
    assert [{tensor.role for tensor in part.tensors} for part in parts] == [{""}, {"adapter"}]
    assert ckptkit.stats(APART, include=["*lora_A*"]).elements == 136


def test_two_steps_are_compared_with_what_differs_in_adapter_and_base(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(APART, tmp_path / "run")
    assert ckptkit.diff(APART, other).roles == {"adapter": (9, 9), "base": (12, 12)}
    for part, count in zip(PARTS, (12, 9), strict=True):
        assert ckptkit.diff(APART, other, select=part).equal == count
        assert main(["diff", str(APART), str(other), "--select", part]) == 0
    assert ckptkit.diff(APART, other, select=list(PARTS)).only_in_a
    capfd.readouterr()
    assert main(["diff", str(APART), str(other)]) == 0
    page = capfd.readouterr().out
    assert "adapter: 9 of 9 tensors equal" in page
    assert "base: 12 of 12 tensors equal" in page
    assert main(["diff", str(APART), str(other), "--select", "nowhere"]) == 4
    assert main(["diff", str(APART), str(other), *(3 * ["--select", PARTS[0]])]) == 2


def test_parameters_of_a_packed_base_are_those_of_the_model_before() -> None:
    found = ckptkit.stats(PACKED)
    base = load_file(FIXTURES / "peft_qdora_fsdp2_ckptkit/base/model.safetensors")
    own = [t for t in found.tensors if t.role == "base"]
    assert sum(t.parameters for t in own) == sum(tensor.numel() for tensor in base.values())
    assert (found.nan, found.infinite) == (0, 0)  # codes in columns of bfloat16 are no numbers
    assert {t.label for t in own} == {"4-bit", "scales", "settings", ""}
    assert {t.label for t in found.tensors if "lora_A" in t.name} == {"rank 4"}


@pytest.mark.parametrize("source", [APART, TOGETHER, PACKED])
@pytest.mark.quick("source1")
def test_a_page_with_numbers_labels_the_tensors_of_a_peft_run(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["inspect", str(source), "--html", str(page), "--stats", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert {line.get("role") for line in shown["tensors"]} >= {"adapter", "base"}
    statistics = ckptkit.stats(source)
    inspection = run_inspection(source)
    content = plan_inspection_report(inspection, statistics=statistics).content
    labels = content["labels"]
    lines = [line for line in inspection.tensors if line.part == "model"]
    assert sum(label.startswith("adapter, rank") for label in labels.values()) == sum(
        "lora_" in line.name and "magnitude" not in line.name for line in lines
    )
    counts = content["parameters"]
    total = sum(
        counts.get(position, math.prod(line.shape))
        for position, line in enumerate(inspection.tensors)
        if line.part == "model"
    )
    assert total == statistics.parameters
