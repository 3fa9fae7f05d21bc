"""`ckptkit watch`: a sidecar that pushes each committed step of a run to the Hub.

The run of `ckptkit watch`: from its options to its exit status.

The options of `ckptkit watch`.

Where a watch waits: for time, for news on standard input, or for its end.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from ckptkit.adapters.sources import AdapterRequest
from ckptkit.core.errors import AmbiguousSourceError, CkptkitError, NotACheckpointError, UsageError
from ckptkit.hub.watch.build import BuildSettings, PushChoice, PushKind
from ckptkit.hub.watch.events import MetricsServer, WatchEvent, WatchMetrics
from ckptkit.hub.watch.hub_branch import BranchSettings
from ckptkit.hub.watch.start import WatchRequest, run_watch
from ckptkit.hub.watch.watch import WATCH_RETRIES, WatchSettings
from ckptkit.options import (
    ConsolidateRequest,
    check_choice,
    file_limit,
    make_resources,
    name_prefixes,
    positive_number,
)
from ckptkit.plan.load_report import PUSH_OF_TRAINING, WATCH
from ckptkit.runs.run_paths import run_below
from ckptkit.runs.save_order import BestMode, Retention
from ckptkit.storage.locations import parse_options
from ckptkit.storage.places import PathLike, Place, is_url
from ckptkit_cli import _job_options as hub_options
from ckptkit_cli import _job_options as parts
from ckptkit_cli import _job_options as run_options
from ckptkit_cli import _options as options
from ckptkit_cli._options import SrcOption
from ckptkit_cli._output import Output, Stopped, told
from ckptkit_cli._pages import WatchPage
from ckptkit_cli.consolidate import worker_count

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


def watch(
    run: run_options.Run,
    push: Repository,
    every: Every = None,
    best: Best = None,
    best_mode: run_options.BestModeChoice = "min",
    last_only: LastOnly = False,
    once: Once = False,
    until_eof: UntilEof = False,
    at_end: AtEnd = False,
    wait_for_lock: WaitForLock = False,
    private: hub_options.Private = None,
    revision: hub_options.Revision = None,
    tag_prefix: TagPrefix = "step-",
    make: As = "auto",
    whole_step: WholeStep = None,
    include: Include = None,
    adapter: options.Adapter = None,
    adapter_config: options.AdapterConfig = None,
    dtype: options.DType = "keep",
    base: options.Base = None,
    names: options.Names = "auto",
    strip_prefix: parts.StripPrefix = None,
    weights_only: WeightsOnly = False,
    max_shard_size: options.MaxShardSize = None,
    keep_last: run_options.KeepLast = None,
    keep_every: run_options.KeepEvery = None,
    keep_best: run_options.KeepBest = None,
    state: State = None,
    interval: Interval = None,
    src_option: SrcOption = None,
    src_options_from: SourceOptionsFrom = None,
    workers: options.Workers = None,
    memory_budget: options.MemoryBudget = "64MB",
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    as_json: JsonLines = False,
    quiet: options.Quiet = False,
) -> None:
    """Push each step of a run to the Hub as it is committed.

    Each step becomes a verified model folder or adapter, and one commit with one tag; a kill
    neither loses nor repeats it. With --keep-last and others, prune then removes steps of RUN.
    """
    given = dict(locals())
    output = Output(quiet=quiet or as_json)
    with told(output):
        watch_run(output, given)


_READ_BYTES = 4096


class WatchPauses:
    """Waits until there may be news; told to end by whoever closes standard input."""

    def __init__(self, *, ending: bool, reads_input: bool) -> None:
        """Begins to read standard input, if it is to be read.

        Args:
            ending: Whether the watch ends as soon as nothing waits.
            reads_input: Whether it does once standard input has ended.
        """
        self.ending = ending
        self._news = threading.Event()
        if reads_input:
            threading.Thread(target=self._read, name="ckptkit-input", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Waits, at most so long: less when there may be news."""
        self._news.wait(seconds)
        self._news.clear()

    def _read(self) -> None:
        # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
        try:
            descriptor = sys.stdin.fileno()
            while os.read(descriptor, _READ_BYTES):
                self._news.set()
        except (AttributeError, OSError, ValueError):
            pass  # closed from the beginning: it has ended
        self.ending = True
        self._news.set()


