"""How results look at a prompt and in a notebook: one line, or a small table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from msgspec import Struct, to_builtins

from ckptkit.core.text import make_printable

_MOST_CHARACTERS = 200
_MOST_ROWS = 20


def plain_fields(record: Struct) -> dict[str, Any]:
    """Returns the fields of a record as values of JSON, records in it too."""
    return cast("dict[str, Any]", to_builtins(record, enc_hook=str.__str__))  # places are `str`


class Facts(NamedTuple):
    """What is shown of a result.

    Attributes:
        title: What it is about, such as a path.
        lines: Pairs of a label and a text; the one line of a `repr` has the texts alone.
        header: The header of the table below them, in a notebook.
        rows: Its rows.
    """

    title: str
    lines: Sequence[tuple[str, str]]
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


class Displayed:
    """Has a `repr` of one line, and a small table in notebooks."""

    __slots__ = ()

    def _facts(self) -> Facts:
        """Returns what is shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, lines, *_ = self._facts()
        texts = ", ".join(make_printable(text) for _, text in lines if text)
        return f"<{type(self).__name__} {_cut(title)!r}: {texts}>"

    def _repr_html_(self) -> str:
        from html import escape  # notebooks alone need it

        def row(cells: Iterable[str], tag: str = "td") -> str:
            inner = "".join(f"<{tag}>{escape(_shown(cell))}</{tag}>" for cell in cells)
            return f"<tr>{inner}</tr>"

        title, lines, header, rows = self._facts()
        parts = [f"<b>{escape(type(self).__name__)}</b> <code>{escape(_shown(title))}</code>"]
        parts.append(f"<table>{''.join(row(line) for line in lines if line[1])}</table>")
        if rows:
            body = "".join(row(cells) for cells in rows[:_MOST_ROWS])
            parts.append(f"<table>{row(header, 'th')}{body}</table>")
        if len(rows) > _MOST_ROWS:
            parts.append(f"<p>… and {len(rows) - _MOST_ROWS:,} more</p>")
        return "".join(parts)


def _cut(text: str) -> str:
    is_short = len(text) <= _MOST_CHARACTERS
    return text if is_short else f"{text[:_MOST_CHARACTERS]}…"


def _shown(text: str) -> str:
    return make_printable(_cut(text))
