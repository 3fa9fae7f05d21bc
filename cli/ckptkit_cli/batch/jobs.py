"""Reads the lines of a batch, checks them together, and makes command lines of them."""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.conversion.source.open import check_path
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.text import a_kind
from ckptkit.options import Layout
from ckptkit.storage.locations import Place, Sources, parse_options, place_of
from ckptkit.storage.place_identity import PlaceRelation, find_overlaps
from ckptkit_cli._command import parse_values
from ckptkit_cli._options import CONVERSION, make_job

_SHORT = {"extract": "adapter extract", "merge": "adapter merge", "from-diff": "adapter from-diff"}
_COMMANDS = (
    *("consolidate", "convert", "verify", "diff", "inspect"),
    *("adapter extract", "adapter merge", "adapter from-diff"),
    *("push", "pull", "ls", "prune"),
)
_OWN_KEYS = ("command", "id")
_NO_KEYS = frozenset({"--help", "--json", "--events", "--quiet", "--verbose"})  # set by the batch
_MOST_CHARACTERS = 1 << 20
_WRITTEN = ("out", "folder")  # arguments; `push` reads the second
_READ_OPTIONS = (
    *("base", "config", "tokenizer", "like", "model-config", "adapter-config", "also", "with"),
)
_NO_PLACES = ("repo-id",)


class BatchJob(Struct, frozen=True):
    """One line of a batch.

    Attributes:
        line: Its number in the file, from 1.
        name: Its `id`, such as a text or a number, or None.
        command: Such as `adapter merge`.
        words: The options and arguments.
        takes_events: Whether the command has `--events`.
        out: Its output, or None.
        reads: Its sources.
        removes: Whether it removes files of its sources.
        shares: Whether it writes a slice of an output.
        after: The lines of the jobs that must end before it starts.
    """

    line: int
    name: Any
    command: str
    words: tuple[str, ...]
    takes_events: bool
    out: Place | None = None
    reads: tuple[Place, ...] = ()
    removes: bool = False
    shares: bool = False
    after: frozenset[int] = field(default_factory=frozenset)


def read_jobs(
    lines: Sequence[str], commands: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[BatchJob], list[CkptkitError]]:
    """Reads all lines; empty ones are left out.

    A job that reads what another one writes or removes runs after or before it, as the lines are.

    Args:
        lines: One JSON object each.
        commands: The commands of the program, as click has them, by name.
        defaults: Options for each job whose command has them, unless its line has them.

    Returns:
        The valid jobs, and the errors of the others.
    """
    jobs: list[BatchJob] = []
    errors: list[CkptkitError] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            jobs.append(_read_job(number, line, commands, defaults))
        except CkptkitError as error:
            errors.append(error.located(f"line {number}"))
    errors += _collisions(jobs)
    return _add_dependencies(jobs), errors


def _read_job(
    number: int, line: str, commands: Mapping[str, Any], defaults: Mapping[str, Any]
) -> BatchJob:
    document = _parse_line(line)
    # Keys are the names of options: `max_shard_size` is `max-shard-size`.
    keys = _unique((key.replace("_", "-"), value) for key, value in document.items())
    name = keys.get("command", "")
    if not isinstance(name, str):
        raise UsageError(f"is {a_kind(name)}, where a text was expected", where="command")
    command = _SHORT.get(name, name)
    if command not in _COMMANDS or command not in commands:
        listed = ", ".join(c for c in _COMMANDS if c in commands)
        raise UsageError(f"{name!r} is not among {listed}", where="command")
    parameters = _Parameters(commands[command])
    values = parameters.renamed({k: v for k, v in keys.items() if k not in _OWN_KEYS})
    if not values.get("overwrite"):  # which cannot be combined with --if-exists
        values |= {k: v for k, v in defaults.items() if parameters.knows(k) and k not in values}
    values = parameters.checked(values)
    words = tuple(parameters.words(values))
    out, reads = _places(command, parameters, values)
    if command in {"consolidate", "convert"}:  # refuses invalid values before the first job runs
        typed = parse_values(CONVERSION, parameters.with_defaults(values))
        make_job(cast(Layout, values.get("to", "hf")), typed)
    return BatchJob(
        line=number,
        name=document.get("id"),
        command=command,
        words=words,
        takes_events=parameters.knows("events"),
        out=None if values.get("dry-run") else out,
        reads=reads,
        removes=not values.get("dry-run")
        and (command == "prune" or values.get("delete-source", False)),
        shares="slice" in values,
    )


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise UsageError("is given twice", where=ascii(key)[1:-1])
        unique[key] = value
    return unique


