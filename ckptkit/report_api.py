"""The function that users call to write an HTML page of a checkpoint, or of two models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.arguments import check_arguments
from ckptkit.core.errors import ArgumentError
from ckptkit.core.text import a_kind

if TYPE_CHECKING:
    from ckptkit.conversion.diff import Difference
    from ckptkit.conversion.inspect import Inspection
    from ckptkit.conversion.stats import Statistics
    from ckptkit.runs.listing import RunListing
    from ckptkit.storage.places import PathLike


@check_arguments
def write_report(
    result: Inspection | Difference,
    out: PathLike,
    *,
    statistics: Statistics | None = None,
    run: RunListing | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes one HTML file that shows a checkpoint, or how two models differ.

    The page needs no network, and contains its style and its script. It appears by a rename, whole.

    Args:
        result: What `inspect` or `diff` returned. `inspect(path, shards=True)` adds the map of
            ranks and files, `diff(a, b, numeric=True)` adds how far each tensor has changed.
        out: The file; its directory exists.
        statistics: With an inspection: what `stats` returned for the same checkpoint.
        run: With an inspection: what `list_run` returned for the run that it is a step of.
        overwrite: Whether an earlier page is replaced. Other files never are.

    Returns:
        The path of the file.

    Raises:
        ArgumentError: If `result` is neither, or something does not belong to a difference.
        OutputExistsError: If the file exists.
        OutputError: If it cannot be written there.
        NoSpaceError: If the disk is full; nothing is left behind.
    """
    from ckptkit.conversion.diff import Difference
    from ckptkit.conversion.inspect import Inspection
    from ckptkit.conversion.stats import Statistics
    from ckptkit.report.documents import plan_difference_report, plan_inspection_report
    from ckptkit.report.page import write_page
    from ckptkit.runs.listing import RunListing

    if isinstance(result, Difference):
        if statistics is not None or run is not None:
            where = "write_report: statistics, run"
            raise ArgumentError("belongs to an inspection", where=where)
        return write_page(plan_difference_report(result), out, overwrite=overwrite)
    _check_result(result, Inspection, "result", "inspect or diff")
    if statistics is not None:
        _check_result(statistics, Statistics, "statistics", "stats")
    if run is not None:
        _check_result(run, RunListing, "run", "list_run")
    document = plan_inspection_report(result, statistics=statistics, run=run)
    return write_page(document, out, overwrite=overwrite)


def _check_result(value: object, kind: type, name: str, source: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentError(
            f"is {a_kind(value)}, where the result of {source} was expected",
            where=f"write_report: {name}",
            hint=f"pass ckptkit.{source.partition(' ')[0]}(...)",
        )
