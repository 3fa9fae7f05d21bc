"""The limit for what only reads: bytes into memory, and nothing else.

Usage: python benchmarks/bare_read.py SRC... [--threads 2]

Two threads read blocks of 8 MiB from the files below all SRC, into one buffer each.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
from pathlib import Path

from bare_copy import BLOCK_BYTES, blocks_of


def read(folders: list[Path], threads: int) -> None:
    """Reads all files below the folders."""
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    blocks = blocks_of([(os.open(path, os.O_RDONLY), path.stat().st_size) for path in files])
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            for descriptor, start, length in block[1]:
                os.preadv(descriptor, [buffer[:length]], start)

    crew = [threading.Thread(target=work) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    read(options.src, options.threads)


if __name__ == "__main__":
    main()
