"""`ckptkit.prune`: removes the steps of a run that no rule keeps."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from posixpath import basename
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckptkit.core.arguments import ambiguous_truth
from ckptkit.core.display import Displayed, Facts
from ckptkit.core.errors import CkptkitError, OutputError, RefusedError, UsageError
from ckptkit.core.frameworks import is_optimizer_folder
from ckptkit.core.manifest import MANIFEST_NAME, SEALED, THINNED, parse_manifest
from ckptkit.core.text import counted, size_text
from ckptkit.engine.outcome import BytesWritten, Listener, Started, ignore
from ckptkit.formats.registry import recognise
from ckptkit.runs.listing import (
    OF_SOME_RANKS,
    OF_UNREAD,
    RunListing,
    is_of_optimizer,
    list_run,
)
from ckptkit.runs.local_run import RunStore, check_unchanged, open_run
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
from ckptkit.runs.step_manifests import OF_UNKNOWN
from ckptkit.runs.steps import (
    RunStep,
    StoredFile,
    abandoned,
    bytes_of,
    digest_files,
    freed_bytes,
    short_digest,
)
from ckptkit.storage.base import Source
from ckptkit.storage.places import PathLike, open_source

Action = Literal["keep", "remove", "thin", "failed"]

_SETTLED_SECONDS = 600.0  # after which nothing is still saving a step


class PrunedStep(Struct, frozen=True):
    """The decision on a step, and its result.

    Attributes:
        step: The step.
        action: `remove` if it was removed, or would be in a dry run; `thin` if its optimizer was;
            `failed` if that failed.
        why: The reason, as a text.
        dropped: The files of the optimizer that were removed.
    """

    step: RunStep
    action: Action
    why: str
    dropped: tuple[StoredFile, ...] = ()


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
    def thinned(self) -> tuple[RunStep, ...]:
        """The steps that have lost their optimizer."""
        return tuple(pruned.step for pruned in self.steps if pruned.action == "thin")

    @property
    def failed(self) -> tuple[PrunedStep, ...]:
        """The steps whose removal failed."""
        return tuple(pruned for pruned in self.steps if pruned.action == "failed")

    def _facts(self) -> Facts:
        verb = "would be removed" if self.dry_run else "removed"
        done = f"{counted(len(self.removed), 'step')} {verb}, {size_text(self.freed_bytes)}"
        thinned = f"{counted(len(self.thinned), 'step')} thinned" if self.thinned else ""
        failed = f"{counted(len(self.failed), 'step')} not removed" if self.failed else ""
        rows = [(one.step.name, one.action, one.why) for one in self.steps]
        lines = [("result", done), ("thinned", thinned), ("failed", failed)]
        return Facts(self.location, lines, ("step", "action", "why"), rows)

    def to_json(self, *, now: float) -> dict[str, Any]:
        return {
            "run": self.location,
            "dry_run": self.dry_run,
            "removed": [step.step for step in self.removed],
            "thinned": [step.step for step in self.thinned],
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
    whole_steps: int | None = None,
    listener: Listener = ignore,
) -> Pruned:
    """Removes the steps of a run that no rule keeps.

    Whatever the rules say, these stay: the newest complete step, incomplete steps, steps that are
    being read or pushed, the best step of a Trainer, and the step that a tracker names. After a
    kill each step is complete or gone, and the next pruning finishes the removal.

    With `incomplete`, incomplete steps go too, if nothing writes to them any more. With
    `most_bytes`, the oldest go until all together take no more than that. With `whole_steps`, of
    those that stay only so many of the newest keep their optimizer. A step whose manifest has lost
    the optimizer is thinned; the files go after that, and the next pruning removes what a kill has
    left.
    """
    if retention.keeps_all and not incomplete and most_bytes is None and whole_steps is None:
        raise UsageError(
            "no rule says which steps stay",
            where="prune",
            hint="pass --keep-last N, such as 3; --max-total-size SIZE, such as 500GB;"
            " --drop-optimizer-older-than N; or --incomplete",
        )
    store = open_run(run)
    listing = list_run(run, state=state)
    judge = _Verdicts(listing, retention, incomplete=incomplete)
    verdicts = judge.all()
    notes: list[str] = []
    if most_bytes is not None:
        verdicts, notes = judge.fit(verdicts, most_bytes)
    if whole_steps is not None:
        verdicts = judge.thin(verdicts, whole_steps)
    listing = replace(listing, notes=(*listing.notes, *notes))
    with open_source(run) as source:
        return _execute_all(
            store, source, listing, verdicts, judge.newest, listener, dry_run=dry_run
        )


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
            is_mixed = len({step.writer == "ckptkit" for step in complete}) > 1
            if complete and (is_mixed or not any(step.save_number for step in complete)):
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

    def thin(self, verdicts: Sequence[PrunedStep], whole: int) -> list[PrunedStep]:
        """Has steps lose their optimizer, except for so many of the newest of each series."""
        spared: set[str] = set()
        for series in {step.series for step in self._listing.steps}:
            complete = [one for one in self._listing.steps if one.complete and one.series == series]
            left = abandoned(complete)
            current = sorted((s for s in complete if s.step not in left), key=lambda s: s.step)
            spared |= {step.name for step in current[-whole:]}
        return [
            self._thin(one)
            if one.action == "keep" and one.step.complete and one.step.name not in spared
            else one
            for one in verdicts
        ]

    def _thin(self, verdict: PrunedStep) -> PrunedStep:
        step, protection = verdict.step, self._protection(verdict.step)
        files = find_optimizer(step)
        if files and not protection and step.has_manifest:
            return replace(verdict, action="thin", why="an older step", dropped=files)
        why = protection
        if step.thinned:
            why = "it is thinned"
        elif not files:
            why = "it has none in files of its own"
        elif not step.has_manifest:
            why = f"`ckptkit seal {shlex.quote(step.path)}` has to come first"
        return replace(verdict, why=f"{verdict.why}; optimizer: {why}")

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
        if step.problem.startswith((OF_SOME_RANKS, OF_UNREAD, OF_UNKNOWN)):
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


def find_optimizer(step: RunStep) -> tuple[StoredFile, ...]:
    """Returns the files of a step that are of the optimizer alone; of a thinned one, what is left.

    Frameworks that have weights and optimizer in the same files, as ZeRO and single DCP folders,
    have none.
    """
    inside = f"{step.name}/"
    if step.thinned:
        return tuple(f for f in step.files if f.path.removeprefix(inside) in step.thinned)
    candidates = recognise([file.path for file in step.files])
    own = [candidate for candidate in candidates if is_of_optimizer(candidate)]
    if len(own) == len(candidates):
        return ()
    folders = tuple(f"{c.folder}/" for c in own if is_optimizer_folder(basename(c.folder)))
    single = {path for candidate in own for path in candidate.files}
    return tuple(f for f in step.files if f.path in single or f.path.startswith(folders))


def _size_of(verdicts: Iterable[PrunedStep]) -> int:
    return bytes_of(file for verdict in verdicts for file in verdict.step.files)


def _execute_all(
    store: RunStore,
    source: Source,
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
    bound = {v.step.name: v.step.size_bytes for v in verdicts if v.action == "remove"}
    bound |= {v.step.name: bytes_of(v.dropped) for v in verdicts if v.action == "thin"}
    if bound and not dry_run:
        listener(Started(sum(bound.values())))
    steps = []
    for verdict in verdicts:
        if verdict.action not in {"remove", "thin"}:
            steps.append(verdict)
            continue
        try:
            if dry_run:
                is_free = not store.in_use(verdict.step.name, verdict.step.markers)
            elif verdict.action == "thin":
                is_free = _drop_optimizer(store, source, verdict)
            else:
                is_free = _remove(store, verdict.step, newest[verdict.step.series])
            done = verdict if is_free else PrunedStep(verdict.step, "keep", "it is being read")
        except CkptkitError as error:
            done = replace(verdict, action="failed", why=error.message)
        steps.append(done)
        if not dry_run:
            listener(BytesWritten(bound[verdict.step.name]))
    gone = [f for pruned in steps if pruned.action == "remove" for f in pruned.step.files]
    gone += [f for pruned in steps if pruned.action == "thin" for f in pruned.dropped]
    return Pruned(
        location=listing.location,
        dry_run=dry_run,
        steps=tuple(steps),
        freed_bytes=freed_bytes(gone),
        cleared=cleared,
        notes=tuple(notes),
    )


def _drop_optimizer(store: RunStore, source: Source, verdict: PrunedStep) -> bool:
    """Removes the optimizer of a step; returns whether the step was not being read."""
    step, files = verdict.step, verdict.dropped
    mark = store.claim(step.name, step.markers, files)
    if mark is None:
        return False
    with mark:
        check_unchanged(store, step, "was replaced or changed since it was listed")
        if not step.thinned:
            path = f"{step.name}/{MANIFEST_NAME}"
            before = source.read(path, 0, source.stat(path).size_bytes)
            manifest = parse_manifest(before, where=f"{step.path}/{MANIFEST_NAME}")
            gone = {file.path.removeprefix(f"{step.name}/") for file in files}
            known = digest_files(step) if manifest.is_sealed else short_digest(before)
            facts = {**manifest.source, THINNED: {"files": sorted(gone), "digest": known}}
            if manifest.is_sealed:
                digests = manifest.source[SEALED].items()
                facts[SEALED] = {path: one for path, one in digests if path not in gone}
            rest = {path: one for path, one in manifest.files.items() if path not in gone}
            data = replace(manifest, source=facts, files=rest).to_json()
            store.put(path, data)
        store.drop(step.name, files)
    return True


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
