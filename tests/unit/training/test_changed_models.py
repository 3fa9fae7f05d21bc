"""Models that have more rows, further or other parts than the step that they resume from."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW

from ckptkit.core.errors import ResumeError, UsageError
from ckptkit.training import Checkpointer
from ckptkit.training.state.collect import Layout
from tests.files import flip_bit

LAYOUTS: tuple[Layout, ...] = ("accelerate", "dcp", "trainer")
WIDTH = 6
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """A vocabulary, layers and a head, each under a name of the caller's."""

    def __init__(
        self, rows: int = 7, layers: int = 2, *, body: str = "body", head: str = "head"
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.register_buffer("seen", torch.arange(rows) + 0.5)
        self.add_module(body, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.order = [body] + [head] * bool(head)
        if head:
            self.add_module(head, nn.Linear(WIDTH, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(tokens)
        for layer in self.get_submodule(self.order[0]).children():
            hidden = hidden + layer(hidden).tanh()
        for head in self.order[1:]:
            hidden = self.get_submodule(head)(hidden)
        return hidden


def state_of(seed: int, make: Any = AdamW, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(**options)
    return {"model": model, "optimizer": make(model.parameters(), lr=0.01)}


def train(state: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    for _ in range(steps):
        state["model"](torch.arange(7)).pow(2).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state


def tensors(state: Mapping[str, Any]) -> tuple[Tensors, dict[str, Tensors]]:
    """Returns those of the model, and the states of its parameters."""
    model, optimizer = state["model"], state["optimizer"]
    states = {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}
    held = {n: {k: v.clone() for k, v in state.items()} for n, state in states.items()}
    return {n: v.clone() for n, v in model.state_dict().items()}, held


def save(run: Path, state: dict[str, Any], layout: Layout = "accelerate", step: int = 1) -> Path:
    with Checkpointer(run, layout=layout) as checkpointer:
        return Path(checkpointer.save(step, state).result())


def load(step: Path, state: dict[str, Any], layout: Layout = "accelerate", **options: Any) -> Any:
    """Resumes in a run of its own: the one of the step is locked while it is open."""
    with Checkpointer(step.parent.with_name("other"), layout=layout) as checkpointer:
        return checkpointer.resume(state, folder=step, **options)


def corner(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tensor[tuple(map(slice, shape))]


def assert_grown(now: torch.Tensor, saved: torch.Tensor, made: torch.Tensor | None = None) -> None:
    """The corner is what was saved, and all else as it was made: zeros, if there was nothing."""
    expected = torch.zeros_like(now) if made is None else made.clone()
    corner(expected, saved.shape).copy_(saved)
    assert torch.equal(now, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "make",
    [
        AdamW,
        lambda parameters, lr: AdamW(parameters, lr=lr, fused=True),
        lambda parameters, lr: Adam(parameters, lr=lr, amsgrad=True),
        lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9),
        lambda parameters, lr: Adagrad(parameters, lr=lr, initial_accumulator_value=0.5),
        Adafactor,
    ],
    ids=["AdamW", "fused", "amsgrad", "SGD", "Adagrad", "Adafactor"],
)
def test_rows_that_there_were_come_back_and_further_ones_stay_as_they_were_made(
    make: Any, layout: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = train(state_of(1, make))
    step = save(tmp_path / "run", saved, layout)
    grown = state_of(2, make, rows=9)
    made, made_states = tensors(grown)
    with caplog.at_level(logging.INFO):
        assert load(step, grown, layout, grow=["embed.*", "seen"]) == 1
    assert "'seen' [7] -> [9], 'embed.weight' [7, 6] -> [9, 6]" in caplog.text
    (before, states), (now, states_now) = tensors(saved), tensors(grown)
    for name, tensor in now.items():
        assert_grown(tensor, before[name], made[name])
    assert states_now.keys() == states.keys()
    for name, state in states_now.items():
        assert state.keys() == states[name].keys()
        for key, tensor in state.items():
            assert_grown(tensor, states[name][key], made_states.get(name, {}).get(key))
    train(grown, 1)
    twin = train(saved, 1)
    name = "body.1.weight"  # which the further rows have no part in
    assert torch.equal(tensors(grown)[0][name], tensors(twin)[0][name])


class Rows(torch.optim.Optimizer):
    """Keeps a number for each row, and shrinks parameters whatever the rate."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("rows", torch.zeros(len(parameter)))
            state["rows"] += parameter.grad.abs().flatten(1).sum(1) if parameter.ndim > 1 else 1
            parameter.mul_(0.5)


def test_what_makes_an_optimizers_state_leaves_new_rows_and_parts_as_they_were_made(
    tmp_path: Path,
) -> None:
    saved, fresh = train(state_of(1, Rows)), state_of(2, Rows, rows=9, layers=3)
    step = save(tmp_path / "run", saved)
    made, _ = tensors(fresh)
    assert load(step, fresh, grow=["embed.*", "seen", "body.2.*"]) == 1
    (before, states), (now, states_now) = tensors(saved), tensors(fresh)
    assert_grown(now["embed.weight"], before["embed.weight"], made["embed.weight"])
    assert_grown(states_now["embed.weight"]["rows"], states["embed.weight"]["rows"])
    assert torch.equal(now["body.2.weight"], made["body.2.weight"])


def test_a_tensor_grows_in_any_dimension_and_those_of_no_pattern_are_compared(
    tmp_path: Path,
) -> None:
    def made(inputs: int, outputs: int) -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(inputs, outputs), "b": nn.Linear(inputs, outputs)})
        optimizer = AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return {"model": model, "optimizer": optimizer}

    saved = made(3, 2)
    saved["optimizer"].step()
    step = save(tmp_path / "run", saved, "dcp")
    grown = made(4, 5)
    before = {name: p.detach().clone() for name, p in grown["model"].named_parameters()}
    with pytest.raises(ResumeError, match=r"model, b\.weight: shape \[2, 3\] was found"):
        load(step, grown, "dcp", grow=["a.*"])
    assert all(torch.equal(p, before[n]) for n, p in grown["model"].named_parameters())
    assert not grown["optimizer"].state
    assert load(step, grown, "dcp", grow=["a.*", "b.*"]) == 1
    for name, parameter in grown["model"].named_parameters():
        old = saved["model"].get_parameter(name)
        assert_grown(parameter, old, before[name])
        moment = saved["optimizer"].state[old]["exp_avg"]
        assert_grown(grown["optimizer"].state[parameter]["exp_avg"], moment)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "vocabulary": ({}, {"rows": 12}, {}),
    "layer": ({}, {"layers": 3}, {}),
    "name": ({}, {"body": "core"}, {"body": "core"}),
    "nested": ({}, {"body": "core", "head": "score"}, {"body": "core", "head": "score"}),
    "no head": ({}, {"head": ""}, {}),
    "further head": ({"head": ""}, {}, {}),
    "all": (
        {"layers": 1},
        {"rows": 9, "body": "core", "head": "", "layers": 2},
        {"body": "core"},
    ),
}
"""How the model was when it was saved, and how it is now; what parts are called now."""


def proposed(error: pytest.ExceptionInfo[ResumeError]) -> dict[str, Any]:
    found = re.search(r"Checkpointer\.resume\(…, (.*)\) takes it$", error.value.hint or "")
    assert found is not None, error.value.hint
    options: dict[str, Any] = eval(f"dict({found[1]})")  # noqa: S307  as a user would write it
    return options


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_the_refusal_of_a_changed_model_proposes_the_options_that_take_it(
    change: str, layout: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    then, now, names = CHANGES[change]
    saved, fresh = train(state_of(1, **then)), state_of(2, **now)
    step = save(tmp_path / "run", saved, layout)
    made, _ = tensors(fresh)
    with pytest.raises(ResumeError) as caught:
        load(step, fresh, layout)
    assert all(map(torch.equal, made.values(), tensors(fresh)[0].values()))
    assert not fresh["optimizer"].state
    with caplog.at_level(logging.INFO):
        assert load(step, fresh, layout, **proposed(caught)) == 1
    (before, states), (after, states_after) = tensors(saved), tensors(fresh)
    called = {}
    for name in before:
        part, _, rest = name.partition(".")
        called[".".join(filter(None, (names.get(part, part), rest)))] = name
    for name, tensor in after.items():
        if name not in called:
            assert torch.equal(tensor, made[name])
            assert name not in states_after
            assert f"not in the step, and as the model made it: {name!r}" in caplog.text or (
                f", {name!r}" in caplog.text
            )
            continue
        assert_grown(tensor, before[called[name]], made[name])
        for key, value in states_after.get(name, {}).items():
            assert_grown(value, states[called[name]][key])
    trained = {name for name, _ in fresh["model"].named_parameters()}
    assert states_after.keys() == trained & called.keys()
    for name in called.keys() - after.keys():
        assert repr(called[name]) in caplog.text.partition("dropped of the step: ")[2]
    for old, new in names.items():
        assert f"'{old}' -> '{new}'" in caplog.text
    train(fresh)
    later = save(tmp_path / "later", fresh, layout, step=2)
    # The same script resumes from what it has saved itself.
    again = state_of(3, **now)
    assert load(later, again, layout, **proposed(caught)) == 2
    for mine, other in zip(tensors(again)[0].values(), tensors(fresh)[0].values(), strict=True):
        assert torch.equal(mine, other)


def test_a_layer_in_front_takes_the_names_of_those_after_it(tmp_path: Path) -> None:
    saved, fresh = train(state_of(1)), state_of(2, layers=3)
    step = save(tmp_path / "run", saved)
    made, _ = tensors(fresh)
    names = {"body.0": "body.1", "body.1": "body.2"}
    assert load(step, fresh, grow=["body.0.*"], renamed=names) == 1
    (before, states), (after, states_after) = tensors(saved), tensors(fresh)
    for old, new in names.items():
        assert torch.equal(after[f"{new}.weight"], before[f"{old}.weight"])
        moments = (of[f"{n}.bias"]["exp_avg"] for of, n in ((states, old), (states_after, new)))
        assert torch.equal(*moments)
    assert torch.equal(after["body.0.weight"], made["body.0.weight"])
    with pytest.raises(UsageError, match=r"gives two parts of the step the name .*body\.1"):
        load(step, state_of(2, layers=3), grow=["body.2.*"], renamed={"body.0": "body.1"})


def test_a_prefix_is_taken_off_and_added(tmp_path: Path) -> None:
    saved = train(state_of(1))
    step = save(tmp_path / "run", saved, "dcp")
    wrapped = state_of(2)
    inner = nn.ModuleDict({"net": wrapped["model"]})
    inner.forward = wrapped["model"].forward
    outer = {"model": inner, "optimizer": wrapped["optimizer"]}
    assert load(step, outer, "dcp", renamed={"": "net"}) == 1
    train(outer)
    assert torch.equal(train(saved)["model"].embed.weight, wrapped["model"].embed.weight)
    later = save(tmp_path / "later", outer, "dcp")
    plain = state_of(3)
    assert load(later, plain, "dcp", renamed={"net": ""}) == 1
    assert torch.equal(plain["model"].embed.weight, wrapped["model"].embed.weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_options_that_nothing_fits_are_refused(layout: Layout, tmp_path: Path) -> None:
    step = save(tmp_path / "run", train(state_of(1)), layout)
    fresh = state_of(2, rows=9)
    with pytest.raises(UsageError, match=r"no tensor .* fits 'embedding\.\*'") as caught:
        load(step, fresh, layout, grow=["embed.*", "seen", "embedding.*"])
    assert "'seen'" in str(caught.value.hint)
    with pytest.raises(UsageError, match="begins with, 'boddy'"):
        load(step, fresh, layout, grow=["embed.*", "seen"], renamed={"boddy": "body"})
    for options in ({"grow": "embed.*"}, {"grow": [3]}, {"renamed": ["body"]}, {"renamed": {1: 2}}):
        with pytest.raises(UsageError, match=f"^{next(iter(options))}: .* was found where"):
            load(step, fresh, layout, **options)
    assert not fresh["optimizer"].state
    # A pattern of names that the step has as they are is not in the way.
    assert load(step, state_of(3), layout, grow=["embed.*"]) == 1


def test_a_tensor_that_shrank_is_refused(tmp_path: Path) -> None:
    step = save(tmp_path / "run", train(state_of(1, rows=9)))
    with pytest.raises(ResumeError, match=r"\[9\] was found .* against \[8\]") as caught:
        load(step, state_of(2, rows=8), grow=["*"])
    assert "grow" not in str(caught.value.hint)


def test_what_has_no_memory_has_no_values_to_keep(tmp_path: Path) -> None:
    step = save(tmp_path / "run", train(state_of(1)))
    with torch.device("meta"):
        fresh = state_of(2, rows=9)
    with pytest.raises(ResumeError, match=r"'seen', 'embed\.weight', or rows of it") as caught:
        load(step, fresh, grow=["embed.*", "seen"])
    assert "model.to_empty" in str(caught.value.hint)
    assert fresh["model"].embed.weight.is_meta


def test_tied_weights_grow_as_one(tmp_path: Path) -> None:
    def tied(seed: int, rows: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(rows, 3), nn.Linear(3, rows, bias=False))
        model[1].weight = model[0].weight
        return {"model": model, "optimizer": AdamW(model.parameters())}

    saved, fresh = train(tied(1, 7)), tied(2, 9)
    step = save(tmp_path / "run", saved)
    made = fresh["model"][0].weight.detach().clone()
    with pytest.raises(ResumeError) as caught:
        load(step, fresh)
    assert load(step, fresh, **proposed(caught)) == 1
    assert fresh["model"][1].weight is fresh["model"][0].weight
    assert_grown(fresh["model"][0].weight, saved["model"][0].weight, made)
    (moments,), (before,) = (s["optimizer"].state.values() for s in (fresh, saved))
    assert_grown(moments["exp_avg_sq"], before["exp_avg_sq"])


def test_one_of_two_models_with_the_same_names_grew(tmp_path: Path) -> None:
    def two(seed: int, rows: int) -> dict[str, Any]:
        one, other = state_of(seed, rows=rows), state_of(seed + 1)
        states = {"model": one["model"], "second": other["model"]}
        return states | {"optimizer": [one["optimizer"], other["optimizer"]]}

    def parts(state: dict[str, Any]) -> list[dict[str, Any]]:
        models = state["model"], state["second"]
        pairs = zip(models, state["optimizer"], strict=True)
        return [{"model": model, "optimizer": optimizer} for model, optimizer in pairs]

    saved, fresh = two(1, 7), two(3, 9)
    for part in parts(saved):
        train(part)
    step = save(tmp_path / "run", saved, "dcp")
    with pytest.raises(ResumeError, match=r"^model, seen: .*, and 1 tensor more") as caught:
        load(step, fresh, "dcp")
    assert load(step, fresh, "dcp", **proposed(caught)) == 1
    for mine, other in zip(parts(fresh), parts(saved), strict=True):
        (now, states_now), (before, states) = tensors(mine), tensors(other)
        assert torch.equal(corner(now["embed.weight"], torch.Size((7, 6))), before["embed.weight"])
        for name, state in states_now.items():
            assert_grown(state["exp_avg"], states[name]["exp_avg"])


@pytest.mark.parametrize("flat", [False, True])
def test_steps_of_stock_tools_are_resumed_by_changed_models(flat: bool, tmp_path: Path) -> None:
    saved = train(state_of(1))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(saved["model"], saved["optimizer"], options=options)
    step = tmp_path / "step"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every save outside a process group
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=step)
    fresh = state_of(2, rows=9, body="core", head="", layers=3)
    with pytest.raises(ResumeError) as caught:
        load(step, fresh, "dcp")
    assert proposed(caught)["renamed"] == {"body": "core", "head": None}
    assert load(step, fresh, "dcp", **proposed(caught)) == 0
    before, moments = tensors(saved)[1], tensors(fresh)[1]
    assert_grown(moments["embed.weight"]["exp_avg"], before["embed.weight"]["exp_avg"])
    assert torch.equal(moments["core.1.bias"]["exp_avg"], before["body.1.bias"]["exp_avg"])
    assert "core.2.bias" not in moments
    train(fresh)


def test_groups_get_their_hyperparameters_and_one_of_new_parts_keeps_its_own(
    tmp_path: Path,
) -> None:
    def grouped(layers: int, lr: float) -> dict[str, Any]:
        model: Any = state_of(layers, layers=layers)["model"]
        groups = [
            {"params": [*model.embed.parameters(), *model.head.parameters()], "lr": lr},
            *(
                {"params": list(layer.parameters()), "lr": lr + n}
                for n, layer in enumerate(model.body, 1)
            ),
        ]
        return {"model": model, "optimizer": AdamW(groups)}

    step = save(tmp_path / "run", train(grouped(2, 0.5)))
    fresh = grouped(3, 0.25)
    assert load(step, fresh, grow=["body.2.*"]) == 1
    assert [group["lr"] for group in fresh["optimizer"].param_groups] == [0.5, 1.5, 2.5, 3.25]
    later = save(tmp_path / "later", train(fresh))
    # A group of nothing but dropped parts goes with them.
    assert load(later, grouped(2, 9.0), renamed={"body.2": None}) == 1


def test_quantised_states_of_a_parameter_that_grew_start_anew(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, about deprecated parts of torch
        from torchao.optim import AdamW8bit

    def made(rows: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Embedding(rows, 64), nn.Linear(64, 80))
        return {"model": model, "optimizer": AdamW8bit(model.parameters())}

    saved, fresh = made(128), made(160)
    with torch.compiler.set_stance("force_eager"):
        train(saved)
    step = save(tmp_path / "run", saved)
    with pytest.raises(ResumeError, match=r"'0\.weight' has more of them") as caught:
        load(step, fresh, grow=["0.*"])
    assert "unfit_optimizer='reset'" in str(caught.value.hint)
    with Checkpointer(tmp_path / "other", unfit_optimizer="reset") as checkpointer:
        assert checkpointer.resume(fresh, folder=step, grow=["0.*"]) == 1
    assert not fresh["optimizer"].state
    assert torch.equal(fresh["model"][0].weight[:128], saved["model"][0].weight)


@pytest.mark.parametrize("rows", [7, 9])
def test_what_a_damaged_step_may_have_filled_is_not_as_the_model_made_it(
    rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, grow = tmp_path / "run", ["embed.*", "seen"]
    first, state = train(state_of(1)), train(state_of(2, rows=rows))
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, first).result()
        later = checkpointer.save(2, state).result()
    weight = state["model"].embed.weight.detach().numpy().tobytes()
    (file,) = (path for path in later.rglob("*.distcp") if weight in path.read_bytes())
    flip_bit(file, file.read_bytes().index(weight))
    with Checkpointer(run) as checkpointer:
        fresh = state_of(3, rows=9)
        made, _ = tensors(fresh)
        if rows > 7:
            with pytest.raises(ResumeError, match="step 1 lacks what step 2 has") as caught:
                checkpointer.resume(fresh, grow=grow)
            assert "resume it with step=1" in str(caught.value.hint)
            fresh = state_of(3, rows=9)
        assert checkpointer.resume(fresh, grow=grow, step=1 if rows > 7 else None) == 1
    assert "step 2 is skipped" in caplog.text
    before, now = tensors(first)[0], tensors(fresh)[0]
    assert_grown(now["embed.weight"], before["embed.weight"], made["embed.weight"])


def test_a_model_alone_is_no_step_of_a_changed_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(Net().state_dict(), folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"grow: is for steps"):
        load(folder, state_of(2, rows=9), grow=["embed.*"])
