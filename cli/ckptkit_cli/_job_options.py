"""Options of the commands that write an output, for those who run many of them."""

from __future__ import annotations

from typing import Annotated

import typer

Events = Annotated[
    bool,
    typer.Option(
        "--events",
        help="Tell what happens as JSON lines on stderr, and nothing else there.",
        show_default=False,
    ),
]
IfExists = Annotated[
    str,
    typer.Option(
        "--if-exists",
        metavar="error|verify",
        help="'verify' is content with an OUT that holds this very output already, made from the"
        " same source with the same options, once all its digests are proven.",
    ),
]
