"""`ckptkit stats`: norms, ranges, zeros, NaN and infinities of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptkit.options import NotFinite, parse_not_finite
from ckptkit_cli._options import (
    ALL,
    ALSO,
    BASE,
    EXCLUDE,
    INCLUDE,
    JSON,
    MAP,
    MOST_LISTED,
    OUTPUT,
    QUIET,
    READ,
    SELECT,
    SRC,
    SRC_OPTION,
    limit_list,
)
from ckptkit_cli._output import Output, counted, escaped, exit_unless, number_text, table
from ckptkit_cli._program import Option, command

if TYPE_CHECKING:
    from ckptkit.conversion.stats import Statistics, TensorStatistics

_SORTS: Mapping[str, Callable[[TensorStatistics], Any]] = {
    "norm": lambda tensor: -(math.inf if tensor.norm is None else tensor.norm),
    "max": lambda tensor: -max(abs(tensor.minimum or 0), abs(tensor.maximum or 0)),
    "zeros": lambda tensor: -tensor.zero_share,
    "nan": lambda tensor: -(tensor.nan + tensor.infinite),
}


@command(
    SRC,
    SELECT,
    INCLUDE,
    EXCLUDE,
    ALSO,
    replace(
        BASE,
        help="Folder with the config.json of the model, if SRC has none; for --map and --unpacked.",
    ),
    Option("--optimizer", READ, "Measure the states of the optimizer too."),
    Option("--unpacked", READ, "Measure packed weights by the numbers that they stand for."),
    replace(MAP, default="none"),
    Option(
        "--fail-on",
        OUTPUT,
        "Exit with 4 if a tensor has NaN ('nan'), or an infinite element ('inf'). Can be repeated.",
        "nan|inf",
        repeated=True,
        parse=partial(parse_not_finite, option="--fail-on"),
    ),
    Option(
        "--sort",
        OUTPUT,
        "Show the largest first: by norm, by absolute value, by share of zeros, or by NaN and"
        " infinite elements. Without it, tensors are in the order of SRC.",
        choices=tuple(_SORTS),
    ),
    replace(ALL, help=f"Show all tensors; without it, a terminal shows the first {MOST_LISTED}."),
    SRC_OPTION,
    JSON,
    QUIET,
    order=7,
)
def stats(
    output: Output,
    src: str,
    *,
    fail_on: Sequence[NotFinite],
    sort: str | None,
    all: bool,  # noqa: A002
    src_option: Mapping[str, Any],
    **values: Any,
) -> None:
    """Show norms, ranges, zeros, NaN and infinities.

        ckptkit stats runs/llama/checkpoint-500
        ckptkit stats models/llama --fail-on nan --fail-on inf --quiet

    Norm, minimum, maximum and mean are those of the finite elements. Every tensor is read once, and
    checked against its stored checksums.
    """
    from ckptkit import api
    from ckptkit_cli._progress import Progress

    with Progress(output, "stats") as progress:
        statistics = api.stats(src, src_options=src_option, listener=progress.listen, **values)
    progress.warn(progress.notes)
    refused = statistics.find_refusal(*fail_on)
    # With --json, the document of the error is the one document: it has the numbers too.
    output.document(
        statistics.to_json() | ({} if refused is None else {"error": refused.to_json()})
    )
    tensors = statistics.tensors
    if sort is not None:
        tensors = tuple(sorted(tensors, key=_SORTS[sort]))
    output.lines(_statistics_page(output, statistics, tensors, shows_all=all))
    if refused is not None:
        output.fail(f"error[{refused.code}]", str(refused), refused.hint)
        exit_unless(passed=False, kind=type(refused))


def _statistics_page(
    output: Output, statistics: Statistics, tensors: Sequence[TensorStatistics], *, shows_all: bool
) -> Iterator[str]:
    """Yields a line for each tensor, or for the first ones, and one for all together."""
    from ckptkit.conversion.stats import sum_counts
    from ckptkit.engine.values import STATISTICS, TITLES

    step = "" if statistics.step is None else f", step {statistics.step:,}"
    listed = f"{counted(len(tensors), 'tensor')}, {counted(statistics.elements, 'element')}"
    if any(tensor.label and tensor.parameters != tensor.elements for tensor in tensors):
        listed += f", {counted(statistics.parameters, 'parameter')} of the model"
    yield f"{escaped(statistics.path)}: {statistics.format}{step}: {listed}"
    titles = [TITLES.get(name, name).lower() for name in STATISTICS]
    rows: list[tuple[str, ...]] = [("tensor", "dtype", "shape", *titles)]
    is_apart = len(statistics.norms) > 1
    if is_apart:  # stable: each of both parts stays in its order
        tensors = sorted(tensors, key=lambda tensor: tensor.role != "adapter")
    shown, rest = limit_list(output, tensors, shows_all=shows_all)
    for tensor in shown:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        shape = f"{shape} ({tensor.label})" if tensor.label else shape
        numbers = {name: getattr(tensor, name) for name in STATISTICS}
        rows.append((escaped(tensor.name), tensor.dtype, shape, *_cells(numbers, tensor.elements)))
    totals = [(str(role), norm) for role, norm in statistics.norms.items()] if is_apart else []
    for role, norm in [*totals, ("", statistics.norm)]:
        own = [tensor for tensor in statistics.tensors if role in {"", tensor.role}]
        numbers = {"norm": norm, **sum_counts(own)}
        cells = dict(zip(numbers, _cells(numbers, sum(t.elements for t in own)), strict=True))
        title = f"total of the {role}" if role else "total"
        rows.append((title, "", "", *(cells.get(name, "") for name in STATISTICS)))
    lines = table(rows, width=output.width, right=set(range(3, len(rows[0]))))
    ends = len(lines) - len(totals) - 1
    yield from (*lines[:ends], *rest, *lines[ends:])


def _cells(numbers: Mapping[str, float | None], elements: int) -> Iterator[str]:
    from ckptkit.engine.values import ELEMENT_COUNTS

    for name, number in numbers.items():
        if name == "zeros":
            yield f"{(number or 0) / elements if elements else 0:.2%}"
        elif name in ELEMENT_COUNTS:
            yield f"{number:,}"
        else:
            yield number_text(number)
