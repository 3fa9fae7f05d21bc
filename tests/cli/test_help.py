"""The help of the commands, shell completion, and the table of options behind both."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from ckptkit.api import (
    AdapterOptions,
    ApplicationOptions,
    CreationOptions,
    DiffOptions,
    MergeOptions,
    Options,
)
from ckptkit.options import ConsolidateRequest, Layout, Resources
from ckptkit_cli._options import CONVERSION
from ckptkit_cli._program import Option, all_commands, make_application, parse_values
from tests.command_line import run_command

COMMAND_GROUPS = ("adapter", "delta")
PROGRAM: Any = make_application()
GROUPS = {
    *("What is read", "What is written", "Names and types", "Limits", "Many machines"),
    *("What is compared", "What is averaged"),
    *("Storage", "Output", "Which steps stay", "Which steps are pushed", "When"),
    "What is done with each step",
    *("The repository", "What is uploaded", "Without an adapter_config.json"),
    *("Where it is served", "Merging an adapter"),
}


COMMANDS = all_commands(PROGRAM)


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
    assert {option.group for option in options} <= GROUPS
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


def complete(line: str, shell: str = "bash") -> list[tuple[str, str]]:
    """Returns what the script of a shell gets for a line with the cursor at its end.

    These are kinds and values, the kind "file" where the shell is to complete paths.
    """
    words = line.split()
    position = len(words) - (not line.endswith(" "))
    environment = {"COMP_WORDS": line, "COMP_CWORD": str(position)}
    if shell == "fish":
        environment["COMP_CWORD"] = "" if line.endswith(" ") else words[-1]
    found = checked(**environment, _CKPTKIT_COMPLETE=f"{shell}_complete")
    if shell == "zsh":
        kinds, values, helps = (found.splitlines()[n::3] for n in range(3))
        return [(kind, f"{v}: {h}") for kind, v, h in zip(kinds, values, helps, strict=True)]
    return [(kind, value) for kind, _, value in (x.partition(",") for x in found.splitlines())]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckptkit con", ["consolidate", "convert"]),
        ("ckptkit consolidate --max", ["--max-shard-size"]),
        ("ckptkit consolidate --dtype b", ["bfloat16", "base"]),
        ("ckptkit convert a b --to ", [*get_args(Layout)]),
        ("ckptkit adapter ", ["extract", "convert", "merge", "from-diff"]),
        ("ckptkit delta ", ["create", "apply"]),
        ("ckptkit adapter merge --qlora-base ", ["dequantized", "original"]),
        ("ckptkit watch --as ", ["auto", "model", "adapter", "merged"]),
        ("ckptkit inspect ", []),
    ],
)
def test_bash_completes_commands_options_and_values(line: str, expected: list[str]) -> None:
    found = complete(line)
    assert [value for kind, value in found if kind == "plain"] == expected


@pytest.mark.parametrize(("shell", "between"), [("zsh", ": "), ("fish", "\t")])
def test_zsh_and_fish_complete_with_one_line_of_help(shell: str, between: str) -> None:
    text = "Model or checkpoint to take where there are several"
    assert complete("ckptkit verify --sel", shell) == [("plain", f"--select{between}{text}")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("line", ["ckptkit inspect run", "ckptkit inspect --base run"])
def test_paths_are_completed_by_the_shell(line: str, shell: str) -> None:
    ((kind, value),) = complete(line, shell)
    assert (kind, value.partition(":")[0]) == ("file", "run")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_shown(shell: str) -> None:
    for shown in (
        checked("--show-completion", shell),
        checked("--show-completion", SHELL=f"/usr/bin/{shell}"),
    ):
        assert f"_CKPTKIT_COMPLETE={shell}_complete" in shown


def test_completion_is_installed_once_and_only_for_shells_that_are_known(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias a=b")
    for _ in range(2):
        told = checked("--install-completion", HOME=str(tmp_path), SHELL="/bin/bash")
        assert str(tmp_path / ".bashrc") in told
    line = 'eval "$(_CKPTKIT_COMPLETE=bash_source ckptkit)"'
    assert (tmp_path / ".bashrc").read_text() == f"alias a=b\n{line}\n"
    refused = run_command("--install-completion", "csh", HOME=str(tmp_path))
    assert refused.returncode == 2
    assert "'csh' is not among bash, zsh, fish" in refused.stderr


ADDED = """
from ckptkit_cli._program import Argument, command

@command(Argument("who", "WHO", "Who is greeted."))
def say_hello(output, who):
    "Greet someone."
    output.lines([f"hello {who}"])
"""


def test_a_module_in_the_package_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "say_hello.py").write_text(ADDED)
    code = (
        f"import sys, ckptkit_cli; ckptkit_cli.__path__.append({str(tmp_path)!r})\n"
        "from ckptkit_cli.main import main; sys.exit(main())"
    )

    def run(*words: str) -> str:
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert run("say-hello", "you") == "hello you\n"
    assert "WHO  Who is greeted." in run("say-hello", "--help")
    listed = run("--help").partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert listed[-1].split(maxsplit=1) == ["say-hello", "Greet someone."]


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
        entry.name: entry.default or (None if entry.metavar or entry.choices else False)
        for entry in CONVERSION
        if isinstance(entry, Option)
    }
    values = parse_values(CONVERSION, typed)
    assert ConsolidateRequest.from_options(values) == ConsolidateRequest()
    assert Resources.from_options(values) == Resources()
    assert {*ConsolidateRequest.__struct_fields__} - {"max_file_bytes", "layout"} <= {*values}
