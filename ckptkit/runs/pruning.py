"""`ckptkit.prune`: removes the steps of a run that no rule keeps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.display import Displayed, Facts
from ckptkit.core.errors import CkptkitError, OutputError, RefusedError, UsageError
from ckptkit.core.text import counted, size_text
from ckptkit.engine.outcome import BytesWritten, Listener, Started, ignore
from ckptkit.runs.listing import OF_SOME_RANKS, OF_UNREAD, RunListing, list_run
from ckptkit.runs.local_run import RunStore, open_run
from ckptkit.runs.retention import (
    NEWEST,
    RATING,
    SPARED,
    Retention,
    missing_metric,
    rules_that_keep,
    steps_to_remove,
    unknown_metric,
)
from ckptkit.runs.steps import RunStep, abandoned, bytes_of, freed_bytes
from ckptkit.storage.places import PathLike

Action = Literal["keep", "remove", "failed"]

_SETTLED_SECONDS = 600.0  # after which nothing is still saving a step


class PrunedStep(Struct, frozen=True):
    """The decision on a step, and its result.

    Attributes:
        step: The step.
        action: `remove` if it was removed, or would be in a dry run; `failed` if its removal
            failed.
        why: The reason, as a text.
    """

    step: RunStep
    action: Action
    why: str


class Pruned(Displayed, Struct, frozen=True):
    """The result of pruning a run.

    Attributes:
        location: The run as it was given.
        dry_run: Whether nothing was removed.
        steps: All steps, the lowest number first.
        freed_bytes: The size of the removed files; files that remaining steps share do not count.
        cleared: Names of steps whose interrupted removal was finished.
        notes: Messages for the user.
    """

    location: str
    dry_run: bool
    steps: tuple[PrunedStep, ...]
    freed_bytes: int
    cleared: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        raise ambiguous_truth(self, "pruned.removed or pruned.failed")

    @property
    def removed(self) -> tuple[RunStep, ...]:
        return tuple(pruned.step for pruned in self.steps if pruned.action == "remove")

    @property
    def failed(self) -> tuple[PrunedStep, ...]:
        """The steps whose removal failed."""
        return tuple(pruned for pruned in self.steps if pruned.action == "failed")

    def _facts(self) -> Facts:
        verb = "would be removed" if self.dry_run else "removed"
        done = f"{counted(len(self.removed), 'step')} {verb}, {size_text(self.freed_bytes)}"
        failed = f"{counted(len(self.failed), 'step')} not removed" if self.failed else ""
        rows = [(one.step.name, one.action, one.why) for one in self.steps]
        lines = [("result", done), ("failed", failed)]
        return Facts(self.location, lines, ("step", "action", "why"), rows)

    def to_json(self, *, now: float) -> dict[str, Any]:
        return {
            "run": self.location,
            "dry_run": self.dry_run,
            "removed": [step.step for step in self.removed],
            "failed": [pruned.step.step for pruned in self.failed],
            "freed_bytes": self.freed_bytes,
            "cleared": list(self.cleared),
            "steps": [
                pruned.step.to_json(now=now) | {"action": pruned.action, "why": pruned.why}
                for pruned in self.steps
            ],
            "notes": list(self.notes),
        }


def prune_run(
    run: PathLike,
    retention: Retention,
    *,
    dry_run: bool = False,
    state: PathLike | None = None,
    incomplete: bool = False,
    most_bytes: int | None = None,
    listener: Listener = ignore,
) -> Pruned:
    """Removes the steps of a run that no rule keeps.

    Whatever the rules say, these stay: the newest complete step, incomplete steps, steps that are
    being read or pushed, the best step of a Trainer, and the step that a tracker names. After a
    kill each step is complete or gone, and the next pruning finishes the removal.

    With `incomplete`, incomplete steps go too, if nothing writes to them any more. With
    `most_bytes`, the oldest go until all together take no more than that.
    """
    if retention.keeps_all and not incomplete and most_bytes is None:
        raise UsageError(
            "no rule says which steps stay",
            where="prune",
            hint="pass --keep-last N, such as 3; --max-total-size SIZE, such as 500GB; or"
            " --incomplete",
        )
    store = open_run(run)
    listing = list_run(run, state=state)
    judge = _Verdicts(listing, retention, incomplete=incomplete)
    verdicts = judge.all()
    notes: list[str] = []
    if most_bytes is not None:
        verdicts, notes = judge.fit(verdicts, most_bytes)
    listing = replace(listing, notes=(*listing.notes, *notes))
    return _execute_all(store, listing, verdicts, judge.newest, listener, dry_run=dry_run)


class _Verdicts:
    """Decides for each step whether it stays, and why."""

    def __init__(self, listing: RunListing, retention: Retention, *, incomplete: bool) -> None:
        self._listing = listing
        self._removes_incomplete = incomplete
        self._now = time.time()
        self._retention = retention
        self.newest: dict[str, RunStep] = {}  # of each series
        self._movable: set[str] = set()  # stay, unless all together are over the limit of the size
        # The step of each series with the newest files, if its order is unknown: it may be the
        # current one, if training went back.
        self._newest_files: set[str] = set()
        for series in {step.series for step in listing.steps}:
            complete = [step for step in listing.steps if step.complete and step.series == series]
            if complete and not any(step.save_number for step in complete):
                newest = max(complete, key=lambda step: (step.modified, step.step))
                self._newest_files.add(newest.name)

    def all(self) -> list[PrunedStep]:
        if missing_metric(self._listing.steps, self._retention):
            where = f"--keep-best {self._retention.keep_best}"
            raise unknown_metric((step.metrics for step in self._listing.steps), where=where)
        series: dict[str, list[RunStep]] = {}
        for step in self._listing.steps:
            series.setdefault(step.series, []).append(step)
        verdicts = [verdict for steps in series.values() for verdict in self._of_series(steps)]
        return sorted(verdicts, key=lambda verdict: (verdict.step.step, verdict.step.name))

    def fit(self, verdicts: Sequence[PrunedStep], limit: int) -> tuple[list[PrunedStep], list[str]]:
        """Has the oldest steps removed until the others fit into the limit; returns notes too."""
        kept = {v.step.name: v for v in verdicts if v.action == "keep"}
        gone: set[str] = set()
        order = sorted(kept.values(), key=lambda v: (v.step.save_number, v.step.step))
        for verdict in order:
            if _size_of(kept.values()) <= limit:
                break
            if verdict.step.name in self._movable:
                gone.add(verdict.step.name)
                del kept[verdict.step.name]
        left = _size_of(kept.values())
        notes = []
        if left > limit:
            notes.append(f"{size_text(left)} stay, more than {size_text(limit)}: see why each does")
        why = f"all together are over {size_text(limit)}"
        return [
            PrunedStep(v.step, "remove", why) if v.step.name in gone else v for v in verdicts
        ], notes

    def _of_series(self, steps: Sequence[RunStep]) -> Iterator[PrunedStep]:
        judged = [replace(step, protected=bool(self._protection(step))) for step in steps]
        gone = set(steps_to_remove(judged, self._retention))
        kept = rules_that_keep(judged, self._retention)
        left = abandoned(steps)
        for step in steps:
            if step.complete and step.step in gone:
                why = "training went back from it" if step.step in left else "no rule keeps it"
                yield PrunedStep(step, "remove", why)
            elif step.complete:
                rules, protection = kept[step.step], self._protection(step)
                first = rules[0] if rules else RATING
                if first == NEWEST:
                    self.newest[step.series] = step
                if not protection and SPARED.isdisjoint(rules):
                    self._movable.add(step.name)
                why = self._retention.explain(first)
                yield PrunedStep(step, "keep", why if first == NEWEST else protection or why)
            else:
                stays = self._why_incomplete_stays(step, steps)
                action: Action = "keep" if stays else "remove"
                yield PrunedStep(step, action, stays or f"not complete: {step.problem}")

    def _why_incomplete_stays(self, step: RunStep, steps: Sequence[RunStep]) -> str:
        """Returns why an incomplete step is not removed; empty if it is."""
        problem = f"not complete: {step.problem}"
        complete = [one.step for one in steps if one.complete]
        if not self._removes_incomplete:
            return problem
        if not complete:
            return f"{problem}; no step is complete, and it may be all that is left"
        if step.problem.startswith((OF_SOME_RANKS, OF_UNREAD)):
            return problem
        if self._now - step.modified < _SETTLED_SECONDS:
            return "not complete, and was written to in the last 10 minutes"
        if self._listing.live and step.step > max(complete):
            return "not complete, and a job is writing to the run"
        return self._protection(step)

    def _protection(self, step: RunStep) -> str:
        pushing = next((push for push in step.pushes if push.state == "pushing"), None)
        if pushing is not None:
            return f"its push to {pushing.repo_id} has begun"
        if step.name in self._listing.best:
            return "the Trainer calls it the best"
        if step.name in self._listing.tracked:
            return "training would go on from it"
        return "its files are the newest" if step.name in self._newest_files else ""


def _size_of(verdicts: Iterable[PrunedStep]) -> int:
    return bytes_of(file for verdict in verdicts for file in verdict.step.files)


def _execute_all(
    store: RunStore,
    listing: RunListing,
    verdicts: Sequence[PrunedStep],
    newest: Mapping[str, RunStep],
    listener: Listener,
    *,
    dry_run: bool,
) -> Pruned:
    notes = list(listing.notes)
    try:
        cleared = tuple(store.clear_up(remove=not dry_run))
    except OutputError as error:
        cleared = ()
        notes.append(str(error))
    bound = [verdict.step for verdict in verdicts if verdict.action == "remove"]
    if bound and not dry_run:
        listener(Started(sum(step.size_bytes for step in bound)))
    steps = []
    for verdict in verdicts:
        if verdict.action != "remove":
            steps.append(verdict)
            continue
        try:
            if dry_run:
                is_free = not store.in_use(verdict.step.name, verdict.step.markers)
            else:
                is_free = _remove(store, verdict.step, newest[verdict.step.series])
            done = verdict if is_free else PrunedStep(verdict.step, "keep", "it is being read")
        except CkptkitError as error:
            done = PrunedStep(verdict.step, "failed", error.message)
        steps.append(done)
        if not dry_run:
            listener(BytesWritten(verdict.step.size_bytes))
    gone = [f for pruned in steps if pruned.action == "remove" for f in pruned.step.files]
    return Pruned(
        location=listing.location,
        dry_run=dry_run,
        steps=tuple(steps),
        freed_bytes=freed_bytes(gone),
        cleared=cleared,
        notes=tuple(notes),
    )


def _remove(store: RunStore, step: RunStep, newest: RunStep) -> bool:
    """Removes a step; returns whether it was not being read."""
    mark = store.claim(step.name, step.markers, step.files)
    if mark is None:
        return False
    with mark:
        if not all(store.is_there(path) for path in newest.markers):
            raise RefusedError(
                f"not removed, since {newest.name}, the newest complete step, is gone meanwhile",
                where=store.location,
                hint="check what else prunes the run, then run again",
            )
        store.remove(step.name, step.files)
    return True
