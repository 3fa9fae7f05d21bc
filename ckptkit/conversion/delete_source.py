"""`--delete-source`: removes the files of a checkpoint once the output is verified.

Only files that were read are removed, and only if nothing in them is lost: every tensor in them has
to be in the output.

The same command finishes a removal that was killed. A record of all files is written into the
source before the first file is removed, and is removed last.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from msgspec import Struct

from ckptkit.conversion.source.open import (
    SOURCE_IDENTITY,
    OpenedCheckpoint,
    describe_sources,
    open_checkpoint,
)
from ckptkit.conversion.source.paths import resolve_path
from ckptkit.conversion.source.search import CheckpointUnit
from ckptkit.conversion.verify import run_verification
from ckptkit.conversion.write import PlannedOutput, read_output_manifest, verify_existing_output
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    OutputExistsError,
    RefusedError,
    SourceChangedError,
    UsageError,
    VerificationError,
)
from ckptkit.core.index import FileRef, Key, TensorEntry, TensorIndex
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.engine.outcome import Listener, OutputKept, Planned
from ckptkit.formats.discovery import is_unit_folder, name_step, parse_step
from ckptkit.options import changed_options
from ckptkit.plan.plan import SOURCE, Compute, Copy, Plan
from ckptkit.runs.local_run import marker, open_run
from ckptkit.runs.marks import claim
from ckptkit.runs.push_journal import read_pushes
from ckptkit.runs.step_manifests import step_folder
from ckptkit.storage.base import Source, is_there
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.locations import check_relative
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of
from ckptkit.storage.removal import put_record, refuse_unremovable, remove_files

if TYPE_CHECKING:
    from ckptkit.conversion.prepare import ConversionJob


_OPTION = "--delete-source"


class SourceRemoval(Struct, frozen=True):
    """The files of a source that are removed once the output is verified.

    Attributes:
        root: The folder of the files.
        files: The files in the order of their removal: first those by which the rest is recognised
            as a checkpoint, so that a kill leaves nothing that looks like one.
        markers: The files that readers of the checkpoint lock.
        identity: The identity of the source in the manifest of the output.
        values: The number of values in the source that are no tensors; no output has them.
        manifest: Digest of the output's manifest, for a removal that has begun; else empty.
    """

    root: Place
    files: tuple[FileRef, ...]
    markers: tuple[str, ...]
    identity: str
    values: int
    manifest: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "root": self.root.location,
            "files": [file.path for file in self.files],
            "bytes": self.size_bytes,
            "values": self.values,
        }


def write_and_remove(
    job: ConversionJob, write: Callable[[], Manifest], listener: Listener
) -> tuple[Manifest, SourceRemoval | None]:
    """Writes an output and removes its source, each as far as an earlier run has not done it.

    With `overwrite`, an existing output is written anew for as long as its source is whole.

    Returns:
        The manifest, and what was removed; None where an earlier run has removed all of it.
    """
    finished = _find_finished(job, listener)
    if finished is not None:
        return finished, None
    removal, out = plan_removal(job), os.fspath(job.destination)
    if removal.manifest:
        manifest = read_output_manifest(job.destination)
        if manifest is None:
            raise OutputExistsError(
                "the removal of the source was begun, and its output is not there any more",
                where=out,
                hint="bring the output back, and run again; what is left of the source stays",
            )
        listener(OutputKept(out))
    else:
        existing = None if job.overwrite else verify_existing_output(job, listener)
        manifest = existing or write()
    _verify(job.destination, manifest, removal.manifest, listener)
    root, paths = removal.root, [file.path for file in removal.files]
    with open_source(root) as source:
        left = [f for f in removal.files if not removal.manifest or is_there(source, f.path)]
        other = source.changed(left)
    reason = "" if other is None else f"{other.path!r} changed after it was read"
    if manifest.source.get(SOURCE_IDENTITY) != removal.identity:
        reason = "it is another one than the output was made of"
    if reason:
        raise SourceChangedError(
            f"{reason}, and was not removed",
            where=root.location,
            hint="the output is complete; find the process that writes to the source",
        )
    refuse_unremovable(root, [file.path for file in left])
    _refuse_step_in_use(root, removal.files)
    record = _record_name(job.destination)
    with ExitStack() as stack:
        if not is_url(root):
            mark = claim(local_path(root) / path for path in removal.markers)
            if mark is None:
                raise _in_use(root)
            stack.enter_context(mark)
        if not removal.manifest:
            facts = {
                "out": resolve_path(job.destination),
                "request": _request_of(job),
                "manifest": _digest(manifest.to_json()),
                "identity": removal.identity,
                "values": removal.values,
                "markers": removal.markers,
                "files": [[file.path, file.size_bytes, file.identity] for file in removal.files],
            }
            put_record(root, record, json.dumps(facts).encode())
        remove_files(root, paths, last=record)
    return manifest, removal


def _verify(out: PathLike, manifest: Manifest, digest: str, listener: Listener) -> None:
    """Reads all of an output back from its disk."""
    for path in () if is_url(out) else manifest.files:
        # The system reads it from the disk next, where it supports that.
        with suppress(OSError):  # reading it reports the error
            file = LOCAL_DISK.open_for_reading(local_path(out) / path)
            try:
                file.forget()
            finally:
                file.close()
    with open_source(out) as output:
        data = output.read(MANIFEST_NAME, 0, output.stat(MANIFEST_NAME).size_bytes)
    is_same = data == manifest.to_json() and digest in {"", _digest(data)}
    verification = run_verification(out, listener=listener)
    if is_same and verification.ok:
        return
    problems = verification.problems
    problem = str(problems[0]) if problems else "its manifest is another one"
    raise VerificationError(
        f"the output was read back and is damaged: {problem}; the source was not removed",
        where=os.fspath(out),
        hint="see to the disk, remove the output, and write it anew",
    )


def plan_removal(job: ConversionJob) -> SourceRemoval:
    """Finds the files of a job's source that are removed, before anything is written."""
    if job.also:
        raise UsageError(
            "cannot be combined with --also: files in several places are not removed",
            where=_OPTION,
            hint="leave it out, and remove the files by hand",
        )
    refuse_linked(job.src)
    unfinished = _find_unfinished(job)
    if unfinished is not None:
        return unfinished
    with job.plan_output() as planned:
        return _removal_of(planned, job)


