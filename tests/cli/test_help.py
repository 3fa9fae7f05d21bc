"""The help of the commands, shell completion, and the table of options behind both."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from ckptkit.adapter_api import AdapterOptions, DiffOptions, MergeOptions
from ckptkit.api import Options
from ckptkit.delta_api import ApplicationOptions, CreationOptions
from ckptkit.options import ConsolidateRequest, Resources
from ckptkit_cli._application import make_application
from ckptkit_cli._command import Option, parse_values
from ckptkit_cli._options import CONVERSION
from tests.command_line import run_command

COMMAND_GROUPS = ("adapter", "delta")
PROGRAM: Any = typer.main.get_command(make_application())
GROUPS = {
    *("What is read", "What is written", "Names and types", "Limits", "Many machines"),
    *("What is compared", "What is averaged"),
    *("Storage", "Output", "Which steps stay", "Which steps are pushed", "When"),
    *("The repository", "What is uploaded", "Without an adapter_config.json"),
    *("Where it is served", "Merging an adapter"),
}


def all_commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from all_commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(all_commands(PROGRAM))


def options_of(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option"]


def help_of(*words: str, columns: int, colour: bool = False) -> str:
    """Returns the help in a terminal of that width; without colour it is not a terminal."""
    if not colour:
        return checked(*words, "--help", COLUMNS=str(columns))
    command = [sys.executable, "-m", "ckptkit_cli", *words, "--help"]
    command = ["script", "--quiet", "--command", shlex.join(command), "/dev/null"]
    return subprocess.run(
        command,
        env={**os.environ, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def checked(*words: str, **environment: str) -> str:
    result = run_command(*words, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "words", [(), *((group,) for group in COMMAND_GROUPS), *COMMANDS], ids=" ".join
)
def test_the_help_of_each_command_opens_with_examples_that_parse(words: tuple[str, ...]) -> None:
    command = PROGRAM
    for word in words:
        command = command.commands[word]
    _, examples, *_ = inspect.cleandoc(command.help).split("\n\n")
    for line in examples.splitlines():
        assert line.startswith("    ckptkit ")
        typed = shlex.split(line)[1:]
        name = tuple(typed[:2] if typed[0] in COMMAND_GROUPS else typed[:1])
        assert name[: len(words)] == words
        COMMANDS[name].make_context(" ".join(name), typed[len(name) :])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_each_option_is_in_a_group(words: tuple[str, ...]) -> None:
    options = [option for option in options_of(COMMANDS[words]) if option.name != "help"]
    assert {option.rich_help_panel for option in options} <= GROUPS
    assert all(option.help.endswith((".", "]", "...")) for option in options)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_uses_the_width_of_the_terminal_up_to_100_columns(columns: int) -> None:
    widths = [len(line) for line in help_of("consolidate", columns=columns).splitlines()]
    assert columns - 8 < max(widths) <= columns


@pytest.mark.skipif(sys.platform != "linux", reason="needs script of util-linux")
def test_headings_and_options_have_colours_in_a_terminal_alone() -> None:
    assert "\x1b[" not in help_of("pull", columns=80)
    shown = help_of("pull", columns=80, colour=True)
    assert "\x1b[1mWhat is read\x1b[0m:" in shown
    assert "\x1b[36m--revision R\x1b[0m" in shown


def complete(line: str, shell: str = "bash") -> str:
    """Returns what the script of a shell would get for a line with the cursor at its end."""
    words = line.split()
    environment = {
        "_CKPTKIT_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - (not line.endswith(" "))),
    }
    if shell != "bash":
        environment = {"_CKPTKIT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
        environment["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    return checked(**environment)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckptkit con", ["consolidate", "convert"]),
        ("ckptkit consolidate --max", ["--max-shard-size"]),
        ("ckptkit consolidate --dtype b", ["bfloat16", "base"]),
        ("ckptkit convert a b --to ", ["hf", "torch", "dcp", "megatron", "torchtitan"]),
        ("ckptkit adapter ", ["extract", "merge", "from-diff"]),
        ("ckptkit delta ", ["create", "apply"]),
        ("ckptkit adapter merge --qlora-base ", ["dequantized", "original"]),
        ("ckptkit watch --as ", ["auto", "model", "adapter", "merged"]),
        ("ckptkit inspect ", []),
    ],
)
def test_bash_completes_commands_options_and_values(line: str, expected: list[str]) -> None:
    assert complete(line).split() == expected


def test_zsh_and_fish_complete_with_one_line_of_help() -> None:
    assert complete("ckptkit verify --sel", "fish") == (
        "--select\tModel or checkpoint to take where there are several\n"
    )
    assert complete("ckptkit verify --sel", "zsh") == (
        '_arguments \'*: :(("--select":"Model or checkpoint to take where there are several"))\'\n'
    )


def test_paths_are_completed_by_the_shell() -> None:
    """Where nothing is proposed, bash and fish fall back to files, and zsh is asked to."""
    assert not complete("ckptkit inspect run").strip()
    assert complete("ckptkit inspect run", "zsh").strip() == "_files"
    assert complete("ckptkit inspect --base run", "zsh").strip() == "_files"
    assert not complete("ckptkit inspect run", "fish").strip()
    script = checked("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default" in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_shown(shell: str) -> None:
    shown = checked("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert f"_CKPTKIT_COMPLETE=complete_{shell}" in shown


CLI_ONLY = {"dry_run", "slice", "as_json", "quiet", "events", "verbose", "report"}
API_ONLY = {"listener", "progress"}
RENAMED = {"src_option": "src_options", "dst_option": "dst_options"}
OF_MERGING = {"adapter": "adapters"} | dict.fromkeys(
    ("lora_alpha", "use_rslora", "fan_in_fan_out", "token_indices"), "overrides"
)


@pytest.mark.parametrize(
    ("words", "of_api", "renamed"),
    [
        (("consolidate",), Options, {}),
        (("adapter", "extract"), AdapterOptions, {}),
        (("adapter", "merge"), MergeOptions, OF_MERGING),
        (("delta", "create"), CreationOptions, {}),
        (("delta", "apply"), ApplicationOptions, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_command_and_a_function_have_the_same_options(
    words: tuple[str, ...], of_api: Any, renamed: dict[str, str]
) -> None:
    names = {option.name for option in options_of(COMMANDS[words])} - CLI_ONLY - {"help"}
    assert {(RENAMED | renamed).get(name, name) for name in names} == (
        set(of_api.__annotations__) - API_ONLY
    )


def test_from_diff_has_the_options_of_its_function() -> None:
    options = options_of(COMMANDS[("adapter", "from-diff")])
    names = {RENAMED.get(option.name, option.name) for option in options} - CLI_ONLY
    assert names - {"base", "rank"} == set(DiffOptions.__annotations__) - API_ONLY


def test_options_that_are_not_passed_are_the_defaults_of_the_library() -> None:
    typed = {
        entry.name: parameter.default
        for entry in CONVERSION
        if isinstance(entry, Option)
        for parameter in [entry.parameter()]
    }
    values = parse_values(CONVERSION, typed)
    assert ConsolidateRequest.from_options(values) == ConsolidateRequest()
    assert Resources.from_options(values) == Resources()
    assert {*ConsolidateRequest.__dataclass_fields__} - {"max_file_bytes", "layout"} <= {*values}
