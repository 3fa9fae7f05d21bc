"""Where results and messages go, and in what dress."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TextIO

from ckptkit.core.texts import without_url_secrets
from ckptkit_cli._text import escaped, wrapped

Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, str] = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}


class Output:
    """Writes results to stdout and everything else to stderr.

    Whoever builds a line of a result escapes what stems from a checkpoint; messages are escaped
    here.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, events: bool = False) -> None:
        """Chooses what is shown.

        Args:
            as_json: Whether stdout carries one JSON document and nothing else.
            quiet: Whether only errors are shown.
            events: Whether stderr carries one JSON document per line and nothing else.
        """
        self.as_json = as_json
        self.quiet = quiet
        self.events = events
        self._colour = _takes_colour(sys.stdout)
        self._colour_messages = _takes_colour(sys.stderr)

    @property
    def width(self) -> int | None:
        """Columns of the terminal that shows results; None where there is no terminal."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    @property
    def shows_progress(self) -> bool:
        """Whether somebody watches who could be shown a bar."""
        return sys.stderr.isatty() and not (self.as_json or self.quiet or self.events)

    def styled(self, text: str, style: Style) -> str:
        """Colours a part of a result, where colours are wanted."""
        return _painted(text, style) if self._colour else text

    def lines(self, lines: Iterable[str]) -> None:
        """Prints lines of a result for people."""
        if not (self.as_json or self.quiet):
            _write(sys.stdout, "".join(f"{line}\n" for line in lines))

    def document(self, value: Any) -> None:
        """Prints the one JSON document, in ASCII; nothing where no JSON was asked for."""
        if self.as_json:
            _write(sys.stdout, json.dumps(value, indent=2, ensure_ascii=True) + "\n")

    def record(self, value: Any) -> None:
        """Prints one of many results, as one line of JSON, in ASCII."""
        _write(sys.stdout, json.dumps(value, ensure_ascii=True) + "\n")

    def event(self, name: str, /, **facts: Any) -> None:
        """Tells programs on stderr what happened; nothing where no events were asked for."""
        if self.events:
            _write(sys.stderr, json.dumps(stamped(name, facts), ensure_ascii=True) + "\n")

    def note(self, text: str) -> None:
        """Passes on to stderr what somebody else has said."""
        _write(sys.stderr, f"{escaped(text)}\n")

    def warn(self, text: str) -> None:
        """Tells on stderr what the user should know."""
        self.event("warning", message=text)
        if not (self.quiet or self.events):
            self._tell("warning", "yellow", text)

    def fail(self, label: str, text: str, hint: str = "") -> None:
        """Tells people on stderr what went wrong, and what to do next."""
        if self.events:
            return
        self._tell(label, "red", text)
        if hint:
            _write(sys.stderr, f"  hint: {escaped(hint)}\n")

    def _tell(self, label: str, style: Style, text: str) -> None:
        shown = _painted(label, style) if self._colour_messages else label
        _write(sys.stderr, f"{shown}: {wrapped(escaped(text), width=None, first='')[0]}\n")


def stamped(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an event as programs read it: its name, when it was, in seconds since 1970, and more.

    Args:
        name: What happened.
        facts: What else is known.
    """
    return {"event": name, "time": round(time.time(), 3), **facts}


def _write(stream: TextIO, text: str) -> None:
    stream.write(without_url_secrets(text))
    stream.flush()


def _takes_colour(stream: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def _painted(text: str, style: Style) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
