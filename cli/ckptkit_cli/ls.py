"""`ckptkit ls`: the steps of a run."""

from __future__ import annotations

import time

from ckptkit_cli._failures import told
from ckptkit_cli._options import AsJson
from ckptkit_cli._output import Output
from ckptkit_cli._run_options import Run, WatchState
from ckptkit_cli._storage_options import SrcOption, sources_of


def ls(
    run: Run,
    state: WatchState = None,
    src_option: SrcOption = None,
    as_json: AsJson = False,
) -> None:
    """List the steps of a run.

    Of each step: whether it is complete, its size, age and metrics, and where a watch has pushed
    it. Headers alone are read. Steps of other frameworks are listed as well.
    """
    output = Output(as_json=as_json)
    with told(output):
        from ckptkit.pipeline.listing import list_run
        from ckptkit_cli._run_page import listing_page, taken_run

        listing = list_run(taken_run(output, sources_of(run, src_option).first), state=state)
        now = time.time()
        output.document(listing.to_json(now=now))
        output.lines(listing_page(output, listing, now=now))
