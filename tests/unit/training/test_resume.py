"""Hyperparameters, schedulers, objects, dataloaders and random numbers of a resume."""

from __future__ import annotations

import io
import json
import logging
import random
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckptkit
from ckptkit.core.errors import CkptkitError, ResumeError, UsageError
from ckptkit.core.manifest import FileRecord, Manifest
from ckptkit.storage.local.source import LocalSource
from ckptkit.training import Checkpointer
from ckptkit.training.agree.key_values import LocalKeyValueStore
from ckptkit.training.agree.peers import Peers
from ckptkit.training.resume import resume as filling
from ckptkit.training.resume.resume import decline, resume, resume_from
from ckptkit.training.resume.stored_step import StoredStep
from ckptkit.training.state import objects as rng
from ckptkit.training.state.collect import BoundState, bind


class Loader:
    """A dataloader with a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(self.position, 10)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Average:
    """Keeps tensors and an empty mapping; its keys are numbers."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"shadow": {0: torch.zeros(2, 2)}, "extra": {}, "n": 0}

    def state_dict(self) -> dict[str, Any]:
        return {**self.state, "shadow": {k: t.clone() for k, t in self.state["shadow"].items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def state_of(*, swapped: bool = False, rate: float | torch.Tensor = 1.0) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [
        {"params": list(model[0].parameters()), "weight_decay": 0.1},
        {"params": list(model[1].parameters()), "weight_decay": 0.2},
    ]
    optimizer = AdamW(groups[::-1] if swapped else groups, lr=rate)
    scheduler = StepLR(optimizer, 2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Loader(),
        "average": Average(),
        "counts": {"seen": 0},
    }


def serialised(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def trained() -> dict[str, Any]:
    torch.manual_seed(3)
    state = state_of()
    for _ in range(3):
        state["model"](torch.ones(1, 3)).sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
    state["loader"].position = 4
    state["average"].state = {"shadow": {0: torch.ones(2, 2)}, "extra": {}, "n": 5}
    state["counts"] = {"seen": 9, "best": 0.5}
    return state


def save(folder: Path, state: dict[str, Any], *, world_size: int = 1) -> None:
    """Writes a step in accelerate's layout, as `world_size` ranks would."""
    model, optimizer = state["model"], state["optimizer"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every save outside a process group
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save(
            {"optimizer": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=folder / "optimizer_0",
        )
    files = {
        "scheduler.bin": state["scheduler"].state_dict(),
        "custom_checkpoint_0.pkl": state["average"].state_dict(),
        "custom_checkpoint_1.pkl": state["counts"],
    }
    (folder / "ckptkit").mkdir()
    for rank in range(world_size):
        files[f"random_states_{rank}.pkl"] = rng.capture()
        files[f"ckptkit/dataloader_0_rank_{rank}.bin"] = state["loader"].state_dict()
    for name, value in files.items():
        (folder / name).write_bytes(serialised(value))
    finish(folder, world_size)


def finish(folder: Path, world_size: int) -> None:
    records = {
        str(path.relative_to(folder)): FileRecord(path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "ckptkit.json"
    }
    source = {"step": 3, "layout": "accelerate", "world_size": world_size, "attempt": "abc-1"}
    manifest = Manifest("training", source, {}, {}, {}, files=records)
    (folder / "ckptkit.json").write_bytes(manifest.to_json())


def alone() -> Peers:
    return Peers(0, 1, LocalKeyValueStore(), "nonce")


def bound(state: dict[str, Any]) -> BoundState:
    return bind(state, layout="accelerate", rank=0, world_size=1)


def load(run: Path, state: dict[str, Any]) -> None:
    assert resume(bound(state), run, alone(), timeout_seconds=5) == 3


def draws() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()  # noqa: S311


def test_everything_comes_back_into_fresh_objects_in_place(tmp_path: Path) -> None:
    old, new = trained(), state_of(swapped=True)
    save(tmp_path / "checkpoint-3", old)
    expected, counts = draws(), new["counts"]
    load(tmp_path, new)
    assert draws() == expected
    for mine, other in zip(new["model"].parameters(), old["model"].parameters(), strict=True):
        assert torch.equal(mine, other)
        for name, value in old["optimizer"].state[other].items():
            assert torch.equal(new["optimizer"].state[mine][name], value)
    assert [g["weight_decay"] for g in new["optimizer"].param_groups] == [0.2, 0.1]
    assert {g["lr"] for g in new["optimizer"].param_groups} == {0.1}
    assert new["scheduler"].state_dict() == old["scheduler"].state_dict()
    assert new["loader"].position == 4
    assert new["average"].state["shadow"][0].tolist() == [[1, 1], [1, 1]]
    assert counts == {"seen": 9, "best": 0.5}


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place(tmp_path: Path) -> None:
    rate = torch.tensor(7.0)
    new = state_of(rate=rate)
    save(tmp_path / "checkpoint-3", trained())
    live = new["optimizer"].param_groups[0]["lr"]
    load(tmp_path, new)
    assert new["optimizer"].param_groups[0]["lr"] is live
    assert live.item() == pytest.approx(0.1)


def test_other_parameter_groups_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", trained())
    new = state_of()
    new["optimizer"] = AdamW(new["model"].parameters())
    new["scheduler"] = StepLR(new["optimizer"], 2)
    with pytest.raises(ResumeError, match=r"optimizer: no group of the checkpoint's 2 has the 4"):
        load(tmp_path, new)


def test_an_object_that_was_not_saved_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", trained())
    with pytest.raises(ResumeError, match=r"custom_checkpoint_2|more_0"):
        load(tmp_path, state_of() | {"more": {"a": 1}})


def test_under_another_number_of_ranks_numbers_are_seeded_and_equal_loaders_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "checkpoint-3", trained(), world_size=2)
    found = []
    for _ in range(2):
        new = state_of()
        load(tmp_path, new)
        assert new["loader"].position == 4
        found.append(draws())
    assert found[0] == found[1]
    assert "random numbers are seeded anew" in caplog.text


def test_loaders_at_different_places_start_afresh_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoint-3"
    save(folder, trained(), world_size=2)
    (folder / "ckptkit/dataloader_0_rank_1.bin").write_bytes(serialised({"position": 5}))
    finish(folder, 2)
    new = state_of()
    load(tmp_path, new)
    assert new["loader"].position == 0
    assert "the dataloader starts afresh" in caplog.text


def test_rank_0_compares_loaders_for_all_and_reads_none_whose_checksums_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "checkpoint-3", LocalSource.read
    save(folder, trained(), world_size=4)
    reads: list[str] = []

    def noted(source: LocalSource, path: str, start: int, stop: int) -> bytes:
        reads.append(path)
        return read(source, path, start, stop)

    monkeypatch.setattr(LocalSource, "read", noted)
    load(tmp_path, state_of())
    assert sum("dataloader" in path for path in reads) == 4 + 1
    document = json.loads((folder / "ckptkit.json").read_text())
    for path, record in document["files"].items():
        if "dataloader" in path:
            record["digest"] = f"crc32:{zlib.crc32((folder / path).read_bytes()):08x}"
    document.pop("checksum", None)
    (folder / "ckptkit.json").write_text(json.dumps(document))
    board, loaders = LocalKeyValueStore(), [state_of(), state_of()]
    reads.clear()

    def on(rank: int) -> None:
        state = bind(loaders[rank], layout="accelerate", rank=rank, world_size=2)
        resume(state, tmp_path, Peers(rank, 2, board, ""), timeout_seconds=20)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(on, range(2)))
    assert [state["loader"].position for state in loaders] == [4, 4]
    assert sum("dataloader" in path for path in reads) == 4 + 2  # rank 0 proves all small files


BUGS = {"load_pieces": True, "random_changes": True, "bind_to_step": True, "loaders_alike": False}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", BUGS)
def test_a_bug_on_one_rank_ends_the_resume_on_all_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, failing: int
) -> None:
    save(tmp_path / "checkpoint-3", trained(), world_size=2)
    monkeypatch.setattr(StoredStep, "entries", ())
    monkeypatch.setattr(filling, "bind_to_step", lambda bound, *_, **__: bound)
    right: Any = getattr(filling, where)
    board, threads = LocalKeyValueStore(), threading.local()

    def wrong(*values: Any, **named: Any) -> Any:
        if threads.rank == failing:
            raise KeyError("a bug")
        return right(*values, **named)

    def on(rank: int) -> str:
        threads.rank = rank
        state = bind(state_of(), layout="accelerate", rank=rank, world_size=2)
        try:
            return str(resume(state, tmp_path, Peers(rank, 2, board, ""), timeout_seconds=30))
        except CkptkitError as error:
            return str(error)

    monkeypatch.setattr(filling, where, wrong)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(on, range(2)))
    assert found == (["loading failed: KeyError: 'a bug'"] * 2 if BUGS[where] else ["3", "3"])
    assert time.monotonic() - began < 10


def test_a_rank_that_cannot_take_part_ends_the_resume_on_the_others(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", trained(), world_size=2)
    board = LocalKeyValueStore()
    bad = UsageError("is no state", where="loader")

    def on(rank: int) -> None:
        peers = Peers(rank, 2, board, "")
        if rank:
            decline(peers, bad, timeout_seconds=30)
        else:
            state = bind(state_of(), layout="accelerate", rank=0, world_size=2)
            with pytest.raises(UsageError, match="loader: is no state"):
                resume(state, tmp_path, peers, timeout_seconds=30)

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(on, range(2)))
    assert time.monotonic() - began < 10


def test_a_step_without_a_manifest_is_never_taken_but_can_be_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder, old, new = tmp_path / "checkpoint-3", trained(), state_of()
    save(folder, old)
    (folder / "ckptkit.json").unlink()
    assert resume(bound(new), tmp_path, alone(), timeout_seconds=5) is None
    assert resume_from(bound(new), folder, alone(), timeout_seconds=5) == 3
    assert torch.equal(new["model"][0].weight, old["model"][0].weight)


def test_a_step_that_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="step 8 was requested"):
        resume(bound(state_of()), tmp_path, alone(), timeout_seconds=5, step=8)


@pytest.mark.parametrize("layout", ["accelerate", "dcp"])
def test_dcp_keys_of_other_objects_are_put_together_again(tmp_path: Path, layout: str) -> None:
    old, new = trained(), state_of()
    folder = tmp_path / "checkpoint-3"
    values = {
        "model": old["model"].state_dict(),
        "optimizer": get_optimizer_state_dict(old["model"], old["optimizer"]),
        "scheduler": old["scheduler"].state_dict(),
        "average": old["average"].state_dict(),
        "counts": old["counts"],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, checkpoint_id=folder)
    finish(folder, 1)
    path = folder / "ckptkit.json"
    document = json.loads(path.read_text().replace('"accelerate"', '"dcp"'))
    del document["checksum"]
    path.write_text(json.dumps(document))
    del new["loader"]
    state = bind(new, layout=layout, rank=0, world_size=1)  # type: ignore[arg-type]
    assert resume(state, tmp_path, alone(), timeout_seconds=5) == 3
    assert new["average"].state["shadow"][0].tolist() == [[1, 1], [1, 1]]
    assert new["average"].state["extra"] == {}
    assert new["average"].state["n"] == 5
    assert new["counts"] == {"seen": 9, "best": 0.5}
    assert new["scheduler"].state_dict() == old["scheduler"].state_dict()
    assert torch.equal(new["model"][1].bias, old["model"][1].bias)


class Twins(nn.Module):
    """Two weights that may be one."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        if tied:
            self.head.weight = self.table.weight


@pytest.mark.parametrize("layout", ["accelerate", "dcp"])
def test_values_that_a_tie_drops_are_warned_of(
    tmp_path: Path, layout: Any, caplog: pytest.LogCaptureFixture
) -> None:
    apart, tied = Twins(tied=False), Twins(tied=True)
    with torch.no_grad():
        apart.head.weight.copy_(apart.table.weight)
        apart.head.weight[2, 1] += 0.25
    with Checkpointer(tmp_path, layout=layout) as checkpointer:
        checkpointer.save(1, {"model": apart}).result(60)
        checkpointer.resume({"model": tied})
    (found,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "head.weight was saved apart from table.weight" in found
    assert "differ by up to 0.25" in found
    assert torch.equal(tied.table.weight, apart.table.weight)


@pytest.mark.parametrize("layout", ["accelerate", "dcp"])
@pytest.mark.parametrize("saved_tied", [True, False])
def test_a_tie_that_drops_nothing_is_not_warned_of(
    tmp_path: Path, layout: Any, caplog: pytest.LogCaptureFixture, *, saved_tied: bool
) -> None:
    saved, other = Twins(tied=saved_tied), Twins(tied=not saved_tied)
    with torch.no_grad():
        saved.table.weight[0, 0] = torch.nan
        saved.head.weight.copy_(saved.table.weight)
    with Checkpointer(tmp_path, layout=layout) as checkpointer:
        checkpointer.save(1, {"model": saved}).result(60)
        checkpointer.resume({"model": other})
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    for weight in (other.table.weight, other.head.weight):
        assert weight.detach().numpy().tobytes() == saved.table.weight.detach().numpy().tobytes()


@pytest.mark.parametrize("layout", ["accelerate", "dcp"])
def test_ties_beside_tensors_without_elements_are_no_damage(tmp_path: Path, layout: Any) -> None:
    saved, other = Twins(tied=True), Twins(tied=True)
    for twins in (saved, other):
        for name in ("a", "b", "z"):  # before, between and behind in the file of the rank
            twins.register_parameter(name, nn.Parameter(torch.ones(0, 5, 5)))
        twins.register_buffer("buffer", torch.ones(0))
    with Checkpointer(tmp_path / "run", layout=layout) as checkpointer:
        checkpointer.save(1, {"model": saved}).result(60)
        assert checkpointer.resume({"model": other}) == 1
    assert torch.equal(other.table.weight, saved.table.weight)
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out", names="live")
    assert ckptkit.verify(tmp_path / "run").ok


def test_the_state_of_a_parameter_without_elements_is_resumed(tmp_path: Path) -> None:
    def make() -> tuple[nn.Parameter, dict[str, Any]]:
        model, empty = nn.Linear(3, 2), nn.Parameter(torch.ones(0, 4))
        model.register_parameter("empty", empty)
        return empty, {"model": model, "optimizer": AdamW(model.parameters())}

    parameter, state = make()
    for each in state["model"].parameters():
        each.grad = torch.ones_like(each)
    state["optimizer"].step()
    other, fresh = make()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.resume(fresh)
    found, expected = fresh["optimizer"].state[other], state["optimizer"].state[parameter]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_compressed_save_of_torch_is_resumed_from(tmp_path: Path) -> None:
    old, new = trained(), state_of()
    values = {
        "model": old["model"].state_dict(),
        "optimizer": get_optimizer_state_dict(old["model"], old["optimizer"]),
        "scheduler": old["scheduler"].state_dict(),
        "counts": old["counts"],
    }
    writer = dcp.FileSystemWriter(tmp_path / "stock", _extensions=[ZStandard()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, storage_writer=writer)
    with Checkpointer(tmp_path / "run", layout="dcp") as checkpointer:
        checkpointer.resume({name: new[name] for name in values}, folder=tmp_path / "stock")
    assert new["counts"] == old["counts"]
    assert new["scheduler"].state_dict() == old["scheduler"].state_dict()
    assert new["optimizer"].param_groups[0]["lr"] == old["optimizer"].param_groups[0]["lr"]
    for one, other in zip(new["model"].parameters(), old["model"].parameters(), strict=True):
        assert torch.equal(one, other)


class Shared(Loader):
    """A dataloader whose ranks count together."""

    def merge_states(self, states: Sequence[Mapping[str, int]]) -> int:
        if min(state["position"] for state in states) < 0:
            raise ValueError("no such position")
        return sum(state["position"] for state in states)

    def split_state(self, state: int, rank: int, world_size: int) -> dict[str, int]:
        return {"position": 100 * rank + state // world_size}


def resume_loaders(
    folder: Path, states: Sequence[Any], loaders: Sequence[Any], *, old: Any = None
) -> list[CkptkitError | None]:
    """Resumes loaders, one for each rank, from what as many ranks as states had.

    `old` is the loader of the first of these; without it, the step is one of an older version.
    """
    save(folder, trained(), world_size=len(states))
    if old is not None:
        saved = bind(
            state_of() | {"loader": old}, layout="accelerate", rank=0, world_size=len(states)
        )
        (folder / "ckptkit/run.json").write_text(json.dumps(saved.facts()))
    for rank, state in enumerate(states):
        (folder / f"ckptkit/dataloader_0_rank_{rank}.bin").write_bytes(serialised(state))
    finish(folder, len(states))
    board = LocalKeyValueStore()

    def on(rank: int) -> CkptkitError | None:
        state = state_of() | {"loader": loaders[rank]}
        bound = bind(state, layout="accelerate", rank=rank, world_size=len(loaders))
        peers = Peers(rank, len(loaders), board, "")
        try:
            resume(bound, folder.parent, peers, timeout_seconds=20)
        except CkptkitError as error:
            return error
        return None

    with ThreadPoolExecutor(len(loaders)) as pool:
        return list(pool.map(on, range(len(loaders))))


def test_a_loader_that_merges_and_splits_states_goes_on_under_other_ranks(tmp_path: Path) -> None:
    loaders = [Shared() for _ in range(2)]
    states = [{"position": 4}, {"position": 7}, {"position": 1}]
    assert resume_loaders(tmp_path / "checkpoint-3", states, loaders) == [None, None]
    assert [loader.position for loader in loaders] == [6, 106]


def test_what_a_loader_raises_where_it_merges_is_raised_on_all_ranks(tmp_path: Path) -> None:
    loaders = [Shared() for _ in range(2)]
    errors = resume_loaders(tmp_path / "checkpoint-3", [{"position": -1}] * 3, loaders)
    assert all("merge_states() raised ValueError: no such position" in str(e) for e in errors)
    assert [loader.position for loader in loaders] == [0, 0]


ROWS = list(range(96))


def torchdata_loader(rank: int, world_size: int, sampler: Any, **options: Any) -> Any:
    own = sampler(ROWS, num_replicas=world_size, rank=rank, shuffle=True, seed=3)
    return StatefulDataLoader(ROWS, batch_size=2, sampler=own, **options)


def accelerate_loader(
    rank: int, world_size: int, _sampler: None = None, *, size: int = 2, splits: bool = False
) -> Any:
    return prepare_data_loader(
        torch.utils.data.DataLoader(ROWS, batch_size=size, shuffle=True),  # type: ignore[arg-type]
        num_processes=world_size,
        process_index=rank,
        use_stateful_dataloader=True,
        put_on_device=False,
        split_batches=splits,
        use_seedable_sampler=True,
        data_seed=5,
    )


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize(("before", "batches", "now"), [(4, 2, 2), (2, 4, 4), (3, 3, 2), (2, 1, 4)])
@pytest.mark.parametrize(
    ("make", "sampler"),
    [
        (torchdata_loader, DistributedSampler),
        (torchdata_loader, StatefulDistributedSampler),
        (accelerate_loader, None),
    ],
)
def test_loaders_whose_ranks_take_turns_go_on_where_all_were_together(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Any,
    sampler: Any,
    before: int,
    batches: int,
    now: int,
) -> None:
    old = [make(rank, before, sampler) for rank in range(before)]
    order: list[Any] = []
    for its in zip(*(map(iter, old)), strict=True):
        order.append([batch.tolist() for batch in its])
        if len(order) == batches:
            break
    had = [row for turn in order for rows in turn for row in rows]
    states = [loader.state_dict() for loader in old]
    new = [make(rank, now, sampler) for rank in range(now)]
    assert resume_loaders(tmp_path / "checkpoint-3", states, new) == [None] * now
    rest = [row for loader in new for batch in loader for row in batch.tolist()]
    left = before * batches % now
    assert len(set(had) & set(rest)) == 2 * left
    assert set(had) | set(rest) == set(ROWS)
    assert ("repeated" in caplog.text) == bool(left), caplog.text


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize(("before", "now"), [(4, 1), (3, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize("did_split", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_loaders_of_accelerate_go_on_whether_ranks_take_turns_or_split_batches(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    before: int,
    now: int,
    *,
    did_split: bool,
    splits: bool,
) -> None:
    old = [accelerate_loader(rank, before, size=12, splits=did_split) for rank in range(before)]
    had = [row for its in map(iter, old) for row in next(its).tolist()]
    states = [loader.state_dict() for loader in old]
    new = [accelerate_loader(rank, now, size=12, splits=splits) for rank in range(now)]
    done = resume_loaders(tmp_path / "checkpoint-3", states, new, old=old[0])
    assert done == [None] * now
    rest = [row for loader in new for batch in loader for row in batch.tolist()]
    batches = 1 if did_split else before
    left = 0 if splits else batches % now
    assert sorted(rest) == sorted(set(rest))
    assert len(set(had) & set(rest)) == 12 * left
    assert set(had) | set(rest) == set(ROWS)
    assert ("repeated" in caplog.text or "skipped" in caplog.text) == bool(left), caplog.text


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_a_loader_that_cannot_be_split_says_what_is_repeated_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = [StatefulDataLoader(ROWS, batch_size=2) for _ in range(2)]
    taken = list(map(iter, plain))
    for _ in range(3):
        list(map(next, taken))
    states = [loader.state_dict() for loader in plain]
    for number, ranks in ((0, 1), (1, 3)):
        new = [StatefulDataLoader(ROWS, batch_size=2) for _ in range(ranks)]
        resume_loaders(tmp_path / str(number) / "checkpoint-3", states, new)
    assert "if ranks share the data, 3 batches are repeated" in caplog.text
    assert "if ranks share the data, 3 batches are skipped" in caplog.text
    next(taken[1])
    states[1] = plain[1].state_dict()
    resume_loaders(
        tmp_path / "2" / "checkpoint-3", states, [StatefulDataLoader(ROWS, batch_size=2)]
    )
    assert "starts afresh, and the 7 batches that they had taken in all are repeated" in caplog.text


def loader_state(seed: int, *, yielded: int = 4) -> dict[str, Any]:
    """What a StatefulDataLoader with workers has, cut to what matters."""
    main = {"_num_workers": 1, "_sampler_iter_yielded": yielded, "_base_seed": seed}
    workers = {"worker_0": {"worker_id": 0, "dataset_state": {"seen": [yielded]}}}
    return {"_snapshot": {"_main_snapshot": main, "_worker_snapshots": workers}, "position": 4}


@pytest.mark.parametrize("with_digests", [False, True])
@pytest.mark.parametrize("yielded", [4, 5])
def test_loaders_that_differ_in_the_seeds_of_their_workers_are_at_one_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, yielded: int, *, with_digests: bool
) -> None:
    folder = tmp_path / "checkpoint-3"
    save(folder, trained(), world_size=2)
    states = [loader_state(7), loader_state(8, yielded=yielded)]
    for rank, state in enumerate(states):
        (folder / f"ckptkit/dataloader_0_rank_{rank}.bin").write_bytes(serialised(state))
    finish(folder, 2)
    if with_digests:
        document = json.loads((folder / "ckptkit.json").read_text())
        for path, record in document["files"].items():
            if "dataloader" in path:
                record["digest"] = f"crc32:{zlib.crc32((folder / path).read_bytes()):08x}"
        document.pop("checksum", None)
        (folder / "ckptkit.json").write_text(json.dumps(document))
    board, loaders = LocalKeyValueStore(), [state_of() for _ in range(3)]
    taken: dict[int, Any] = {}

    def on(rank: int) -> None:
        loaders[rank]["loader"].load_state_dict = lambda given: taken.update({rank: given})
        state = bind(loaders[rank], layout="accelerate", rank=rank, world_size=3)
        resume(state, tmp_path, Peers(rank, 3, board, ""), timeout_seconds=20)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(on, range(3)))
    if yielded == 4:  # all go on there, with the seeds that ranks had
        assert taken == {0: states[0], 1: states[1], 2: states[0]}
    else:
        assert not taken
    assert ("the dataloader starts afresh" in caplog.text) == (yielded != 4)


@pytest.mark.parametrize("layout", ["accelerate", "dcp", "trainer"])
def test_generators_of_torch_go_on_where_they_were(tmp_path: Path, layout: Any) -> None:
    first, *several = (torch.Generator().manual_seed(seed) for seed in (1, 2, 3))
    model = nn.Linear(1, 1)
    state = {"model": model, "generator": first, "more": several, "extra": {"n": 1}}
    torch.rand(5, generator=first)
    with Checkpointer(tmp_path, layout=layout) as checkpointer:
        step = checkpointer.save(1, state).result(60)
        expected = [torch.rand(3, generator=one) for one in (first, *several)]
        assert checkpointer.resume(state) == 1
        assert all(
            torch.equal(torch.rand(3, generator=one), before)
            for one, before in zip((first, *several), expected, strict=True)
        )
    kinds = {
        e["key"]: e["kind"] for e in json.loads((step / "ckptkit/run.json").read_text())["entries"]
    }
    assert kinds["generator"] == kinds["more"] == "generator"


def test_a_generator_inside_of_a_dict_is_refused_with_what_to_save_of_it(tmp_path: Path) -> None:
    generator = torch.Generator()
    state: dict[str, Any] = {"model": nn.Linear(1, 1), "extra": {"generator": generator}}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UsageError, match=r"\['generator'\]") as caught:
            checkpointer.save(1, state)
        assert "save its get_state(), which set_state() takes" in str(caught.value.hint)
        state["extra"]["generator"] = generator.get_state()
        checkpointer.save(2, state).result(60)
        expected = torch.rand(2, generator=generator)
        assert checkpointer.resume(state) == 2
        generator.set_state(state["extra"]["generator"])
    assert torch.equal(torch.rand(2, generator=generator), expected)
