"""The program: commands, streams, signals and exit statuses."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from ckptkit.version import __version__
from ckptkit_cli._failures import show_bug, show_stop, show_system_error, show_usage
from ckptkit_cli._output import Output
from ckptkit_cli._plain_command import PlainCommand, PlainGroup, UsageFailure
from ckptkit_cli._signals import Stopped, raise_on_signals
from ckptkit_cli._streams import flush_streams, prepare_streams

_EPILOG = (
    "Exit statuses: 0 done, 1 a bug of ckptkit, 2 wrong usage, 3 unreadable, damaged or incomplete"
    " input, 4 impossible or refused request, 5 the output exists, 6 verification failed or a"
    " difference found, 7 the Hub refused or was not reached, 130 interrupted, 143 terminated."
)


# A command's module is imported only when the command runs: to import them all takes longer than
# to inspect a small checkpoint.
_COMMANDS = {
    "inspect": "ckptkit_cli.inspect",
    "consolidate": "ckptkit_cli.consolidate",
    "convert": "ckptkit_cli.convert",
    "verify": "ckptkit_cli.verify",
    "diff": "ckptkit_cli.diff",
    "save-now": "ckptkit_cli.save_now",
    "ls": "ckptkit_cli.ls",
    "prune": "ckptkit_cli.prune",
    "batch": "ckptkit_cli.batch",
    "push": "ckptkit_cli.push",
    "pull": "ckptkit_cli.pull",
    "watch": "ckptkit_cli.watch",
}
_GROUP = "adapter"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckptkit {__version__}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and exit.",
            is_eager=True,
            callback=_show_version,
            show_default=False,
        ),
    ] = False,
) -> None:
    """Turns sharded training checkpoints into model folders that load, with proof of every byte."""


def make_application(command: str | None = None) -> typer.Typer:
    """Returns the program.

    Args:
        command: The only command that is needed; all of them when this names none.
    """
    application = typer.Typer(
        name="ckptkit",
        cls=PlainGroup,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=_EPILOG,
    )
    application.callback()(_options)
    names = [*_COMMANDS, _GROUP]
    if command in names and command != "batch":  # which runs the other ones
        names = [command]
    for name in names:
        if name == _GROUP:
            application.add_typer(import_module("ckptkit_cli.adapter").adapter_group())
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
    except Stopped as stop:
        status = show_stop(Output(), stop)
    except OSError as error:
        status = show_system_error(Output(), error)
    except Exception as error:  # noqa: BLE001  whatever escapes to here is a bug, and told as one
        status = show_bug(Output(), error)
    flush_streams()
    return status


def _run(words: Sequence[str]) -> int:
    try:
        application = make_application(words[0] if words else None)
        status = application(args=words, prog_name="ckptkit", standalone_mode=False)
    except UsageFailure as failure:
        return show_usage(words, failure)
    except SystemExit as end:
        status = end.code
    return status if isinstance(status, int) else 0