_LOCAL_SECONDS, _REMOTE_SECONDS = 5.0, 30.0
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 86_400.0
_ONCE_TRIES = 2  # whoever starts a watch that ends at once is there, or starts it again
_MOST_PORT = 65_535
_FOLDER_NAME = re.compile(r"(?!ckptkit)[A-Za-z0-9_{][A-Za-z0-9_{}.-]*")


def watch_run(output: Output, given: Mapping[str, Any]) -> None:
    """Runs the command.

    Args:
        output: Takes messages.
        given: The options, by the names of their parameters.
    """
    metrics = WatchMetrics()
    page = WatchPage(output, metrics, as_json=given["as_json"])
    with _last_words(page) as last:
        request = _at_run(_request(given), page, given)
        with _served(metrics, given, page):
            pauses = WatchPauses(ending=given["once"], reads_input=given["until_eof"])
            done = run_watch(request, pauses, page.listen, page.progress)
        if done.failures:
            last["failed"] = list(done.failures)
    for error in done.failures.values():
        raise typer.Exit(error.exit_status)


def _at_run(request: WatchRequest, page: WatchPage, given: Mapping[str, Any]) -> WatchRequest:
    """Has a watch of a folder above a run take that run."""
    if given["wait_for_lock"]:
        return request
    # One that goes on for ever keeps to the folder that it was given, which may get steps.
    ends = given["once"] or given["until_eof"]
    try:
        below = run_below(request.run)
    except (AmbiguousSourceError, NotACheckpointError) as error:
        if ends or isinstance(error, NotACheckpointError):
            raise
        page.listen(WatchEvent("warning", None, {"message": f"{error} ({error.hint})"}))
        return request
    except CkptkitError:
        if is_url(request.run):  # the watch tries again
            return request
        raise
    if os.fspath(below) == os.fspath(request.run):
        return request
    text = f"no step lies in {os.fspath(request.run)}; the run {os.fspath(below)}"
    text += " was taken" if ends else " below it holds steps, and is not watched"
    page.listen(WatchEvent("warning", None, {"message": text}))
    return replace(request, run=below) if ends else request


@contextmanager
def _last_words(page: WatchPage) -> Iterator[dict[str, Any]]:
    """Has the last event tell how the watch ended, and what else is put into its facts."""
    facts: dict[str, Any] = {}
    try:
        yield facts
    except CkptkitError as error:
        facts["error"] = error.to_json()
        raise
    except Stopped as stop:
        facts["signal"] = stop.signal.name
        raise
    except Exception as error:
        bug = f"{type(error).__name__}: {error}"
        facts["error"] = {"code": "internal-error", "message": bug, "where": "", "hint": ""}
        raise
    finally:
        page.listen(WatchEvent("stopped", None, facts))


@contextmanager
def _served(metrics: WatchMetrics, given: Mapping[str, Any], page: WatchPage) -> Iterator[None]:
    """Serves the metrics, if they are asked for."""
    if given["metrics_port"] is None:
        yield
        return
    port = _number(given["metrics_port"], "--metrics-port", 0, _MOST_PORT)
    server = MetricsServer(metrics, int(port), given["metrics_host"])
    try:
        page.listen(WatchEvent("serving", None, {"url": server.url}))
        yield
    finally:
        server.close()


