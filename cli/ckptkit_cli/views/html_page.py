"""The option `--html` of `inspect` and `diff`."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import InputError, RefusedError, UsageError
from ckptkit.core.text import size_text
from ckptkit_cli._command import Option
from ckptkit_cli._options import OUTPUT, OVERWRITE, READ
from ckptkit_cli._output import Output, escaped

if TYPE_CHECKING:
    from ckptkit.conversion.inspect import Inspection
    from ckptkit.conversion.stats import Statistics
    from ckptkit.report.documents import ReportDocument
    from ckptkit.runs.listing import RunListing
    from ckptkit.storage.places import Place

HTML = Option(
    "--html",
    OUTPUT,
    "Write a page for a browser to FILE: one file, which needs no network.",
    "FILE",
)
OVERWRITE_HTML = replace(
    OVERWRITE, group=OUTPUT, help="Replace the FILE of --html, if it is an earlier page."
)

HTML_OPTIONS = (
    HTML,
    Option(
        "--stats",
        READ,
        "Read all data of the model, for norms, ranges, NaN and infinities in the page of --html.",
    ),
    OVERWRITE_HTML,
)


def check_html(html: str | None, *, overwrite: bool, stats: bool = False) -> None:
    """Refuses options that do not fit together, and a file that cannot be written."""
    if html is None:
        for flag, is_passed in (("--stats", stats), ("--overwrite", overwrite)):
            if is_passed:
                raise UsageError(
                    "applies to the page of --html, which was not passed",
                    where=flag,
                    hint="pass --html report.html too"
                    + ("; `ckptkit stats` prints the numbers" if stats else ""),
                )
        return
    from ckptkit.report.page import check_page_path

    check_page_path(html, overwrite=overwrite)


def refuse_page_of_delta(html: str | None) -> None:
    if html is not None:
        raise RefusedError("there is no page of a delta", where="--html", hint="leave it out")


def show_page(
    output: Output,
    inspection: Inspection,
    source: Place,
    select: str | None,
    also: Sequence[Place],
    page: Mapping[str, Any],
) -> list[str]:
    """Writes the page of a checkpoint, with the run that it is in, if there is to be one.

    Args:
        output: Shows the progress.
        inspection: The checkpoint.
        source: Where it is.
        select: What was selected there.
        also: Further directories.
        page: The values of `HTML_OPTIONS`.

    Returns:
        Lines that say where the page is.
    """
    if page["html"] is None:
        return []
    from ckptkit.report.documents import plan_inspection_report

    statistics, remark = None, ""
    if page["stats"]:
        statistics, remark = _measure(output, inspection, source, select, also)
    document = plan_inspection_report(
        inspection,
        statistics=statistics,
        run=_find_run_of(inspection, source),
        remarks=[remark] if remark else [],
    )
    return write_html(document, page["html"], overwrite=page["overwrite"])


def _measure(
    output: Output, inspection: Inspection, source: Place, select: str | None, also: Sequence[Place]
) -> tuple[Statistics | None, str]:
    """Measures the model of a checkpoint, or returns why it cannot be measured.

    A checkpoint that is damaged still gets a page, which shows the damage.
    """
    from ckptkit.conversion.stats import run_stats
    from ckptkit.options import ConsolidateRequest
    from ckptkit_cli.views.progress import Progress

    if not any(tree.part == "model" for tree in inspection.trees):
        return None, "There are no statistics, since there is no model."
    request = ConsolidateRequest.from_options({"map": "none", "select": select})
    with Progress(output, "stats") as progress:
        try:
            return run_stats(source, request, also=also, listener=progress.listen), ""
        except InputError as error:
            output.warn(f"the page has no statistics: {error}")
            return None, f"There are no statistics: {error}"


def _find_run_of(inspection: Inspection, source: Place) -> RunListing | None:
    """Lists the run that a checkpoint is a step of; None if it is in none.

    Args:
        inspection: The checkpoint.
        source: The place that was inspected, whose storage options are used.
    """
    from ckptkit.formats.discovery import parse_step
    from ckptkit.runs.listing import list_run

    folder, name = posixpath.split(inspection.path.rstrip("/"))
    if parse_step(name) is None:
        return None
    try:
        return list_run(source.beside(folder or "."))
    except InputError:
        return None


def write_html(document: ReportDocument, html: str, *, overwrite: bool) -> list[str]:
    """Writes the page of a document; returns lines that say where it is."""
    from ckptkit.report.page import write_page

    path = write_page(document, html, overwrite=overwrite)
    size = size_text(path.stat().st_size)
    return ["", f"  page        {escaped(str(path))}, {size}: open it in a browser"]
