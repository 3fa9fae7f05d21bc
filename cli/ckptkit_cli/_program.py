"""The program: how commands are declared and found, what their help shows, how a line is run.

A command is a function under `@command(...)` in the module of this package that bears its name, and
nothing else knows of it. A line imports the module of its command alone, and modules import what a
command needs when it runs.

click serves, whose classes are made to be derived from. Values reach us as text and flags.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

import ckptkit_cli
from ckptkit.version import __version__
from ckptkit_cli._output import (
    Output,
    escaped,
    exit_on_errors,
    flush_streams,
    painted,
    prepare_streams,
    raise_on_signals,
    show_usage,
    takes_colour,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

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


class _Argument(click.Argument):
    about = ""  # not `help`, which click has since 8.5


class _Option(click.Option):
    group = ""
    """The heading of the help that it is under."""


class Argument(Struct, frozen=True):
    """An argument of a command."""

    name: str
    metavar: str
    help: str
    repeated: bool = False
    optional: bool = False

    def parameter(self) -> click.Parameter:
        count = -1 if self.repeated else 1
        made = _Argument(
            [self.name],
            required=not self.optional,
            nargs=count,
            metavar=self.metavar,
            type=click.STRING,
            shell_complete=_complete_path,
        )
        made.about = self.help
        return made

    def parse_value(self, typed: Any) -> Any:
        return list(typed or ()) if self.repeated else typed


class Option(Struct, frozen=True):
    """An option of a command.

    Attributes:
        flag: As it is typed, such as `--vocab-size`, or `--private/--public` for a yes and a no.
        group: The heading of the help that it is under.
        help: One to three sentences.
        metavar: What the help calls its value; empty for a flag, or to show its choices.
        choices: All values that it can have.
        default: Its value, as text, if it is not passed.
        parse: Turns the text, or all texts of a repeated option, into the value that the
            command's function gets.
        count: An example, of an option whose value is a positive whole number.
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
    count: int = 0
    repeated: bool = False
    required: bool = False
    hidden: bool = False
    keyword: str = ""
    short: str = ""

    @property
    def name(self) -> str:
        words = self.flag.partition("/")[0].removeprefix("--")
        return self.keyword or words.replace("-", "_")

    def parameter(self) -> click.Parameter:
        metavar = self.metavar or "|".join(self.choices)
        is_flag = not metavar
        default: dict[str, Any] = {}
        if self.default is not None:
            default = {"default": self.default}
        elif is_flag:
            default = {"default": None if "/" in self.flag else False}
        made = _Option(
            [word for word in (self.flag, self.short, self.name) if word],
            is_flag=is_flag or None,
            multiple=self.repeated,
            required=self.required,
            type=click.BOOL if is_flag else click.STRING,
            metavar=metavar or None,
            help=self.help,
            show_default=self.default is not None,
            hidden=self.hidden,
            shell_complete=self._complete if self.choices else _complete_path,
            **default,
        )
        made.group = self.group
        return made

    def _complete(self, _context: Any, _parameter: Any, incomplete: str) -> list[str]:
        return [choice for choice in self.choices if choice.startswith(incomplete)]

    def parse_value(self, typed: Any) -> Any:
        """Returns the value for the command's function; None for an option without one."""
        if self.repeated:
            typed = list(typed or ())
        elif typed is None:
            return None
        if self.parse is not None:
            return self.parse(typed)
        if self.count:
            from ckptkit.options import positive_number

            return positive_number(typed, option=self.flag, example=self.count)
        if self.choices:
            from ckptkit.options import check_choice

            check_choice(self.flag, typed, self.choices)
        return typed


