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
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from ckptkit.core.errors import (
    CkptkitError,
    OutputError,
    TruncatedFileError,
    UsageError,
    VerificationError,
)
from ckptkit.core.text import Aside, abridge, make_printable, size_text, without_url_secrets
from ckptkit.core.text import counted as counted  # noqa: PLC0414  part of what pages are made with
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.core.index import Problem
    from ckptkit.report.page import ReportDocument

_MIN_ELASTIC = 16
_MAX_TEXT = 2000
_MOST_LINES = 4  # of a message
_LOG_COLUMNS = 100  # of a line that no terminal breaks
_LABEL_COLUMNS = 30
_REST = " (--verbose shows all)"

escaped = make_printable


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


def shortened_apart(texts: Sequence[str], width: int) -> list[str]:
    """Removes the middle of wide texts; different texts stay different.

    >>> shortened_apart(["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"], 19)
    ['...gate_proj.weight', '...up_proj.weight']
    """
    short = [shortened(text, width) for text in texts]
    by_short: dict[str, dict[str, None]] = {}
    for text, cut in zip(texts, short, strict=True):
        by_short.setdefault(cut, {})[text] = None
    alike = [list(group) for group in by_short.values() if len(group) > 1]
    changed = {text: cut for group in alike for text, cut in _cut_apart(group, width).items()}
    return [changed.get(text, cut) for text, cut in zip(texts, short, strict=True)]


def _cut_apart(texts: Sequence[str], width: int) -> dict[str, str]:
    """Cuts off what texts have in common at their front, and then at their end.

    Texts that differ in more than the width are left whole.
    """
    front = _common_length(texts)
    while front and texts[0][front - 1] not in "._":
        front -= 1
    back = _common_length([text[front:][::-1] for text in texts])
    cut = {text: f"...{text[front:]}" for text in texts}
    if any(cells(short) > width for short in cut.values()):
        cut = {text: f"...{text[front : len(text) - back]}..." for text in texts}
    if any(cells(short) > width for short in cut.values()):
        return {text: text for text in texts}
    return cut


