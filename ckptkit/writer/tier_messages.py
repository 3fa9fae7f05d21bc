"""What is asked of the process that drains a node's own disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drain:
    """Asks for the files that some ranks wrote to be copied to another place, and made durable.

    Attributes:
        attempt: Names the attempt in answers.
        folder: Where they lie, absolute.
        target: Where they go, absolute: the working folder of all ranks.
        records: The ranks' records, relative to the folder; they name the files, and go last.
        further: Files that no record names, relative to the folder; they go to `BESIDE` in the
            target.
        earlier: A step that was drained and committed before, absolute; empty for none. Files that
            several steps have in common here are linked from there.
    """

    attempt: str
    folder: str
    target: str
    records: tuple[str, ...]
    further: tuple[str, ...] = ()
    earlier: str = ""
