"""`ckptkit batch`: many jobs, of which none can harm another.

Running the jobs of a batch: each in a process of its own, so that none can harm another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer

from ckptkit.core.errors import InputError, UsageError
from ckptkit.options import check_if_exists, positive_number
from ckptkit_cli._job_options import Events
from ckptkit_cli._output import Output, counted, exit_with, first_of, told
from ckptkit_cli.batch.jobs import BatchJob

_STDIN = "-"
_LISTED = 10


def batch(
    context: typer.Context,
    jobs: Annotated[
        str,
        typer.Argument(
            metavar="JOBS.jsonl",
            help="One JSON object a line: the command, and its arguments and options by their"
            " names; - for stdin.",
            show_default=False,
        ),
    ],
    at_once: Annotated[
        str, typer.Option("--jobs", metavar="N", help="How many jobs run at a time.")
    ] = "1",
    if_exists: Annotated[
        str | None,
        typer.Option(
            "--if-exists",
            metavar="error|verify",
            help="Given to each job that has such an option and does not say itself; with 'verify'"
            " a batch that was stopped can be run again.",
            show_default=False,
        ),
    ] = None,
    events: Events = False,
) -> None:
    """Run many jobs.

    All lines are checked before the first job runs. Each job runs in a process of its own; one
    that fails does not stop the others. Results are JSON lines on stdout, as jobs end. Exits with
    the status of the first line whose job failed.
    """
    output = Output(events=events)
    with told(output):
        found = _read(jobs, _commands(context), if_exists)
        count = positive_number(at_once, option="--jobs", example=2) or 1
        ended: list[Ended] = []
        for one in BatchRun(output, at_once=count).run(found):
            ended.append(one)
            output.record(one.to_json())
        failed = sorted((one.job.line, one.status) for one in ended if one.status)
        if failed:
            named = "line" if len(failed) == 1 else "lines"
            lines = ", ".join(first_of([str(line) for line, _ in failed], _LISTED))
            output.warn(f"{len(failed):,} of {counted(len(ended), 'job')} failed: {named} {lines}")
        output.event("ended", jobs=len(ended), failed=len(failed))
        if failed:
            exit_with(failed[0][1])


def _read(jobs: str, commands: Mapping[str, Any], if_exists: str | None) -> Sequence[Any]:
    """Reads and checks all lines."""
    from ckptkit_cli.batch.jobs import read_jobs

    if if_exists is not None:
        check_if_exists(if_exists, overwrite=False)
    defaults = {} if if_exists is None else {"if-exists": if_exists}
    found, errors = read_jobs(_lines(jobs), commands, defaults)
    if errors:
        more = "".join(f"; {error}" for error in errors[1:_LISTED])
        left = len(errors) - _LISTED
        raise UsageError(
            f"{errors[0].message}{more}{f'; and {left:,} more' if left > 0 else ''}",
            where=errors[0].where,
            hint=errors[0].hint or "nothing was run; mend the lines and run again",
        )
    if not found:
        raise UsageError("holds no job", where=jobs)
    return found


def _lines(jobs: str) -> Sequence[str]:
    try:
        text = sys.stdin.read() if jobs == _STDIN else Path(jobs).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", where=jobs) from error
    return text.split("\n")


def _commands(context: typer.Context) -> Mapping[str, Any]:
    return dict(_named(context.find_root().command, ""))


def _named(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _named(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


_CHILD = "ckptkit_cli.batch.child"
_SIGNALLED = 128
_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended.

    Attributes:
        job: The job.
        status: What it exited with.
        seconds: How long it took.
        document: What it printed: its result, or what went wrong.
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
    """Runs jobs, some at a time, and ends them all when it is left."""

    def __init__(self, output: Output, *, at_once: int) -> None:
        """Prepares.

        Args:
            output: Where messages of the jobs go.
            at_once: How many jobs run at a time.
        """
        self._output = output
        self._at_once = at_once
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._ends: dict[int, threading.Event] = {}

    def run(self, jobs: Sequence[BatchJob]) -> Iterator[Ended]:
        """Yields each job when it has ended."""
        self._ends = {job.line: threading.Event() for job in jobs}
        with ThreadPoolExecutor(self._at_once) as crew:
            try:
                for future in as_completed([crew.submit(self._run, job) for job in jobs]):
                    ended = future.result()
                    if ended is not None:
                        yield ended
            finally:
                self._stop()
                crew.shutdown(cancel_futures=True)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
            for process in running:
                process.terminate()
        for process in running:
            try:
                process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:  # it hangs; what it leaves is swept by the next run
                process.kill()

    def _run(self, job: BatchJob) -> Ended | None:
        """Runs a job after those that it depends on, which come earlier and are under way."""
        try:
            for line in job.after:
                self._ends[line].wait()
            return self._run_now(job)
        finally:
            self._ends[job.line].set()

    def _run_now(self, job: BatchJob) -> Ended | None:
        began = time.perf_counter()
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(  # noqa: S603  it is this very program
                [sys.executable, "-P", "-m", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self._running.add(process)
        try:
            text = self._conversation(process, job)
        finally:
            with self._lock:
                self._running.discard(process)
        status = process.returncode
        status = status if status >= 0 else _SIGNALLED - status
        return Ended(job, status, time.perf_counter() - began, _document(text, status))

    def _conversation(self, process: subprocess.Popen[bytes], job: BatchJob) -> bytes:
        given, answer = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        said = cast(IO[bytes], process.stderr)
        events = ["--events"] if self._output.events and job.takes_events else []
        words = [*job.command.split(), "--json", *events, *job.words]
        with process:
            listener = threading.Thread(target=self._pass_on, args=(said, job))
            listener.start()
            try:
                given.write(json.dumps(words).encode() + b"\n")
                given.flush()
            except BrokenPipeError:  # it died already, and its status says so
                pass
            text = answer.read()
            listener.join()
            process.wait()
        return text

    def _pass_on(self, stream: IO[bytes], job: BatchJob) -> None:
        for line in stream:
            text = line.decode(errors="backslashreplace").rstrip()
            with self._lock:
                self._tell(text, job)

    def _tell(self, text: str, job: BatchJob) -> None:
        if not self._output.events:
            self._output.note(f"line {job.line}: {text}")
            return
        mark = {"line": job.line} | ({} if job.name is None else {"id": job.name})
        try:
            event = json.loads(text)
            name = event.pop("event")
            event.pop("time", None)
        except (ValueError, LookupError, TypeError, AttributeError):
            name, event = "message", {"message": text}
        self._output.event(name, **mark, **event)


def _document(text: bytes, status: int) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        message = f"the process ended with status {status} and no result"
        return {"error": {"code": "no-result", "where": "", "message": message, "hint": ""}}
