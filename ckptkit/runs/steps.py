"""The record of a step of a run, and the listing of the steps that ckptkit saved.

Training lists its run with `list_saved_steps`, by manifests alone. `ckptkit.runs.listing` lists the
steps that any framework saved, with their files, for `ckptkit ls`, pruning and watching.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.manifest import MANIFEST_NAME, SEALED, THINNED, TRAINING, Manifest
from ckptkit.runs.push_journal import CommandRun, StepPush
from ckptkit.storage.manifests import read_local_manifest

_NUMBER = re.compile(r"\d+")
_DIGEST_LENGTH = 16  # hexadecimal digits


class StoredFile(Struct, frozen=True):
    """A file in a run.

    Attributes:
        path: Relative to the run, with `/` between segments.
        size_bytes: Its size.
        modified: When it was written, in seconds since 1970; 0 where that is unknown.
        identity: Changes when the file is replaced or rewritten.
        links: How many names the file has, this one included.
        inode: What the names of one file have in common; empty where a file has one name only.
    """

    path: str
    size_bytes: int
    modified: float
    identity: str
    links: int = 1
    inode: str = ""


def bytes_of(files: Iterable[StoredFile]) -> int:
    """Returns the size of files together; one with several names counts once."""
    sizes = {file.inode or file.path: file.size_bytes for file in files}
    return sum(sizes.values())


def freed_bytes(files: Sequence[StoredFile]) -> int:
    """Returns what the removal of files frees: those with names elsewhere free nothing."""
    names = Counter(file.inode for file in files if file.inode)
    return bytes_of(file for file in files if not file.inode or names[file.inode] >= file.links)


class RunStep(Struct, frozen=True):
    """A step of a run.

    What a rule of retention may ask for is known wherever steps are listed: `step`, `complete`,
    `protected`, and what `step_of_source` reads of a manifest, which in training a new step has
    before it is durable. `ckptkit ls`, `prune` and `watch` list files too (`ckptkit.runs.listing`):
    there alone are `writer`, `size_bytes`, `files`, `pushes`, `commands` and `markers`.

    Attributes:
        step: Its number.
        name: Of its folder.
        path: Of its folder, under the path or URL of the run as it was given.
        complete: Whether training could resume from it.
        problem: Why it is not complete; empty where it is.
        has_manifest: Whether ckptkit has written its manifest, which it writes last.
        metrics: The numbers that were saved with it; None for one that was not finite.
        save_number: The larger, the later the step was saved, compared with others of its series;
            0 where unknown. ckptkit counts the saves of a run, across its jobs. Clocks are not
            used, since the next job may run on another host; for steps that other frameworks
            saved, `ckptkit.runs.retention` decides whether times can be used.
        protected: Whether something needs it, whatever the rules of a retention say.
        writer: The framework that saved it; empty where unknown.
        size_bytes: Of its files; those that it shares with other steps count in each.
        files: Its files.
        modified: When its newest file was written, in seconds since 1970; 0 where unknown. Where
            files are not listed, when its manifest says that it was saved.
        pushes: Its pushes to the Hub, finished or under way.
        commands: The commands that a watch has started for it.
        markers: The files that its readers lock, relative to the run.
        digest: Of its manifest, or of what is known of its files: distinguishes it from a step
            that replaces it. Empty where nothing has asked for it.
        world_size: The ranks of the job that saved it; None where unknown.
        sealed: Whether another saver wrote it, and `ckptkit seal` its manifest.
        thinned: The files of its optimizer that a pruning has removed, relative to the step.
    """

    step: int
    name: str = ""
    path: str = ""
    complete: bool = True
    problem: str = ""
    has_manifest: bool = True
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    save_number: int = 0
    protected: bool = False
    writer: str = ""
    size_bytes: int = 0
    files: tuple[StoredFile, ...] = ()
    modified: float = 0.0
    pushes: tuple[StepPush, ...] = ()
    commands: tuple[CommandRun, ...] = ()
    markers: tuple[str, ...] = ()
    digest: str = ""
    world_size: int | None = None
    sealed: bool = False
    thinned: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        return series_of(self.name)

    def to_json(self, *, now: float) -> dict[str, Any]:
        """Returns the step as plain values; its age is in seconds at the time `now`."""
        at = datetime.fromtimestamp(self.modified, UTC).isoformat() if self.modified else None
        return {
            "step": self.step,
            "name": self.name,
            "path": self.path,
            "complete": self.complete,
            "problem": self.problem,
            "sealed": self.sealed,
            "weights_only": bool(self.thinned),
            "saved_by": self.writer,
            "bytes": self.size_bytes,
            "files": len(self.files),
            "modified": at,
            "age_seconds": round(max(now - self.modified, 0.0), 3) if self.modified else None,
            "metrics": dict(self.metrics),
            "pushed": [
                {"repo_id": p.repo_id, "commit": p.commit, "tag": p.tag, "url": p.url, "at": p.at}
                for p in self.pushes
                if p.state == "pushed"
            ],
            "commands": [
                {name: getattr(run, name) for name in ("command", "state", "status", "log", "at")}
                for run in self.commands
            ],
        }


def step_files(step: RunStep, files: Iterable[StoredFile]) -> Iterator[StoredFile]:
    """Yields the files of a step as its saver wrote them: without a manifest that came later."""
    manifest = f"{step.name}/{MANIFEST_NAME}"
    is_later = step.sealed or bool(step.thinned)
    return (file for file in files if not (is_later and file.path == manifest))


def digest_files(step: RunStep) -> str:
    """Returns the digest of a step that another saver wrote, which a seal does not change."""
    files = step_files(step, step.files)
    listed = "".join(f"{f.path}\0{f.size_bytes}\0{f.modified}\n" for f in files)
    return short_digest(listed.encode())


def short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]


def series_of(name: str) -> str:
    """Returns the name of a step's folder without its numbers.

    >>> series_of("checkpoint-500"), series_of("epoch=3-step=500")
    ('checkpoint-', 'epoch=-step=')
    """
    return _NUMBER.sub("", name)


def parse_metrics(document: object) -> dict[str, float | None]:
    """Returns the numbers in a table of metrics; None for those that are not finite."""
    if not isinstance(document, Mapping):
        return {}
    return {
        str(name): _finite(value)
        for name, value in document.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _finite(value: float | None) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # an integer of any length, in a manifest that was edited
        return None


def save_number_of(source: Mapping[str, Any]) -> int:
    """Returns which save of the run the `source` of a manifest is of; 0 where it does not say."""
    number = source.get("save_number")
    return number if isinstance(number, int) and number > 0 else 0


class StepFiles(Protocol):
    """Access to the files of the steps of one run, by names of their folders."""

    @property
    def location(self) -> str:
        """The path or URL of the run."""
        ...

    def identity(self, name: str) -> object | None:
        """Returns a value that changes when a step is replaced; None where there is none."""
        ...

    def manifest(self, name: str) -> Manifest | None:
        """Returns the manifest of a step; None where it has none."""
        ...

    def size_bytes(self, name: str, file: str) -> int | None:
        """Returns the size of a file of a step; None where it is missing."""
        ...


KnownSteps = dict[str, tuple[object, RunStep]]
"""Complete steps of an earlier listing by name, each with its identity at that time."""


def list_saved_steps(
    numbers: Mapping[str, int], files: StepFiles, known: KnownSteps | None = None
) -> tuple[RunStep, ...]:
    """Lists steps that ckptkit saved; a step is complete if its manifest matches its files.

    Training resumes from the last one of the list. Those that training went back from, see
    `abandoned`, come first: they are a last resort. `known` is what an earlier listing found, and
    is updated: a complete step is looked into again only once it was replaced.
    """
    earlier = {} if known is None else dict(known)
    steps: list[RunStep] = []
    latest: KnownSteps = {}
    for name, number in numbers.items():
        identity = files.identity(name)  # read first: a step replaced meanwhile is read again
        step = earlier[name][1] if name in earlier and earlier[name][0] == identity else None
        step = step or _saved_step(name, number, files)
        steps.append(step)
        if step.complete and identity is not None:
            latest[name] = identity, step
    if known is not None:
        known.clear()
        known.update(latest)
    left = abandoned(steps)
    return tuple(sorted(steps, key=lambda step: (step.step not in left, step.step)))


def _saved_step(name: str, number: int, files: StepFiles) -> RunStep:
    path = posixpath.join(files.location, name)
    try:
        manifest = files.manifest(name)
    except (OSError, CkptkitError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        return RunStep(number, name, path, complete=False, problem=problem)
    if manifest is None:
        problem = f"it has no {MANIFEST_NAME}"
        return RunStep(number, name, path, complete=False, problem=problem, has_manifest=False)

    def size_bytes(file: str) -> int | None:
        return files.size_bytes(name, file)

    return step_of_manifest(number, path, manifest, size_bytes)


def step_of_manifest(
    number: int, path: str, manifest: Manifest, size_bytes: Callable[[str], int | None]
) -> RunStep:
    """Returns the record of a step with a manifest."""
    step = replace(step_of_source(number, posixpath.basename(path), manifest.source), path=path)
    problem = _problem_of(number, manifest, size_bytes)
    return replace(step, complete=False, problem=problem, save_number=0) if problem else step


def step_of_source(number: int, name: str, source: Mapping[str, Any]) -> RunStep:
    """Returns what the `source` of a manifest says of a step, as if all of its files were there."""
    world_size, thinned = source.get("world_size"), source.get(THINNED)
    thinned = thinned if isinstance(thinned, Mapping) else {}
    dropped = thinned.get("files")
    return RunStep(
        number,
        name,
        metrics=parse_metrics(source.get("metrics")),
        save_number=save_number_of(source),
        world_size=world_size if isinstance(world_size, int) and world_size > 0 else None,
        modified=_parse_time(source.get("saved_at")),
        sealed=isinstance(source.get(SEALED), Mapping),
        thinned=tuple(map(str, dropped)) if isinstance(dropped, list) else (),
        digest=str(thinned.get("digest", "")),
    )


TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def _parse_time(text: object) -> float:
    """Returns when a manifest says that a step was saved, in seconds since 1970; else 0."""
    try:
        return datetime.strptime(str(text), TIME_FORMAT).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _problem_of(number: int, manifest: Manifest, size_bytes: Callable[[str], int | None]) -> str:
    """Returns where a manifest does not match the files of a step; empty where it does."""
    if manifest.kind != TRAINING:
        return f"has a {MANIFEST_NAME} of kind {manifest.kind!r}, where {TRAINING!r} was expected"
    if manifest.source.get("step") != number:
        return f"is step {manifest.source.get('step')!r} according to its {MANIFEST_NAME}"
    for file, record in manifest.files.items():
        expected = record.size_bytes
        try:
            size = size_bytes(file)
        except InputError as error:
            return f"file {file!r}: {error.message}"
        if size is None:
            return f"file {file!r} is missing"
        if size != expected:
            return f"file {file!r} has {size:,} bytes against {expected:,} in the manifest"
    return ""


def abandoned(steps: Iterable[RunStep]) -> frozenset[int]:
    """Returns the steps that training went back from: a lower step was saved after them.

    A step whose `save_number` is unknown is none of them.

    >>> saved = {200: 1, 300: 2, 210: 3}  # resumed from step 200
    >>> sorted(abandoned([RunStep(step, save_number=n) for step, n in saved.items()]))
    [300]
    """
    left = set()
    latest = 0
    for step in sorted((step for step in steps if step.complete), key=lambda step: step.step):
        if 0 < step.save_number < latest:
            left.add(step.step)
        latest = max(latest, step.save_number)
    return frozenset(left)


class LocalStepFiles:
    """The files of steps below a directory; see `StepFiles`."""

    def __init__(self, run: Path) -> None:
        self.location = str(run)
        self._run = run

    def identity(self, name: str) -> tuple[int, ...] | None:
        """Returns numbers of the directory and of its manifest."""
        folder = self._run / name
        try:
            both = folder.stat(), (folder / MANIFEST_NAME).stat()
        except OSError:
            return None
        return tuple(n for stat in both for n in (stat.st_dev, stat.st_ino, stat.st_mtime_ns))

    def manifest(self, name: str) -> Manifest | None:
        try:
            return read_local_manifest(self._run / name)
        except FileNotFoundError:
            return None

    def size_bytes(self, name: str, file: str) -> int | None:
        try:
            return (self._run / name / file).stat().st_size
        except FileNotFoundError:
            return None
