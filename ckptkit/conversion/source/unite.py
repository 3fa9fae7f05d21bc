"""Checkpoints in several parts: units, copies of nodes, and shards beside their model.

A node's copy of a step has a manifest that names the ranks that wrote it, and their records. From
the records of all copies the index of every part of the step is merged, as a commit does.

Torch's consolidation leaves the shards beside the model. It writes headers first and data later,
drops tensors that its mapping does not name, and writes 0 for tensors without dimensions. So its
model is taken only where it is complete and equals the shards; else the user chooses.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.core.errors import (
    AmbiguousSourceError,
    CkptkitError,
    FormatError,
    InputError,
    MissingFileError,
)
from ckptkit.core.index import (
    Key,
    KeyPath,
    Problem,
    RecordTable,
    RunFacts,
    TensorEntry,
    TensorIndex,
)
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    NODE_RANKS,
    TRAINING,
    FileRecord,
    Manifest,
    source_of_all,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.discovery import CheckpointUnit, ResolvedSource, is_leftover
from ckptkit.storage.base import Source
from ckptkit.storage.locations import relative_path
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.overlay import OverlaySource

if TYPE_CHECKING:
    from ckptkit.writer.merge import Merged


_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Copy:
    """One directory's manifest of a step."""

    source: Source
    manifest: Manifest

    @property
    def ranks(self) -> frozenset[int] | None:
        """The ranks whose files it has; None where it is a whole step."""
        ranks = self.manifest.source.get(NODE_RANKS)
        if not isinstance(ranks, list):
            return None
        return frozenset(rank for rank in ranks if isinstance(rank, int))


def unite(
    source: OverlaySource, steps: Iterable[str]
) -> tuple[dict[str, bytes], list[str], dict[str, Problem]]:
    """Merges steps that exist only as copies on the disks of nodes.

    Args:
        source: The directories.
        steps: Folders of steps, relative to them.

    Returns:
        Files of the whole steps (manifests, and the index of every unit), folders that the whole
        steps do not have, and why a step cannot be merged, by its folder.
    """
    files: dict[str, bytes] = {}
    without: list[str] = []
    problems: dict[str, Problem] = {}
    for step in dict.fromkeys(steps):
        copies = list(_copies(source.folders, step))
        if all(copy.ranks is None for copy in copies):
            continue
        try:
            merged, empty = _Step(step, copies, source).merge()
            files |= merged
            without += empty
        except InputError as error:
            path = posixpath.join(step, MANIFEST_NAME)
            at = f", at {error.where}" if error.where else ""
            problems[step] = Problem(error.code, path, f"{error.message}{at}")
    return files, without, problems


def _copies(folders: Sequence[Source], step: str) -> Iterable[_Copy]:
    for folder in folders:
        try:
            manifest = read_manifest(folder, step)
        except CkptkitError:
            continue  # reported when the step is read as a whole
        if manifest.kind == TRAINING:
            yield _Copy(folder, manifest)


