"""Texts of messages (sizes, counts, quotes), and a base class for what a `with` block closes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Literal, Self

_END = r"[^\s'\"<>\\]*"
_SIGNED = re.compile(
    # A query of a web URL, and one with a signature or a token in any URL.
    rf"(https?://[^\s?'\"<>\\]+)\?{_END}"
    rf"|(\w[\w+.-]*://[^\s?'\"<>\\]+)\?{_END}?"
    rf"(?:sig|signature|token|credential|password|passwd|secret|key)={_END}",
    re.IGNORECASE,
)
_USER = re.compile(r"(\w[\w+.-]*://)[^\s/@:'\"]*:[^\s/@'\"]+@")
_UNITS = ("KB", "MB", "GB", "TB", "PB")
_KILO = 1000
_QUOTED_CHARACTERS = 200
_ROUNDS_UP = 999.5  # from here on three digits would read 1,000


class Aside(str):
    """A note that is no warning: it says what was chosen."""

    __slots__ = ()


def event_of_note(note: str) -> Literal["note", "warning"]:
    """Returns the name of the event that reports a note."""
    return "note" if isinstance(note, Aside) else "warning"


def size_text(size_bytes: float) -> str:
    """Returns a size in three digits and a unit, a power of 1,000.

    >>> size_text(3_800), size_text(2_147_483_648), size_text(999_999), size_text(512)
    ('3.80 KB', '2.15 GB', '1.00 MB', '512 B')
    """
    if size_bytes < _ROUNDS_UP:
        return f"{size_bytes:.0f} B"
    value = float(size_bytes)
    unit = ""
    for unit in _UNITS:
        value /= _KILO
        if value < _ROUNDS_UP:
            return f"{value:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:,.0f} {unit}"


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> counted(1, "file"), counted(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def a_kind(value: object) -> str:
    """Names the type of a value, with its article.

    >>> a_kind(3), a_kind("x"), a_kind(None), a_kind(lambda: 0)
    ('an int', 'a str', 'None', 'a function')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def quote(text: str) -> str:
    """Returns a text out of a file as messages show it: quoted, and cut off where it is long."""
    is_short = len(text) <= _QUOTED_CHARACTERS
    return repr(text if is_short else f"{text[:_QUOTED_CHARACTERS]}…")


def list_first(names: Sequence[str], most: int = 5) -> str:
    """Lists the first names, quoted, and says how many more there are.

    >>> list_first(["a", "b", "c"], 2)
    "'a', 'b' and 1 more"
    """
    return join_first(map(repr, names), len(names), most)


def join_first(items: Iterable[str], count: int, most: int) -> str:
    """Joins the first of `count` items, and says how many more there are."""
    more = f" and {count - most:,} more" if count > most else ""
    return ", ".join(islice(items, most)) + more


_LIST = re.compile(r"(?:[^\s,;`]+, ){7,}(?:(?:and|or) )?[^\s,;`]+")
_KEPT_OF_LIST = 3


def abridge(text: str, most: int, rest: str = "", *, drops: bool = True) -> str:
    """Returns a message of about so many characters: fewer names of long lists, fewer proposals.

    What stands in backticks is never cut, so that it can be run, and steps follow one another.

    `text`: the message; its parts are separated by semicolons. `most`: the number of characters;
    commands may take more. `rest`: what says where the whole message is. `drops`: whether parts may
    be left out; else only lists are cut.

    >>> abridge("it lacks a, b, c, d, e, f, g, h, i, j", 30)
    'it lacks a, b, c and 7 more …'
    >>> abridge("pass `a --b c`; or pass `d --e f`; or leave it", 36, " (--verbose)")
    'pass `a --b c`; or pass `d --e f` … (--verbose)'
    """
    if len(text) <= most:
        return text
    whole, text = text, _LIST.sub(_list_fewer, text)
    if len(text) <= most or not drops:
        return text if text == whole else f"{text} …{rest}"
    starts = [0, *_find_ends(text, "; ")]
    parts = [text[start:stop] for start, stop in pairwise([*starts, len(text)])]
    longest = max(range(len(parts)), key=lambda i: len(parts[i]))
    room = most - len(text) + len(parts[longest])  # for the longest part beside all others
    if room >= most / 2 and "`" not in parts[longest]:
        parts[longest] = f"{_cut(parts[longest], room)} …"
        return f"{''.join(parts)}{rest}"
    at = len(parts)
    while len("".join(parts)) > most and (at := at - 1):
        if "`" not in parts[at] or parts[at].startswith("; or "):  # else a step that has to follow
            del parts[at]
    if "`" not in parts[0]:
        parts[0] = _cut(parts[0], most)
    return f"{''.join(parts)} …{rest}"


def _cut(text: str, most: int) -> str:
    """Returns the words of a text that fit, and the first in any case."""
    if len(text) <= most:
        return text
    ends = [*_find_ends(text, " "), len(text)]
    return text[: max((at for at in ends if at <= most), default=ends[0])]


def _list_fewer(found: re.Match[str]) -> str:
    names = found[0].split(", ")
    return f"{', '.join(names[:_KEPT_OF_LIST])} and {len(names) - _KEPT_OF_LIST:,} more"


def _find_ends(text: str, separator: str) -> Iterator[int]:
    """Yields where a text may end: before each separator that is not in backticks."""
    for found in re.finditer(rf"`[^`]*`|{separator}", text):
        if found[0] == separator:
            yield found.start()


def make_printable(text: str) -> str:
    r"""Makes characters visible that are not printable: controls, escapes, bidi overrides.

    >>> print(make_printable("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_url_secrets(text: str) -> str:
    """Returns a text whose URLs show neither a signed query nor a user with a password.

    >>> without_url_secrets("https://me:pw@host/m.safetensors?X-Amz-Signature=0a1b: is gone")
    'https://…@host/m.safetensors?… is gone'
    >>> without_url_secrets("s3://bucket/what?/checkpoint-4")
    's3://bucket/what?/checkpoint-4'
    """
    if "://" not in text:
        return text
    return _USER.sub(r"\1…@", _SIGNED.sub(lambda match: f"{match[1] or match[2]}?…", text))


class Closing(ABC):
    """Has `close` called at the end of a `with` block, whatever ends it."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Lets go of what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
