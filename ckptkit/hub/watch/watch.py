"""Watches a run, and pushes each committed step to the Hub, as one commit and one tag.

Errors that may pass by themselves are retried; errors of a step leave that step out. All others,
such as wrong credentials, end a watch, since no step could be pushed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import (
    CkptkitError,
    InputError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
    RefusedError,
    VerificationError,
)
from ckptkit.core.text import event_of_note
from ckptkit.engine.outcome import Listener
from ckptkit.hub.client import Hub, check_tag, quiet_client
from ckptkit.hub.folder_files import NEVER
from ckptkit.hub.secrets import redact_secrets
from ckptkit.hub.watch.build import BuildSettings, PushChoice, build_folder, choose_steps
from ckptkit.hub.watch.events import EventName, WatchEvent, WatchListener
from ckptkit.hub.watch.versions import PublishedVersions, VersionSettings
from ckptkit.hub.watch.watched_steps import (
    OF_NO_STEP,
    TAG_PREFIX,
    BranchSettings,
    PushedSteps,
    StepCommit,
    WatchedRun,
    advise,
    is_transient,
)
from ckptkit.runs.marks import FileLocks
from ckptkit.runs.pruning import prune_run
from ckptkit.runs.push_journal import (
    WATCH_FOLDER,
    PushJournal,
    StepPush,
    WatchStatus,
    open_journal,
    read_journals,
    take_watch_lock,
    watch_identity,
    write_status,
)
from ckptkit.runs.run_paths import absent_folder
from ckptkit.runs.save_order import Retention, unknown_metric
from ckptkit.runs.steps import RunStep
from ckptkit.storage.place_identity import PlaceIdentity
from ckptkit.storage.places import PathLike, is_url, local_path
from ckptkit.storage.remote.errors import RetryPolicy

_OF_A_STEP = (InputError, RefusedError, OutputExistsError, VerificationError)
WATCH_RETRIES = RetryPolicy(
    attempts=6, first_wait_seconds=2.0, longest_wait_seconds=300.0, jitter=0.0
)
"""A watch retries without limit; `attempts` limits the retries once it is to end."""
_WORK = "work"
_LISTED = 5  # of files that were not pushed
_MOST_MARKS = 32  # each takes a descriptor or two


class Pauses(Protocol):
    """Lets a watch wait for time to pass, or for its end."""

    @property
    def ending(self) -> bool:
        """Whether the watch ends as soon as no step waits to be pushed."""
        ...

    def wait(self, seconds: float) -> None:
        """Waits for at most so many seconds; less if the run may have changed."""
        ...


class WatchSettings(Struct, frozen=True):
    """How a run is watched.

    Attributes:
        choice: Which steps are pushed.
        build: What is built from a step.
        poll_seconds: The interval at which the run is listed.
        retries: The waits between retries, and the number of retries at the end.
        at_end: Whether nothing is pushed before the end.
        settle_seconds: How long to wait at the end for steps that are still written to.
        metrics: Metrics that a rule needs, by the option that names them. If no step has one, a
            watch that is to end is refused, and any other one warns.
        needs_steps: Whether it is an error if a watch ends without a complete step.
        repeats_pushes: Whether pushes of earlier watches are reported too: that of an earlier job
            may have pushed steps of this one.
    """

    choice: PushChoice = field(default_factory=PushChoice)
    build: BuildSettings = field(default_factory=BuildSettings)
    poll_seconds: float = 5.0
    retries: RetryPolicy = WATCH_RETRIES
    at_end: bool = False
    settle_seconds: float = 120.0
    metrics: Mapping[str, str] = field(default_factory=dict)
    needs_steps: bool = False
    repeats_pushes: bool = False


class Destination(Protocol):
    """Where steps go; `tag_prefix` comes before the number in the names of tags."""

    tag_prefix: str

    def check(self) -> None:
        """Fails if nothing can be pushed, before the first step is there."""
        ...

    def find(self, push: StepPush) -> StepCommit | None:
        """Returns what an earlier push made of a step, None if nothing."""
        ...

    def publish(
        self,
        step: RunStep,
        push: StepPush,
        whole: str,
        build: Callable[[], Path],
        begin: Callable[[], None],
    ) -> StepCommit:
        """Pushes a step; calls `begin` before it changes anything, `build` for the folder."""
        ...

    def tag(self, push: StepPush, commit: StepCommit) -> str:
        """Gives what was made of a step its name, and returns it."""
        ...

    def close(self) -> None:
        """Releases what is held."""
        ...


class Watch:
    """Pushes the steps of one run, one after another.

    Attributes:
        failures: The errors of steps that could not be pushed.
    """

    def __init__(
        self,
        run: WatchedRun,
        journal: PushJournal,
        hub: Destination,
        settings: WatchSettings,
        listener: WatchListener,
        prune: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Stores the arguments; the caller holds the lock of the run.

        Args:
            run: The run.
            journal: The earlier pushes; steps are built in a folder next to its file.
            hub: The repository, or the folder of versions.
            settings: How the run is watched.
            listener: Receives all events.
            prune: Removes steps after pushes, and returns their numbers.
        """
        self.failures: dict[int, CkptkitError] = {}
        self._run = run
        self._journal = journal
        self._hub = hub
        self._settings = settings
        self._listener = listener
        self._work = journal.path.with_suffix(f".{_WORK}")
        self._failed: dict[int, str] = {}  # digests of steps that cannot be pushed
        self._announced: dict[int, str] = {}
        self._marks: dict[str, AbstractContextManager[object]] = {}
        self._prune = prune
        self._built_digest = ""  # the digest of the step whose folder is built
        self._passed_over: set[str] = set()  # digests of steps that a warning has named
        self._has_begun = False
        self._has_repeated = False
        self._settling_since = 0.0
        self._warned_of_metrics: set[str] = set()
        self._has_pushed = False  # a step since the run was last pruned
        self._waiting_steps: tuple[int, ...] = ()
        self._problem = ""  # why they are not pushed now
        self._status = WatchStatus()

    def run(self, pauses: Pauses, progress: Listener) -> None:
        """Watches until the end is requested and no step waits."""
        retries = Retries(self._settings.retries, pauses, self._listener)
        while True:
            ending = pauses.ending  # read first: steps committed before the end are then listed
            try:
                is_idle = self._advance(progress, ending=ending)
            except CkptkitError as error:
                self._problem = _text_of(error)
                self._note_status()
                retries.wait_after(error, ending=ending)
                continue
            retries.failed = 0
            self._problem = ""
            self._note_status()
            if is_idle and not ending:
                pauses.wait(self._settings.poll_seconds)
            elif is_idle and not self._wait_for_unsettled(pauses):
                # A run whose steps were all pushed and removed is no error.
                absence = self._run.absence
                if self._settings.needs_steps and absence is not None and not self._journal.pushes:
                    raise absence
                return

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
        if now - self._settling_since > self._settings.settle_seconds:
            raise RefusedError(
                f"{names}: still changing after {self._settings.settle_seconds:g} s",
                where=names,
                hint="run it again once the save has finished",
            )
        pauses.wait(0)  # returns at once: the end counts as a change
        pauses.wait(self._settings.poll_seconds)
        return True

    def _note_status(self) -> None:
        """Writes what is not pushed for others to read, if it has changed."""
        failed = {step: _text_of(error) for step, error in self.failures.items()}
        repo_id = self._journal.repo_id
        status = WatchStatus(repo_id, self._waiting_steps, failed, self._problem)
        if status != self._status:
            self._status = status
            write_status(self._journal.path.parent, status)

    def close(self) -> None:
        """Releases the steps that wait, and removes what was built."""
        for digest in list(self._marks):
            self._release(digest)
        self._hub.close()
        self._remove_built()

    def _advance(self, progress: Listener, *, ending: bool) -> bool:
        """Does the next piece of work; returns whether there was none."""
        steps = self._run.look()
        waiting = self._waiting(steps)
        self._announce(steps, waiting)
        if self._settings.repeats_pushes and not self._has_repeated:
            self._has_repeated = True
            self._repeat_pushes(steps)
        if not self._has_begun:
            if not ending:  # reports a wrong token before the first step is committed
                self._hub.check()
            self._finish_interrupted()
            self._has_begun = True
            waiting = self._waiting(steps)
            self._announce(steps, waiting)
        self._check_metrics(steps, ending=ending)
        self._warn_of_passed_over(steps, waiting)
        if waiting and (ending or not self._settings.at_end):
            self._push(waiting[0], progress)
            return False
        if self._has_pushed and self._prune is not None:
            self._has_pushed = False
            try:
                removed = self._prune()
            except CkptkitError as error:
                text = f"nothing was removed from the run: {error}"
                self._emit("warning", None, message=text)
            else:
                if removed:
                    self._emit("pruned", None, steps=list(removed))
        return True

    def _finish_interrupted(self) -> None:
        """Finishes or takes back pushes that a kill interrupted, also of steps that are gone."""
        self._remove_built()
        for push in list(self._journal.pushes.values()):
            if push.state == "pushed":
                continue
            try:
                commit = self._hub.find(push)
            except RefusedError:
                commit = None  # another commit has its tag; reported when the step is pushed again
            if commit is None:
                self._take_back(push)
            else:
                self._complete(push, commit, time.monotonic())

    def _waiting(self, steps: Sequence[RunStep]) -> list[RunStep]:
        digests = {step.step: step.digest for step in steps}
        earlier = {
            step: push for step, push in self._journal.pushes.items() if push.state == "pushed"
        }
        by_number = {step.step: step for step in steps}
        numbers = choose_steps(steps, digests, earlier, self._settings.choice)
        return [by_number[n] for n in numbers if self._failed.get(n) != digests[n]]

    def _check_metrics(self, steps: Sequence[RunStep], *, ending: bool) -> None:
        pushes = self._journal.pushes.values()
        tables = [*(step.metrics for step in steps), *(push.metrics for push in pushes)]
        for option, name in self._settings.metrics.items():
            if not steps or any(metrics.get(name) is not None for metrics in tables):
                continue
            error = unknown_metric(tables, where=f"{option} {name}")
            if ending and not self._run.unsettled:
                raise error
            if option not in self._warned_of_metrics:
                self._warned_of_metrics.add(option)
                self._emit("warning", None, message=f"{error} ({error.hint})")

    def _announce(self, steps: Sequence[RunStep], waiting: Sequence[RunStep]) -> None:
        """Reports steps that wait, and protects them from pruning until they are pushed."""
        self._waiting_steps = tuple(step.step for step in waiting)
        self._note_status()
        counts = {"waiting": len(waiting), "newest": max((s.step for s in steps), default=None)}
        for step in waiting:
            if self._announced.get(step.step) != step.digest:
                self._announced[step.step] = step.digest
                self._emit("seen", step.step, digest=step.digest, **counts)
        wanted = {step.digest: step for step in waiting[:_MOST_MARKS]}
        for digest in self._marks.keys() - wanted.keys():
            self._release(digest)
        for digest in wanted.keys() - self._marks.keys():
            with suppress(InputError):  # it is gone, which the next listing shows
                mark = self._run.hold(wanted[digest])
                mark.__enter__()
                self._marks[digest] = mark

    def _warn_of_passed_over(self, steps: Sequence[RunStep], waiting: Sequence[RunStep]) -> None:
        """Warns of steps that are not pushed because of their order, and not by a rule."""
        if self._settings.choice != PushChoice():
            return
        reported = {step.digest for step in waiting} | self._passed_over
        reported |= set(self._failed.values())
        reported |= {push.digest for push in self._journal.pushes.values()}
        left = {step.digest: str(step.step) for step in steps if step.digest not in reported}
        if left:
            self._passed_over |= left.keys()
            why = "they were saved before a step that is pushed, or training went back from them"
            self._emit("warning", None, message=f"not pushed: {', '.join(left.values())}; {why}")

    def _release(self, digest: str) -> None:
        with suppress(CkptkitError):  # a mark in a store that cannot be reached expires
            self._marks.pop(digest).__exit__(None, None, None)

    def _push(self, step: RunStep, progress: Listener) -> None:
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
            tag=f"{self._hub.tag_prefix}{step.step}",
            save_number=step.save_number,
            metrics=dict(step.metrics),
            replaces=replaces,
        )
        try:
            commit = self._hub.find(push) or self._upload(step, push, progress)
            self._complete(push, commit, began)
        except OF_NO_STEP:
            raise
        except _OF_A_STEP as error:
            self._give_up(step, error)

    def _upload(self, step: RunStep, push: StepPush, progress: Listener) -> StepCommit:
        def begin() -> None:
            self._journal.note(push)
            self._emit("pushing", step.step, repo_id=push.repo_id)

        whole = self._settings.build.whole_folder(step.step)
        build = partial(self._build, step, progress)
        commit = self._hub.publish(step, push, whole, build, begin)
        left = [skip.path.removeprefix(f"{whole}/") for skip in commit.skipped]
        left = [path for path in left if PurePosixPath(path).name != NEVER]
        if left:
            names = redact_secrets(", ".join(left[:_LISTED]))
            more = f" and {len(left) - _LISTED:,} more" if len(left) > _LISTED else ""
            text = f"not pushed with the step: {names}{more}"
            text += "; --include GLOB adds files without secrets"
            self._emit("warning", step.step, message=text)
        return commit

    def _build(self, step: RunStep, progress: Listener) -> Path:
        """Returns the folder to push; after a failed push it is still built."""
        folder = self._work / f"step-{step.step}"
        if self._built_digest == step.digest:
            return folder
        self._remove_built()  # of another step, whose push failed
        self._emit("building", step.step)
        notes = build_folder(
            self._run.place_of(step), folder, step.step, self._settings.build, progress
        )
        for note in notes:
            self._emit(event_of_note(note), step.step, message=note)
        self._built_digest = step.digest
        return folder

    def _remove_built(self) -> None:
        self._built_digest = ""
        shutil.rmtree(self._work, ignore_errors=True)

    def _complete(self, push: StepPush, commit: StepCommit, began: float) -> None:
        """Tags the commit, and records that the step is pushed."""
        push = replace(push, tag=self._hub.tag(push, commit))
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        done = replace(push, state="pushed", commit=commit.commit, url=commit.url, at=at)
        self._journal.note(replace(done, size_bytes=commit.uploaded_bytes))
        self._has_pushed = True
        self._waiting_steps = tuple(one for one in self._waiting_steps if one != push.step)
        self._remove_built()
        seconds = round(time.monotonic() - began, 3)
        self._emit_pushed(push, commit, seconds=seconds, resumed=not commit.is_new)

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

    def _give_up(self, step: RunStep, error: CkptkitError) -> None:
        if isinstance(error, InputError) and not self._run.is_there(step):
            self._emit("passed", step.step, reason="it was removed from the run, or replaced")
            return
        error = advise(error)
        self._remove_built()
        self._failed[step.step] = step.digest
        self.failures[step.step] = error
        push = self._journal.pushes.get(step.step)
        if push is not None and push.state == "pushing":
            self._take_back(push)
        self._emit("failed", step.step, error=error.to_json())

    def _take_back(self, push: StepPush) -> None:
        """Removes a push from the journal, or puts back the push of an earlier save of the step."""
        if push.replaces:
            earlier = replace(push, state="pushed", digest="", commit=push.replaces, replaces="")
            self._journal.note(earlier)
        else:
            self._journal.forget(push.step)

    def _emit(self, name: EventName, step: int | None, **facts: Any) -> None:
        self._listener(WatchEvent(name, step, facts))


