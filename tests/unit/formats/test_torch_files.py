"""Reading `.pt` and `.bin` files into an index, without torch."""

from __future__ import annotations

import collections
import json
import posixpath
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.core.errors import FormatError, InputError, LimitError
from ckptkit.core.index import TensorIndex
from ckptkit.formats.base import Candidate
from ckptkit.formats.pickle.pickles import walk_values
from ckptkit.formats.torch_files import TorchFileReader
from tests.files_in_memory import read_files, saved, tensor_at


def read_one(value: object) -> tuple[TensorIndex, dict[str, torch.Tensor]]:
    """Reads a saved value back: its index, and its tensors from the places in the index."""
    files = {"model.pt": saved(value)}
    index = read_files(TorchFileReader, files)
    return index, {key: tensor_at(index, key, files) for key in index.tensors}


def names(*paths: str) -> list[tuple[str, ...]]:
    return [candidate.files for candidate in TorchFileReader().find(paths)]


def test_a_state_dict_comes_back_with_names_and_values() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    index, tensors = read_one(model.state_dict())
    assert list(tensors) == list(model.state_dict())
    assert all(torch.equal(tensors[k], v) for k, v in model.state_dict().items())
    assert {e.part for e in index.tensors.values()} == {"model"}
    assert {e.tree for e in index.tensors.values()} == {""}
    assert (index.format, index.aliases, index.values) == ("torch", (), {})


