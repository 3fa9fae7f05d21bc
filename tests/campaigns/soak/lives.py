"""One life of a run: its ranks are started, come to harm, and are judged by what they say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.core import errors as known_errors
from tests.campaigns.soak import forks, leftovers
from tests.campaigns.soak.ledger import Ledger, Saved
from tests.campaigns.soak.models import Shadow, place_of, random_numbers, sow
from tests.campaigns.soak.plan import Chapter, Harm, Life, Tool
from tests.campaigns.soak.ranks import digest_of
from tests.campaigns.soak.services import Services
from tests.campaigns.soak.steps import adapter_of, difference, output_tensors, size_of
from tests.fork_host import Child
from tests.object_store import Fault

POLL_SECONDS = 0.005
SILENT_SECONDS = 400.0  # nothing that is asked of a rank may take as long
GRACE_SECONDS = 20.0  # as torchrun leaves ranks whose peer has died, though shorter
LEAVE_SECONDS = 90.0  # that writers have to notice that their rank is gone
ROOM_BYTES = 4096
SERIALS = 1_000  # of each life
ALL_OF_A_LIFE = "CKPTKIT_SOAK_LIFE"
# What torch raises where a peer or the store has gone.
OF_PEERS = {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}


@dataclass
class Stage:
    """Where a chapter's lives take place."""

    services: Services  # what all chapters share
    chapter: Chapter
    folder: Path
    run: str  # the run, a path or a URL
    nodes: Path | None  # the folder of the nodes' disks; None for none
    small: Path | None  # the small file system, if there is one
    options: dict[str, Any]  # of every Checkpointer
    shadow: Shadow  # what is true
    ledger: Ledger  # what must be there
    start_tool: Callable[[Tool], None]  # starts a command
    asleep: set[int] = field(default_factory=set)  # stopped processes of the life before

    def node(self, rank: int) -> int:
        return rank // self.chapter.ranks_per_node