class Retries:
    """Waits after errors that may pass by themselves, and raises the others.

    Attributes:
        failed: How many attempts in a row have failed; from the end on they are counted anew.
    """

    def __init__(self, policy: RetryPolicy, pauses: Pauses, listener: WatchListener) -> None:
        self.failed = 0
        self._policy = policy
        self._pauses = pauses
        self._listener = listener
        self._is_ending = False

    def wait_after(self, error: CkptkitError, *, ending: bool) -> None:
        if ending and not self._is_ending:
            self._is_ending, self.failed = True, 0
        self.failed += 1
        is_last = ending and self.failed >= self._policy.attempts
        if is_last or not is_transient(error):
            raise error
        seconds = self._policy.wait_seconds(self.failed)
        facts = {"error": error.to_json(), "tries": self.failed, "seconds": seconds}
        self._listener(WatchEvent("retrying", None, facts))
        self._pauses.wait(seconds)


def _text_of(error: CkptkitError) -> str:
    return redact_secrets(f"{error} ({error.hint})" if error.hint else str(error))


_LOCK_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """A run to watch, and the repository to push to.

    Attributes:
        run: The directory or URL that steps are saved in.
        repo_id: The repository; with `versions`, the location of their folder.
        state: The folder of journal and lock; by default inside a local run.
        settings: Which steps are pushed, and how.
        branch: The branch of the repository.
        tag_prefix: What comes before the number in the names of tags.
        retention: Which steps stay in the run after a push; all without a rule.
        versions: The folder to publish versions into, instead of a repository.
        token: Of the Hub; that of the environment or of the last login by default.
        endpoint: Of the Hub; that of the environment by default.
        waits_for_lock: Whether to wait for another watch of the run to end, instead of refusing.
    """

    run: PathLike
    repo_id: str
    state: Path | None = None
    settings: WatchSettings = dataclasses.field(default_factory=WatchSettings)
    branch: BranchSettings = dataclasses.field(default_factory=BranchSettings)
    tag_prefix: str = TAG_PREFIX
    retention: Retention = dataclasses.field(default_factory=Retention)
    versions: VersionSettings | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    endpoint: str | None = None
    waits_for_lock: bool = False


