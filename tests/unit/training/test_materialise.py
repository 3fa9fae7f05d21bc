"""Giving memory to models on the meta device, and state to optimizers that never stepped."""

from __future__ import annotations

import math

import msgspec.structs
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.errors import ResumeError
from ckptkit.core.index import Box, Chunk, ChunkTable, Key, RecordTable, TensorEntry, TensorIndex
from ckptkit.training.load.materialise import materialise
from ckptkit.training.resume.optimizers import allocate_state
from ckptkit.training.state.dtensors import Copies
from ckptkit.training.state.models import ModelWalk
from ckptkit.training.state.pieces import Replicas, whole_layout
from ckptkit.training.step_names import TensorPlaces


class Table(nn.Module):
    """Owns nothing but a buffer that no checkpoint holds."""

    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


class OwnTable(Table):
    def reset_parameters(self) -> None:
        self.get_buffer("angles").copy_(torch.arange(3.0))


def on_meta(table: type[Table] | None = None) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        if table is not None:
            model.append(table())
    return model


def test_meta_parameters_get_memory_and_stay_tied_and_optimized() -> None:
    model = on_meta()
    optimizer = AdamW(model.parameters())
    materialise([model], [optimizer])
    assert not any(p.is_meta for p in model.parameters())
    assert model[0].weight is model[1].weight
    ids = [id(p) for p in optimizer.param_groups[0]["params"]]
    assert ids == [id(p) for p in model.parameters()]


def test_what_is_there_is_not_touched() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    materialise([model], [])
    assert model.weight is weight


def test_unsaved_buffers_come_from_the_module_or_are_refused() -> None:
    model = on_meta(OwnTable)
    materialise([model], [])
    assert dict(model.named_buffers())["2.angles"].tolist() == [0, 1, 2]
    with pytest.raises(ResumeError, match=r"2\.angles"):
        materialise([on_meta(Table)], [])


def test_a_rotary_embedding_of_transformers_is_computed_again() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    real = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    materialise([model], [])
    for (name, found), (_, expected) in zip(
        model.named_buffers(), real.named_buffers(), strict=True
    ):
        assert torch.equal(found, expected), name


def index_of(states: dict[str, torch.Tensor]) -> TensorIndex:
    """An index of the optimizer states of these names, without any bytes."""
    tensors = {}
    for name, tensor in states.items():
        fqn, _, kind = name.rpartition("/")
        shape = tuple(tensor.shape)
        key = Key(f"optimizer.state.{fqn}.{kind}")
        tensors[key] = TensorEntry(
            key=key,
            key_path=("optimizer", "state", fqn, kind),
            name=key,  # type: ignore[arg-type]
            tree="",
            part="optimizer",
            dtype=dtype_named(str(tensor.dtype)),
            shape=shape,
            chunks=ChunkTable.of([Chunk(Box((0,) * len(shape), shape), 0)], len(shape)),
        )
    return TensorIndex("dcp", (), RecordTable.of([]), tensors)


def allocated(model: nn.Module, optimizer: Optimizer, states: dict[str, torch.Tensor]) -> None:
    slots = ModelWalk(model, TensorPlaces("", ("model",)), world=Copies()).look().slots
    allocate_state(optimizer, slots, index_of(states), ("optimizer",))


def test_state_is_made_as_the_checkpoint_has_it() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    states = {
        "weight/step": torch.tensor(0.0),
        "weight/exp_avg": torch.empty(2, 3, dtype=torch.bfloat16),
    }
    allocated(model, optimizer, states)
    state = optimizer.state[model.weight]
    assert state.keys() == {"step", "exp_avg"}
    assert (state["exp_avg"].dtype, state["exp_avg"].shape) == (torch.bfloat16, (2, 3))
    assert model.bias not in optimizer.state


@pytest.mark.parametrize("fused", [False, True])
def test_all_but_the_count_of_steps_lies_where_the_parameter_does(*, fused: bool) -> None:
    model = nn.Linear(3, 2, device="meta")
    optimizer = AdamW(model.parameters())
    optimizer.param_groups[0]["fused"] = fused
    states = {"weight/step": torch.tensor(0.0), "weight/norm": torch.zeros(1)}
    allocated(model, optimizer, states)
    state = optimizer.state[model.weight]
    assert state["norm"].is_meta
    assert state["step"].is_meta == fused


def test_the_padding_of_a_flat_parameters_state_is_zero() -> None:
    flat = nn.Parameter(torch.ones(4))
    slot = whole_layout("weight", torch.ones(3), Replicas(), Replicas())
    slots = {id(flat): (msgspec.structs.replace(slot, held=(4,), start=0, sharded=True),)}
    optimizer = SGD([flat], lr=1.0, momentum=0.9)
    torch.use_deterministic_algorithms(True)  # it fills memory that is not initialised
    try:
        allocate_state(
            optimizer, slots, index_of({"weight/momentum_buffer": torch.ones(3)}), ("optimizer",)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert optimizer.state[flat]["momentum_buffer"].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_state_that_is_there_is_kept_and_that_of_others_removed() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    allocated(model, optimizer, {"weight/momentum_buffer": torch.empty(2, 3)})
    assert optimizer.state[model.weight]["momentum_buffer"] is momentum
    assert model.bias not in optimizer.state


class Rows(Optimizer):
    """Keeps a number per row, whose place only the optimizer itself knows."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                state = self.state[parameter]
                state.setdefault("rows", torch.zeros(len(parameter)))
                parameter.data -= group["lr"] * math.pi


def test_state_of_another_shape_is_made_by_a_step_without_effect() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = Rows(model.parameters(), {"lr": 0.5})
    states = {"weight/rows": torch.empty(2), "bias/rows": torch.empty(2)}
    allocated(model, optimizer, states)
    assert optimizer.state[model.weight]["rows"].shape == (2,)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


class Flags(nn.Module):
    """Owns a parameter, a saved buffer, and buffers that no checkpoint holds."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self._computes = computes

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()
            self.get_buffer("count").fill_(7)
        if self._computes:
            self.get_buffer("mask").copy_(torch.tensor([True, False]))


def test_a_module_with_parameters_computes_its_masks_and_changes_nothing_else() -> None:
    first = Flags(computes=True)
    with torch.device("meta"):
        second = Flags(computes=True)
    model, kept = nn.Sequential(first, second), first.weight
    before = torch.random.get_rng_state()
    materialise([model], [])
    assert second.get_buffer("mask").tolist() == [True, False]
    assert first.weight is kept
    assert kept.tolist() == [0, 0]
    assert first.get_buffer("count").item() == 5
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.device("meta"):
        other = Flags(computes=False)
    with pytest.raises(ResumeError, match="mask"):
        materialise([other], [])


@pytest.mark.parametrize(
    "name",
    [
        "FalconH1ForCausalLM",
        pytest.param("CsmForConditionalGeneration", marks=pytest.mark.slow),
        "AyaVisionForConditionalGeneration",
    ],
)
def test_buffers_are_computed_by_inner_models_and_by_parents(name: str) -> None:
    small_models = pytest.importorskip("tests.small_models")
    kind = small_models.class_named(name)
    real = kind(small_models.small_model_config(kind))
    with torch.device("meta"):
        model = kind(small_models.small_model_config(kind))
    materialise([model], [])
    expected, saved = dict(real.named_buffers()), real.state_dict().keys()
    assert expected.keys() - saved
    for path, found in model.named_buffers():
        assert path in saved or torch.equal(found, expected[path]), path
