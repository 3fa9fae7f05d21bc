"""The entry point. It imports next to nothing, so that signals are handled before the rest is."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` imports enum, which takes longer
import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING would import typing
if TYPE_CHECKING:
    from collections.abc import Sequence

_SIGNALLED = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    end_on_signals()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words in (["--version"], ["-V"]) and _show_version():
        return 0
    from ckptkit_cli._program import run_application

    status = run_application(words)
    if status < _SIGNALLED:  # otherwise a signal has been reported
        end_on_signals()  # the handlers of the command would raise where nothing catches it
    return status


def _show_version() -> bool:
    """Writes the version without click, which takes longer to import than this takes to run."""
    from ckptkit.version import __version__

    try:
        print(f"ckptkit {__version__}", flush=True)  # noqa: T201  the streams are not prepared yet
    except (OSError, ValueError):
        return False  # the program itself handles streams that take nothing
    return sys.stdout is not None


def end_on_signals() -> None:
    """Makes a signal end the process with one line; there is nothing to clean up yet.

    Signals that the parent chose to ignore, as nohup does, stay ignored.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(_signal, name, None)
        if number is not None and _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    name = next(n for n in ("SIGINT", "SIGTERM", "SIGHUP") if getattr(_signal, n, 0) == number)
    code = "interrupted" if name == "SIGINT" else "terminated"
    try:
        os.write(2, f"{code}: stopped by {name}\n".encode())
    finally:
        os._exit(_SIGNALLED + number)
