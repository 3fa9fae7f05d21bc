"""`ckptkit.consolidate`: from shards to a folder that loads, with proof of every byte."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.core.manifest import Manifest
from ckptkit.execution.events import Listener, ignore
from ckptkit.pipeline.destination import check_destination
from ckptkit.pipeline.opening import PathLike
from ckptkit.pipeline.planning import prepared
from ckptkit.pipeline.writing import write_output
from ckptkit.planning.requests import ConsolidateRequest, Resources
from ckptkit.storage.places import open_target


def run_consolidation(  # noqa: PLR0913  what the command takes, sorted by stage
    src: PathLike,
    out: PathLike,
    request: ConsolidateRequest,
    *,
    base: str | None = None,
    overwrite: bool = False,
    resources: Resources | None = None,
    listener: Listener | None = None,
    also: Sequence[PathLike] = (),
) -> Manifest:
    """Writes what a request asks for into the directory `out`, whole or not at all.

    Returns:
        The manifest, as it lies in the output.

    Raises:
        InputError: If the source is damaged or incomplete; nothing is left behind.
        RefusedError: If the request cannot be met.
        OutputExistsError: If `out` is there and not empty, and `overwrite` is false.
    """
    check_destination(src, out, overwrite=overwrite, also=also)
    target = open_target(out, overwrite=overwrite)
    try:
        resources = resources or Resources()
        with prepared(src, out, request, base=base, resources=resources, also=also) as plan:
            return write_output(plan, target, listener or ignore)
    finally:
        target.abandon()
