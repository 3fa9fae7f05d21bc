"""`ckptkit batch`: many jobs, of which none can harm another."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.core.errors import InputError, UsageError
from ckptkit.planning.requests import check_if_exists, positive_number
from ckptkit_cli._failures import exit_with, told
from ckptkit_cli._job_options import Events
from ckptkit_cli._output import Output
from ckptkit_cli._text import counted, first_of

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
        from ckptkit_cli._batch_run import BatchRun, Ended

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
    """Reads and checks all lines.

    Raises:
        UsageError: If one of them is wrong.
    """
    from ckptkit_cli._batch_jobs import read_jobs

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
    """Returns the commands by their names, those of groups as `group command`."""
    return dict(_named(context.find_root().command, ""))


def _named(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _named(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command
