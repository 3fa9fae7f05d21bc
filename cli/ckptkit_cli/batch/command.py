"""`ckptkit batch`: runs many jobs, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, cast, get_args

import typer
from msgspec import Struct

from ckptkit.core.errors import InputError, UsageError
from ckptkit.options import IfExists, positive_number
from ckptkit_cli._command import Argument, Option, command
from ckptkit_cli._options import EVENTS, LIMITS, WRITTEN
from ckptkit_cli._output import Output, counted, exit_with, first_of
from ckptkit_cli.batch.jobs import BatchJob, read_jobs

_STDIN = "-"
_LISTED = 10


@command(
    Argument(
        "jobs",
        "JOBS.jsonl",
        "One JSON object per line: the command, and its arguments and options by their names; -"
        " for stdin.",
    ),
    Option(
        "--if-exists",
        WRITTEN,
        "Passed to each job whose command has this option, unless its line has it. With 'verify',"
        " an interrupted batch can be run again.",
        choices=get_args(IfExists),
    ),
    Option(
        "--jobs",
        LIMITS,
        "How many jobs run at the same time.",
        "N",
        default="1",
        parse=partial(positive_number, option="--jobs", example=2),
        keyword="at_once",
    ),
    EVENTS,
)
def batch(output: Output, jobs: str, at_once: int, if_exists: str | None) -> None:
    """Run many jobs.

        ckptkit batch jobs.jsonl --jobs 4 --if-exists verify

    A line is, for example, {"command": "consolidate", "src": "runs/a", "out": "models/a"}. All
    lines are checked before the first job runs. Each job runs in a process of its own; if one
    fails, the others continue. Results are JSON lines on stdout, as jobs end. Exits with the
    status of the first line whose job failed.
    """
    results: list[BatchResult] = []
    for result in BatchRun(output, at_once=at_once).run(_read_jobs(jobs, if_exists)):
        results.append(result)
        output.record(result.to_json())
    failed = sorted((result.job.line, result.status) for result in results if result.status)
    if failed:
        noun = "line" if len(failed) == 1 else "lines"
        lines = ", ".join(first_of([str(line) for line, _ in failed], _LISTED))
        output.warn(f"{len(failed):,} of {counted(len(results), 'job')} failed: {noun} {lines}")
    output.event("ended", jobs=len(results), failed=len(failed))
    if failed:
        exit_with(failed[0][1])


def _read_jobs(path: str, if_exists: str | None) -> Sequence[BatchJob]:
    """Reads and checks all lines."""
    from ckptkit_cli._application import make_application  # late: it imports this module

    group: Any = typer.main.get_command(make_application())
    defaults = {} if if_exists is None else {"if-exists": if_exists}
    try:
        text = sys.stdin.read() if path == _STDIN else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        from ckptkit.runs.run_paths import hint_at_near

        reason = getattr(error, "strerror", None) or str(error)
        hint = hint_at_near(path) if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"cannot be read: {reason}", where=path, hint=hint) from error
    jobs, errors = read_jobs(text.split("\n"), dict(_list_commands(group, "")), defaults)
    if errors:
        more = "".join(f"; {error}" for error in errors[1:_LISTED])
        left = len(errors) - _LISTED
        raise UsageError(
            f"{errors[0].message}{more}{f'; and {left:,} more' if left > 0 else ''}",
            where=errors[0].where,
            hint=errors[0].hint or "no job was run; correct the lines and run again",
        )
    if not jobs:
        raise UsageError("contains no job", where=path)
    return jobs


def _list_commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, entry in group.commands.items():
        if hasattr(entry, "commands"):
            yield from _list_commands(entry, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", entry


_CHILD = "ckptkit_cli.batch.child"
_SIGNALLED = 128
_STOP_SECONDS = 30.0


class BatchResult(Struct, frozen=True):
    """The result of a job.

    Attributes:
        job: The job.
        status: Its exit status.
        seconds: Its duration.
        document: The JSON document that it printed: its result, or its error.
    """

    job: BatchJob
    status: int
    seconds: float
    document: Any

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the batch's results."""
        line: dict[str, Any] = {"line": self.job.line}
        if self.job.name is not None:
            line["id"] = self.job.name
        line |= {"command": self.job.command, "exit_status": self.status}
        line["seconds"] = round(self.seconds, 3)
        if isinstance(self.document, dict) and "error" in self.document:
            return line | {"error": self.document["error"]}
        return line | {"result": self.document}


class BatchRun:
    """Runs jobs, `at_once` at the same time, and ends them all at the end of the iteration."""

    def __init__(self, output: Output, *, at_once: int) -> None:
        self._output = output
        self._at_once = at_once
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._end_events: dict[int, threading.Event] = {}

    def run(self, jobs: Sequence[BatchJob]) -> Iterator[BatchResult]:
        """Yields each job as it ends."""
        self._end_events = {job.line: threading.Event() for job in jobs}
        with ThreadPoolExecutor(self._at_once) as executor:
            try:
                for future in as_completed([executor.submit(self._run, job) for job in jobs]):
                    result = future.result()
                    if result is not None:
                        yield result
            finally:
                self._stop()
                executor.shutdown(cancel_futures=True)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
            for process in running:
                process.terminate()
        for process in running:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it hangs; the next run removes its unfinished files
                process.kill()

    def _run(self, job: BatchJob) -> BatchResult | None:
        """Runs a job after those that it depends on, which started earlier."""
        try:
            for line in job.after:
                self._end_events[line].wait()
            return self._run_now(job)
        finally:
            self._end_events[job.line].set()

    def _run_now(self, job: BatchJob) -> BatchResult | None:
        began = time.perf_counter()
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(  # noqa: S603  it is ckptkit itself
                [sys.executable, "-P", "-m", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self._running.add(process)
        try:
            text = self._communicate(process, job)
        finally:
            with self._lock:
                self._running.discard(process)
        status = process.returncode
        status = status if status >= 0 else _SIGNALLED - status
        return BatchResult(job, status, time.perf_counter() - began, _document(text, status))

    def _communicate(self, process: subprocess.Popen[bytes], job: BatchJob) -> bytes:
        """Passes the command line, forwards messages, and returns what is printed."""
        stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        stderr = cast(IO[bytes], process.stderr)
        events = ["--events"] if self._output.events and job.takes_events else []
        words = [*job.command.split(), "--json", *events, *job.words]
        with process:
            listener = threading.Thread(target=self._forward, args=(stderr, job))
            listener.start()
            try:
                stdin.write(json.dumps(words).encode() + b"\n")
                stdin.flush()
            except BrokenPipeError:  # it has died, which its status shows
                with suppress(BrokenPipeError):  # of what was not taken
                    stdin.close()
            text = stdout.read()
            listener.join()
            process.wait()
        return text

    def _forward(self, stream: IO[bytes], job: BatchJob) -> None:
        for line in stream:
            text = line.decode(errors="backslashreplace").rstrip()
            if not self._output.events:
                with self._lock:
                    self._output.note(f"line {job.line}: {text}")
                continue
            mark = {"line": job.line} | ({} if job.name is None else {"id": job.name})
            try:
                event = json.loads(text)
                name = event.pop("event")
                event.pop("time", None)
            except (ValueError, LookupError, TypeError, AttributeError):
                name, event = "message", {"message": text}
            with self._lock:
                self._output.event(name, **mark, **event)


def _document(text: bytes, status: int) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        message = f"the process ended with status {status} and no result"
        return {"error": {"code": "no-result", "where": "", "message": message, "hint": ""}}
