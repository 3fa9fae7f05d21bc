"""The user's mapping: what is taken, what is refused, and what becomes of it."""

from __future__ import annotations

import copy
import io
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.training.save.file_layout import plan_save
from ckptkit.training.state import objects as rng
from ckptkit.training.state.collect import BoundState, Layout, bind, kind_of, leaves
from ckptkit.training.state.dtensors import memory_layout
from ckptkit.training.state.pieces import Holdings, select_owned


class Loader:
    def __init__(self) -> None:
        self.at = {"seen": [3]}

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return self.at

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state


class Average:
    def __init__(self, shadow: dict[str, Any]) -> None:
        self.shadow = shadow

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


class WithExtras(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "table": torch.full((2,), self.seen)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def whole_state() -> dict[str, Any]:
    first, second = nn.Linear(3, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    first(torch.ones(3)).sum().backward()
    optimizer.step()
    return {
        "model": [first, second],
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        "dataloader": Loader(),
        "progress": {"epoch": 4, "losses": [1.0, 2.0]},
    }


def holdings(state: dict[str, Any], layout: Layout = "accelerate", rank: int = 0) -> Holdings:
    return bind(state, layout=layout, rank=rank, world_size=2).holdings(5)


def opened(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # noqa: TID251 - our own bytes


def test_the_layout_of_accelerate_has_a_place_for_everything() -> None:
    found = holdings(whole_state())
    assert {piece.unit for piece in found.pieces} == {
        "pytorch_model_fsdp_0",
        "pytorch_model_fsdp_1",
        "optimizer_0",
    }
    files = {file.path: opened(file.data) for file in found.files}
    assert sorted(files) == [
        "ckptkit/dataloader_0_rank_0.bin",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
        "scaler.pt",
        "scheduler.bin",
    ]
    assert files["custom_checkpoint_0.pkl"] == {"epoch": 4, "losses": [1.0, 2.0]}
    assert files["scaler.pt"]["scale"] == 8.0
    assert files["random_states_0.pkl"]["step"] == 5


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("layout", ["accelerate", "trainer"])
def test_a_state_dict_in_the_place_of_its_model_or_optimizer_is_refused(layout: Layout) -> None:
    model, optimizer = stepped()
    weights = model.state_dict()
    for state, where, kind in (
        ({"model": weights}, "model", "model"),
        ({"model": dict(weights)}, "model", "model"),
        ({"models": [weights, model.state_dict()], "counts": {"seen": 1}}, "models", "model"),
        ({"model": model, "optimizer": optimizer.state_dict()}, "optimizer", "optimizer"),
    ):
        with pytest.raises(UsageError, match="stored as a Python object") as caught:
            bind(state, layout=layout, rank=0, world_size=1)
        assert caught.value.where == where
        assert caught.value.hint == f"pass the {kind} itself, without state_dict()"


def test_state_dicts_that_are_read_as_tensors_or_beside_a_model_are_kept() -> None:
    model, optimizer = stepped()
    weights = model.state_dict()
    whole = holdings({"model": weights, "optimizer": optimizer.state_dict()}, "dcp")
    assert {"model.weight", "model.bias"} <= {
        ".".join(map(str, piece.key_path)) for piece in whole.pieces
    }
    beside = holdings({"model": model, "average": weights, "counts": {}})
    files = {file.path: file.data for file in beside.files}
    assert torch.equal(opened(files["custom_checkpoint_0.pkl"])["weight"], weights["weight"])


def test_other_ranks_write_only_what_is_theirs() -> None:
    found = holdings(whole_state(), rank=1)
    assert [file.path for file in found.files] == [
        "ckptkit/dataloader_0_rank_1.bin",
        "random_states_1.pkl",
    ]
    assert not found.objects


def test_the_layout_of_dcp_has_the_keys_of_the_mapping() -> None:
    state = whole_state()
    found = holdings(state, "dcp")
    nested = {
        "model": [module.state_dict() for module in state["model"]],
        "scheduler": state["scheduler"].state_dict(),
        "scaler": state["scaler"].state_dict(),
        "progress": state["progress"],
    }
    expected = set(flatten_state_dict(nested)[1].values()) | {("dataloader", "0"), ("rng", "0")}
    keys = {piece.key_path for piece in found.pieces} | {one.key_path for one in found.objects}
    assert {path for path in keys if path[0] != "optimizer"} == expected
    assert ("optimizer", "state", "weight", "exp_avg") in keys
    assert ("optimizer", "param_groups", 0, "lr") in keys
    assert not found.files
    assert {piece.unit for piece in found.pieces} == {""}


def test_later_changes_do_not_reach_files() -> None:
    state = whole_state()
    found = holdings(state)
    state["progress"]["losses"].append(777.0)
    state["dataloader"].at["seen"].append(777)
    values = [opened(file.data) for file in found.files]
    assert "777" not in str([value for value in values if "random_state" not in str(value)])


def test_a_walk_that_finds_all_tensors_in_place_gives_pieces_of_the_same_origin() -> None:
    state = whole_state()
    bound = bind(state, layout="accelerate", rank=0, world_size=1)
    first, second = bound.holdings(1), bound.holdings(2)
    for one, two in zip(first.pieces, second.pieces, strict=True):
        assert one.origin is two.origin
        assert memory_layout(one.local) == memory_layout(two.local)


def test_a_tensor_that_moved_is_found_where_it_is_now() -> None:
    state = whole_state()
    bound = bind(state, layout="accelerate", rank=0, world_size=1)
    bound.holdings(1)
    weight = state["model"][0].weight
    moved = weight.data.clone()
    weight.data = moved
    average = torch.zeros(2, 3)
    state["optimizer"].state[weight]["exp_avg"] = average
    found = {(piece.unit, piece.key): piece.local for piece in bound.holdings(2).pieces}
    assert found["pytorch_model_fsdp_0", "model.weight"].data_ptr() == moved.data_ptr()
    local = found["optimizer_0", "optimizer.state.weight.exp_avg"]
    assert local.data_ptr() == average.data_ptr()


def keys_of(bound: BoundState) -> set[str]:
    return {piece.key.removeprefix("model.") for piece in bound.holdings(1).pieces}


def test_modules_that_come_go_or_are_replaced_are_noticed() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    bound = bind({"model": model}, layout="dcp", rank=0, world_size=1)
    assert keys_of(bound) == {"0.weight", "1.weight"}
    model[1] = head = nn.Linear(2, 2, bias=False)
    found = {piece.key: piece.local for piece in bound.holdings(2).pieces}
    assert found["model.1.weight"].data_ptr() == head.weight.data_ptr()
    model.add_module("extra", nn.BatchNorm1d(2, affine=False))
    more = {"extra.running_mean", "extra.running_var", "extra.num_batches_tracked"}
    assert keys_of(bound) == {"0.weight", "1.weight"} | more
    del model.extra
    model.last, model[1] = model[1], nn.Identity()
    assert keys_of(bound) == {"0.weight", "last.weight"}
    model[0].other, model[0].weight = model[0].weight, None
    assert keys_of(bound) == {"0.other", "last.weight"}
    model.late = nn.Parameter(torch.ones(1))
    model[0].register_buffer("scale", torch.ones(1))
    assert keys_of(bound) == {"0.other", "0.scale", "last.weight", "late"}


def test_a_module_that_got_a_second_name_is_a_tie() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    bound = bind({"model": model}, layout="dcp", rank=0, world_size=1)
    bound.holdings(1)
    model.add_module("again", model[0])
    (piece,) = bound.holdings(2).pieces
    assert piece.aliases == (("model", "again.weight"),)


def test_a_frozen_tensor_that_was_cut_otherwise_in_place_is_looked_at_again() -> None:
    model: Any = nn.Linear(4, 4, bias=False).requires_grad_(requires_grad=False)
    model.register_buffer("table", torch.arange(16.0))
    bound = bind({"model": model}, layout="dcp", rank=0, world_size=1)
    before = bound.holdings(1).pieces
    model.weight.as_strided_((4, 4), (1, 4))
    model.table.resize_(4)
    found = bound.holdings(2).pieces
    assert all(one is not two for one, two in zip(before, found, strict=True))
    assert [piece.shape for piece in found] == [(4, 4), (4,)]
    assert torch.equal(found[0].local, model.weight)
    assert [tuple(piece.local.shape) for piece in before] == [(4, 4), (16,)]


def test_a_sparse_buffer_is_refused_with_its_name() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    bound = bind({"model": model}, layout="dcp", rank=0, world_size=1)
    for _ in range(2):
        pieces = bound.holdings(1).pieces
        with pytest.raises(UnsupportedError, match=r"^model\.graph: expected a dense tensor"):
            plan_save(pieces, select_owned(pieces), rank=0)


def test_memory_that_training_has_let_go_of_is_not_kept() -> None:
    state = whole_state()
    model, optimizer = state["model"][0], state["optimizer"]
    bound = bind(state, layout="accelerate", rank=0, world_size=1)
    bound.holdings(1)
    old = [optimizer.state[model.weight]["exp_avg"], state["model"][1].weight]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in old]
    gone = [weakref.ref(piece.local) for piece in bound.holdings(2).pieces]
    del old
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state["model"][1].weight = nn.Parameter(torch.ones(2, 2))
    assert [storage() for storage in storages] == [None, None]
    assert any(piece() is None for piece in gone)
    found = {piece.key: piece.local for piece in bound.holdings(3).pieces}
    average = optimizer.state[model.weight]["exp_avg"]
    assert found["optimizer.state.weight.exp_avg"].data_ptr() == average.data_ptr()


def test_states_of_parameters_that_an_optimizer_no_longer_has_are_left_out() -> None:
    state = whole_state()
    bound = bind(state, layout="accelerate", rank=0, world_size=1)
    bound.holdings(1)
    del state["optimizer"].param_groups[0]["params"][1]
    keys = {piece.key for piece in bound.holdings(2).pieces if piece.unit == "optimizer_0"}
    assert keys == {f"optimizer.state.weight.{name}" for name in ("step", "exp_avg", "exp_avg_sq")}


def test_a_state_that_another_parameter_has_got_is_saved_under_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    first, second = model.parameters()
    optimizer.state[first]["momentum_buffer"] = torch.ones(2, 2)
    bound = bind({"model": model, "optimizer": optimizer}, layout="dcp", rank=0, world_size=1)
    assert "optimizer.state.0.weight.momentum_buffer" in keys_of(bound)
    optimizer.state[second] = optimizer.state.pop(first)
    assert "optimizer.state.1.weight.momentum_buffer" in keys_of(bound)


def test_a_buffer_is_saved_once_it_is_persistent_and_no_longer_if_it_is_not() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.ones(2), persistent=False)
    bound = bind({"model": model}, layout="dcp", rank=0, world_size=1)
    assert "table" not in keys_of(bound)
    model._non_persistent_buffers_set.discard("table")
    assert "table" in keys_of(bound)
    model._non_persistent_buffers_set.add("table")
    assert "table" not in keys_of(bound)


def test_two_states_with_the_same_objects_have_the_same_leaves() -> None:
    first, second, plain = nn.Linear(1, 1), nn.Linear(1, 1), {"n": 1}
    one = leaves({"model": [first, second], "extra": plain}, "dcp")
    assert one == (("model", 0, first), ("model", 1, second), ("extra", None, plain))
    other = leaves({"model": [first, nn.Linear(1, 1)], "extra": plain}, "dcp")
    assert one[1][2] is not other[1][2]


def test_values_of_modules_are_read_anew_for_each_save() -> None:
    model = WithExtras()
    bound = bind({"model": model}, layout="dcp", rank=0, world_size=1)
    bound.holdings(1)
    model.seen = 7
    found = bound.holdings(2)
    assert [value.value for value in found.objects if value.key_path[0] == "model"] == [7]
    tensors = {piece.key: piece.local.tolist() for piece in found.pieces}
    assert tensors == {"model.weight": [1.0] * 3, "model._extra_state.table": [7, 7]}


def test_ties_are_one_piece_with_both_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    bound = bind({"model": model}, layout="accelerate", rank=0, world_size=1)
    (piece,) = bound.pieces()
    assert piece.aliases == (("model", "1.weight"),)
    assert bound.facts()["models"]["model"]["tied"] == [["0.weight", "1.weight"]]


@pytest.mark.usefixtures("alone")
def test_an_average_on_a_mesh_gets_a_directory_of_its_own() -> None:
    mesh = init_device_mesh("cpu", (1,))
    shadow = {"weight": distribute_tensor(torch.ones(3), mesh, [Shard(0)]), "decay": 0.9}
    bound = bind({"ema": Average(shadow)}, layout="accelerate", rank=0, world_size=1)
    found = bound.holdings(1)
    assert [(piece.unit, piece.key) for piece in found.pieces] == [("ema_0", "ema.weight")]
    assert [(value.unit, value.value) for value in found.objects] == [("ema_0", 0.9)]
    assert [file.path for file in found.files] == ["random_states_0.pkl"]


def test_an_optimizer_that_never_stepped_has_no_state_and_is_not_stepped() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    found = bind(
        {"model": model, "optimizer": optimizer}, layout="accelerate", rank=0, world_size=1
    ).holdings(0)
    assert all(piece.unit.startswith("pytorch_model") for piece in found.pieces)
    assert not optimizer.state
    params = [value.value for value in found.objects if value.key_path[-1] == "params"]
    assert params == [["weight", "bias"]]


@pytest.mark.parametrize(
    ("state", "where", "words"),
    [
        ({"step": 5}, "step", "state_dict"),
        ({"loader": DataLoader(torch.utils.data.TensorDataset())}, "loader", "state_dict"),
        ({"a/b": {}}, "", "a/b"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "optimizer", "no model"),
        (
            {
                "model": nn.Linear(1, 1),
                "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters()),
            },
            "optimizer",
            "belongs to no",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_name_and_a_hint(
    state: dict[str, Any], where: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        bind(state, layout="accelerate", rank=0, world_size=1)
    assert caught.value.where == where
    assert caught.value.hint


def test_the_same_model_twice_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="'model'"):
        bind({"model": model, "ema": [model]}, layout="accelerate", rank=0, world_size=1)


def test_two_parameters_of_one_name_in_one_optimizer_are_refused() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
    with pytest.raises(UsageError, match="weight"):
        bind(
            {"model": [first, second], "optimizer": optimizer},
            layout="accelerate",
            rank=0,
            world_size=1,
        )


def test_the_key_of_the_random_states_is_taken_in_the_layout_of_dcp() -> None:
    with pytest.raises(UsageError, match="taken"):
        bind({"rng": {"a": 1}}, layout="dcp", rank=0, world_size=1)


def test_a_wrapper_of_a_scheduler_is_a_scheduler() -> None:
    class Wrapper:
        def get_last_lr(self) -> list[float]:
            return [0.1]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    assert kind_of("x", Wrapper()) == "scheduler"
    assert kind_of("x", torch.amp.GradScaler("cpu")) == "scaler"


def test_random_numbers_go_on_where_they_were() -> None:
    captured = opened(_saved(rng.capture()))
    draw = (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: S311
    rng.restore(captured)
    assert draw == (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: S311


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_buffers_of_one_memory_of_which_one_is_conjugated_stay_apart() -> None:
    model: Any = nn.Linear(1, 1)
    model.register_buffer("plain", torch.tensor([1 + 2j, 3 - 1j]))
    model.register_buffer("turned", model.plain.conj())
    bound = bind({"model": model}, layout="dcp", rank=0, world_size=1)
    for step in (1, 2, 3):
        found = {piece.key_path[-1]: piece.local.tolist() for piece in bound.holdings(step).pieces}
        assert found["plain"] == [1 + 2j, 3 - 1j]
        assert found["turned"] == [1 - 2j, 3 + 1j]
