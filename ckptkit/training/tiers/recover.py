"""Recovery of steps that an earlier job left on the nodes' own disks.

Complete steps are drained; of a step at a URL, files that a node still has are read from its disk.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.core.crc import crc32
from ckptkit.core.errors import CkptkitError, InputError, SaveError, error_from_json
from ckptkit.core.index import FileRange, FileRef
from ckptkit.core.manifest import Manifest, source_of_all
from ckptkit.core.text import Closing
from ckptkit.runs.marks import is_step_folder
from ckptkit.storage.base import Folder, distant, prefetch
from ckptkit.storage.local.source import LocalSource
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.storage.places import Place
from ckptkit.training.agree.peers import Peers, name_ranks
from ckptkit.training.run_folders import TrainingRun
from ckptkit.training.save.writer_process import WriterProcess
from ckptkit.training.tiers.tier import LocalTier, NodeCopy
from ckptkit.writer.drain import BESIDE
from ckptkit.writer.messages import Commit, Discard, Drain, RecordProof
from ckptkit.writer.record import RECORDS_FOLDER, parse_record

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Drains what earlier jobs left on the nodes' disks.

    Attributes:
        tier: This node's disk.
        run: The run that is saved to.
        peers: The ranks.
        process: Copies, and commits on rank 0.
        timeout_seconds: How long to wait for other ranks.
        reported: The attempts of which rank 0 has logged that files are missing.
    """

    tier: LocalTier
    run: TrainingRun[Any]
    peers: Peers
    process: WriterProcess
    timeout_seconds: float
    reported: set[str] = field(default_factory=set)

    def run_all(self) -> int:
        """Drains the newest step that is complete over all nodes, unless the run has a newer one.

        Steps with names of their own are drained too, since no newer step replaces them. The number
        of ranks and their nodes may have changed since.

        Returns:
            The largest `save_number` that was drained, 0 for none; the same on all ranks.
        """
        here = _described(self.tier) if self.tier.leads else []
        topic = "what is on the nodes' own disks"
        choose = partial(self._next, set())
        number = 0
        while (entry := self._agree(topic, here, choose)) is not None:
            if self._drain(entry):
                number = max(number, entry["save_number"])
        return number

    def _drain(self, entry: Mapping[str, Any]) -> bool:
        """Drains a step, and returns whether it was committed."""
        if self.peers.rank == 0:
            _log_drain(entry)
        try:
            outcome = self._copy_share(entry)
        except CkptkitError as error:
            outcome = {"error": error.to_json()}
        agreed = self._agree(
            "draining an earlier job's step", outcome, lambda all_of: self._commit(entry, all_of)
        )
        if agreed is None:
            if str(self.tier.ranks[0]) in entry["nodes"]:
                self.tier.note_drained(entry["name"])
            return True
        failure = error_from_json(agreed)
        if not isinstance(failure, InputError):
            raise failure
        if self.peers.rank == 0:
            logger.warning("%s on the nodes' own disks is skipped: %s", entry["name"], failure)
        return False

    def _agree(self, topic: str, value: Any, decide: Any) -> Any:
        # Rank 0 commits after it has waited for all ranks, so the others wait for both.
        timeout_seconds = self.timeout_seconds * (2 if self.peers.rank else 1)
        return self.peers.agree(topic, value, decide, timeout_seconds=timeout_seconds)

    def _next(
        self, tried: set[str], of_ranks: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any] | None:
        """Chooses, on rank 0, the newest complete step; logs what newer ones lack."""
        entries: dict[str, dict[str, Any]] = {}
        for leader, copies in enumerate(of_ranks):
            for copy in copies:
                entry = entries.setdefault(copy["attempt"], {**copy, "nodes": {}})
                entry["nodes"][str(leader)] = copy["ranks"]
                if 0 in copy["ranks"]:  # its manifest has what only rank 0 knows
                    entry["manifest"] = copy["manifest"]
        last = self.run.last_save_number()
        for entry in sorted(entries.values(), key=lambda entry: -entry["save_number"]):
            if entry["attempt"] in tried or not self._is_newer(entry, last):
                continue
            present = {rank for ranks in entry["nodes"].values() for rank in ranks}
            missing = sorted(set(range(entry["world_size"])) - present)
            if not missing:
                tried.add(entry["attempt"])
                return entry
            self._log_missing(entry, missing)
        return None

    def _is_newer(self, entry: Mapping[str, Any], last: int) -> bool:
        name = entry["name"]
        known = last if is_step_folder(name) else self.run.save_number_of(name)
        return bool(entry["save_number"] > known)

    def _log_missing(self, entry: Mapping[str, Any], missing: Sequence[int]) -> None:
        if entry["attempt"] in self.reported:
            return
        self.reported.add(entry["attempt"])
        logger.warning(
            "%s on the nodes' own disks is skipped: no node of this job has all files of %s",
            entry["name"],
            name_ranks(missing),
        )

    def _target(self, entry: Mapping[str, Any]) -> Path:
        return self.run.working_folder(Path(entry["name"]), self.peers.nonce, 0)

    def _copy_share(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Copies this rank's share of the files of its node; returns their proofs."""
        mine = self._share(entry["nodes"])
        if not mine:
            return {"proofs": []}
        folder = self.tier.path / entry["name"]
        records = {rank: f"{RECORDS_FOLDER}/{rank}.json" for rank in mine}
        try:
            data = {rank: (folder / path).read_bytes() for rank, path in records.items()}
            # The sidecar is with the files of rank 0, which two nodes may have.
            further = _further(folder, self.tier) if 0 in mine else {}
        except OSError as error:
            raise InputError(f"cannot be read: {error}", where=str(folder)) from error
        request = Drain(
            attempt=entry["attempt"],
            folder=str(folder),
            target=str(self._target(entry)),
            records=tuple(records.values()),
            further=tuple(further),
        )
        self.process.request(request)
        return {
            "beside": further,
            "proofs": [
                {
                    "rank": rank,
                    "path": records[rank],
                    "size_bytes": len(text),
                    "crc32": crc32(text),
                }
                for rank, text in data.items()
            ],
        }

    def _share(self, nodes: Mapping[str, Sequence[int]]) -> list[int]:
        """Returns the earlier ranks whose files this rank copies; those of a node share them."""
        taken: set[int] = set()  # two nodes may have a rank's files: the first one copies them
        for leader in sorted(nodes, key=int):
            left = [rank for rank in nodes[leader] if rank not in taken]
            taken.update(left)
            if int(leader) == self.tier.ranks[0]:
                return left[self.tier.ranks.index(self.peers.rank) :: len(self.tier.ranks)]
        return []

    def _commit(
        self, entry: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Commits, on rank 0, what all ranks have copied; returns the error, if any."""
        target = self._target(entry)
        error = next((value["error"] for value in of_ranks if "error" in value), None)
        if error is None:
            proofs = sorted(
                (RecordProof(**proof) for value in of_ranks for proof in value["proofs"]),
                key=lambda proof: proof.rank,
            )
            beside = target / BESIDE
            beside_files = dict(ChainMap(*(value.get("beside", {}) for value in of_ranks)))
            try:
                self.process.request(
                    Commit(
                        attempt=entry["attempt"],
                        folder=str(target),
                        final=str(self.run.below(entry["name"])),
                        proofs=tuple(proofs),
                        manifest={**entry["manifest"], "files": beside_files},
                        beside=str(beside) if beside.is_dir() else "",
                    )
                )
            except CkptkitError as caught:
                error = caught.to_json()
        if error is None:
            return None
        try:
            self.process.request(Discard(entry["attempt"], str(target)))
        except CkptkitError as caught:
            logger.warning("%s could not be removed: %s", target, caught)
        return dict(error)


def _log_drain(entry: Mapping[str, Any]) -> None:
    if entry["drained"]:
        logger.warning(
            "%s was drained before, but the run does not have it any more: it is drained again from"
            " the nodes' disks; to go back to an older step, use resume(state, step=N)",
            entry["name"],
        )
    else:
        logger.info("%s of an earlier job is drained from the nodes' disks", entry["name"])


def _described(tier: LocalTier) -> list[dict[str, Any]]:
    """Returns the parts of steps on this node as JSON values, for the other ranks."""
    try:
        copies = list(tier.copies())
    except OSError as error:
        logger.warning("%s cannot be listed: %s", tier.path, error)
        return []
    return [_document(copy) for copy in copies if _is_numbered(copy)]


def _is_numbered(copy: NodeCopy) -> bool:
    source = copy.manifest.source
    numbers = (source.get("save_number"), source.get("world_size"), source.get("step"))
    return all(isinstance(number, int) for number in numbers) and _is_whole(copy)


def _is_whole(copy: NodeCopy) -> bool:
    try:
        return all(
            (copy.path / name).stat().st_size == record.size_bytes
            for name, record in copy.manifest.files.items()
        )
    except OSError:
        return False


def _document(copy: NodeCopy) -> dict[str, Any]:
    source = source_of_all(copy.manifest.source)
    return {
        "name": copy.path.name,
        "attempt": str(source.get("attempt")),
        "save_number": source["save_number"],
        "world_size": source["world_size"],
        "ranks": list(copy.ranks),
        "drained": copy.is_drained,
        "manifest": json.loads(replace(copy.manifest, source=source, files={}).to_json()),
    }


def _further(folder: Path, tier: LocalTier) -> dict[str, dict[str, Any]]:
    """Returns the files of a node's part that no record names: the sidecar.

    Returns:
        Their entries of the manifest, by path.
    """
    copy = next((copy for copy in tier.copies() if copy.path == folder), None)
    if copy is None:
        raise SaveError("it was removed", where=str(folder))
    named = {
        file.path
        for rank in copy.ranks
        for file in parse_record(
            (folder / RECORDS_FOLDER / f"{rank}.json").read_bytes(), where=str(folder)
        ).files
    }
    files = copy.manifest.files
    return {
        path: {"size_bytes": files[path].size_bytes, "digest": files[path].digest}
        for path in sorted(files.keys() - named)
    }


class NearPlace(Place):
    """A URL of which this node may have a part.

    Attributes:
        near: The directory of that part.
    """

    __slots__ = ("near",)

    near: Path

    @classmethod
    def of(cls, place: Place, near: Path) -> NearPlace:
        """Returns a place with the directory that may have some of its files."""
        new = cls(place, place.options)
        new.near = near
        return new

    def step(self, name: str) -> NearPlace:
        return NearPlace.of(self.beside(posixpath.join(self, name)), self.near / name)


def with_near_files(far: Folder, near: Path, manifest: Manifest) -> Folder:
    """Returns a step's source that reads from the node's own disk what it has of that save.

    Args:
        far: The step.
        near: This node's part of it, which may not exist.
        manifest: Of the step.
    """
    try:
        copy = read_local_manifest(near)
    except (CkptkitError, OSError):
        return far
    if not _attempt(manifest) or _attempt(copy) != _attempt(manifest):
        return far
    names = [
        name
        for name, record in copy.files.items()
        if manifest.files.get(name) == record and _size(near / name) == record.size_bytes
    ]
    return _NearFirst(far, LocalSource(near), names)


def _attempt(manifest: Manifest) -> Any:
    return manifest.source.get("attempt")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


class _NearFirst(Closing):
    """A remote folder of which some files are read locally, until a local read fails."""

    def __init__(self, far: Folder, near: LocalSource, names: Collection[str]) -> None:
        self._far = far
        self._near = near
        self._names = frozenset(names)

    @property
    def location(self) -> str:
        return self._far.location

    def walk(self, depth: int) -> Iterator[str]:
        return self._far.walk(depth)

    def stat(self, path: str) -> FileRef:
        return self._far.stat(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        if path in self._names:
            try:
                return self._near.read(path, start, stop)
            except (InputError, OSError):
                self._names -= {path}
        return self._far.read(path, start, stop)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        if path in self._names:
            try:
                self._near.read_into(path, start, target)
            except (InputError, OSError):
                self._names -= {path}
            else:
                return
        self._far.read_into(path, start, target)

    @property
    def is_distant(self) -> bool:
        return distant(self._far) is not None

    def fetch(self, reads: Sequence[tuple[FileRange, memoryview]]) -> None:
        for wanted, target in reads:
            self.read_into(wanted.path, wanted.start, target)

    def prefetch(self, ranges: Collection[FileRange]) -> None:
        prefetch(self._far, [wanted for wanted in ranges if wanted.path not in self._names])

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        return self._far.changed(refs)

    def linked_folders(self) -> list[str]:
        return self._far.linked_folders()

    def close(self) -> None:
        self._near.close()
        self._far.close()
