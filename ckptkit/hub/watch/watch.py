"""A sidecar of training: each committed step becomes one commit and one tag at the Hub.

Which failures pass by themselves, which are a step's own, and how long to wait for the others.

What is neither, such as wrong credentials, ends a watch: no step could ever be pushed.

What a watch tells whoever listens, and what that adds up to.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from ckptkit.core.errors import (
    AccessError,
    CkptkitError,
    HubUnavailableError,
    InputError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    RefusedError,
    StorageError,
    VerificationError,
)
from ckptkit.core.retries import RetryPolicy
from ckptkit.engine.outcome import Listener
from ckptkit.hub.publish.folder_files import NEVER
from ckptkit.hub.publish.secrets import redact_secrets
from ckptkit.hub.watch.build import BuildSettings, PushChoice, build_folder, choose_steps
from ckptkit.hub.watch.events import EventName, WatchEvent, WatchListener
from ckptkit.hub.watch.hub_branch import PushedSteps, StepCommit
from ckptkit.hub.watch.watched_run import WatchedRun
from ckptkit.runs.push_journal import PushJournal, StepPush
from ckptkit.runs.steps import RunStep


def is_transient(error: CkptkitError) -> bool:
    """Returns whether another try may succeed though nobody has changed anything."""
    if isinstance(error, AccessError):
        return False
    return isinstance(error, HubUnavailableError | NoSpaceError | InputError)


def is_step_error(error: CkptkitError) -> bool:
    """Returns whether a step cannot be pushed as it is, while others may well be."""
    if isinstance(error, AccessError | NoSpaceError | OutputError | StorageError):
        return False
    return isinstance(error, InputError | RefusedError | OutputExistsError | VerificationError)


WATCH_RETRIES = RetryPolicy(
    attempts=6, first_wait_seconds=2.0, longest_wait_seconds=300.0, jitter=0.0
)
"""Failed looks of a watch are repeated without an end; `attempts` counts once it is to end."""
_WORK = "work"
_LISTED = 5  # of files that were not pushed
_MOST_MARKS = 32  # each takes a descriptor or two


class Pauses(Protocol):
    """Where a watch waits: for time to pass, or for its end."""

    @property
    def ending(self) -> bool:
        """Whether it ends as soon as nothing waits to be pushed."""
        ...

    def wait(self, seconds: float) -> None:
        """Waits, at most so long: less when there may be news."""
        ...


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How a run is watched.

    Attributes:
        choice: Which steps are pushed.
        making: What is made of a step.
        poll_seconds: How often the run is looked at.
        retries: How long to wait after a failed look, and how many are made at the end.
        at_end: Whether nothing is pushed before the end.
        settle_seconds: How long the end waits for steps that others are writing.
        metrics: Metrics that a rule needs, by the option that names them. Where no step has one,
            a watch that is to end is refused, and another one warns.
        needs_steps: Whether a watch is an error that ends without having seen a complete step.
    """

    choice: PushChoice = field(default_factory=PushChoice)
    making: BuildSettings = field(default_factory=BuildSettings)
    poll_seconds: float = 5.0
    retries: RetryPolicy = WATCH_RETRIES
    at_end: bool = False
    settle_seconds: float = 120.0
    metrics: Mapping[str, str] = field(default_factory=dict)
    needs_steps: bool = False