def run_watch(
    request: WatchRequest, pauses: Pauses, listener: WatchListener, progress: Listener
) -> Watch:
    """Watches a run until the end is requested and no step waits.

    Args:
        request: What to watch.
        pauses: Waits between two listings, and requests the end.
        listener: Receives all events.
        progress: Receives progress events of builds and uploads.

    Returns:
        The watch; its `failures` are the steps that could not be pushed.
    """
    check_tag(f"{request.tag_prefix}1")
    if request.versions is not None:
        request.versions.refuse_inside(request.run)
    state = state_folder(request)
    with ExitStack() as stack:
        stack.enter_context(_take_lock(request, state, pauses, listener))
        hub = None
        if request.versions is None:
            stack.enter_context(quiet_client())
            hub = _open_hub(request, state, pauses, listener)
        repo_id = request.repo_id if hub is None else hub.repo_id
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
        destination: Destination
        if hub is not None:
            destination = PushedSteps(hub, request.branch, request.tag_prefix, progress)
        else:
            destination = _open_versions(request, run, identity, listener, progress)
        prune = None if request.retention.keeps_all else partial(_prune, request, state)
        watch = Watch(run, journal, destination, request.settings, listener, prune)
        stack.callback(watch.close)
        watch.run(pauses, progress)
    return watch