def refuse_linked(src: PathLike) -> None:
    """Refuses a source that is a link, or is in a step that is a link.

    A link further up, such as one to another disk, leads to the same files and is allowed.
    """
    if is_url(src):
        return
    path = local_path(src).absolute()
    for folder in (path, *path.parents):
        names = folder.name, folder.resolve().name
        is_of_step = any(parse_step(n) is not None or is_unit_folder(n) for n in names)
        if folder.is_symlink() and (folder == path or is_of_step):
            raise RefusedError(
                f"{str(folder)!r} is a link to {str(folder.resolve())!r}, whose files are not"
                " removed",
                where=f"{_OPTION} {os.fspath(src)}",
                hint="name the target of the link, or leave --delete-source out",
            )


def _request_of(job: ConversionJob) -> dict[str, Any]:
    base = None if job.base is None else os.fspath(job.base)
    facts = {**changed_options(job.request), "base": base, "src": resolve_path(job.src)}
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=os.fspath))
    return plain


def _record_name(out: PathLike) -> str:
    return f".ckptkit-removal-{_digest(resolve_path(out).encode(errors='surrogateescape'))}"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def _find_unfinished(job: ConversionJob) -> SourceRemoval | None:
    """Returns the removal that a killed run of the same command has begun, or None."""
    src, name = place_of(job.src), _record_name(job.destination)
    for root in (src, src.beside(posixpath.dirname(src.rstrip("/")))):
        where = f"{root.location}/{name}"
        try:
            with open_source(root) as source:
                record = json.loads(source.read(name, 0, source.stat(name).size_bytes))
        except (MissingFileError, NotACheckpointError, ValueError, RecursionError, OSError):
            continue
        try:
            out, request = record["out"], record["request"]
            removal = SourceRemoval(
                root=root,
                files=tuple(FileRef(str(p), int(n), str(i)) for p, n, i in record["files"]),
                markers=tuple(map(str, record["markers"])),
                identity=record["identity"],
                values=int(record["values"]),
                manifest=record["manifest"],
            )
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise FormatError(
                f"is no record of a removal: {error!r:.100}",
                where=where,
                hint="if no command was interrupted while it removed this source, remove that file",
            ) from error
        for file in removal.files:
            check_relative(file.path, where)
        if out == resolve_path(job.destination):
            if request != _request_of(job):
                raise OutputExistsError(
                    "the source is being removed for an output that was made with other options",
                    where=os.fspath(job.destination),
                    hint="run the same command as before, to finish the removal",
                )
            return removal
    return None


