"""Options of what is taken out of a checkpoint besides its weights, and to understand those."""

from __future__ import annotations

from typing import Annotated

import typer

Optimizer = Annotated[
    bool,
    typer.Option(
        "--optimizer",
        help="Write the states of the optimizer too, under the names of training's parameters.",
        show_default=False,
    ),
]
ModelConfig = Annotated[
    str | None,
    typer.Option(
        "--model-config",
        metavar="DIR",
        help="A folder with the config.json of the model, whose parameters tell what the flat"
        " parameters of FSDP1 (LOCAL_STATE_DICT) are made of; the installed transformers builds"
        " it without weights.",
        show_default=False,
    ),
]
StripPrefix = Annotated[
    list[str] | None,
    typer.Option(
        "--strip-prefix",
        metavar="PREFIX",
        help="Take PREFIX from the beginning of names, such as 'net.' of a module that wraps the"
        " model; may be repeated. All other options see the names without it.",
        show_default=False,
    ),
]