def _places(
    command: str, parameters: _Parameters, values: Mapping[str, Any]
) -> tuple[Place | None, tuple[Place, ...]]:
    """Returns the output of a job, and its sources."""
    source_options = parse_options(values.get("src-option", ()), option="src-option")
    target_options = parse_options(values.get("dst-option", ()), option="dst-option")
    out, reads = None, []
    for name in parameters.arguments:
        if name in _WRITTEN and command != "push":
            out = place_of(values[name], target_options)
        elif name not in _NO_PLACES:
            reads.append(values[name])
    sources = Sources(reads[0], source_options) if reads else None
    for name in _READ_OPTIONS:
        paths = values.get(name, ())
        paths = [paths] if isinstance(paths, str) else paths
        reads += [_without_weight(path) if name == "with" else path for path in paths]
    return out, () if sources is None else (sources.first, *sources.further(reads[1:]))


def _without_weight(path: str) -> str:
    head, _, weight = path.rpartition("=")
    return head if head and weight.replace(".", "").isdecimal() else path


def _parse_line(line: str) -> Mapping[str, Any]:
    if len(line) > _MOST_CHARACTERS:
        raise UsageError(f"has {len(line):,} characters against at most {_MOST_CHARACTERS:,}")
    try:
        document = json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"is {a_kind(document)}, where an object was expected")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise UsageError(f"is not JSON, which has no {name}")


