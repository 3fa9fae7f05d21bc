"""`ckptkit watch`: a sidecar that publishes each committed step of a run."""

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
from functools import partial
from pathlib import Path
from typing import Any, get_args

import typer

from ckptkit.adapters.sources import AdapterRequest
from ckptkit.conversion.source.side_folders import SideChoice
from ckptkit.core.errors import AmbiguousSourceError, CkptkitError, NotACheckpointError, UsageError
from ckptkit.hub.watch.build import BuildSettings, PushChoice, PushKind
from ckptkit.hub.watch.events import MetricsServer, WatchEvent, WatchMetrics
from ckptkit.hub.watch.versions import VersionSettings
from ckptkit.hub.watch.watch import WATCH_RETRIES, WatchRequest, WatchSettings, run_watch
from ckptkit.hub.watch.watched_steps import BranchSettings
from ckptkit.lora.changes import MergeRequest
from ckptkit.options import ConsolidateRequest, Resources, positive_number
from ckptkit.plan.load_report import PUSH_OF_TRAINING, WATCH
from ckptkit.runs.run_paths import find_run
from ckptkit.runs.save_order import RETENTION_OPTIONS, Retention
from ckptkit.storage.places import Place, is_url, local_path, place_of
from ckptkit_cli import _options as options
from ckptkit_cli._command import Option, command, parse_values
from ckptkit_cli._options import HUB, OUTPUT, WRITTEN
from ckptkit_cli._output import Output, Stopped, find_stop
from ckptkit_cli.views.watch_page import WatchPage

_PUSHED = "Which steps are pushed"
_TIMING = "When"
_LOCAL_SECONDS, _REMOTE_SECONDS = 5.0, 30.0
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 86_400.0
_ONCE_TRIES = 2  # with --once, cron or a person runs the watch again
_MOST_PORT = 65_535
_FOLDER_NAME = re.compile(r"(?!ckptkit)[A-Za-z0-9_{][A-Za-z0-9_{}.-]*")


def _parse_number(text: str, option: str, least: float, most: float, example: int) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if least <= number <= most:
        return number
    raise UsageError(
        f"{text!r} is not a number from {least:g} to {most:,.0f}",
        where=option,
        hint=f"pass {option} {example}",
    )


def _parse_folder(text: str) -> str:
    if not _FOLDER_NAME.fullmatch(text):
        raise UsageError(
            f"{text!r} is not a name of a folder",
            where="--whole-step",
            hint="pass --whole-step last-checkpoint, or checkpoint-{step}",
        )
    return text


def _parse_variable(name: str) -> dict[str, Any]:
    """Reads the environment variable that `--src-options-from` names."""
    try:
        value = json.loads(os.environ.get(name, ""))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(
            f"the environment variable {name!r} contains no JSON object",
            where="--src-options-from",
        )
    return value


