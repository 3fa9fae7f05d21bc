"""Watches a run, and publishes each committed step once: as a commit with a tag, or as a version.

Steps of other savers can be sealed first, and a command can run for each step beside all else.

Errors that may pass by themselves are retried; errors of a step leave that step out. All others,
such as wrong credentials, end a watch, since no step could be pushed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.conversion.seal import seal_step
from ckptkit.core.errors import (
    AccessError,
    AmbiguousSourceError,
    CkptkitError,
    HubUnavailableError,
    InputError,
    NoSpaceError,
    NotACheckpointError,
    OutputBusyError,
    OutputError,
    OutputExistsError,
    RefusedError,
    SourceChangedError,
    VerificationError,
)
from ckptkit.core.text import event_of_note
from ckptkit.engine.outcome import Listener
from ckptkit.hub.client import Hub, check_tag, quiet_client
from ckptkit.hub.secrets import redact_secrets
from ckptkit.hub.watch.build import BuildSettings, PushChoice, build_folder, choose_steps
from ckptkit.hub.watch.commands import StepCommand, StepCommands
from ckptkit.hub.watch.folders import StepFolders
from ckptkit.hub.watch.versions import PublishedVersions
from ckptkit.hub.watch.watched_steps import (
    OF_NO_STEP,
    TAG_PREFIX,
    PushedSteps,
    StepCommit,
    WatchedRun,
)
from ckptkit.runs.find_run import absent_folder
from ckptkit.runs.local_run import open_run
from ckptkit.runs.marks import FileLocks
from ckptkit.runs.pruning import prune_run
from ckptkit.runs.push_journal import (
    WATCH_FOLDER,
    CommandJournal,
    CommandRun,
    PushJournal,
    StepPush,
    WatchStatus,
    open_journal,
    read_journals,
    take_watch_lock,
    watch_identity,
    write_status,
)
from ckptkit.runs.retention import Retention, unknown_metric
from ckptkit.runs.steps import RunStep
from ckptkit.storage.place_identity import PlaceIdentity, PlaceRelation, find_overlap
from ckptkit.storage.places import PathLike, is_url, local_path
from ckptkit.storage.remote.errors import RetryPolicy

_OF_A_STEP = (InputError, RefusedError, OutputExistsError, VerificationError)
_TRANSIENT = (HubUnavailableError, NoSpaceError, OutputBusyError, InputError)
WATCH_RETRIES = RetryPolicy(
    attempts=6, first_wait_seconds=2.0, longest_wait_seconds=300.0, jitter=0.0
)
"""A watch retries without limit; `attempts` limits the retries once it is to end."""
_LOCK_POLL_SECONDS = 1.0
_LISTED = 5
_READ_BYTES = 4096
_MOST_MARKS = 32  # each takes a descriptor or two

EventName = Literal[
    "started",  # the watch has the lock of the run
    "waiting",  # another watch has the lock, or a step is still written to
    "seen",  # a committed step is to be pushed
    "building",  # its model or adapter is being built
    "sealed",  # the manifest of a step of another saver is written
    "executing",  # the command for a step is started
    "executed",  # it has ended
    "written",  # its folder beside the pushes is there
    "pushing",  # what was built is verified and is being uploaded
    "progress",  # in JSON lines: how far a build or an upload is, now and then
    "pushed",  # commit and tag are on the Hub
    "passed",  # a step is not pushed, and need not be
    "failed",  # a step cannot be pushed, or sealed; the watch continues with others
    "retrying",  # the network, the Hub or a disk failed; another attempt follows
    "pruned",  # steps were removed from the run
    "note",  # what was chosen
    "warning",
    "stopped",  # the last event
]


class WatchEvent(Struct, frozen=True):
    """An event of a watch: its kind, the step concerned, and further fields as JSON values."""

    name: EventName
    step: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        step = {} if self.step is None else {"step": self.step}
        return {"event": self.name} | step | dict(self.facts)


WatchListener = Callable[[WatchEvent], None]


class Pauses:
    """Lets a watch wait for time, for news on standard input, or for the end of standard input."""

    def __init__(self, *, ending: bool, reads_input: bool) -> None:
        """Starts to read standard input, if `reads_input`; once `ending`, nothing is waited for."""
        self.ending = ending
        self._news = threading.Event()
        if reads_input:
            threading.Thread(target=self._read, name="ckptkit-input", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Waits at most this long; less if the run may have changed."""
        self._news.wait(seconds)
        self._news.clear()

    def notify(self) -> None:
        """Ends a wait, or the next one; called by any thread."""
        self._news.set()

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