class _Step:
    """One step, and the copies of it."""

    def __init__(self, folder: str, copies: Sequence[_Copy], source: OverlaySource) -> None:
        self._folder = folder
        self._copies = copies
        self._source = source

    def merge(self) -> tuple[dict[str, bytes], list[str]]:
        """Returns the files of the whole step, and the folders that it does not have."""
        first = self._copies[0]
        for copy in self._copies[1:]:
            saves = [str(c.manifest.source.get("attempt")) for c in (first, copy)]
            if saves[0] != saves[1]:
                raise FormatError(
                    f"is of save {saves[0]!r} in {first.source.location} and of {saves[1]!r} in"
                    f" {copy.source.location}, where copies of one save were expected"
                )
        path = posixpath.join(self._folder, MANIFEST_NAME)
        whole = next((copy for copy in self._copies if copy.ranks is None), None)
        if whole is not None:
            return {path: whole.manifest.to_json()}, []
        from ckptkit.plan.layouts.dcp_metadata import METADATA_NAME, make_metadata

        merged = self._merged(self._world_size())
        indexes = {
            posixpath.join(name, METADATA_NAME): make_metadata(unit.tensors, unit.objects)
            for name, unit in merged.units.items()
        }
        manifest = self._manifest(merged, indexes)
        below = {posixpath.join(self._folder, name): data for name, data in indexes.items()}
        empty = [posixpath.join(self._folder, name) for name in merged.empty]
        return {path: manifest.to_json(), **below}, empty

    def _manifest(self, merged: Merged, indexes: Mapping[str, bytes]) -> Manifest:
        """Returns the manifest that a commit of the whole step would have written."""
        from ckptkit.writer.merge import with_findings

        gone = tuple(f"{name}/" for name in merged.empty)
        files = {
            name: record
            for copy in self._copies
            for name, record in copy.manifest.files.items()
            if not name.startswith(gone)
        }
        files |= {name: FileRecord(len(data)) for name, data in indexes.items()}
        # Some entries are known to rank 0 only.
        first = next(copy for copy in self._copies if 0 in (copy.ranks or ()))
        source = with_findings(source_of_all(first.manifest.source), merged.lost, merged.notes)
        return replace(first.manifest, source=source, files=files)

    def _world_size(self) -> int:
        world_size = self._copies[0].manifest.source.get("world_size")
        if not isinstance(world_size, int) or world_size < 1:
            raise FormatError("does not say how many ranks there were")
        here = frozenset[int]().union(*(copy.ranks or () for copy in self._copies))
        missing = world_size - len(here.intersection(range(world_size)))
        if missing:
            first = islice((rank for rank in range(world_size) if rank not in here), _NAMED)
            named = ", ".join(map(str, first))
            more = f" and {missing - _NAMED:,} more" if missing > _NAMED else ""
            looked = ", ".join(folder.location for folder in self._source.folders)
            raise MissingFileError(
                f"says that this is a node's copy, and the files of rank{'s'[: missing > 1]}"
                f" {named}{more} of {world_size} are not in {looked}; name the copies of the other"
                " nodes with --also"
            )
        return world_size

    def _merged(self, world_size: int) -> Merged:
        from ckptkit.writer.merge import Merger
        from ckptkit.writer.record import RECORDS_FOLDER, parse_record

        merger = Merger(world_size)
        for rank in range(world_size):
            path = posixpath.join(self._folder, RECORDS_FOLDER, f"{rank}.json")
            where = posixpath.join(self._source.location, path)
            size = self._source.stat(path).size_bytes
            merger.add(parse_record(self._source.read(path, 0, size), where=where), where=where)
        return merger.result()


Read = Callable[[Candidate], TensorIndex]


def compare_leftovers(
    source: Source,
    location: str,
    candidates: Sequence[Candidate],
    read: Read,
    found: ResolvedSource,
    select: str | None,
) -> ResolvedSource:
    """Compares the model of a step with the shards beside it.

    Args:
        source: The folder of both.
        location: The path as the user typed it.
        candidates: All checkpoints that were recognised there.
        read: Parses a candidate.
        found: The checkpoint that was chosen.
        select: The user's selection, or None.

    Returns:
        The checkpoint, with a note of the shards that are ignored.
    """
    notes = list(found.notes)
    for unit in found.units:
        is_named = select is not None and f"/{select}".endswith(f"/{unit.label}")
        if unit.candidate.format != "safetensors" or is_named:
            continue
        for shards in candidates:
            if not is_leftover(shards, {unit.candidate.folder}):
                continue
            # As `--select` names them.
            name = relative_path(shards.folder, found.folder)
            name = posixpath.basename(shards.files[0]) if name == "." else name
            try:
                reason = next(_differences(source, read(unit.candidate), read, shards), "")
            except InputError as error:
                reason = f"it is not whole ({error.message})"
            if reason:
                raise AmbiguousSourceError(
                    f"holds the model {unit.label!r} and the shards in {name!r} that it was made"
                    f" from, and {reason}",
                    where=posixpath.join(location, found.folder),
                    hint=f"pass --select {name} to have the model made anew, or"
                    f" --select {unit.label} to take it as it is",
                )
            notes.append(f"{name!r} holds the shards of the same model: left alone")
    return replace(found, notes=tuple(notes))


