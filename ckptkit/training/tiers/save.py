"""Saves that are durable on the nodes' own disks first and are drained from there.

`Recovery` drains complete steps that an earlier job left on these disks. `open_committer` chooses
what commits the saves of a job: `TieredCommitter`, or `SaveCommitter` for shared storage alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.crc import crc32
from ckptkit.core.errors import (
    CkptkitError,
    InputError,
    NoSpaceError,
    OutputError,
    RefusedError,
    SaveError,
    UsageError,
    error_from_json,
)
from ckptkit.core.manifest import NODE_RANKS, NODE_RUN, Manifest, source_of_all
from ckptkit.core.threads import WorkerThread
from ckptkit.runs.marks import FileLocks, is_step_folder
from ckptkit.runs.steps import save_number_of
from ckptkit.storage.local.durable import remove_folder
from ckptkit.storage.local.ownership import make_private, refuse_planted
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training.agree.barrier import SaveBarrier
from ckptkit.training.agree.peers import Peers, name_ranks
from ckptkit.training.handle import SaveReport
from ckptkit.training.run_folders import RunFolder, TrainingRun
from ckptkit.training.save.saver import OURS, Retire, Save, SaveCommitter, discard_folder, fail
from ckptkit.training.save.writer_process import WriterProcess, WriterTimeouts
from ckptkit.training.settings import Settings
from ckptkit.writer.commit import remove_steps
from ckptkit.writer.drain import BESIDE
from ckptkit.writer.messages import Commit, Drain, RecordProof
from ckptkit.writer.process import as_failure
from ckptkit.writer.record import RECORDS_FOLDER, parse_record
from ckptkit.writer.sweep import sweep

logger = logging.getLogger(__name__)
_OF_STORAGE = frozenset({NoSpaceError.code, OutputError.code, SaveError.code})
_NICENESS = 19  # the step is durable already
_MARK = "node-"
_DRAINED = f"{RECORDS_FOLDER}/drained"  # in a node's copy of a step that was drained
_MOST_UNDRAINED = 1  # with which the next save may begin: a node's disk has room for two steps


class NodeCopy(Struct, frozen=True):
    """The files of one node's ranks of a step."""

    path: Path  # their folder
    manifest: Manifest  # lists them
    ranks: tuple[int, ...]  # the ranks of the node
    identity: str  # of the run that they belong to; empty if unknown
    run: str  # where that run was

    @property
    def is_drained(self) -> bool:
        return (self.path / _DRAINED).exists()


def _copies_in(folder: Path) -> Iterator[NodeCopy]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        try:
            manifest = read_local_manifest(path)
        except (CkptkitError, OSError):
            continue
        ranks, owner = (manifest.source.get(key) for key in (NODE_RANKS, NODE_RUN))
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            run: Mapping[str, Any] = owner if isinstance(owner, dict) else {}
            names = str(run.get("identity", "")), str(run.get("path", ""))
            yield NodeCopy(path, manifest, tuple(ranks), *names)