def _open_hub(request: WatchRequest, state: Path, pauses: Pauses, listener: WatchListener) -> Hub:
    """Returns the repository with its owner, for whom the Hub may have to be asked."""
    retries = Retries(request.settings.retries, pauses, listener)
    while True:
        ending = pauses.ending
        try:
            hub = Hub(request.repo_id, token=request.token, endpoint=request.endpoint)
            hub.resolve_owner()
        except CkptkitError as error:
            pushed = {push.step for push in read_journals(state) if push.state == "pushed"}
            with suppress(InputError):
                complete = (step.step for step in WatchedRun(request.run, state).look())
                waiting = tuple(step for step in complete if step not in pushed)
                why = _text_of(error)
                write_status(state, WatchStatus(request.repo_id, waiting, problem=why))
            retries.wait_after(error, ending=ending)
        else:
            return hub


def _open_versions(
    request: WatchRequest,
    run: WatchedRun,
    identity: str,
    listener: WatchListener,
    progress: Listener,
) -> PublishedVersions:
    def warn(step: int, text: str) -> None:
        listener(WatchEvent("warning", step, {"message": text}))

    assert request.versions is not None  # noqa: S101  asked by the caller
    return PublishedVersions(
        request.versions, run, identity, request.settings.build, warn, progress
    )


def state_folder(request: WatchRequest) -> Path:
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


def _prune(request: WatchRequest, state: Path) -> Sequence[int]:
    result = prune_run(request.run, request.retention, state=state)
    if result.failed:
        first = result.failed[0]
        raise OutputError(first.why, where=first.step.name)
    return [step.step for step in result.removed]


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
