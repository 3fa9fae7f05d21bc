"""Plain text for people: safe to print, sized to read, aligned to compare."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Collection, Sequence

_MIN_ELASTIC = 16
_MAX_TEXT = 2000


def escaped(text: str) -> str:
    r"""Makes whatever is not printable visible: control characters, escapes, bidi overrides.

    >>> print(escaped("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> counted(1, "file"), counted(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def cells(text: str) -> int:
    """Returns how many columns of a terminal a printable text takes."""
    if text.isascii():
        return len(text)
    return sum(_cells_of(character) for character in text)


def _cells_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shortened(text: str, width: int) -> str:
    """Takes out the middle of a text that is wider than `width` columns.

    >>> shortened("model.layers.10.self_attn.q_proj.weight", 21)
    'model.lay...oj.weight'
    """
    if cells(text) <= width:
        return text
    keep = max(width - 3, 2)
    head, tail = text[: keep // 2], text[len(text) - (keep - keep // 2) :]
    while cells(head) > keep // 2:
        head = head[:-1]
    while cells(tail) > keep - keep // 2:
        tail = tail[1:]
    return f"{head}...{tail}"


def table(
    rows: Sequence[Sequence[str]],
    *,
    width: int | None,
    right: Collection[int] = (),
    elastic: Collection[int] = (0,),
) -> list[str]:
    """Aligns rows, the header first, two spaces apart and two from the left.

    Args:
        rows: Printable cells, as many in each row.
        width: Columns to fit into; None for as wide as it takes.
        right: Positions of the columns that are aligned to the right.
        elastic: The columns whose cells are shortened where the rows are too wide, in this order.
    """
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        for position in elastic:
            excess = max(sum(widths) + 2 * len(widths) - width, 0)
            least = min(widths[position], _MIN_ELASTIC)
            widths[position] = max(widths[position] - excess, least)
    return [_aligned(row, widths, right, elastic) for row in rows]


def _aligned(
    row: Sequence[str], widths: Sequence[int], right: Collection[int], elastic: Collection[int]
) -> str:
    line = ""
    for position, (cell, width) in enumerate(zip(row, widths, strict=True)):
        text = shortened(cell, width) if position in elastic else cell
        padding = " " * (width - cells(text))
        line += f"  {padding}{text}" if position in right else f"  {text}{padding}"
    return line.rstrip()


def wrapped(text: str, *, width: int | None, first: str = "  ", rest: str = "  ") -> list[str]:
    """Breaks a printable text into lines of `width` columns; one line where that is None."""
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}... ({len(text):,} characters)"
    if width is None:
        return [first + text]
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def first_of(items: Sequence[str], limit: int) -> list[str]:
    """Returns the first items, and a line that says how many there are beyond `limit`.

    >>> first_of(["a", "b", "c"], 2)
    ['a', 'b', '... and 1 more']
    """
    more = len(items) - limit
    return list(items) if more <= 0 else [*items[:limit], f"... and {more:,} more"]
