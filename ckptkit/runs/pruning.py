"""`ckptkit.prune`: removes the steps of a run that no rule keeps, and nothing that is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.errors import CkptkitError, OutputError, RefusedError, UsageError
from ckptkit.runs.listing import RunListing, list_run
from ckptkit.runs.local import RunStore, StoredFile
from ckptkit.runs.run_paths import open_run
from ckptkit.runs.save_order import Retention, missing_metric, steps_to_remove
from ckptkit.runs.steps import RunStep, abandoned
from ckptkit.storage.places import PathLike

Action = Literal["keep", "remove", "failed"]

NEWEST = "the newest complete step"


@dataclass(frozen=True, slots=True)
class PrunedStep:
    """What became of a step.

    Attributes:
        step: The step.
        action: `remove` for one that is gone, or would be in a dry run; `failed` for one that
            should be, and is not.
        why: The reason, in words.
    """

    step: RunStep
    action: Action
    why: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """What became of a run.

    Attributes:
        location: The run as it was given.
        dry_run: Whether nothing was removed, only said.
        steps: All steps, the lowest number first.
        freed_bytes: What the removed steps took; files that remaining steps share do not count.
        cleared: Names of steps whose interrupted removal was brought to its end.
        notes: What the user should know.
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
        return tuple(one.step for one in self.steps if one.action == "remove")

    @property
    def failed(self) -> tuple[PrunedStep, ...]:
        """The steps that should be gone, and are not."""
        return tuple(one for one in self.steps if one.action == "failed")

    def to_json(self, *, now: float) -> dict[str, Any]:
        """Returns the report as plain values."""
        return {
            "run": self.location,
            "dry_run": self.dry_run,
            "removed": [step.step for step in self.removed],
            "failed": [one.step.step for one in self.failed],
            "freed_bytes": self.freed_bytes,
            "cleared": list(self.cleared),
            "steps": [
                one.step.to_json(now=now) | {"action": one.action, "why": one.why}
                for one in self.steps
            ],
            "notes": list(self.notes),
        }


def prune_run(
    run: PathLike,
    retention: Retention,
    *,
    protected: Collection[int] = (),
    dry_run: bool = False,
    state: PathLike | None = None,
) -> Pruned:
    """Removes the steps of a run that no rule keeps.

    Whatever the rules say, these stay: the newest complete step, steps that are not complete,
    steps that somebody reads or pushes at this moment, and the one that a Trainer calls its best.
    A kill at any moment leaves each step whole or gone, and the next pruning clears up after it.

    Args:
        run: The directory that the steps lie in, on any storage.
        retention: The rules; steps of one kind of name are counted together.
        protected: Numbers of further steps that stay.
        dry_run: Whether to say only what would be done.
        state: Where a watch of the run keeps its state, if not in the run itself.

    Returns:
        What became of each step.
    """
    if retention.keeps_all:
        raise UsageError(
            "no rule says which steps stay", where="prune", hint="pass --keep-last N, such as 3"
        )
    store = open_run(run)
    listing = list_run(run, state=state)
    verdicts = _Verdicts(listing, retention, frozenset(protected)).all()
    return _Pruning(store, listing, verdicts).run(dry_run=dry_run)