class _Parameters:
    """The arguments and options of a command, by the keys that a line has for them."""

    def __init__(self, command: Any) -> None:
        self._command = command
        self._arguments = [p for p in command.params if p.param_type_name == "argument"]
        self._options = {
            long.removeprefix("--"): p
            for p in command.params
            if p.param_type_name == "option"
            for long in p.opts
            if long.startswith("--") and long not in _NO_KEYS
        }
        self._events = any("--events" in p.opts for p in command.params)

    def knows(self, name: str) -> bool:
        return name in self._options or (name == "events" and self._events)

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        shown = {str(p.metavar).lower().replace("_", "-"): self._key(p) for p in self._arguments}
        return {shown.get(name, name): value for name, value in values.items()}

    def words(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yields the command line with these values."""
        for name, parameter in self._options.items():
            value = values.get(name)
            if name not in values:
                continue
            if not parameter.is_flag:
                texts = value if isinstance(value, list) else [value]
                yield from (f"--{name}={text}" for text in texts)
            elif value:
                yield f"--{name}"
            else:
                yield from parameter.secondary_opts[:1]
        yield "--"
        for name in self.arguments:
            yield values[name]

    def checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a line as texts, lists of texts, and bools."""
        keys = [*self.arguments, *self._options]
        for name in values:
            if name not in keys:
                near = difflib.get_close_matches(name, keys, 1)
                raise UsageError(
                    "the command has no such key",
                    where=ascii(name)[1:-1],
                    hint=f"write {near[0]!r}" if near else f"its keys are {', '.join(keys)}",
                )
        passed = {name: value for name, value in values.items() if value is not None}
        required = [*self.arguments, *(n for n, p in self._options.items() if p.required)]
        missing = [name for name in required if name not in passed]
        if missing:
            raise UsageError("is missing", where=missing[0])
        return {
            name: _value(name, value, self._options.get(name)) for name, value in passed.items()
        }

    @property
    def arguments(self) -> list[str]:
        return [self._key(argument) for argument in self._arguments]

    def with_defaults(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of all parameters, by the names that the function has for them."""
        named = {self._key(p): p for p in self._arguments} | self._options
        return {p.name: p.default for p in self._command.params} | {
            named[name].name: value for name, value in values.items()
        }

    @staticmethod
    def _key(argument: Any) -> str:
        return str(argument.name).replace("_", "-")


def _value(name: str, value: Any, option: Any) -> Any:
    """Returns a value as a text, as a list of texts, or as a bool.

    Args:
        name: The key.
        value: The JSON value.
        option: The option as click has it; None for an argument.
    """
    if option is not None and option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"is {a_kind(value)}, where true or false was expected", where=name)
        return value
    is_path = option is None or name in _READ_OPTIONS
    if option is None or not option.multiple:
        if isinstance(value, list):
            raise UsageError("is a list, where one value was expected", where=name)
        return _text(name, value, is_path=is_path)
    items = value if isinstance(value, list) else [value]
    return [_text(name, item, is_path=is_path) for item in items]


def _text(name: str, value: Any, *, is_path: bool) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, str) and (is_path or not is_number):
        expected = "a text" if is_path else "a text or a number"
        raise UsageError(f"is {a_kind(value)}, where {expected} was expected", where=name)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError("is not a finite number", where=name)
    text = str(value)
    if "\0" in text or (
        not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)
    ):
        raise UsageError(f"contains an invalid character: {ascii(text)[:80]}", where=name)
    if is_path:
        check_path(text, name)
    return text


def _collisions(jobs: Sequence[BatchJob]) -> Iterator[CkptkitError]:
    """Yields an error for each job whose output overlaps that of an earlier one."""
    writing = [job for job in jobs if job.out is not None]
    for a, b, overlap in find_overlaps([cast(Place, job.out) for job in writing]):
        first, second = sorted((writing[a], writing[b]), key=lambda job: job.line)
        is_same = overlap is PlaceRelation.SAME
        if is_same and first.shares and second.shares:
            continue
        is_inner = (overlap is PlaceRelation.INSIDE) == (second is writing[a])
        how = "to the same directory as" if is_same else "inside the output of"
        if not is_same and not is_inner:
            how = "around the output of"
        yield UsageError(
            f"writes {how} line {first.line}",
            where=f"line {second.line}: {cast(Place, second.out).location}",
            hint="use a separate output for each job",
        )


def _add_dependencies(jobs: Sequence[BatchJob]) -> list[BatchJob]:
    """Returns the jobs with the earlier ones that they depend on, by what they read and write."""
    places: dict[tuple[str, str], Place] = {}
    users: dict[tuple[str, str], list[tuple[BatchJob, bool]]] = {}
    for job in jobs:
        used = [(place, job.removes) for place in job.reads]
        used += [] if job.out is None else [(job.out, True)]
        for place, changes in used:
            key = (place.location, repr(sorted(place.options.items(), key=str)))
            places.setdefault(key, place)
            users.setdefault(key, []).append((job, changes))
    keys = list(places)
    groups = [[key] for key in keys]
    groups += [[keys[a], keys[b]] for a, b, _ in find_overlaps([places[key] for key in keys])]
    after: dict[int, set[int]] = {job.line: set() for job in jobs}
    for group in groups:
        # The later one of two jobs waits if one changes what the other uses.
        using = [use for key in group for use in users[key]]
        changing = [job for job, changes in using if changes]
        for first, (second, _) in itertools.product(changing, using):
            slices = first.shares and second.shares and first.out == second.out
            if first.line != second.line and not slices:
                after[max(first.line, second.line)].add(min(first.line, second.line))
    return [replace(job, after=frozenset(after[job.line])) for job in jobs]
