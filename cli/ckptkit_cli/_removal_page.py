"""What a command says of a source that goes once the output is proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptkit.core.texts import size_text
from ckptkit_cli._output import Output
from ckptkit_cli._text import counted, escaped

if TYPE_CHECKING:
    from ckptkit.pipeline.deleting import SourceRemoval


def removal_json(removal: SourceRemoval | None) -> dict[str, Any]:
    """Returns what `--json` prints of what goes, or went; nothing where the source stays."""
    return {} if removal is None else {"deleted": removal.to_json()}


def planned_page(output: Output, removal: SourceRemoval | None) -> Iterator[str]:
    """Yields the lines of a plan for people: every file that would go."""
    if removal is None:
        return
    yield ""
    yield output.styled(f"Removed from {escaped(removal.root.location)}, when proven", "bold")
    for file in removal.files:
        yield f"  {size_text(file.size_bytes):>10}  {escaped(file.path)}"
    if removal.values:
        text = counted(removal.values, "value")
        yield f"  with {text} that are no tensors, and are in no output"


def removed_page(removal: SourceRemoval | None) -> Iterator[str]:
    """Yields the lines of a result for people."""
    if removal is not None:
        yield (
            f"  removed    {counted(len(removal.files), 'file')} of the source,"
            f" {size_text(removal.size_bytes)}, after the output was read back"
        )
