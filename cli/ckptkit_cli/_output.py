"""Results on stdout, messages on stderr, exit statuses, signals, and robust standard streams."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import textwrap
import time
import traceback
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NoReturn, TextIO

import typer

from ckptkit.core.errors import CkptkitError, OutputError, UsageError, VerificationError
from ckptkit.core.text import without_url_secrets
from ckptkit.version import __version__

_MIN_ELASTIC = 16
_MAX_TEXT = 2000


def escaped(text: str) -> str:
    r"""Makes characters visible that are not printable: controls, escapes, bidi overrides.

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
    base = [character for character in text if not unicodedata.combining(character)]
    return len(base) + sum(unicodedata.east_asian_width(character) in "WF" for character in base)


def shortened(text: str, width: int) -> str:
    """Removes the middle of a text that is wider than `width` columns.

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
        width: Columns to fit into; None for no limit.
        right: Positions of the columns that are aligned to the right.
        elastic: The columns whose cells are shortened if the rows are too wide, in this order.
    """
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        for position in elastic:
            excess = max(sum(widths) + 2 * len(widths) - width, 0)
            least = min(widths[position], _MIN_ELASTIC)
            widths[position] = max(widths[position] - excess, least)
    lines = []
    for row in rows:
        line = ""
        for position, (cell, room) in enumerate(zip(row, widths, strict=True)):
            text = shortened(cell, room) if position in elastic else cell
            padding = " " * (room - cells(text))
            line += f"  {padding}{text}" if position in right else f"  {text}{padding}"
        lines.append(line.rstrip())
    return lines


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

    Callers escape text from checkpoints in the lines of a result; messages are escaped here.

    Attributes:
        as_json: Whether stdout gets one JSON document and nothing else.
        quiet: Whether only errors are shown.
        events: Whether stderr gets one JSON document per line and nothing else.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, events: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.events = events
        self._colour = takes_colour(sys.stdout)
        self._colour_messages = takes_colour(sys.stderr)

    @property
    def width(self) -> int | None:
        """Columns of the terminal that shows results; None without a terminal."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    @property
    def shows_progress(self) -> bool:
        return sys.stderr.isatty() and not (self.as_json or self.quiet or self.events)

    def styled(self, text: str, style: Style) -> str:
        return painted(text, style) if self._colour else text

    def lines(self, lines: Iterable[str]) -> None:
        if not (self.as_json or self.quiet):
            _write(sys.stdout, "".join(f"{line}\n" for line in lines))

    def document(self, value: Any) -> None:
        """Prints the one JSON document, in ASCII, if there is to be one."""
        if self.as_json:
            _write(sys.stdout, json.dumps(value, indent=2, ensure_ascii=True) + "\n")

    def record(self, value: Any) -> None:
        _write(sys.stdout, json.dumps(value, ensure_ascii=True) + "\n")

    def event(self, name: str, /, **facts: Any) -> None:
        """Writes an event for programs to stderr, if there are to be events."""
        if self.events:
            _write(sys.stderr, json.dumps(stamped(name, facts), ensure_ascii=True) + "\n")

    def note(self, text: str) -> None:
        """Writes a line of another process to stderr."""
        _write(sys.stderr, f"{escaped(text)}\n")

    def warn(self, text: str) -> None:
        """Writes a warning to stderr, as text or as an event."""
        self.event("warning", message=text)
        if not (self.quiet or self.events):
            self._write_message("warning", "yellow", text)

    def fail(self, label: str, text: str, hint: str = "") -> None:
        """Writes an error to stderr, with what to do next."""
        if self.events:
            return
        self._write_message(label, "red", text)
        if hint:
            _write(sys.stderr, f"  hint: {escaped(hint)}\n")

    def _write_message(self, label: str, style: Style, text: str) -> None:
        shown = painted(label, style) if self._colour_messages else label
        _write(sys.stderr, f"{shown}: {wrapped(escaped(text), width=None, first='')[0]}\n")


def stamped(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document of an event: its name, its time in seconds since 1970, its facts."""
    return {"event": name, "time": round(time.time(), 3), **facts}


def _write(stream: TextIO, text: str) -> None:
    stream.write(without_url_secrets(text))
    stream.flush()


def takes_colour(stream: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def painted(text: str, style: Style) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class Stopped(BaseException):
    """Raised in the main thread by the first signal; no `except Exception` catches it.

    Attributes:
        signal: The signal that arrived.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_status(self) -> int:
        return 128 + self.signal


def find_stop(error: BaseException) -> Stopped | None:
    """Returns the signal that an exception was made of, if it was.

    Python 3.11 turns what is raised while a class is made into a `RuntimeError` with it as cause,
    and each import of a module makes classes.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Stopped):
        cause = cause.__cause__
    return cause


