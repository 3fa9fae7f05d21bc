"""What a rank does in one life of a soak; it writes down what it was given and what was durable.

A line of JSON an event goes to the life's file at once, so that a kill leaves what was known.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ckptkit.core.errors import CkptkitError
from ckptkit.training import Checkpointer
from ckptkit.training.handle import SaveHandle
from tests.campaigns.soak.models import (
    SERIAL,
    Tensors,
    build,
    make_state,
    random_numbers,
    stamp,
    train,
    wrap,
)
from tests.crash.training_life import KILL_ITS_RANK, KILL_ITSELF, Doom, doomed

MEET_SECONDS = 300
LAST_EVENTS_SECONDS = 30.0
ACTS = {"itself": KILL_ITSELF, "rank": KILL_ITS_RANK}


class PlannedError(Exception):
    """What a training loop raises because the plan says so."""


class Rank:
    def __init__(self, spec: Mapping[str, Any], rank: int) -> None:
        self.spec = spec
        self.life = spec["life"]
        self.rank = rank
        self._events = os.open(spec["events"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._watchers: list[threading.Thread] = []
        self.state: dict[str, Any] = {}
        self.step = 0
        self.serial = spec["first_serial"]

    def tell(self, event: str, **values: Any) -> None:
        line = {"event": event, "rank": self.rank, **values}
        os.write(self._events, json.dumps(line).encode() + b"\n")

    def begin(self) -> Checkpointer:
        """Opens the run, and resumes."""
        store = TCPStore("127.0.0.1", self.spec["port"], is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.life["world"],
            timeout=timedelta(seconds=MEET_SECONDS),
        )
        self.state = self._make()
        with self._doom():
            checkpointer = Checkpointer(self.spec["run"], **self._options())
        self.tell("opened")
        self._resume(checkpointer)
        return checkpointer

    def _make(self) -> dict[str, Any]:
        model = build(self.spec["model"], self.spec["seed"])
        return make_state(wrap(model, self.life["strategy"]))

    def _options(self) -> dict[str, Any]:
        options = {**self.spec["options"], **self.life["options"]}
        if self.spec["nodes"]:
            options["local"] = self.spec["nodes"][self.rank]
        if self.life["heeds"]:
            options["signals"] = ("SIGTERM",)
        return options

    def _doom(self) -> AbstractContextManager[None]:
        doom = self.life["doom"]
        if doom is None or doom["rank"] != self.rank:
            return nullcontext()
        act = f"open({self.spec['doomed']!r}, 'a').close(); {ACTS[doom['act']]}"
        kinds = ("Persist", "Commit", "Drain")
        return doomed(**{doom["where"]: Doom(act, doom["call"], doom["request"], kinds)})

    def _resume(self, checkpointer: Checkpointer) -> None:
        _spoil(self.state)
        asked = self.spec["resume_step"]
        found = checkpointer.resume(self.state, step=asked)
        if found is None:
            self.state = self._make()
            self.tell("resumed", step=None)
            return
        self.step = found
        held, serials = _digests(self.state)
        self.tell(
            "resumed",
            step=found,
            serials=serials,
            digests=held,
            progress=self.state["progress"],
            at=self.state["dataloader"].at,
            random=random_numbers(),
            rate=self.state["optimizer"].param_groups[0]["lr"],
            epoch=self.state["scheduler"].last_epoch,
        )

    def go_on(self, checkpointer: Checkpointer) -> None:
        """Trains and saves as planned."""
        if self.life["limit_bytes"]:
            checkpointer.prepare(self.state)
            _limit(_process(checkpointer, "writer"), self.life["limit_bytes"])
        for number, planned in enumerate(self.life["steps"]):
            self.step += 1
            train(self.state, self.step, self.rank)
            due = checkpointer.should_save(self.step) if self.life["heeds"] else False
            handle = None
            if planned["save"] or due:
                handle = self._save(checkpointer, planned["name"])
            self.tell("stepped", number=number, step=self.step)
            self._harm(checkpointer, planned["harm"])
            if handle is not None and planned["save"] == "wait":
                handle.wait()
            if handle is not None and planned["save"] == "local":
                _wait_local(handle)
            if due and checkpointer.stop_requested:
                self.tell("stopping", step=self.step)
                return

    def _save(self, checkpointer: Checkpointer, name: str) -> SaveHandle:
        self.serial += 1
        stamp(self.state, self.serial)
        self.tell("saving", serial=self.serial, step=self.step, name=name)
        handle = checkpointer.save(self.step, self.state, name=name or None)
        watcher = threading.Thread(target=self._watch, args=(handle, self.serial), daemon=True)
        watcher.start()
        self._watchers.append(watcher)
        return handle

    def _watch(self, handle: SaveHandle, serial: int) -> None:
        if self.spec["nodes"] and _wait_local(handle) and not handle.done():
            self.tell("local", serial=serial)
        handle.wait()
        error = handle.error
        if error is None:
            self.tell("durable", serial=serial, bytes=handle.report().total_bytes)
        elif handle.skipped:
            self.tell("skipped", serial=serial)
        else:
            self.tell("failed", serial=serial, kind=type(error).__name__, text=str(error))

    def _harm(self, checkpointer: Checkpointer, harm: Mapping[str, Any] | None) -> None:
        """Asks for what goes wrong, which the soak itself does."""
        if harm is None:
            return
        if harm["who"] in {"writer", "committer", "keeper", "drain"}:
            pid = _process(checkpointer, harm["who"])
            if harm["rank"] == self.rank and pid is not None:
                self.tell("harm", harm=harm, pid=pid)
        elif self.rank == (harm["rank"] if harm["who"] == "rank" else 0):
            self.tell("harm", harm=harm, pid=os.getpid())

    def finish(self, checkpointer: Checkpointer) -> None:
        """Ends as planned."""
        if self.life["exports"]:
            out = Path(self.spec["export"])
            # After a resume that found nothing, the last call had another state.
            checkpointer.export(out, state=self.state, names="live").result()
            self.tell("exported", step=self.step)
        end = self.life["end"]
        self.tell("ending", end=end)
        if end == "kill_all":
            time.sleep(self.life["end_after"] + LAST_EVENTS_SECONDS)  # killed from outside
        if end == "raise":
            with checkpointer:
                raise PlannedError
        if end != "exit":
            checkpointer.close()
            self.tell("closed")
        for watcher in self._watchers:
            if end != "exit":
                watcher.join(LAST_EVENTS_SECONDS)


def _wait_local(handle: SaveHandle) -> bool:
    try:
        handle.local_result()
    except CkptkitError:
        return False
    return True


def _process(checkpointer: Checkpointer, who: str) -> int | None:
    backend: Any = checkpointer._committer
    if who == "writer":
        return checkpointer._slots[0]._writer.pid
    if who == "committer":
        return checkpointer._process.pid
    process = backend._node_process if who == "keeper" else backend._drain_process
    pid: int | None = process.pid
    return pid


def _limit(pid: int | None, size_bytes: int) -> None:
    """Has a writer fail where a file would be larger, as on a disk that is full."""
    assert pid is not None
    most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, most))


def _spoil(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for tensor in state["model"].parameters():
            getattr(tensor, "_local_tensor", tensor).fill_(7.0)
    state["progress"]["serial"] = -1


def _digests(state: dict[str, Any]) -> tuple[dict[str, str], list[float]]:
    """Returns digests of all tensors as torch gathers them, and the stamps of their save."""
    weights, held = get_state_dict(
        state["model"], state["optimizer"], options=StateDictOptions(full_state_dict=True)
    )
    found: Tensors = {f"model.{name}": torch.as_tensor(value) for name, value in weights.items()}
    states: Any = held["state"]
    for name, values in states.items():
        for key, value in values.items():
            found[f"optimizer.state.{name}.{key}"] = torch.as_tensor(value)
    stamps = [found.pop(name) for name in list(found) if name.endswith(f".{SERIAL}")]
    serials = sorted({one for tensor in stamps for one in set(tensor.flatten().tolist())})
    return {name: digest_of(tensor) for name, tensor in found.items()}, serials


def digest_of(tensor: torch.Tensor) -> str:
    array = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def live(spec_path: str, rank: int) -> int:
    """Lives a life; returns the status of the process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    spec = json.loads(Path(spec_path).read_text())
    if spec["life"]["heeds"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until a Checkpointer handles it
    one = Rank(spec, rank)
    try:
        checkpointer = one.begin()
        one.go_on(checkpointer)
        one.finish(checkpointer)
    except PlannedError:
        one.tell("raised")
    except Exception as error:  # noqa: BLE001  judged by the soak
        traceback.print_exc()
        one.tell("error", kind=type(error).__name__, text=str(error)[:2_000])
        return 1
    return 0
