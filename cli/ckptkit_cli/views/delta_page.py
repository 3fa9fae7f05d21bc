"""What `ckptkit inspect` shows of a delta: its versions, and what changed."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ckptkit.core.text import size_text
from ckptkit.deltas.checks import DeltaInspection
from ckptkit.options import matches
from ckptkit_cli._output import Output, counted, escaped, table


def show_delta(output: Output, delta: DeltaInspection, pattern: str | None) -> None:
    """Shows a delta, and the tensors that match a pattern if there is one."""
    if pattern is not None:
        kept = tuple(line for line in delta.tensors if matches(line.name, (pattern,)))
        delta = replace(delta, tensors=kept)
    output.document(delta.to_json())
    if not output.as_json:
        output.lines(_delta_page(output, delta))


_LISTED_CHANGES = 20
_CHANGE_HEADER = ("STORED", "CHANGED", "DTYPE", "SHAPE", "NAME")


def _delta_page(output: Output, delta: DeltaInspection) -> Iterator[str]:
    share = delta.changed_share
    yield output.styled(escaped(delta.path), "bold")
    yield (f"  version     {delta.version:,}, to be applied to version {delta.base_version:,}")
    yield f"  encoding    {delta.encoding}, checksums {delta.checksum}"
    yield f"  on disk     {counted(delta.files, 'file')}, {size_text(delta.size_bytes)}"
    if delta.base is not None:
        yield f"  made from   {escaped(delta.base)}"
        yield f"  leads to    {escaped(str(delta.source))}"
    text = counted(len(delta.tensors), "tensor")
    if delta.unchanged is not None and share is not None:
        text += f" of {len(delta.tensors) + delta.unchanged:,}; {share:.3%} of the elements of"
        text += f" {size_text(delta.model_bytes or 0)}"
    yield f"  changed     {text}"
    if not delta.tensors:
        return
    rows: list[tuple[str, ...]] = [_CHANGE_HEADER]
    ordered = sorted(delta.tensors, key=lambda line: -line.stored_bytes)
    for line in ordered[:_LISTED_CHANGES]:
        known = line.changed_elements is not None and line.size_bytes is not None
        rows.append(
            (
                size_text(line.stored_bytes),
                f"{line.changed_elements:,}" if known else "",
                line.dtype or "",
                "" if line.shape is None else str(list(line.shape)),
                escaped(line.name),
            )
        )
    yield ""
    yield from table(rows, width=output.width, right={0, 1})
    if len(ordered) > _LISTED_CHANGES:
        yield f"  and {len(ordered) - _LISTED_CHANGES:,} more; --json lists all of them"
    yield ""
    yield output.styled("Next", "bold")
    step = escaped(f"ckptkit delta apply BASE {delta.path} OUT")
    yield f"  {output.styled(step, 'cyan')}"
