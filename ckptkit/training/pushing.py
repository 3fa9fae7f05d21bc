"""Rank 0's end of the process that pushes steps to the Hub: `ckptkit watch` on its own.

A line on its standard input announces a commit, and the end of its input the end of training. It
reports each step on its standard output, in lines of JSON. Training never waits for it: it has a
session of its own, and outlives the program. What it does not finish, because it is killed or the
Hub stays away, the next one does.

The other ranks read from the store of the ranks what rank 0 has heard. What failed and was not
asked for gives rank 0's program an exit status of its own.
"""

from __future__ import annotations

import atexit
import dataclasses
import dis
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Literal, cast, get_args

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.display import plain_fields
from ckptkit.core.errors import CkptkitError, HubError, UsageError, error_from_json
from ckptkit.core.text import a_kind, join_first
from ckptkit.core.threads import weak_callback
from ckptkit.runs.marks import is_step_folder
from ckptkit.runs.push_journal import WATCH_FOLDER, WatchStatus, read_status, write_status
from ckptkit.runs.retention import Retention
from ckptkit.storage.places import Place
from ckptkit.training.agree.key_values import KeyValueStore
from ckptkit.training.environment import own_environment
from ckptkit.training.handle import Push, PushReport, SaveHandle, SaveReport
from ckptkit.training.run_folders import TrainingRun

if TYPE_CHECKING:
    from ckptkit.training.settings import Options

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


@dataclasses.dataclass(frozen=True, slots=True)
class HubSettings:
    repo_id: str
    strategy: HubStrategy = "every_save"  # as the Trainer's `hub_strategy`
    # whether a new repository is private; None for the default, private
    private: bool | None = None
    revision: str | None = None  # the branch; None for `main`
    # of the Hub; None for that of the environment, or of the last login
    token: str | None = dataclasses.field(default=None, repr=False)
    include: tuple[str, ...] = ()  # patterns of files that are pushed with the step itself
    timeout_seconds: float = 0.0  # how long the end of the program waits for pushes

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
        return {
            "push_to_hub": self.repo_id,
            "hub_strategy": self.strategy,
            "hub_private_repo": self.private,
            "hub_revision": self.revision,
            "hub_include": list(self.include),
        }


def without_hub(options: Options) -> Options:
    kept = {name: value for name, value in options.items() if name not in HUB_OPTIONS}
    return cast("Options", kept)


