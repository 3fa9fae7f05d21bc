"""Command lines that are not understood: options that are given twice, misspelt or unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptkit_cli._program import all_commands, make_application
from ckptkit_cli.main import main

COMMANDS = all_commands(make_application())
OPTIONS = [
    (words, option)
    for words, command in COMMANDS.items()
    for option in command.params
    if option.param_type_name == "option"
]


def named(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value.opts[0])


def command_line(words: tuple[str, ...], *options: str) -> list[str]:
    """Returns a command line with all arguments, of which none leads anywhere."""
    arguments = [p for p in COMMANDS[words].params if p.param_type_name == "argument"]
    return [*words, *options, *["/nowhere/at/all"] * len(arguments)]


@pytest.mark.parametrize(
    ("words", "option"),
    [(w, o) for w, o in OPTIONS if not o.multiple and not (o.is_flag and not o.secondary_opts)],
    ids=named,
)
def test_an_option_that_takes_one_value_is_refused_when_given_twice(
    words: tuple[str, ...], option: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for first in (*option.opts, *option.secondary_opts):
        for second in (*option.opts, *option.secondary_opts):
            flag = option.is_flag
            given = [first, second] if flag else [f"{first}=1", second, "2"]
            assert main(command_line(words, *given)) == 2
            told = capfd.readouterr()
            assert told.out == ""
            assert f"'{option.opts[0]}" in told.err
            assert "takes one value, and was given more than once" in told.err


def test_there_are_options_of_each_kind() -> None:
    assert {(bool(o.is_flag), bool(o.multiple)) for _, o in OPTIONS} == {
        (False, False),
        (True, False),
        (False, True),
    }
    assert any(option.secondary_opts for _, option in OPTIONS)


def test_lone_flags_and_repeatable_options_may_be_given_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = ["--include", "a", "--include=b", "--overwrite", "--overwrite", "--json", "--json"]
    assert main(command_line(("consolidate",), *given)) == 3
    assert json.loads(capfd.readouterr().out)["error"]["code"] == "not-a-checkpoint"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify x --json --jsn", "No such option: --jsn. Did you mean --json?"),
        ("verify --json", "Missing argument 'PATH'."),
        ("consolidate a b --base A --json --base B", "Option '--base' takes one value"),
        ("consolidate a --json b c", "Got unexpected extra argument"),
        ("adapter extract a --json", "Missing argument 'OUT'."),
        ("verfy x --json", "No such command 'verfy'. Did you mean 'verify'?"),
        ("consolidate a b --json --workers", "requires an argument"),
    ],
)
def test_a_document_tells_what_was_not_understood(
    line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = line.split()
    assert main(words) == 2
    told = capfd.readouterr()
    error = json.loads(told.out)["error"]
    assert (error["code"], error["where"][:7]) == ("bad-option", "ckptkit")
    assert message in error["message"]
    assert message in told.err
    assert main([word for word in words if word != "--json"]) == 2
    assert capfd.readouterr().out == ""


def test_events_tell_what_was_not_understood(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", "a", "b", "--events", "--bogus"]) == 2
    told = capfd.readouterr()
    event = json.loads(told.err)
    assert (event["event"], event["exit_status"], told.out) == ("failed", 2, "")
    assert main(["verify", "--", "--json", "x"]) == 2  # names of files
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("option", "proposed"),
    [
        ("--tokeniser", "Did you mean --tokenizer?"),
        ("--conf", "Did you mean --config?"),
        ("--dtpye", "Did you mean --dtype?"),
        ("--dry", "Did you mean --dry-run?"),
        ("--exlude", "Did you mean --exclude"),
        ("--max_shard_size", "Did you mean --max-shard-size?"),
        ("--force", "--overwrite replaces"),
    ],
)
def test_an_unknown_option_is_refused_with_what_was_meant(
    option: str, proposed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["consolidate", "a", "b", option, "x"]) == 2
    told = capfd.readouterr().err
    assert proposed in told
    assert "--engine" not in told


def test_nothing_is_proposed_that_the_command_does_not_have(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "a", "--tokenizer", "x"]) == 2
    assert capfd.readouterr().err.endswith("Error: No such option: --tokenizer.\n")
