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
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with a run that was interrupted, where its finished files are proven to be as"
        " it wrote them; what this one finishes stays if it is interrupted.",
        show_default=False,
    ),
]
DeleteSource = Annotated[
    bool,
    typer.Option(
        "--delete-source",
        help="Remove the files that were read once all of OUT was read back and has the digests of"
        " its manifest. Refused where they hold what is not in OUT; --dry-run lists them.",
        show_default=False,
    ),
]
