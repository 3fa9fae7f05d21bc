"""One job of a batch, in a process of its own: `python -m ckptkit_cli.batch.child`.

The command line is JSON on the first line of stdin, which no other user of the machine can read.
The rest of stdin stays open while the batch runs: when it ends, the job ends too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from ckptkit_cli.main import end_on_signals, main

_STDIN = 0


def _end_with_batch() -> None:
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def run() -> int:
    """Runs the job; returns its exit status."""
    end_on_signals()
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(_STDIN, 1)  # unbuffered: the thread waits for the rest
        if not byte:
            break
        line += byte
    words = json.loads(line)
    threading.Thread(target=_end_with_batch, daemon=True).start()
    return main(words)


if __name__ == "__main__":
    sys.exit(run())