def _differences(
    source: Source, whole: TensorIndex, read: Read, shards: Candidate
) -> Iterator[str]:
    try:
        parts = read(shards)
    except InputError:
        return  # some shards are missing, and the model is complete without them
    for key in [*parts.tensors, *whole.tensors]:
        mine, other = whole.tensors.get(key), parts.tensors.get(key)
        if mine is None or other is None:
            yield f"it {'lacks' if mine is None else 'alone has'} tensor {key!r}"
        elif (mine.dtype, mine.shape) != (other.dtype, other.shape):
            yield (
                f"has tensor {key!r} as {mine.dtype.name} {list(mine.shape)} against"
                f" {other.dtype.name} {list(other.shape)}"
            )
        elif not mine.shape:
            numbers = []  # the bytes of tensors without dimensions
            for index, entry in ((whole, mine), (parts, other)):
                record = index.records[int(entry.chunks.record[0])]
                path = index.files[record.file].path
                numbers.append(source.read(path, record.start, record.stop))
            if numbers[0] != numbers[1]:
                yield f"has another number in {key!r}, as torch's consolidation writes 0 there"


def join_indexes(units: Sequence[CheckpointUnit], indexes: Sequence[TensorIndex]) -> TensorIndex:
    """Joins the indexes of units; trees are named by unit where several units hold models."""
    if len(indexes) == 1:
        return indexes[0]
    several = sum(1 for unit in units if not unit.is_optimizer) > 1
    tensors: dict[Key, TensorEntry] = {}
    problems: list[Problem] = []
    aliases: list[frozenset[Key]] = []
    values: dict[KeyPath, Any] = {}
    first_record = 0
    for unit, index in zip(units, indexes, strict=True):
        trees = {entry.tree for entry in index.of_part("model")}
        taken = tensors.keys() & index.tensors.keys()
        keys = {key: Key(f"{unit.label}/{key}") if taken else key for key in index.tensors}
        for key, entry in index.tensors.items():
            label, master = entry.tree, entry.master
            if master is not None:
                master = replace(master, key=keys[master.key])
            if several:
                label = f"{unit.label}/{entry.tree}" if len(trees) > 1 else unit.label
            chunks = entry.chunks.shifted(first_record)
            tensors[keys[key]] = replace(
                entry, key=keys[key], tree=label, chunks=chunks, master=master
            )
        first_record += len(index.records)
        problems += [
            replace(problem, where=keys.get(Key(problem.where), problem.where))
            for problem in index.problems
        ]
        aliases += [frozenset(keys[key] for key in group) for group in index.aliases]
        for path, value in index.values.items():  # two optimizers have equal keys
            values[path if path not in values else (unit.label, *path)] = value
    pairs = zip(units, indexes, strict=True)
    formats = [index.format for unit, index in pairs if not unit.is_optimizer]
    return TensorIndex(
        format=" + ".join(dict.fromkeys(formats or [index.format for index in indexes])),
        files=tuple(file for index in indexes for file in index.files),
        records=_join_records(indexes),
        tensors=tensors,
        values=values,
        aliases=tuple(aliases),
        # Files of ranks without tensors, such as the state of a trainer, say least.
        run=_join_facts([i.run for i in sorted(indexes, key=lambda i: not i.tensors)]),
        problems=tuple(problems),
    )


def _join_records(indexes: Sequence[TensorIndex]) -> RecordTable:
    first_file = np.cumsum([0, *(len(index.files) for index in indexes)])
    tables = [index.records for index in indexes]
    first_record = np.cumsum([0, *map(len, tables)]).tolist()
    joined = RecordTable(
        np.concatenate([t.file + first for t, first in zip(tables, first_file, strict=False)]),
        np.concatenate([t.start for t in tables]),
        np.concatenate([t.stop for t in tables]),
        np.concatenate([t.container for t in tables]),
    )
    digests = {
        first + number: digest
        for first, table in zip(first_record, tables, strict=False)
        for number, digest in table.digests.items()
    }
    return joined.with_sums(np.concatenate([t.crc32 for t in tables]), digests)


def _join_facts(runs: Sequence[RunFacts]) -> RunFacts:
    sizes = [run.world_size for run in runs if run.world_size is not None]
    return RunFacts(
        world_size=max(sizes, default=None),
        step=next((run.step for run in runs if run.step is not None), None),
        writer=next((run.writer for run in runs if run.writer), ""),
        version=next((run.version for run in runs if run.version), ""),
        mesh=next((run.mesh for run in runs if run.mesh), ()),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
        settings=next((run.settings for run in runs if run.settings), ()),
        warnings=tuple(dict.fromkeys(warning for run in runs for warning in run.warnings)),
    )