class LocalTier(Struct, frozen=True):
    """A node's own disk, from the view of one of its ranks."""

    path: Path  # the directory
    ranks: tuple[int, ...]  # the ranks that share it, in order
    run: TrainingRun[Any]  # the run that its steps are drained to
    identity: str  # of that run; a later one in the same place has another
    leads: bool  # whether this rank, the first of them, acts for all
    lock: FileLocks | None  # of the directory; None on other ranks, and where files have no locks

    def final(self, save: Save) -> Path:
        """Returns the folder of this node's part of a step once it is committed."""
        return self.path / save.step_name

    def copies(self) -> Iterator[NodeCopy]:
        return _copies_in(self.path)

    def note_drained(self, name: str) -> None:
        """Marks a step as drained; only the leading rank does something."""
        if self.leads:
            with suppress(OSError):  # the step may not be here, and nothing depends on the mark
                (self.path / name / _DRAINED).touch()

    def newest_numbered(self) -> str:
        """Returns the name of the newest step here that a resume would take; empty for none."""
        with suppress(OSError):
            numbered = [copy for copy in self.copies() if is_step_folder(copy.path.name)]
            newest = max(
                numbered, key=lambda copy: save_number_of(copy.manifest.source), default=None
            )
            return "" if newest is None else newest.path.name
        return ""

    def keep_only(self, find_names: Callable[[], Collection[str]], undrained: str) -> None:
        """Removes all parts of steps but those that are named, on the leading rank.

        One step stays as well until it is drained.
        """
        if not self.leads:
            return
        try:
            copies = list(self.copies())
        except OSError as error:
            logger.warning("%s: old steps stay, since it cannot be listed: %s", self.path, error)
            return
        names = find_names()  # after the listing, since a step may be added in between
        old = [
            copy.path
            for copy in copies
            if copy.path.name not in names and (copy.path.name != undrained or copy.is_drained)
        ]
        for note in remove_steps(old)[1]:
            logger.warning("%s: %s", self.path, note)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def open_tier(
    local: Path, run: TrainingRun[Any], peers: Peers, *, timeout_seconds: float
) -> LocalTier:
    """Opens, locks and sweeps the nodes' own directories; all ranks have to call this.

    Each rank leaves a mark in its directory: the marks show which ranks share it. An error of one
    rank is raised on all.
    """
    path = local.absolute()
    mark = path / MARKS_FOLDER / f"{_MARK}{peers.nonce}-{peers.rank}"

    def run_on_all(topic: str, work: Callable[[], None]) -> None:
        problem: CkptkitError | None = None
        try:
            work()
        except CkptkitError as error:
            problem = error
        except OSError as error:
            problem = as_failure(error, str(path))
        peers.raise_first(topic, problem, timeout_seconds=timeout_seconds)

    def unmark() -> None:
        with suppress(OSError):
            mark.unlink(missing_ok=True)

    ranks: list[int] = []
    locks: list[FileLocks] = []  # on the leading rank, unless the file system has none

    def find_ranks() -> None:
        marks = mark.parent.glob(f"{_MARK}{peers.nonce}-*")
        ranks.extend(sorted(int(found.name.rpartition("-")[2]) for found in marks))
        if ranks[0] == peers.rank:
            lock = _take_directory(path, run, identity)
            if lock is not None:
                undo.callback(lock.close)
                locks.append(lock)

    identity: str = peers.agree(
        "which run it is", None, lambda _: run.identity(), timeout_seconds=timeout_seconds
    )
    with ExitStack() as undo:
        undo.callback(unmark)
        run_on_all("the nodes' own directories", lambda: _create_directory(path, run, mark))
        run_on_all("whose they are", find_ranks)
        peers.agree("who shares them", ranks, _check_groups, timeout_seconds=timeout_seconds)
        unmark()
        undo.pop_all()
    leads = ranks[0] == peers.rank
    return LocalTier(path, tuple(ranks), run, identity, leads, locks[0] if locks else None)


def _create_directory(path: Path, run: TrainingRun[Any], mark: Path) -> None:
    """Creates a node's directory, and leaves this rank's mark there."""
    place = run.place
    if isinstance(place, Path) and path.resolve().is_relative_to(place.resolve()):
        raise UsageError(
            f"is {str(path)!r}, which is the directory of the run, or inside of it",
            where="local",
            hint="pass a directory on the node's own disk",
        )
    try:  # private, as the run may be: other users of the node have access to its disk
        path.parent.mkdir(parents=True, exist_ok=True)
        make_private(path)
    except FileExistsError:
        refuse_planted(path)
    RunFolder(path, prefix=run.prefix)
    mark.touch()


def _take_directory(path: Path, run: TrainingRun[Any], identity: str) -> FileLocks | None:
    """Locks and sweeps a node's directory, and removes what other runs have drained from it."""
    lock = RunFolder(path, prefix=run.prefix).lock()
    try:
        if lock is not None:
            for note in sweep(path):
                logger.info("%s: %s", path, note)
        # A step of another run, or of an earlier one in the same place, must not be taken for a
        # step of this run, and must not be removed before it is drained.
        for copy in _copies_in(path):
            if copy.identity == identity:
                continue
            name = copy.path.name
            if lock is None or not copy.is_drained:
                raise RefusedError(  # noqa: TRY301  the lock is closed
                    f"has {name!r}, which was not drained yet, of another run, or an earlier"
                    f" one, in {copy.run or 'an unknown place'}",
                    where=f"local {path}",
                    hint="give every run a directory of its own on the nodes; resume that run so"
                    " that the step is drained, or remove what it left",
                )
            remove_folder(copy.path)
            logger.info("%s: %s of the run %s was removed", path, name, copy.run)
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return lock


