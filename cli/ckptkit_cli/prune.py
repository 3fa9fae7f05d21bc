"""`ckptkit prune`: removes the steps of a run that no rule keeps."""

from __future__ import annotations

import time
from typing import cast, get_args

from ckptkit.core.errors import OutputError
from ckptkit.planning.requests import check_choice, positive_number
from ckptkit.planning.retention import BestMode, Retention
from ckptkit_cli import _run_options as options
from ckptkit_cli._failures import exit_unless, told
from ckptkit_cli._options import AsJson
from ckptkit_cli._output import Output
from ckptkit_cli._storage_options import SrcOption, sources_of


def prune(
    run: options.Run,
    keep_last: options.KeepLast = None,
    keep_every: options.KeepEvery = None,
    keep_best: options.KeepBest = None,
    best_mode: options.BestModeChoice = "min",
    dry_run: options.DryRun = False,
    state: options.WatchState = None,
    src_option: SrcOption = None,
    as_json: AsJson = False,
) -> None:
    """Remove the steps of a run that no rule keeps.

    A step stays if any rule keeps it. Whatever the rules say, the newest complete step stays, and
    so do steps that are not complete, that somebody reads or pushes at this moment, or that the
    Trainer calls its best. A kill at any moment leaves each step whole or gone.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.pipeline.pruning import prune_run
        from ckptkit_cli._run_page import pruned_page, taken_run

        check_choice("--best-mode", best_mode, get_args(BestMode))
        retention = Retention(
            keep_last=positive_number(keep_last, option="--keep-last", example=3),
            keep_every=positive_number(keep_every, option="--keep-every", example=1000),
            keep_best=keep_best,
            best_mode=cast(BestMode, best_mode),
        )
        place = taken_run(output, sources_of(run, src_option).first)
        pruned = prune_run(place, retention, dry_run=dry_run, state=state)
        now = time.time()
        output.document(pruned.to_json(now=now))
        output.lines(pruned_page(output, pruned, now=now))
        for one in pruned.failed:
            output.warn(f"{one.step.path} was not removed: {one.why}")
        exit_unless(not pruned.failed, OutputError)
