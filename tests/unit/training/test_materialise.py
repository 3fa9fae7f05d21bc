"""Giving memory to models on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ckptkit.core.errors import ResumeError
from ckptkit.training.load.materialise import materialise


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
