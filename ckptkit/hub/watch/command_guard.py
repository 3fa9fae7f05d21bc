"""The process between a watch and a command of it: neither outlives the other.

    python command_guard.py GRACE_SECONDS WORD...

It leads a group of processes, in which the command is, and ends as the command does. Standard input
is a pipe that the watch closes to have the command stopped; so does the end of the watch, even if
it is killed: the group gets SIGTERM, and after the grace SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

NOT_FOUND, NOT_EXECUTABLE, SIGNALLED = 127, 126, 128  # as shells report them


def main() -> int:
    grace_seconds, words = float(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler, which the command does not inherit
    try:
        command = subprocess.Popen(words, stdin=subprocess.DEVNULL)  # noqa: S603  the user's own
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    stopped = threading.Event()

    def follow() -> None:
        os.read(0, 1)
        stopped.set()
        os.killpg(0, signal.SIGTERM)
        try:
            command.wait(grace_seconds)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    status = command.wait()
    if stopped.is_set():
        os.killpg(0, signal.SIGKILL)
    return SIGNALLED - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