_OPTIONS = (
    options.RUN,
    Option(
        "--push",
        HUB,
        "The repository, such as org/name; it is created if it does not exist.",
        "REPO_ID",
    ),
    Option(
        "--into",
        WRITTEN,
        "Instead of a repository: a directory or URL in which each step becomes a version for"
        " engines that pull it, such as weight_v000001.",
        "DIR",
    ),
    Option(
        "--delta",
        WRITTEN,
        "With --into: make one of EVERY versions a whole model, and the others deltas to the"
        " version before.",
        "EVERY",
        parse=partial(positive_number, option="--delta", example=20),
    ),
    options.PRIVATE,
    options.REVISION,
    Option("--tag-prefix", HUB, "Beginning of tags, before the step.", "TEXT", default="step-"),
    Option(
        "--every",
        _PUSHED,
        "Push only steps divisible by N.",
        "N",
        parse=partial(positive_number, option="--every", example=1000),
    ),
    Option(
        "--best",
        _PUSHED,
        "Push a step only if its METRIC is better than that of all others.",
        "METRIC",
    ),
    Option("--last-only", _PUSHED, "Of several steps that wait, push only the newest."),
    options.ADAPTER,
    options.ADAPTER_CONFIG,
    options.BASE,
    options.CONFIG,
    options.TOKENIZER,
    options.TOKENIZER_FROM,
    *options.FILLING,
    Option(
        "--as",
        WRITTEN,
        "What to make of a step. 'auto' takes the adapter if PEFT trained one, 'merged' makes the"
        " model that `ckptkit adapter merge` makes, with --base if the step lacks the base.",
        choices=get_args(PushKind),
        default="auto",
        keyword="make",
    ),
    Option(
        "--whole-step",
        WRITTEN,
        "Push the step itself too, with the optimizer, into this folder of the repository; {step}"
        " stands for its number.",
        "FOLDER",
        parse=_parse_folder,
    ),
    Option(
        "--include",
        WRITTEN,
        "With --whole-step: push matching files of the step too that are not known as part of one."
        " Can be repeated.",
        "GLOB",
        repeated=True,
    ),
    Option(
        "--weights-only",
        WRITTEN,
        "Push weights without a config.json, if neither the step nor --base has one.",
    ),
    options.MAX_SHARD_SIZE,
    options.GENERATION_CONFIG,
    options.DTYPE,
    options.CAST_ALL,
    options.NAMES,
    options.MAP,
    options.STRIP_PREFIX,
    options.ALLOW_UNTRAINED,
    options.ALLOW_OTHER_BASE,
    options.MATCH_PEFT,
    options.QLORA_BASE,
    options.DOUBLE_QUANT,
    Option("--once", _TIMING, "Push the steps that exist, then end; for cron."),
    Option(
        "--until-eof",
        _TIMING,
        "End once standard input ends and everything is pushed. A line on it starts a look at RUN.",
    ),
    Option("--at-end", _TIMING, "Push nothing before the end of --until-eof.", hidden=True),
    Option(
        "--wait-for-lock",
        _TIMING,
        "Wait until another watch of RUN has ended, such as that of a training.",
    ),
    Option(
        "--interval",
        _TIMING,
        "Time between two looks at RUN.  [default: 5, for a URL 30]",
        "SECONDS",
        parse=partial(
            _parse_number,
            option="--interval",
            least=_LEAST_SECONDS,
            most=_MOST_SECONDS,
            example=10,
        ),
    ),
    *options.RETENTION,
    replace(
        options.BEST_MODE,
        help="Whether the smallest or the largest value is best, for --best too.",
    ),
    Option(
        "--state",
        WRITTEN,
        "Directory for journal, lock and what is built; by default in RUN.",
        "DIR",
    ),
    options.WORKERS,
    options.MEMORY_BUDGET,
    options.SRC_OPTION,
    options.DST_OPTION,
    Option(
        "--src-options-from",
        options.STORAGE,
        "The same, as a JSON object in an environment variable, which no list of processes shows.",
        "VARIABLE",
        parse=_parse_variable,
    ),
    Option(
        "--metrics-port",
        OUTPUT,
        "Serve /metrics for Prometheus at this port; 0 takes a free one.",
        "P",
        parse=partial(
            _parse_number, option="--metrics-port", least=0, most=_MOST_PORT, example=9100
        ),
    ),
    Option(
        "--metrics-host",
        OUTPUT,
        "Address to serve metrics at; 0.0.0.0 for all interfaces.",
        "ADDRESS",
        default="127.0.0.1",
    ),
    Option(
        "--json", OUTPUT, "Print one JSON document per event, on one line.", keyword="json_lines"
    ),
    options.QUIET,
)