def _find_finished(job: ConversionJob, listener: Listener) -> Manifest | None:
    """Returns the manifest of an output whose source an earlier run of the command has removed.

    The source is gone, the options are the same, and the output is verified. Older steps stay, also
    with `overwrite`: otherwise the output of the newest step would be replaced by that of an older
    one.
    """
    if job.also or _find_unfinished(job) is not None:
        return None
    try:
        manifest = read_output_manifest(job.destination)
    except CkptkitError:  # a damaged output is replaced
        return None
    if manifest is None or manifest.options != changed_options(job.request):
        return None
    made_of, src = resolve_path(str(manifest.source.get("path", ""))), resolve_path(job.src)
    if not (
        _is_removed(job.src, src, made_of)
        and run_verification(job.destination, listener=listener).ok
    ):
        return None
    listener(OutputKept(os.fspath(job.destination)))
    listener(Planned((f"the source {made_of} was removed by an earlier run",)))
    if not is_url(src):
        with suppress(OSError):  # other files may be there
            local_path(src).rmdir()
    return manifest


def _is_removed(place: PathLike, src: str, made_of: str) -> bool:
    """Returns whether a source holds no model, or only steps older than the removed one."""
    if made_of != src and not made_of.startswith(f"{src}/"):
        return False
    left = _model_at(place)
    if left is None:
        return True
    removed, newest = parse_step(made_of), parse_step(resolve_path(left))
    is_older = removed is not None and newest is not None and newest < removed
    return is_older and made_of != src and _model_at(place_of(place).beside(made_of)) is None


def _model_at(place: PathLike) -> str | None:
    """Returns the path of the model that a command would read there, or None."""
    try:
        with open_checkpoint(place) as checkpoint:
            holds = next(iter(checkpoint.index.of_part("model")), None) is not None
            return checkpoint.path if holds else None
    except NotACheckpointError:
        return None
    except CkptkitError:
        return os.fspath(place)


def _removal_of(planned: PlannedOutput, job: ConversionJob) -> SourceRemoval:
    checkpoint = planned.checkpoint
    folder = checkpoint.source.folders[0]
    root = place_of(job.src).beside(folder.location)
    index = checkpoint.index
    read = _read_keys(planned.plan, index)
    holding = {
        key: {index.files[int(n)].path for n in np.unique(index.records.file[entry.chunks.record])}
        for key, entry in index.tensors.items()
    }
    used = {path for key in read for path in holding.get(key, ())}
    units = [unit for unit in checkpoint.units if used & set(unit.candidate.files)]
    paths = {path for unit in units for path in unit.candidate.files}
    held = [entry for entry in index.tensors.values() if paths & holding[entry.key]]
    _refuse_lost(held, planned, read, root)
    _refuse_to_end_training(checkpoint, units, root)
    ordered = dict.fromkeys([*_first(folder, units), *sorted(paths)])
    files: tuple[FileRef, ...] = ()
    for path in ordered:
        try:
            files += (folder.stat(path),)
        except InputError as error:
            raise RefusedError(
                f"{path!r} is merged from other files",
                where=f"{_OPTION} {folder.location}",
                hint="remove the checkpoint by hand",
            ) from error
    _refuse_unknown([file for file in files if file.path in paths], index, root)
    refuse_unremovable(root, ordered)
    _refuse_step_in_use(root, files)
    return SourceRemoval(
        root=root,
        files=files,
        markers=tuple(marker(unit.candidate) for unit in units),
        identity=describe_sources(planned.sources)[SOURCE_IDENTITY],
        values=len(index.values),
    )


