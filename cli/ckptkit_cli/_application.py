"""The program: its commands, and how a command line becomes an exit status."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from ckptkit.version import __version__
from ckptkit_cli._command import PlainCommand, PlainGroup, UsageFailure
from ckptkit_cli._output import (
    Output,
    Stopped,
    flush_streams,
    prepare_streams,
    raise_on_signals,
    show_bug,
    show_stop,
    show_system_error,
    show_usage,
)

# A command's module is imported only when the command runs: importing all of them takes longer
# than inspecting a small checkpoint.
_COMMANDS = {
    "inspect": "ckptkit_cli.inspect",
    "consolidate": "ckptkit_cli.consolidate",
    "convert": "ckptkit_cli.consolidate",
    "average": "ckptkit_cli.consolidate",
    "verify": "ckptkit_cli.verify",
    "diff": "ckptkit_cli.verify",
    "stats": "ckptkit_cli.verify",
    "save-now": "ckptkit_cli.runs.save_now",
    "ls": "ckptkit_cli.runs.ls",
    "prune": "ckptkit_cli.runs.prune",
    "du": "ckptkit_cli.runs.du",
    "push": "ckptkit_cli.push",
    "pull": "ckptkit_cli.push",
    "watch": "ckptkit_cli.watch",
    "serve": "ckptkit_cli.serving.serve",
    "doctor": "ckptkit_cli.environment.doctor",
}
_GROUPS = {
    "adapter": "ckptkit_cli.adapter",
    "delta": "ckptkit_cli.delta.group",
}
_NAMES = (*_COMMANDS, *_GROUPS)
_EPILOG = (
    "Exit statuses: 0 success, 1 a bug of ckptkit, 2 wrong usage, 3 unreadable, damaged or"
    " incomplete input, 4 impossible or refused request, 5 the output exists, 6 verification"
    " failed, a difference found or an error of `doctor`, 7 the Hub refused or was not reached,"
    " 130 interrupted, 143 terminated."
)
_VERSION = frozenset({"--version", "-V"})
_OF_VERSION = _VERSION | {"--verbose", "--json"}
_COMPLETE = "_CKPTKIT_COMPLETE"  # set by the script of --show-completion
_COMPLETED_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # of bash; of zsh, fish and PowerShell


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckptkit {__version__}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            help="Show the version and exit; with --verbose, what a bug report needs.",
            is_eager=True,
            callback=_show_version,
            show_default=False,
        ),
    ] = False,
    _verbose: Annotated[bool, typer.Option("--verbose", hidden=True)] = False,
) -> None:
    """Turn sharded training checkpoints into model folders that load, with every byte verified.

        ckptkit inspect runs/llama
        ckptkit consolidate runs/llama models/llama

    `ckptkit COMMAND --help` or `ckptkit help COMMAND` shows the arguments and options of a command.
    """


def make_application(command: str | None = None) -> typer.Typer:
    """Returns the program.

    Args:
        command: The only command that is needed; all of them, and the options for completion, if
            it is not the name of one.
    """
    names = [command] if command in _NAMES else _NAMES
    application = typer.Typer(
        name="ckptkit",
        cls=PlainGroup,
        add_completion=len(names) > 1 or _COMPLETE in os.environ,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        epilog=_EPILOG,
    )
    application.callback()(_options)
    for name in names:
        if name in _GROUPS:
            group = getattr(import_module(_GROUPS[name]), f"{name}_group")
            application.add_typer(group())
        else:
            function = getattr(import_module(_COMMANDS[name]), name.replace("-", "_"))
            application.command(name, cls=PlainCommand)(function)
    return application


def run_application(words: Sequence[str]) -> int:
    """Runs a command line; returns the exit status."""
    prepare_streams()
    raise_on_signals()
    try:
        status = _run(words)
        flush_streams()
    except Stopped as stop:
        status = show_stop(Output(), stop)
    except OSError as error:
        status = show_system_error(Output(), error)
    except Exception as error:  # noqa: BLE001  whatever arrives here is a bug
        status = show_bug(Output(), error)
    flush_streams()
    return status


def _run(words: Sequence[str]) -> int:
    if words[:1] == ["help"]:  # `ckptkit help adapter merge`
        words = [*words[1:], "--help"]
    line = list(words)
    if _COMPLETE in os.environ:
        typed = next((os.environ[name] for name in _COMPLETED_LINES if name in os.environ), "")
        line = typed.split()[1:]
        # The word before the cursor may be the beginning of several names.
        line = line if len(line) > 1 or typed.endswith(" ") else []
    if "--verbose" in words and set(words) <= _OF_VERSION and _VERSION & set(words):
        from ckptkit_cli.environment.bug_report import show_environment

        show_environment(as_json="--json" in words)
        return 0
    try:
        application = make_application(line[0] if line else None)
        status = application(args=words, prog_name="ckptkit", standalone_mode=False)
    except UsageFailure as failure:
        return show_usage(words, failure)
    except SystemExit as end:
        status = end.code
    return status if isinstance(status, int) else 0
