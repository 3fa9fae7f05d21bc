"""`--delete-source`: removes the files of a checkpoint once the output is verified.

Only files that were read are removed, and only if nothing in them is lost: every tensor in them has
to be in the output. The same command finishes a removal that was killed: a record of all files is
written into the source before the first file is removed, and is removed last.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from ckptkit.conversion.source.open import (
    SOURCE_IDENTITY,
    describe_sources,
    open_checkpoint,
)
from ckptkit.conversion.source.paths import resolve_path
from ckptkit.conversion.verify import run_verification
from ckptkit.conversion.write import PlannedOutput, read_output_manifest, verify_existing_output
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    MissingFileError,
    NotACheckpointError,
    OutputError,
    OutputExistsError,
    RefusedError,
    SourceChangedError,
    UsageError,
    VerificationError,
)
from ckptkit.core.frameworks import is_unit_folder
from ckptkit.core.index import FileRef, Key, TensorEntry
from ckptkit.core.manifest import MANIFEST_NAME, Manifest
from ckptkit.engine.outcome import Listener, OutputKept, Planned
from ckptkit.formats.discovery import name_step, parse_step
from ckptkit.options import changed_options
from ckptkit.plan.plan import SOURCE, Compute, Copy
from ckptkit.runs.local_run import marker, open_run
from ckptkit.runs.marks import claim
from ckptkit.runs.push_journal import read_pushes
from ckptkit.runs.step_manifests import step_folder
from ckptkit.storage.base import is_there
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.durable import replace_file
from ckptkit.storage.locations import check_relative, is_read_only
from ckptkit.storage.places import PathLike, Place, is_url, local_path, open_source, place_of
from ckptkit.storage.remote.errors import error_translator
from ckptkit.storage.remote.store import RemoteStore, get_store

if TYPE_CHECKING:
    from ckptkit.conversion.prepare import ConversionJob


_OPTION = "--delete-source"


class SourceRemoval(msgspec.Struct, frozen=True):
    """The files of a source that are removed once the output is verified; also their record."""

    out: str
    request: dict[str, Any]  # the options of the command
    files: tuple[tuple[str, int, str], ...]  # path, size in bytes and identity, in this order
    markers: tuple[str, ...]  # the files that readers of the checkpoint lock
    identity: str | None  # of the source, in the manifest of the output
    values: int  # how many values that are no tensors the source has, which no output has
    manifest: str = ""  # digest of the output's, where the removal has begun
    root: str = ""  # the folder of the files, with the options of its storage; no part of a record

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.files]

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes, _ in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "root": place_of(self.root).location,
            "files": self.paths,
            "bytes": self.size_bytes,
            "values": self.values,
        }


def write_and_remove(
    job: ConversionJob, write: Callable[[], Manifest], listener: Listener
) -> tuple[Manifest, SourceRemoval | None]:
    """Writes an output and removes its source, each as far as an earlier run has not done it.

    With `overwrite`, an existing output is written anew for as long as its source is whole. Returns
    no removal where an earlier run has removed all of it.
    """
    finished = _find_finished(job, listener)
    if finished is not None:
        return finished, None
    removal, out = plan_removal(job), os.fspath(job.destination)
    if removal.manifest:
        found = read_output_manifest(job.destination)
        if found is None:
            raise OutputExistsError(
                "the removal of the source was begun, and its output is not there any more",
                where=out,
                hint="bring the output back, and run again; what is left of the source stays",
            )
        manifest = found
        listener(OutputKept(out))
    else:
        existing = None if job.overwrite else verify_existing_output(job, listener)
        manifest = existing or write()
    # Verify: the output is read back from its disk, and is the one that was made of this source.
    _verify(job.destination, manifest, removal.manifest, listener)
    root = place_of(removal.root)
    with open_source(root) as source:
        files = [FileRef(*file) for file in removal.files]
        left = [file for file in files if not removal.manifest or is_there(source, file.path)]
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
    # Check that nothing else uses it.
    _refuse_unremovable(root, [file.path for file in left])
    _refuse_step_in_use(root, removal.paths)
    record = _record_name(job.destination)
    with ExitStack() as stack:
        if not is_url(root):
            mark = claim(local_path(root) / path for path in removal.markers)
            if mark is None:
                raise _in_use(root)
            stack.enter_context(mark)
        # Remove.
        if not removal.manifest:
            facts = {name: getattr(removal, name) for name in removal.__struct_fields__}
            facts |= {"manifest": _digest(manifest.to_json()), "root": ""}
            _put_record(root, record, json.dumps(facts).encode())
        remove_files(root, removal.paths, last=record)
    return manifest, removal


def _verify(out: PathLike, manifest: Manifest, digest: str, listener: Listener) -> None:
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
    problems = run_verification(out, listener=listener).problems
    if problems or data != manifest.to_json() or digest not in {"", _digest(data)}:
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
    # A link further up, such as one to another disk, leads to the same files and is allowed.
    path = None if is_url(job.src) else local_path(job.src).absolute()
    for folder in () if path is None else (path, *path.parents):
        names = folder.name, folder.resolve().name
        is_of_step = any(parse_step(n) is not None or is_unit_folder(n) for n in names)
        if folder.is_symlink() and (folder == path or is_of_step):
            raise RefusedError(
                f"{str(folder)!r} is a link to {str(folder.resolve())!r}, whose files are not"
                " removed",
                where=f"{_OPTION} {os.fspath(job.src)}",
                hint="name the target of the link, or leave --delete-source out",
            )
    unfinished = _find_unfinished(job)
    if unfinished is not None:
        return unfinished
    with job.plan_output() as planned:
        return _choose_files(planned, job)


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
                data = source.read(name, 0, source.stat(name).size_bytes)
            removal = msgspec.json.decode(data, type=SourceRemoval)
        except msgspec.ValidationError as error:
            raise FormatError(
                f"is no record of a removal: {error!r:.100}",
                where=where,
                hint="if no command was interrupted while it removed this source, remove that file",
            ) from error
        except (
            MissingFileError,
            NotACheckpointError,
            msgspec.DecodeError,
            ValueError,
            RecursionError,
            OSError,
        ):
            continue
        for path in removal.paths:
            check_relative(path, where)
        if removal.out == resolve_path(job.destination):
            if removal.request != _request_of(job):
                raise OutputExistsError(
                    "the source is being removed for an output that was made with other options",
                    where=os.fspath(job.destination),
                    hint="run the same command as before, to finish the removal",
                )
            return msgspec.structs.replace(removal, root=root)
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
    if made_of != src and not made_of.startswith(f"{src}/"):
        return None
    left = _find_model(job.src)
    if left is not None:  # only steps older than the removed one may be there
        removed, newest = parse_step(made_of), parse_step(resolve_path(left))
        is_older = removed is not None and newest is not None and newest < removed
        is_there_still = _find_model(place_of(job.src).beside(made_of)) is not None
        if not is_older or made_of == src or is_there_still:
            return None
    if not run_verification(job.destination, listener=listener).ok:
        return None
    listener(OutputKept(os.fspath(job.destination)))
    listener(Planned((f"the source {made_of} was removed by an earlier run",)))
    if not is_url(src):
        with suppress(OSError):  # other files may be there
            local_path(src).rmdir()
    return manifest


def _find_model(place: PathLike) -> str | None:
    """Returns the path of the model that a command would read there, or None."""
    try:
        with open_checkpoint(place) as checkpoint:
            holds = next(iter(checkpoint.index.of_part("model")), None) is not None
            return checkpoint.path if holds else None
    except NotACheckpointError:
        return None
    except CkptkitError:
        return os.fspath(place)


def _choose_files(planned: PlannedOutput, job: ConversionJob) -> SourceRemoval:
    """Returns the files of what was read, if nothing in them is lost."""
    checkpoint = planned.checkpoint
    folder, index = checkpoint.source.folders[0], checkpoint.index
    root = place_of(job.src).beside(folder.location)
    read: set[Key] = set()  # or written under a name that it is tied to
    for _, segment, _ in planned.plan.specs():
        if isinstance(segment.body, Copy) and segment.body.origin == SOURCE:
            read.add(segment.body.key)
        elif isinstance(segment.body, Compute):
            read.update(key for origin, key in segment.body.reads if origin == SOURCE)
    for entry in index.tensors.values():
        if entry.derivation and (entry.key in read or entry.name in planned.plan.dropped):
            read.update(key for _, key in entry.derivation.reads)
    holding = {
        key: {index.files[int(n)].path for n in np.unique(index.records.file[entry.chunks.record])}
        for key, entry in index.tensors.items()
    }
    used = {path for key in read for path in holding.get(key, ())}
    units = [unit for unit in checkpoint.units if used & set(unit.candidate.files)]
    paths = {path for unit in units for path in unit.candidate.files}
    # What no unit has was made of a part of its files, such as small arrays in a tree of Orbax.
    there = {path for unit in checkpoint.units for path in unit.candidate.files}
    held = [e for e in index.tensors.values() if paths & holding[e.key] or holding[e.key] - there]
    _refuse_lost(held, planned, read, root)
    for unit in checkpoint.units:
        is_optimizer = unit.is_optimizer
        if is_optimizer and unit not in units:
            # Nothing resumes from it alone. Who names the model in the step, and not the step, has
            # chosen to give that up.
            model = posixpath.join(root.location, checkpoint.folder, units[0].label)
            raise _refusal(
                f"training could not resume from the step any more: {unit.label!r} is the state of"
                " an optimizer, is not in the output, and would stay alone",
                root,
                "write it too (ckptkit convert --optimizer), remove whole steps with `ckptkit"
                f" prune`, or give the step up and pass {model} as SRC",
            )
    # What makes it a checkpoint goes first, so that a kill leaves nothing that looks like one: the
    # manifest of a step that ckptkit saved, and the marker of each unit.
    markers = [marker(unit.candidate) for unit in units]
    steps = (step_folder(unit.candidate.folder) for unit in units)
    manifests = (posixpath.join(step, MANIFEST_NAME) for step in steps)
    first = [*(path for path in manifests if is_there(folder, path)), *markers]
    files: list[FileRef] = []
    for path in dict.fromkeys([*first, *sorted(paths)]):
        try:
            files.append(folder.stat(path))
        except InputError as error:
            hint = "remove the checkpoint by hand"
            raise _refusal(f"{path!r} is merged from other files", root, hint) from error
    own = {file.path for file in index.files}
    unknown = [f.path for f in files if f.path in paths and f.size_bytes and f.path not in own]
    if unknown:  # such as files of further ranks of an earlier save
        more = f", and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        raise _refusal(
            f"{unknown[0]!r}{more} would be removed with the checkpoint, and is no part of it",
            root,
            "move it to another folder, or remove the checkpoint by hand",
        )
    named = [file.path for file in files]
    _refuse_unremovable(root, named)
    _refuse_step_in_use(root, named)
    return SourceRemoval(
        out=resolve_path(job.destination),
        request=_request_of(job),
        files=tuple((file.path, file.size_bytes, file.identity) for file in files),
        markers=tuple(markers),
        identity=describe_sources(planned.sources)[SOURCE_IDENTITY],
        values=len(index.values),
        root=root,
    )


def _refusal(message: str, root: Place, hint: str) -> RefusedError:
    return RefusedError(message, where=f"{_OPTION} {root.location}", hint=hint)


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
    if lost:
        first = lost[0]
        what = "unrounded values of tensor" if first.master is not None else f"{first.part} tensor"
        more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        raise _refusal(
            f"the files that were read hold what is not in the output: {what} {first.name!r}{more}",
            root,
            "write it too (--optimizer, --dtype float32, no --include, --exclude or --select), or"
            " remove the checkpoint by hand",
        )


def _refuse_step_in_use(root: Place, paths: list[str]) -> None:
    """Refuses a step that is being pushed, or is marked at a store as being read."""
    for path in sorted({posixpath.join(root.location, path) for path in paths}):
        parts = path.split("/")
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


def _refuse_unremovable(root: Place, paths: Collection[str]) -> None:
    if is_url(root):
        if is_read_only(root):
            raise RefusedError(
                f"nothing can be removed from {root.protocol}://",
                where=root.location,
                hint="leave --delete-source out",
            )
        return
    folder = local_path(root).resolve()
    for path in paths:
        file = folder / path
        if file.resolve() != file or not file.is_file():
            raise RefusedError(
                f"{path!r} is no file of its own but a link, or is behind one",
                where=root.location,
                hint="remove the file that it points to by hand, and leave out --delete-source",
            )


def _put_record(root: Place, name: str, data: bytes) -> None:
    """Writes a small file that is durable and whole, or not there."""
    if is_url(root):
        store = get_store(root)
        with error_translator(root.location, store.options)():
            path = f"{store.path_of(root.location)}/{name}"
            store.put_small(path, data)
        return
    folder = local_path(root).resolve()
    try:
        replace_file(folder / name, data, LOCAL_DISK, draft=folder / f"{name}.new")
    except OSError as error:
        raise OutputError(
            f"the removal cannot be recorded: {error.strerror}",
            where=root.location,
            hint="the output is whole and verified; the source was not removed",
        ) from error


def remove_files(root: Place, paths: Sequence[str], *, last: str) -> None:
    """Removes files in the order given, `last` at the end, and folders that are empty then.

    Some may have been removed already; the root is removed too if it is empty.
    """
    if is_url(root):
        store = get_store(root)
        with error_translator(root.location, store.options)():
            base = store.path_of(root.location)
            for path in (*paths, last):
                _remove_object(store, base, path)
        return
    folder = local_path(root).resolve()
    _remove_file(root, folder / f"{last}.new", f"the draft of its record, and {len(paths)} files")
    for number, path in enumerate(paths):
        _remove_file(root, folder / path, f"{path!r}, and {len(paths) - number - 1} files after it")
    for parent in sorted({(folder / path).parent for path in paths}, reverse=True):
        _remove_empty(parent, folder)
    _remove_file(root, folder / last, "the record of the removal")
    _remove_empty(folder, folder)


def _remove_file(root: Place, path: Path, what: str) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot be removed: {what}: {error.strerror}",
            where=root.location,
            hint="the output is whole and verified; run the same command again, or remove the"
            " rest by hand",
        ) from error


def _remove_empty(path: Path, root: Path) -> None:
    with suppress(OSError):  # another file is there, which is allowed
        while path.is_relative_to(root):
            if path.exists():
                path.rmdir()
            path = path.parent


def _remove_object(store: RemoteStore, base: str, path: str) -> None:
    store.delete(base, [path])
