"""`ckptkit adapter`: the commands for adapters of PEFT."""

from __future__ import annotations

import typer

from ckptkit_cli._plain_command import PlainCommand, PlainGroup
from ckptkit_cli.adapter_extract import extract
from ckptkit_cli.adapter_from_diff import from_diff
from ckptkit_cli.adapter_merge import merge


def adapter_group() -> typer.Typer:
    """Returns the commands that stand behind `ckptkit adapter`."""
    group = typer.Typer(
        name="adapter",
        cls=PlainGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Take LoRA adapters out of checkpoints, and merge them.",
    )
    group.callback()(_behind)
    for command in (extract, merge, from_diff):
        group.command(cls=PlainCommand)(command)
    return group


def _behind() -> None:
    """Take LoRA adapters out of checkpoints, and merge them."""
