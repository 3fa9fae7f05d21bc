"""Runs a consolidation to a URL in one process after another, each forked when it is asked for.

Usage: request_kills.py SOURCE URL OPTIONS. For each line on stdin a process is made, whose number
is printed; it begins at the next line. Its exit status is printed when it has ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import s3fs  # noqa: F401  imported once, for all processes

import ckptkit
from ckptkit.conversion import job  # noqa: F401
from ckptkit.storage.places import Place
from ckptkit.storage.remote import s3


def run(begin: int, source: str, out: Place, options: dict[str, Any]) -> int:
    """Returns the number of a process that waits for a byte."""
    process = os.fork()
    if process == 0:
        os.read(begin, 1)
        ckptkit.consolidate(source, out, **options)
        os._exit(0)
    return process


def main() -> None:
    source, url, given = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    s3.SMALL_BYTES = 2048  # weights go in parts, as large ones do
    begin, start = os.pipe()
    place = Place(url, given["storage"])
    for _ in sys.stdin:
        process = run(begin, source, place, given["options"])
        print(process, flush=True)  # noqa: T201
        sys.stdin.readline()
        os.write(start, b"x")
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(status, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
