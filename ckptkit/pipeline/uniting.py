"""Steps of which each node has its own ranks' files, put together from the copies of all nodes.

A node's copy has a manifest that says which ranks wrote there, and their records, from which the
index of every part of the step is merged, as the commit of a whole step does.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptkit.core.errors import CkptkitError, FormatError, InputError, MissingFileError
from ckptkit.core.index import Problem
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    NODE_RANKS,
    TRAINING,
    FileRecord,
    Manifest,
    check_manifest_size,
    parse_manifest,
)
from ckptkit.layouts.dcp_metadata import METADATA_NAME, metadata_pickle
from ckptkit.storage.local import LocalSource
from ckptkit.storage.overlay import OverlaySource
from ckptkit.writer.merge import Merger
from ckptkit.writer.record import FOLDER, parse_record

_NAMED = 8


@dataclass(frozen=True, slots=True)
class United:
    """What came of the steps that lie in parts.

    Attributes:
        made: Files that stand for the whole: manifests, and the index of every unit.
        problems: By folder of a step, why it cannot be put together.
    """

    made: Mapping[str, bytes] = field(default_factory=dict)
    problems: Mapping[str, Problem] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One directory's manifest of a step."""

    source: LocalSource
    manifest: Manifest

    @property
    def ranks(self) -> frozenset[int] | None:
        """The ranks whose files lie there; None where it is a whole step."""
        found = self.manifest.source.get(NODE_RANKS)
        return frozenset(map(int, found)) if isinstance(found, list) else None


def unite(source: OverlaySource, steps: Iterable[str]) -> United:
    """Puts together what lies in parts; steps that are whole are left alone.

    Args:
        source: The directories.
        steps: Folders of steps, relative to them.

    Returns:
        What stands for the whole, and what is in the way.
    """
    made: dict[str, bytes] = {}
    problems: dict[str, Problem] = {}
    for step in dict.fromkeys(steps):
        copies = list(_copies(source.folders, step))
        if all(copy.ranks is None for copy in copies):
            continue
        try:
            made.update(_Step(step, copies, source).put_together())
        except InputError as error:
            path = posixpath.join(step, MANIFEST_NAME)
            problems[step] = Problem(error.code, path, error.message)
    return United(made, problems)


def _copies(folders: Sequence[LocalSource], step: str) -> Iterable[_Copy]:
    path = posixpath.join(step, MANIFEST_NAME)
    for folder in folders:
        try:
            size = folder.stat(path).size_bytes
            check_manifest_size(size, where=path)
            manifest = parse_manifest(folder.read(path, 0, size), where=path)
        except CkptkitError:
            continue  # is told when the step is looked at as a whole
        if manifest.kind == TRAINING:
            yield _Copy(folder, manifest)


class _Step:
    """One step, and the copies of it."""

    def __init__(self, folder: str, copies: Sequence[_Copy], source: OverlaySource) -> None:
        self._folder = folder
        self._copies = copies
        self._source = source

    def put_together(self) -> dict[str, bytes]:
        """Returns the files that stand for the whole step.

        Raises:
            InputError: If ranks are missing, or copies do not belong together.
        """
        self._check_one_save()
        path = posixpath.join(self._folder, MANIFEST_NAME)
        whole = next((copy for copy in self._copies if copy.ranks is None), None)
        if whole is not None:
            return {path: whole.manifest.to_json()}
        made = self._metadata(self._world_size())
        files = {
            name: record for copy in self._copies for name, record in copy.manifest.files.items()
        }
        files |= {
            posixpath.relpath(name, self._folder or "."): FileRecord(len(data))
            for name, data in made.items()
        }
        about = {k: v for k, v in self._copies[0].manifest.source.items() if k != NODE_RANKS}
        manifest = replace(self._copies[0].manifest, source=about, files=files)
        return {path: manifest.to_json(), **made}

    def _check_one_save(self) -> None:
        first = self._copies[0]
        for copy in self._copies[1:]:
            saves = [str(c.manifest.source.get("attempt")) for c in (first, copy)]
            if saves[0] != saves[1]:
                raise FormatError(
                    f"is of save {saves[0]!r} in {first.source.location} and of {saves[1]!r} in"
                    f" {copy.source.location}, where copies of one save were expected"
                )

    def _world_size(self) -> int:
        world_size = self._copies[0].manifest.source.get("world_size")
        if not isinstance(world_size, int):
            raise FormatError("does not say how many ranks there were")
        here = frozenset[int]().union(*(copy.ranks or () for copy in self._copies))
        missing = sorted(frozenset(range(world_size)) - here)
        if missing:
            named = ", ".join(map(str, missing[:_NAMED]))
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            looked = ", ".join(folder.location for folder in self._source.folders)
            raise MissingFileError(
                f"says that this is a node's copy, and the files of rank{'s'[: len(missing) > 1]}"
                f" {named}{more} of {world_size} are not in {looked}; name the copies of the other"
                " nodes with --also"
            )
        return world_size

    def _metadata(self, world_size: int) -> dict[str, bytes]:
        merger = Merger(world_size)
        for rank in range(world_size):
            path = posixpath.join(self._folder, FOLDER, f"{rank}.json")
            where = posixpath.join(self._source.location, path)
            size = self._source.stat(path).size_bytes
            merger.add(parse_record(self._source.read(path, 0, size), where=where), where=where)
        made = {}
        for name, unit in merger.units().items():
            path = posixpath.join(self._folder, name, METADATA_NAME)
            made[path] = metadata_pickle(unit.tensors, unit.objects)
        return made
