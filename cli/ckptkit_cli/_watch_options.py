"""The options of `ckptkit watch`."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from ckptkit.planning.push_choice import PushKind

Repository = Annotated[
    str,
    typer.Option(
        "--push",
        metavar="REPO_ID",
        help="The repository, such as org/name; it is made if it is not there.",
        show_default=False,
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        "--every", metavar="N", help="Push only steps divisible by N.", show_default=False
    ),
]
Best = Annotated[
    str | None,
    typer.Option(
        "--best",
        metavar="METRIC",
        help="Push a step only if its METRIC is better than that of all others.",
        show_default=False,
    ),
]
LastOnly = Annotated[
    bool,
    typer.Option(
        "--last-only", help="Of several steps that wait, push the newest.", show_default=False
    ),
]
Once = Annotated[
    bool,
    typer.Option(
        "--once",
        help="Push what is there and end, for cron; the exit status tells.",
        show_default=False,
    ),
]
UntilEof = Annotated[
    bool,
    typer.Option(
        "--until-eof",
        help="End once standard input does, and everything is pushed; a line on it has the run"
        " looked at.",
        show_default=False,
    ),
]
AtEnd = Annotated[
    bool,
    typer.Option("--at-end", help="Push nothing before the end of --until-eof.", hidden=True),
]
WaitForLock = Annotated[
    bool,
    typer.Option("--wait-for-lock", help="Wait for another watch of RUN to end.", hidden=True),
]
WholeStep = Annotated[
    str | None,
    typer.Option(
        "--whole-step",
        metavar="FOLDER",
        help="Push the step itself too, optimizer and all, into a folder of that name in the"
        " repository; {step} stands for its number.",
        show_default=False,
    ),
]
WeightsOnly = Annotated[
    bool,
    typer.Option(
        "--weights-only",
        help="Push weights without a config.json too, where neither the step nor --base has one.",
        show_default=False,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="With --whole-step: push matching files of the step too, which are not known as part"
        " of one; may be repeated.",
        show_default=False,
    ),
]
State = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="Where to keep journal, lock and what is built; in RUN itself if left out.",
        show_default=False,
    ),
]
Interval = Annotated[
    str | None,
    typer.Option(
        "--interval",
        metavar="SECONDS",
        help="How often to look at RUN.  [default: 5, of a URL 30]",
        show_default=False,
    ),
]
MetricsPort = Annotated[
    str | None,
    typer.Option(
        "--metrics-port",
        metavar="P",
        help="Serve /metrics for Prometheus at this port; 0 takes a free one.",
        show_default=False,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        "--metrics-host", metavar="ADDRESS", help="Where to serve them; 0.0.0.0 for all to see."
    ),
]
TagPrefix = Annotated[
    str, typer.Option("--tag-prefix", metavar="TEXT", help="What tags have before the step.")
]
As = Annotated[
    str,
    typer.Option(
        "--as",
        metavar="|".join(get_args(PushKind)),
        help="What to make of a step; 'auto' takes the adapter where PEFT trained one.",
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document per line for each event.", show_default=False
    ),
]
SourceOptionsFrom = Annotated[
    str | None,
    typer.Option(
        "--src-options-from",
        metavar="VARIABLE",
        help="The same, as a JSON object in an environment variable; no list of processes has it.",
        show_default=False,
    ),
]