def _common_length(texts: Sequence[str]) -> int:
    """Returns how many characters all texts begin with."""
    first, last = min(texts), max(texts)
    pairs = zip(first, last, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


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
    columns = [
        shortened_apart(column, room) if position in elastic else list(column)
        for position, (column, room) in enumerate(zip(zip(*rows, strict=True), widths, strict=True))
    ]
    for row in zip(*columns, strict=True):
        line = ""
        for position, (text, room) in enumerate(zip(row, widths, strict=True)):
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


def number_text(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def first_of(items: Sequence[str], limit: int) -> list[str]:
    """Returns the first items, and a line that says how many there are beyond `limit`.

    >>> first_of(["a", "b", "c"], 2)
    ['a', 'b', '... and 1 more']
    """
    more = len(items) - limit
    return list(items) if more <= 0 else [*items[:limit], f"... and {more:,} more"]


def fold_problems(problems: Iterable[Problem]) -> list[str]:
    """Returns a line for each problem; those of one kind in one file share a line."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        is_cut = problem.code == TruncatedFileError.code
        file = problem.where.partition(", ")[0] if is_cut else str(problem)
        groups.setdefault((problem.code, file), []).append(problem)
    lines = []
    for (code, _), alike in groups.items():
        more = f"; and {len(alike) - 1:,} more parts of this file" if len(alike) > 1 else ""
        lines.append(f"[{escaped(code)}] {escaped(str(alike[0]))}{more}")
    return lines


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
        verbose: Whether hints and lists of names on stderr are never cut.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        events: bool = False,
        verbose: bool = False,
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.events = events
        self.verbose = verbose
        self._colour = takes_colour(sys.stdout)
        self._colour_messages = takes_colour(sys.stderr)

    @property
    def width(self) -> int | None:
        """Columns of the terminal that shows results; None without a terminal."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    @property
    def reports_progress(self) -> bool:
        """Whether people are to see progress: on a terminal, or in a log."""
        return not (self.as_json or self.quiet or self.events)

    def styled(self, text: str, style: Style) -> str:
        return painted(text, style) if self._colour else text

    def lines(self, lines: Iterable[str]) -> None:
        if not (self.as_json or self.quiet):
            _write("".join(f"{line}\n" for line in lines))

    def document(self, value: Any) -> None:
        """Prints the one JSON document, in ASCII, if there is to be one."""
        if self.as_json:
            _write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")

    def record(self, value: Any) -> None:
        _write(json.dumps(value, ensure_ascii=True) + "\n")

    def event(self, name: str, /, **facts: Any) -> None:
        """Writes an event for programs to stderr, if there are to be events."""
        if self.events:
            _tell(json.dumps(stamped(name, facts), ensure_ascii=True) + "\n")

    def note(self, text: str) -> None:
        """Writes a line of another process to stderr."""
        _tell(f"{escaped(text)}\n")

    def warn(self, text: str) -> None:
        """Writes a warning to stderr, as text or as an event."""
        self.event("warning", message=text)
        if not (self.quiet or self.events):
            self._write_message("warning", "yellow", text)

    def remark(self, text: str) -> None:
        """Writes a note to stderr: a warning, unless it only says what was chosen."""
        if not isinstance(text, Aside):
            self.warn(text)
            return
        self.event("note", message=text)
        if not (self.quiet or self.events):
            self._write_message("note", "dim", text)

    def fail(self, label: str, text: str, hint: str = "") -> None:
        """Writes an error to stderr, with what to do next."""
        if self.events:
            return
        self._write_message(label, "red", text)
        if hint:
            _tell(f"  hint: {self._shorten(escaped(hint))}\n")

    def _write_message(self, label: str, style: Style, text: str) -> None:
        shown = painted(label, style) if self._colour_messages else label
        _tell(f"{shown}: {self._shorten(escaped(text), drops=False)}\n")

    def _shorten(self, text: str, *, drops: bool = True) -> str:
        """Returns a hint of at most four lines, unless all of it is wanted.

        Of what is found, only lists of names are cut.
        """
        if self.verbose:
            return text
        columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else _LOG_COLUMNS
        most = _MOST_LINES * columns - len(_REST) - _LABEL_COLUMNS
        text = abridge(text, most, _REST, drops=drops)
        return wrapped(text, width=None, first="")[0]


def stamped(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document of an event: its name, its time in seconds since 1970, its facts."""
    return {"event": name, "time": round(time.time(), 3), **facts}


def _write(text: str) -> None:
    """Writes a part of the result to stdout."""
    with _beside_bars(sys.stdout):
        sys.stdout.write(without_url_secrets(text))
        sys.stdout.flush()


def _tell(text: str) -> None:
    """Writes a message or an event to stderr; drops it if stderr cannot be written."""
    with suppress(OSError), _beside_bars(sys.stderr):  # such as a full disk, or a closed terminal
        sys.stderr.write(without_url_secrets(text))
        sys.stderr.flush()


def _beside_bars(stream: TextIO) -> AbstractContextManager[None]:
    """Takes bars of tqdm off the terminal while something else is written."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is None or not stream.isatty():
        return nullcontext()
    return cast("AbstractContextManager[None]", bars.external_write_mode(file=stream))


def takes_colour(stream: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def painted(text: str, style: Style) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def check_html(html: str | None, *, overwrite: bool, stats: bool = False) -> None:
    """Refuses options that do not fit together, and a file that cannot be written."""
    if html is None:
        for flag, is_passed in (("--stats", stats), ("--overwrite", overwrite)):
            if is_passed:
                raise UsageError(
                    "applies to the page of --html, which was not passed",
                    where=flag,
                    hint="pass --html report.html too"
                    + ("; `ckptkit stats` prints the numbers" if stats else ""),
                )
        return
    from ckptkit.report.page import check_page_path

    check_page_path(html, overwrite=overwrite)


def write_html(document: ReportDocument, html: str, *, overwrite: bool) -> list[str]:
    """Writes the page of a document; returns lines that say where it is."""
    from ckptkit.report.page import write_page

    path = write_page(document, html, overwrite=overwrite)
    size = size_text(path.stat().st_size)
    return ["", f"  page        {escaped(str(path))}, {size}: open it in a browser"]


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class Stopped(BaseException):
    """Raised in the main thread by the first signal; no `except Exception` catches it."""

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


class _StreamError(OSError):
    """A standard stream cannot be written; other system errors are bugs."""


class _LeavablePipe(io.FileIO):
    """A pipe whose reader may close it, as `| head` does; the rest is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return memoryview(data).nbytes
        except OSError as error:
            raise _StreamError(error.errno, error.strerror) from error


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
    except CkptkitError as error:
        raise SystemExit(_show_error(output, error)) from error
    except Stopped as stop:
        raise SystemExit(_show_stop(output, stop)) from stop
    except OSError as error:
        raise SystemExit(_show_system_error(output, error)) from error
    except Exception as error:
        raise SystemExit(_show_bug(output, error)) from error


def exit_unless(passed: bool, kind: type[CkptkitError] = VerificationError) -> None:
    if not passed:
        raise SystemExit(kind.exit_status)


def show_usage(words: Sequence[str], failure: Any) -> int:
    """Reports a command line that was not understood; returns the exit status."""
    options = words[: words.index("--")] if "--" in words else words
    output = Output(as_json="--json" in options, events="--events" in options)
    where = failure.ctx.command_path if failure.ctx is not None else ""
    code = UsageError.code
    _show_document(output, failure.exit_code, code, failure.format_message(), where=where)
    if not output.events:
        with suppress(OSError):  # as in `_tell`
            failure.show()
    return int(failure.exit_code)


def _show_stop(output: Output, stop: Stopped) -> int:
    """Reports that a signal ended the command; returns the exit status."""
    code = "interrupted" if stop.signal.name == "SIGINT" else "terminated"
    message = f"stopped by {stop.signal.name}"
    _show_document(output, stop.exit_status, code, message)
    output.fail(code, message)
    return stop.exit_status


def _show_bug(output: Output, error: Exception) -> int:
    """Shows the traceback of a bug; returns the exit status."""
    stop = find_stop(error)
    if stop is not None:
        return _show_stop(output, stop)
    import traceback

    lines = "".join(traceback.format_exception(error)).splitlines()
    if not output.events:
        _tell("".join(f"{escaped(line)}\n" for line in lines))
    output.event("traceback", lines=lines)
    _show_document(output, _BUG_STATUS, "internal-error", f"{type(error).__name__}: {error}")
    output.fail(
        "error[internal-error]",
        f"this is a bug of ckptkit {__version__}",
        "please report it, with the lines above, the command line and what"
        " `ckptkit --version --verbose` prints",
    )
    return _BUG_STATUS


def _show_error(output: Output, error: CkptkitError) -> int:
    _show_document(
        output, error.exit_status, error.code, error.message, where=error.where, hint=error.hint
    )
    output.fail(f"error[{error.code}]", str(error), error.hint)
    return error.exit_status


def _show_system_error(output: Output, error: OSError) -> int:
    """Reports a stdout that cannot be written; any other system error here is a bug."""
    try:
        if isinstance(error, _StreamError):  # a text larger than the buffer is not kept for `flush`
            raise error
        sys.stdout.flush()
    except OSError as failure:
        discard(sys.stdout)
        reason = failure.strerror or str(failure)
        return _show_error(output, OutputError(reason, where="standard output"))
    return _show_bug(output, error)


def _show_document(
    output: Output, status: int, code: str, message: str, *, where: str = "", hint: str = ""
) -> None:
    error = {"code": code, "where": where, "message": message, "hint": hint}
    output.document({"error": error})
    output.event("failed", exit_status=status, **error)