class Watch:
    """Pushes the steps of one run, one after another, until nothing is left to be done.

    Attributes:
        failures: What could not be pushed as it is, by step.
    """

    def __init__(
        self,
        run: WatchedRun,
        journal: PushJournal,
        hub: PushedSteps,
        settings: WatchSettings,
        listener: WatchListener,
    ) -> None:
        """Takes what it works with; the lock of the run is the caller's.

        Args:
            run: What is watched.
            journal: What was pushed before; what is built lies in a folder beside it.
            hub: Where it goes.
            settings: How.
            listener: Is told of everything.
        """
        self.failures: dict[int, CkptkitError] = {}
        self._run = run
        self._journal = journal
        self._hub = hub
        self._settings = settings
        self._tell = listener
        self._work = journal.path.with_suffix(f".{_WORK}")
        self._failed: dict[int, str] = {}  # digests of steps that cannot be pushed as they are
        self._announced: dict[int, str] = {}
        self._marks: dict[str, AbstractContextManager[object]] = {}
        self._prune: Callable[[], Sequence[int]] | None = None
        self._is_built = ""  # the digest of the step whose folder is there
        self._passed_over: set[str] = set()  # digests of steps that were told of
        self._has_begun = False
        self._settling_since = 0.0
        self._told_of_metrics: set[str] = set()
        self._has_pushed = False  # since steps were last pruned

    def pruning(self, prune: Callable[[], Sequence[int]]) -> None:
        """Has steps removed after each push; `prune` does it, and returns which."""
        self._prune = prune

    def run(self, pauses: Pauses, progress: Listener) -> None:
        """Watches until it is to end and nothing waits any more.

        Args:
            pauses: Where it waits.
            progress: Is told of the bytes of what is made and pushed.
        """
        failed = 0
        while True:
            ending = pauses.ending  # asked first: what was committed before is seen by this look
            try:
                is_idle = self._go_on(progress, ending=ending)
            except CkptkitError as error:
                failed += 1
                is_last = ending and failed >= self._settings.retries.attempts
                if is_last or not is_transient(error):
                    raise
                self._wait_after(error, failed, pauses)
                continue
            failed = 0
            if is_idle and ending:
                if not self._settles(pauses):
                    self._check_seen()
                    return
                continue
            if is_idle:
                pauses.wait(self._settings.poll_seconds)

    def _settles(self, pauses: Pauses) -> bool:
        """Waits for steps that may still be written to; tells whether there were any."""
        pushed = {push.digest for push in self._journal.pushes.values()}
        found = self._run.unsettled.items()
        unsettled = [name for name, digest in found if digest not in pushed]
        if not unsettled:
            return False
        names = ", ".join(unsettled[:_LISTED])
        now = time.monotonic()
        if not self._settling_since:
            self._settling_since = now
            text = f"{names}: written less than a minute ago; waiting until it stays the same"
            self._say("waiting", None, message=text, steps=unsettled)
        if now - self._settling_since > self._settings.settle_seconds:
            raise RefusedError(
                f"{names}: still written to after {self._settings.settle_seconds:g} s",
                where=names,
                hint="run it again once the save has finished",
            )
        pauses.wait(0)  # the end itself counts as news, and a step has to stay the same for longer
        pauses.wait(self._settings.poll_seconds)
        return True

    def _check_seen(self) -> None:
        """Refuses to call it done where there was never a step to push.

        A run of which all steps were pushed and removed is done.
        """
        absence = self._run.absence
        if self._settings.needs_steps and absence is not None and not self._journal.pushes:
            raise absence

    def close(self) -> None:
        """Lets go of steps that wait, and removes what was built and not pushed."""
        for digest in list(self._marks):
            self._let_go(digest)
        self._remove_built()

    def _go_on(self, progress: Listener, *, ending: bool) -> bool:
        """Does what is to be done next, and tells whether there was nothing."""
        if not self._has_begun:
            if not ending:  # a token that is wrong is told before the first step has to wait
                self._hub.check()
            self._finish_what_was_begun()
            self._has_begun = True
        steps = self._run.look()
        self._check_metrics(steps, ending=ending)
        waiting = self._waiting(steps)
        self._announce(steps, waiting)
        self._tell_of_passed_over(steps, waiting)
        if waiting and (ending or not self._settings.at_end):
            self._push(waiting[0], progress)
            return False
        if self._has_pushed:
            self._has_pushed = False
            self._remove_old()
        return True

    def _finish_what_was_begun(self) -> None:
        """Finds out what became of pushes that a kill interrupted, also of steps that are gone."""
        self._remove_built()
        for push in list(self._journal.pushes.values()):
            if push.state == "pushed":
                continue
            try:
                found = self._hub.find(push)
            except RefusedError:
                found = None  # its tag is another's; that is told when the step is pushed again
            if found is None:
                self._take_back(push)
            else:
                self._settle(push, found, time.monotonic())

    def _waiting(self, steps: Sequence[RunStep]) -> list[RunStep]:
        digests = {step.step: step.digest for step in steps}
        earlier = {
            step: push for step, push in self._journal.pushes.items() if push.state == "pushed"
        }
        by_number = {step.step: step for step in steps}
        numbers = choose_steps(steps, digests, earlier, self._settings.choice)
        return [by_number[n] for n in numbers if self._failed.get(n) != digests[n]]

    def _check_metrics(self, steps: Sequence[RunStep], *, ending: bool) -> None:
        pushed = [push.metrics for push in self._journal.pushes.values()]
        found = [*(step.metrics for step in steps), *pushed]
        known = sorted({name for metrics in found for name in metrics})
        for option, name in self._settings.metrics.items():
            if not steps or any(metrics.get(name) is not None for metrics in found):
                continue
            error = RefusedError(
                "no complete step was saved with a number as that metric;"
                f" {'found are ' + ', '.join(known) if known else 'no step has any'}",
                where=f"{option} {name}",
                hint="name one that `ckptkit ls` shows",
            )
            if ending and not self._run.unsettled:
                raise error
            if option not in self._told_of_metrics:
                self._told_of_metrics.add(option)
                self._say("warning", None, message=f"{error} ({error.hint})")

    def _announce(self, steps: Sequence[RunStep], waiting: Sequence[RunStep]) -> None:
        """Tells of steps that wait, and keeps them from being pruned until they are pushed."""
        counts = {"waiting": len(waiting), "newest": max((s.step for s in steps), default=None)}
        for step in waiting:
            if self._announced.get(step.step) != step.digest:
                self._announced[step.step] = step.digest
                self._say("seen", step.step, digest=step.digest, **counts)
        wanted = {step.digest: step for step in waiting[:_MOST_MARKS]}
        for digest in self._marks.keys() - wanted.keys():
            self._let_go(digest)
        for digest in wanted.keys() - self._marks.keys():
            with suppress(InputError):  # it is gone; the next look tells
                mark = self._run.hold(wanted[digest])
                mark.__enter__()
                self._marks[digest] = mark

    def _tell_of_passed_over(self, steps: Sequence[RunStep], waiting: Sequence[RunStep]) -> None:
        """Tells of steps that no rule leaves out, and that are not pushed for their order."""
        if self._settings.choice != PushChoice():
            return
        told = {step.digest for step in waiting} | self._passed_over | set(self._failed.values())
        told |= {push.digest for push in self._journal.pushes.values()}
        left = {step.digest: str(step.step) for step in steps if step.digest not in told}
        if left:
            self._passed_over |= left.keys()
            why = "they count as saved before one that is pushed, or training went back from them"
            self._say("warning", None, message=f"not pushed: {', '.join(left.values())}; {why}")

    def _let_go(self, digest: str) -> None:
        with suppress(CkptkitError):  # a mark on a store that is gone ends by itself
            self._marks.pop(digest).__exit__(None, None, None)

    def _push(self, step: RunStep, progress: Listener) -> None:
        began = time.monotonic()
        push = self._begun(step)
        try:
            found = self._hub.find(push)
            if found is None:
                found = self._upload(step, push, progress)
            self._settle(push, found, began)
        except CkptkitError as error:
            if not is_step_error(error):
                raise
            self._give_up(step, error)

    def _begun(self, step: RunStep) -> StepPush:
        earlier = self._journal.pushes.get(step.step)
        replaces = ""
        if earlier is not None:
            replaces = earlier.commit if earlier.state == "pushed" else earlier.replaces
        return StepPush(
            step=step.step,
            digest=step.digest,
            state="pushing",
            repo_id=self._journal.repo_id,
            tag=self._hub.tag_of(step.step),
            save_number=step.save_number,
            metrics=dict(step.metrics),
            replaces=replaces,
        )

    def _upload(self, step: RunStep, push: StepPush, progress: Listener) -> StepCommit:
        folder = self._built(step, progress)
        self._journal.note(push)
        self._say("pushing", step.step, repo_id=push.repo_id)
        whole = self._settings.making.whole_folder(step.step)
        found = self._hub.push(folder, push, whole)
        left = [one.path.removeprefix(f"{whole}/") for one in found.skipped]
        left = [path for path in left if PurePosixPath(path).name != NEVER]
        if left:
            self._say("warning", step.step, message=_text_of_skipped(left))
        return found

    def _built(self, step: RunStep, progress: Listener) -> Path:
        """Returns the folder to be pushed; after a push that failed it is there already."""
        folder = self._work / f"step-{step.step}"
        if self._is_built == step.digest:
            return folder
        self._remove_built()  # of another step, whose push failed
        self._say("building", step.step)
        made = build_folder(
            self._run.place_of(step), folder, step.step, self._settings.making, progress
        )
        for note in made.notes:
            self._say("warning", step.step, message=note)
        self._is_built = step.digest
        return folder

    def _remove_built(self) -> None:
        self._is_built = ""
        shutil.rmtree(self._work, ignore_errors=True)

    def _settle(self, push: StepPush, found: StepCommit, began: float) -> None:
        """Has the tag point to the commit, and writes down that the step is pushed."""
        self._hub.tag(push, found)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        done = replace(push, state="pushed", commit=found.commit, url=found.url, at=at)
        self._journal.note(replace(done, size_bytes=found.uploaded_bytes))
        self._has_pushed = True
        self._remove_built()
        self._say(
            "pushed",
            push.step,
            repo_id=push.repo_id,
            commit=found.commit,
            tag=push.tag,
            url=found.url,
            uploaded_bytes=found.uploaded_bytes,
            seconds=round(time.monotonic() - began, 3),
            resumed=not found.is_new,
        )

    def _give_up(self, step: RunStep, error: CkptkitError) -> None:
        if isinstance(error, InputError) and not self._run.is_there(step):
            self._say("passed", step.step, reason="it was removed from the run, or replaced")
            return
        self._remove_built()
        self._failed[step.step] = step.digest
        self.failures[step.step] = error
        push = self._journal.pushes.get(step.step)
        if push is not None and push.state == "pushing":
            self._take_back(push)
        self._say("failed", step.step, error=error.to_json())

    def _take_back(self, push: StepPush) -> None:
        """Notes that a push came to nothing; an earlier save of the step may still be there."""
        if push.replaces:
            earlier = replace(push, state="pushed", digest="", commit=push.replaces, replaces="")
            self._journal.note(earlier)
        else:
            self._journal.forget(push.step)

    def _remove_old(self) -> None:
        if self._prune is None:
            return
        try:
            removed = self._prune()
        except CkptkitError as error:
            self._say("warning", None, message=f"nothing was removed from the run: {error}")
            return
        if removed:
            self._say("pruned", None, steps=list(removed))

    def _wait_after(self, error: CkptkitError, failed: int, pauses: Pauses) -> None:
        seconds = self._settings.retries.wait_seconds(failed)
        self._say("retrying", None, error=error.to_json(), tries=failed, seconds=seconds)
        pauses.wait(seconds)

    def _say(self, name: EventName, step: int | None, **facts: Any) -> None:
        self._tell(WatchEvent(name, step, facts))


def _text_of_skipped(paths: Sequence[str]) -> str:
    names = redact_secrets(", ".join(paths[:_LISTED]))
    more = f" and {len(paths) - _LISTED:,} more" if len(paths) > _LISTED else ""
    return f"not pushed with the step: {names}{more}; --include GLOB adds files without secrets"
