"""Options and arguments of the commands that talk to the Hub."""

from __future__ import annotations

from typing import Annotated

import typer

Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A folder that loads, such as consolidate and adapter extract write.",
        show_default=False,
    ),
]
RepoId = Annotated[
    str,
    typer.Argument(
        metavar="REPO_ID", help="The repository on the Hub, as OWNER/NAME.", show_default=False
    ),
]
Private = Annotated[
    bool | None,
    typer.Option(
        "--private/--public",
        help="What a new repository is (private if left out), and an existing one must be.",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="R",
        help="The branch to commit to, made if need be; main if left out.",
        show_default=False,
    ),
]
Tag = Annotated[
    str | None,
    typer.Option(
        "--tag", metavar="T", help="Name the commit, such as step-500.", show_default=False
    ),
]
CreatePr = Annotated[
    bool,
    typer.Option(
        "--create-pr", help="Open a pull request instead of committing.", show_default=False
    ),
]
Message = Annotated[
    str | None,
    typer.Option(
        "--message",
        metavar="TEXT",
        help="The commit's; names the step if left out.",
        show_default=False,
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="REPO_ID",
        help="The model that was trained, where the folder names it by a path.",
        show_default=False,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Upload matching files too, which belong to no model; may be repeated.",
        show_default=False,
    ),
]
IncludeOptimizer = Annotated[
    bool,
    typer.Option(
        "--include-optimizer",
        help="Upload the state of the optimizer and of random numbers too.",
        show_default=False,
    ),
]
