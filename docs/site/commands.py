"""A page for each command, made of the declarations that click gets."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator
from typing import Any

import click

from ckptkit_cli._program import all_commands, make_application

FOLDER = "reference/commands"
_SPECIAL = re.compile(r"([\\*_\[\]<>#|])")


def command_pages() -> dict[str, tuple[str, str]]:
    """Returns title and Markdown of the page of each command, by its file name without ending."""
    return {
        "-".join(words): (f"ckptkit {' '.join(words)}", _page(" ".join(words), command))
        for words, command in sorted(all_commands(make_application()).items())
    }


def options_of(words: str) -> list[str]:
    """Returns the flags of a command that its help shows."""
    found = all_commands(make_application())[(*words.split(),)]
    shown = (one for one in found.params if not getattr(one, "hidden", False))
    return [flag for one in shown for flag in (*one.opts, *one.secondary_opts) if flag[0] == "-"]


def _page(words: str, command: Any) -> str:
    context = click.Context(command, info_name=f"ckptkit {words}")
    usage = " ".join((f"ckptkit {words}", *command.collect_usage_pieces(context)))
    parts = [f"# ckptkit {words}", *_paragraphs(command.help or ""), f"```text\n{usage}\n```"]
    for heading, rows in _groups(command, context).items():
        column = "argument" if heading == "Arguments" else "option"
        table = "\n".join(f"| {name} | {text} |" for name, text in rows)
        parts.append(f"## {heading}\n\n| {column} | |\n|---|---|\n{table}")
    parts.append("Exit statuses and output: [all commands](../commands.md#exit-statuses).")
    return "\n\n".join(parts) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of a help; four spaces make one an example."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("    "):
            lines = "\n".join(f"$ {line.strip()}" for line in paragraph.splitlines())
            yield f"```console\n{lines}\n```"
        else:
            yield _prose(" ".join(paragraph.split()))


def _groups(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False) or "--help" in parameter.opts:
            continue
        if parameter.param_type_name == "argument":
            heading, name = "Arguments", str(parameter.metavar)
        else:
            heading = getattr(parameter, "group", "") or "Options"
            name = _option(parameter)
        rows = groups.setdefault(heading, [])
        is_first = parameter.required and heading != "Arguments"
        text = _prose(" ".join(_text_of(parameter).split())) + _notes(parameter)
        rows.insert(0 if is_first else len(rows), (_code(name), text))
    return groups


def _text_of(parameter: Any) -> str:
    return str(parameter.about if parameter.param_type_name == "argument" else parameter.help)


def _option(parameter: Any) -> str:
    flags = ", ".join(parameter.opts)
    if parameter.secondary_opts:
        return f"{flags} / {', '.join(parameter.secondary_opts)}"
    return f"{flags} {parameter.metavar}" if not parameter.is_flag else flags


def _notes(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return ""
    notes = []
    if parameter.required:
        notes.append("required")
    if parameter.multiple and "repeated" not in (parameter.help or ""):
        notes.append("can be repeated")
    shows_default = getattr(parameter, "show_default", False)
    if shows_default and isinstance(parameter.default, str) and "default" not in parameter.help:
        notes.append(f"default: {_code(parameter.default)}")
    return f" ({'; '.join(notes)})" if notes else ""


def _code(text: str) -> str:
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _prose(text: str) -> str:
    """Escapes what Markdown would take for markup; text in backticks is code."""
    pieces = text.split("`")
    return "".join(
        _code(piece) if number % 2 else _SPECIAL.sub(r"\\\1", piece)
        for number, piece in enumerate(pieces)
    )
