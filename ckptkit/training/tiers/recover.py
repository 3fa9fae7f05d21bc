"""What an earlier job left on the nodes' own disks: drained if it is whole, else passed over.

Reading a step at a URL, and what of it lies on the node's own disk from there.
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
from ckptkit.writer.record import FOLDER, parse_record

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Brings what earlier jobs left on the nodes' disks to the shared place.

    Attributes:
        tier: This node's disk.
        run: The shared place.
        peers: The ranks.
        process: What copies, and on rank 0 commits.
        timeout_seconds: How long other ranks are waited for.
        told: The attempts of which rank 0 has said that something is missing.
    """

    tier: LocalTier
    run: TrainingRun[Any]
    peers: Peers
    process: WriterProcess
    timeout_seconds: float
    told: set[str] = field(default_factory=set)

    def run_all(self) -> int:
        """Drains the newest step that is whole over all nodes, where the run has none as new.

        So it does with steps that have names of their own, which no newer step replaces. Which
        rank is on which node may have changed since, and how many there are.

        Returns:
            The largest `save_number` of what was drained, 0 where there was nothing; the same on
            all ranks.
        """
        here = _described(self.tier) if self.tier.leads else []
        topic = "what lies on the nodes' own disks"
        choose = partial(self._next, set())
        number = 0
        while (found := self._agree(topic, here, choose)) is not None:
            if self._bring(found):
                number = max(number, found["save_number"])
        return number

    def _bring(self, found: Mapping[str, Any]) -> bool:
        """Drains a step, and tells whether the shared place has it now."""
        if self.peers.rank == 0:
            _tell(found)
        try:
            outcome = self._drained(found)
        except CkptkitError as error:
            outcome = {"error": error.to_json()}
        agreed = self._agree(
            "draining an earlier job's step", outcome, lambda all_of: self._commit(found, all_of)
        )
        if agreed is None:
            if str(self.tier.ranks[0]) in found["nodes"]:
                self.tier.note_drained(found["name"])
            return True
        failure = error_from_json(agreed)
        if not isinstance(failure, InputError):
            raise failure
        if self.peers.rank == 0:
            logger.warning("%s on the nodes' own disks is passed over: %s", found["name"], failure)
        return False

    def _agree(self, topic: str, value: Any, decide: Any) -> Any:
        # Rank 0 commits after it has waited for all, so the others have to wait for both.
        timeout_seconds = self.timeout_seconds * (2 if self.peers.rank else 1)
        return self.peers.agree(topic, value, decide, timeout_seconds=timeout_seconds)

    def _next(
        self, tried: set[str], of_ranks: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any] | None:
        """Chooses, on rank 0, the newest step that is whole; says what is missing of others."""
        found: dict[str, dict[str, Any]] = {}
        for leader, copies in enumerate(of_ranks):
            for copy in copies:
                entry = found.setdefault(copy["attempt"], {**copy, "nodes": {}})
                entry["nodes"][str(leader)] = copy["ranks"]
                if 0 in copy["ranks"]:  # only there lies what rank 0 alone was told
                    entry["manifest"] = copy["manifest"]
        last = self.run.last_save_number()
        for entry in sorted(found.values(), key=lambda one: -one["save_number"]):
            if entry["attempt"] in tried or not self._is_news(entry, last):
                continue
            there = {rank for ranks in entry["nodes"].values() for rank in ranks}
            missing = sorted(set(range(entry["world_size"])) - there)
            if not missing:
                tried.add(entry["attempt"])
                return entry
            self._say_missing(entry, missing)
        return None

    def _is_news(self, entry: Mapping[str, Any], last: int) -> bool:
        name = entry["name"]
        known = last if is_step_folder(name) else self.run.save_number_of(name)
        return bool(entry["save_number"] > known)

    def _say_missing(self, entry: Mapping[str, Any], missing: Sequence[int]) -> None:
        if entry["attempt"] in self.told:
            return
        self.told.add(entry["attempt"])
        logger.warning(
            "%s lies on the nodes' own disks without the files of %s, which no node of this job"
            " has whole: it is passed over",
            entry["name"],
            name_ranks(missing),
        )

    def _target(self, found: Mapping[str, Any]) -> Path:
        return self.run.working_folder(Path(found["name"]), self.peers.nonce, 0)

    def _drained(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Copies this rank's share of what lies on its node; returns the proofs of it."""
        mine = self._share(found["nodes"])
        if not mine:
            return {"proofs": []}
        folder = self.tier.path / found["name"]
        records = {rank: f"{FOLDER}/{rank}.json" for rank in mine}
        try:
            data = {rank: (folder / path).read_bytes() for rank, path in records.items()}
            # What lies beside is with the files of rank 0, which two nodes may have.
            further = _further(folder, self.tier) if 0 in mine else {}
        except OSError as error:
            raise InputError(f"cannot be read: {error}", where=str(folder)) from error
        request = Drain(
            attempt=found["attempt"],
            folder=str(folder),
            target=str(self._target(found)),
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
        taken: set[int] = set()  # a rank may lie on two nodes: the first one has it
        for leader in sorted(nodes, key=int):
            left = [rank for rank in nodes[leader] if rank not in taken]
            taken.update(left)
            if int(leader) == self.tier.ranks[0]:
                return left[self.tier.ranks.index(self.peers.rank) :: len(self.tier.ranks)]
        return []

    def _commit(
        self, found: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Commits what all ranks have copied, on rank 0; returns what went wrong."""
        target = self._target(found)
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
                        attempt=found["attempt"],
                        folder=str(target),
                        final=str(self.run.below(found["name"])),
                        proofs=tuple(proofs),
                        manifest={**found["manifest"], "files": beside_files},
                        beside=str(beside) if beside.is_dir() else "",
                    )
                )
            except CkptkitError as caught:
                error = caught.to_json()
        if error is None:
            return None
        try:
            self.process.request(Discard(found["attempt"], str(target)))
        except CkptkitError as caught:
            logger.warning("%s was left behind: %s", target, caught)
        return dict(error)


def _tell(found: Mapping[str, Any]) -> None:
    if found["drained"]:
        logger.warning(
            "%s was drained before, and the run has it no more: it is drained again from the"
            " nodes' disks; to go back to an older step, use resume(state, step=N)",
            found["name"],
        )
    else:
        logger.info("%s of an earlier job is drained from the nodes' disks", found["name"])


def _described(tier: LocalTier) -> list[dict[str, Any]]:
    """Returns what the other ranks have to know of the parts of steps on this node."""
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
    """Returns the files of a node's part that none of its records names: what lies beside.

    Returns:
        What a manifest says of them, by path.
    """
    copy = next((one for one in tier.copies() if one.path == folder), None)
    if copy is None:
        raise SaveError("it is gone", where=str(folder))
    named = {
        file.path
        for rank in copy.ranks
        for file in parse_record(
            (folder / FOLDER / f"{rank}.json").read_bytes(), where=str(folder)
        ).files
    }
    files = copy.manifest.files
    return {
        path: {"size_bytes": files[path].size_bytes, "digest": files[path].digest}
        for path in sorted(files.keys() - named)
    }


class NearPlace(Place):
    """A URL, of which this node may have a part.

    Attributes:
        near: The directory where it does.
    """

    __slots__ = ("near",)

    near: Path

    @classmethod
    def of(cls, place: Place, near: Path) -> NearPlace:
        """Returns a place with the directory where some of its files may lie."""
        found = cls(place, place.options)
        found.near = near
        return found

    def step(self, name: str) -> NearPlace:
        return NearPlace.of(self.beside(posixpath.join(self, name)), self.near / name)


def with_near_files(far: Folder, near: Path, manifest: Manifest) -> Folder:
    """Returns a step's source that takes from the node's own disk what lies there of that save.

    Args:
        far: The step.
        near: This node's part of it, if it is there.
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
    """A folder of which some files are read elsewhere, as long as that works."""

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
        prefetch(self._far, [one for one in ranges if one.path not in self._names])

    def changed(self, refs: Sequence[FileRef]) -> FileRef | None:
        return self._far.changed(refs)

    def linked_folders(self) -> list[str]:
        return self._far.linked_folders()

    def close(self) -> None:
        self._near.close()
        self._far.close()
