"""Attempts to save a step, and their commit on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptkit.core.errors import CkptkitError, error_from_json
from ckptkit.storage.places import Place
from ckptkit.training.save.writer_process import WriterProcess
from ckptkit.training.step_names import name_save
from ckptkit.writer.messages import Commit, Discard, RecordProof, StepCommitted

logger = logging.getLogger(__name__)
_MOST_FAILED = 8  # failed attempts whose folders are still to be removed
_TIMES = 3  # removals of each folder, since late ranks may still write into it
_VISIBLE_SECONDS = 60.0


class SaveAttempt(Struct, frozen=True):
    """One attempt to save one step, the same on every rank.

    Attributes:
        number: Of the save in this session, as this rank counts them.
        name: Unique in the run: the session's nonce, the step and the number of the attempt.
        step: The training step.
        folder: The working folder that this rank writes into.
        final: The step's directory.
        manifest: The manifest without the files.
        beside: A folder whose files are copied next to the shards; empty for none.
        retires: Whether older steps are removed for it, by the rules of retention.
        shared: The working folder of all ranks, if this rank writes into another one first.
    """

    number: int
    name: str
    step: int
    folder: Path
    final: Path | Place
    manifest: Mapping[str, Any]
    beside: str = ""
    retires: bool = True
    shared: Path | None = None

    @property
    def step_name(self) -> str:
        return Path(self.final).name

    def __str__(self) -> str:
        return name_save(self.step, self.final)


class StepCommitter:
    """Commits attempts, and removes the folders of failed ones."""

    def __init__(
        self,
        process: WriterProcess,
        retire: Callable[[int, Mapping[str, float | None]], Sequence[Path | Place]],
        *,
        timeout_seconds: float,
    ) -> None:
        """Starts nothing yet.

        Args:
            process: Commits.
            retire: Returns the directories to remove for a new step and its metrics.
            timeout_seconds: How long the other ranks wait for a commit.
        """
        self._process = process
        self._retire = retire
        self._visible_seconds = min(_VISIBLE_SECONDS, timeout_seconds / 2)
        # By name, each with how often it is still to be cleared.
        self._failed: dict[str, tuple[SaveAttempt, int]] = {}

    def commit(self, attempt: SaveAttempt, values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Commits an attempt that every rank has answered.

        Args:
            attempt: The attempt.
            values: By rank, `{"proof": …}` or `{"error": …}`.

        Returns:
            `{"committed": …}` or `{"error": …}`, for every rank.
        """
        errors = [(rank, v["error"]) for rank, v in enumerate(values) if "error" in v]
        try:
            if errors:
                rank, document = errors[0]
                more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
                raise error_from_json(document).located(f"rank {rank}{more}")
            proofs = [RecordProof(**value["proof"]) for value in values]
            return {"committed": self._commit(attempt, proofs)}
        except CkptkitError as error:
            self.give_up(attempt)
            return {"error": error.to_json()}

    def give_up(self, attempt: SaveAttempt) -> None:
        """Marks an attempt as failed."""
        self._failed[attempt.name] = (attempt, _TIMES)
        while len(self._failed) > _MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def clear(self) -> None:
        """Removes the folders of failed attempts; called while no rank waits for a commit."""
        for name, (attempt, times) in list(self._failed.items()):
            if times > 1:
                self._failed[name] = (attempt, times - 1)
            else:
                del self._failed[name]
            try:
                self._process.request(Discard(attempt.name, str(attempt.folder)))
            except CkptkitError as error:
                logger.warning(
                    "the working folder %s could not be removed: %s", attempt.folder, error
                )
                return  # if storage hangs, each further one would wait for a timeout

    def _commit(self, attempt: SaveAttempt, proofs: Sequence[RecordProof]) -> dict[str, Any]:
        metrics = attempt.manifest["source"].get("metrics", {})
        retired = self._retire(attempt.step, metrics) if attempt.retires else ()
        answer = self._process.request(
            Commit(
                attempt=attempt.name,
                folder=str(attempt.folder),
                final=str(attempt.final),
                proofs=tuple(proofs),
                manifest=attempt.manifest,
                beside=attempt.beside,
                remove=tuple(map(str, retired)),
                visible_seconds=self._visible_seconds,
            )
        )
        assert isinstance(answer, StepCommitted)  # noqa: S101  the answer to `Commit`
        for note in answer.notes:
            logger.warning("%s: %s", attempt, note)
        return {
            "size_bytes": answer.size_bytes,
            "removed": list(answer.removed),
            "lost": dict(answer.lost),
        }
