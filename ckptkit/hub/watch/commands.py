"""A command for each step of a watched run: `watch --exec`.

A command is, for each step, `running` in the journal before it is started, and `ended` with its
status once it has. So after a kill it runs again, and one that has ended does not.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.conversion.source.paths import make_absolute
from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from ckptkit.hub.watch import command_guard
from ckptkit.hub.watch.build import PushChoice, choose_steps
from ckptkit.hub.watch.watched_steps import WatchedRun
from ckptkit.runs.push_journal import CommandJournal, CommandRun, StepPush
from ckptkit.runs.steps import TIME_FORMAT, RunStep

_GRACE_SECONDS = 5.0
_TIMED_OUT = 124  # as timeout(1) reports it
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_OF_SHELLS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"})
_WHERE = "--exec"


class StepCommand(Struct, frozen=True):
    """What runs for each step.

    Attributes:
        text: The command, as it was typed.
        words: The program and its arguments, in which {step} and {dir} stand for the number and
            the place of a step.
        jobs: How many steps it runs for at once.
        timeout_seconds: After which it is stopped; None for no limit.
    """

    text: str
    words: tuple[str, ...]
    jobs: int = 1
    timeout_seconds: float | None = None

    @classmethod
    def parse(cls, text: str, *, jobs: int, timeout_seconds: float | None) -> StepCommand:
        """Splits a command as a shell would, and checks it."""
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise UsageError(f"{text!r} cannot be split: {error}", where=_WHERE) from error
        wrong = next((w for w in words if w in _OF_SHELLS), None)
        if wrong is not None:
            raise UsageError(
                f"has {wrong!r}, which only a shell understands, and the command runs without one",
                where=_WHERE,
                hint=_propose_shell(text),
            )
        command = cls(text, words, jobs, timeout_seconds)
        command.fill(0, "")
        program = words[0] if words else ""
        if not _PLACEHOLDER.search(program) and shutil.which(program) is None:
            raise UsageError(
                f"{program!r} is no program that can be run here",
                where=_WHERE,
                hint="pass one that is on the PATH, or its absolute path, and may be executed",
            )
        return command

    def fill(self, step: int, place: str) -> list[str]:
        """Returns the words for a step."""
        values = {"step": str(step), "dir": place}

        def value(match: re.Match[str]) -> str:
            if match[1] in values:
                return values[match[1]]
            raise UsageError(
                f"has {match[0]}, where {{step}} or {{dir}} was expected",
                where=_WHERE,
                hint="write another name in braces in a script of its own",
            )

        return [_PLACEHOLDER.sub(value, word) for word in self.words]


def _propose_shell(text: str) -> str:
    """Returns a hint by which a shell runs a command, and takes a place as it is."""
    if {"'", '"', "\\"} & {*text}:  # what is quoted may stand for itself
        return (
            "put it into a script that takes the step and its place as $1 and $2, and pass"
            f" {_WHERE} 'sh SCRIPT {{step}} {{dir}}'"
        )
    inside = text.replace("{step}", '"$1"').replace("{dir}", '"$2"')
    words = shlex.join(["sh", "-c", inside, "sh", "{step}", "{dir}"])
    return f"pass {_WHERE} {shlex.quote(words)}"


class StepCommands:
    """Runs the command for each step, in threads of this process."""

    def __init__(
        self,
        command: StepCommand,
        run: WatchedRun,
        journal: CommandJournal,
        report: Callable[[CommandRun], None],
        wake: Callable[[], None],
    ) -> None:
        """Takes the callers' functions: `report` hears of starts and ends, `wake` ends a pause."""
        self._command = command
        self._run = run
        self._journal = journal
        self._report = report
        self._wake = wake
        self._running: dict[int, tuple[subprocess.Popen[bytes], threading.Thread]] = {}
        self._errors: list[CkptkitError] = []
        self._lock = threading.RLock()
        self._closing = False

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._command.jobs

    def waiting(self, steps: Sequence[RunStep], choice: PushChoice) -> list[RunStep]:
        """Returns the steps that the command has not run for; those that were interrupted first."""
        digests = {step.step: step.digest for step in steps}
        by_number = {step.step: step for step in steps}
        known = self._journal.runs
        interrupted = [
            number
            for number, entry in known.items()
            if entry.state == "running" and digests.get(number) == entry.digest
        ]
        earlier = {
            number: StepPush(
                number, e.digest, "pushed", "", save_number=e.save_number, metrics=e.metrics
            )
            for number, e in known.items()
        }
        new = choose_steps(steps, digests, earlier, choice)
        return [by_number[n] for n in (*interrupted, *new) if n not in self._running]

    def start(self, step: RunStep) -> None:
        """Starts the command for a step, which is kept from pruning until it has ended."""
        if self._errors:
            raise self._errors.pop()
        words = self._command.fill(step.step, make_absolute(self._run.place_of(step)))
        log = self._journal.log_of(step.step)
        entry = CommandRun(
            step=step.step,
            digest=step.digest,
            state="running",
            command=self._command.text,
            log=str(log),
            save_number=step.save_number,
            metrics=dict(step.metrics),
        )
        with ExitStack() as stack:
            stack.enter_context(self._run.hold(step))
            self._note(entry)
            process = self._open(words, log)
            stack.callback(process.__exit__, None, None, None)
            thread = threading.Thread(
                target=self._follow,
                args=(entry, process, stack.pop_all()),
                name=f"ckptkit-exec-{step.step}",
                daemon=True,
            )
        with self._lock:
            self._running[step.step] = process, thread
        self._report(entry)
        thread.start()

    def close(self) -> None:
        """Stops what runs, and waits until it has ended; it runs again in the next watch."""
        with self._lock:
            self._closing = True
            running = list(self._running.values())
        for process, _ in running:
            _stop(process)
        for _, thread in running:
            if thread.ident is not None:
                thread.join()

    def _open(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        guard = [sys.executable, "-I", "-S", command_guard.__file__, str(_GRACE_SECONDS)]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)  # never written through, since it may be a link
            with log.open("xb") as file:
                return subprocess.Popen(  # noqa: S603  the user's own command
                    [*guard, *words],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise OutputError(
                f"the command cannot be started: {error.strerror or error}", where=str(log)
            ) from error

    def _follow(
        self, entry: CommandRun, process: subprocess.Popen[bytes], stack: ExitStack
    ) -> None:
        began = time.monotonic()
        with stack:
            try:
                status = process.wait(self._command.timeout_seconds)
            except subprocess.TimeoutExpired:
                _stop(process)
                process.wait()
                status = _TIMED_OUT
        done = replace(
            entry,
            state="ended",
            status=status,
            at=time.strftime(TIME_FORMAT, time.gmtime()),
            seconds=round(time.monotonic() - began, 3),
        )
        if not self._closing:
            try:
                self._note(done)
            except CkptkitError as error:
                self._errors.append(error)
            self._report(done)
        del self._running[entry.step]
        self._wake()

    def _note(self, entry: CommandRun) -> None:
        with self._lock:
            self._journal.note(entry)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None  # noqa: S101  it is a pipe
    with suppress(OSError):
        process.stdin.close()
