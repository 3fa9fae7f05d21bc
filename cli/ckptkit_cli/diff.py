"""`ckptkit diff`: two checkpoints, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckptkit_cli._failures import exit_unless, told
from ckptkit_cli._options import AsJson
from ckptkit_cli._output import Output
from ckptkit_cli._progress import Progress
from ckptkit_cli._storage_options import SrcOption, sources_of
from ckptkit_cli._text import counted, escaped, first_of, wrapped

if TYPE_CHECKING:
    from ckptkit.pipeline.diffing import Difference, TensorDifference

_LISTED = 20


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A path in or above a checkpoint.", show_default=False),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another one, of any format.", show_default=False)
    ],
    src_option: SrcOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare two models bit by bit.

    Tensor by tensor, whatever the two formats. Exits 6 when they differ.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.pipeline.diffing import run_diff

        with Progress(output, "diff") as progress:
            sources = sources_of(a, src_option)
            found = run_diff(sources.first, sources.place(b), listener=progress.listen)
        output.document(found.to_json())
        output.lines(_page(output, found))
        exit_unless(found.same)


def _page(output: Output, found: Difference) -> Iterator[str]:
    paths = f"{escaped(found.a)} and {escaped(found.b)}"
    equal = f"{counted(found.equal, 'tensor')} equal bit by bit"
    if found.same:
        yield f"{output.styled('same', 'green')}: {paths}: {equal}"
        return
    yield f"{output.styled('different', 'red')}: {paths}: {equal}"
    yield from _group(output, f"only in {escaped(found.a)}", found.only_in_a)
    yield from _group(output, f"only in {escaped(found.b)}", found.only_in_b)
    reshaped = [f"{name}: {a} against {b}" for name, (a, b) in found.reshaped.items()]
    yield from _group(output, "of another dtype or shape", reshaped)
    yield from _group(output, "with other values", list(map(_change, found.changed)))
    if found.note:
        yield from wrapped(f"note: {found.note}", width=output.width, first="  ", rest="    ")


def _group(output: Output, title: str, items: Sequence[str]) -> Iterator[str]:
    if not items:
        return
    yield f"  {counted(len(items), 'tensor')} {title}:"
    for item in first_of(items, _LISTED):
        yield from wrapped(escaped(item), width=output.width, first="    ", rest="      ")


def _change(change: TensorDifference) -> str:
    text = f"{change.name}: {counted(change.elements, 'element')}"
    if change.largest is None:
        return f"{text}, none of them a difference of two finite numbers"
    return f"{text}, largest difference {change.largest:.3g}"
