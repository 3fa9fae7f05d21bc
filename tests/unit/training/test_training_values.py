"""What training frameworks put beside weights, and tensors of classes of their own."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptkit.core.errors import UnsafePickleError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.pickle.machine import InertObject
from ckptkit.formats.torch_files import TorchFileReader
from ckptkit.formats.trees import detect_framework, detect_framework_by_paths
from ckptkit.storage.overlay import MemorySource


def read(value: object) -> TensorIndex:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    files = {"m.pt": buffer.getvalue()}
    (candidate,) = TorchFileReader().find(list(files))
    return TorchFileReader().read_index(MemorySource(files), candidate)


def test_parameters_and_buffers_with_attributes_are_plain_tensors() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    tensor.note = parameter.note = "mine"  # type: ignore[attr-defined]
    index = read({"a": tensor, "b": parameter, "c": torch.nn.Buffer(torch.ones(4))})
    assert {key: entry.shape for key, entry in index.tensors.items()} == {
        "a": (2,),
        "b": (3,),
        "c": (4,),
    }


def _sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def _meta() -> torch.Tensor:
    return torch.ones(2, device="meta")


@pytest.mark.parametrize(("make", "kind"), [(_sparse, "sparse"), (_meta, "'meta'")])
def test_tensors_that_are_not_plain_are_refused_by_kind_where_they_are_wanted(
    make: Callable[[], torch.Tensor], kind: str
) -> None:
    (problem,) = read({"a": make(), "b": torch.ones(1)}).problems
    assert (problem.code, problem.where) == ("unsupported", "a")
    assert kind in problem.message
    index = read({"model": {"b.weight": torch.ones(1)}, "hyper_parameters": {"a": make()}})
    assert index.problems == ()
    assert "hyper_parameters.a" in index.run.warnings[0]


def test_hyperparameters_are_kept_inert_and_run_nothing() -> None:
    make = functools.partial(torch.optim.AdamW, lr=0.1)
    later = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    index = read({"hyper_parameters": {"make": make, "later": later}, "w": torch.ones(1)})
    kept = index.values["hyper_parameters", "make"]
    assert isinstance(kept, InertObject)
    assert str(kept.cls) == "functools.partial"


def test_a_partial_of_anything_else_is_refused() -> None:
    with pytest.raises(UnsafePickleError, match="exec"):
        read({"make": functools.partial(exec, "1/0")})


@pytest.mark.parametrize(
    ("root", "name", "version", "step"),
    [
        ({"pytorch-lightning_version": "1.9", "global_step": 7}, "Lightning Trainer", "1.9", 7),
        ({"pytorch-lightning_version": [1], "global_step": -1}, "Lightning Trainer", "", None),
        ({"iteration": 3, "step": "x"}, "", "", 3),
        ({"step": True}, "", "", None),
        ({"step": 10**20}, "", "", None),
        ([1], "", "", None),
    ],
)
def test_a_file_tells_who_wrote_it_and_at_which_step(
    root: Any, name: str, version: str, step: int | None
) -> None:
    found = detect_framework(root)
    assert (found.name, found.version, found.step) == (name, version, step)


def test_torchtitan_is_known_by_the_keys_of_its_step_folders() -> None:
    keys = [("train_state", "step"), ("lr_scheduler",), ("optimizer", "x"), ("a.weight",)]
    assert detect_framework_by_paths(keys).name == "torchtitan"
    assert detect_framework_by_paths(keys[1:]).name == ""
