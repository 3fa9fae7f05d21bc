"""Trains on two ranks and kills ranks and writers at every phase of a save, or signals them.

The case `restarts` is for torchrun: python -m tests.crash.training_kills_run FOLDER restarts, which
prints a JSON object. All others fork their ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ckptkit.core.errors import CkptkitError, PeerError, WriterError
from ckptkit.training import Checkpointer
from ckptkit.training.save.staging import Stager
from tests.crash.forked_ranks import Pair, side_by_side
from tests.crash.training_life import (
    KILL_ALL,
    KILL_ITS_RANK,
    KILL_ITSELF,
    PAUSE,
    TERM_ALL,
    TERM_ITS_RANK,
    WAIT_SECONDS,
    WRITERS,
    Doom,
    Life,
    Point,
    doomed,
    hidden,
    spoil,
    train,
    visible,
)

PEER_SECONDS = 4.0  # how long ranks wait for one another where one of them is gone
DISCARDS = 4
CASE_SECONDS = 240  # a case that hangs dies of SIGALRM


def kill_writers(folder: Path) -> dict[str, Any]:
    """Writers and committers die at every other call in turn; training goes on."""
    cases = (*WRITERS, "both", "discard")
    jobs = {case: Pair(partial(_outlive_writers, folder / case, case)).run for case in cases}
    for name, options in OVERLAPPING.items():
        jobs[name] = Pair(partial(_outlive_some, folder / name, options)).run
    side_by_side(jobs, at_once=2)
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def _dooms(case: str, rank: int) -> dict[str, Doom]:
    if case == "committer":
        return {"committer": Doom(KILL_ITSELF, 1, rising=2)}
    if case == "both":
        return {"writer": Doom(KILL_ITSELF, 2 + rank, rising=6)}
    writer = {"writer": Doom(KILL_ITSELF, 9)}
    if case == "writer":
        writer["writer"] = Doom(KILL_ITSELF, 1, rising=2)
    if case == "discard":
        committer = Doom(KILL_ITSELF, 1, request=1, kinds=("Discard",), rising=1)
        return writer if rank == 1 else {"committer": committer}
    return writer if rank == 1 else {}


def _outlive_writers(folder: Path, case: str, rank: int) -> None:
    folder.mkdir(exist_ok=True)
    seen: list[int] = []
    with doomed(**_dooms(case, rank)):
        life = Life(folder, keep_last=2, timeout_seconds=WAIT_SECONDS)
    life.checkpointer.prepare(life.state)
    while True:
        life.save_well()
        good = life.step
        error = life.save().exception(WAIT_SECONDS)
        if error is None:
            break
        _check_death(error, case)
        assert rank or good in visible(life.run)
        spoil(life.state)
        seen.append(life.resume() - good)
        if case == "discard" and len(seen) == DISCARDS:
            break
    _outlive_idle_ones(life)
    life.checkpointer.close()
    dist.barrier()
    left = len(hidden(life.run))
    _see_swept(life)
    if rank == 0:
        folder.with_suffix(".json").write_text(json.dumps({"seen": seen, "left": left}))


OVERLAPPING: Mapping[str, dict[str, Any]] = {
    "waves": {"width": 50_000, "staging_limit": "1MiB"},
    "two": {"max_in_flight": 2},
}


def _outlive_some(folder: Path, options: Mapping[str, Any], rank: int) -> None:
    """Saves follow at once on one another, and writers die in the fifth thing they are asked."""
    folder.mkdir(exist_ok=True)
    with doomed(**({"writer": Doom(KILL_ITSELF, 9, request=5)} if rank == 1 else {})):
        life = Life(folder, timeout_seconds=WAIT_SECONDS, **options)
    newest = failures = 0
    for _ in range(6):
        handles = [life.save() for _ in range(3)]
        for handle in handles:
            error = handle.exception(WAIT_SECONDS)
            if error is None:
                newest = handle.step
            else:
                _check_death(error, "writer")
                failures += 1
        spoil(life.state)
        assert life.resume() == newest
    assert failures > 1
    life.checkpointer.close()


def _check_death(error: CkptkitError, case: str) -> None:
    assert isinstance(error, WriterError), error
    assert "was killed by SIGKILL in the middle of a save" in str(error), error
    where = {"committer": "committer", "both": "rank 0"}.get(case, "rank 1")
    assert where in str(error), error


def _outlive_idle_ones(life: Life) -> None:
    """Those that die between two saves are not missed."""
    for process in (life.checkpointer._slots[0]._writer, life.checkpointer._process):
        process.kill()
        if process._process is not None:
            process._process.wait(WAIT_SECONDS)  # else it may die in the middle of the next save
    life.save_well()


def _see_swept(life: Life) -> None:
    dist.barrier()
    life.checkpointer = Checkpointer(life.run)
    assert hidden(life.run) == []
    spoil(life.state)
    assert life.resume() == life.step
    life.checkpointer.close()


RANK_POINTS = (
    Point(0, "before"),
    Point(0, "staging"),
    Point(0, "returned"),
    Point(0, "writer", 9),
    Point(0, "committer", 1),
    Point(0, "committer", 20),
    Point(0, "committer", 20, TERM_ITS_RANK),
    Point(0, "staging", rank_0_hosts=True),
    Point(0, "committer", 20, rank_0_hosts=True),
    Point(1, "before"),
    Point(1, "staging"),
    Point(1, "returned"),
    Point(1, "waiting"),
    *(Point(1, "writer", call) for call in (1, 12, 24, 36)),
    Point(1, "writer", 9, TERM_ITS_RANK),
)


def kill_ranks(folder: Path) -> dict[str, Any]:
    """A rank is killed; the other one goes on to its end, and both start again."""

    def experiment(point: Point) -> None:
        place = folder / point.name
        place.mkdir()
        job = partial(_lose_a_rank, place, point)
        Pair(job, point.ends, rank_0_hosts=point.rank_0_hosts).run()
        Pair(partial(_start_again, place)).run()

    side_by_side({p.name: partial(experiment, p) for p in RANK_POINTS}, at_once=6)
    return {"points": len(RANK_POINTS)}


def _lose_a_rank(folder: Path, point: Point, rank: int) -> None:
    dooms = point.dooms if rank == point.victim else {}
    if rank == 0 and point.phase == "waiting":
        dooms = {"writer": Doom(PAUSE, 3)}
    with doomed(**dooms):
        life = Life(folder, timeout_seconds=PEER_SECONDS)
    life.save_well()
    if rank == point.victim:
        _come_to_an_end(life, point)
    error = life.save().exception(WAIT_SECONDS)
    if point.phase == "waiting":
        assert error is None, error  # its files were there, and it had said so
    elif error is None:  # rank 0 had committed it before it ended, which the others see
        assert point.victim == 0, point
        assert life.step in visible(life.run), point
    else:
        assert isinstance(error, PeerError), error
        assert point.rank_0_hosts or f"rank {point.victim} did not" in str(error), error
    if point.phase == "before" and rank == 0:
        began = time.monotonic()
        error = life.checkpointer.save(life.step + 1, life.state).exception(WAIT_SECONDS)
        assert isinstance(error, PeerError), error
        assert time.monotonic() - began < 2 * PEER_SECONDS
    assert 1 in visible(life.run)
    life.checkpointer.close()


def _come_to_an_end(life: Life, point: Point) -> None:
    def end(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if point.phase == "before":
        train(life.state)  # as the other rank does, which would wait for it here
        end()
    with mock.patch.object(Stager, "stage", end if point.phase == "staging" else Stager.stage):
        handle = life.save()
    if point.phase == "returned":
        end()
    if point.phase == "waiting":
        while not list(life.run.glob(".checkpoint-*/.ranks/1.json")):
            time.sleep(0.005)
        time.sleep(0.3)  # it tells the others that its files are there
        end()
    handle.wait(WAIT_SECONDS)
    raise AssertionError("the rank was to be killed")


def _start_again(folder: Path, _: int) -> None:
    life = Life(folder, seed=2, timeout_seconds=WAIT_SECONDS)
    assert hidden(life.run) == []
    found = life.resume()
    assert found in {1, 2}, found
    life.save_well()
    assert life.step == found + 1
    life.checkpointer.close()


def kill_all(folder: Path) -> dict[str, Any]:
    """All ranks and writers are killed at once, again and again, in the same run."""
    chains = {
        "writer": [
            *(Doom(KILL_ALL, call, request=1) for call in (1, 20)),
            *(Doom(KILL_ALL, call) for call in range(2, 42, 6)),
            Doom(TERM_ALL, 20),
        ],
        "committer": [
            *(Doom(KILL_ALL, call, request=1) for call in (1, 30)),
            *(Doom(KILL_ALL, call) for call in (1, 10, 20, *range(31, 46, 3))),
            Doom(TERM_ALL, 30),
        ],
        "again": [Doom(KILL_ALL, call) for call in range(34, 50, 3)],
    }
    jobs = {name: partial(_chain, folder / name, name, dooms) for name, dooms in chains.items()}
    side_by_side(jobs, at_once=3)
    return {"points": sum(map(len, chains.values()))}


def _chain(folder: Path, name: str, dooms: Sequence[Doom]) -> None:
    folder.mkdir()
    for doom in dooms:
        number = signal.SIGKILL if doom.act == KILL_ALL else signal.SIGTERM
        Pair(partial(_die_together, folder, name, doom), (-number, -number)).run()
    Pair(partial(_die_together, folder, name, None)).run()


def _die_together(folder: Path, name: str, doom: Doom | None, rank: int) -> None:
    mine: Mapping[str, Doom] = {}
    if doom is not None and (name != "writer" or rank == 1):
        mine = {"writer" if name == "writer" else "committer": doom}
    with doomed(**mine):
        life = Life(folder, keep_last=3, timeout_seconds=WAIT_SECONDS)
    assert hidden(life.run) == []
    reached = folder / f"reached-{rank}"
    if reached.exists():
        assert life.resume() >= int(reached.read_text())
    elif not visible(life.run):
        assert life.checkpointer.resume(life.state) is None
    life.save_well()
    reached.write_text(str(life.step))
    life.save(again=name == "again").wait(WAIT_SECONDS)
    assert doom is None, "all ranks were to be killed"
    life.checkpointer.close()


def kill_nodes(folder: Path) -> dict[str, Any]:
    """All is killed while a step goes to the nodes' own disks, and from there: none is lost."""
    drained = ("Drain", "Commit")
    anew = [(1, 10), (1, 60), (2, 10), (2, 36)]
    chains = {
        "keeper": [Doom(KILL_ALL, call) for call in (10, 20, 22)],
        "drain": [Doom(KILL_ALL, call, kinds=drained) for call in (1, 25, 49)],
        "committer": [Doom(KILL_ALL, call, kinds=("Commit",)) for call in (1, 30, 36)],
        "recovery": [Doom(KILL_ALL, call, number, kinds=drained) for number, call in anew],
    }
    jobs = {name: partial(_chain_on_nodes, folder / name, name, d) for name, d in chains.items()}
    side_by_side(jobs, at_once=2)
    return {"points": sum(map(len, chains.values()))}


