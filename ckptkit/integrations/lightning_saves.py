"""The saves of one Lightning strategy: one Checkpointer at a time, and removals that can wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import UsageError
from ckptkit.formats.discovery import step_of
from ckptkit.integrations.open_runs import OpenRun
from ckptkit.storage.run_marks import STEP_PREFIXES, is_step_folder
from ckptkit.training import Options, SaveHandle, SaveReport
from ckptkit.training.peers import open_peers
from ckptkit.training.resuming import decline, resume_from
from ckptkit.training.settings import check_options
from ckptkit.training.state import bind
from ckptkit.writer.durable import remove_whole

logger = logging.getLogger(__name__)

_NOT_HERE = frozenset({
    "layout", "prefix", "every", "keep_last", "keep_every", "keep_best", "best_mode", "signals",
    "slurm_margin_seconds",
})  # fmt: skip
_HINT = "what is saved when, and what stays, is told by your loop or by Lightning's ModelCheckpoint"


class StrategySaves:
    """Saves to paths that Lightning chooses.

    All ranks make the same calls in the same order, but for `remove`, which rank 0 calls.
    """

    def __init__(self, options: Options) -> None:
        """Checks the options; nothing is opened before the first save.

        Raises:
            UsageError: If one cannot be used here, or does not have the form that it needs.
        """
        refused = sorted(_NOT_HERE & options.keys())
        if refused:
            raise UsageError(
                f"the option {refused[0]!r} was found, which Lightning decides about",
                where="checkpointer",
                hint=_HINT,
            )
        self._listener = options.get("listener")
        self._options: Options = {
            **options,
            "layout": "dcp",
            "slurm_margin_seconds": 0.0,
            "listener": self._heard,
        }
        self.timeout_seconds = check_options(options).timeout_seconds
        self._run = OpenRun()
        self._handles: list[SaveHandle] = []
        self._lock = threading.Lock()  # what follows is used by the thread that saves as well
        self._count = 0
        self._numbers: dict[Path, int] = {}  # of the last save to each path
        self._newest_complete = 0
        self._unwanted: list[tuple[int, Path]] = []

    def save(
        self,
        path: Path,
        state: Mapping[str, object],
        *,
        files: Mapping[str, bytes] | None,
        step: int | None,
    ) -> None:
        """Copies this rank's part of the state, and has it written to a path in the background.

        Args:
            path: The directory that is to be; one that is complete already is replaced.
            state: Models and optimizers.
            files: Small files to lie in it.
            step: The training step, where it is known.

        Raises:
            CkptkitError: As `Checkpointer.save` and the opening of one do.
        """
        path = path.absolute()
        with self._lock:
            self._count += 1
            self._numbers[path] = self._count
            self._unwanted = [entry for entry in self._unwanted if entry[1] != path]
        number = prefix = None
        if is_step_folder(path.name):
            number = step_of(path.name)
            prefix = next(one for one in STEP_PREFIXES if path.name.startswith(one))
        checkpointer = self._run.of(path.parent, self._options, prefix=prefix)
        if number is not None:
            handle = checkpointer.save(number, state, files=files)
        else:
            known = self._count if step is None else step
            handle = checkpointer.save(known, state, name=path.name, files=files)
        self._handles = [*(one for one in self._handles if not one.done()), handle]

    def remove(self, path: Path) -> None:
        """Removes a checkpoint once the save that was begun last, or a later one, is complete."""
        with self._lock:
            self._unwanted.append((self._count, path.absolute()))
        self._remove_unwanted()

    def wait(self) -> None:
        """Waits for all saves to end, well or not."""
        for handle in self._handles:
            handle.wait()

    def close(self) -> None:
        """Waits for the last save, and ends threads and processes; a later save begins anew.

        Raises:
            CkptkitError: If a save failed, and nobody has heard of it.
        """
        self._run.close()

    def _heard(self, report: SaveReport) -> None:
        with self._lock:
            number = self._numbers.get(report.path, 0)
            self._newest_complete = max(self._newest_complete, number)
        self._remove_unwanted()
        if self._listener is not None:
            self._listener(report)

    def _remove_unwanted(self) -> None:
        with self._lock:
            newest = self._newest_complete
            due = [path for number, path in self._unwanted if number <= newest]
            self._unwanted = [one for one in self._unwanted if one[0] > newest]
            for path in due:
                self._numbers.pop(path, None)
        for path in due:
            _remove(path)


def load(state: Mapping[str, Any], path: Path, *, timeout_seconds: float) -> None:
    """Loads a directory into models and optimizers in place, on all ranks.

    The directory need not be writable, nor be of ours.

    Args:
        state: Models and optimizers, by their keys in the directory.
        path: A DCP directory.
        timeout_seconds: How long other ranks are waited for.

    Raises:
        UsageError: If something in the state cannot be loaded into.
        InputError: If the directory does not fit, or is damaged.
        PeerError: If another rank does not take part in time.
    """
    peers = open_peers(path, timeout_seconds=timeout_seconds)
    try:
        try:
            bound = bind(state, layout="dcp", rank=peers.rank, world_size=peers.world_size)
        except Exception as error:
            decline(peers, error, timeout_seconds=timeout_seconds)
            raise
        resume_from(bound, path.absolute(), peers, timeout_seconds=timeout_seconds)
    finally:
        peers.close()


def _remove(path: Path) -> None:
    try:
        remove_whole(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
