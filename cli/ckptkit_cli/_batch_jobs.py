"""The lines of a batch: read, checked as a whole, and turned into command lines."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.texts import a_kind
from ckptkit.planning.requests import Layout
from ckptkit.storage.locations import place_of
from ckptkit_cli._conversion import job_of

_SHORT = {"extract": "adapter extract", "merge": "adapter merge", "from-diff": "adapter from-diff"}
_COMMANDS = (
    *("consolidate", "convert", "verify", "diff", "inspect"),
    *("adapter extract", "adapter merge", "adapter from-diff"),
    *("push", "pull", "ls", "prune"),
)
_OWN_KEYS = ("command", "id")
_GIVEN = frozenset({"--help", "--json", "--events", "--quiet"})  # a batch decides about them
_MOST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One line of a batch.

    Attributes:
        line: Its number in the file, the first being 1.
        name: What the user calls it, such as a text or a number; None where it has no name.
        command: Such as `adapter merge`.
        words: The options and arguments.
        takes_events: Whether the command has `--events`.
        out: Where its output goes; empty for none, and for one that it shares.
    """

    line: int
    name: Any
    command: str
    words: tuple[str, ...]
    takes_events: bool
    out: str


def read_jobs(
    lines: Sequence[str], commands: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[BatchJob], list[CkptkitError]]:
    """Reads all lines; empty ones are left out.

    Args:
        lines: One JSON object each.
        commands: What the program knows, by name: commands as click has them.
        defaults: Options that are given to each job that has them and does not say itself.

    Returns:
        The jobs, and what is wrong with the others.
    """
    jobs: list[BatchJob] = []
    errors: list[CkptkitError] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            jobs.append(_job(number, line, commands, defaults))
        except CkptkitError as error:
            errors.append(error.located(f"line {number}"))
    errors += _collisions(jobs)
    return jobs, errors


def _job(
    number: int, line: str, commands: Mapping[str, Any], defaults: Mapping[str, Any]
) -> BatchJob:
    document = _document(line)
    given = {str(key).replace("_", "-"): value for key, value in document.items()}
    name = str(given.get("command", ""))
    command = _SHORT.get(name, name)
    if command not in _COMMANDS or command not in commands:
        known = ", ".join(c for c in _COMMANDS if c in commands)
        raise UsageError(f"{name!r} is not among {known}", where="command")
    parameters = _Parameters(commands[command])
    values = parameters.renamed({k: v for k, v in given.items() if k not in _OWN_KEYS})
    if not values.get("overwrite"):  # which would contradict what is given to all
        values |= {k: v for k, v in defaults.items() if parameters.knows(k) and k not in values}
    words = tuple(parameters.words(values))
    if command in {"consolidate", "convert"}:  # refuses values before the first job runs
        job_of(command, cast(Layout, values.get("to", "hf")), parameters.given(values))
    return BatchJob(
        line=number,
        name=document.get("id"),
        command=command,
        words=words,
        takes_events=parameters.knows("events"),
        out=_written(command, values),
    )


def _written(command: str, values: Mapping[str, Any]) -> str:
    """Returns where no other job may write, unlike slices of one output; empty for nowhere.

    Raises:
        UsageError: If a password stands in a URL.
    """
    if values.get("dry-run") or values.get("slice"):
        return ""
    return str(place_of(str(values.get("folder" if command == "pull" else "out", ""))))


def _document(line: str) -> Mapping[str, Any]:
    if len(line) > _MOST_LINE:
        raise UsageError(f"has {len(line):,} characters against at most {_MOST_LINE:,}")
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"is {a_kind(document)}, where an object was expected")
    return document


class _Parameters:
    """The arguments and options of a command, by the names that a job gives them."""

    def __init__(self, command: Any) -> None:
        self._command = command
        self._arguments = [p for p in command.params if p.param_type_name == "argument"]
        self._options = {
            long.removeprefix("--"): p
            for p in command.params
            if p.param_type_name == "option"
            for long in p.opts
            if long.startswith("--") and long not in _GIVEN | {"--events"}
        }
        self._events = any("--events" in p.opts for p in command.params)

    def knows(self, name: str) -> bool:
        return name in self._options or (name == "events" and self._events)

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values by the names of arguments where they are given as help shows them."""
        shown = {str(p.metavar).lower().replace("_", "-"): self._key(p) for p in self._arguments}
        return {shown.get(name, name): value for name, value in values.items()}

    def words(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yields the command line that gives these values.

        Raises:
            UsageError: If one is unknown or missing, or has not the form that it needs.
        """
        places = [self._key(argument) for argument in self._arguments]
        known = [*places, *self._options]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise UsageError(
                    "the command knows no such key",
                    where=name,
                    hint=f"write {near[0]!r}" if near else f"known are {', '.join(known)}",
                )
        missing = [name for name in places if name not in values]
        missing += [n for n, p in self._options.items() if p.required and n not in values]
        if missing:
            raise UsageError("is missing", where=missing[0])
        for name, parameter in self._options.items():
            if values.get(name) is not None:
                yield from _option_words(name, parameter, values[name])
        yield "--"
        for name in places:
            yield _text(name, values[name])

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all values, and the defaults of others, by the names of the function's own."""
        found = {p.name: p.default for p in self._command.params}
        for name, parameter in [*self._named_arguments(), *self._options.items()]:
            value = values.get(name)
            if value is not None:
                several = parameter.multiple and not isinstance(value, list)
                found[parameter.name] = [value] if several else value
        return found

    def _named_arguments(self) -> Iterator[tuple[str, Any]]:
        for argument in self._arguments:
            yield self._key(argument), argument

    @staticmethod
    def _key(argument: Any) -> str:
        return str(argument.name).replace("_", "-")


def _option_words(name: str, parameter: Any, value: Any) -> Iterator[str]:
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"is {a_kind(value)}, where true or false was expected", where=name)
        if value:
            yield f"--{name}"
        else:
            yield from parameter.secondary_opts[:1]
        return
    several = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not parameter.multiple:
        raise UsageError("is a list, where one value was expected", where=name)
    for one in several:
        yield f"--{name}={_text(name, one)}"


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UsageError(f"is {a_kind(value)}, where a text or a number was expected", where=name)
    return str(value)


def _collisions(jobs: Sequence[BatchJob]) -> Iterator[CkptkitError]:
    """Yields the jobs that write where another one does."""
    seen: dict[str, int] = {}
    for job in jobs:
        if not job.out:
            continue
        place = job.out if "://" in job.out else os.path.realpath(job.out)
        first = seen.setdefault(place, job.line)
        if first != job.line:
            yield UsageError(
                f"writes to the same directory as line {first}",
                where=f"line {job.line}: {job.out}",
                hint="give each job an output of its own",
            )
