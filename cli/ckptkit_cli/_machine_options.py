"""Options of commands whose work several machines or processes can share."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from ckptkit.planning.requests import Engine

EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(get_args(Engine)),
        help="'ray' shares the work among the nodes of a Ray cluster, one process on each, which"
        " all need to see SRC and OUT; threads, memory and bandwidth are then those of each node.",
    ),
]
Slice = Annotated[
    str | None,
    typer.Option(
        "--slice",
        metavar="I/N",
        help="Do one of N parts, I from 0 to N - 1, and leave the others to other processes that"
        " see the same OUT; the last to finish puts it in place.",
        show_default=False,
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="SIZE",
        help="Bytes per second that are read at most, and written at most.",
        show_default=False,
    ),
]
