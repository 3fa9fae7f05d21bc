"""A resume finds what was saved by its name, gives modules their own values, and tells misfits."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from ckptkit.core.errors import CkptkitError, FormatError, ResumeError, UsageError
from ckptkit.training import Checkpointer
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.resume.resume import StepLoader, resume
from ckptkit.training.resume.stored_step import parse_facts
from ckptkit.training.state.collect import bind

LAYOUTS = ["accelerate", "dcp"]


def save(run: Path, state: dict[str, Any], layout: str = "accelerate", step: int = 1) -> None:
    with Checkpointer(run, layout=layout) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(step, state).result()


def load(run: Path, state: dict[str, Any], **options: Any) -> int | None:
    bound = bind(state, layout="accelerate", rank=0, world_size=1)
    return resume(bound, run, Peers(0, 1, LocalKeyValueStore(), ""), timeout_seconds=5, **options)


def pair(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    policy, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    first, second = SGD(policy.parameters(), 0.1 * seed), SGD(critic.parameters(), 0.2 * seed)
    return {
        "policy": policy,
        "critic": critic,
        "optimizers": [first, second],
        "slow": StepLR(first, 10 * seed),
        "fast": StepLR(second, seed),
        "seen": {"n": seed},
        "best": {"n": 100 * seed},
    }


def rates(state: dict[str, Any]) -> list[float]:
    return [one.param_groups[0]["lr"] for one in state["optimizers"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_decide_and_not_the_order(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = pair(1), pair(2)
    save(tmp_path, old, layout)
    load(tmp_path, dict(reversed(new.items())))
    for name in ("policy", "critic"):
        assert torch.equal(old[name].weight, new[name].weight)
    assert rates(new) == rates(old) == [0.1, 0.2]
    assert (new["slow"].step_size, new["fast"].step_size) == (10, 1)
    assert (new["seen"], new["best"]) == ({"n": 1}, {"n": 100})
    alone = pair(3)
    load(tmp_path, {"critic": alone["critic"], "best": alone["best"]})
    assert torch.equal(old["critic"].weight, alone["critic"].weight)
    assert alone["best"] == {"n": 100}
    left = "'fast', 'optimizers[0]', 'optimizers[1]', 'policy', 'seen', 'slow'"
    assert f"the step also holds {left}, which the state does not have" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_not_saved_under_its_name_is_refused(tmp_path: Path, layout: str) -> None:
    save(tmp_path, {"policy": nn.Linear(3, 3), "seen": {"n": 1}}, layout)
    with pytest.raises(ResumeError, match=r"'actor' was not saved .* 'policy', 'seen'"):
        load(tmp_path, {"actor": nn.Linear(3, 3)})
    with pytest.raises(ResumeError, match=r"'policy\[0\]' was not saved"):
        load(tmp_path, {"policy": [nn.Linear(3, 3)]})
    with pytest.raises(ResumeError, match=r"seen: a plain was saved .* has a model there"):
        load(tmp_path, {"seen": nn.Linear(3, 3)})


def test_entries_that_make_no_sense_are_damage(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"entries": [{}]}', '{"entries": [{"key": 1}]}'):
        with pytest.raises(FormatError, match="does not name what the step holds"):
            parse_facts(text.encode(), where="file")
    assert parse_facts(b"{}", where="file") == (None, False)
    assert StepLoader(tmp_path, bind({}, layout="dcp", rank=0, world_size=1)).stored.entries is None


class Counting(nn.Module):
    """Saves values beside its tensors."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_get_their_extra_state_back(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    values: list[Any] = [{"n": 5, "t": torch.ones(3), "of": {"a": [1, 2]}}, torch.arange(4), (1,)]
    save(tmp_path, {"model": nn.ModuleList(map(Counting, values))}, layout)
    fresh: list[Any] = [{"n": 0, "t": torch.zeros(2), "of": {}}, torch.zeros(1), None]
    model = nn.ModuleList(map(Counting, fresh))
    load(tmp_path, {"model": model})
    first, second, third = (module.get_extra_state() for module in model)
    assert (first["n"], first["of"], third) == (5, {"a": [1, 2]}, (1,))
    assert torch.equal(first["t"], values[0]["t"])
    assert torch.equal(second, values[1])
    plain = nn.ModuleList([nn.Module() for _ in values])
    for module in plain:
        module.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    load(tmp_path, {"model": plain})
    assert "'model.0._extra_state.n'" in caplog.text
    assert "no module of the model takes it" in caplog.text