class _Verdicts:
    """Says of each step whether it stays, and why."""

    def __init__(
        self, listing: RunListing, retention: Retention, protected: frozenset[int]
    ) -> None:
        self._listing = listing
        self._retention = retention
        self._protected = protected
        self._newest_files = frozenset(_with_newest_files(listing.steps))

    def all(self) -> list[PrunedStep]:
        self._refuse_unknown_metric()
        series: dict[str, list[RunStep]] = {}
        for step in self._listing.steps:
            series.setdefault(step.series, []).append(step)
        found = [verdict for steps in series.values() for verdict in self._of_series(steps)]
        return sorted(found, key=lambda one: (one.step.step, one.step.name))

    def _of_series(self, steps: Sequence[RunStep]) -> Iterator[PrunedStep]:
        judged = [replace(step, protected=bool(self._protection(step))) for step in steps]
        gone = set(steps_to_remove(judged, self._retention))
        rules = {why: set(steps_to_remove(steps, rule)) for why, rule in self._rules()}
        left = abandoned(steps)
        for step in steps:
            if step.complete and step.step in gone:
                why = "training went back from it" if step.step in left else "no rule keeps it"
                yield PrunedStep(step, "remove", why)
            else:
                yield PrunedStep(step, "keep", self._why_kept(step, rules))

    def _why_kept(self, step: RunStep, rules: Mapping[str, set[int]]) -> str:
        if not step.complete:
            return f"not complete: {step.problem}"
        rule = next((why for why, removed in rules.items() if step.step not in removed), "")
        return rule if rule == NEWEST else self._protection(step) or rule

    def _protection(self, step: RunStep) -> str:
        pushing = next((push for push in step.pushes if push.state == "pushing"), None)
        if pushing is not None:
            return f"its push to {pushing.repo_id} has begun"
        if step.name in self._listing.best:
            return "the Trainer calls it the best"
        if step.name in self._newest_files:
            return "its files are the newest"
        return "it was asked for" if step.step in self._protected else ""

    def _rules(self) -> Iterator[tuple[str, Retention]]:
        """Yields each rule by itself, so that it can be named."""
        wanted = self._retention
        yield NEWEST, Retention(keep_last=1)
        if wanted.keep_last is not None:
            yield f"among the last {wanted.keep_last}", Retention(keep_last=wanted.keep_last)
        if wanted.keep_every is not None:
            yield f"every {wanted.keep_every:,} steps", Retention(keep_every=wanted.keep_every)
        if wanted.keep_best is not None:
            why = f"the best {wanted.keep_best}"
            yield why, replace(wanted, keep_last=None, keep_every=None)

    def _refuse_unknown_metric(self) -> None:
        steps = self._listing.steps
        if not missing_metric(steps, self._retention):
            return
        known = sorted({name for step in steps for name in step.metrics})
        raise RefusedError(
            "no complete step was saved with a number as that metric;"
            f" {'found are ' + ', '.join(known) if known else 'no step has any'}",
            where=f"--keep-best {self._retention.keep_best}",
            hint="name one that `ckptkit ls` shows",
        )


def _with_newest_files(steps: Sequence[RunStep]) -> Iterator[str]:
    """Yields the step of each series whose files are the newest, if no number tells its order.

    It may be the one that training goes on from, where training went back.
    """
    for series in {step.series for step in steps}:
        complete = [step for step in steps if step.complete and step.series == series]
        if complete and not any(step.save_number for step in complete):
            yield max(complete, key=lambda step: (step.modified, step.step)).name


class _Pruning:
    """Carries the verdicts out."""

    def __init__(
        self, store: RunStore, listing: RunListing, verdicts: Sequence[PrunedStep]
    ) -> None:
        self._store = store
        self._listing = listing
        self._verdicts = verdicts
        self._newest = {one.step.series: one.step for one in verdicts if one.why == NEWEST}

    def run(self, *, dry_run: bool) -> Pruned:
        notes = list(self._listing.notes)
        try:
            cleared = tuple(self._store.clear_up(remove=not dry_run))
        except OutputError as error:
            cleared = ()
            notes.append(str(error))
        steps = tuple(self._carried_out(one, dry_run=dry_run) for one in self._verdicts)
        gone = [one.step for one in steps if one.action == "remove"]
        return Pruned(
            location=self._listing.location,
            dry_run=dry_run,
            steps=steps,
            freed_bytes=_freed(file for step in gone for file in step.files),
            cleared=cleared,
            notes=tuple(notes),
        )

    def _carried_out(self, verdict: PrunedStep, *, dry_run: bool) -> PrunedStep:
        if verdict.action != "remove":
            return verdict
        step = verdict.step
        try:
            if dry_run:
                is_free = not self._store.in_use(step.name, step.markers)
            else:
                is_free = self._removed(step)
        except CkptkitError as error:
            return PrunedStep(step, "failed", error.message)
        return verdict if is_free else PrunedStep(step, "keep", "it is being read")

    def _removed(self, step: RunStep) -> bool:
        mark = self._store.claim(step.name, step.markers, step.files)
        if mark is None:
            return False
        with mark:
            self._check_newest(step)
            self._store.remove(step.name, step.files)
        return True

    def _check_newest(self, step: RunStep) -> None:
        """Refuses to go on where somebody else has removed what is to stay."""
        newest = self._newest[step.series]
        if not all(self._store.is_there(path) for path in newest.markers):
            raise RefusedError(
                f"it stays, since the newest complete step, {newest.name}, is gone meanwhile",
                where=self._listing.location,
                hint="see who else prunes the run, and run again",
            )


def _freed(files: Iterable[StoredFile]) -> int:
    """Returns what goes with files: one with further names that stay takes its room as before."""
    gone = list(files)
    names = Counter(file.inode for file in gone if file.inode)
    freed = {
        file.inode or file.path: file.size_bytes
        for file in gone
        if not file.inode or names[file.inode] >= file.links
    }
    return sum(freed.values())
