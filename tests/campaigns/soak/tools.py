"""Commands beside a training: each output is compared with what the shadow has computed."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load

from tests.campaigns.soak.ledger import Ledger, folder_of
from tests.campaigns.soak.models import Shadow, Tensors
from tests.campaigns.soak.plan import Chapter, Tool
from tests.campaigns.soak.services import Services
from tests.campaigns.soak.steps import MANIFEST, adapter_of, difference, output_tensors, size_of
from tests.fork_host import Child
from tests.hub_server import Fault

LIMIT_SECONDS = 300.0
NO_STEP = 3  # the exit status where there is nothing to read
MISSING = 2
NO_CHOICE = 4  # where only a step with a name of its own is there, or that selected is gone
_TITLE = re.compile(r"Step (\d+) \((\w+)\)")


@dataclass
class Desk:
    """Runs the commands of a chapter, each in a thread of its own."""

    services: Services  # what runs them
    chapter: Chapter  # whose run they read
    run: str  # as an argument
    further: list[str]  # arguments for the storage of the run
    folder: Path  # for what they write
    ledger: Ledger  # what the run must hold
    lock: threading.Lock  # for the ledger, and for what the shadow computes
    shadow: Shadow  # what is true

    def __post_init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._numbers = 0
        self.has_killed = False  # a command, whose mark on a step in a bucket lasts for an hour
        self._taken: list[tuple[str, int, int]] = []
        self._one_push = threading.Lock()  # a second watch is refused
        self._repo = f"org/run-{self.chapter.number}"

    def start(self, tool: Tool) -> None:
        self._numbers += 1
        thread = threading.Thread(target=self._work, args=(tool, self._numbers))
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Waits for all commands, and judges which steps they took, once all saves are known."""
        while self._threads:
            self._threads.pop().join()
        for what, step, before in self._taken:
            later = [s for s in self.ledger.saves.values() if s.serial >= before]
            if step not in {saved.step for saved in later}:
                self._wrong(what, f"took step {step}, though save {before} is newer", self.folder)
        self._taken.clear()

    def _work(self, tool: Tool, number: int) -> None:
        self.services.count.actions[tool.kind] += 1
        place = self.folder / f"{tool.kind}-{number}"
        place.mkdir(parents=True)
        try:
            getattr(self, f"_{tool.kind}")(tool, place)
        except Exception as error:  # noqa: BLE001  reported, with its place
            self._wrong(tool.kind, f"{type(error).__name__}: {error}", place)
        else:
            shutil.rmtree(place)

    def _wrong(self, what: str, text: str, place: Path) -> None:
        file = place / "log"
        log = file.read_text(errors="replace")[-3_000:] if file.exists() else ""
        where = f"chapter {self.chapter.number}, {what}"
        self.services.count.problems.append(f"{where}: {text}\n{log}")

    # Commands

    def _consolidate(self, tool: Tool, place: Path) -> None:
        if self.chapter.model == "lora":
            self._adapter(tool, place)
            return
        made = self._output(tool, place, ["consolidate", self.run], ["--resume"])
        if made is not None:
            self._compare(place / "out", self._model(made))

    def _adapter(self, tool: Tool, place: Path) -> None:
        made = self._output(tool, place, ["adapter", "extract", self.run])
        if made is None:
            return
        self._compare(place / "out", adapter_of(self._model(made)))

    def _merge(self, tool: Tool, place: Path) -> None:
        made = self._output(tool, place, ["adapter", "merge", self.run, "--match-peft"])
        if made is not None:
            with self.lock:
                truth = self.shadow.merged(made)
            self._compare(place / "out", truth)

    def _verify(self, tool: Tool, place: Path) -> None:
        before = self._newest()
        words = ["verify", self.run, *self._selected(), *self.further]
        status = self._run(tool, place, words)
        if self._is_overtaken(status, before):
            words = ["verify", self.run, *self._selected(), *self.further]
            status = self._run(tool, place, words)
        if status and not (status in {NO_STEP, NO_CHOICE} and before is None):
            self._wrong("verify", f"exit status {status}", place)

    def _prune(self, tool: Tool, place: Path) -> None:
        with self.lock:
            self.ledger.pruned(tool.keep_last)
        before = self._newest()
        words = ["prune", self.run, "--keep-last", str(tool.keep_last), *self.further]
        status = self._run(tool, place, words)
        if status and before is not None:
            self._wrong("prune", f"exit status {status}", place)

    def _push(self, tool: Tool, place: Path) -> None:
        if self.chapter.model not in {"llama", "lora"}:
            self._consolidate(tool, place)  # without a configuration nothing would load
            return
        command = ["adapter", "merge"] if self.chapter.model == "lora" else ["consolidate"]
        made = self._output(Tool("push"), place, [*command, self.run])
        if made is None:
            return
        repo, tag = f"org/push-{self.chapter.number}", f"pushed-{made}-{place.name}"
        with self._one_push:
            self._trouble_hub(tool)
            words = ["push", str(place / "out"), repo, "--tag", tag]
            status = self._run(tool, place, words)
        if status:
            self._wrong("push", f"exit status {status}", place)
            return
        there = load(self.services.hub.read(repo, "model.safetensors", tag))
        wrong = difference(there, output_tensors(place / "out"))
        if wrong:
            self._wrong("push", f"the Hub has another model: {wrong}", place)

    def _watch(self, tool: Tool, place: Path) -> None:
        words = ["watch", self.run, "--push", self._repo, "--once", "--weights-only"]
        if self.chapter.place == "s3":
            words += ["--state", str(self.folder / "watching"), *self.further]
        with self._one_push:
            before = self._newest()
            self._trouble_hub(tool)
            status = self._run(tool, place, words)
        if status and before is not None:
            self._wrong("watch", f"exit status {status}", place)

    # How they are run

    def _output(
        self, tool: Tool, place: Path, words: list[str], again: list[str] | None = None
    ) -> int | None:
        """Makes an output of the run; returns its step, None where there was none to read."""
        before = self._newest()
        out = place / "out"
        head = 2 if words[0] == "adapter" else 1
        command = [*words[: head + 1], str(out), *words[head + 1 :], *self.further]
        status = self._run(tool, place, [*command, *self._selected(), *(again or ())])
        if self._is_overtaken(status, before):
            self.services.count.actions["commands run again, as their step was removed"] += 1
            status = self._run(tool, place, [*command, *self._selected()])
        if status:
            if before is not None or status not in {MISSING, NO_STEP, NO_CHOICE}:
                self._wrong(words[0], f"exit status {status}", place)
            return None
        source = json.loads((out / MANIFEST).read_text())["source"]
        step: int = source["step"]
        if before is not None:
            self._taken.append((words[0], step, before))
        return step

    def _is_overtaken(self, status: int | None, before: int | None) -> bool:
        """Returns whether a step may have been removed before it was marked as read.

        That is one in a bucket, or one that was selected by its name.
        """
        with self.lock:
            has_rule = self.ledger.keep_last is not None
        is_late = status == NO_CHOICE or (status == NO_STEP and self.chapter.place == "s3")
        return is_late and has_rule and before is not None

    def _selected(self) -> list[str]:
        """Returns the choice of the newest step where there are others with names of their own."""
        newest = self._newest()
        with self.lock:
            has_names = any(saved.name for saved in self.ledger.saves.values())
            folder = "." if newest is None else folder_of(self.ledger.saves[newest])
        return ["--select", folder] if has_names else []

    def _newest(self) -> int | None:
        """Returns the last save that is durable in the run itself."""
        with self.lock:
            found = [s.serial for s in self.ledger.saves.values() if s.is_durable and not s.name]
        return max(found, default=None)

    def _run(self, tool: Tool, place: Path, words: list[str]) -> int | None:
        """Runs a command to its end, where it is to be killed once more; returns its status."""
        log = place / "log"
        child = self.services.start_tool(words, log)
        if tool.dies_after:
            if child.wait(tool.dies_after) is None:
                self.services.count.faults["SIGKILL of a command"] += 1
                _kill(child)
            if child.status == -signal.SIGKILL:
                self.has_killed = True
                if (place / "out" / MANIFEST).exists():
                    return 0  # the kill came after its end
                child = self.services.start_tool(words, log)
        if child.wait(LIMIT_SECONDS) is None:
            child.signal(signal.SIGUSR1)  # where it hangs
            child.wait(1.0)
            _kill(child)
            self._wrong(tool.kind, f"no end after {LIMIT_SECONDS:g} s", place)
        return child.status

    def _trouble_hub(self, tool: Tool) -> None:
        if tool.hub_fault:
            fault: Fault = (
                int(tool.hub_fault) if tool.hub_fault.isdigit() else tool.hub_fault  # type: ignore[assignment]
            )
            pattern = random.Random(tool.dies_after).choice(("POST", "GET", "PUT"))
            self.services.hub.fail(pattern, [fault], {"Retry-After": "0"})
            self.services.count.faults[f"Hub answers {tool.hub_fault}"] += 1

    def _model(self, step: int) -> Tensors:
        with self.lock:
            return self.shadow.model(step)

    def _compare(self, out: Path, truth: Mapping[str, object]) -> None:
        found = output_tensors(out)
        wrong = difference(found, truth)  # type: ignore[arg-type]
        if wrong:
            self._wrong("output", wrong, out.parent)
        self.services.count.actions["outputs compared"] += 1
        self.services.count.size_bytes += size_of(found)

    # What a watch has published

    def judge_hub(self) -> None:
        """Compares each step that a watch has pushed, which is to be there once."""
        hub = self.services.hub
        if not hub.has(self._repo):
            return
        repo = hub.repo(self._repo)
        titles = Counter(match.groups() for c in repo.commits if (match := _TITLE.match(c.message)))
        for title, times in titles.items():
            if times != 1:
                self._wrong("watch", f"step {title} was pushed {times} times", self.folder)
        for tag in repo.tags:
            step = int(tag.removeprefix("step-"))
            name = "adapter_model" if self.chapter.model == "lora" else "model"
            found = load(hub.read(self._repo, f"{name}.safetensors", tag))
            truth = self._model(step)
            if self.chapter.model == "lora":
                truth = adapter_of(truth)
            wrong = difference(found, truth)
            if wrong:
                self._wrong("watch", f"{tag} on the Hub: {wrong}", self.folder)
            self.services.count.actions["pushed steps compared"] += 1
            self.services.count.size_bytes += size_of(found)


def _kill(child: Child) -> None:
    child.signal(signal.SIGKILL)
    child.wait()
