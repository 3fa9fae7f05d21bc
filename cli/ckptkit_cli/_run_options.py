"""The arguments and options of the commands for whole runs."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from ckptkit.planning.retention import BestMode

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The directory that the checkpoint-N folders lie in, or its URL.",
        show_default=False,
    ),
]
WatchState = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="Where a watch of RUN keeps its state, if not in RUN itself.",
        show_default=False,
    ),
]
KeepLast = Annotated[
    str | None,
    typer.Option(
        "--keep-last", metavar="N", help="The newest N complete steps stay.", show_default=False
    ),
]
KeepEvery = Annotated[
    str | None,
    typer.Option(
        "--keep-every", metavar="N", help="Steps divisible by N stay.", show_default=False
    ),
]
KeepBest = Annotated[
    str | None,
    typer.Option(
        "--keep-best",
        metavar="METRIC",
        help="The step with the best METRIC stays; ls shows what there is.",
        show_default=False,
    ),
]
BestModeChoice = Annotated[
    str,
    typer.Option(
        "--best-mode",
        metavar="|".join(get_args(BestMode)),
        help="Whether the smallest or the largest value is best.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Show what would be removed; remove nothing.", show_default=False
    ),
]
