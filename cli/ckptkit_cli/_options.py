"""The arguments and options of the commands; values are text, and parsed in one place below us."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from ckptkit.planning.requests import DTypeChoice, Layout, NameChoice

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A path in or above a checkpoint; of a run, the newest complete step is taken.",
        show_default=False,
    ),
]
Destination = Annotated[
    str,
    typer.Argument(
        metavar="OUT", help="A directory that does not exist, or is empty.", show_default=False
    ),
]
Selection = Annotated[
    str | None,
    typer.Option(
        "--select",
        metavar="NAME",
        help="Which model or checkpoint to take where there are several; inspect lists them.",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document.", show_default=False)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print nothing but errors.", show_default=False)
]
TensorPattern = Annotated[
    str | None,
    typer.Option(
        "--tensors",
        metavar="GLOB",
        help="List the tensors whose names match, such as '*.mlp.*'.",
        show_default=False,
    ),
]
DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="|".join(get_args(DTypeChoice)),
        help="Element type of floating tensors.",
    ),
]
KeepDType = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-dtype",
        metavar="GLOB",
        help="Names that keep their stored type whatever --dtype says; may be repeated.",
        show_default=False,
    ),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="|".join(get_args(Layout)),
        help="What the output looks like.",
        show_default=False,
    ),
]
Names = Annotated[
    str,
    typer.Option(
        "--names",
        metavar="|".join(get_args(NameChoice)),
        help="'live' writes the raw state dict; 'auto' refuses adapters and packed weights, which"
        " would load as another model.",
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="DIR",
        help="A model folder to take config and tokenizer from where the source has none.",
        show_default=False,
    ),
]
Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="DIR",
        help="A directory that holds further files of the checkpoint, such as another node's disk,"
        " with the same paths as below SRC; may be repeated. A file that lies in several must be"
        " the same in all.",
        show_default=False,
    ),
]
MaxShardSize = Annotated[
    str,
    typer.Option(
        "--max-shard-size", metavar="SIZE", help="Size at which a new weight file is begun."
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Take only names that match; may be repeated.",
        show_default=False,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Leave out names that match; may be repeated.",
        show_default=False,
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Copy Python files and 'auto_map' too.", show_default=False),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Show the plan and what it takes; write nothing.", show_default=False
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace an OUT that holds something.", show_default=False),
]
MemoryBudget = Annotated[
    str,
    typer.Option("--memory-budget", metavar="SIZE", help="What all buffers together may take."),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="What the whole process may take, the plan included.",
        show_default=False,
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers", metavar="N", help="Threads; chosen by the cores.", show_default=False
    ),
]
