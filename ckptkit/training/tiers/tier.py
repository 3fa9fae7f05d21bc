"""The first of two tiers: a directory on the node's own disk, shared by the ranks of the node.

Each rank leaves a mark in the directory; the marks show which ranks share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.core.errors import CkptkitError, RefusedError, UsageError
from ckptkit.core.manifest import NODE_RANKS, NODE_RUN, Manifest
from ckptkit.runs.marks import is_step_folder
from ckptkit.runs.steps import save_number_of
from ckptkit.storage.local.durable import remove_folder
from ckptkit.storage.local.ownership import make_private, refuse_planted
from ckptkit.storage.locations import MARKS_FOLDER
from ckptkit.storage.manifests import read_local_manifest
from ckptkit.training.agree.peers import Peers
from ckptkit.training.run_folders import RunFolder, RunLock, TrainingRun
from ckptkit.training.save.saver import Save
from ckptkit.writer.commit import remove_steps
from ckptkit.writer.process import as_failure
from ckptkit.writer.record import RECORDS_FOLDER
from ckptkit.writer.sweep import sweep

logger = logging.getLogger(__name__)
_MARK = "node-"
_DRAINED = f"{RECORDS_FOLDER}/drained"  # in a node's copy of a step that was drained


class RunIdentity(NamedTuple):
    """The run that a node's part of a step belongs to; a later run has another `identity`."""

    identity: str
    path: str


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """The files of one node's ranks of a step.

    Attributes:
        path: Their folder.
        manifest: Lists them.
        ranks: The ranks of the node.
        owner: The run that they belong to; empty texts if unknown.
    """

    path: Path
    manifest: Manifest
    ranks: tuple[int, ...]
    owner: RunIdentity

    @property
    def is_drained(self) -> bool:
        return (self.path / _DRAINED).exists()


@dataclass(frozen=True, slots=True)
class LocalTier:
    """A node's own disk, from the view of one of its ranks.

    Attributes:
        path: The directory.
        ranks: The ranks that share it, in order.
        run: The run that its steps are drained to.
        owner: Identifies the run.
        leads: Whether this rank, the first of them, acts for all.
        lock: Of the directory; None on other ranks, and on file systems without locks.
    """

    path: Path
    ranks: tuple[int, ...]
    run: TrainingRun[Any]
    owner: RunIdentity
    leads: bool
    lock: RunLock | None

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
            newest = max(numbered, key=lambda copy: save_number_of(copy.manifest), default=None)
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
    """Opens, locks and sweeps the nodes' own directories; all ranks have to call this."""
    identity = peers.agree(
        "which run it is", None, lambda _: run.identity(), timeout_seconds=timeout_seconds
    )
    owner = RunIdentity(identity, str(run.place))
    opening = _Opening(local, run, owner, peers, timeout_seconds)
    with ExitStack() as undo:
        undo.callback(opening.unmark)
        opening.run_on_all("the nodes' own directories", opening.mark)
        opening.run_on_all("whose they are", lambda: opening.take(undo))
        peers.agree(
            "who shares them", opening.ranks, _check_groups, timeout_seconds=timeout_seconds
        )
        opening.unmark()
        undo.pop_all()
    leads = opening.ranks[0] == peers.rank
    return LocalTier(opening.path, opening.ranks, run, owner, leads=leads, lock=opening.lock)


@dataclass(slots=True)
class _Opening:
    """The steps of opening a node's directory; an error of one rank is raised on all."""

    path: Path
    run: TrainingRun[Any]
    owner: RunIdentity
    peers: Peers
    timeout_seconds: float
    ranks: tuple[int, ...] = ()
    lock: RunLock | None = None
    folder: RunFolder | None = None

    def run_on_all(self, topic: str, work: Any) -> None:
        """Calls a function on all ranks; raises the first error on all of them."""
        problem: CkptkitError | None = None
        try:
            work()
        except CkptkitError as error:
            problem = error
        except OSError as error:
            problem = as_failure(error, str(self.path))
        self.peers.raise_first(topic, problem, timeout_seconds=self.timeout_seconds)

    def mark(self) -> None:
        """Creates the directory, and leaves this rank's mark there."""
        self.path = self.path.absolute()
        place = self.run.place
        if isinstance(place, Path) and self.path.resolve().is_relative_to(place.resolve()):
            raise UsageError(
                f"is {str(self.path)!r}, which is the directory of the run, or inside of it",
                where="local",
                hint="pass a directory on the node's own disk",
            )
        try:  # private, as the run may be: other users of the node have access to its disk
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.path)
        except FileExistsError:
            refuse_planted(self.path)
        self.folder = RunFolder(self.path, prefix=self.run.prefix)
        self._own_mark().touch()

    def take(self, undo: ExitStack) -> None:
        """Finds the ranks that share the directory; the first of them locks and sweeps it."""
        marks = self._own_mark().parent.glob(f"{_MARK}{self.peers.nonce}-*")
        self.ranks = tuple(sorted(int(mark.name.rpartition("-")[2]) for mark in marks))
        if self.ranks[0] != self.peers.rank:
            return
        assert self.folder is not None  # noqa: S101  `mark` has set it
        self.lock = self.folder.lock()
        if self.lock is not None:
            undo.callback(self.lock.close)
            for note in sweep(self.path):
                logger.info("%s: %s", self.path, note)
        # A step of another run, or of an earlier one in the same place, must not be taken for a
        # step of this run, and must not be removed before it is drained.
        for copy in _copies_in(self.path):
            if copy.owner.identity == self.owner.identity:
                continue
            name, run = copy.path.name, copy.owner.path
            if self.lock is None or not copy.is_drained:
                raise RefusedError(
                    f"has {name!r}, which was not drained yet, of another run, or an earlier"
                    f" one, in {run or 'an unknown place'}",
                    where=f"local {self.path}",
                    hint="give every run a directory of its own on the nodes; resume that run so"
                    " that the step is drained, or remove what it left",
                )
            remove_folder(copy.path)
            logger.info("%s: %s of the run %s was removed", self.path, name, run)

    def unmark(self) -> None:
        with suppress(OSError):
            self._own_mark().unlink(missing_ok=True)

    def _own_mark(self) -> Path:
        name = f"{_MARK}{self.peers.nonce}-{self.peers.rank}"
        return self.path / MARKS_FOLDER / name


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
            document: Mapping[str, Any] = owner if isinstance(owner, dict) else {}
            of_run = RunIdentity(str(document.get("identity", "")), str(document.get("path", "")))
            yield NodeCopy(path, manifest, tuple(ranks), of_run)
