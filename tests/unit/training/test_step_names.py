"""Names without wrappers, and key paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.nn.parallel import DistributedDataParallel

from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.objects import flatten
from ckptkit.training.step_names import TensorPlaces, clean_fqn, wrapper_names


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)  # a user's own name, no wrapper's


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.backbone = inner


def names_of(model: nn.Module) -> list[str]:
    view = ModelWalk(model, TensorPlaces("", ()), world=Copies()).look()
    return [piece.key for piece in view.pieces]


CLEAN = ["backbone.module.weight", "backbone.module.bias"]


@pytest.mark.slow  # for the import
def test_parameters_of_a_model_in_lightning_fabric_have_the_names_of_its_state_dict() -> None:
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    model = wrappers._FabricModule(Outer(Inner()), strategy=None)
    assert [clean_fqn(name) for name, _ in model.named_parameters()] == list(model.state_dict())


@pytest.mark.usefixtures("alone")
def test_a_data_parallel_wrapper_leaves_no_trace_wherever_it_is() -> None:
    assert names_of(DistributedDataParallel(Outer(Inner()))) == CLEAN
    assert names_of(Outer(DistributedDataParallel(Inner()))) == CLEAN


@pytest.mark.usefixtures("alone")
def test_wrappers_in_wrappers_leave_no_trace() -> None:
    inner = Inner()
    wrapped: Any = checkpoint_wrapper(inner.module)
    inner.module = wrapped
    model = torch.compile(DistributedDataParallel(Outer(inner)), backend="eager")
    assert isinstance(model, nn.Module)
    assert names_of(model) == CLEAN
    found = wrapper_names(model)
    assert found == ["OptimizedModule", "DistributedDataParallel", "CheckpointWrapper"]


def test_an_adapter_keeps_its_names_and_loses_only_wrappers() -> None:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=2))
    expected = list(adapted.state_dict())
    assert names_of(torch.compile(adapted, backend="eager")) == expected  # type: ignore[arg-type]
    assert any("lora_A" in name for name in expected)


def test_a_name_is_cleaned_by_whole_segments() -> None:
    assert clean_fqn("my_orig_mod.weight") == "my_orig_mod.weight"
    assert clean_fqn("layers._checkpoint_wrapped_module") == "layers"


def test_paths_are_those_of_dcp() -> None:
    tensor = torch.ones(2)
    nested = {
        "state": {"a.b": {"step": tensor, "none": None, 3: 4}, "empty": {}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"]}, {"lr": [tensor, 2]}],
        "lists": [[1, 2], [3, [4]]],
        "deep": [[1, {"x": 5}]],
        "tuple": (tensor, {"y": 1}),
        "bare": [],
    }
    expected, mapping = flatten_state_dict(nested)
    found = list(flatten(nested))
    assert {".".join(map(str, path)): path for path, _ in found} == mapping
    assert all(value is expected[".".join(map(str, path))] for path, value in found)