def _chain_on_nodes(folder: Path, name: str, dooms: Sequence[Doom]) -> None:
    folder.mkdir()
    killed = (-signal.SIGKILL, -signal.SIGKILL)
    if name == "recovery":  # needs something that was left on the nodes
        Pair(
            partial(_die_on_nodes, folder, "drain", Doom(KILL_ALL, 1, kinds=("Drain",))), killed
        ).run()
    for doom in dooms:
        Pair(partial(_die_on_nodes, folder, name, doom), killed).run()
    Pair(partial(_die_on_nodes, folder, name, None)).run()


def _die_on_nodes(folder: Path, name: str, doom: Doom | None, rank: int) -> None:
    reached, node = folder / f"reached-{rank}", folder / f"node{rank}"
    before = int(reached.read_text()) if reached.exists() else 0
    mine: Mapping[str, Doom] = {}
    if doom is not None and rank == (name in {"keeper", "drain"}):
        if name == "committer" and not (folder / f"run/checkpoint-{before + 1}").exists():
            doom.request += before > 0  # the first commit is that of what was left on the nodes
        mine = {"committer" if name == "recovery" else name: doom}
    with doomed(**mine):
        life = Life(folder, local=node, timeout_seconds=WAIT_SECONDS)
    assert hidden(life.run) == hidden(node) == []
    for path in node.glob("checkpoint-*"):
        _see_whole(path)
    if before:
        found = life.resume()
        assert found == before + 1 or (name == "keeper" and found == before), (found, before)
    life.save_well()
    reached.write_text(str(life.step))
    life.save().wait(WAIT_SECONDS)
    assert doom is None, "all ranks were to be killed"
    life.checkpointer.close()
    assert sorted(visible(life.run)) == list(range(1, life.step + 1))


