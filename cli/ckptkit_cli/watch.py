"""`ckptkit watch`: a sidecar that publishes each committed step of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from ckptkit.core.errors import AmbiguousSourceError, CkptkitError, NotACheckpointError, UsageError
from ckptkit.core.text import counted, size_text
from ckptkit.options import ConsolidateRequest, PushKind, Resources, parse_duration
from ckptkit.storage.locations import Place, is_url, local_path, place_of
from ckptkit_cli import _options as options
from ckptkit_cli._options import HUB, WRITTEN
from ckptkit_cli._output import Output, Stopped, escaped, find_stop, first_of, stamped
from ckptkit_cli._program import Option, command, parse_values

if TYPE_CHECKING:
    from ckptkit.engine.outcome import Event
    from ckptkit.engine.progress import ProgressBar
    from ckptkit.hub.watch.build import BuildSettings
    from ckptkit.hub.watch.commands import StepCommand
    from ckptkit.hub.watch.watch import EventName, WatchEvent, WatchRequest

_PUSHED = "Which steps are pushed"
_EACH = "What is done with each step"
_TIMING = "When"
_ONCE_TRIES = 2  # with --once, cron or a person runs the watch again
_FOLDER_NAME = re.compile(r"(?!ckptkit)[A-Za-z0-9_{][A-Za-z0-9_{}.-]*")


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
        count=20,
    ),
    Option(
        "--to-dir",
        WRITTEN,
        "Make the model folder of each step in DIR, under the name of the step; with --push, or"
        " alone. A folder stays when its step is removed from RUN.",
        "DIR",
    ),
    options.PRIVATE,
    options.REVISION,
    Option("--tag-prefix", HUB, "Beginning of tags, before the step.", "TEXT", default="step-"),
    Option(
        "--seal",
        _EACH,
        "Write the manifest of each step that another saver wrote, as `ckptkit seal` does, before"
        " all else.",
    ),
    Option(
        "--exec",
        _EACH,
        "Run CMD for each step, without a shell; {step} stands for its number, {dir} for its folder"
        " or URL. Once it has ended it is not run again, whatever its exit status is.",
        "CMD",
        keyword="command",
    ),
    Option("--jobs", _EACH, "Run CMD for so many steps at once.  [default: 1]", "N", count=2),
    Option(
        "--exec-timeout",
        _EACH,
        "Stop CMD after this time, such as 30min.",
        "TIME",
        parse=partial(parse_duration, option="--exec-timeout"),
    ),
    Option("--every", _PUSHED, "Push only steps divisible by N.", "N", count=1000),
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
        parse=options.parse_interval,
    ),
    *options.RETENTION,
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
    options.JSON_LINES,
    options.QUIET,
)


@command(*_OPTIONS, parses=False, order=15)
def watch(output: Output, json_lines: bool, **typed: Any) -> None:
    """Publish each step of a run, or run a command for it.

        ckptkit watch runs/llama --push org/llama
        ckptkit watch runs/llama --push org/llama --best eval_loss --once
        ckptkit watch runs/llama --to-dir models/llama
        ckptkit watch runs/rl --into /shared/weights --delta 20
        ckptkit watch runs/llama --seal --exec 'python evaluate.py {dir} --step {step}'

    Each step is published once it is committed. With --push it becomes a verified model folder or
    adapter, and one commit with one tag; with --to-dir, a folder that stays in a directory, where
    XFS and btrfs need no more room for it; with --into, a version that engines pull. A kill neither
    loses nor repeats a step. With --exec, a command runs for each step, beside all else. With
    --keep-last and the like, steps of RUN that no rule keeps are removed afterwards.
    """
    from ckptkit.hub.watch.watch import Pauses, run_watch

    output.quiet = output.quiet or json_lines
    page = WatchPage(output, as_json=json_lines)
    with _report_end(page) as end:
        values = parse_values(_OPTIONS, typed)
        request = _find_run(_make_request(values), page, values)
        pauses = Pauses(ending=values["once"], reads_input=values["until_eof"])
        failures = run_watch(request, pauses, page.listen, page.progress)
        if failures:
            end["failed"] = list(failures)
    for error in failures.values():
        raise SystemExit(error.exit_status)


def _make_request(values: Mapping[str, Any]) -> WatchRequest:
    from ckptkit.hub.watch.build import PushChoice
    from ckptkit.hub.watch.watch import WATCH_RETRIES, WatchRequest
    from ckptkit.hub.watch.watched_steps import default_poll_seconds
    from ckptkit.runs.retention import RETENTION_OPTIONS, Retention

    run = Place(values["run"], values["src_option"] | (values["src_options_from"] or {}))
    state = None if values["state"] is None else Path(values["state"])
    include = tuple(values["include"])
    if include and not values["whole_step"]:
        raise UsageError(
            "adds files to --whole-step, which was not passed",
            where="--include",
            hint="pass --whole-step last-checkpoint as well",
        )
    versions, to_dir = _place_of_versions(values), _folder_of_steps(values)
    place = versions if to_dir is None else to_dir
    # Training, which starts a watch too, checks metrics and names itself, and may end before its
    # first step.
    of_training = _is_of_training(values)
    named = {"--best": values["best"], "--keep-best": values["keep_best"]}
    retries = replace(WATCH_RETRIES, attempts=_ONCE_TRIES) if values["once"] else WATCH_RETRIES
    return WatchRequest(
        run=run,
        repo_id=(values["push"] or "") if place is None or values["push"] else os.fspath(place),
        state=state,
        choice=PushChoice(
            **{name: values[name] for name in ("every", "best", "best_mode", "last_only")}
        ),
        build=_make_output(values),
        private=values["private"],
        revision=values["revision"],
        include=include,
        tag_prefix=values["tag_prefix"],
        versions=versions,
        to_dir=to_dir,
        seal=values["seal"],
        command=_parse_command(values),
        whole_every=values["delta"] or 1,
        retention=Retention(**{name: values[name] for name in RETENTION_OPTIONS}),
        poll_seconds=values["interval"] or default_poll_seconds(run),
        retries=retries,
        at_end=values["at_end"],
        metrics={} if of_training else {k: v for k, v in named.items() if v is not None},
        needs_steps=not of_training,
        repeats_pushes=of_training,
        waits_for_lock=values["wait_for_lock"],
    )


def _parse_command(values: Mapping[str, Any]) -> StepCommand | None:
    from ckptkit.hub.watch.commands import StepCommand

    if values["command"] is None:
        for name in ("jobs", "exec_timeout"):
            if values[name] is not None:
                raise _misplaced(name, "needs --exec")
        return None
    return StepCommand.parse(
        values["command"], jobs=values["jobs"] or 1, timeout_seconds=values["exec_timeout"]
    )


def _misplaced(option: str, fault: str) -> UsageError:
    return UsageError(fault, where=f"--{option.replace('_', '-')}", hint="leave it out")


def _is_of_training(values: Mapping[str, Any]) -> bool:
    return bool(values["wait_for_lock"] and values["until_eof"])


_OF_COMMITS = ("private", "revision", "whole_step")
_OF_THE_HUB = (*_OF_COMMITS, "adapter", "adapter_config")


def _place_of_versions(values: Mapping[str, Any]) -> Place | None:
    """Returns where versions are published; None if steps are pushed to the Hub."""
    given = [name for name in ("push", "to_dir", "into") if values[name] is not None]
    if not given and (values["seal"] or values["command"] is not None):
        other = next((name for name in (*_OF_COMMITS, "delta") if values[name] is not None), None)
        if other is not None:
            raise _misplaced(other, f"needs {'--into' if other == 'delta' else '--push'}")
        return None
    if not given or ("into" in given and len(given) > 1):
        raise UsageError(
            "one of --push, --to-dir, --into, --seal and --exec is needed"
            if not given
            else f"--into cannot be combined with --{given[0].replace('_', '-')}",
            where="watch",
            hint="pass --push REPO_ID for the Hub, --to-dir DIR for a folder of each step, or"
            " --into DIR for versions that engines pull",
        )
    if values["into"] is None:
        if values["delta"] is not None:
            raise UsageError(
                "needs --into, since all others get whole models",
                where="--delta",
                hint="pass --into DIR alone, or leave it out",
            )
        return None
    is_merged = values["make"] == "merged"
    fitting = ("adapter", "adapter_config") if is_merged else ()
    refused = (name for name in _OF_THE_HUB if name not in fitting)
    other = next((name for name in refused if values[name] is not None), None)
    if other is None and values["make"] == "adapter":
        other = "as"
    if other is not None:
        raise _misplaced(other, "cannot be combined with --into, which publishes models")
    folder = place_of(values["into"], values["dst_option"])
    return folder if is_url(folder) else folder.beside(str(local_path(folder).absolute()))


def _folder_of_steps(values: Mapping[str, Any]) -> Path | None:
    """Returns the directory in which each step gets its folder; None without one."""
    if values["to_dir"] is None:
        return None
    if is_url(values["to_dir"]):
        raise UsageError(
            "is a URL, where a directory was expected",
            where=f"--to-dir {values['to_dir']}",
            hint="pass --into URL instead, which publishes models in a store",
        )
    other = next((name for name in _OF_COMMITS if values[name] is not None), None)
    if other is not None and values["push"] is None:
        raise _misplaced(other, "needs --push")
    return local_path(values["to_dir"]).absolute()


_OF_REQUEST = (
    *("dtype", "cast_all", "names", "map", "strip_prefix", "max_shard_size"),
    *("generation_config", "fill_from", "fill_from_base", "into_base"),
)


_OF_MERGES = ("allow_other_base", "match_peft", "qlora_base", "double_quant")
_NOT_OF_MERGES = ("config", "tokenizer", "strip_prefix", "fill_from", "fill_from_base", "into_base")
_UNSET: tuple[Any, ...] = (None, False, (), [])


def _make_output(values: Mapping[str, Any]) -> BuildSettings:
    from ckptkit.adapters.sources import AdapterRequest
    from ckptkit.conversion.source.side_folders import SideChoice
    from ckptkit.hub.watch.build import BuildSettings
    from ckptkit.lora.changes import MergeRequest
    from ckptkit.plan.load_report import PUSH_OF_TRAINING, WATCH

    is_merged = values["make"] == "merged"
    for name in _NOT_OF_MERGES if is_merged else _OF_MERGES:
        if values[name] not in _UNSET:
            fault = "cannot be combined with" if is_merged else "needs"
            raise _misplaced(name, f"{fault} --as merged")
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
    from ckptkit.hub.watch.watch import WatchEvent
    from ckptkit.runs.find_run import find_run

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
    return dataclasses.replace(request, run=below) if ends else request


@contextmanager
def _report_end(page: WatchPage) -> Iterator[dict[str, Any]]:
    """Reports as the last event how the watch ended, with all facts that the block adds."""
    from ckptkit.hub.watch.watch import WatchEvent

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


_LISTED_STEPS = 20
_BAD = {"failed": "red", "retrying": "yellow", "warning": "yellow", "passed": "yellow"}
_DOING = {
    "idle": "looking for new steps",
    "building": "building",
    "pushing": "pushing",
    "retrying": "waiting for the next try",
}


class WatchPage:
    """Writes the events of a watch, which come from several threads.

    Events go to stdout, as text or as JSON lines. What the watch does now is shown on stderr, or is
    an event too.
    """

    def __init__(self, output: Output, *, as_json: bool) -> None:
        self._output = output
        self._as_json = as_json
        self._shows = output.reports_progress or as_json
        self._lock = threading.RLock()
        self._bar: ProgressBar | None = None
        self._phase = "idle"
        self._step: int | None = None  # the one in progress
        self._waiting = 0  # steps that wait for their push, with the one in progress
        self._pushed = self._failed = 0
        self._last_step: int | None = None  # that was pushed

    def listen(self, event: WatchEvent) -> None:
        """Counts and writes an event, and shows what follows it."""
        with self._lock:
            self._count(event)
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.close()
            self._write(event)
            if self._shows and event.name != "stopped":
                self._bar = self._open_bar()

    def progress(self, event: Event) -> None:
        """Shows bytes that were written or uploaded."""
        bar = self._bar
        if bar is not None:
            bar.listen(event)

    def _count(self, event: WatchEvent) -> None:
        self._waiting = event.facts.get("waiting", self._waiting)
        if event.name in {"building", "pushing"}:
            self._phase, self._step = event.name, event.step
        elif event.name == "retrying":
            self._phase = event.name
        elif event.name in {"pushed", "failed", "passed", "stopped"}:
            self._phase, self._step = "idle", None
            self._waiting = max(self._waiting - (event.name != "stopped"), 0)
        if event.name == "pushed":
            self._pushed, self._last_step = self._pushed + 1, event.step
        self._failed += event.name == "failed"

    def _write(self, event: WatchEvent) -> None:
        if self._as_json:
            self._output.record(stamped(event.name, event.to_json()))
            return
        at = self._output.styled(time.strftime("%H:%M:%SZ", time.gmtime()), "dim")
        about = "" if event.step is None else f"step {event.step}: "
        text = escaped(f"{about}{_TEXTS[event.name](event.facts)}")
        style = _BAD.get(event.name)
        shown = self._output.styled(text, style) if style else text  # type: ignore[arg-type]
        if event.name == "waiting" and "message" in event.facts:
            self._output.warn(text)
            return
        self._output.lines([f"{at} {shown}"])

    def _record_progress(self, step: int | None, line: str) -> None:
        from ckptkit.hub.watch.watch import WatchEvent

        self._write(WatchEvent("progress", step, {"message": line}))

    def _open_bar(self) -> ProgressBar | None:
        from ckptkit.engine.progress import ProgressBar, Stage, is_terminal

        text = _DOING[self._phase]
        waiting = max(self._waiting - (self._step is not None), 0)
        waits = f"{counted(waiting, 'step')} waiting" if waiting else ""
        if self._step is not None:
            text += f" step {self._step}" + (f", {waits}" if waits else "")
        elif self._as_json or not is_terminal():  # a log says nothing about a watch that only looks
            return None
        else:
            last = "" if self._last_step is None else f", the last was step {self._last_step}"
            failed = f"{self._failed:,} failed" if self._failed else ""
            parts = [text, f"{self._pushed:,} pushed{last}", failed, waits]
            text = "; ".join(filter(None, parts))
        tell = partial(self._record_progress, self._step) if self._as_json else None
        bar = ProgressBar(text, tell)
        bar.begin(Stage(text, None))
        return bar


def _pushed(facts: Mapping[str, Any]) -> str:
    if facts["resumed"]:
        return f"was pushed before, as {facts['tag']} of {facts['repo_id']}: {facts['url']}"
    size = size_text(facts["uploaded_bytes"])
    return f"pushed as {facts['tag']}, {size} in {facts['seconds']:.1f} s: {facts['url']}"


def _written(facts: Mapping[str, Any]) -> str:
    if facts["resumed"]:
        return f"its folder is there: {facts['path']}"
    size = size_text(facts["written_bytes"])
    return f"written, {size} in {facts['seconds']:.1f} s: {facts['path']}"


def _sealed(facts: Mapping[str, Any]) -> str:
    return f"sealed, {size_text(facts['read_bytes'])} in {facts['seconds']:.1f} s"


def _executed(facts: Mapping[str, Any]) -> str:
    status = facts["status"]
    ended = "done" if not status else f"failed with exit status {status}, see {facts['log']}"
    return f"{facts['command']}: {ended}, in {facts['seconds']:.1f} s"


def _stopped(facts: Mapping[str, Any]) -> str:
    if "error" in facts:
        return "stopped by an error"  # the command reports it, as any other does
    if "signal" in facts:
        return f"stopped by {facts['signal']}"
    if "failed" in facts:
        steps = facts["failed"]
        listed = ", ".join(first_of([str(step) for step in steps], _LISTED_STEPS))
        return f"nothing left to do; {counted(len(steps), 'step')} failed: {listed}"
    return "nothing left to do"


def _error(facts: Mapping[str, Any]) -> str:
    error = facts["error"]
    where = f"{error['where']}: " if error["where"] else ""
    hint = f" ({error['hint']})" if error["hint"] else ""
    return f"{where}{error['message']}{hint}"


_TEXTS: dict[EventName, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda facts: (
        f"watching {facts['run']}" + (f" for {facts['repo_id']}" if facts["repo_id"] else "")
    ),
    "waiting": lambda facts: f"waiting: {_error(facts) if 'error' in facts else facts['message']}",
    "seen": lambda _: "waits to be pushed",
    "building": lambda _: "building",
    "sealed": _sealed,
    "executing": lambda facts: f"running {facts['command']}; its output: {facts['log']}",
    "executed": _executed,
    "written": _written,
    "pushing": lambda facts: f"pushing to {facts['repo_id']}",
    "progress": lambda facts: str(facts["message"]),
    "pushed": _pushed,
    "passed": lambda facts: f"is not pushed: {facts['reason']}",
    "failed": lambda facts: f"cannot be {facts['what']}: {_error(facts)}",
    "retrying": lambda facts: f"{_error(facts)}; retrying in {facts['seconds']:g} s",
    "pruned": lambda facts: f"removed from the run: {', '.join(map(str, facts['steps']))}",
    "note": lambda facts: f"note: {facts['message']}",
    "warning": lambda facts: f"warning: {facts['message']}",
    "stopped": _stopped,
}
