"""`ckptkit du`: what runs take, by run, step and kind of file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.core.text import size_text
from ckptkit.storage.locations import place_of
from ckptkit_cli._options import JSON, SRC_OPTION
from ckptkit_cli._output import Output, counted, escaped, table
from ckptkit_cli._program import Argument, command

if TYPE_CHECKING:
    from ckptkit.runs.usage import RunUsage, Usage


@command(
    Argument("run", "RUN", "A run, or a folder or URL above several runs."),
    SRC_OPTION,
    JSON,
    order=12,
)
def du(output: Output, run: str, src_option: Mapping[str, Any]) -> None:
    """Show what runs take on a disk or in a store.

        ckptkit du runs/llama
        ckptkit du runs

    Of each run and step: model, optimizer and the rest, by the names of the files, and what the
    removal of the step would free. A file with several names, such as a frozen weight, counts
    once, and so do blocks that files share on XFS or btrfs, such as those of a step and of the
    model that was made of it. Leftovers are hidden folders of interrupted saves. No file is read.
    """
    from ckptkit.runs.usage import measure_runs

    usage = measure_runs(place_of(run, src_option))
    output.document({"path": run} | usage.to_json())
    output.lines(_usage_page(output, usage))


def _usage_page(output: Output, whole: Usage) -> Iterator[str]:
    for number, usage in enumerate(whole.runs):
        if number:
            yield ""
        steps = counted(sum(bool(step.name) for step in usage.steps), "step")
        size = size_text(usage.size_bytes)
        path = output.styled(escaped(usage.path), "bold")
        yield f"{path}: {size}, {steps}{_shared(usage)}"
        kinds = [kind for kind in usage.kinds if usage.kinds[kind]]
        rows: list[tuple[str, ...]] = [("step", "size", "frees", *kinds)]
        for step in usage.steps:
            name = escaped(step.name) or "in no step"
            sizes = [size_text(step.kinds[kind]) if kind in step.kinds else "-" for kind in kinds]
            rows.append((name, size_text(step.size_bytes), size_text(step.freed_bytes), *sizes))
        together = [size_text(usage.kinds[kind]) for kind in kinds]
        rows.append(("together", size, "", *together))
        lines = table(rows, width=output.width, right=range(1, len(kinds) + 3))
        yield output.styled(lines[0], "dim")
        yield from lines[1:]
    if len(whole.runs) > 1:
        kinds_of_all: Counter[str] = Counter()
        for usage in whole.runs:
            kinds_of_all.update(usage.kinds)
        listed = ", ".join(f"{kind} {size_text(size)}" for kind, size in kinds_of_all.items())
        yield ""
        size = size_text(whole.size_bytes)
        yield f"{counted(len(whole.runs), 'run')}, {size}: {listed}{_shared(whole)}"


def _shared(usage: RunUsage | Usage) -> str:
    if usage.taken_bytes == usage.size_bytes:
        return ""
    return f"; {size_text(usage.taken_bytes)} on the disk, since files share blocks"
