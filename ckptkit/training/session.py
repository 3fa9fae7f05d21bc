"""One job's use of a run directory: lock, names of attempts, what lies beside the shards."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptkit.core.errors import CkptkitError, UsageError, error_from_json
from ckptkit.core.manifest import Manifest
from ckptkit.planning.retention import StepFacts, steps_to_remove
from ckptkit.training.peers import Peers
from ckptkit.training.pieces import SmallFile
from ckptkit.training.run_folder import RunFolder, RunLock
from ckptkit.training.saving import Attempt
from ckptkit.training.settings import Settings
from ckptkit.training.sidecar import collect_sidecar, run_facts
from ckptkit.training.state import BoundState
from ckptkit.training.writer_process import Patience, WriterProcess
from ckptkit.version import __version__
from ckptkit.writer.failures import as_failure
from ckptkit.writer.sweep import sweep

logger = logging.getLogger(__name__)
_REMEMBERED = 64  # decisions that stay on the board


class Session:
    """What the saves of one job have in common.

    Attributes:
        run: The run's directory.
        committer: The process that commits, used on rank 0 only.
    """

    def __init__(
        self, run: RunFolder, peers: Peers, settings: Settings, lock: RunLock | None
    ) -> None:
        """Takes over the lock, which rank 0 has where the file system knows locks."""
        self.run = run
        self.committer = WriterProcess(
            Patience(settings.stall_seconds, settings.timeout_seconds), name="committer of rank 0"
        )
        self._peers = peers
        self._settings = settings
        self._lock = lock
        self._beside = run.path / ".ckptkit" / peers.nonce
        self._tries: Counter[int] = Counter()
        self._asked: deque[str] = deque()

    def attempt(self, step: int, metrics: Mapping[str, float]) -> Attempt:
        """Names a try to save a step, the same on all ranks, even if one has missed another step.

        Raises:
            UsageError: If the step or a metric is no number.
        """
        if type(step) is not int or step < 0:
            raise UsageError(f"is {step!r}, where a count of steps was expected", where="step")
        numbers = _numbers(metrics)
        self._tries[step] += 1
        number = self._tries[step]
        name = f"{self._peers.nonce}-{step}-{number}"
        manifest = Manifest(
            kind="training",
            source={
                "step": step,
                "world_size": self._peers.world_size,
                "layout": self._settings.layout,
                "metrics": numbers,
                "attempt": name,
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            options={},
            versions={"ckptkit": __version__, "torch": torch.__version__},
            tensors={},
        )
        return Attempt(
            name=name,
            step=step,
            folder=self.run.working_folder(step, self._peers.nonce, number),
            final=self.run.step_folder(step),
            manifest=json.loads(manifest.to_json()),
            beside=str(self._beside),
        )

    def goes(self, attempt: str, *, here: bool) -> bool:
        """Tells whether a save goes ahead on all ranks: the first that asks decides for all.

        Args:
            attempt: Its name.
            here: Whether this rank could begin at once.

        Returns:
            What the first rank to ask said of itself.
        """
        choice = b"go" if here else b"skip"
        board = self._peers.board
        self._asked.append(attempt)
        if len(self._asked) > _REMEMBERED:  # every rank has long since asked for it
            board.delete(f"goes/{self._asked.popleft()}")
        return board.compare_set(f"goes/{attempt}", b"", choice) == b"go"

    def describe(self, bound: BoundState) -> None:
        """Puts down what lies beside the shards of every step; only rank 0 does something.

        Raises:
            CkptkitError: If it cannot be written.
        """  # noqa: DOC501  made by `as_failure`
        if self._peers.rank != 0:
            return
        modules = [model.module for model in bound.models]
        files = [*collect_sidecar(modules, self._settings.sidecar), run_facts(bound.facts())]
        shutil.rmtree(self._beside, ignore_errors=True)
        try:
            for file in files:
                _put(self._beside, file)
        except OSError as error:
            raise as_failure(error, str(self._beside)) from error

    def retired_by(self, step: int, metrics: Mapping[str, float]) -> Sequence[Path]:
        """Returns the steps that go once a new one is durable."""
        there = [facts for facts in self.run.steps() if facts.step != step]
        new = StepFacts(step=step, complete=True, metrics=metrics)
        return [
            self.run.step_folder(old)
            for old in steps_to_remove([*there, new], self._settings.retention)
        ]

    def close(self) -> None:
        """Ends the committer, and gives the directory to the next job."""
        self.committer.close()
        if self._peers.rank == 0:
            shutil.rmtree(self._beside, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def open_session(path: Path, peers: Peers, settings: Settings) -> Session:
    """Opens a run directory on all ranks; rank 0 makes it, locks it and clears it of wrecks.

    Raises:
        RefusedError: On every rank, if it cannot be used or another job is writing to it.
        PeerError: If another rank does not come in time.
    """
    held: list[RunLock | None] = []

    def take(_: Sequence[Any]) -> None:
        run = RunFolder(path)
        held.append(run.lock())
        if held[0] is not None:  # without a lock somebody else may be at work there
            for note in sweep(run.path):
                logger.info("%s", note)

    peers.agree("the lock of the run", None, take, timeout_seconds=settings.timeout_seconds)
    run = _opened_by_all(path, peers, settings)
    return Session(run, peers, settings, held[0] if held else None)


def _opened_by_all(path: Path, peers: Peers, settings: Settings) -> RunFolder:
    """Opens the directory that rank 0 has made; a rank that cannot tells all others."""
    opened: list[RunFolder] = []
    problem: dict[str, Any] | None = None
    try:
        opened.append(RunFolder(path))
    except CkptkitError as error:
        problem = error.to_json()
    problems = peers.agree(
        "the directory of the run",
        problem,
        lambda all_of: all_of,
        timeout_seconds=settings.timeout_seconds,
    )
    for rank, document in enumerate(problems):
        if document is not None:
            raise error_from_json(document).located(f"rank {rank}")
    return opened[0]


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"a number was expected of each: {error}", where="metrics") from error


def _put(folder: Path, file: SmallFile) -> None:
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.data)