@command(*_OPTIONS, parses=False)
def watch(output: Output, json_lines: bool, **typed: Any) -> None:
    """Publish each step of a run, on the Hub or for engines.

        ckptkit watch runs/llama --push org/llama
        ckptkit watch runs/llama --push org/llama --best eval_loss --once
        ckptkit watch runs/rl --into /shared/weights --delta 20

    Each step is published once it is committed. With --push it becomes a verified model folder or
    adapter, and one commit with one tag; with --into, a version that engines pull. A kill neither
    loses nor repeats a step. With --keep-last and the like, steps of RUN that no rule keeps are
    removed afterwards.
    """
    output.quiet = output.quiet or json_lines
    metrics = WatchMetrics()
    page = WatchPage(output, metrics, as_json=json_lines)
    with _report_end(page) as end:
        values = parse_values(_OPTIONS, typed)
        request = _find_run(_make_request(values), page, values)
        with _serve_metrics(metrics, values, page):
            pauses = WatchPauses(ending=values["once"], reads_input=values["until_eof"])
            done = run_watch(request, pauses, page.listen, page.progress)
        if done.failures:
            end["failed"] = list(done.failures)
    for error in done.failures.values():
        raise typer.Exit(error.exit_status)


def _make_request(values: Mapping[str, Any]) -> WatchRequest:
    run = Place(values["run"], values["src_option"] | (values["src_options_from"] or {}))
    state = None if values["state"] is None else Path(values["state"])
    include = tuple(values["include"])
    if include and not values["whole_step"]:
        raise UsageError(
            "adds files to --whole-step, which was not passed",
            where="--include",
            hint="pass --whole-step last-checkpoint as well",
        )
    versions = _make_versions(values)
    # Training, which starts a watch too, checks metrics and names itself, and may end before its
    # first step.
    of_training = _is_of_training(values)
    named = {"--best": values["best"], "--keep-best": values["keep_best"]}
    default_seconds = _REMOTE_SECONDS if is_url(run) else _LOCAL_SECONDS
    retries = replace(WATCH_RETRIES, attempts=_ONCE_TRIES) if values["once"] else WATCH_RETRIES
    settings = WatchSettings(
        choice=PushChoice(
            **{name: values[name] for name in ("every", "best", "best_mode", "last_only")}
        ),
        build=_make_output(values),
        poll_seconds=default_seconds if values["interval"] is None else values["interval"],
        at_end=values["at_end"],
        retries=retries,
        metrics={} if of_training else {k: v for k, v in named.items() if v is not None},
        needs_steps=not of_training,
        repeats_pushes=of_training,
    )
    return WatchRequest(
        run=run,
        repo_id=values["push"] if versions is None else os.fspath(versions.folder),
        state=state,
        settings=settings,
        branch=BranchSettings(
            private=values["private"], revision=values["revision"], include=include
        ),
        tag_prefix=values["tag_prefix"],
        retention=Retention(**{name: values[name] for name in RETENTION_OPTIONS}),
        versions=versions,
        waits_for_lock=values["wait_for_lock"],
    )


def _is_of_training(values: Mapping[str, Any]) -> bool:
    return bool(values["wait_for_lock"] and values["until_eof"])


_OF_THE_HUB = ("private", "revision", "whole_step", "adapter", "adapter_config")


def _make_versions(values: Mapping[str, Any]) -> VersionSettings | None:
    """Returns where versions are published; None if steps are pushed to the Hub."""
    if (values["push"] is None) == (values["into"] is None):
        raise UsageError(
            "exactly one of --push and --into is needed",
            where="watch",
            hint="pass --push REPO_ID for the Hub, or --into DIR for a folder that engines pull",
        )
    if values["into"] is None:
        if values["delta"] is not None:
            raise UsageError(
                "needs --into, since a commit on the Hub is a whole model",
                where="--delta",
                hint="pass --into DIR instead of --push, or leave it out",
            )
        return None
    is_merged = values["make"] == "merged"
    fitting = ("adapter", "adapter_config") if is_merged else ()
    refused = (name for name in _OF_THE_HUB if name not in fitting)
    other = next((name for name in refused if values[name] is not None), None)
    if other is None and values["make"] == "adapter":
        other = "as"
    if other is not None:
        raise UsageError(
            "cannot be combined with --into, which publishes models",
            where=f"--{other.replace('_', '-')}",
            hint="leave it out",
        )
    folder = place_of(values["into"], values["dst_option"])
    if not is_url(folder):
        folder = folder.beside(str(local_path(folder).absolute()))
    return VersionSettings(folder, values["delta"] or 1)


