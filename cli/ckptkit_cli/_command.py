"""How a command is declared: its options, its signature for typer, its help and its usage errors.

A command is a function under `@command(...)`, which gets an `Output` and the parsed value of each
option. Values reach us as text and flags: typer converts values with pydantic since its version
0.28, even text to text, and importing pydantic takes longer than inspecting a small checkpoint.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any

import typer
from msgspec import Struct
from typer.core import TyperCommand, TyperGroup

from ckptkit.options import check_choice
from ckptkit_cli._output import Output, escaped, exit_on_errors, painted, takes_colour

UsageFailure: Any = typer.BadParameter.__mro__[1]
"""The base of what typer raises for a command line that it does not understand."""

_ALIKE = 0.75  # similarity that makes a proposal; that of '--tokenizer' and '--optimizer' is 0.7
_MEANT = {
    "--config": "--base MODEL takes configuration and tokenizer from a model",
    "--tokenizer": "--base MODEL takes configuration and tokenizer from a model",
    "--output": "the output is the last argument, without an option",
    "--out": "the output is the last argument, without an option",
    "--force": "--overwrite replaces an output that is not empty",
    "--threads": "--workers N sets the number of threads",
    "--format": "`ckptkit convert SRC OUT --to hf|torch|dcp` writes other formats",
}


class Argument(Struct, frozen=True):
    """An argument of a command.

    Attributes:
        name: The parameter of the command's function.
        metavar: What the help calls it.
        help: One or two sentences.
        repeated: Whether there can be several, which the function gets as a list.
        optional: Whether there may be none.
    """

    name: str
    metavar: str
    help: str
    repeated: bool = False
    optional: bool = False

    def parameter(self) -> inspect.Parameter:
        declared = typer.Argument(metavar=self.metavar, help=self.help, show_default=False)
        kind: Any = list[str] if self.repeated else str
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if self.optional else inspect.Parameter.empty,
            annotation=Annotated[kind | None if self.optional else kind, declared],
        )

    def parse_value(self, typed: Any) -> Any:
        return list(typed or ()) if self.repeated else typed


class Option(Struct, frozen=True):
    """An option of a command.

    Attributes:
        flag: As it is typed, such as `--vocab-size`, or `--private/--public` for a yes and a no.
        group: The heading of the help that it is under.
        help: One to three sentences.
        metavar: What the help calls its value; empty for a flag.
        choices: All values that it can have.
        default: Its value, as text, if it is not passed.
        parse: Turns the text, or all texts of a repeated option, into the value that the
            command's function gets.
        repeated: Whether it can be passed several times.
        required: Whether it has to be passed.
        hidden: Whether the help leaves it out.
        keyword: The parameter of the command's function; by default the flag's words.
        short: A second form with one letter, such as `-q`.
    """

    flag: str
    group: str
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    default: str | None = None
    parse: Callable[[Any], Any] | None = None
    repeated: bool = False
    required: bool = False
    hidden: bool = False
    keyword: str = ""
    short: str = ""

    @property
    def name(self) -> str:
        words = self.flag.partition("/")[0].removeprefix("--")
        return self.keyword or words.replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        """Returns the parameter that typer makes this option of."""
        metavar = "|".join(self.choices) or self.metavar
        default: Any = self.default
        kind: Any = str
        if self.required:
            default = inspect.Parameter.empty
        elif not metavar:
            kind, default = (bool | None, None) if "/" in self.flag else (bool, False)
        elif self.repeated:
            kind = list[str] | None
        elif default is None:
            kind = str | None
        declared = typer.Option(
            *filter(None, (self.flag, self.short)),
            metavar=metavar or None,
            help=self.help,
            rich_help_panel=self.group,
            show_default=self.default is not None,
            hidden=self.hidden,
            autocompletion=self._complete if self.choices else None,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, declared],
        )

    def _complete(self, incomplete: str) -> list[str]:
        return [choice for choice in self.choices if choice.startswith(incomplete)]

    def parse_value(self, typed: Any) -> Any:
        """Returns the value for the command's function; None for an option without one."""
        if self.repeated:
            typed = list(typed or ())
        elif typed is None:
            return None
        if self.parse is not None:
            return self.parse(typed)
        if self.choices:
            check_choice(self.flag, typed, self.choices)
        return typed


Declaration = Argument | Option

OUTPUT = "Output"
VERBOSE = Option("--verbose", OUTPUT, "Show whole hints and whole lists of names, however long.")
_OF_OUTPUT = ("as_json", "quiet", "events", "verbose")