def trained(kind: type[Optimizer], **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer: Any = kind(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("known", [True, False], ids=["class", "names"])
def test_another_optimizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    save(tmp_path, trained(SGD, momentum=0.9))
    if not known:
        monkeypatch.setattr(
            "ckptkit.training.resume.stored_step.parse_facts", lambda *_, **__: (None, False)
        )
    model = nn.Linear(3, 2)
    with pytest.raises(ResumeError, match=r"optimizer: the state of another .* against AdamW") as e:
        load(tmp_path, {"model": model, "optimizer": AdamW(model.parameters())})
    assert "'betas'" in str(e.value)
    with pytest.raises(ResumeError, match="against RMSprop"):
        load(tmp_path, {"model": model, "optimizer": RMSprop(model.parameters())})


def test_adam_is_not_adamw_and_a_class_of_the_same_names_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(AdamW):
        pass

    save(tmp_path, trained(AdamW))
    model = nn.Linear(3, 2)
    if "decoupled_weight_decay" in AdamW(model.parameters()).defaults:
        with pytest.raises(ResumeError, match=r"another optimizer, AdamW, .* against Adam"):
            load(tmp_path, {"model": model, "optimizer": Adam(model.parameters())})
    assert load(tmp_path, {"model": model, "optimizer": Mine(model.parameters())}) == 1
    assert "it was saved as AdamW and is resumed as Mine" in caplog.text


def step_of(state: dict[str, Any]) -> None:
    def closure() -> Any:
        state["optimizer"].zero_grad()
        loss = state["model"](torch.ones(1, 3)).pow(2).sum()
        loss.backward()
        return loss

    state["optimizer"].step(closure)


def test_lbfgs_goes_on_where_it_was(tmp_path: Path) -> None:
    torch.manual_seed(2)
    old: dict[str, Any] = {"model": nn.Linear(3, 2)}
    new: dict[str, Any] = {"model": nn.Linear(3, 2)}
    for state in (old, new):
        state["optimizer"] = LBFGS(state["model"].parameters(), lr=0.1, max_iter=3)
    step_of(old)
    save(tmp_path, old)
    load(tmp_path, new)
    for state in (old, new):
        step_of(state)
    assert torch.equal(old["model"].weight, new["model"].weight)


def test_a_conjugated_buffer_gets_the_values_that_were_saved(tmp_path: Path) -> None:
    old, new = nn.Module(), nn.Module()
    value = torch.complex(torch.rand(3), torch.rand(3))
    old.register_buffer("b", value.clone())
    new.register_buffer("b", torch.zeros(3, dtype=torch.complex64).conj())
    save(tmp_path, {"model": old})
    load(tmp_path, {"model": new})
    assert torch.equal(new.b, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_objects_of_empty_containers_come_back(tmp_path: Path, layout: str) -> None:
    save(tmp_path, {"a": {"v": {}}, "b": {"n": defaultdict(int, x=2)}}, layout)
    live: dict[str, Any] = {"a": {"v": {"old": 1}}, "b": {}}
    load(tmp_path, live)
    assert live == {"a": {"v": {}}, "b": {"n": {"x": 2}}}


def test_the_log_names_steps_when_their_turn_comes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    live: dict[str, Any] = {"a": {"n": 1}}
    assert load(tmp_path, live) is None
    assert "no step to resume from was found" in caplog.text
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, {"a": {"n": step}}).result()
    (tmp_path / "checkpoint-2/ckptkit.json").write_text("{")
    (tmp_path / "checkpoint-3/ckptkit.json").unlink()
    caplog.clear()
    assert load(tmp_path, live) == 4
    assert "is skipped" not in caplog.text
    assert "resumed from step 4: 0 B in" in caplog.text
    (tmp_path / "checkpoint-4/ckptkit.json").write_text("{")
    assert load(tmp_path, live) == 1
    order = [caplog.text.index(f"step {step} ") for step in (4, 3, 2)]
    assert order == sorted(order)
    assert "step 3 was not finished: it has no ckptkit.json" in caplog.text


@pytest.mark.parametrize("step", ["8", True, -1, 1.0])
def test_a_step_that_is_no_count_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match=r"step: is .* where a count of steps was expected"):
        load(tmp_path, {"a": {}}, step=step)


def test_a_step_that_is_not_complete_says_why(tmp_path: Path) -> None:
    save(tmp_path, {"a": {}})
    (tmp_path / "checkpoint-1/ckptkit.json").unlink()
    with pytest.raises(CkptkitError, match=r"not complete: it has no ckptkit\.json") as caught:
        load(tmp_path, {"a": {}}, step=1)
    assert "ckptkit inspect" in caught.value.hint


def test_steps_with_names_of_accelerate_are_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, {"a": {"n": 1}}, step=3)
    (tmp_path / "checkpoint-3").rename(tmp_path / "checkpoint_3")
    live: dict[str, Any] = {"a": {"n": 2}}
    assert load(tmp_path, live) is None
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "although checkpoint_3 is there" in warning.getMessage()
    with Checkpointer(tmp_path, prefix="checkpoint_") as checkpointer:
        assert checkpointer.resume(live) == 3
