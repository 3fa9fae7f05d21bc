"""Runs under torchrun: saves and loads through `ckptkit.training.dcp`, beside torch's own.

Usage: dcp_run.py FOLDER CASE... Each case works in FOLDER/CASE.
"""

from __future__ import annotations

import inspect
import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as stock
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.training import dcp
from tests.distributed.cases import WRAPPERS, full, names, nobody_talks, run_cases
from tests.distributed.saving_run import Net, train


class Odd:
    """A value that only a pickle holds."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd

    __hash__ = None  # type: ignore[assignment]


class Progress:
    """A stateful value."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.before: Callable[[], object] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        self.before()
        return {"step": torch.tensor(self.step), "seen": [self.step, {"a": 1}], "losses": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def state_of(kind: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = WRAPPERS[kind](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train({"model": model, "optimizer": optimizer, "scheduler": _No(), "dataloader": _No()}, 2)
    weights, moments = get_state_dict(model, optimizer)
    rank = dist.get_rank()
    own = {"bytes": bytes([rank] * 9), "at": torch.full((3,), float(rank + seed))}
    return {
        "model": weights,
        "optimizer": moments,
        "progress": Progress(seed),
        "loader": {f"rank_{rank}": own, "ranks": dist.get_world_size()},
        "seed": torch.tensor(seed),
        "odd": Odd(),
        **({} if rank else {"only_0": torch.arange(4)}),
    }


class _No:
    """What `train` moves on, without a state."""

    at = 0

    def step(self) -> None:
        pass


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """The whole values by their keys, as torch flattens them."""
    planner = stock.DefaultSavePlanner()
    known = {k: v.state_dict() if isinstance(v, Progress) else v for k, v in state.items()}
    planner.set_up_planner(known, None, is_coordinator=True)
    return {
        key: full(value) if isinstance(value, torch.Tensor) else value
        for key, value in planner.state_dict.items()
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def alike(one: stock.FileSystemReader, two: stock.FileSystemReader) -> None:
    """Compares what stock torch says that two checkpoints hold."""
    ours, other = content(one), content(two)
    assert ours.keys() == other.keys(), ours.keys() ^ other.keys()
    for name, found in ours.items():
        assert found == other[name], (name, found, other[name])


def content(reader: stock.FileSystemReader) -> dict[str, Any]:
    found = reader.read_metadata()
    known: dict[str, Any] = {"planner": found.planner_data}
    for name, entry in found.state_dict_metadata.items():
        known[name] = type(entry).__name__
        if isinstance(entry, TensorStorageMetadata):
            chunks = ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
            boxes = sorted(box for box in chunks if 0 not in box[1])
            known[name] = entry.size, entry.properties.dtype, boxes
    return known


def same_as_stock(folder: Path, kind: str) -> None:
    """The same keys, chunks and values; torch loads it; no collective is issued."""
    state = state_of(kind, 1)
    truth = flat(state)
    stock.save(state, checkpoint_id=folder / "theirs" / "step-1")
    group = dist.new_group(backend="gloo")
    with nobody_talks():
        saved = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(folder / "ours" / "step-1"),
            planner=dcp.DefaultSavePlanner(),
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        assert isinstance(saved, Future)
        metadata = saved.result()
    path = folder / "ours" / "step-1"
    assert metadata.state_dict_metadata.keys() == truth.keys() | names_of_others(truth)
    theirs = folder / "theirs" / "step-1"
    alike(dcp.FileSystemReader(path), dcp.FileSystemReader(theirs))
    assert names(path)[:2] == ["__0_0.distcp", "__0_1.distcp"]
    assert names(folder / "ours") == ["step-1"]
    assert ckptkit.verify(path).ok
    for load, source in ((stock.load, path), (dcp.load, path), (dcp.load, theirs)):
        other = state_of(kind, 2)
        with nobody_talks() if load is dcp.load else nullcontext():
            load(other, checkpoint_id=source)
        equal(flat(other), truth)
        assert other["progress"].step == 1


def names_of_others(own: dict[str, Any]) -> set[str]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(own))
    return {name for found in everywhere for name in found}


def parallel(folder: Path, _: str) -> None:
    """Stages with keys of their own, tensor parallelism without data parallel DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))
    stage, rank = mesh.get_local_rank("stage"), dist.get_rank()
    torch.manual_seed(0)
    whole = torch.randn(6, 5)
    state = {
        "model": {
            "everywhere": distribute_tensor(whole, mesh["tp"], [Shard(1)], src_data_rank=None),
            f"stage{stage}": distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None),
            f"stage{stage}.bias": whole[0] + stage,
            "copied": distribute_tensor(whole, mesh, [Replicate()] * 2, src_data_rank=None),
            "plain": whole * 2,
        },
        "loader": {str(rank): torch.tensor(rank)},
    }
    stock.save(state, checkpoint_id=folder / "theirs")
    for number in (1, 2):  # the second one knows who holds what
        dcp.save(state, checkpoint_id=folder / f"ours-{number}")
        own = dcp.FileSystemReader(folder / f"ours-{number}")
        alike(own, dcp.FileSystemReader(folder / "theirs"))
    other = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "loader": {str(rank): torch.zeros((), dtype=torch.int64)},
    }
    dcp.load(other, checkpoint_id=folder / "ours-2")
    equal(flat(other), flat(state))


def meshes(folder: Path, _: str) -> None:
    """Into other meshes, as torch loads it."""
    truth = {"model": {"w": torch.randn(7, 9, generator=torch.Generator().manual_seed(3))}}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = truth["model"]["w"]
    cut = distribute_tensor(weight, mesh, [Shard(0)])
    dcp.save({"model": {"w": cut}}, checkpoint_id=folder / "a")
    cases: list[tuple[Placement | None, torch.dtype]] = [(Replicate(), torch.float32)]
    cases += [(Shard(0), torch.float32), (Shard(1), torch.float32), (None, torch.float32)]
    cases += [(Shard(1), torch.float64), (None, torch.bfloat16)]
    for placement, dtype in cases:
        loaded = []
        for load in (dcp.load, stock.load):
            empty = torch.zeros(9, 7, dtype=dtype).T  # not in row-major order
            target: torch.Tensor = empty
            if placement is not None:
                target = distribute_tensor(empty, mesh, [placement])
            # torch itself plans no DTensor under another default device
            with torch.device("meta" if placement is None else "cpu"):
                load({"model": {"w": target}}, checkpoint_id=folder / "a")
            loaded.append(full(target))
        assert torch.equal(loaded[0], weight.to(dtype))
        assert torch.equal(loaded[0], loaded[1])
    for load in (dcp.load, stock.load):
        with pytest.raises(stock.CheckpointException, match="single memory location"):
            load({"model": {"w": torch.zeros(9).expand(7, 9)}}, checkpoint_id=folder / "a")


def damage(folder: Path, _: str) -> None:
    """Bytes that changed are found: by the rank that reads them all, or by all that read parts."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    weight = torch.randn(8, 60_000, generator=torch.Generator().manual_seed(3))
    text = "a text that is no tensor"
    state = {"w": distribute_tensor(weight, mesh, [Shard(0)]), "note": text}
    own, others = stock.CheckpointException, CkptkitError
    saves = (("ours", dcp.save), ("theirs", stock.save), ("note", dcp.save))
    for name, save in (*saves, ("their note", stock.save)):
        save(state, checkpoint_id=folder / name)
        if rank == 0:
            found = text.encode() if "note" in name else weight[4:].numpy().tobytes()
            change(next(p for p in (folder / name).iterdir() if found in p.read_bytes()), found)
        dist.barrier()
    for name, placement, error in (
        ("ours", Shard(0), own if rank else others),
        ("theirs", Shard(0), own if rank else others),
        ("ours", Replicate(), own),
        ("ours", Shard(1), others),
        ("theirs", Shard(1), others),
        ("note", Shard(0), others),
        ("their note", Shard(0), own),
    ):
        empty = distribute_tensor(torch.zeros(weight.shape), mesh, [placement])
        loaded = {"w": empty, "note": ""}
        with pytest.raises(error, match="CRC-32"):
            dcp.load(loaded, checkpoint_id=folder / name)
    if "use_collectives" in inspect.signature(stock.save).parameters:  # torch 2.9
        own_part: dict[str, Any] = {"part": torch.full((3,), rank + 1.0)}
        dcp.save(own_part, checkpoint_id=folder / "apart", use_collectives=False)
        apart = {"part": torch.zeros(3)}
        dcp.load(apart, checkpoint_id=folder / "apart")
        assert torch.equal(apart["part"], own_part["part"])
    # What torch saves over a step of ckptkit has no manifest that says otherwise.
    dcp.save(state, checkpoint_id=folder / "note", planner=Planner())
    empty = distribute_tensor(torch.zeros(weight.shape), mesh, [Shard(1)])
    dcp.load({"w": empty}, checkpoint_id=folder / "note")
    assert torch.equal(full(empty), weight)


def change(path: Path, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(content)] ^= 1
    path.write_bytes(data)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Planner(stock.DefaultSavePlanner):
    """A planner of one's own."""

    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan()


class Reader(stock.DefaultLoadPlanner):
    """A planner of one's own for loads."""

    def create_local_plan(self) -> LoadPlan:
        return super().create_local_plan()


class NamedPlanner(stock.DefaultSavePlanner):
    """One that plans as torch's own, such as nemo-automodel's."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = "named"


def delegates(folder: Path, _: str) -> None:
    """What only torch can do is done by it, with one line for each reason."""
    lines = Lines()
    logging.getLogger("ckptkit").addHandler(lines)
    state: dict[str, Any] = {"w": torch.arange(8.0), "n": 3}
    one = torch.ones(2)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    own = folder / f"alone-{dist.get_rank()}"
    for turn in range(2):
        dcp.save(state, checkpoint_id=folder / f"planner-{turn}", planner=Planner())
        dcp.async_save(state, checkpoint_id=folder / f"async-{turn}", planner=Planner()).result()
        dcp.save(state, checkpoint_id=own / str(turn), process_group=alone)
        dcp.save(
            state, storage_writer=dcp.FileSystemWriter(folder / f"kept-{turn}", overwrite=False)
        )
        two: Any = TwoTensor(one, one)  # type: ignore[no-untyped-call]
        dcp.save({"two": two}, checkpoint_id=folder / f"composed-{turn}")
    for name in ("planner-0", "async-1", "kept-1", "composed-0"):
        assert (folder / name / ".metadata").exists(), name
        assert not (folder / name / "ckptkit.json").exists(), name
    found = [line for line in lines.lines if "itself" in line]
    assert len(found) == (0 if dist.get_rank() else 4), found
    saved = dcp.async_save(state, checkpoint_id=folder / "waited")
    loaded: dict[str, Any] = {"w": torch.zeros(8), "n": 0}
    dcp.load(loaded, checkpoint_id=folder / "waited", planner=Reader())
    assert saved.done()
    assert torch.equal(loaded["w"], state["w"])
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        dcp.save(state)
    stager = DefaultStager(StagingOptions(False, False, True, False))
    answer = dcp.async_save(state, checkpoint_id=folder / "staged", async_stager=stager)
    assert type(answer).__name__ == "AsyncSaveResponse"
    answer.staging_completion.result()
    answer.upload_completion.result()
    assert (folder / "staged" / "ckptkit.json").exists()
    stager.close()
    dcp.save(state, checkpoint_id=folder / "named", planner=NamedPlanner())
    assert (folder / "named" / "ckptkit.json").exists()
    dcp.save({"own": torch.ones(2)}, checkpoint_id=own / "plain", no_dist=True)
    assert (own / "plain" / "ckptkit.json").exists()
    # An archive that says more than the index, and a state with nothing in it.
    marked = torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj()
    stock.save({"marked": marked, "n": 3}, checkpoint_id=folder / "marked")
    held: dict[str, Any] = {"marked": torch.zeros_like(marked), "n": 0}
    dcp.load(held, checkpoint_id=folder / "marked")
    assert torch.equal(held["marked"], marked)
    assert held["n"] == state["n"]
    dcp.save({}, checkpoint_id=folder / "nothing")
    for load in (dcp.load, stock.load):
        load({}, checkpoint_id=folder / "nothing")
    told = [line for line in lines.lines if "conj" in line or "empty" in line]
    assert len(told) == (0 if dist.get_rank() else 2), told


def faults(folder: Path, _: str) -> None:
    """What changes, comes twice, nests and fails."""
    rank, began = dist.get_rank(), time.monotonic()
    weight = torch.arange(1e6)
    progress = Progress(1)
    state: dict[str, Any] = {"w": weight, "progress": progress, "list": [1]}
    first = dcp.async_save(state, checkpoint_id=folder / "run" / "step-1")
    weight.zero_()
    state["list"].append(2)
    second = dcp.async_save(state, checkpoint_id=folder / "run" / "step-2")  # during the first
    weight.fill_(7)
    dcp.async_save(state, checkpoint_id=folder / "run" / "step-2")  # the same name again
    dcp.save(state, checkpoint_id=folder / "run" / "step-3")
    first.result()
    second.result()
    for step, value, listed in ((1, torch.arange(1e6), [1]), (2, weight, [1, 2])):
        loaded: dict[str, Any] = {"w": torch.zeros(int(1e6)), "list": None}
        dcp.load(loaded, checkpoint_id=folder / "run" / f"step-{step}")
        assert torch.equal(loaded["w"], value), step
        assert loaded["list"] == listed
    # One rank fails while the state is collected, in two ways; the next save works.
    for way, broken in (("raises", _raise), ("holds", lambda: None)):
        progress.before = broken if rank else lambda: None
        odd = {"lock": threading.Lock()} if rank and way == "holds" else {"lock": 1}
        if rank:
            with pytest.raises((OSError, TypeError)):
                dcp.async_save({**state, **odd}, checkpoint_id=folder / "run" / "step-4")
        else:
            failed = dcp.async_save({**state, **odd}, checkpoint_id=folder / "run" / "step-4")
            with pytest.raises(CkptkitError, match="rank 1"):
                failed.result(60)
    progress.before = lambda: None
    # One rank cannot write; nothing is visible, and all hear of it.
    if rank == 0:
        (folder / "file").write_text("")
    dist.barrier()
    with pytest.raises(CkptkitError):
        dcp.save(state, checkpoint_id=folder / "file" / "step-5")
    # A save within a save.
    progress.before = lambda: dcp.save({"inner": weight}, checkpoint_id=folder / "run" / "inner")
    dcp.save(state, checkpoint_id=folder / "run" / "step-6")
    progress.before = lambda: None
    with pytest.raises(CkptkitError, match="directory"):
        dcp.save(state, checkpoint_id=folder / f"run-{rank}")
    missing = {"none": torch.zeros(1)} if rank else {"w": torch.zeros(int(1e6))}
    with pytest.raises(stock.CheckpointException if rank else CkptkitError):
        dcp.load(missing, checkpoint_id=folder / "run" / "step-1")
    dist.barrier()
    found = [path.name for path in sorted((folder / "run").iterdir())]
    assert found == ["inner", "step-1", "step-2", "step-3", "step-6"], found
    assert time.monotonic() - began < 100  # nobody waited for a timeout


def _raise() -> None:
    raise OSError("no state today")


def others_change(folder: Path, _: str) -> None:
    """A rank's state is as before, where another one holds less, more or the same again."""
    rank = dist.get_rank()
    held = {f"w{number}": torch.full((1000,), float(number)) for number in range(4)}
    for turn, left_out in enumerate(((), (), ("w0", "w1"), ("w2", "w3"), ("w3",), ())):
        for value in held.values():
            value.add_(1)
        of_rank_1 = {name: value for name, value in held.items() if name not in left_out}
        own: dict[str, Any] = {"model": of_rank_1 if rank else held, "turn": [turn]}
        dcp.save(own, checkpoint_id=folder / f"step-{turn}")
        loaded = {"model": {name: torch.zeros(1000) for name in held}, "turn": None}
        stock.load(loaded, checkpoint_id=folder / f"step-{turn}")
        equal(flat(loaded), flat({"model": held, "turn": [turn]}))


def folders(folder: Path, _: str) -> None:
    """Folders that are there: with files of others, with an older checkpoint, with leftovers."""
    rank, run = dist.get_rank(), folder / "run"
    state = {"w": torch.arange(5.0) + 1}
    older = {"w": torch.arange(9.0), "more": torch.ones(3)}
    stock.save(older, checkpoint_id=run / "theirs")
    if rank == 0:
        (run / "mixed").mkdir()
        (run / "mixed" / "extra_state_0.pt").write_text("theirs")
        (run / ".mixed.ckptkit-0123abcd-4").mkdir()
        (run / ".other.ckptkit-0123abcd-4").mkdir()
    dist.barrier()
    for turn in range(2):
        for name in ("theirs", "mixed", "new"):
            state["w"] += 1
            dcp.save(state, checkpoint_id=run / name)
            loaded = {"w": torch.zeros(5)}
            stock.load(loaded, checkpoint_id=run / name)
            assert torch.equal(loaded["w"], state["w"]), (turn, name)
            assert ckptkit.verify(run / name).ok
    assert (run / "mixed" / "extra_state_0.pt").read_text() == "theirs"
    dist.barrier()
    hidden = [path.name for path in run.iterdir() if path.name.startswith(".")]
    assert hidden == [".other.ckptkit-0123abcd-4"]  # of a name that was not saved


def leaks(folder: Path, _: str) -> None:
    """Nothing grows from the fifth save to the thirtieth, also where the folders differ."""
    state = state_of("fsdp2", 1)
    found = []
    for number in range(30):
        dcp.async_save(state, checkpoint_id=folder / f"run-{number}" / "model").result()
        if number in {4, 29}:
            found.append(held())
    assert found[0] == found[1], json.dumps(found)


def held() -> dict[str, int]:
    """Counts threads, children, descriptors and shared memory of this process."""
    tasks = Path("/proc/self/task")
    children = sum(len((task / "children").read_text().split()) for task in tasks.iterdir())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(list(tasks.iterdir())),
        "children": children,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "shared": sum("memfd" in line or "/dev/shm" in line for line in maps),  # noqa: S108
    }


def dies_leaving(folder: Path, how: str) -> None:
    """The program ends without waiting for its save: it is waited for; or it is killed."""
    big, is_first = torch.ones(20_000_000), not (folder / "step-1").exists()
    dist.barrier()
    dcp.async_save({"w": big * 0}, checkpoint_id=folder / "step-1").result()
    dist.barrier()
    dcp.async_save({"w": big, "rank": dist.get_rank()}, checkpoint_id=folder / "step-2")
    if how == "killed" and is_first:
        while not list(folder.glob(".step-2*")):  # nothing of it is there yet
            time.sleep(0.001)
        os.kill(os.getpid(), 9)
    raise SystemExit


def forked(folder: Path, _: str) -> None:
    """A process that multiprocessing forked ends without `atexit`; its save is waited for."""
    path = folder / f"step-{dist.get_rank()}"
    process = multiprocessing.get_context("fork").Process(target=_save_alone, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert ckptkit.verify(path).ok


def _save_alone(path: Path) -> None:
    dcp.async_save({"w": torch.ones(20_000_000)}, checkpoint_id=path, no_dist=True)


CASES: dict[str, Callable[[Path, str], None]] = {
    "same": same_as_stock,
    "parallel": parallel,
    "meshes": meshes,
    "damage": damage,
    "delegates": delegates,
    "faults": faults,
    "others_change": others_change,
    "folders": folders,
    "leaks": leaks,
    "forked": forked,
    "dies_leaving": dies_leaving,
}


if __name__ == "__main__":
    run_cases(CASES, kind="fsdp2")