@dataclasses.dataclass(frozen=True, slots=True)
class WatchRequest:
    """A run to watch, where its steps go, and how."""

    run: PathLike
    # With `versions`, the location of their folder; that of `to_dir` where nothing else is made;
    # empty where steps are sealed, or a command runs for them, and nothing is published
    repo_id: str
    state: Path | None = None  # the folder of journal and lock; by default inside a local run
    choice: PushChoice = dataclasses.field(default_factory=PushChoice)
    build: BuildSettings = dataclasses.field(default_factory=BuildSettings)
    private: bool | None = None  # of a new repository; None for the Hub's default
    revision: str | None = None  # the branch; `main` if None
    include: Sequence[str] = ()  # patterns of further files of a step that are pushed with it
    tag_prefix: str = TAG_PREFIX
    versions: PathLike | None = None  # where versions are published, instead of a repository
    to_dir: Path | None = None  # where the folder of each step is made, too
    seal: bool = False  # whether steps of other savers get their manifests, before all else
    command: StepCommand | None = None  # what runs for each step
    whole_every: int = 1  # one of so many versions is a whole model, the others are deltas
    retention: Retention = dataclasses.field(
        default_factory=Retention
    )  # of steps in the run after pushes
    token: str | None = dataclasses.field(default=None, repr=False)
    endpoint: str | None = None
    poll_seconds: float = 5.0
    retries: RetryPolicy = WATCH_RETRIES
    at_end: bool = False  # nothing is pushed before the end
    settle_seconds: float = 120.0  # to wait at the end for steps that are still written to
    # Metrics that a rule needs, by the option that names them. If no step has one, a watch that
    # is to end is refused, and any other one warns.
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_steps: bool = False  # it is an error to end without a complete step
    repeats_pushes: bool = False  # reports those of earlier jobs, which may be of steps of this one
    waits_for_lock: bool = False  # for another watch of the run to end, instead of refusing


def run_watch(
    request: WatchRequest, pauses: Pauses, listener: WatchListener, progress: Listener
) -> Mapping[int, CkptkitError]:
    """Watches a run until the end is requested and no step waits.

    Returns the errors of the steps that could not be pushed, by their numbers.
    """
    check_tag(f"{request.tag_prefix}1")
    inside = {PlaceRelation.SAME, PlaceRelation.INSIDE}
    for option, place in (("--into", request.versions), ("--to-dir", request.to_dir)):
        if place is not None and find_overlap(place, request.run) in inside:
            raise RefusedError(
                f"is inside {os.fspath(request.run)}, where models would be taken for checkpoints",
                where=f"{option} {os.fspath(place)}",
                hint="choose a place beside the run",
            )
    only_folders = request.to_dir is not None and os.fspath(request.to_dir) == request.repo_id
    state = _state_folder(request)
    with ExitStack() as stack:
        stack.enter_context(_take_lock(request, state, pauses, listener))
        hub, repo_id = None, request.repo_id
        if request.versions is None and not only_folders and request.repo_id:
            stack.enter_context(quiet_client())
            hub = _open_hub(request, state, pauses, listener)
            repo_id = hub.repo_id
        # An identity distinguishes a run from an earlier one at its path. That of a URL does not
        # depend on its spelling; older versions took the spelling.
        named = os.fspath(request.run).rstrip("/")
        own = "" if is_url(request.run) else watch_identity(local_path(request.run) / WATCH_FOLDER)
        texts = [PlaceIdentity(request.run).name, named] if is_url(request.run) else [named]
        hashes = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        identity, *former = [own] if own else hashes
        journal, note = open_journal(state, repo_id, identity, former)
        started = {"run": os.fspath(request.run), "repo_id": repo_id, "state": str(state)}
        listener(WatchEvent("started", None, started))
        if note:
            listener(WatchEvent("warning", None, {"message": note}))
        run = WatchedRun(request.run, state)
        folders = None
        if request.to_dir is not None:
            folders = StepFolders(request.to_dir, run, identity, request.build, progress)
            folders.sweep()
        destination: _Destination | None
        if not request.repo_id:
            destination = None
        elif folders is not None and only_folders:
            destination, folders = folders, None
        elif request.versions is not None:
            destination = PublishedVersions(
                request.versions, request.whole_every, run, identity, request.build, progress
            )
            stack.callback(destination.close)
        else:
            assert hub is not None  # noqa: S101  opened above
            destination = PushedSteps(
                hub,
                private=request.private,
                revision=request.revision,
                include=request.include,
                build=request.build,
                listener=progress,
            )
        watch = _Watch(request, run, journal, destination, folders, listener, progress)
        if request.command is not None:
            commands = CommandJournal(state, request.command.text, identity)
            watch.commands = StepCommands(
                request.command, run, commands, watch.report_command, pauses.notify
            )
        stack.callback(watch.close)
        watch.run(pauses)
    return watch.failures