def _check_groups(of_ranks: Sequence[Sequence[int]]) -> None:
    """Refuses directories in which ranks see different marks."""
    for rank, group in enumerate(of_ranks):
        other = next((member for member in group if of_ranks[member] != group), None)
        if other is not None:
            raise UsageError(
                f"expected a disk that the ranks of one node share, found different files on rank"
                f" {rank} and on rank {other}",
                where="local",
                hint="pass a directory on the node's own disk",
            )


class TieredCommitter(SaveCommitter):
    """Commits saves on the nodes' disks, each node its part, and drains them from there.

    A save goes through these further states:

        agree     the ranks tell each other what they have written to their nodes' disks
        commit    each node commits its part; then the step is durable, and the ranks agree on that
        queue     the next save may begin once at most one step waits to be drained
        drain     a thread copies this rank's files to the shared storage
        settle    all ranks agree, and rank 0 commits the step there

    If a node's disk fails and the buffers still have everything, all ranks write to the shared
    storage instead: a full disk makes the save slower, but does not fail it.
    """

    def __init__(
        self,
        recovery: Recovery,
        timeouts: WriterTimeouts,
        *,
        retire: Retire,
        listener: Callable[[SaveReport], None],
    ) -> None:
        """Starts the thread that drains.

        At a barrier of their own the ranks agree on what is durable on the nodes.
        """
        peers, tier = recovery.peers, recovery.tier
        super().__init__(
            SaveBarrier(peers, "drain"),
            recovery.process if peers.rank == 0 else None,
            retire=retire,
            timeout_seconds=recovery.timeout_seconds,
            listener=listener,
        )
        self._tier = tier
        self._recovery = recovery
        self._node_barrier = SaveBarrier(peers)
        self._node_process = WriterProcess(timeouts, name=f"committer of {tier.path}")
        self._drain_process = tier.run.process(
            timeouts, f"drain of {tier.path}", niceness=_NICENESS
        )
        self._drained = ""  # the last step that was drained
        self._waiting: list[Save] = []  # to be drained, including the one under way
        self._newest = self._coming = ""  # names of steps that are on the node's disk, or will be
        # A step with a name of its own, which no resume takes by itself, does not replace it before
        # it is drained.
        self._numbered = tier.newest_numbered()
        self._is_over = False
        self._lock = threading.Lock()
        self._worker = WorkerThread("ckptkit-drain")

    def place(self, save: Save) -> None:
        """Has this rank write its files to the node's own disk first."""
        save.shared, save.folder = save.folder, self._tier.path / save.folder.name

    def recover(self) -> int:
        """Drains steps that are durable on the nodes' disks only; returns the last save number."""
        return self._recovery.run_all()

    def end(self, save: Save) -> None:
        """Makes the save durable on the nodes, and queues its drain."""
        name = save.step_name
        with self._lock:
            is_waiting = any(waiting.step_name == name for waiting in self._waiting)
        if save.after is not None:
            # A step that is saved again must not replace files while they are drained.
            wait = save.after.wait if is_waiting else save.after.wait_freed
            wait()
        with self._lock:
            self._coming = name
        try:
            if not self._commit_on_nodes(save):
                self._write_directly(save)
            with self._lock:
                self._waiting.append(save)
            self._worker.submit_unwatched(partial(self._drain_and_settle, save))
            self._free()
        except CkptkitError as error:
            self._discard(save)
            fail(save, error)
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("keeping %s on the node", save)
            self._discard(save)
            fail(save, SaveError(f"{type(error).__name__}: {error}", hint=OURS))

    def kill(self) -> None:
        """Makes the current drain and queued saves fail soon."""
        self._is_over = True
        self._node_process.kill()
        self._drain_process.kill()

    def close(self) -> None:
        """Waits for the last drain, and ends the thread and the processes."""
        self._worker.close()
        self._drain_process.close()
        self._node_process.close()
        self._tier.close()

    def _commit_on_nodes(self, save: Save) -> bool:
        """Returns whether the step is durable on the nodes; if not, all ranks write again."""
        agreed = self._agree_on_nodes(save, save.outcome())
        if "proofs" in agreed:
            agreed = self._agree_on_nodes(save, self._commit_this_node(save, agreed["proofs"]))
            if "proofs" in agreed:
                save.local_seconds = time.perf_counter() - save.began
                with self._lock:
                    self._newest = save.step_name
                    if is_step_folder(save.step_name):
                        self._numbered = save.step_name
                self._tier.keep_only(self._needed, self._numbered)
                save.handle.set_local(self._tier.final(save))
                return True
        error = error_from_json(agreed["error"])
        if not agreed["again"]:
            raise error
        if self.rank == 0:
            logger.warning("%s goes to shared storage at once: %s", save, error)
        return False

    def _agree_on_nodes(self, save: Save, value: Mapping[str, Any]) -> Mapping[str, Any]:
        can_rewrite = self._tier.run.takes_saves and save.rewrite is not None
        return self._node_barrier.agree_on(
            save,
            {"proof": None, "again": can_rewrite, **value},
            _decide,
            timeout_seconds=self._timeout_seconds,
        )

    def _commit_this_node(self, save: Save, proofs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Commits the files of this node's ranks to its disk, if this rank leads."""
        if not self._tier.leads:
            return {}
        owner = {"identity": self._tier.identity, "path": str(self._tier.run.place)}
        source = {**save.manifest["source"], NODE_RUN: owner}
        request = Commit(
            attempt=save.name,
            folder=str(save.folder),
            final=str(self._tier.final(save)),
            proofs=tuple(RecordProof(**proofs[rank]) for rank in self._tier.ranks),
            manifest={**save.manifest, "source": source},
            beside=save.beside,
            node_ranks=self._tier.ranks,
        )
        try:
            self._node_process.request(request)
        except CkptkitError as error:
            return {"error": error.to_json()}
        return {}

    def _write_directly(self, save: Save) -> None:
        assert save.rewrite is not None and save.shared is not None  # noqa: S101, PT018
        self._discard(save)
        save.folder, save.shared = save.shared, None
        save.answers.clear()
        save.error = None
        save.rewrite()
        save.durable = time.perf_counter()

    def _discard(self, save: Save) -> None:
        if self._tier.leads:
            discard_folder(self._node_process, save.name, save.folder)

    def _drain_and_settle(self, save: Save) -> None:
        if save.shared is not None and save.error is None:  # else its files are in place already
            self._drain(save, save.shared)
        is_there = self.settle(save)
        if is_there:
            self._drained = str(save.final)
            self._tier.note_drained(save.step_name)
        with self._lock:
            self._waiting.remove(save)
        self._free()
        if is_there:  # otherwise an older step may be the only copy
            self._tier.keep_only(self._needed, self._numbered)

    def _drain(self, save: Save, target: Path) -> None:
        folder = self._tier.final(save)
        if self._is_over:
            save.error = SaveError(
                "the program ends before the step is drained",
                where=str(folder),
                hint="the next job drains it",
            )
        else:
            save.folder = folder
            self.copy_files(save, self._drain_process, target, "draining", self._drained)
        save.folder = target

    def _needed(self) -> set[str]:
        """Returns the names of the steps that must stay on the node's disk."""
        with self._lock:
            waiting = {save.step_name for save in self._waiting}
            return {self._newest, self._coming, *waiting}

    def _free(self) -> None:
        with self._lock:
            free = list(self._waiting) if len(self._waiting) <= _MOST_UNDRAINED else []
        for save in free:
            save.handle.free()


def _decide(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Decides, on rank 0, whether the step is kept on the nodes, written again, or has failed."""
    failed = [(rank, value["error"]) for rank, value in enumerate(values) if "error" in value]
    if not failed:
        return {"proofs": [value["proof"] for value in values]}
    again = all(value["again"] for value in values)
    again = again and all(error["code"] in _OF_STORAGE for _, error in failed)
    rank, error = failed[0]
    return {"error": error_from_json(error).located(f"rank {rank}").to_json(), "again": again}


class Recovery(Struct, frozen=True):
    """Drains what earlier jobs left on the nodes' disks."""

    tier: LocalTier  # this node's disk
    peers: Peers  # the ranks
    process: WriterProcess  # copies, and commits on rank 0
    timeout_seconds: float  # how long to wait for other ranks
    # The attempts that rank 0 has logged as lacking files
    reported: set[str] = field(default_factory=set)

    def run_all(self) -> int:
        """Drains the newest step that is complete over all nodes, unless the run has a newer one.

        Steps with names of their own are drained too, since no newer step replaces them. The number
        of ranks and their nodes may have changed since.

        Returns:
            The largest `save_number` that was drained, 0 for none; the same on all ranks.
        """
        here = _describe_copies(self.tier) if self.tier.leads else []
        topic = "what is on the nodes' own disks"
        choose = partial(self._next, set())
        number = 0
        while (entry := self._agree(topic, here, choose)) is not None:
            if self._drain(entry):
                number = max(number, entry["save_number"])
        return number

    def _drain(self, entry: Mapping[str, Any]) -> bool:
        """Drains a step, and returns whether it was committed."""
        if self.peers.rank == 0 and entry["drained"]:
            logger.warning(
                "%s was drained before, but the run does not have it any more: it is drained again"
                " from the nodes' disks; to go back to an older step, use resume(state, step=N)",
                entry["name"],
            )
        elif self.peers.rank == 0:
            logger.info("%s of an earlier job is drained from the nodes' disks", entry["name"])
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
        last = self.tier.run.last_save_number()
        for entry in sorted(entries.values(), key=lambda entry: -entry["save_number"]):
            name, attempt = entry["name"], entry["attempt"]
            if attempt in tried:
                continue
            known = last if is_step_folder(name) else self.tier.run.save_number_of(name)
            if entry["save_number"] <= known:
                continue
            present = {rank for ranks in entry["nodes"].values() for rank in ranks}
            missing = sorted(set(range(entry["world_size"])) - present)
            if not missing:
                tried.add(attempt)
                return entry
            if attempt not in self.reported:
                self.reported.add(attempt)
                logger.warning(
                    "%s on the nodes' own disks is skipped: no node of this job has all files of"
                    " %s",
                    name,
                    name_ranks(missing),
                )
        return None

    def _target(self, entry: Mapping[str, Any]) -> Path:
        return self.tier.run.working_folder(Path(entry["name"]), self.peers.nonce, 0)

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
        proofs = [
            {"rank": rank, "path": records[rank], "size_bytes": len(text), "crc32": crc32(text)}
            for rank, text in data.items()
        ]
        return {"beside": further, "proofs": proofs}

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
                        final=str(self.tier.run.below(entry["name"])),
                        proofs=tuple(proofs),
                        manifest={**entry["manifest"], "files": beside_files},
                        beside=str(beside) if beside.is_dir() else "",
                    )
                )
            except CkptkitError as caught:
                error = caught.to_json()
        if error is None:
            return None
        discard_folder(self.process, entry["attempt"], target)
        return dict(error)


