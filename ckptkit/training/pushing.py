"""Rank 0's end of the process that pushes steps to the Hub: `ckptkit watch` on its own.

A line on its standard input announces a commit, and the end of its input the end of training. It
reports each step on its standard output, in lines of JSON. What it does not finish, because it is
killed or has no time, the next one does.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, get_args

from ckptkit.core.errors import CkptkitError, HubError, UsageError, error_from_json
from ckptkit.core.text import a_kind
from ckptkit.core.threads import weak_callback
from ckptkit.runs.marks import is_step_folder
from ckptkit.runs.push_journal import WATCH_FOLDER
from ckptkit.runs.save_order import Retention
from ckptkit.storage.places import Place
from ckptkit.training.environment import own_environment
from ckptkit.training.handle import Push, PushReport, SaveHandle, SaveReport
from ckptkit.training.run_folders import TrainingRun

logger = logging.getLogger(__name__)

HubStrategy = Literal["every_save", "checkpoint", "all_checkpoints", "end"]
HUB_OPTIONS = (
    "push_to_hub",
    "hub_strategy",
    "hub_private_repo",
    "hub_revision",
    "hub_include",
    "hub_token",
    "hub_timeout_seconds",
)
_WHOLE_STEPS: dict[HubStrategy, str] = {
    "checkpoint": "last-checkpoint",
    "all_checkpoints": "checkpoint-{step}",
}


@dataclass(frozen=True, slots=True)
class HubSettings:
    """The options of the Hub.

    Attributes:
        repo_id: The repository.
        strategy: As the Trainer's `hub_strategy`.
        private: Whether a new repository is private; None for the default, private.
        revision: The branch; None for `main`.
        token: Of the Hub; None for that of the environment, or of the last login.
        include: Patterns of files that are pushed with the step itself.
        timeout_seconds: How long `close` waits for pushes.
    """

    repo_id: str
    strategy: HubStrategy = "every_save"
    private: bool | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    include: tuple[str, ...] = ()
    timeout_seconds: float = 3600.0

    @property
    def at_end(self) -> bool:
        """Whether only the last step is pushed, after training."""
        return self.strategy == "end"

    @property
    def arguments(self) -> list[str]:
        """The arguments of `ckptkit watch`, without the token."""
        words = ["--push", self.repo_id]
        visibility = {True: ["--private"], False: ["--public"], None: []}
        words += visibility[self.private]
        words += ["--revision", self.revision] if self.revision else []
        words += ["--at-end", "--last-only"] if self.at_end else []
        folder = _WHOLE_STEPS.get(self.strategy)
        words += [f"--include={pattern}" for pattern in self.include]
        return [*words, "--whole-step", folder] if folder else words

    def shared(self) -> dict[str, Any]:
        """Returns the options that must be equal on all ranks."""
        return {
            "push_to_hub": self.repo_id,
            "hub_strategy": self.strategy,
            "hub_private_repo": self.private,
            "hub_revision": self.revision,
            "hub_include": list(self.include),
        }


def check_hub(given: dict[str, Any]) -> HubSettings | None:
    """Takes the options of the Hub out of those of a Checkpointer.

    Returns:
        The settings, None if nothing is pushed.
    """
    options = {name: given.pop(name) for name in HUB_OPTIONS if given.get(name) is not None}
    for name in HUB_OPTIONS:
        given.pop(name, None)
    repo_id = options.pop("push_to_hub", None)
    if repo_id is None:
        if options:
            raise UsageError(
                "requires push_to_hub",
                where=next(iter(options)),
                hint='pass push_to_hub="org/name" as well',
            )
        return None
    _check_texts(repo_id, options)
    seconds = options.get("hub_timeout_seconds", HubSettings("").timeout_seconds)
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < float("inf"):
        raise UsageError(
            f"expected a number of seconds above 0, got {seconds!r}", where="hub_timeout_seconds"
        )
    strategy = options.get("hub_strategy", "every_save")
    if strategy not in get_args(HubStrategy):
        choices = ", ".join(get_args(HubStrategy))
        raise UsageError(f"{strategy!r} is not among {choices}", where="hub_strategy")
    return HubSettings(
        repo_id=repo_id,
        strategy=strategy,
        private=options.get("hub_private_repo"),
        revision=options.get("hub_revision"),
        include=_include(options.get("hub_include", ()), strategy),
        token=options.get("hub_token"),
        timeout_seconds=float(seconds),
    )


def _check_texts(repo_id: object, options: Mapping[str, Any]) -> None:
    if not isinstance(repo_id, str) or not repo_id or repo_id.startswith("-"):
        raise UsageError(
            f"expected the id of a repository, got {repo_id!r:.100}",
            where="push_to_hub",
            hint='pass push_to_hub="org/name"',
        )
    texts = ("hub_strategy", "hub_revision", "hub_token")
    for name, kind in (("hub_private_repo", bool), *((name, str) for name in texts)):
        if name in options and not isinstance(options[name], kind):
            raise UsageError(f"expected a {kind.__name__}, got {a_kind(options[name])}", where=name)


def _include(value: object, strategy: HubStrategy) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(
        isinstance(pattern, str) and pattern for pattern in patterns
    ):
        raise UsageError(
            f"expected patterns of file names, got {value!r:.100}", where="hub_include"
        )
    if patterns and strategy not in _WHOLE_STEPS:
        raise UsageError(
            f"adds files to the step itself, which hub_strategy={strategy!r} does not push",
            where="hub_include",
            hint=f"pass hub_strategy as one of {', '.join(_WHOLE_STEPS)}",
        )
    return tuple(patterns)


_OPTIONS_VARIABLE = "CKPTKIT_STORAGE_OPTIONS"
_TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105  the name of a variable
_WORKERS = "2"
_LEAVE_SECONDS = 10.0
_LISTED = 20
_LOG_NAME = "log"
_MOST_RESTARTS = 3  # of a process that dies without an error message


class Pushing:
    """The pushes of a run, by a process that runs as long as the run is open."""

    def __init__(self, run: TrainingRun[Any], settings: HubSettings, retention: Retention) -> None:
        """Starts the process.

        Args:
            run: The run.
            settings: The options of the Hub.
            retention: Which steps stay; the process removes those that waited for their push.
        """
        self._place: Path | Place = run.place
        self._state = run.path / WATCH_FOLDER
        self._settings = settings
        self._retention = retention
        self._lock = threading.Lock()
        self._pushes: dict[int, list[Push]] = {}  # expected, by step
        self._committed: dict[int, Path | Place] = {}  # waiting, with their directories
        self._ended: list[Push] = []  # with an error that the caller may not know
        self._stray: list[CkptkitError] = []  # errors of pushes that were not expected
        self._stopped_by: CkptkitError | None = None  # and nothing was pushed since
        self._restarts = _MOST_RESTARTS
        self._starting = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._input: socket.socket | None = None
        self._reader: threading.Thread | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=weak_callback(self.leave))
        self._start()

    @property
    def outstanding(self) -> frozenset[int]:
        """The steps that are committed and not pushed yet, which must not be retired."""
        with self._lock:
            if self._settings.at_end:
                return frozenset([max(self._committed)]) if self._committed else frozenset()
            return frozenset(self._committed)

    def follow(self, handle: SaveHandle, name: str) -> None:
        """Gives the handle of a save its push.

        Args:
            handle: Of the save.
            name: Of its directory; one with a name of its own is not pushed.
        """
        if self._settings.at_end or not is_step_folder(name):
            return
        push = Push(handle.step)
        handle.follow(push)
        with self._lock:
            self._pushes.setdefault(handle.step, []).append(push)

    def listen(self, report: SaveReport) -> None:
        """Records a committed step, and has the process look for it."""
        if not is_step_folder(os.path.basename(os.fspath(report.path))):  # noqa: PTH119  a URL
            return
        with self._lock:
            if not self._settings.at_end and report.step not in self._pushes:
                return  # it was pushed already
            self._committed[report.step] = report.path
        try:
            self._start()
        except HubError as error:
            self._fail_all(error)
            return
        if self._input is not None:
            with suppress(OSError):  # it has ended, which the reader handles
                self._input.send(b"\n", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Waits until everything is pushed, for a bounded time."""
        with self._starting:
            process, self._process = self._process, None
            self._restarts = 0
        if process is not None:
            if self._input is not None:
                with suppress(OSError):
                    # Otherwise a forked process, which has a copy, would keep the connection open.
                    self._input.shutdown(socket.SHUT_RDWR)
                self._input.close()
                self._input = None
            self._wait(process)
            if self._reader is not None:
                self._reader.join(_LEAVE_SECONDS)
        unheard = [push.unheard_error for push in self._ended]
        problems = (*unheard, *self._stray, self._stopped_by)
        failure = next((error for error in problems if error is not None), None)
        for push in self._ended:
            push.heard()
        self._stray.clear()
        self._stopped_by = None
        if failure is not None:
            raise failure

    def leave(self) -> None:
        """In a forked child: closes its copies of descriptors."""
        if self._input is not None:
            self._input.close()
        if self._process is not None:
            self._process.returncode = 0  # only the parent can wait for it
        self._process = self._input = None

    def _start(self) -> None:
        """Starts the process if none runs."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._launch()

    def _launch(self) -> None:
        if self._input is not None:
            self._input.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._state.mkdir(parents=True, exist_ok=True)
                with (self._state / _LOG_NAME).open("ab") as log:
                    process = subprocess.Popen(  # noqa: S603  our own program
                        self._command(),
                        env=self._environment(),
                        stdin=theirs.fileno(),
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        start_new_session=True,  # so that signals to the job do not reach it
                    )
            except OSError as error:
                ours.close()
                raise HubError(
                    f"the process that pushes could not be started: {error.strerror or error}",
                    where=self._settings.repo_id,
                ) from error
        self._process, self._input = process, ours
        assert process.stdout is not None  # noqa: S101  a pipe was asked for
        self._reader = threading.Thread(
            target=self._read, args=(process, process.stdout), name="ckptkit-pushes", daemon=True
        )
        self._reader.start()

    def _command(self) -> list[str]:
        # -P: no file of the working directory replaces a module.
        command = [sys.executable, "-P", "-m", "ckptkit_cli", "watch", os.fspath(self._place)]
        command += [*self._settings.arguments, "--state", str(self._state), "--workers", _WORKERS]
        rules = self._retention
        options = (
            ("--keep-last", rules.keep_last),
            ("--keep-every", rules.keep_every),
            ("--keep-best", rules.keep_best),
            ("--best-mode", rules.best_mode if rules.keep_best else None),
        )
        command += [word for name, value in options if value for word in (name, str(value))]
        command += ["--until-eof", "--wait-for-lock", "--weights-only", "--json"]
        has_options = isinstance(self._place, Place) and self._place.options
        return [*command, "--src-options-from", _OPTIONS_VARIABLE] if has_options else command

    def _environment(self) -> dict[str, str]:
        """Returns the environment, with secrets that must not be arguments."""
        secret = {}
        if self._settings.token is not None:
            secret[_TOKEN_VARIABLE] = self._settings.token
        if isinstance(self._place, Place) and self._place.options:
            secret[_OPTIONS_VARIABLE] = json.dumps(dict(self._place.options))
        return own_environment() | secret

    def _wait(self, process: subprocess.Popen[str]) -> None:
        seconds = self._settings.timeout_seconds
        if self.outstanding:
            logger.info("waiting for pushes to %s", self._settings.repo_id)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            state = [] if isinstance(self._place, Path) else ["--state", str(self._state)]
            command = ["ckptkit", "watch", os.fspath(self._place)]
            again = shlex.join([*command, "--push", self._settings.repo_id, *state, "--once"])
            error = HubError(
                f"not everything was pushed within {seconds:g} s",
                where=self._settings.repo_id,
                hint=f"`{again}` pushes the rest",
            )
            self._stopped_by = error
            self._fail_all(error)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_SECONDS)
            process.kill()
            process.wait()

    def _read(self, process: subprocess.Popen[str], stream: IO[str]) -> None:
        """Reads the events of the process until it ends."""
        last: CkptkitError | None = None
        with stream:
            for line in stream:
                try:
                    last = self._handle(json.loads(line)) or last
                except (ValueError, LookupError, TypeError):
                    logger.warning("the process that pushes printed %.200r", line)
        status = process.wait()
        if last is None and status != 0 and self._restart(status):
            return
        if last is None and status != 0:
            log = self._state / _LOG_NAME
            last = HubError(
                f"the process that pushes ended with status {status}",
                where=self._settings.repo_id,
                hint=f"see {log}; the next save starts it again",
            )
        if status == 0:
            last = last or self._unpushed_error()
        if last is not None:
            self._stopped_by = self._stopped_by or last
            self._fail_all(last)

    def _unpushed_error(self) -> HubError | None:
        """Returns an error for steps that the process had no reason to push."""
        with self._lock:
            steps = ", ".join(str(step) for step in sorted(self._committed)[:_LISTED])
        if not steps:
            return None
        return HubError(
            f"not pushed: step {steps}, since a step that was saved later was pushed already",
            where=self._settings.repo_id,
            hint="use a new directory and a new repository for a run that is started over",
        )

    def _restart(self, status: int) -> bool:
        """Restarts the process after it died; it continues where the last one was killed."""
        with self._starting:
            if self._restarts == 0:
                return False
            self._restarts -= 1
            logger.warning("the process that pushes ended with status %d; starting again", status)
            try:
                self._launch()
            except HubError:
                return False
        return True

    def _handle(self, event: Mapping[str, Any]) -> CkptkitError | None:
        """Handles an event; returns the error that ended the process, if it has one."""
        step = event.get("step")
        match event["event"]:
            case "pushed":
                self._ended = [push for push in self._ended if push.step != step]
                self._stopped_by = None
                self._end(int(event["step"]), partial(_succeed, event))
                logger.info("step %s is at %s", step, event["url"])
            case "failed":
                self._fail(int(event["step"]), error_from_json(event["error"]))
            case "passed":
                reason = f"step {step} was not pushed: {event['reason']}"
                self._fail(int(event["step"]), HubError(reason, where=self._settings.repo_id))
            case "retrying":
                error = error_from_json(event["error"])
                logger.warning("%s; trying again in %g s", error, event["seconds"])
            case "progress":
                logger.info("%s", event["message"])
            case "warning":
                logger.info("the process that pushes: %s", event["message"])
            case "stopped" if "error" in event:
                return error_from_json(event["error"])
            case _:
                pass
        return None

    def _end(self, step: int, end: Callable[[Push, Path | Place | None], None]) -> bool:
        """Ends the pushes of a step; returns whether one was expected."""
        with self._lock:
            place = self._committed.pop(step, None)
            if self._settings.at_end and place is not None:
                self._committed.clear()  # of all steps, only the last one was to be pushed
            pushes = self._pushes.pop(step, [])
        for push in pushes:
            end(push, place)
        self._ended += [push for push in pushes if push.unheard_error is not None]
        return bool(pushes)

    def _fail(self, step: int, error: CkptkitError) -> None:
        logger.error("%s", error)
        if not self._end(step, lambda push, _: push.fail(error)):
            self._stray.append(error)

    def _fail_all(self, error: CkptkitError) -> None:
        with self._lock:
            steps = sorted(self._committed)
        for step in steps:
            self._fail(step, error)
        if not steps:
            logger.error("%s", error)


def _succeed(event: Mapping[str, Any], push: Push, place: Path | Place | None) -> None:
    report = PushReport(
        step=push.step,
        path=place or Path(),
        repo_id=event["repo_id"],
        commit=event["commit"],
        tag=event["tag"],
        url=event["url"],
    )
    push.succeed(report)