_Destination = PushedSteps | PublishedVersions | StepFolders


class _Watch:
    # A step is, one after another,
    #
    #   waiting   in the run, chosen by the rules, not published; a mark keeps it from pruning;
    #             its folder is made, where there is to be one beside the push
    #   building  its model or adapter is written beside the journal, and verified
    #   pushing   in the journal, before the first request that may change the Hub
    #   pushed    the commit has its tag, and then the journal says so
    #
    # or in the end `failed`, which is reported and not tried again until the step is saved again,
    # or `passed`, as it is gone. `run` drives them: one round of its loop does one of these, in
    # this order: finish what a kill left at `pushing`; publish the first step that waits; prune;
    # wait. A retried round lists the run anew.

    def __init__(
        self,
        request: WatchRequest,
        run: WatchedRun,
        journal: PushJournal,
        destination: _Destination | None,
        folders: StepFolders | None,
        listener: WatchListener,
        progress: Listener,
    ) -> None:
        self.failures: dict[int, CkptkitError] = {}
        self.commands: StepCommands | None = None
        self._request = request
        self._run = run
        self._journal = journal
        self._destination = destination
        self._folders = folders  # beside what is pushed
        self._listener = listener
        self._progress = progress
        self._work = journal.path.with_suffix(".work")
        self._failed: dict[int, str] = {}  # digests of steps that cannot be pushed
        self._announced: dict[int, str] = {}
        self._written: set[str] = set()  # digests of steps that have their folder beside the push
        self._marks: dict[str, AbstractContextManager[object]] = {}
        self._built_digest = ""  # the digest of the step whose folder is built
        self._passed_over: set[str] = set()  # digests of steps that a warning has named
        self._has_begun = False
        self._has_run_commands = False  # in the last round, after which others may have room
        self._has_repeated = False
        self._settling_since = 0.0
        self._warned_of_metrics: set[str] = set()
        self._has_news = (
            False  # a step was pushed or sealed, or its command has ended, since the last pruning
        )
        self._waiting_steps: tuple[int, ...] = ()
        self._problem = ""  # why they are not pushed now
        self._status = WatchStatus()

    def run(self, pauses: Pauses) -> None:
        """Watches until the end is requested and no step waits."""
        retries = _Retries(self._request.retries, pauses, self._listener)
        while True:
            ending = pauses.ending  # read first: steps committed before the end are then listed
            try:
                is_idle = self._advance(ending=ending)
            except CkptkitError as error:
                self._note_status(_text_of(error))
                retries.wait_after(error, ending=ending)
                continue
            retries.failed = 0
            self._note_status("")
            if is_idle and (not ending or self._has_run_commands):
                pauses.wait(self._request.poll_seconds)
            elif is_idle and not self._wait_for_unsettled(pauses):
                # A run whose steps were all pushed and removed is no error.
                absence = self._run.absence
                if self._request.needs_steps and absence is not None and not self._journal.pushes:
                    raise absence
                return

    def close(self) -> None:
        """Stops commands, releases the steps that wait, and removes what was built."""
        if self.commands is not None:
            self.commands.close()
        for digest in list(self._marks):
            self._release(digest)
        self._remove_built()

    def _advance(self, *, ending: bool) -> bool:
        """Does the next piece of work; returns whether there was none."""
        steps: Sequence[RunStep] = self._run.list_steps()
        if self._request.seal:
            steps, has_sealed = self._seal(steps)
            if has_sealed:
                return False
        waiting = self._find_waiting(steps)
        if self._request.repeats_pushes and not self._has_repeated:
            self._has_repeated = True
            self._repeat_pushes(steps)
        if not self._has_begun:
            if self._destination is not None:
                if not ending:  # reports a wrong token before the first step is committed
                    self._destination.check()
                self._finish_interrupted(self._destination)
            self._has_begun = True
            waiting = self._find_waiting(steps)
        self._check_metrics(steps, ending=ending)
        self._start_commands(steps)
        if self._destination is not None:
            self._warn_of_passed_over(steps, waiting)
        if waiting and self._destination is not None and (ending or not self._request.at_end):
            # Folders first: they do not wait for a Hub that is away.
            lacking = [one for one in waiting if one.digest not in self._written]
            if self._folders is not None and lacking:
                self._write_folder(self._folders, lacking[0])
            else:
                self._publish(self._destination, waiting[0])
            return False
        if self._has_news and not self._request.retention.keeps_all:
            self._has_news = False
            self._prune()
        return True

    def _seal(self, steps: Sequence[RunStep]) -> tuple[Sequence[RunStep], bool]:
        """Seals the first step without a manifest; returns those that have one, and if it did."""
        ready = [step for step in steps if step.has_manifest]
        for step in steps:
            if step.has_manifest or self._failed.get(step.step) == step.digest:
                continue
            began = time.monotonic()
            try:
                run, store = self._request.run, open_run(self._request.run)
                unverified = seal_step(run, store, step, listener=self._progress)
            except SourceChangedError:
                continue  # it is still written to, which the next look shows
            except OF_NO_STEP:
                raise
            except _OF_A_STEP as error:
                self._give_up(step, error, "sealed")
                continue
            seconds = round(time.monotonic() - began, 3)
            facts = {"read_bytes": step.size_bytes, "unverified": unverified}
            self._emit("sealed", step.step, **facts, seconds=seconds)
            self._has_news = True
            return ready, True
        return ready, False

    def _start_commands(self, steps: Sequence[RunStep]) -> None:
        """Starts the command for steps that wait for it, as far as there is room."""
        if self.commands is None:
            return
        self._has_run_commands = self.commands.is_running
        for step in self._find_waiting_for_commands(steps):
            if not self.commands.has_room:
                return
            with suppress(InputError):  # it is gone, which the next listing shows
                self.commands.start(step)
                self._has_run_commands = True

    def _find_waiting_for_commands(self, steps: Sequence[RunStep]) -> list[RunStep]:
        if self.commands is None:
            return []
        good = [step for step in steps if self._failed.get(step.step) != step.digest]
        return self.commands.waiting(good, self._request.choice)

    def report_command(self, run: CommandRun) -> None:
        """Reports the start or the end of a command, which may be in another thread."""
        if run.state == "running":
            self._emit("executing", run.step, command=run.command, log=run.log)
            return
        self._has_news = True
        facts = {name: getattr(run, name) for name in ("command", "log", "status", "seconds")}
        self._emit("executed", run.step, **facts)

    def _find_waiting(self, steps: Sequence[RunStep]) -> list[RunStep]:
        """Returns the steps to push; reports them, and protects all that wait from pruning."""
        digests = {step.step: step.digest for step in steps}
        earlier = {n: push for n, push in self._journal.pushes.items() if push.state == "pushed"}
        by_number = {step.step: step for step in steps}
        is_published = self._destination is not None
        choice = self._request.choice
        numbers = choose_steps(steps, digests, earlier, choice) if is_published else ()
        waiting = [by_number[n] for n in numbers if self._failed.get(n) != digests[n]]
        self._waiting_steps = tuple(step.step for step in waiting)
        self._note_status(self._problem)
        counts = {"waiting": len(waiting), "newest": max(by_number, default=None)}
        for step in waiting:
            if self._announced.get(step.step) != step.digest:
                self._announced[step.step] = step.digest
                self._emit("seen", step.step, digest=step.digest, **counts)
        protected = [*waiting, *self._find_waiting_for_commands(steps)]
        wanted = {step.digest: step for step in protected[:_MOST_MARKS]}
        for digest in self._marks.keys() - wanted.keys():
            self._release(digest)
        for digest in wanted.keys() - self._marks.keys():
            with suppress(InputError):  # it is gone, which the next listing shows
                mark = self._run.hold(wanted[digest])
                mark.__enter__()
                self._marks[digest] = mark
        return waiting

    def _release(self, digest: str) -> None:
        with suppress(CkptkitError):  # a mark in a store that cannot be reached expires
            self._marks.pop(digest).__exit__(None, None, None)

    def _note_status(self, problem: str) -> None:
        """Writes what is not pushed for others to read, if it has changed."""
        self._problem = problem
        failed = {step: _text_of(error) for step, error in self.failures.items()}
        status = WatchStatus(self._journal.repo_id, self._waiting_steps, failed, problem)
        if status != self._status:
            self._status = status
            write_status(self._journal.path.parent, status)

    def _finish_interrupted(self, destination: _Destination) -> None:
        """Finishes or takes back pushes that a kill interrupted, also of steps that are gone."""
        self._remove_built()
        for push in list(self._journal.pushes.values()):
            if push.state == "pushed":
                continue
            try:
                commit = destination.find(push)
            except RefusedError:
                commit = None  # another commit has its tag; reported when the step is pushed again
            if commit is None:
                self._take_back(push)
            else:
                self._complete(destination, push, commit, time.monotonic())

    def _publish(self, destination: _Destination, step: RunStep) -> None:
        began = time.monotonic()
        earlier = self._journal.pushes.get(step.step)
        replaces = ""
        if earlier is not None:
            replaces = earlier.commit if earlier.state == "pushed" else earlier.replaces
        push = StepPush(
            step=step.step,
            digest=step.digest,
            state="pushing",
            repo_id=self._journal.repo_id,
            tag=f"{self._request.tag_prefix}{step.step}",
            save_number=step.save_number,
            metrics=dict(step.metrics),
            replaces=replaces,
        )
        try:
            commit = destination.find(push)
            if commit is None:
                folder = self._build(step) if destination.takes_folders else self._work
                self._journal.note(push)
                self._emit("pushing", step.step, repo_id=push.repo_id)
                commit = destination.publish(step, push, folder)
                for note in commit.notes:
                    self._emit(event_of_note(note), step.step, message=note)
            self._complete(destination, push, commit, began)
        except OF_NO_STEP:
            raise
        except _OF_A_STEP as error:
            self._give_up(step, error)

    def _write_folder(self, folders: StepFolders, step: RunStep) -> None:
        began = time.monotonic()
        self._emit("building", step.step)
        try:
            made = folders.make(step)
        except OF_NO_STEP:
            raise
        except _OF_A_STEP as error:
            self._give_up(step, error)
            return
        self._written.add(step.digest)
        seconds = round(time.monotonic() - began, 3)
        facts = {"path": made.url, "written_bytes": made.uploaded_bytes, "seconds": seconds}
        self._emit("written", step.step, **facts, resumed=not made.is_new)

    def _build(self, step: RunStep) -> Path:
        """Returns the folder to push; after a failed push it is still built."""
        folder = self._work / f"step-{step.step}"
        if self._built_digest == step.digest:
            return folder
        self._remove_built()  # of another step, whose push failed
        self._emit("building", step.step)
        notes = build_folder(
            self._run.place_of(step), folder, step.step, self._request.build, self._progress
        )
        for note in notes:
            self._emit(event_of_note(note), step.step, message=note)
        self._built_digest = step.digest
        return folder

    def _remove_built(self) -> None:
        self._built_digest = ""
        shutil.rmtree(self._work, ignore_errors=True)

    def _complete(
        self, destination: _Destination, push: StepPush, commit: StepCommit, began: float
    ) -> None:
        """Tags the commit, and records that the step is pushed."""
        push = replace(push, tag=destination.tag(push, commit))
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        done = replace(push, state="pushed", commit=commit.commit, url=commit.url, at=at)
        self._journal.note(replace(done, size_bytes=commit.uploaded_bytes))
        self._has_news = True
        self._waiting_steps = tuple(one for one in self._waiting_steps if one != push.step)
        self._remove_built()
        seconds = round(time.monotonic() - began, 3)
        self._emit_pushed(push, commit, seconds=seconds, resumed=not commit.is_new)

    def _give_up(self, step: RunStep, error: CkptkitError, what: str = "pushed") -> None:
        if isinstance(error, InputError) and not self._run.is_there(step):
            self._emit("passed", step.step, reason="it was removed from the run, or replaced")
            return
        if isinstance(error, AmbiguousSourceError):  # nothing can be selected in a watch
            hint = "write one of them with `ckptkit consolidate --select`, and push that"
            error = error.hinted(hint)
        self._remove_built()
        self._failed[step.step] = step.digest
        self.failures[step.step] = error
        push = self._journal.pushes.get(step.step)
        if push is not None and push.state == "pushing":
            self._take_back(push)
        self._emit("failed", step.step, error=error.to_json(), what=what)

    def _take_back(self, push: StepPush) -> None:
        """Removes a push from the journal, or puts back the push of an earlier save of the step."""
        if push.replaces:
            earlier = replace(push, state="pushed", digest="", commit=push.replaces, replaces="")
            self._journal.note(earlier)
        else:
            self._journal.forget(push.step)

    def _repeat_pushes(self, steps: Sequence[RunStep]) -> None:
        """Reports what earlier watches have pushed, except for steps that were saved again."""
        digests = {step.step: step.digest for step in steps}
        for push in self._journal.pushes.values():
            if push.state == "pushed" and digests.get(push.step, push.digest) == push.digest:
                commit = StepCommit(push.commit, push.url, push.size_bytes)
                self._emit_pushed(push, commit, seconds=0.0, resumed=True)

    def _emit_pushed(
        self, push: StepPush, commit: StepCommit, *, seconds: float, resumed: bool
    ) -> None:
        self._emit(
            "pushed",
            push.step,
            repo_id=push.repo_id,
            commit=commit.commit,
            tag=push.tag,
            url=commit.url,
            uploaded_bytes=commit.uploaded_bytes,
            seconds=seconds,
            resumed=resumed,
        )

    def _prune(self) -> None:
        """Removes the steps that no rule keeps."""
        try:
            state = self._journal.path.parent
            result = prune_run(self._request.run, self._request.retention, state=state)
            if result.failed:
                first = result.failed[0]
                raise OutputError(first.why, where=first.step.name)
        except CkptkitError as error:
            text = f"nothing was removed from the run: {error}"
            self._emit("warning", None, message=text)
        else:
            if result.removed:
                self._emit("pruned", None, steps=[step.step for step in result.removed])

    def _check_metrics(self, steps: Sequence[RunStep], *, ending: bool) -> None:
        pushes = self._journal.pushes.values()
        tables = [*(step.metrics for step in steps), *(push.metrics for push in pushes)]
        for option, name in self._request.metrics.items():
            if not steps or any(metrics.get(name) is not None for metrics in tables):
                continue
            error = unknown_metric(tables, where=f"{option} {name}")
            if ending and not self._run.unsettled:
                raise error
            if option not in self._warned_of_metrics:
                self._warned_of_metrics.add(option)
                self._emit("warning", None, message=f"{error} ({error.hint})")

    def _warn_of_passed_over(self, steps: Sequence[RunStep], waiting: Sequence[RunStep]) -> None:
        """Warns of steps that are not pushed because of their order, and not by a rule."""
        if self._request.choice != PushChoice():
            return
        reported = {step.digest for step in waiting} | self._passed_over
        reported |= set(self._failed.values())
        reported |= {push.digest for push in self._journal.pushes.values()}
        left = {step.digest: str(step.step) for step in steps if step.digest not in reported}
        if left:
            self._passed_over |= left.keys()
            why = "they were saved before a step that is pushed, or training went back from them"
            self._emit("warning", None, message=f"not pushed: {', '.join(left.values())}; {why}")

    def _wait_for_unsettled(self, pauses: Pauses) -> bool:
        """Waits if steps may still be written to; returns whether there were any."""
        pushed = {push.digest for push in self._journal.pushes.values()}
        unsettled = [n for n, digest in self._run.unsettled.items() if digest not in pushed]
        if not unsettled:
            return False
        names = ", ".join(unsettled[:_LISTED])
        now = time.monotonic()
        if not self._settling_since:
            self._settling_since = now
            text = f"{names}: written less than a minute ago; waiting until the files stop changing"
            self._emit("waiting", None, message=text, steps=unsettled)
        if now - self._settling_since > self._request.settle_seconds:
            raise RefusedError(
                f"{names}: still changing after {self._request.settle_seconds:g} s",
                where=names,
                hint="run it again once the save has finished",
            )
        pauses.wait(0)  # returns at once: the end counts as a change
        pauses.wait(self._request.poll_seconds)
        return True

    def _emit(self, name: EventName, step: int | None, **facts: Any) -> None:
        self._listener(WatchEvent(name, step, facts))


