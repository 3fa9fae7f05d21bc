"""The program: commands, streams, signals and exit statuses.

Commands whose values are text and flags alone, each given at most once.

typer converts values with pydantic since its version 0.28, even text to text, and importing
pydantic takes longer than inspecting a small checkpoint. With older versions this changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckptkit.version import __version__
from ckptkit_cli._output import (
    Output,
    Stopped,
    escaped,
    flush_streams,
    prepare_streams,
    raise_on_signals,
    show_bug,
    show_stop,
    show_system_error,
    show_usage,
)

UsageFailure: Any = typer.BadParameter.__mro__[1]
"""The base of what typer raises for a command line that it does not understand."""

_ALIKE = 0.75  # from which two options are taken for one; '--tokenizer' and '--optimizer' are 0.7
_MEANT = {
    "--config": "--base DIR takes configuration and tokenizer from a model folder",
    "--tokenizer": "--base DIR takes configuration and tokenizer from a model folder",
    "--output": "the output is the last argument, without an option",
    "--out": "the output is the last argument, without an option",
    "--force": "--overwrite replaces an output that holds something",
    "--threads": "--workers N sets the number of threads",
    "--format": "`ckptkit convert SRC OUT --to hf|torch|dcp` writes other formats",
}


class PlainCommand(TyperCommand):
    """A command that hands values to its function as they were typed."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _left_as_typed(super().get_params(ctx))

    def make_parser(self, ctx: Any) -> Any:
        """Returns a parser that takes each option once."""
        return _taking_once(super().make_parser(ctx), ctx)


class PlainGroup(TyperGroup):
    """The same for the options that stand before a command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _left_as_typed(super().get_params(ctx))

    def make_parser(self, ctx: Any) -> Any:
        """Returns a parser that takes each option once."""
        return _taking_once(super().make_parser(ctx), ctx)


def _taking_once(parser: Any, context: Any) -> Any:
    parser.parse_args = partial(_parse_once, parser.parse_args, context)
    return parser


def _parse_once(parse: Callable[..., Any], context: Any, args: list[str]) -> Any:
    try:
        values, rest, order = parse(args=args)
    except UsageFailure as failure:
        name = getattr(failure, "option_name", "")
        if type(failure).__name__ != "NoSuchOption":
            failure.ctx = failure.ctx or context
            raise
        raise UsageFailure(_unknown(name, _options_of(context)), ctx=context) from None
    for parameter in dict.fromkeys(order):
        if _takes_one(parameter) and order.count(parameter) > 1:
            raise UsageFailure(_given_twice(parameter), ctx=context)
    return values, rest, order


def _takes_one(parameter: Any) -> bool:
    """Tells whether a second value would replace the first; a lone flag says the same twice."""
    if parameter.param_type_name != "option" or parameter.multiple:
        return False
    return not parameter.is_flag or bool(parameter.secondary_opts)


def _given_twice(parameter: Any) -> str:
    name = " / ".join([*parameter.opts, *parameter.secondary_opts])
    return f"Option '{name}' takes one value, and was given more than once."


def _unknown(name: str, options: Sequence[str]) -> str:
    """Returns the message of an option that the command does not have."""
    message = f"No such option: {escaped(name)}"
    longer = [option for option in options if option.startswith(name)]
    near = dict.fromkeys([*longer, *get_close_matches(name, options, 3, _ALIKE)])
    if near:
        return f"{message}. Did you mean {' or '.join(near)}?"
    meant = _MEANT.get(name, "")
    if meant and all(word in options for word in meant.split() if word.startswith("--")):
        return f"{message}; {meant}."
    return f"{message}."


def _options_of(context: Any) -> list[str]:
    found = []
    for parameter in context.command.get_params(context):
        if parameter.param_type_name == "option":
            found += [*parameter.opts, *parameter.secondary_opts]
    return found


class _AsTyped:
    """Stands in for typer's conversion of one parameter."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ARG002  typer's signature
        several = param.multiple or param.nargs == -1
        return list(value or ()) if several else value


def _left_as_typed(parameters: Iterable[Any]) -> list[Any]:
    kept = list(parameters)
    for parameter in kept:
        if hasattr(parameter, "_runtime_param"):
            parameter._runtime_param = _AsTyped()  # noqa: SLF001  there is no public way
    return kept


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
    "convert": "ckptkit_cli.consolidate",
    "verify": "ckptkit_cli.verify",
    "diff": "ckptkit_cli.verify",
    "save-now": "ckptkit_cli.runs",
    "ls": "ckptkit_cli.runs",
    "prune": "ckptkit_cli.runs",
    "batch": "ckptkit_cli.batch.command",
    "push": "ckptkit_cli.push",
    "pull": "ckptkit_cli.push",
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