def test_tensors_in_nested_containers_are_found_with_their_paths() -> None:
    value = {
        "model": collections.OrderedDict(weight=torch.arange(6.0).reshape(2, 3)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.5}]},
        "more": [torch.zeros(1), (torch.ones(2, dtype=torch.int64), "text")],
        "epoch": 3,
    }
    index, tensors = read_one(value)
    assert {key: entry.key_path for key, entry in index.tensors.items()} == {
        "model.weight": ("model", "weight"),
        "optimizer.state.0.step": ("optimizer", "state", 0, "step"),
        "more.0": ("more", 0),
        "more.1.0": ("more", 1, 0),
    }
    assert index.values == {
        ("optimizer", "param_groups", 0, "lr"): 0.5,
        ("more", 1, 1): "text",
        ("epoch",): 3,
    }
    assert tensors["model.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert index.tensors["model.weight"].tree == "model"  # type: ignore[index]
    assert index.tensors["optimizer.state.0.step"].part == "optimizer"  # type: ignore[index]


def test_a_tensor_in_no_container_is_found() -> None:
    _, tensors = read_one(torch.arange(3))
    assert tensors["tensor"].tolist() == [0, 1, 2]


def test_views_of_one_storage_have_one_record_and_their_own_places() -> None:
    base = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    views = {"base": base, "again": base, "row": base[2], "column": base[:, 1], "turned": base.t()}
    index, tensors = read_one(views)
    assert len(index.records) == 1
    assert all(torch.equal(tensors[name], view) for name, view in views.items())
    assert index.aliases == (frozenset({"base", "again"}),)
    strides = {key: entry.chunks[0].strides for key, entry in index.tensors.items()}
    assert strides == {"base": None, "again": None, "row": None, "column": (6,), "turned": (1, 6)}


def test_tied_parameters_are_aliases() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    index, _ = read_one(model.state_dict())
    assert index.aliases == (frozenset({"a.weight", "b.weight"}),)


def test_empty_tensors_are_nobodys_alias() -> None:
    empty = torch.zeros(0, 3)
    index, _ = read_one({"a": empty, "b": empty})
    assert index.aliases == ()


def test_plain_python_values_are_kept_inert() -> None:
    value = {
        "rng": np.random.default_rng(0).bit_generator.state["bit_generator"],
        "scalar": np.float64(0.5),
        "bytes": b"\x00\xff",
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "ids": list(range(1000)),
        "set": {1},
        "empty": {},
    }
    index = read_files(TorchFileReader, {"state.pt": saved(value)})
    assert index.values["bytes",] == b"\x00\xff"
    assert index.values["size",] == (2, 3)
    assert index.values["ids",] == list(range(1000))
    assert index.values["empty",] == {}
    assert set(index.values) == {(key,) for key in value}


def test_a_sharded_model_is_read_through_its_index() -> None:
    parts = [{"a.weight": torch.ones(2)}, {"b.weight": torch.zeros(3)}]
    files = {f"m/pytorch_model-0000{i + 1}-of-00002.bin": saved(p) for i, p in enumerate(parts)}
    weight_map = {"a.weight": "pytorch_model-00001-of-00002.bin"}
    weight_map["b.weight"] = "pytorch_model-00002-of-00002.bin"
    files["m/pytorch_model.bin.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    index = read_files(TorchFileReader, files)
    assert sorted(index.tensors) == ["a.weight", "b.weight"]
    assert sorted(file.path for file in index.files) == sorted(files)
    assert tensor_at(index, "b.weight", files).tolist() == [0, 0, 0]


def test_files_of_the_optimizer_and_the_trainer_are_no_models() -> None:
    own = ["optimizer.bin", "optimizer.pt", "optimizer_1.bin", "scheduler.bin", "scheduler.pt"]
    own += ["scaler.pt", "rng_state_0.pth", "rng_state.pth", "random_states_0.pt"]
    own += ["training_args.bin", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert names("model.pt", *own, *(f"a/{name}" for name in own)) == [("model.pt",)]


def test_files_are_grouped_as_they_belong_together() -> None:
    assert names("a.pt", "b.pth", "c.ckpt", "d.bin", "e.txt", "f.safetensors") == [
        ("a.pt",),
        ("b.pth",),
        ("c.ckpt",),
        ("d.bin",),
    ]
    pieces = ("m/pytorch_model-00001-of-00002.bin", "m/pytorch_model-00002-of-00002.bin")
    index = "m/pytorch_model.bin.index.json"
    assert names("m/other.pt", index, *pieces) == [(*pieces, index), ("m/other.pt",)]


def test_what_is_no_archive_is_refused() -> None:
    for data in (b"", b"x", b"GGUF" + bytes(100), bytes(1000)):
        with pytest.raises(FormatError):
            read_files(TorchFileReader, {"m.bin": data})


def test_containers_that_hold_themselves_are_refused() -> None:
    cycle: list[Any] = [torch.zeros(1)]
    cycle.append(cycle)
    with pytest.raises(InputError):
        read_files(TorchFileReader, {"m.pt": saved(cycle)})


def test_shared_containers_cannot_explode() -> None:
    value: list[Any] = [torch.zeros(1)]
    for _ in range(30):
        value = [value, value]
    with pytest.raises(LimitError, match=r"unfolds into more than|far longer than"):
        read_files(TorchFileReader, {"m.pt": saved(value)})


def test_long_names_cannot_multiply() -> None:
    value: Any = [torch.zeros(1)] * 20_000
    for _ in range(8):
        value = {"k" * 100_000: value}
    with pytest.raises(LimitError, match="names of tensors are far longer than the pickle"):
        read_files(TorchFileReader, {"m.pt": saved(value)})


def test_two_tensors_of_one_dotted_name_are_refused() -> None:
    with pytest.raises(FormatError, match=r"'a\.b'"):
        read_files(
            TorchFileReader, {"m.pt": saved({"a.b": torch.zeros(1), "a": {"b": torch.zeros(2)}})}
        )


def test_a_walk_is_in_order_and_names_rare_keys() -> None:
    root = {"b": [1, {True: 2, None: 3, 1.5: 4}], "a": (), 7: {(1, 2): "x"}}
    assert list(walk_values(root, limit=100, where="x")) == [
        (("b", 0), 1),
        (("b", 1, "True"), 2),
        (("b", 1, "None"), 3),
        (("b", 1, "1.5"), 4),
        (("a",), ()),
        ((7, "<key 0>"), "x"),
    ]


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; import ckptkit.formats.torch_files, ckptkit.formats.safetensors.reader;"
        "print('torch' in sys.modules, 'safetensors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_the_reason_names_the_file() -> None:
    (found,) = TorchFileReader().find(["m/pytorch_model.bin"])
    assert found == Candidate("torch", "m", ("m/pytorch_model.bin",), "'pytorch_model.bin'")
    assert posixpath.dirname(found.files[0]) == found.folder