def check_hub(given: dict[str, Any]) -> HubSettings | None:
    """Takes the options of the Hub out of those of a Checkpointer.

    Returns None if nothing is pushed.
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
    if not is_number or not 0 <= seconds < float("inf"):
        raise UsageError(
            f"expected a number of seconds, got {seconds!r}", where="hub_timeout_seconds"
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
_NEAR_END_SECONDS = 2.0
_LISTED = 20
_MOST_TOLD = 1_000
_LOG_NAME = "log"
_MOST_RESTARTS = 3  # of a process that dies without an error message
_KEY = "pushes"  # in the store of the ranks
_COMES_FURTHER = frozenset({"building", "pushing", "pushed", "retrying"})


class PushState(Struct, frozen=True):
    """What is known of the pushes of a run, as rank 0 tells the other ranks."""

    last: int | None  # the last committed step
    waiting: Sequence[int]  # steps that wait for their push, or are being pushed
    # what failed for good: an error, and the steps that have it; none if no step waited
    failed: Sequence[tuple[str, Sequence[int]]]
    again: str  # the command that pushes the rest

    def log(self, repo_id: str) -> None:
        for text, steps in self.failed:
            what = f"{_listed(steps)} not pushed to {repo_id}" if steps else repo_id
            logger.error(
                "%s: %s; once that is mended, `%s` pushes the rest", what, text, self.again
            )
        if self.waiting:
            logger.warning(
                "%s not pushed to %s yet: a process goes on with that after training. What it does"
                " not finish, the next start of the run pushes, or `%s`",
                _listed(self.waiting),
                repo_id,
                self.again,
            )


def _listed(steps: Sequence[int]) -> str:
    names = join_first(map(str, sorted(steps)[-_LISTED:]), len(steps), _LISTED)
    return f"{'step' if len(steps) == 1 else 'steps'} {names}"


def _command_for_rest(settings: HubSettings, place: Path | Place, state: Path) -> str:
    """Returns the command that pushes what the process did not, whether that still runs or not."""
    command = ["ckptkit", "watch", os.fspath(place), *settings.arguments]
    command += [] if isinstance(place, Path) else ["--state", str(state)]
    if isinstance(place, Place) and place.options:
        command += ["--src-options-from", _OPTIONS_VARIABLE]
    return shlex.join([*command, "--weights-only", "--once", "--wait-for-lock"])


class FollowedPushes:
    """The pushes of a run from the view of the ranks other than 0."""

    def __init__(self, run: TrainingRun[Any], settings: HubSettings, store: KeyValueStore) -> None:
        self._settings = settings
        self._store = store
        self._last: int | None = None
        self._again = _command_for_rest(settings, run.place, run.path / WATCH_FOLDER)

    def listen(self, report: SaveReport) -> None:
        if is_step_folder(os.path.basename(os.fspath(report.path))):  # noqa: PTH119  a URL
            self._last = report.step

    def close(self) -> None:
        """Logs what rank 0 has heard so far, without waiting for it."""
        told = PushState(None, (), (), self._again)
        with suppress(CkptkitError):
            told = PushState(**json.loads(self._store.get(_KEY) or json.dumps(plain_fields(told))))
        if self._last is not None and told.last != self._last:
            others = () if self._settings.at_end else told.waiting
            told = replace(told, waiting=[*{*others, self._last}])
        told.log(self._settings.repo_id)


_STATUS = HubError.exit_status
_END = "_ckptkit_program_end"


class ProgramEnd:
    """Waits for pushes at the end of the program, and gives it an exit status if one has failed.

    It is kept by the module `sys`, which the interpreter clears last: after all handlers of
    `atexit`, and after the objects of all other modules.

    It takes the place of the status 0 alone. The program ended with that if its outermost frame has
    returned, or by a `_WellEnded`. If that frame ended otherwise, it was by an error, or by a
    `SystemExit` that was raised without `sys.exit`: the interpreter drops it before any handler
    runs, so its status is not known here, and stays.
    """

    def __init__(self) -> None:
        # whether a push has failed that no `Pushing` knows
        self.has_failed = self.has_ended_well = False
        # with which the program ends for its pushes, known once `atexit` has run; 0 for its own one
        self.status = 0
        self._pushings: list[Pushing] = []
        self._pid = os.getpid()
        main = threading.main_thread().ident
        self._program = _outermost(sys._current_frames().get(main or 0))  # noqa: SLF001
        self._streams: tuple[IO[str], ...] = ()
        self._leave = os._exit
        sys.exit = _telling(sys.exit)
        setattr(Quitter, "__call__", _telling(Quitter.__call__))  # noqa: B010  of `exit` and `quit`
        atexit.register(self._wait)

    def add(self, pushing: Pushing) -> None:
        self._pushings = [*(one for one in self._pushings if not one.is_settled), pushing]

    def _wait(self) -> None:
        program, self._program = self._program, None  # or its objects would outlive their module
        if os.getpid() != self._pid:
            return
        unheard = [pushing.finish() for pushing in self._pushings]
        ends_well = self.has_ended_well or _has_returned(program)
        if (self.has_failed or any(unheard)) and ends_well:
            logger.error("the program ends with status %d, since pushes failed", _STATUS)
            self.status = _STATUS
            self._streams = sys.stdout, sys.stderr

    def __del__(self) -> None:
        # The names of this module are gone by now.
        if self.status:
            for stream in self._streams:
                try:  # noqa: SIM105  `suppress` is gone
                    stream.flush()
                except Exception:  # noqa: BLE001, S110  as at the end of any program
                    pass
            self._leave(self.status)


class _WellEnded(SystemExit):
    """A `SystemExit` of status 0 that knows if the program ends by it, and nothing catches it."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "code" and _outermost(here := currentframe()) is here:  # the interpreter asks
            program_end().has_ended_well = not value
        return value


def _telling(leave: Callable[..., object]) -> Callable[..., Any]:
    """Returns `sys.exit` or `exit` for which a status of 0 in the main thread is a `_WellEnded`."""

    @wraps(leave)
    def left(*args: object, **options: object) -> None:
        code: object = None
        try:
            leave(*args, **options)
        except SystemExit as end:
            code, is_main = end.code, threading.current_thread() is threading.main_thread()
            if not is_main or not isinstance(code, int | None) or code:
                raise
        raise _WellEnded(code)

    return left


def _outermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(program: FrameType | None) -> bool:
    """Returns whether the outermost frame of a program ended by a return.

    One that still runs has called the handlers of `atexit` itself, to end the process next.
    """
    if program is None:
        return False
    last = dis.opname[program.f_code.co_code[program.f_lasti]]
    return last.startswith("RETURN_") or _outermost(currentframe()) is program


def program_end() -> ProgramEnd:
    """Returns the end of this program; `has_failed` gives it the status of an error of the Hub."""
    if _END not in vars(sys):
        vars(sys)[_END] = ProgramEnd()
    end: ProgramEnd = vars(sys)[_END]
    return end


