"""Runs under torchrun: saves and loads at URLs through `ckptkit.training.dcp`.

Usage: dcp_urls_run.py FOLDER CASE... FOLDER/store.json has the URL of a bucket, and the options.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as stock
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptkit
from ckptkit.core.errors import CkptkitError, NoSpaceError
from ckptkit.storage.places import Place
from ckptkit.training import dcp
from tests.distributed.cases import nobody_talks, run_cases
from tests.distributed.dcp_run import Lines, Planner, alike, equal, flat, state_of


class At:
    """A prefix of the bucket."""

    def __init__(self, folder: Path) -> None:
        url, self.options = json.loads((folder.parent / "store.json").read_text())
        self.url = f"{url}/{folder.name}"

    def writer(self, name: str) -> FsspecWriter:
        return FsspecWriter(f"{self.url}/{name}", **self.options)

    def reader(self, name: str) -> FsspecReader:
        reader: Any = FsspecReader(f"{self.url}/{name}", **self.options)
        reader.fs.fs.invalidate_cache()
        return reader  # type: ignore[no-any-return]

    def place(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.options)

    def files(self, name: str) -> list[str]:
        reader: Any = self.reader(name)
        return sorted(path.rpartition("/")[2] for path in reader.fs.ls(reader.path))


def same_as_stock(folder: Path, _: str) -> None:
    """The same keys, chunks and values; torch loads it; no collective is issued."""
    at, state = At(folder), state_of("fsdp2", 1)
    truth = flat(state)
    stock.save(state, storage_writer=at.writer("theirs"))
    writer = at.writer("elsewhere")
    with nobody_talks():
        saved = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"{at.url}/step-1")
        metadata = saved.result()
    assert str(writer.checkpoint_id) == f"{at.url}/step-1"
    assert metadata.state_dict_metadata.keys() >= truth.keys()
    alike(at.reader("step-1"), at.reader("theirs"))
    if dist.get_rank() == 0:
        assert at.files("step-1")[:3] == [".metadata", "__0_0.distcp", "__0_1.distcp"]
        assert ckptkit.verify(at.place("step-1")).ok
        assert not list(Path(tempfile.gettempdir()).glob(".saves*/files/*"))
    dist.barrier()
    for load, name in ((stock.load, "step-1"), (dcp.load, "step-1"), (dcp.load, "theirs")):
        other, reader = state_of("fsdp2", 2), at.reader("elsewhere")
        if load is stock.load:
            load(other, storage_reader=at.reader(name))
        else:
            with nobody_talks():
                load(other, storage_reader=reader, checkpoint_id=f"{at.url}/{name}")
        equal(flat(other), truth)
    assert sum(len(list(path.rglob("*"))) for path in staged()) <= 2 * len(staged())


def staged() -> list[Path]:
    """The folders in which ranks stage; each has a lock, and a folder that is empty by then."""
    return list(Path(tempfile.gettempdir()).glob(".saves*"))


def damage(folder: Path, _: str) -> None:
    """Bytes that changed are an error on all ranks, also where none reads them all."""
    at, rank, mesh = At(folder), dist.get_rank(), init_device_mesh("cpu", (2,))
    weight = torch.randn(8, 60_000, generator=torch.Generator().manual_seed(3))
    state = {"w": distribute_tensor(weight, mesh, [Shard(0)])}
    for name, save in (("ours", dcp.save), ("theirs", stock.save)):
        save(state, storage_writer=at.writer(name))
        if rank == 0:
            reader: Any = at.reader(name)
            found = weight[4:].numpy().tobytes()
            for file in at.files(name):
                data = reader.fs.fs.cat_file(f"{reader.path}/{file}")
                if found in data:
                    start = data.index(found)
                    changed = data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :]
                    reader.fs.fs.pipe_file(f"{reader.path}/{file}", changed)
        dist.barrier()
        for placement in (Shard(0), Shard(1), Replicate()):
            empty = distribute_tensor(torch.zeros(weight.shape), mesh, [placement])
            with pytest.raises((CkptkitError, stock.CheckpointException), match="CRC-32"):
                dcp.load({"w": empty}, storage_reader=at.reader(name))


def folders(folder: Path, _: str) -> None:
    """Folders that are there: of stock, of an earlier save by more ranks, with files of others."""
    at, rank = At(folder), dist.get_rank()
    state, older = {"w": torch.arange(5.0)}, {"w": torch.arange(9.0), "more": torch.ones(3)}
    stock.save(older, storage_writer=at.writer("step-1"))
    if rank == 0:
        reader: Any = at.reader("step-1")
        for name in ("extra.pt", "__7_0.distcp", "model/__0_0.distcp"):
            reader.fs.fs.pipe_file(f"{reader.path}/{name}", b"another")
    dist.barrier()
    for _turn in range(2):
        state["w"] += 1
        dcp.save(state, storage_writer=at.writer("step-1"))
        loaded = {"w": torch.zeros(5)}
        stock.load(loaded, storage_reader=at.reader("step-1"))
        assert torch.equal(loaded["w"], state["w"])
        assert ckptkit.verify(at.place("step-1")).ok
        assert {"extra.pt", "model"} <= {*at.files("step-1")}
        assert at.files("step-1/model") == ["__0_0.distcp"]
        assert "__7_0.distcp" not in at.files("step-1")
        dist.barrier()
    dcp.save(older, storage_writer=at.writer("step-1"), planner=Planner())  # torch does that
    assert "ckptkit.json" not in at.files("step-1")


def faults(folder: Path, _: str) -> None:
    """A rank whose upload is refused, a full disk, and what only torch can save to."""
    at, rank = At(folder), dist.get_rank()
    state = {"w": torch.arange(5.0) + rank, "own": {f"of_{rank}": torch.ones(3) * rank}}
    dcp.save(state, storage_writer=at.writer("step-1"))
    for name in ("step-2", "step-1"):
        saved = dcp.async_save(state, storage_writer=at.writer(f"refused/{name}"))
        with pytest.raises(CkptkitError, match="rank 1"):
            saved.result()
    dist.barrier()
    names = at.files("refused/step-1")
    assert ".metadata" not in names, names
    assert "ckptkit.json" not in names, names
    assert ckptkit.verify(at.place("step-1")).ok
    usual = tempfile.tempdir
    tempfile.tempdir = str(folder.parent / "disk") if rank else usual
    dcp.close_all()  # so that the next save takes a folder there
    dist.barrier()
    big = {"w": torch.ones(2_000_000), "own": {f"of_{rank}": torch.ones(2_000_000)}}
    with pytest.raises(NoSpaceError) as caught:
        dcp.save(big, storage_writer=at.writer("step-3"))
    assert "TMPDIR" in caught.value.hint
    dcp.save(state, storage_writer=at.writer("step-3"))
    assert ckptkit.verify(at.place("step-3")).ok
    tempfile.tempdir = usual
    lines = Lines()
    logging.getLogger("ckptkit").addHandler(lines)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=f"memory://{folder.name}", no_dist=True)
    dcp.load({"w": torch.zeros(2)}, checkpoint_id=f"memory://{folder.name}", no_dist=True)
    (folder / f"chained-{rank}").mkdir()
    chained = f"simplecache::file://{folder}/chained-{rank}"
    # torch's own fails as the cache does not rename, and leaves a folder where it runs.
    with contextlib.chdir(folder), pytest.raises(stock.CheckpointException):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=chained, no_dist=True)
    found = [line for line in lines.lines if "itself" in line]
    assert [("memory://" in line, "several" in line) for line in found] == (
        [] if rank else [(True, False), (False, True)]
    )
    plain = FsspecWriter(str(folder / "plain"))  # a folder, which is no URL
    dcp.save(state, storage_writer=plain)
    assert (folder / "plain" / "ckptkit.json").exists()


def readers(folder: Path, _: str) -> None:
    """A rank that does not get to the store in a load; the ranks go on together."""
    at, rank, state = At(folder), dist.get_rank(), {"w": torch.arange(5.0)}
    dcp.save(state, storage_writer=at.writer("step-1"))
    good = at.options
    if rank:
        client = {**good["client_kwargs"], "endpoint_url": "http://127.0.0.1:9"}
        at.options = {
            **good,
            "client_kwargs": client,
            "config_kwargs": {"retries": {"total_max_attempts": 1}},
        }
    with pytest.raises(Exception, match="connect to the endpoint"):
        dcp.load({"w": torch.zeros(5)}, storage_reader=at.reader("step-1"))
    at.options = good
    loaded = {"w": torch.zeros(5)}
    dcp.load(loaded, storage_reader=at.reader("step-1"))
    assert torch.equal(loaded["w"], state["w"])


def places(folder: Path, _: str) -> None:
    """URLs that are no name of a step, or hold a password; a cleaner in TMPDIR between saves."""
    at, state, lines = At(folder), {"w": torch.ones(2)}, Lines()
    logging.getLogger("ckptkit").addHandler(lines)
    dcp.save(state, storage_writer=at.writer("step-1"))
    for url in (f"{at.url}/up/..", f"{at.url}/up/."):
        dcp.save(state, storage_writer=FsspecWriter(url, **at.options))
        assert "ckptkit.json" not in at.files(url.removeprefix(f"{at.url}/"))
    with pytest.raises((ImportError, OSError, stock.CheckpointException)):  # torch's own
        dcp.save(state, checkpoint_id="ftp://me:planted-word@127.0.0.1:9/step-1", no_dist=True)
    told = [line for line in lines.lines if "itself" in line]
    assert [("name of a step" in line, "a password" in line) for line in told] == (
        [] if dist.get_rank() else [(True, False), (False, True)]
    )
    assert "planted-word" not in "".join(lines.lines)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in staged():
            (path / ".lock").unlink()
    dist.barrier()
    dcp.save(state, storage_writer=at.writer("step-2"))
    assert ckptkit.verify(at.place("step-2")).ok
    assert staged()
    assert all((path / ".lock").exists() for path in staged())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder.parent / "tmp")
    dist.barrier()
    dcp.save(state, storage_writer=at.writer("step-3"))
    assert ckptkit.verify(at.place("step-3")).ok
    assert all((path / ".lock").exists() for path in staged())


def dies_uploading(folder: Path, _: str) -> None:
    """The test kills both ranks in the second save, the first time; then the program goes on."""
    at, rank = At(folder), dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    state = {"w": torch.full((1_000_000,), float(rank)), "own": {str(rank): torch.ones(5_000_000)}}
    dcp.async_save(state, storage_writer=at.writer("step-1")).result()
    dcp.async_save(state, storage_writer=at.writer("step-2"))
    raise SystemExit  # which waits for it


CASES: dict[str, Callable[[Path, str], None]] = {
    "same": same_as_stock,
    "damage": damage,
    "folders": folders,
    "faults": faults,
    "readers": readers,
    "places": places,
    "dies_uploading": dies_uploading,
}


if __name__ == "__main__":
    run_cases(CASES)