class _Retries:
    """Waits after errors that may pass by themselves, and raises the others."""

    def __init__(self, policy: RetryPolicy, pauses: Pauses, listener: WatchListener) -> None:
        self.failed = 0  # attempts in a row; from the end on they are counted anew
        self._policy = policy
        self._pauses = pauses
        self._listener = listener
        self._is_ending = False

    def wait_after(self, error: CkptkitError, *, ending: bool) -> None:
        if ending and not self._is_ending:
            self._is_ending, self.failed = True, 0
        self.failed += 1
        is_last = ending and self.failed >= self._policy.attempts
        is_transient = isinstance(error, _TRANSIENT) and not isinstance(error, AccessError)
        if is_last or not is_transient:
            raise error
        seconds = self._policy.wait_seconds(self.failed)
        facts = {"error": error.to_json(), "tries": self.failed, "seconds": seconds}
        self._listener(WatchEvent("retrying", None, facts))
        self._pauses.wait(seconds)


def _text_of(error: CkptkitError) -> str:
    return redact_secrets(f"{error} ({error.hint})" if error.hint else str(error))


def _open_hub(request: WatchRequest, state: Path, pauses: Pauses, listener: WatchListener) -> Hub:
    """Returns the repository with its owner, for whom the Hub may have to be asked."""
    retries = _Retries(request.retries, pauses, listener)
    while True:
        ending = pauses.ending
        try:
            hub = Hub(request.repo_id, token=request.token, endpoint=request.endpoint)
            hub.resolve_owner()
        except CkptkitError as error:
            pushed = {push.step for push in read_journals(state) if push.state == "pushed"}
            with suppress(InputError):
                complete = (step.step for step in WatchedRun(request.run, state).list_steps())
                waiting = tuple(step for step in complete if step not in pushed)
                why = _text_of(error)
                write_status(state, WatchStatus(request.repo_id, waiting, problem=why))
            retries.wait_after(error, ending=ending)
        else:
            return hub


def _state_folder(request: WatchRequest) -> Path:
    """Returns the folder for the state of a watch."""
    if request.state is not None:
        return request.state
    location = os.fspath(request.run)
    if is_url(request.run):
        raise RefusedError(
            "is a URL, where the state of the watch cannot be kept",
            where=location,
            hint="pass a local directory with --state",
        )
    if not local_path(location).is_dir():
        text, hint = absent_folder(location, "pass the directory that the training saves to")
        raise NotACheckpointError(text, where=location, hint=hint)
    return local_path(location) / WATCH_FOLDER


def _take_lock(
    request: WatchRequest, state: Path, pauses: Pauses, listener: WatchListener
) -> FileLocks:
    own = None if is_url(request.run) else local_path(request.run) / WATCH_FOLDER
    has_reported = False
    while True:
        try:
            return take_watch_lock(state, own)
        except RefusedError as error:
            if isinstance(error, OutputError) or not request.waits_for_lock:
                raise
            if not has_reported:
                listener(WatchEvent("waiting", None, {"error": error.to_json()}))
                has_reported = True
        pauses.wait(_LOCK_POLL_SECONDS)
