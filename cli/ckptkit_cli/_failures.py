"""What the user reads, and the shell gets, when a command does not succeed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from ckptkit.core.errors import CkptkitError, OutputError, UsageError, VerificationError
from ckptkit.core.texts import without_url_secrets
from ckptkit.version import __version__
from ckptkit_cli._output import Output
from ckptkit_cli._signals import Stopped
from ckptkit_cli._streams import discard
from ckptkit_cli._text import escaped

_BUG_STATUS = 1


@contextmanager
def told(output: Output) -> Iterator[None]:
    """Turns whatever a command raises into a message and an exit status.

    With `--json`, the one document on stdout says what went wrong as well.

    Raises:
        typer.Exit: With the status, for every error.
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
    """Ends a command that did its work, and told all of it, with the status of an error."""
    if not passed:
        exit_with(kind.exit_status)


def exit_with(status: int) -> NoReturn:
    """Ends a command that did its work, and told all of it.

    Raises:
        typer.Exit: With the status.
    """
    raise typer.Exit(status)


def show_usage(words: Sequence[str], failure: Any) -> int:
    """Tells that a command line was not understood; returns the exit status.

    Args:
        words: The command line, of which nothing but `--json` and `--events` is looked for.
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
    """Tells that a signal ended the command; returns the exit status."""
    code = "interrupted" if stop.signal.name == "SIGINT" else "terminated"
    message = f"stopped by {stop.signal.name}"
    _show_document(output, stop.exit_status, code, message)
    output.fail(code, message)
    return stop.exit_status


def show_bug(output: Output, error: Exception) -> int:
    """Shows the traceback of what must not happen; returns the exit status."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    if not output.events:
        sys.stderr.write(without_url_secrets("".join(f"{escaped(line)}\n" for line in lines)))
    output.event("traceback", lines=lines)
    _show_document(output, _BUG_STATUS, "internal-error", f"{type(error).__name__}: {error}")
    output.fail(
        "error[internal-error]",
        f"this is a bug of ckptkit {__version__}",
        "please report it, with the lines above and the command that you ran",
    )
    return _BUG_STATUS


def _show_error(output: Output, error: CkptkitError) -> int:
    _show_document(
        output, error.exit_status, error.code, error.message, where=error.where, hint=error.hint
    )
    output.fail(f"error[{error.code}]", str(error), error.hint)
    return error.exit_status


def show_system_error(output: Output, error: OSError) -> int:
    """Tells of a stdout that takes nothing more; any other system error here is our bug."""
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
