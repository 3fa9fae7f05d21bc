"""Options and arguments of the commands that talk to the Hub.

Options of the commands that write an output, for those who run many of them.

Options of commands whose work several machines or processes can share.

Options of what is taken out of a checkpoint besides its weights, and to understand those.

The arguments and options of the commands for whole runs.

What users know of an adapter that its tensors do not tell: options into configuration.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, get_args

import typer

from ckptkit.core.errors import UsageError
from ckptkit.options import Engine
from ckptkit.runs.save_order import BestMode

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


def known_of_adapter(
    lora_alpha: str | None,
    use_rslora: bool | None,
    fan_in_fan_out: bool | None,
    token_indices: str | None,
) -> dict[str, Any]:
    """Returns what was given, by the keys of `adapter_config.json`."""
    known = {
        "lora_alpha": None if lora_alpha is None else _alpha(lora_alpha),
        "use_rslora": use_rslora,
        "fan_in_fan_out": fan_in_fan_out,
        "trainable_token_indices": None if token_indices is None else _indices(token_indices),
    }
    return {key: value for key, value in known.items() if value is not None}


def _alpha(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is no number", where="--lora-alpha", hint="pass 16")
    if value <= 0:
        raise UsageError(
            f"{text!r} would turn what was trained around, or into nothing",
            where="--lora-alpha",
            hint="pass the alpha of the run, such as 16",
        )
    return int(value) if value == int(value) else value


def _indices(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and word.isascii() for word in words):
        raise UsageError(
            f"{text!r} is no list of tokens", where="--token-indices", hint="pass 5,17,1024"
        )
    return [int(word) for word in words]