@dataclass
class LifeRun:
    """A life that goes on."""

    stage: Stage
    number: int
    life: Life
    resume_step: int | None  # the step to resume from; None for the newest
    _ranks: list[Child] = field(default_factory=list)
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _resumed: dict[int, dict[str, Any]] = field(default_factory=dict)
    _read_bytes: int = 0
    _heard: float = 0.0
    _stopped: set[int] = field(default_factory=set)
    _ends: bool = False

    def run(self) -> None:
        """Lives it to its end, after which no process of it is left."""
        folder = self.stage.folder / f"life-{self.number}"
        folder.mkdir()
        self._folder, self._events = folder, folder / "events"
        nodes = frozenset(map(self.stage.node, range(self.life.world)))
        self.stage.ledger.present = nodes if self.stage.nodes is not None else frozenset()
        self.stage.services.count.lives += 1
        self.stage.services.count.actions["starts of a job"] += 1
        for pid in self.stage.asleep:
            self._after(self.life.wakes_after, partial(self._continue, pid))
        self._stopped, self.stage.asleep = self.stage.asleep, set()
        store = self._start(folder)
        try:
            self._follow()
        finally:
            self._clean_up(store)
        self._read_events()
        self._count_harm()
        self._judge_end()

    # Start and end

    def _start(self, folder: Path) -> Child:
        port_file = folder / "port"
        store = self._fork(forks.store, port_file, log=folder / "store.log")
        while not port_file.exists():
            time.sleep(POLL_SECONDS)
        spec = {
            "seed": self.stage.chapter.seed,
            "model": self.stage.chapter.model,
            "life": asdict(self.life),
            "port": int(port_file.read_text()),
            "run": self.stage.run,
            "nodes": self._nodes(),
            "options": self.stage.options | {"layout": self.stage.chapter.layout},
            "events": str(self._events),
            "doomed": str(folder / "doomed"),
            "export": str(folder / "export"),
            "first_serial": (self.number + 1) * SERIALS,
            "resume_step": self.resume_step,
        }
        file = folder / "spec.json"
        file.write_text(json.dumps(spec))
        for rank in range(self.life.world):
            log = folder / f"rank-{rank}.log"
            self._ranks.append(self._fork(forks.rank, file, rank, log=log))
        self._heard = time.monotonic()
        return store

    def _fork(self, function: Callable[..., int], file: Path, *more: int, log: Path) -> Child:
        host = self.stage.services.rank_host(self.stage.chapter.model)
        marked = host.environment | {ALL_OF_A_LIFE: self._mark}
        return host.start(function, str(file), *more, log=log, environment=marked)

    @property
    def _mark(self) -> str:
        return f"{self.stage.services.mark}-{self.stage.chapter.number}-{self.number}"

    def _nodes(self) -> list[str]:
        if self.stage.nodes is None:
            return []
        ranks = range(self.life.world)
        return [str(self.stage.nodes / f"node{self.stage.node(rank)}") for rank in ranks]

    def _follow(self) -> None:
        """Does what is due until all ranks have ended."""
        while any(rank.status is None for rank in self._ranks):
            self._read_events()
            now = time.monotonic()
            for entry in [entry for entry in self._due if entry[0] <= now]:
                self._due.remove(entry)
                entry[1]()
            if not self._ends and any(rank.status for rank in self._ranks):
                self._ends = True
                self._after(0.3, lambda: self._signal_ranks(signal.SIGTERM))
                self._after(GRACE_SECONDS, lambda: self._signal_ranks(signal.SIGKILL))
            if now - self._heard > SILENT_SECONDS:
                self._wrong(f"nothing was heard of it for {SILENT_SECONDS:g} s")
                self._signal_ranks(signal.SIGUSR1)
                time.sleep(1.0)
                self._signal_ranks(signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _clean_up(self, store: Child) -> None:
        """Ends what the harm has begun, and waits for the processes of the ranks to leave."""
        if self.life.next_at_once:
            ranks = {rank.pid for rank in self._ranks}
            self.stage.asleep |= self._stopped - ranks
        for pid in self._stopped - self.stage.asleep:
            self._continue(pid)
        if self.stage.small is not None:
            (self.stage.small / "filler").unlink(missing_ok=True)
        if self.stage.chapter.place == "s3":
            self.stage.services.store.proxy.reset()
        store.signal(signal.SIGKILL)
        store.wait()
        if self.life.next_at_once:
            return
        left = leftovers.outliving(ALL_OF_A_LIFE, self._mark, LEAVE_SECONDS)
        if left:
            self._wrong(f"outlived their ranks: {left}")
            leftovers.kill(ALL_OF_A_LIFE, self._mark)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def _wrong(self, text: str) -> None:
        where = f"chapter {self.stage.chapter.number}, life {self.number}"
        self.stage.services.count.problems.append(f"{where}: {text}")

    # What ranks say

    def _read_events(self) -> None:
        if not self._events.exists():
            return
        with self._events.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            self._heard = time.monotonic()
            event = json.loads(line)
            getattr(self, f"_on_{event['event']}")(event)

    def _on_opened(self, _: Mapping[str, Any]) -> None:
        """It was."""

    def _on_exported(self, event: Mapping[str, Any]) -> None:
        if event["rank"] == 0:
            found = output_tensors(self._folder / "export")
            truth = self.stage.shadow.model(event["step"])
            if self.stage.chapter.model == "lora":
                truth = adapter_of(truth)
            wrong = difference(found, truth)
            if wrong:
                self._wrong(f"the export of step {event['step']}: {wrong}")
            self.stage.services.count.actions["exports compared"] += 1
            self.stage.services.count.size_bytes += size_of(found)

    _on_closed = _on_raised = _on_stopping = _on_opened

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self._resumed[event["rank"]] = event
        if len(self._resumed) == 1:
            wrong = self.stage.ledger.judge_resume(
                event["step"], event.get("serials", ()), self.resume_step
            )
            if wrong:
                self._wrong(wrong)
        if len(self._resumed) == self.life.world:
            self._judge_resume()

    def _on_stepped(self, event: Mapping[str, Any]) -> None:
        if event["rank"] == 0:
            self.stage.services.count.actions["steps"] += 1
            tool = self.life.steps[event["number"]].tool
            if tool is not None:
                self.stage.start_tool(tool)

    def _on_saving(self, event: Mapping[str, Any]) -> None:
        serial = event["serial"]
        if serial in self.stage.ledger.saves:
            return
        self.stage.services.count.actions["saves"] += 1
        nodes = map(self.stage.node, range(self.life.world))
        place = (event["step"], event["name"], self.life.world, frozenset(nodes))
        self.stage.ledger.begin(Saved(serial, *place, self.life.strategy))

    def _on_local(self, event: Mapping[str, Any]) -> None:
        self.stage.ledger.saves[event["serial"]].is_local = True

    def _on_durable(self, event: Mapping[str, Any]) -> None:
        saved = self.stage.ledger.saves[event["serial"]]
        if not saved.is_durable:
            self.stage.services.count.actions["saves reported durable"] += 1
        saved.is_durable = True

    def _on_skipped(self, event: Mapping[str, Any]) -> None:
        if event["rank"] == 0:
            self.stage.services.count.actions["saves skipped"] += 1

    def _on_failed(self, event: Mapping[str, Any]) -> None:
        if event["rank"] == 0:
            self.stage.services.count.failed[event["kind"]] += 1
        if self.life.is_calm and not self._ends:
            self._wrong(f"a save failed for no reason: {event}")

    def _on_error(self, event: Mapping[str, Any]) -> None:
        kind = getattr(known_errors, event["kind"], None)
        if kind is None and event["kind"] not in OF_PEERS:
            self._wrong(f"an error that is not ours: {event}")
        elif self.life.is_calm and not self._ends:
            self._wrong(f"a rank failed for no reason: {event}")
        self.stage.services.count.failed[f"rank: {event['kind']}"] += 1

    def _on_ending(self, event: Mapping[str, Any]) -> None:
        if event["end"] == "kill_all" and event["rank"] == 0:
            self._after(self.life.end_after, self._kill_all)

    def _on_harm(self, event: Mapping[str, Any]) -> None:
        harm, pid = Harm(**event["harm"]), event["pid"]
        self._after(harm.after, lambda: self._do(harm, pid))

    # Harm

    def _count_harm(self) -> None:
        faults = self.stage.services.count.faults
        if (self._folder / "doomed").exists() and self.life.doom is not None:
            victim = "itself" if self.life.doom["act"] == "itself" else "its rank"
            faults[f"SIGKILL by a {self.life.doom['where']} at a system call, of {victim}"] += 1
        faults["limit of the size of a writer's files"] += self.life.limit_bytes > 0

    def _do(self, harm: Harm, pid: int) -> None:
        self.stage.services.count.faults[harm.name] += 1
        if harm.kind == "full":
            self._fill(harm)
        elif harm.kind in {"store", "slow"}:
            self._trouble_store(harm)
        elif harm.who == "all":
            self._kill_all()
        elif harm.who == "ranks":
            for rank in self._ranks:
                self._hurt(harm, rank.pid)
        else:
            self._hurt(harm, pid)

    def _hurt(self, harm: Harm, pid: int) -> None:
        number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[harm.kind]
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if harm.kind == "stop":
            self._stopped.add(pid)
            self._after(harm.seconds, lambda: self._continue(pid))

    def _continue(self, pid: int) -> None:
        self._stopped.discard(pid)
        self.stage.asleep.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _kill_all(self) -> None:
        self.stage.services.count.faults["SIGKILL of every process"] += 1
        self._signal_ranks(signal.SIGKILL)
        leftovers.kill(ALL_OF_A_LIFE, self._mark)

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                rank.signal(number)

    def _fill(self, harm: Harm) -> None:
        small = self.stage.small
        if small is None:
            return
        filler = small / "filler"
        with filler.open("wb") as file:
            free = shutil.disk_usage(small).free
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(free - ROOM_BYTES, 1))
        self._after(harm.seconds, lambda: filler.unlink(missing_ok=True))

    def _trouble_store(self, harm: Harm) -> None:
        proxy = self.stage.services.store.proxy
        if harm.kind == "slow":
            fault = Fault("", None, seconds=0.3)
        elif harm.answer == "lost":
            fault = Fault("PUT|POST|DELETE", 2, lose_answer=True)
        elif harm.answer == "cut":
            fault = Fault("GET", 2, cut_after=100)
        else:
            code = "SlowDown" if harm.answer == "503" else "InternalError"
            fault = Fault("", None, status=int(harm.answer), code=code)
        proxy.add(fault)
        self._after(harm.seconds, proxy.reset)

    # Judgement

    def _judge_resume(self) -> None:
        first, ranks = self._resumed[0], range(self.life.world)
        if any(self._resumed[rank]["step"] != first["step"] for rank in ranks):
            self._wrong(f"ranks resumed from several steps: {self._resumed}")
        elif first["step"] is not None:
            self._judge_values(first["step"])

    def _judge_values(self, step: int) -> None:
        count, tensors = self.stage.services.count, self.stage.shadow.tensors(step)
        truth = {name: digest_of(tensor) for name, tensor in tensors.items()}
        serials = self._resumed[0]["serials"]
        saved = self.stage.ledger.saves.get(int(serials[0])) if serials else None
        if saved is None:
            return  # which the ledger has judged
        here = f"{self.life.world} x {self.life.strategy}"
        count.resumes[f"{saved.world} x {saved.strategy}", here] += 1
        count.actions["resumes compared"] += 1
        count.size_bytes += self.life.world * sum(tensor.nbytes for tensor in tensors.values())
        seen = set()
        for rank in range(self.life.world):
            event = self._resumed[rank]
            wrong = [name for name in truth if event["digests"].get(name) != truth[name]]
            wrong += event["digests"].keys() - truth.keys()
            same = saved.world == self.life.world
            expected: dict[str, Any] = {
                "step": step,
                "serials": serials,
                "progress": {"step": step, "serial": saved.serial},
                "rate": 2.0**-6 * 0.5 ** (step // 5),
                "epoch": step,
                "at": place_of(step, rank) if same else 0,
            }
            if same:
                sow(step, rank)
                expected["random"] = random_numbers()
            wrong += [name for name, value in expected.items() if event[name] != value]
            seen.add(event["random"])
            if wrong:
                shown = {name: event.get(name) for name in wrong if name in expected}
                self._wrong(f"rank {rank} resumed step {step} of {saved} wrong: {wrong} {shown}")
        if len(seen) != self.life.world:
            self._wrong("ranks resumed with the same random numbers")

    def _judge_end(self) -> None:
        statuses = [rank.status for rank in self._ranks]
        if self.life.is_calm and self.life.end in {"close", "raise", "exit"} and any(statuses):
            logs = [
                (self._folder / f"rank-{rank}.log").read_text(errors="replace")[-1_500:]
                for rank in range(self.life.world)
            ]
            self._wrong(f"ranks ended with {statuses}, though nothing went wrong\n" + "".join(logs))