def command(
    *declared: Declaration, parses: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes an `Output` and one keyword for each declaration.

    The values of `--json`, `--quiet`, `--events` and of `--verbose`, which all commands have, are
    in the `Output` instead. Errors of the function become messages and exit statuses.

    Args:
        declared: Arguments and options, in the order of the help.
        parses: Whether the function gets parsed values, or calls `parse_values` itself.
    """
    declared = (*declared, VERBOSE)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def run(**typed: Any) -> None:
            shown = {name: typed.get(name, False) for name in _OF_OUTPUT}
            output = Output(**shown)
            with exit_on_errors(output):
                values = parse_values(declared, typed) if parses else typed
                function(output, **{k: v for k, v in values.items() if k not in shown})

        parameters = [entry.parameter() for entry in declared]
        # typer reads both: the order from the signature, types from the annotations.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return decorate


def parse_values(declared: Iterable[Declaration], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Parses the values of all declarations that `typed` has."""
    return {
        entry.name: entry.parse_value(typed[entry.name])
        for entry in declared
        if entry.name in typed
    }


class _Plain:
    """What commands and groups have in common: values stay as they were typed, and plain help."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = list(super().get_params(ctx))  # type: ignore[misc]
        for parameter in parameters:
            if hasattr(parameter, "_runtime_param"):  # of typer since 0.28; there is no public way
                parameter._runtime_param = _NoConversion()  # noqa: SLF001
        return parameters

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)  # type: ignore[misc]
        parser.parse_args = partial(_parse_once, parser.parse_args, ctx)
        return parser

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Returns completions whose help, which zsh and fish show, fits into a line."""
        items: list[Any] = super().shell_complete(ctx, incomplete)  # type: ignore[misc]
        for item in items:
            item.help = textwrap.shorten((item.help or "").split(". ")[0], 60, placeholder=" ...")
        return items

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  typer's signature
        """Writes the paragraphs of the help; indented ones are command lines, and stay as they are.

        As in Markdown, four spaces make a paragraph an example.
        """
        for paragraph in inspect.cleandoc(getattr(self, "help", None) or "").split("\n\n"):
            formatter.write_paragraph()
            if paragraph.startswith("    "):
                lines = (_styled(line.strip(), "cyan") for line in paragraph.splitlines())
                formatter.write("".join(f"    {line}\n" for line in lines))
            else:
                with formatter.indentation():
                    formatter.write_text(" ".join(paragraph.split()))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, then options under the headings of their groups, required first."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                heading, record = "Arguments", (str(parameter.metavar), parameter.help)
            else:
                last = next(reversed(groups), "") if parameter.name == "help" else ""
                heading = getattr(parameter, "rich_help_panel", None) or last or "Options"
                record = parameter.get_help_record(ctx)
            if record is not None:  # of a hidden option
                name, text = record
                records = groups.setdefault(heading, [])
                is_first = parameter.required and parameter.param_type_name == "option"
                records.insert(0 if is_first else len(records), (_styled(name, "cyan"), text))
        for heading, records in groups.items():
            with formatter.section(_styled(heading, "bold")):
                formatter.write_dl(records)


class PlainCommand(_Plain, TyperCommand):
    """A command that hands values to its function as they were typed."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        parameters = self.get_params(ctx)
        required = [p for p in parameters if p.param_type_name == "option" and p.required]
        arguments = [p for p in parameters if p.param_type_name == "argument"]
        return [
            "[OPTIONS]",
            *(f"{option.opts[0]} {option.metavar}" for option in required),
            *(str(argument.metavar) for argument in arguments),
        ]


class PlainGroup(_Plain, TyperGroup):
    """The same for a group of commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def _styled(text: str, style: Any) -> str:
    return painted(text, style) if takes_colour(sys.stdout) else text


def _parse_once(parse: Callable[..., Any], context: Any, args: list[str]) -> Any:
    """Parses a command line, and refuses options that are unknown or passed twice."""
    try:
        values, rest, order = parse(args=args)
    except UsageFailure as failure:
        name = getattr(failure, "option_name", "")
        if type(failure).__name__ != "NoSuchOption":
            failure.ctx = failure.ctx or context
            raise
        raise UsageFailure(_unknown_option(name, context), ctx=context) from None
    for parameter in dict.fromkeys(order):
        if parameter.param_type_name != "option" or parameter.multiple:
            continue
        # A second value would replace the first; a repeated flag changes nothing.
        has_value = not parameter.is_flag or bool(parameter.secondary_opts)
        if has_value and order.count(parameter) > 1:
            flags = " / ".join([*parameter.opts, *parameter.secondary_opts])
            message = f"Option '{flags}' takes one value, and was given more than once."
            raise UsageFailure(message, ctx=context)
    return values, rest, order


def _unknown_option(name: str, context: Any) -> str:
    """Returns the message for an option that the command does not have."""
    options = [p for p in context.command.get_params(context) if p.param_type_name == "option"]
    flags = [flag for option in options for flag in (*option.opts, *option.secondary_opts)]
    message = f"No such option: {escaped(name)}"
    longer = [flag for flag in flags if flag.startswith(name)]
    near = dict.fromkeys([*longer, *get_close_matches(name, flags, 3, _ALIKE)])
    if near:
        return f"{message}. Did you mean {' or '.join(near)}?"
    meant = _MEANT.get(name, "")
    if meant and all(word in flags for word in meant.split() if word.startswith("--")):
        return f"{message}; {meant}."
    return f"{message}."


class _NoConversion:
    """Takes the place of typer's conversion of one parameter."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ARG002  typer's signature
        is_list = param.multiple or param.nargs == -1
        return list(value or ()) if is_list else value
