"""Lines of a batch may hold any JSON: each becomes a job, or an error that names the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import typer
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.core.errors import UsageError
from ckptkit_cli._application import make_application
from ckptkit_cli.batch.jobs import read_jobs


def all_commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from all_commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


Test = Callable[[list[Any]], None]
COMMANDS = dict(all_commands(typer.main.get_command(make_application())))
FIELDS = sorted(
    {"command", "id", "repo_id", "unknown"}
    | {p.name for command in COMMANDS.values() for p in command.params}
    | {long[2:] for c in COMMANDS.values() for p in c.params for long in p.opts if "--" in long}
)
TEXTS = st.one_of(
    st.text(st.characters(codec=None), max_size=20),
    st.sampled_from(["", "\0", "a\0b", "\ud800", "a/\udcff", "s3://", "file://", "://", "/" * 300]),
    st.sampled_from(["x" * 5000, "~", ".", "..", "s3://k:pa55word@b/x", "bf16", "1/2", "k=v"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=6,
)
GOOD: dict[str, Any] = {"command": "consolidate", "src": "a", "out": "b"}
LINES = st.one_of(
    VALUES,
    st.builds(lambda more: GOOD | more, st.dictionaries(st.sampled_from(FIELDS), VALUES)),
    st.builds(
        lambda command, more: {"command": command, "path": "a", "run": "a"} | more,
        st.sampled_from(sorted(COMMANDS)),
        st.dictionaries(st.sampled_from(FIELDS), VALUES),
    ),
)


def with_each_value(value: Any) -> Callable[[Test], Test]:
    """Adds an example for each field that holds a value."""

    def add(test: Test) -> Test:
        for field in FIELDS:
            test = example([GOOD | {field: value}])(test)
        return test

    return add


@with_each_value(5)
@with_each_value(float("nan"))
@with_each_value("\0")
@with_each_value("\ud800")
@with_each_value([[]])
@with_each_value({})
@given(st.lists(LINES, max_size=3))
def test_each_line_is_a_job_or_an_error_that_names_it(lines: list[Any]) -> None:
    jobs, errors = read_jobs([json.dumps(line) for line in lines], COMMANDS, {})
    for job in jobs:
        for word in job.words:
            assert "\0" not in word
            assert word.encode()
        assert json.loads(json.dumps(job.name, allow_nan=False)) == job.name
        assert all(line < job.line for line in job.after)
    named = [job.line for job in jobs]
    for error in errors:
        assert isinstance(error, UsageError)
        assert error.where.startswith("line ")
        assert "pa55word" not in str(error)
        str(error).encode()
        named.append(int(error.where.split()[1].rstrip(":")))
    assert set(named) == set(range(1, len(lines) + 1))


@given(st.text(st.characters(codec=None), max_size=40))
def test_a_line_of_anything_is_no_job(line: str) -> None:
    jobs, errors = read_jobs([line], COMMANDS, {})
    assert not jobs
    assert all(isinstance(error, UsageError) for error in errors)