class Pushing:
    """The pushes of a run, by a process that runs as long as the run is open."""

    # A step is, one after another,
    #
    #   waiting    committed, as `listen` hears, or reported as `seen`; retention does not remove it
    #   pushed     its commit is on the Hub; removed from `_waiting`, as in all other cases
    #
    # or in the end `failed`, with the error that `_fail` records: the process gave the step or
    # itself up, or ended well without it, since what was saved later is pushed; or `displaced`,
    # where the last step alone is pushed, by one that is committed after it. That is no error, and
    # nothing reports it. Commits come in the order of the saves, by which the process chooses too
    # (`choose_steps`), and not by number: training may have gone back.
    #
    # `listen` and `_handle`, which reads the events of the process, drive them.

    def __init__(
        self,
        run: TrainingRun[Any],
        settings: HubSettings,
        retention: Retention,
        store: KeyValueStore,
    ) -> None:
        self._place: Path | Place = run.place
        self._state = run.path / WATCH_FOLDER
        self._settings = settings
        self._retention = retention
        self._store = store
        self._again = _command_for_rest(settings, self._place, self._state)
        self._lock = threading.Lock()
        self._pushes: dict[int, list[Push]] = {}  # expected, by step
        self._waiting: dict[int, Path | Place | None] = {}  # with their directories, if known
        # What an earlier job has left, until the process has looked at it.
        left = read_status(self._state)
        self._earlier = {*left.waiting, *left.failed}
        self._seen: set[int] = set()  # by the process
        self._last: int | None = None
        # What failed for good, with the pushes of the step; None for what failed before any step.
        self._failed: dict[int | None, tuple[CkptkitError, list[Push]]] = {}
        # What ended the process, until a later one has come further.
        self._stopped_by: CkptkitError | None = None
        self._restarts = _MOST_RESTARTS
        self._starting = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._input: socket.socket | None = None
        self._reader: threading.Thread | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=weak_callback(self.leave))
        self._start()
        program_end().add(self)

    @property
    def outstanding(self) -> frozenset[int]:
        """The steps that wait for their push, which must not be retired."""
        with self._lock:
            return frozenset({*self._waiting, *self._earlier})

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to wait for, or to tell."""
        is_reading = self._reader is not None and self._reader.is_alive()
        return self._restarts == 0 and not is_reading and not self._failed

    def follow(self, handle: SaveHandle, name: str) -> None:
        """Gives the handle of a save its push."""
        if self._settings.at_end or not is_step_folder(name):
            return
        push = Push(handle.step)
        handle.follow(push)
        with self._lock:
            self._pushes.setdefault(handle.step, []).append(push)

    def listen(self, report: SaveReport) -> None:
        if not is_step_folder(os.path.basename(os.fspath(report.path))):  # noqa: PTH119  a URL
            return
        with self._lock:
            self._last = report.step
            if self._settings.at_end:  # it displaces all others
                self._waiting = {report.step: report.path}
                self._earlier.clear()
            elif report.step in self._pushes:  # else it is pushed already
                self._waiting[report.step] = report.path
        self._publish()
        try:
            self._start()
        except HubError as error:
            self._fail_all(error)
            return
        if self._input is not None:
            with suppress(OSError):  # it has ended, which the reader handles
                self._input.send(b"\n", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Ends the input of the process, which pushes the rest and ends; logs what that is.

        It waits for an end that is near, and raises nothing: all ranks go on together.
        """
        with self._starting:
            self._restarts = 0
            if self._input is not None:
                with suppress(OSError):
                    # Otherwise a forked process, which has a copy, would keep the connection open.
                    self._input.shutdown(socket.SHUT_RDWR)
                self._input.close()
                self._input = None
        self._publish()
        if self._reader is not None:
            self._reader.join(_NEAR_END_SECONDS)
        self._note_unseen()
        self._told().log(self._settings.repo_id)

    def _note_unseen(self) -> None:
        """Has `ckptkit ls` show steps that the process has not come to, or died before."""
        known = read_status(self._state)
        told = {*self._seen, *known.waiting, *known.failed}
        with self._lock:
            due = [step for step in self._waiting if step not in told]
            ended = {
                step: str(error) for step, (error, _) in self._failed.items() if step is not None
            }
        failed = {step: why for step, why in ended.items() if step not in told}
        if due or failed:
            waiting = tuple(sorted({*known.waiting, *due}))
            repo_id = known.repo_id or self._settings.repo_id
            failed |= known.failed
            write_status(self._state, WatchStatus(repo_id, waiting, failed, known.problem))

    def finish(self) -> bool:
        """Waits for the process at the end of the program, as long as the user wants to.

        Returns whether a push failed that nobody has asked for.
        """
        seconds, is_late = self._settings.timeout_seconds, False
        if self._reader is not None and self._reader.is_alive() and seconds:
            logger.info("waiting for pushes to %s", self._settings.repo_id)
            self._reader.join(seconds)
            is_late = self._reader.is_alive()
            if is_late:
                text = "%s: not everything was pushed within %g s; `%s` pushes the rest"
                logger.error(text, self._settings.repo_id, seconds, self._again)
        if self._process is not None and self._process.returncode is None:
            self._process.returncode = 0  # it goes on by itself
        with self._lock:
            failed = list(self._failed.values())
        heard = [any(push.unheard_error is None for push in pushes) for _, pushes in failed]
        return is_late or not all(heard)

    def leave(self) -> None:
        """In a forked child: closes its copies of descriptors."""
        if self._input is not None:
            self._input.close()
        if self._process is not None:
            self._process.returncode = 0  # only the parent can wait for it
        self._process = self._input = self._reader = None

    def _told(self) -> PushState:
        with self._lock:
            alike: dict[str, list[int]] = {}
            errors = {step: error for step, (error, _) in self._failed.items()}
            due = sorted(self._waiting)
            if self._stopped_by is not None:  # the same will most likely happen again
                errors |= dict.fromkeys(due, self._stopped_by)
                due = []
            for step, error in errors.items():
                hint = f" ({error.hint})" if error.hint else ""
                is_of_all = error.where == self._settings.repo_id
                text = f"{error.message if is_of_all else error}{hint}"
                alike.setdefault(text, []).extend([] if step is None else [step])
            return PushState(self._last, due[-_MOST_TOLD:], tuple(alike.items()), self._again)

    def _publish(self) -> None:
        with suppress(CkptkitError, ValueError):  # the ranks may have ended; it may be too long
            self._store.set(_KEY, json.dumps(plain_fields(self._told())).encode())

    def _start(self) -> None:
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
        command += [
            *self._retention.as_arguments(),
            "--until-eof",
            "--wait-for-lock",
            "--weights-only",
            "--json",
        ]
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

    def _read(self, process: subprocess.Popen[str], stream: IO[str]) -> None:
        """Reads the events of the process until it ends."""
        last: CkptkitError | None = None
        has_tried_all = False
        with stream:
            for line in stream:
                try:
                    event = json.loads(line)
                    last = self._handle(event) or last
                    has_tried_all |= "failed" in event and event["event"] == "stopped"
                except (ValueError, LookupError, TypeError):
                    logger.warning("the process that pushes printed %.200r", line)
        # Its status is that of steps that failed, each of which it has reported.
        status = 0 if process.wait() and has_tried_all else process.returncode
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
            self._fail_all(last)

    def _unpushed_error(self) -> HubError | None:
        """Returns an error for steps that the process had no reason to push."""
        with self._lock:
            due = sorted(self._waiting)
        if not due:
            return None
        return HubError(
            f"not pushed: {_listed(due)}, since a step that was saved later was pushed already",
            where=self._settings.repo_id,
            hint="use a new directory and a new repository for a run that is started over",
        )

    def _restart(self, status: int) -> bool:
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
        if event["event"] in _COMES_FURTHER:
            self._stopped_by = None
            with self._lock:
                self._failed.pop(None, None)
        match event["event"]:
            case "seen":  # it may be of an earlier job
                with self._lock:
                    self._seen.add(int(event["step"]))
                    if not (self._settings.at_end and self._waiting):  # else it is displaced
                        self._waiting.setdefault(int(event["step"]), None)
            case "pushed":
                with self._lock:
                    self._failed.pop(step, None)
                for push, place in self._end(int(event["step"])):
                    _succeed(event, push, place)
                # Those of earlier jobs are reported again.
                logger.log(
                    logging.DEBUG if event["resumed"] else logging.INFO,
                    "step %s is at %s",
                    step,
                    event["url"],
                )
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
        self._publish()
        return None

    def _end(self, step: int) -> list[tuple[Push, Path | Place | None]]:
        """Removes a step from those that wait; returns the pushes that were expected."""
        with self._lock:
            place = self._waiting.pop(step, None)
            self._earlier.discard(step)
            self._seen.discard(step)
            if self._settings.at_end:
                self._waiting.clear()  # of those that it displaced, none is to be pushed
            return [(push, place) for push in self._pushes.pop(step, [])]

    def _fail(self, step: int | None, error: CkptkitError) -> None:
        """Records an error that is final; while it is there, a step is not spared any more."""
        pushes = [] if step is None else [push for push, _ in self._end(step)]
        with self._lock:
            before, known = self._failed.get(step, (None, []))
            self._failed[step] = error, [*known, *pushes]
        if str(before) != str(error):  # else it was logged
            logger.error("%s%s", "" if step is None else f"step {step} is not pushed: ", error)
        for push in pushes:
            push.fail(error)

    def _fail_all(self, error: CkptkitError) -> None:
        with self._lock:
            due = sorted(self._waiting)
            self._earlier.clear()
            if due:
                self._failed.pop(None, None)
        self._stopped_by = error
        for step in due:
            self._fail(step, error)
        if not due:
            self._fail(None, error)
        self._publish()


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
