"""One step on disk, opened for resuming: its manifest, its DCP directories, its small files."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast, get_args

from ckptkit.core.closing import Closing
from ckptkit.core.errors import ChecksumError, MissingFileError, ResumeError
from ckptkit.core.index import KeyPath, TensorIndex
from ckptkit.core.manifest import (
    MANIFEST_NAME,
    RUN_FACTS,
    Manifest,
    check_manifest_size,
    parse_manifest,
)
from ckptkit.formats.base import Candidate
from ckptkit.formats.dcp import METADATA, DcpReader
from ckptkit.pipeline.steps import digest_problems, lost_entries
from ckptkit.storage.base import Folder
from ckptkit.storage.places import Place, open_source
from ckptkit.training import names
from ckptkit.training.kinds import Layout
from ckptkit.training.near_copies import NearPlace, with_near_files
from ckptkit.training.objects_on_disk import read_object, read_torch_file
from ckptkit.training.saved_entries import SavedEntry, SavedFacts, parse_facts
from ckptkit.training.structures import Nodes, parse_structures


class StoredStep(Closing):
    """A step's directory; also one that accelerate or `dcp.save` wrote, without a manifest.

    Attributes:
        manifest: Its manifest, None where it has none.
        source: Its files, open.
    """

    def __init__(self, place: Path | Place, manifest: Manifest | None = None) -> None:
        """Opens it.

        Args:
            place: The directory, or its URL.
            manifest: What it says of itself, where that is known.

        Raises:
            InputError: If it cannot be opened.
        """
        self.manifest = manifest
        self.source: Folder = open_source(place)
        self._indexes: dict[str, TensorIndex] = {}
        self._facts: SavedFacts | None = None
        self._structures: dict[tuple[str, KeyPath], Nodes] | None = None

    @classmethod
    def opened(cls, place: Path | Place) -> Self:
        """Opens a step with the manifest that lies in it, if there is one.

        Raises:
            InputError: If it cannot be opened, or its manifest is damaged.
        """
        stored = cls(place)
        try:
            if stored.has_file(MANIFEST_NAME):
                data = stored._small_file(MANIFEST_NAME)
                where = posixpath.join(stored.source.location, MANIFEST_NAME)
                stored.manifest = parse_manifest(data, where=where)
                if isinstance(place, NearPlace):
                    stored.source = with_near_files(stored.source, place.near, stored.manifest)
        except BaseException:
            stored.close()
            raise
        return stored

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it, None where that is not known."""
        found = self.manifest.source.get("world_size") if self.manifest else None
        return found if isinstance(found, int) else None

    @property
    def layout(self) -> Layout | None:
        """How its directory is laid out; None where that is not known.

        Without a manifest it is told by the names that only one tool gives.
        """
        if self.manifest is not None:
            found = self.manifest.source.get("layout")
            return cast(Layout, found) if found in get_args(Layout) else None
        if self.has_file(METADATA):
            return "dcp"
        if self.has_file(names.TRAINER_STATE) or self.has_file(names.trainer_scheduler_file(0)):
            return "trainer"
        return "accelerate"

    @property
    def attempt(self) -> str:
        """Names the save that wrote it; empty where that is not known."""
        return str(self.manifest.source.get("attempt", "")) if self.manifest else ""

    @property
    def lost(self) -> Mapping[str, str]:
        """The entries of the mapping that could not be saved, by name, each with the reason."""
        return {} if self.manifest is None else lost_entries(self.manifest)

    @property
    def entries(self) -> tuple[SavedEntry, ...] | None:
        """The entries of the mapping that it was saved from, None where that is not known.

        Raises:
            InputError: If what says so is damaged.
        """
        return self._known_facts().entries

    @property
    def has_structures(self) -> bool:
        """Whether the step says how nested values are put together: older ones do not.

        Raises:
            InputError: If what says so is damaged.
        """
        return self._known_facts().has_structures

    def _known_facts(self) -> SavedFacts:
        if self._facts is None:
            self._facts = SavedFacts()
            if self.has_file(RUN_FACTS):
                data = self._small_file(RUN_FACTS)
                where = posixpath.join(self.source.location, RUN_FACTS)
                self._facts = parse_facts(data, where=where)
        return self._facts

    def structure(self, unit: str, path: KeyPath) -> Nodes | None:
        """Returns how a nested value is put together; None where its leaves tell that.

        Raises:
            InputError: If what says so is damaged.
        """
        if self._structures is None:
            self._structures = dict(self._read_structures()) if self.has_structures else {}
        return self._structures.get((unit, path))

    def _read_structures(self) -> Iterator[tuple[tuple[str, KeyPath], Nodes]]:
        for file in self.manifest.files if self.manifest is not None else ():
            if file.startswith(names.VALUES_FILES):
                where = posixpath.join(self.source.location, file)
                for one in parse_structures(self.file(file), where=where):
                    yield (one.unit, one.path), one.nodes

    def entry(self, key: str, position: int | None) -> SavedEntry | None:
        """Returns an entry of the mapping, None where there was none, or none is known."""
        found = (e for e in self.entries or () if (e.key, e.position) == (key, position))
        return next(found, None)

    def index(self, unit: str) -> TensorIndex:
        """Returns the index of a DCP directory.

        Raises:
            ResumeError: If nothing was saved there.
            InputError: If it is damaged.
        """
        if unit not in self._indexes:
            path = posixpath.join(unit, METADATA)
            self._require(path)
            candidate = Candidate(DcpReader.name, unit, (path,), "")
            self._indexes[unit] = DcpReader().read_index(self.source, candidate)
        return self._indexes[unit]

    def has_unit(self, unit: str) -> bool:
        """Tells whether something was saved in a DCP directory."""
        return self.has_file(posixpath.join(unit, METADATA))

    def has_value(self, unit: str, path: KeyPath) -> bool:
        """Tells whether there is a value that is no tensor under a key."""
        return path in self.index(unit).values

    def values(self, unit: str, start: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        """Yields the values below a key path, each with the rest of its path.

        Raises:
            ResumeError: If one holds more than plain values.
            InputError: If one is damaged.
        """
        for path in self.index(unit).values:
            if path[: len(start)] == start:
                yield path[len(start) :], self.value(unit, path)

    def value(self, unit: str, path: KeyPath) -> Any:
        """Returns the value under a key; see `values`."""
        blob = self.index(unit).values[path]
        return read_object(self.source, blob, where=repr(".".join(map(str, path))))

    def file(self, path: str) -> Any:
        """Returns the value in a small file; see `values`."""
        self._require(path)
        return read_torch_file(self.source, path)

    def has_file(self, path: str) -> bool:
        """Tells whether the step was saved with a file."""
        if self.manifest is not None:
            return path in self.manifest.files
        try:
            self.source.stat(path)
        except MissingFileError:
            return False
        return True

    def digest(self, path: str) -> str | None:
        """Returns the digest that the manifest has of a file, None where it has none."""
        record = self.manifest.files.get(path) if self.manifest is not None else None
        return record.digest or None if record is not None else None

    def check_digests(self) -> None:
        """Reads all small files of which the manifest has a checksum, and compares them.

        Raises:
            ChecksumError: If one was changed, or cannot be read.
        """
        if self.manifest is not None:
            for problem in digest_problems(self.source, "", self.manifest, leaving_out=()):
                where = posixpath.join(self.source.location, problem.where)
                raise ChecksumError(problem.message, where=where)

    def _small_file(self, path: str) -> bytes:
        size = self.source.stat(path).size_bytes
        check_manifest_size(size, where=path)
        return self.source.read(path, 0, size)

    def close(self) -> None:
        """Closes its files."""
        self.source.close()

    def _require(self, path: str) -> None:
        if not self.has_file(path):
            raise ResumeError(
                f"{path!r} was not saved with this step",
                where=self.source.location,
                hint="resume with the models, optimizers and objects that were saved",
            )