def _see_whole(path: Path) -> None:
    """Sees that a node's part of a step has all that its manifest names."""
    files = json.loads((path / "ckptkit.json").read_text())["files"]
    assert len(files) > 3
    for name, record in files.items():
        assert (path / name).stat().st_size == record["size_bytes"], path / name


SIGNAL_POINTS = (
    Point(1, "writer", 1, TERM_ITS_RANK),
    Point(1, "writer", 20, TERM_ALL),
    Point(0, "committer", 20, TERM_ITS_RANK),
    Point(0, "committer", 40, TERM_ALL),
)


def heed_signals(folder: Path) -> dict[str, Any]:
    """A signal that is listened to in the middle of a save ends training with a last save."""

    def experiment(point: Point) -> None:
        place = folder / f"{point.phase}_{point.call}"
        place.mkdir()
        Pair(partial(_stop_when_told, place, point)).run()
        Pair(partial(_resume_the_last, place)).run()

    side_by_side({p.name: partial(experiment, p) for p in SIGNAL_POINTS}, at_once=4)
    return {"points": len(SIGNAL_POINTS)}


def _stop_when_told(folder: Path, point: Point, rank: int) -> None:
    with doomed(**(point.dooms if rank == point.victim else {})):
        life = Life(folder, signals=("SIGTERM",), timeout_seconds=WAIT_SECONDS)
    life.save_well()
    handles = [life.save()]
    while not life.checkpointer.stop_requested:
        assert life.step < 5_000
        time.sleep(0.01)
        if life.checkpointer.should_save(life.step + 1):
            handles.append(life.save())
        else:
            train(life.state)
            life.step += 1
    for handle in handles:
        handle.result(WAIT_SECONDS)
    assert len(handles) == 2
    life.checkpointer.close()
    assert sorted(visible(life.run)) == [1, 2, life.step]
    assert hidden(life.run) == []