def _request(given: Mapping[str, Any]) -> WatchRequest:
    run = _run(given)
    check_choice("--as", given["make"], get_args(PushKind))
    check_choice("--best-mode", given["best_mode"], get_args(BestMode))
    mode = cast(BestMode, given["best_mode"])
    whole = _folder_name(given["whole_step"])
    state = None if given["state"] is None else Path(given["state"])
    retries = replace(WATCH_RETRIES, attempts=_ONCE_TRIES) if given["once"] else WATCH_RETRIES
    return WatchRequest(
        run=run,
        repo_id=given["push"],
        state=state,
        settings=WatchSettings(
            choice=PushChoice(
                every=positive_number(given["every"], option="--every", example=1000),
                best=given["best"],
                best_mode=mode,
                last_only=given["last_only"],
            ),
            making=_making(given, whole),
            poll_seconds=_interval(given["interval"], run),
            at_end=given["at_end"],
            retries=retries,
            metrics=_metrics(given),
            # Training, which starts a watch too, may end before its first step.
            needs_steps=not given["wait_for_lock"],
        ),
        branch=BranchSettings(
            private=given["private"],
            revision=given["revision"],
            include=_include(given, whole),
        ),
        tag_prefix=given["tag_prefix"],
        retention=Retention(
            keep_last=positive_number(given["keep_last"], option="--keep-last", example=3),
            keep_every=positive_number(given["keep_every"], option="--keep-every", example=1000),
            keep_best=given["keep_best"],
            best_mode=mode,
        ),
        waits_for_lock=given["wait_for_lock"],
    )


def _metrics(given: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the metrics that rules need; training, which starts a watch, looks at its own."""
    named = {"--best": given["best"], "--keep-best": given["keep_best"]}
    return {} if given["wait_for_lock"] else {k: v for k, v in named.items() if v is not None}


def _making(given: Mapping[str, Any], whole: str) -> BuildSettings:
    return BuildSettings(
        kind=cast(PushKind, given["make"]),
        request=ConsolidateRequest(
            dtype=given["dtype"],
            max_file_bytes=file_limit(given["max_shard_size"], like=None),
            names=given["names"],
            strip_prefix=name_prefixes(given["strip_prefix"]),
        ),
        adapter=AdapterRequest(adapter=given["adapter"], config=given["adapter_config"]),
        base=given["base"],
        needs_config=not given["weights_only"],
        resources=make_resources(worker_count(given["workers"]), given["memory_budget"], None),
        state_folder=whole,
        # Training starts its watch itself, without the options of names.
        advice=PUSH_OF_TRAINING if given["wait_for_lock"] else WATCH,
    )


def _folder_name(text: str | None) -> str:
    if text is not None and not _FOLDER_NAME.fullmatch(text):
        raise UsageError(
            f"{text!r} is no name of a folder",
            where="--whole-step",
            hint="pass --whole-step last-checkpoint, or checkpoint-{step}",
        )
    return text or ""


def _include(given: Mapping[str, Any], whole: str) -> tuple[str, ...]:
    include = tuple(given["include"] or ())
    if include and not whole:
        raise UsageError(
            "adds files of a step to what --whole-step pushes, and that was not passed",
            where="--include",
            hint="pass --whole-step last-checkpoint as well",
        )
    return include


def _run(given: Mapping[str, Any]) -> PathLike:
    """Returns the run, with what its storage has to be told."""
    options = parse_options(given["src_option"] or (), option="--src-option")
    name = given["src_options_from"]
    if name is not None:
        options |= _from_environment(name)
    return Place(given["run"], options)


def _from_environment(name: str) -> dict[str, Any]:
    try:
        found = json.loads(os.environ.get(name, ""))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(
            f"the environment variable {name!r} holds no JSON object", where="--src-options-from"
        )
    return found


def _interval(text: str | None, run: PathLike) -> float:
    if text is None:
        return _REMOTE_SECONDS if is_url(run) else _LOCAL_SECONDS
    return _number(text, "--interval", _LEAST_SECONDS, _MOST_SECONDS)


def _number(text: str, option: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if least <= number <= most:
        return number
    raise UsageError(
        f"{text!r} is no number from {least:g} to {most:,.0f}",
        where=option,
        hint=f"pass {option} 10" if option == "--interval" else f"pass {option} 9100",
    )