_OF_REQUEST = (
    *("dtype", "cast_all", "names", "map", "strip_prefix", "max_shard_size"),
    *("generation_config", "fill_from", "fill_from_base", "into_base"),
)


_OF_MERGES = ("allow_other_base", "match_peft", "qlora_base", "double_quant")
_NOT_OF_MERGES = ("config", "tokenizer", "strip_prefix", "fill_from", "fill_from_base", "into_base")
_UNSET: tuple[Any, ...] = (None, False, (), [])


def _make_output(values: Mapping[str, Any]) -> BuildSettings:
    is_merged = values["make"] == "merged"
    for name in _NOT_OF_MERGES if is_merged else _OF_MERGES:
        if values[name] not in _UNSET:
            fault = "cannot be combined with" if is_merged else "needs"
            raise UsageError(
                f"{fault} --as merged",
                where=f"--{name.replace('_', '-')}",
                hint="leave it out",
            )
    return BuildSettings(
        kind=values["make"],
        request=ConsolidateRequest.from_options({name: values[name] for name in _OF_REQUEST}),
        adapter=AdapterRequest(
            adapter=values["adapter"],
            config=values["adapter_config"],
            allow_untrained=values["allow_untrained"],
        ),
        merge=MergeRequest.from_options(values) if is_merged else MergeRequest(),
        base=values["base"],
        side=SideChoice(values["config"], values["tokenizer"], values["tokenizer_from"]),
        needs_config=not values["weights_only"],
        resources=Resources.from_options(values),
        state_folder=values["whole_step"] or "",
        advice=PUSH_OF_TRAINING if _is_of_training(values) else WATCH,
    )


def _find_run(request: WatchRequest, page: WatchPage, values: Mapping[str, Any]) -> WatchRequest:
    """Replaces a folder that contains one run by that run, if the watch ends by itself.

    A watch without an end keeps the folder that it was given, which may get steps.
    """
    if _is_of_training(values):
        return request
    ends = values["once"] or values["until_eof"]
    try:
        below = find_run(request.run)
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
    text = f"{os.fspath(request.run)} has no steps; "
    if ends:
        text += f"using the run {os.fspath(below)}"
    else:
        text += f"the run {os.fspath(below)} below it is not watched"
    page.listen(WatchEvent("warning", None, {"message": text}))
    return replace(request, run=below) if ends else request


@contextmanager
def _report_end(page: WatchPage) -> Iterator[dict[str, Any]]:
    """Reports as the last event how the watch ended, with all facts that the block adds."""
    facts: dict[str, Any] = {}
    try:
        yield facts
    except CkptkitError as error:
        facts["error"] = error.to_json()
        raise
    except (Stopped, Exception) as error:
        stop = find_stop(error)
        if stop is not None:
            facts["signal"] = stop.signal.name
        else:
            bug = f"{type(error).__name__}: {error}"
            facts["error"] = {"code": "internal-error", "message": bug, "where": "", "hint": ""}
        raise
    finally:
        page.listen(WatchEvent("stopped", None, facts))


@contextmanager
def _serve_metrics(
    metrics: WatchMetrics, values: Mapping[str, Any], page: WatchPage
) -> Iterator[None]:
    """Serves the metrics, if a port was passed."""
    if values["metrics_port"] is None:
        yield
        return
    server = MetricsServer(metrics, int(values["metrics_port"]), values["metrics_host"])
    try:
        page.listen(WatchEvent("serving", None, {"url": server.url}))
        yield
    finally:
        server.close()


_READ_BYTES = 4096


class WatchPauses:
    """Waits for time, for news on standard input, or for the end of standard input."""

    def __init__(self, *, ending: bool, reads_input: bool) -> None:
        """Starts to read standard input, if `reads_input`.

        Args:
            ending: Whether the watch ends as soon as nothing waits.
            reads_input: Whether it does so once standard input has ended.
        """
        self.ending = ending
        self._news = threading.Event()
        if reads_input:
            threading.Thread(target=self._read, name="ckptkit-input", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Waits for news, at most this long."""
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