def raise_on_signals() -> None:
    """Makes the first signal raise `Stopped`, so that `finally` cleans up; later ones do nothing.

    Signals that the parent ignores, as nohup does, stay ignored.
    """
    stopping = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise Stopped(number)

    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


class _LeavablePipe(io.FileIO):
    """A pipe whose reader may close it, as `| head` does; the rest is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Makes stdout and stderr robust; streams that the parent closed drop what is written."""
    sys.stdout = _make_robust(sys.stdout)
    sys.stderr = _make_robust(sys.stderr)


def flush_streams() -> None:
    """Writes what is buffered; drops it if that fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)


def discard(stream: TextIO) -> None:
    """Drops what a stream has buffered, and all that is written to it later."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    except (OSError, ValueError):  # a stream without a descriptor has nothing to flush later
        return
    finally:
        os.close(null)


def _make_robust(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123  open until the process ends
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if stream.isatty():
        stream.reconfigure(errors="backslashreplace")
        return stream
    stream.flush()
    raw = _LeavablePipe(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace"
    )


_BUG_STATUS = 1


@contextmanager
def exit_on_errors(output: Output) -> Iterator[None]:
    """Turns what a command raises into a message and an exit status.

    With `--json`, the one document on stdout has the error too.
    """
    try:
        yield
    except typer.Exit:
        raise
    except CkptkitError as error:
        raise typer.Exit(_show_error(output, error)) from error
    except Stopped as stop:
        raise typer.Exit(show_stop(output, stop)) from stop
    except OSError as error:
        raise typer.Exit(show_system_error(output, error)) from error
    except Exception as error:
        raise typer.Exit(show_bug(output, error)) from error


def exit_unless(passed: bool, kind: type[CkptkitError] = VerificationError) -> None:
    if not passed:
        exit_with(kind.exit_status)


def exit_with(status: int) -> NoReturn:
    raise typer.Exit(status)


def show_usage(words: Sequence[str], failure: Any) -> int:
    """Reports a command line that was not understood; returns the exit status.

    Args:
        words: The command line; only `--json` and `--events` are read.
        failure: What typer raised.
    """
    options = words[: words.index("--")] if "--" in words else words
    output = Output(as_json="--json" in options, events="--events" in options)
    where = failure.ctx.command_path if failure.ctx is not None else ""
    code = UsageError.code
    _show_document(output, failure.exit_code, code, failure.format_message(), where=where)
    if not output.events:
        failure.show()
    return int(failure.exit_code)


def show_stop(output: Output, stop: Stopped) -> int:
    """Reports that a signal ended the command; returns the exit status."""
    code = "interrupted" if stop.signal.name == "SIGINT" else "terminated"
    message = f"stopped by {stop.signal.name}"
    _show_document(output, stop.exit_status, code, message)
    output.fail(code, message)
    return stop.exit_status


def show_bug(output: Output, error: Exception) -> int:
    """Shows the traceback of a bug; returns the exit status."""
    stop = find_stop(error)
    if stop is not None:
        return show_stop(output, stop)
    lines = "".join(traceback.format_exception(error)).splitlines()
    if not output.events:
        sys.stderr.write(without_url_secrets("".join(f"{escaped(line)}\n" for line in lines)))
    output.event("traceback", lines=lines)
    _show_document(output, _BUG_STATUS, "internal-error", f"{type(error).__name__}: {error}")
    output.fail(
        "error[internal-error]",
        f"this is a bug of ckptkit {__version__}",
        "please report it, with the lines above and the command line",
    )
    return _BUG_STATUS


def _show_error(output: Output, error: CkptkitError) -> int:
    _show_document(
        output, error.exit_status, error.code, error.message, where=error.where, hint=error.hint
    )
    output.fail(f"error[{error.code}]", str(error), error.hint)
    return error.exit_status


def show_system_error(output: Output, error: OSError) -> int:
    """Reports a stdout that cannot be written; any other system error here is a bug."""
    try:
        sys.stdout.flush()
    except OSError as failure:
        discard(sys.stdout)
        reason = failure.strerror or str(failure)
        return _show_error(Output(), OutputError(reason, where="standard output"))
    return show_bug(output, error)


def _show_document(
    output: Output, status: int, code: str, message: str, *, where: str = "", hint: str = ""
) -> None:
    error = {"code": code, "where": where, "message": message, "hint": hint}
    output.document({"error": error})
    output.event("failed", exit_status=status, **error)
