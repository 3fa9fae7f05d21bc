"""`--delete-source`: the files of a checkpoint go once what was made of them is proven.

Only files that were read go, and only if nothing in them is lost: every tensor that they hold has
to be in the output.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.core.errors import (
    InputError,
    RefusedError,
    SourceChangedError,
    UsageError,
    VerificationError,
)
from ckptkit.core.index import FileRef, Key, TensorEntry, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.execution.events import Listener
from ckptkit.formats.discovery import Unit, step_of
from ckptkit.pipeline.identity import IDENTITY, source_facts
from ckptkit.pipeline.marking import marker
from ckptkit.pipeline.run_places import open_run, recorded_pushes
from ckptkit.pipeline.steps import step_folder
from ckptkit.pipeline.verifying import run_verification
from ckptkit.pipeline.writing import Prepared
from ckptkit.planning.plan import SOURCE, Compute, Copy, Plan
from ckptkit.storage.base import Folder, is_there
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of
from ckptkit.storage.removal import refuse_unremovable, remove_files
from ckptkit.storage.step_marks import claim
from ckptkit.storage.syscalls import detect_capabilities, open_for_reading

if TYPE_CHECKING:
    from ckptkit.pipeline.consolidating import Consolidation

_OPTION = "--delete-source"


@dataclass(frozen=True, slots=True)
class SourceRemoval:
    """What goes with a source, once the output is proven.

    Attributes:
        root: The place that the files lie in.
        out: The output.
        files: In the order in which they go: first those without which nobody takes the rest for
            a checkpoint.
        markers: The files by which whoever reads it is known.
        identity: Of the source, as the manifest of the output has it.
        values: How many values that are no tensors the source holds; they are in no output.
    """

    root: Place
    out: PathLike
    files: tuple[FileRef, ...]
    markers: tuple[str, ...]
    identity: str
    values: int

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Returns what goes as plain values."""
        return {
            "root": self.root.location,
            "files": [file.path for file in self.files],
            "bytes": self.size_bytes,
            "values": self.values,
        }

    def carry_out(self, manifest: Manifest, listener: Listener) -> None:
        """Removes the files, once all of the output was read back and found to be right.

        Args:
            manifest: Of the output.
            listener: Is told how far the reading is.

        Raises:
            VerificationError: If the output is damaged; the source stays.
            SourceChangedError: If the source is no longer what was read; it stays.
            RefusedError: If somebody reads the source at this moment; it stays.
            OutputError: If a file cannot be removed.
        """  # noqa: DOC501  `_in_use` makes it
        self._verify(manifest, listener)
        if manifest.source.get(IDENTITY) != self.identity:
            raise self._changed("it is another one than the output was made of")
        with open_source(self.root) as source:
            other = source.changed(self.files)
        if other is not None:
            raise self._changed(f"{other.path!r} changed after it was read")
        _refuse_step_in_use(self.root, self.files)
        paths = [file.path for file in self.files]
        if is_url(self.root):
            remove_files(self.root, paths)
            return
        mark = claim(local_path(self.root) / path for path in self.markers)
        if mark is None:
            raise _in_use(self.root)
        with mark:
            remove_files(self.root, paths)

    def _verify(self, manifest: Manifest, listener: Listener) -> None:
        where = os.fspath(self.out)
        if not is_url(self.out):
            _forget(local_path(self.out), manifest)
        with open_source(self.out) as output:
            size = output.stat(MANIFEST_NAME).size_bytes
            is_same = output.read(MANIFEST_NAME, 0, size) == manifest.to_json()
        found = run_verification(self.out, listener=listener)
        if is_same and found.ok:
            return
        problem = str(found.problems[0]) if found.problems else "its manifest is another one"
        raise VerificationError(
            f"the output was read back and is damaged: {problem}; the source was not removed",
            where=where,
            hint="see to the disk, remove the output, and write it anew",
        )

    def _changed(self, what: str) -> SourceChangedError:
        return SourceChangedError(
            f"{what}, and was not removed",
            where=self.root.location,
            hint="the output is whole; see who writes to the source",
        )


def planned_removal(job: Consolidation) -> SourceRemoval:
    """Finds what goes with the source of a job, before anything is written.

    Raises:
        InputError: If the source cannot be read.
        RefusedError: If something would be lost that is not in the output.
        UsageError: If the source lies in several places.
    """
    if job.also:
        raise UsageError(
            "stands beside --also: what lies in several places is not removed",
            where=_OPTION,
            hint="leave it out, and remove the files by hand",
        )
    with job.prepared() as prepared:
        return removal_of(prepared, job.src, job.out)


def removal_of(prepared: Prepared, src: PathLike, out: PathLike) -> SourceRemoval:
    """Finds what goes with the source of a plan.

    Args:
        prepared: The plan.
        src: The source as it was given.
        out: The output.

    Raises:
        RefusedError: If something would be lost that is not in the output.
    """
    checkpoint = prepared.checkpoint
    folder = checkpoint.source.folders[0]
    root = place_of(src).beside(folder.location)
    read = _read_keys(prepared.plan)
    holding = _files_by_key(checkpoint.index)
    used = {path for key in read for path in holding.get(key, ())}
    units = [unit for unit in checkpoint.units if used & set(unit.candidate.files)]
    paths = {path for unit in units for path in unit.candidate.files}
    lost = [entry for entry in checkpoint.index.tensors.values() if paths & holding[entry.key]]
    _refuse_lost(list(_not_written(lost, prepared, read)), root)
    ordered = dict.fromkeys([*_first(folder, units), *sorted(paths)])
    files = tuple(_stat(folder, path) for path in ordered)
    _refuse_unknown([file for file in files if file.path in paths], checkpoint.index, root)
    refuse_unremovable(root, ordered)
    _refuse_step_in_use(root, files)
    return SourceRemoval(
        root=root,
        out=out,
        files=files,
        markers=tuple(marker(unit.candidate) for unit in units),
        identity=source_facts(prepared.sources)[IDENTITY],
        values=len(checkpoint.index.values),
    )


