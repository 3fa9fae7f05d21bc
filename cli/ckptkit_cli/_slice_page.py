"""What a command says that has written one slice of an output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptkit_cli._text import escaped, first_of

if TYPE_CHECKING:
    from ckptkit.pipeline.slicing import SliceDone

_LISTED = 8


def slice_json(done: SliceDone, out: str) -> dict[str, Any]:
    """Returns what `--json` prints for a slice that was not the last."""
    return {"out": out, "slice": str(done.share), "missing": list(done.missing)}


def slice_page(done: SliceDone, out: str) -> Iterator[str]:
    """Yields the lines for people."""
    yield f"slice {done.share} of {escaped(out)} is written"
    if done.missing:
        listed = ", ".join(first_of([str(number) for number in done.missing], _LISTED))
        yield f"it appears when these are too: {listed}"
    else:
        yield "another slice puts it in place; where that one was killed, run it again"
