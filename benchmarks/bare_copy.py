"""The limit that consolidation is held against: bytes to a new file, and nothing else.

Usage: python benchmarks/bare_copy.py SRC OUT [--threads 2] [--huge-pages]

Two threads read blocks of 8 MiB from the files below SRC and write them, one file after the
other, to the single file OUT, past the page cache where the file system allows that. The file is
preallocated and synced. No checksum, no digest, no plan. Prints the seconds it took, which leave
out the start of the process.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 8 << 20
PAGE_BYTES = 4096

Piece = tuple[int, int, int]  # descriptor, first byte in its file, length
Block = tuple[int, list[Piece]]  # first byte in the output, what fills it


def blocks_of(sources: list[tuple[int, int]]) -> Iterator[Block]:
    """Cuts sources, given as descriptor and size, into blocks of the output."""
    at, room, pieces = 0, BLOCK_BYTES, list[Piece]()
    for descriptor, size in sources:
        position = 0
        while position < size:
            length = min(room, size - position)
            pieces.append((descriptor, position, length))
            position, room = position + length, room - length
            if not room:
                yield at, pieces
                at, room, pieces = at + BLOCK_BYTES, BLOCK_BYTES, []
    if pieces:
        yield at, pieces


class BareCopy:
    """Copies blocks from one shared iterator with several threads."""

    def __init__(self, sources: list[tuple[int, int]], out: int, *, huge_pages: bool) -> None:
        self._blocks = blocks_of(sources)
        self._lock = threading.Lock()
        self._out = out
        self._huge_pages = huge_pages

    def run(self, threads: int) -> None:
        """Copies everything and waits for the end."""
        crew = [threading.Thread(target=self._work) for _ in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()

    def _work(self) -> None:
        memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._huge_pages:
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = memoryview(memory)
        while True:
            with self._lock:
                block = next(self._blocks, None)
            if block is None:
                return
            at, pieces = block
            filled = 0
            for descriptor, start, length in pieces:
                os.preadv(descriptor, [buffer[filled : filled + length]], start)
                filled += length
            # Whole pages only; the surplus behind the last block is cut off afterwards.
            os.pwrite(self._out, buffer[: filled + -filled % PAGE_BYTES], at)


def copy(src: Path, out: Path, threads: int, *, huge_pages: bool) -> None:
    """Copies all files below `src` into the new file `out` and makes it durable."""
    files = sorted(path for path in src.rglob("*") if path.is_file())
    sources = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in files]
    total = sum(size for _, size in sources)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        target = os.open(out, flags | os.O_DIRECT, 0o666)
    except OSError:  # such as tmpfs in older kernels
        out.unlink(missing_ok=True)
        target = os.open(out, flags, 0o666)
    os.posix_fallocate(target, 0, total)
    BareCopy(sources, target, huge_pages=huge_pages).run(threads)
    os.ftruncate(target, total)
    os.fsync(target)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--huge-pages", action="store_true", help="ask for buffers in huge pages")
    options = parser.parse_args()
    began = time.perf_counter()
    copy(options.src, options.out, options.threads, huge_pages=options.huge_pages)
    print(f"{time.perf_counter() - began:.4f}")


if __name__ == "__main__":
    main()