def _read_keys(plan: Plan) -> set[Key]:
    read: set[Key] = set()
    for _, segment, _ in plan.specs():
        if isinstance(segment.body, Copy) and segment.body.origin == SOURCE:
            read.add(segment.body.key)
        elif isinstance(segment.body, Compute):
            read.update(key for origin, key in segment.body.reads if origin == SOURCE)
    return read


def _files_by_key(index: TensorIndex) -> Mapping[Key, set[str]]:
    return {
        key: {
            index.files[int(number)].path
            for number in np.unique(index.records.file[entry.chunks.record])
        }
        for key, entry in index.tensors.items()
    }


def _not_written(
    entries: list[TensorEntry], prepared: Prepared, read: set[Key]
) -> Iterator[TensorEntry]:
    """Yields those of which the output does not have the values, as exactly as they are stored."""
    index = prepared.checkpoint.index
    tied = {str(name) for name in prepared.plan.dropped}
    kept = {key for group in index.aliases if group & read for key in group}
    # Another model may have a tensor of the same name, of which nothing was compared.
    trees = {entry.tree for entry in index.tensors.values() if _best(entry) in read}
    for entry in entries:
        is_tied = entry.part == "model" and entry.tree in trees and str(entry.name) in tied
        if entry.elements and _best(entry) not in read and entry.key not in kept and not is_tied:
            yield entry


def _best(entry: TensorEntry) -> Key:
    """Returns where the values of a tensor lie unrounded."""
    return entry.key if entry.master is None else entry.master.key


def _refuse_lost(lost: list[TensorEntry], root: Place) -> None:
    if not lost:
        return
    first = lost[0]
    what = "unrounded values of tensor" if first.master is not None else f"{first.part} tensor"
    more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
    raise RefusedError(
        f"the files that were read hold what is not in the output: {what} {first.name!r}{more}",
        where=f"{_OPTION} {root.location}",
        hint="write it too (--optimizer, --dtype float32, no --include, --exclude or --select), or"
        " remove the checkpoint by hand",
    )


def _refuse_unknown(files: list[FileRef], index: TensorIndex, root: Place) -> None:
    """Refuses a folder with files that look like the checkpoint's, and are of something else.

    Such as those of further ranks that saved there before.

    Raises:
        RefusedError: If there is one.
    """
    known = {file.path for file in index.files}
    unknown = [file.path for file in files if file.size_bytes and file.path not in known]
    if unknown:
        more = f", and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        raise RefusedError(
            f"{unknown[0]!r}{more} would go with the checkpoint, and is no part of it",
            where=f"{_OPTION} {root.location}",
            hint="see what it is and move it elsewhere, or remove the checkpoint by hand",
        )


def _first(folder: Folder, units: list[Unit]) -> Iterator[str]:
    """Yields the manifest of a step that ckptkit saved, and the files that stand for a unit."""
    for unit in units:
        manifest = posixpath.join(step_folder(unit.candidate.folder), MANIFEST_NAME)
        if is_there(folder, manifest):
            yield manifest
    yield from (marker(unit.candidate) for unit in units)


def _stat(folder: Folder, path: str) -> FileRef:
    try:
        return folder.stat(path)
    except InputError as error:
        raise RefusedError(
            f"{path!r} is put together from other files",
            where=f"{_OPTION} {folder.location}",
            hint="remove the checkpoint by hand",
        ) from error


def _refuse_step_in_use(root: Place, files: tuple[FileRef, ...]) -> None:
    """Refuses a step of a run that is being pushed, or is marked at a store as being read."""
    for folder in sorted({posixpath.join(root.location, file.path) for file in files}):
        parts = folder.split("/")
        named = [at for at, part in enumerate(parts[:-1]) if step_of(part) is not None]
        if named:
            _refuse_used(root.beside("/".join(parts[: named[-1]])), parts[named[-1]])
            return


def _refuse_used(run: Place, name: str) -> None:
    pushes = recorded_pushes(run, None)
    if any(push.state == "pushing" and push.step == step_of(name) for push in pushes):
        raise RefusedError(
            "its push has begun and is not done", where=run.location, hint="wait until it is"
        )
    if is_url(run) and open_run(run).in_use(name, ()):
        raise _in_use(run.beside(f"{run}/{name}"))


def _in_use(place: Place) -> RefusedError:
    return RefusedError(
        "somebody reads the source at this moment; it was not removed",
        where=place.location,
        hint="wait until that is done, and remove it by hand or with the same command and"
        " --if-exists verify",
    )


def _forget(out: Path, manifest: Manifest) -> None:
    """Has the output read from the disk, and not from memory, as far as the system does so."""
    for path in manifest.files:
        with suppress(OSError):  # is met again by whoever reads it
            file = open_for_reading(out / path, detect_capabilities())
            try:
                file.forget()
            finally:
                file.close()
