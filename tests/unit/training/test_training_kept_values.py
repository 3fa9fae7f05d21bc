"""Values that a resume used to change, keep or lose, and steps that older versions wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import lr_scheduler as schedulers
from torchmetrics import MeanMetric

from ckptkit.core.crc import crc32
from ckptkit.core.errors import ResumeError, UsageError
from ckptkit.training import Checkpointer
from tests.sampled import sampled

LAYOUTS = ["accelerate", "dcp", "trainer"]


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpointer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checkpointer]:
    run = tmp_path_factory.mktemp("run")
    with Checkpointer(run, layout=request.param, keep_last=1) as opened:
        yield opened


def build(**others: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    model(torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    return {**state, **others}


def test_a_group_has_the_hyperparameters_of_the_step_and_no_others(
    checkpointer: Checkpointer,
) -> None:
    state = build()
    group = state["optimizer"].param_groups[0]
    group["own"] = torch.Size([2])
    checkpointer.save(1, state).result(60)
    expected = {key: value for key, value in group.items() if key != "params"}
    group["since"], group["own"], group["lr"] = {"a": 1}, (2,), torch.tensor(0.5)
    del group["weight_decay"]
    checkpointer.resume(state)
    found = {key: value for key, value in group.items() if key != "params"}
    assert found == expected
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in expected.items()}


def test_what_a_newer_torch_puts_into_every_group_stays(checkpointer: Checkpointer) -> None:
    state = build()
    removed = state["optimizer"].param_groups[0].pop("differentiable")
    checkpointer.save(2, state).result(60)
    fresh = build()
    checkpointer.resume(fresh)
    assert fresh["optimizer"].param_groups[0]["differentiable"] is removed


def test_nothing_is_overwritten_by_a_step_that_does_not_fit(checkpointer: Checkpointer) -> None:
    checkpointer.save(3, build(extra=[1, 2])).result(60)
    fresh = build(extra={})
    before = [p.clone() for p in fresh["model"].parameters()]
    with pytest.raises(ResumeError, match="a list was saved under this name") as caught:
        checkpointer.resume(fresh)
    assert caught.value.where == "extra"
    assert all(map(torch.equal, before, fresh["model"].parameters()))


def test_keys_that_differ_by_dots_alone_are_refused_where_they_meet(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        state = {"a": {"b.c": 1}, "a.b": {"c": 2}}
        with pytest.raises(UsageError, match="would be stored under one key"):
            checkpointer.save(1, state)
        checkpointer.save(2, {"a": {"b.c": 1}, "a.b": {"d": 2}}).result(60)


def test_values_nested_without_end_are_refused_by_their_path(checkpointer: Checkpointer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(3_000):
        deep = {"in": deep}
    with pytest.raises(UsageError, match="more than 60 levels deep") as caught:
        checkpointer.save(4, build(extra=deep))
    assert str(caught.value.where).startswith("state['extra']['in']['in']")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_tools_read_what_lies_on_disk(tmp_path: Path) -> None:
    extra = {1: {"a": 0.5}, "1": [{}, {"b": torch.ones(2)}], "t": 3}
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        folder = Path(checkpointer.save(1, build(extra=extra)).result(60))
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)["extra"]  # noqa: TID251
    assert found["t"] == 3
    assert found["1"] == {"a": 0.5}
    asked: Any = {"extra": {"t": 0, "1": {"a": 0.0}}}
    dcp.load(asked, checkpoint_id=folder, no_dist=True)
    assert asked["extra"] == {"t": 3, "1": {"a": 0.5}}


def as_older_versions_wrote(folder: Path) -> None:
    """Takes away what tells how nested values are put together."""
    manifest = json.loads((folder / "ckptkit.json").read_text())
    for path in [p for p in manifest["files"] if p.startswith("ckptkit/values_rank_")]:
        (folder / path).unlink()
        del manifest["files"][path]
    facts = json.loads((folder / "ckptkit/run.json").read_text())
    del facts["structures"]
    data = json.dumps(facts).encode()
    (folder / "ckptkit/run.json").write_bytes(data)
    record = manifest["files"]["ckptkit/run.json"]
    record |= {"size_bytes": len(data), "digest": f"crc32:{crc32(data):08x}"}
    manifest.pop("checksum", None)
    (folder / "ckptkit.json").write_text(json.dumps(manifest))


def sequence(optimizer: Any) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, 0.1, 1, 4),
        schedulers.MultiStepLR(optimizer, [3, 9], 0.3),
        schedulers.LambdaLR(optimizer, _Power()),
    ]
    return schedulers.SequentialLR(optimizer, parts, [4, 15])


class _Power:
    def __call__(self, step: int) -> float:
        return 0.9**step


def rates(state: dict[str, Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        state["optimizer"].step()
        state["scheduler"].step()
        found.append(state["optimizer"].param_groups[0]["lr"])
    return found


def test_types_that_older_steps_lost_are_those_of_the_live_objects(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        state = build(counts=Counter({3: 1, 7: 2}), parts=[{}, {"a": 1}])
        state["optimizer"].param_groups[0]["by"] = {1: 0.5}
        state["scheduler"] = sequence(state["optimizer"])
        return state

    state, fresh = make(), make()
    rates(state, 2)
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        folder = Path(checkpointer.save(1, state).result(60))
        as_older_versions_wrote(folder)
        fresh["counts"].update({7: 5})
        assert checkpointer.resume(fresh) == 1
    assert fresh["counts"] == {3: 1, 7: 2}
    assert fresh["parts"] == [{}, {"a": 1}]
    assert fresh["optimizer"].param_groups[0]["by"] == {1: 0.5}
    assert rates(fresh, 20) == rates(state, 20)


@pytest.mark.parametrize("layout", sampled(["accelerate", "dcp"], ["dcp"]))
@pytest.mark.parametrize("node", [("dict", ((1, 0),)), ("list", (5,)), ("leaf",), ("new", 1), ()])
def test_a_damaged_structure_is_found(tmp_path: Path, layout: Any, node: Any) -> None:
    state = build()
    state["optimizer"].param_groups[0]["by"] = {1: 0.5}
    with Checkpointer(tmp_path, layout=layout) as checkpointer:
        folder = Path(checkpointer.save(1, state).result(60))
        (file,) = folder.glob("ckptkit/values_rank_*.bin")
        found = torch.load(file, weights_only=True)  # noqa: TID251
        found["structures"] = [(u, p, [node, *nodes[1:]]) for u, p, nodes in found["structures"]]
        torch.save(found, file)
        data, manifest = file.read_bytes(), json.loads((folder / "ckptkit.json").read_text())
        record = manifest["files"][f"ckptkit/{file.name}"]
        record |= {"size_bytes": len(data), "digest": f"crc32:{crc32(data):08x}"}
        manifest.pop("checksum", None)
        (folder / "ckptkit.json").write_text(json.dumps(manifest))
        with pytest.raises(ResumeError, match="every step that was found is damaged"):
            checkpointer.resume(build())


class Casting(nn.Linear):
    """Has its weight in a state dict in another dtype."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(self._cast)  # type: ignore[no-untyped-call]

    @staticmethod
    def _cast(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach().double()


def measured(values: list[float]) -> nn.Sequential:
    mean = MeanMetric()
    mean.persistent(mode=True)
    for value in values:
        mean.update(torch.tensor(value))
    return nn.Sequential(nn.Linear(2, 2), mean, Casting())


def test_what_a_module_copies_into_its_state_dict_is_given_back_to_it(tmp_path: Path) -> None:
    saved: Any = measured([3.0, 4.0])
    live: Any = measured([9.0])
    with Checkpointer(tmp_path, layout="dcp") as checkpointer:
        checkpointer.save(1, {"model": saved}).result(60)
        assert checkpointer.resume({"model": live}) == 1
    assert live[1].compute() == 3.5
    assert torch.equal(live[0].weight, saved[0].weight)
    assert live[2].weight.dtype == torch.float32
    assert torch.equal(live[2].weight, saved[2].weight)