def _resume_the_last(folder: Path, _: int) -> None:
    life = Life(folder, seed=2)
    assert life.resume() > 2
    life.checkpointer.close()


RESTARTS = (("writer", 1), ("committer", 0))  # what kills its rank, and which rank that is


def be_restarted(folder: Path) -> dict[str, Any]:
    """Under torchrun, which starts all ranks again when one of them was killed."""
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    which, victim = RESTARTS[restarts] if restarts < len(RESTARTS) else ("", -1)
    with doomed(**({which: Doom(KILL_ITS_RANK, 20)} if dist.get_rank() == victim else {})):
        life = Life(folder, seed=restarts + 1, timeout_seconds=WAIT_SECONDS)
    assert hidden(life.run) == []
    if restarts:
        assert life.resume() >= restarts  # the writer may have come a bit further than its rank
    life.save_well()
    life.save().result(WAIT_SECONDS)
    assert restarts == len(RESTARTS)
    life.checkpointer.close()
    dist.barrier()  # rank 0 may be the host of the store
    return {"restarts": restarts, "steps": len(visible(life.run)), "last": life.step}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "writers": kill_writers,
    "ranks": kill_ranks,
    "all": kill_all,
    "nodes": kill_nodes,
    "signals": heed_signals,
    "restarts": be_restarted,
}


def warm_up() -> None:
    """Has torch import what it imports when it is first used; starts no thread."""
    torch.set_num_threads(1)
    layer = nn.Linear(1, 1)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(layer.parameters(), foreach=False).step()
    importlib.import_module("torch.distributed.checkpoint.state_dict")


def do_case(folder: str, case: str) -> dict[str, Any]:
    signal.alarm(CASE_SECONDS)
    return CASES[case](Path(folder))


def main() -> None:
    warm_up()
    print(json.dumps(CASES[sys.argv[2]](Path(sys.argv[1]))), flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    main()
