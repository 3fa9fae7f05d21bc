"""Which optimizer belongs to a model of a file, and what is refused where nothing says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ckptkit
from ckptkit.core.errors import CkptkitError, UsageError


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def saved(state: Mapping[str, Any], folder: Path) -> Path:
    torch.save(dict(state), folder / "run.pt")
    return folder / "run.pt"


def converted(source: Path, out: Path, select: str | None) -> dict[str, Any]:
    ckptkit.convert(source, out, to="torch", optimizer=True, select=select)
    found: dict[str, Any] = torch.load(out / "optimizer.bin")  # noqa: TID251
    states: dict[str, Any] = found["state"]
    return states


def test_the_optimizer_beside_a_model_is_its_own(tmp_path: Path) -> None:
    runs = {name: trained(seed) for seed, name in enumerate(("student", "teacher"))}
    state = {
        name: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for name, (model, optimizer) in runs.items()
    }
    source = saved(state, tmp_path)
    for name, (model, optimizer) in runs.items():
        states = converted(source, tmp_path / name, f"{name}.model")
        for parameter, tensor in model.named_parameters():
            assert torch.equal(states[parameter]["exp_avg"], optimizer.state[tensor]["exp_avg"])


@pytest.mark.parametrize(
    ("first", "second", "of_second"),
    [
        ("generator", "discriminator", "optimizer_d"),
        ("student", "teacher", "teacher_optimizer"),
    ],
)
def test_the_optimizer_of_another_model_is_not_taken(
    first: str, second: str, of_second: str, tmp_path: Path
) -> None:
    (one, _), (two, optimizer) = trained(0), trained(1)
    state = {first: one.state_dict(), second: two.state_dict()}
    source = saved({**state, of_second: optimizer.state_dict()}, tmp_path)
    with pytest.raises(CkptkitError, match=f"nothing says that optimizer '{of_second}' is of"):
        converted(source, tmp_path / "out", first)
    assert not (tmp_path / "out").exists()


def test_one_of_several_optimizers_of_a_model_is_not_taken_for_all(tmp_path: Path) -> None:
    model, _ = trained(0)
    halves = [
        torch.optim.AdamW([(name, p) for name, p in model.named_parameters() if name[0] == half])
        for half in "01"
    ]
    for half in halves:
        half.step()  # the gradients are still there
    state = {f"optimizer_{n}": half.state_dict() for n, half in enumerate(halves)}
    source = saved({"model": model.state_dict(), **state}, tmp_path)
    with pytest.raises(CkptkitError, match="holds several optimizers"):
        converted(source, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_an_average_beside_the_model_changes_nothing(tmp_path: Path) -> None:
    (model, optimizer), (average, _) = trained(0), trained(1)
    state = {"model": model.state_dict(), "ema": average.state_dict()}
    source = saved({**state, "optimizer": optimizer.state_dict()}, tmp_path)
    assert converted(source, tmp_path / "out", "model").keys() == model.state_dict().keys()


def test_rows_are_not_cut_from_weights_alone(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    source = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    with pytest.raises(UsageError, match="cannot be combined with --optimizer"):
        ckptkit.consolidate(source, tmp_path / "out", optimizer=True, vocab_size=3)


@pytest.mark.parametrize("layout", ["hf", "torch", "dcp"])
@pytest.mark.parametrize("held", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"exclude": ["*embed_tokens*"]}, "lm_head.weight"),
        ({"include": ["lm_head*"]}, "lm_head.weight"),
        ({"exclude": ["lm_head*"]}, "model.embed_tokens.weight"),
        ({}, "model.embed_tokens.weight"),
    ],
)
def test_the_state_of_a_tied_weight_follows_the_name_that_is_written(
    options: dict[str, Any], written: str, held: str, layout: Any, tmp_path: Path
) -> None:
    """The state was left out with the name that the optimizer has it by, and the weight stayed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=12,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    first = "model.embed_tokens.weight"
    named = {held if n == first else n: p for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(list(named.items()), lr=0.1)
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    config.save_pretrained(tmp_path)
    source = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    given: dict[str, Any] = {"config": tmp_path / "config.json", "optimizer": True}
    out = tmp_path / "out"
    ckptkit.convert(source, out, to=layout, **given, **options)
    if layout == "dcp":
        keys = dcp.FileSystemReader(out / "optimizer_0").read_metadata().state_dict_metadata
        states = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in keys}
        names = [held] if not options else [written]  # for training, which loads both names
        assert states & {held, written} == set(names)
        return
    found = torch.load(out / "optimizer.bin")  # noqa: TID251
    expected = optimizer.state[model.lm_head.weight]["exp_avg"]
    assert torch.equal(found["state"][written]["exp_avg"], expected)
    (group,) = found["param_groups"]
    assert sorted(group["params"]) == sorted(found["state"])
    assert {held, written} & set(group["params"]) == {written}