def _read_keys(plan: Plan, index: TensorIndex) -> set[Key]:
    """Returns the tensors that a plan reads, or writes under a name that they are tied to."""
    read: set[Key] = set()
    for _, segment, _ in plan.specs():
        if isinstance(segment.body, Copy) and segment.body.origin == SOURCE:
            read.add(segment.body.key)
        elif isinstance(segment.body, Compute):
            read.update(key for origin, key in segment.body.reads if origin == SOURCE)
    for entry in index.tensors.values():
        if entry.derivation and (entry.key in read or entry.name in plan.dropped):
            read.update(key for _, key in entry.derivation.reads)
    return read


def _refuse_lost(
    entries: list[TensorEntry], planned: PlannedOutput, read: set[Key], root: Place
) -> None:
    """Refuses tensors whose values, as precise as they are stored, are not in the output."""
    index = planned.checkpoint.index

    def best(entry: TensorEntry) -> Key:
        return entry.key if entry.master is None else entry.master.key

    tied = {str(name) for name in planned.plan.dropped}
    kept = {key for group in index.aliases if group & read for key in group}
    # Another model can have a tensor of the same name that was not compared.
    trees = {entry.tree for entry in index.tensors.values() if best(entry) in read}
    lost = []
    for entry in entries:
        is_tied = entry.part == "model" and entry.tree in trees and str(entry.name) in tied
        if entry.elements and best(entry) not in read and entry.key not in kept and not is_tied:
            lost.append(entry)
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


def _refuse_to_end_training(
    checkpoint: OpenedCheckpoint, removed: list[CheckpointUnit], root: Place
) -> None:
    """Refuses a step whose optimizer would stay without the model, which nothing resumes from.

    A user who names the model in the step, and not the step, has chosen to give that up.
    """
    for unit in checkpoint.units:
        if unit.is_optimizer and unit not in removed:
            model = posixpath.join(root.location, checkpoint.folder, removed[0].label)
            raise RefusedError(
                f"training could not resume from the step any more: {unit.label!r} is the state of"
                " an optimizer, is not in the output, and would stay alone",
                where=f"{_OPTION} {root.location}",
                hint="write it too (ckptkit convert --optimizer), remove whole steps with `ckptkit"
                f" prune`, or give the step up and pass {model} as SRC",
            )


def _refuse_unknown(files: list[FileRef], index: TensorIndex, root: Place) -> None:
    """Refuses files that look like the checkpoint's and do not belong to it.

    An example are files of further ranks of an earlier save.
    """
    own = {file.path for file in index.files}
    unknown = [file.path for file in files if file.size_bytes and file.path not in own]
    if unknown:
        more = f", and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        raise RefusedError(
            f"{unknown[0]!r}{more} would be removed with the checkpoint, and is no part of it",
            where=f"{_OPTION} {root.location}",
            hint="move it to another folder, or remove the checkpoint by hand",
        )


def _first(folder: Source, units: list[CheckpointUnit]) -> Iterator[str]:
    """Yields the manifest of a step that ckptkit saved, and the marker of each unit."""
    for unit in units:
        manifest = posixpath.join(step_folder(unit.candidate.folder), MANIFEST_NAME)
        if is_there(folder, manifest):
            yield manifest
    yield from (marker(unit.candidate) for unit in units)


def _refuse_step_in_use(root: Place, files: tuple[FileRef, ...]) -> None:
    """Refuses a step that is being pushed, or is marked at a store as being read."""
    for folder in sorted({posixpath.join(root.location, file.path) for file in files}):
        parts = folder.split("/")
        named = [at for at, part in enumerate(parts[:-1]) if parse_step(part) is not None]
        if not named and parse_step(parts[-1]) is not None:  # the step is a file
            named, parts[-1] = [len(parts) - 1], name_step(parts[-1])
        if not named:
            continue
        run, name = root.beside("/".join(parts[: named[-1]])), parts[named[-1]]
        pushes = read_pushes(run, None)
        if any(push.state == "pushing" and push.step == parse_step(name) for push in pushes):
            raise RefusedError(
                "its push has begun and is not done",
                where=run.location,
                hint="wait until it is done",
            )
        if is_url(run) and open_run(run).in_use(name, ()):
            raise _in_use(run.beside(f"{run}/{name}"))
        return


def _in_use(place: Place) -> RefusedError:
    return RefusedError(
        "another process reads the source; it was not removed",
        where=place.location,
        hint="wait until it has ended, and run the same command again",
    )