def _complete_path(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


OUTPUT = "Output"
VERBOSE = Option("--verbose", OUTPUT, "Show whole hints and whole lists of names, however long.")
_OF_OUTPUT = ("as_json", "quiet", "events", "verbose")


class _Plain:
    """What commands and groups have in common: plain help, and what is wrong with a line."""

    order = sys.maxsize
    """Where the help lists the command; after all others if it does not say."""
    parent: click.Group | None = None

    def make_parser(self, ctx: click.Context) -> Any:
        parser = super().make_parser(ctx)  # type: ignore[misc]
        parser.parse_args = partial(_parse_once, parser.parse_args, ctx)
        return parser

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns completions whose help, which zsh and fish show, fits into a line."""
        items: list[CompletionItem] = super().shell_complete(ctx, incomplete)  # type: ignore[misc]
        for item in items:
            item.help = textwrap.shorten((item.help or "").split(". ")[0], 60, placeholder=" ...")
        return items

    def format_help_text(self, ctx: Any, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
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

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes nothing; click calls it since 8.5."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes arguments, then options under the headings of their groups, required first."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in ctx.command.get_params(ctx):
            if isinstance(parameter, _Argument):
                heading, record = "Arguments", (str(parameter.metavar), parameter.about)
            else:
                is_help = parameter.opts == ctx.help_option_names
                last = next(reversed(groups), "") if is_help else ""
                heading = getattr(parameter, "group", "") or last or "Options"
                found = parameter.get_help_record(ctx)
                if found is None:  # of a hidden option
                    continue
                record = found
            records = groups.setdefault(heading, [])
            is_first = parameter.required and heading != "Arguments"
            records.insert(0 if is_first else len(records), (_styled(record[0], "cyan"), record[1]))
        for heading, records in groups.items():
            with formatter.section(_styled(heading, "bold")):
                formatter.write_dl(records)


class _Command(_Plain, click.Command):
    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        parameters = self.get_params(ctx)
        required = [p for p in parameters if isinstance(p, click.Option) and p.required]
        return [
            "[OPTIONS]",
            *(f"{option.opts[0]} {option.metavar}" for option in required),
            *(str(p.metavar) for p in parameters if isinstance(p, click.Argument)),
        ]


class Group(_Plain, click.Group):
    """A command with commands below it, which are passed it as `of`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not (ctx.resilient_parsing or name[:1] == "-"):
            near = get_close_matches(name, self.list_commands(ctx), 3)
            proposed = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
            raise click.UsageError(f"No such command '{escaped(name)}'.{proposed}", ctx=ctx)
        return super().resolve_command(ctx, args)


def make_group(name: str, help_text: str, *, order: int) -> Group:
    group = Group(name, help=help_text, no_args_is_help=True)
    group.order = order
    return group


def command(
    *declared: Argument | Option,
    order: int = _Plain.order,
    of: Group | None = None,
    parses: bool = True,
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command of a function that takes an `Output` and one keyword for each declaration.

    The values of `--json`, `--quiet`, `--events` and of `--verbose`, which all commands have, are
    in the `Output` instead. Errors of the function become messages and exit statuses.

    Args:
        declared: Arguments and options, in the order of the help.
        order: Where the help lists the command.
        of: The group that it is in.
        parses: Whether the function gets parsed values, or calls `parse_values` itself.
    """
    declared = (*declared, VERBOSE)

    def decorate(function: Callable[..., None]) -> click.Command:
        def run(**typed: Any) -> None:
            shown = {name: typed.get(name, False) for name in _OF_OUTPUT}
            output = Output(**shown)
            with exit_on_errors(output):
                values = parse_values(declared, typed) if parses else typed
                function(output, **{k: v for k, v in values.items() if k not in shown})

        made = _Command(
            function.__name__.replace("_", "-"),
            callback=run,
            params=[entry.parameter() for entry in declared],
            help=function.__doc__,
        )
        made.order, made.parent = order, of
        if of is not None:
            of.add_command(made)
        return made

    return decorate


def parse_values(declared: Iterable[Argument | Option], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Parses the values of all declarations that `typed` has."""
    return {
        entry.name: entry.parse_value(typed[entry.name])
        for entry in declared
        if entry.name in typed
    }


def _styled(text: str, style: Any) -> str:
    return painted(text, style) if takes_colour(sys.stdout) else text


def _parse_once(parse: Callable[..., Any], context: click.Context, args: list[str]) -> Any:
    """Parses a command line, and refuses options that are unknown or passed twice."""
    try:
        values, rest, order = parse(args=args)
    except click.NoSuchOption as failure:
        message = _unknown_option(failure.option_name, context)
        raise click.UsageError(message, ctx=context) from None
    except click.UsageError as failure:
        failure.ctx = failure.ctx or context
        raise
    for parameter in dict.fromkeys(order):
        if not isinstance(parameter, click.Option) or parameter.multiple:
            continue
        # A second value would replace the first; a repeated flag changes nothing.
        has_value = not parameter.is_flag or bool(parameter.secondary_opts)
        if has_value and order.count(parameter) > 1:
            flags = " / ".join([*parameter.opts, *parameter.secondary_opts])
            message = f"Option '{flags}' takes one value, and was given more than once."
            raise click.UsageError(message, ctx=context)
    return values, rest, order


def _unknown_option(name: str, context: click.Context) -> str:
    """Returns the message for an option that the command does not have."""
    options = [p for p in context.command.get_params(context) if isinstance(p, click.Option)]
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


_EPILOG = (
    "Exit statuses: 0 success, 1 a bug of ckptkit, 2 wrong usage, 3 unreadable, damaged or"
    " incomplete input, 4 impossible or refused request, 5 the output exists, 6 verification"
    " failed, a difference found or an error of `doctor`, 7 the Hub refused or was not reached,"
    " 130 interrupted, 143 terminated."
)
_HELP = """Turn sharded training checkpoints into model folders that load, with every byte verified.

    ckptkit inspect runs/llama
    ckptkit consolidate runs/llama models/llama

`ckptkit COMMAND --help` or `ckptkit help COMMAND` shows the arguments and options of a command.
"""
_VERSION = frozenset({"--version", "-V"})


class Program(Group):
    """All commands of this package; those that a line does not name are not imported."""

    def __init__(self) -> None:
        super().__init__(
            "ckptkit",
            help=_HELP,
            epilog=_EPILOG,
            no_args_is_help=True,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            params=[
                _eager(
                    ["--version", "-V"],
                    _show_version,
                    "Show the version and exit; with --verbose, what a bug report needs.",
                    is_flag=True,
                ),
                click.Option(["--verbose"], is_flag=True, hidden=True, expose_value=False),
                _eager(
                    ["--install-completion"],
                    _install_completion,
                    "Install completion for bash, zsh or fish; by default for the current shell.",
                    **_OF_A_SHELL,
                ),
                _eager(
                    ["--show-completion"],
                    _show_completion,
                    "Show the script of completion, to put it elsewhere.",
                    **_OF_A_SHELL,
                ),
            ],
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        import pkgutil

        for module in pkgutil.iter_modules(ckptkit_cli.__path__):
            self._add_commands_of(module.name)
        found = sorted(self.commands.items(), key=lambda one: getattr(one[1], "order", 0))
        self.commands = dict(found)
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        module = name.replace("-", "_")
        if name not in self.commands and module.isidentifier():
            try:
                self._add_commands_of(module)
            except ModuleNotFoundError as error:
                if error.name != f"ckptkit_cli.{module}":
                    raise
        return self.commands.get(name)

    def _add_commands_of(self, module: str) -> None:
        if module == "main" or module.startswith("_"):
            return
        for one in vars(import_module(f"ckptkit_cli.{module}")).values():
            if isinstance(one, _Command | Group) and one.parent is None:
                self.add_command(one)


def make_application() -> Program:
    """Returns the program with all of its commands."""
    program = Program()
    program.list_commands(click.Context(program))
    return program


def all_commands(group: click.Group, before: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Returns the commands by their words."""
    found: dict[tuple[str, ...], Any] = {}
    for name, one in group.commands.items():
        words = (*before, name)
        found |= all_commands(one, words) if isinstance(one, click.Group) else {words: one}
    return found


def _eager(flags: list[str], callback: Any, text: str, **more: Any) -> click.Option:
    """Returns an option that acts, and ends the program."""
    return click.Option(
        flags, callback=callback, help=text, is_eager=True, expose_value=False, **more
    )


def _show_version(_context: Any, _option: Any, wanted: bool) -> None:
    if wanted:
        click.echo(f"ckptkit {__version__}")
        raise SystemExit(0)


_OF_A_SHELL: dict[str, Any] = {"is_flag": False, "flag_value": "", "metavar": "[SHELL]"}
_COMPLETE = "_CKPTKIT_COMPLETE"
_START_FILES = {
    "bash": ("~/.bashrc", f'eval "$({_COMPLETE}=bash_source ckptkit)"'),
    "zsh": ("~/.zshrc", f'eval "$({_COMPLETE}=zsh_source ckptkit)"'),
    "fish": (
        "~/.config/fish/completions/ckptkit.fish",
        f"{_COMPLETE}=fish_source ckptkit | source",
    ),
}
"""What a shell reads at its start, and the line in it that makes words complete."""


def _find_shell(context: click.Context, name: str | None) -> str:
    shell = name or Path(os.environ.get("SHELL", "")).name
    if shell not in _START_FILES:
        listed = ", ".join(_START_FILES)
        raise click.UsageError(f"{escaped(shell)!r} is not among {listed}.", ctx=context)
    return shell


def _show_completion(context: click.Context, _option: Any, name: str | None) -> None:
    if name is None:
        return
    from click.shell_completion import get_completion_class

    shell = get_completion_class(_find_shell(context, name))
    if shell is not None:
        click.echo(shell(context.command, {}, "ckptkit", _COMPLETE).source())
    raise SystemExit(0)


def _install_completion(context: click.Context, _option: Any, name: str | None) -> None:
    if name is None:
        return
    shell = _find_shell(context, name)
    file, line = Path(_START_FILES[shell][0]).expanduser(), _START_FILES[shell][1]
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or line not in file.read_text(encoding="utf-8").splitlines():
        with file.open("a", encoding="utf-8") as opened:
            opened.write(f"\n{line}\n")
    click.echo(f"{shell} completion is in {file}; it takes effect in the next shell")
    raise SystemExit(0)


def run_application(words: Sequence[str]) -> int:
    """Runs a command line; returns the exit status."""
    prepare_streams()
    raise_on_signals()
    try:
        with exit_on_errors(Output()):
            status = _run(words)
            flush_streams()
    except SystemExit as end:
        status = int(end.code or 0)
    flush_streams()
    return status


def _run(words: Sequence[str]) -> int:
    if words[:1] == ["help"]:  # `ckptkit help adapter merge`
        words = [*words[1:], "--help"]
    if "--verbose" in words and _VERSION & set(words) and {*words} <= _VERSION | _OF_REPORT:
        show_environment(Output(as_json="--json" in words))
        return 0
    try:
        status = Program().main(list(words), prog_name="ckptkit", standalone_mode=False)
    except click.UsageError as failure:
        return show_usage(words, failure)
    except SystemExit as end:
        status = end.code
    return status if isinstance(status, int) else 0


_OF_REPORT = {"--verbose", "--json"}
_PACKAGES = (
    *("numpy", "ml_dtypes", "safetensors", "huggingface_hub", "hf_xet", "fsspec", "isal", "xxhash"),
    *("zstandard", "regex", "PyYAML", "click", "blake3", "s3fs", "botocore", "gcsfs", "adlfs"),
    *("aiohttp", "ray"),
)
_FRAMEWORKS = (
    *("torch", "transformers", "accelerate", "peft", "trl", "lightning", "deepspeed"),
    *("bitsandbytes", "torchao", "megatron-core"),
)


def show_environment(output: Output) -> None:
    """Prints what a bug report needs, and nothing that identifies the user; imports none of it."""
    import platform
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, version

    from ckptkit.storage.local import control_groups
    from ckptkit.storage.place_identity import find_filesystem_type

    affinity = getattr(os, "sched_getaffinity", None)
    facts: dict[str, Any] = {
        "ckptkit": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "virtual_environment": sys.prefix != sys.base_prefix,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "packages": {},
        "frameworks": {},
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity is not None else os.cpu_count(),
        "core_quota": control_groups.core_quota(),
        "memory_bytes": control_groups.memory_bytes(),
        "available_bytes": control_groups.available_bytes(),
        "file_system": "",
        "file_system_encoding": sys.getfilesystemencoding(),
    }
    with suppress(OSError):  # the directory may be gone
        facts["file_system"] = find_filesystem_type(Path.cwd())
    for group, names in (("packages", _PACKAGES), ("frameworks", _FRAMEWORKS)):
        for name in names:
            with suppress(PackageNotFoundError):
                facts[group][name] = version(name)
    output.document(facts)
    for name, fact in facts.items():
        text = ", ".join(map(" ".join, fact.items())) if isinstance(fact, dict) else str(fact)
        output.lines([f"{name.replace('_', ' '):<20}  {text or 'unknown'}"])
