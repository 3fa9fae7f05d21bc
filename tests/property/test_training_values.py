"""What a save accepts comes back equal, type by type and key by key; all else is refused by path.

Run more of it with CKPTKIT_EXAMPLES=10.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.training import Checkpointer
from ckptkit.training.state.collect import Layout
from tests.property.examples import examples
from tests.sampled import sampled

EXAMPLES = examples(40)
LAYOUTS: tuple[Layout, ...] = ("accelerate", "dcp", "trainer")


class Holder:
    """An object with a state dict of whatever is put into it."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


class Loader(Holder):
    """Is iterated over, as dataloaders are."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


class Extra(nn.Module):
    """Keeps an extra state."""

    def __init__(self, held: Any = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = Holder(held)  # as an attribute, a parameter would be one of the model's

    def get_extra_state(self) -> Any:
        return self.extra.held

    def set_extra_state(self, state: Any) -> None:
        self.extra.held = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight


PLACES = {
    "extra": "state['model']['1._extra_state']",
    "group": "state['optimizer'].param_groups[0]['k']",
    "group key": "state['optimizer'].param_groups[0][1]",
    "state": "state['optimizer'].state['0.weight']['k']",
    "state key": "state['optimizer'].state['0.weight'][1]",
    "unbound": "state['optimizer'].state['k']",
    "unbound key": "state['optimizer'].state[1]",
    "scheduler": "state['scheduler']['note']",
    "object": "state['object']",
    "member": "state['members'][1]",
    "loader": "state['loader']",
    "plain": "state['plain']['k']",
    "list": "state['list'][1]",
}


def build(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a state that has taken a step, with a value in each place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), Extra(values["extra"]))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.note = values["scheduler"]
    group, state = optimizer.param_groups[0], optimizer.state
    own: Any = state[group["params"][0]]
    group["k"], group[1] = values["group"], values["group key"]  # type: ignore[index]
    own["k"], own[1] = values["state"], values["state key"]
    state["k"], state[1] = values["unbound"], values["unbound key"]  # type: ignore[index]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "object": Holder(values["object"]),
        "members": [Holder(), Holder(values["member"])],
        "loader": Loader(values["loader"]),
        "plain": {"k": values["plain"]},
        "list": [0, values["list"]],
    }


def fresh() -> dict[str, Any]:
    """Returns a state that nothing was done with."""
    model = nn.Sequential(nn.Linear(2, 2), Extra())
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "object": Holder(),
        "members": [Holder(), Holder()],
        "loader": Loader(),
        "plain": {},
        "list": [],
    }


def values_in(state: dict[str, Any]) -> dict[str, Any]:
    group, own = state["optimizer"].param_groups[0], state["optimizer"].state
    of_parameter = own[group["params"][0]]
    return {
        "extra": state["model"][1].extra.held,
        "group": group["k"],
        "group key": group[1],
        "state": of_parameter["k"],
        "state key": of_parameter[1],
        "unbound": own["k"],
        "unbound key": own[1],
        "scheduler": state["scheduler"].note,
        "object": state["object"].held,
        "member": state["members"][1].held,
        "loader": state["loader"].held,
        "plain": state["plain"]["k"],
        "list": state["list"][1],
        "keys": [
            *({*map(repr, group)}, {*map(repr, of_parameter)}, {*map(repr, state["plain"])}),
            {repr(key) for key in own if not isinstance(key, torch.Tensor)},
        ],
    }


def assert_same(value: Any, found: Any, where: str) -> None:
    """Compares types, keys, items and bits, in code of its own."""
    assert type(value) is type(found), where
    if isinstance(value, torch.Tensor):
        assert (value.dtype, value.shape) == (found.dtype, found.shape), where
        both = (t.detach().reshape(-1).view(torch.uint8) for t in (value, found) if t.numel())
        assert len({bytes(t.tolist()) for t in both}) <= 1, where
        assert not isinstance(value, nn.Parameter) or value.requires_grad == found.requires_grad
    elif isinstance(value, np.ndarray | np.generic):
        assert (value.dtype, value.shape) == (found.dtype, found.shape), where
        assert value.tobytes() == found.tobytes(), where
    elif isinstance(value, dict):
        assert len(value) == len(found), where
        if isinstance(value, defaultdict):
            assert value.default_factory is found.default_factory, where
        keys = {(type(key), repr(key)): key for key in found}
        for key, item in value.items():
            assert (type(key), repr(key)) in keys, f"{where}[{key!r}]"
            assert_same(item, found[keys[type(key), repr(key)]], f"{where}[{key!r}]")
        if isinstance(value, OrderedDict):
            assert list(map(repr, value)) == list(map(repr, found)), where
    elif isinstance(value, list | tuple | deque):
        assert len(value) == len(found), where
        assert getattr(value, "maxlen", None) == getattr(found, "maxlen", None), where
        for number, pair in enumerate(zip(value, found, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(value, set | frozenset):
        assert sorted(map(repr, value)) == sorted(map(repr, found)), where
    elif isinstance(value, argparse.Namespace):
        assert_same(vars(value), vars(found), where)
    else:
        assert repr(value) == repr(found), where


TEXTS = st.sampled_from(["", "a", "b", "1", "a.b", "a/b", ".", "..", "True", "None", "é", "k~2"])
NUMBERS = st.sampled_from([0, 1, -1, 2**70, 2**7000, 1.0, 0.5, -0.0, math.inf, math.nan])
KEYS = st.one_of(  # those that mappings in pickles may have; deeper ones are refused there
    TEXTS, st.sampled_from([0, 1, -1, 2, 1.0, 0.5, math.inf, True, False, None, b"x", (1, "a")])
)
LEAVES = st.one_of(
    TEXTS,
    NUMBERS,
    st.sampled_from(
        [
            *(None, True, False, b"", b"\x00\xff", bytearray(b"ab"), 1 + 2j, complex(-0.0, 1)),
            *(range(2, 9, 3), slice(1, None, 2), {1, "1"}, {True, 0.0}, set(), frozenset({(1,)})),
            *(deque([1, {2: 3}], maxlen=4), Decimal("1.50"), Fraction(1, 3), ()),
            *(dt.date(2020, 1, 2), dt.timedelta(seconds=1), dt.time(1, 2)),
            *(dt.datetime(2020, 1, 2, tzinfo=dt.UTC), Path("/a"), PurePosixPath("b")),
            *(np.float32(2), np.int64(3), np.bool_(True), np.str_("a"), np.arange(6.0)[::2]),
            *(np.zeros((0, 2)), np.array(["a", "bc"]), torch.float16, torch.device("cpu")),
            *(torch.Size([1, 2]), torch.Size([]), torch.tensor(3), torch.ones(2, 3)),
            *(torch.zeros(0, 2), torch.tensor([math.nan, -0.0]), torch.ones(2, dtype=torch.bool)),
            *(nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1), requires_grad=False)),
            *(torch.arange(6).reshape(2, 3).t(), torch.Generator().get_state()),
            *(argparse.Namespace(a=1, b={2: 3}), (torch.ones(1), {1: (2,)}), [1, (2, [3])]),
        ]
    ),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(KEYS, inner, max_size=4)
    return st.one_of(
        mappings,
        mappings.map(OrderedDict),
        mappings.map(lambda items: defaultdict(list, items)),
        st.dictionaries(KEYS, st.integers(0, 9), max_size=3).map(Counter),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    )


VALUES = st.recursive(LEAVES, containers, max_leaves=8)


@pytest.fixture(scope="module", params=sampled(LAYOUTS, ["dcp"]))
def checkpointer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checkpointer]:
    run = tmp_path_factory.mktemp("run")
    with Checkpointer(run, layout=request.param, keep_last=1) as opened:
        save_ones(opened)
        yield opened


class Steps:
    """Counts the steps of all examples; `kept` is the last one that was saved without a loss."""

    last = kept = 0

    @classmethod
    def next(cls) -> int:
        cls.last += 1
        return cls.last


def save_ones(checkpointer: Checkpointer) -> None:
    step = Steps.next()
    checkpointer.save(step, build(dict.fromkeys(PLACES, 1))).result(60)
    Steps.kept = step


BOUNDED = settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# Keys that are spelled alike, alone or with those inside, and what leaves no leaf behind.
ODD = [{}, {1: 0.5, "1": (), None: 2, "None": []}]
ALIKE = {"a.b": 1, "a": {"b": 2, "c": ODD}, "a.b~2": 3, True: np.bool_(True)}
FROZEN = nn.Parameter(torch.ones(2), requires_grad=False)


@BOUNDED
@example(values=dict.fromkeys(PLACES, ALIKE), other=dict.fromkeys(PLACES, 1))
@example(values=dict.fromkeys(PLACES, FROZEN), other=dict.fromkeys(PLACES, 1))
@given(
    values=st.fixed_dictionaries(dict.fromkeys(PLACES, VALUES)),
    other=st.fixed_dictionaries(dict.fromkeys(PLACES, VALUES)),
)
def test_what_a_save_accepts_comes_back_equal_everywhere(
    checkpointer: Checkpointer, values: dict[str, Any], other: dict[str, Any]
) -> None:
    step, saved = Steps.next(), build(copy.deepcopy(values))
    expected = values_in(saved)
    assert not checkpointer.save(step, saved).report(60).lost
    Steps.kept = step
    used = build(other)
    used["optimizer"].param_groups[0]["since"] = 1
    used["optimizer"].state["since"] = 1
    used["plain"]["since"] = 1
    for live in (fresh(), used):
        assert checkpointer.resume(live) == step
        assert_same(expected, values_in(live), "values")


class Pair(NamedTuple):
    a: int
    b: int


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Mapped(dict[Any, Any]):
    pass


class Color(enum.Enum):
    RED = 1


REFUSED = [
    *(lambda: 1, Pair(1, 2), Text("a"), Number(1), Color.RED, "\ud800", 2**9000, object(), int),
    *(torch.eye(2).to_sparse(), torch.Generator(), np.array([{}]), defaultdict(lambda: 1)),
    *(torch.ones(2, device="meta"), memoryview(b"a"), Mapped(a=1), torch.strided),
]
AROUND = [
    (lambda value: value, ""),
    (lambda value: {"a": [1, value]}, "['a'][1]"),
    (lambda value: [{1: {"b.c": value}}], "[0][1]['b.c']"),
    (lambda value: ({2: value},), "[0][2]"),
]


@BOUNDED
@given(
    place=st.sampled_from(sorted(PLACES)),
    value=st.sampled_from(REFUSED),
    around=st.sampled_from(AROUND),
)
@example(place="extra", value=REFUSED[9], around=AROUND[0])
def test_what_cannot_be_kept_is_refused_by_its_path_and_costs_no_earlier_step(
    checkpointer: Checkpointer, place: str, value: Any, around: Any
) -> None:
    wrap, end = around
    step, state = Steps.next(), build({**dict.fromkeys(PLACES, 1), place: wrap(value)})
    # An extra state that is a tensor is one of the model's tensors, which are refused by name.
    is_tensor = place == "extra" and isinstance(wrap(value), torch.Tensor)
    where = "model.1._extra_state" if is_tensor else PLACES[place] + end
    if place.startswith(("group", "state", "unbound")):  # which cost the optimizer alone
        report = checkpointer.save(step, state).report(60)
        assert where in report.lost["optimizer"]
    else:
        with pytest.raises(CkptkitError) as caught:
            checkpointer.save(step, state).result(60)
        assert where in str(caught.value.where)
        assert checkpointer.resume(fresh()) == Steps.kept
    save_ones(checkpointer)


@pytest.mark.parametrize("place", sorted(PLACES))
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_value_that_contains_itself_is_refused_by_its_path(
    checkpointer: Checkpointer, place: str, kind: str
) -> None:
    inner: Any = {} if kind == "dict" else [1]
    outer = {"a": [inner]}
    if kind == "dict":
        inner["back"] = outer
    else:
        inner.append(outer)
    where = f"{PLACES[place]}['a'][0]" + ("['back']" if kind == "dict" else "[1]")
    state = build({**dict.fromkeys(PLACES, 1), place: outer})
    if place.startswith(("group", "state", "unbound")):
        assert where in checkpointer.save(Steps.next(), state).report(60).lost["optimizer"]
        return
    with pytest.raises(UsageError, match="contains itself") as caught:
        checkpointer.save(Steps.next(), state)
    assert str(caught.value.where) == where
