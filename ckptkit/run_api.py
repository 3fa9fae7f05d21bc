"""The functions for whole runs that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptkit.core.arguments import check_arguments
from ckptkit.planning.retention import BestMode, Retention
from ckptkit.storage.locations import place_of

if TYPE_CHECKING:
    from ckptkit.pipeline.listing import RunListing
    from ckptkit.pipeline.opening import PathLike
    from ckptkit.pipeline.pruning import Pruned


@check_arguments
def list_run(run: PathLike, *, state: PathLike | None = None) -> RunListing:
    """Lists the steps of a run; headers alone are read.

    Args:
        run: The directory that the `checkpoint-N` folders lie in, or its URL.
        state: Where a watch of the run keeps its state, if not in the run itself.

    Returns:
        Each step: whether it is complete, its size, age and metrics, and where it was pushed.

    Raises:
        InputError: If there is no such run, or if it cannot be listed.
    """
    from ckptkit.pipeline import listing

    return listing.list_run(place_of(run), state=None if state is None else place_of(state))


@check_arguments
def prune(
    run: PathLike,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    best_mode: BestMode = "min",
    dry_run: bool = False,
) -> Pruned:
    """Removes the steps of a run that no rule keeps; the rules are those of a `Checkpointer`.

    Whatever they say, the newest complete step stays, and so do steps that are not complete, that
    somebody reads or pushes at this moment, or that the Trainer calls its best.

    Args:
        run: The directory that the `checkpoint-N` folders lie in, or its URL.
        keep_last: How many of the newest complete steps stay.
        keep_every: Steps divisible by this stay.
        keep_best: The metric by which the best step stays.
        best_mode: Whether the smallest or the largest value is best.
        dry_run: Whether to say only what would be done.

    Returns:
        What became of each step, and what that freed.

    Raises:
        UsageError: If there is no rule, or one has no valid value.
        RefusedError: If the best step is to stay, and no step has the metric.
        InputError: If there is no such run, or if it cannot be listed.
    """
    from ckptkit.pipeline.pruning import prune_run

    return prune_run(run, Retention(keep_last, keep_every, keep_best, best_mode), dry_run=dry_run)
