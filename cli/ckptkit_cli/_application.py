"""The program: commands, streams, signals and exit statuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ckptkit.version import __version__
from ckptkit_cli._failures import show_bug, show_stop, show_usage
from ckptkit_cli._output import Output
from ckptkit_cli._plain_command import PlainCommand, PlainGroup, UsageFailure
from ckptkit_cli._signals import Stopped, raise_on_signals
from ckptkit_cli._streams import flush_streams, prepare_streams
from ckptkit_cli.adapter import adapter_group
from ckptkit_cli.batch import batch
from ckptkit_cli.consolidate import consolidate
from ckptkit_cli.convert import convert
from ckptkit_cli.diff import diff
from ckptkit_cli.inspect import inspect
from ckptkit_cli.ls import ls
from ckptkit_cli.prune import prune
from ckptkit_cli.pull import pull
from ckptkit_cli.push import push
from ckptkit_cli.save_now import save_now
from ckptkit_cli.verify import verify
from ckptkit_cli.watch import watch

_EPILOG = (
    "Exit statuses: 0 done, 1 a bug of ckptkit, 2 wrong usage, 3 unreadable, damaged or incomplete"
    " input, 4 impossible or refused request, 5 the output exists, 6 verification failed or a"
    " difference found, 7 the Hub refused or was not reached, 130 interrupted, 143 terminated."
)


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


def make_application() -> typer.Typer:
    """Returns the program: all commands, by their names."""
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
    for command in (
        inspect,
        consolidate,
        convert,
        verify,
        diff,
        save_now,
        ls,
        prune,
        batch,
        push,
        pull,
        watch,
    ):
        application.command(cls=PlainCommand)(command)
    application.add_typer(adapter_group())
    return application


def run_application(words: Sequence[str]) -> int:
    """Runs a command line; returns the exit status."""
    prepare_streams()
    raise_on_signals()
    try:
        status = _run(words)
    except Stopped as stop:
        status = show_stop(Output(), stop)
    except Exception as error:  # noqa: BLE001  whatever escapes to here is a bug, and told as one
        status = show_bug(Output(), error)
    flush_streams()
    return status


def _run(words: Sequence[str]) -> int:
    try:
        status = make_application()(args=words, prog_name="ckptkit", standalone_mode=False)
    except UsageFailure as failure:
        return show_usage(words, failure)
    except SystemExit as end:
        status = end.code
    return status if isinstance(status, int) else 0
