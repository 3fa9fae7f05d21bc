"""`ckptkit seal`: writes the manifest of steps that another saver wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import size_text
from ckptkit_cli._options import JSON, QUIET, SRC_OPTION
from ckptkit_cli._output import Output, counted, escaped, table
from ckptkit_cli._program import Argument, command

if TYPE_CHECKING:
    from ckptkit.conversion.seal import Sealing


@command(
    Argument("path", "STEP|RUN", "A step, or a run, whose complete steps are all sealed."),
    SRC_OPTION,
    JSON,
    QUIET,
    order=10,
)
def seal(output: Output, path: str, src_option: Mapping[str, Any]) -> None:
    """Write the manifest of steps that another saver wrote.

        ckptkit seal runs/llama/checkpoint-500
        ckptkit seal runs/llama

    All of a step is read and compared with the checksums that its format stores, such as those of
    torch.save. Then ckptkit.json is written beside it, with a digest of every file: with it, the
    step is complete as those that ckptkit saves are, and `verify` finds any change. Steps that have
    one, or that are still written to, are left as they are. Exits with 6 if a step is damaged.
    """
    from ckptkit import api
    from ckptkit_cli._progress import Progress

    with Progress(output, "seal") as progress:
        result = api.seal(path, src_options=src_option, listener=progress.listen)
    output.document(result.to_json())
    output.lines(_sealing_page(output, result))
    for one in result.failed:
        output.warn(f"{one.step.path} {one.why}")
    if result.failed:
        raise SystemExit(max(one.error.exit_status for one in result.failed if one.error))


def _sealing_page(output: Output, result: Sealing) -> Iterator[str]:
    yield output.styled(escaped(result.location), "bold")
    rows: list[tuple[str, ...]] = [("step", "result", "size", "why")]
    results = {"sealed": "sealed", "kept": "as it was", "left": "left", "failed": "not sealed"}
    for one in result.steps:
        why = one.why
        if one.unverified:
            why = f"{counted(one.unverified, 'tensor')} had no checksum to compare with"
        rows.append(
            (
                escaped(one.step.name),
                results[one.action],
                size_text(one.step.size_bytes),
                escaped(why),
            )
        )
    yield from table(rows, width=output.width, right=(2,), elastic=(3, 0))
    sealed = sum(one.action == "sealed" for one in result.steps)
    yield f"  {counted(sealed, 'step')} sealed"