def _describe_copies(tier: LocalTier) -> list[dict[str, Any]]:
    """Returns the whole parts of steps on this node as JSON values, for the other ranks."""
    try:
        copies = list(tier.copies())
    except OSError as error:
        logger.warning("%s cannot be listed: %s", tier.path, error)
        return []
    described: list[dict[str, Any]] = []
    for copy in copies:
        source, files = copy.manifest.source, copy.manifest.files
        numbers = (source.get("save_number"), source.get("world_size"), source.get("step"))
        try:
            sizes = {name: (copy.path / name).stat().st_size for name in files}
        except OSError:
            continue
        is_whole = all(sizes[name] == record.size_bytes for name, record in files.items())
        if not is_whole or not all(isinstance(number, int) for number in numbers):
            continue
        source = source_of_all(source)
        described.append(
            {
                "name": copy.path.name,
                "attempt": str(source.get("attempt")),
                "save_number": source["save_number"],
                "world_size": source["world_size"],
                "ranks": list(copy.ranks),
                "drained": copy.is_drained,
                "manifest": replace(copy.manifest, source=source, files={}).to_document(),
            }
        )
    return described


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


def open_committer(
    run: TrainingRun[Any],
    process: WriterProcess,
    peers: Peers,
    settings: Settings,
    *,
    retire: Retire,
    listener: Callable[[SaveReport], None],
) -> SaveCommitter:
    """Opens what commits a job's saves; all ranks have to call this.

    `process` commits on rank 0, and drains what earlier jobs left, once `recover` is called.
    """
    timeout = settings.timeout_seconds
    if settings.local is None:
        own = process if peers.rank == 0 else None
        return SaveCommitter(
            SaveBarrier(peers), own, retire=retire, timeout_seconds=timeout, listener=listener
        )
    tier = open_tier(settings.local, run, peers, timeout_seconds=timeout)
    with ExitStack() as undo:
        undo.callback(tier.close)
        recovery = Recovery(tier, peers, process, timeout)
        timeouts = WriterTimeouts(settings.stall_seconds, timeout)
        committer = TieredCommitter(recovery, timeouts, retire=retire, listener=listener)
        undo.pop_all()
    return committer
