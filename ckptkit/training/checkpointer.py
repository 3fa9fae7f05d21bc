"""`Checkpointer`: what a training loop calls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from ckptkit.core.errors import CkptkitError, SaveError, UsageError
from ckptkit.training.handle import SaveHandle, SkippedError
from ckptkit.training.peers import Peers, open_peers
from ckptkit.training.preemption import SaveRequests
from ckptkit.training.resuming import resume
from ckptkit.training.save_slot import SaveSlot
from ckptkit.training.saving import Attempt, Committer, Save
from ckptkit.training.session import Session, open_session
from ckptkit.training.settings import Options, Settings, check_options
from ckptkit.training.state import BoundState, bind

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves the state of sharded training without stopping it, and resumes from it.

    One lives on every rank, made with the same arguments; all ranks make the same calls in the
    same order. `save` copies this rank's part of the state once and returns; a process of its
    own writes it, and when all ranks are done it becomes `checkpoint-N` in one step. No
    collective is ever issued: ranks agree through the store of torch.distributed.

    What a save holds is the state at the call: parameters, optimizer, random numbers and the
    rest. Gradients are not saved, so a save in the middle of gradient accumulation resumes from
    the parameters as they are, without what was accumulated so far.

    Methods may be called from one thread at a time.
    """

    def __init__(self, run: str | PathLike[str], **options: Unpack[Options]) -> None:
        """Opens a run, and waits for the other ranks to do the same.

        Args:
            run: The directory of the run; made where it is not there.
            **options: See `Options`.

        Raises:
            UsageError: If an option does not have the form that it needs.
            RefusedError: If the directory cannot be used, or another job is writing to it.
            PeerError: If another rank does not open it in time.
        """
        self._settings = settings = check_options(options)
        self._peers = open_peers(str(run), timeout_seconds=settings.timeout_seconds)
        with ExitStack() as undo:
            undo.callback(self._peers.close)
            self._session: Session = open_session(Path(run), self._peers, settings)
            undo.callback(self._session.close)
            self._requests = _requests(self._peers, self._session, settings)
            undo.pop_all()
        committer = Committer(
            self._session.committer,
            self._session.retired_by,
            timeout_seconds=settings.timeout_seconds,
        )
        self._slots = [
            SaveSlot(self._peers, settings, committer if self._peers.rank == 0 else None)
            for _ in range(settings.max_in_flight)
        ]
        self._bound: BoundState | None = None
        self._described: BoundState | None = None
        self._bound_to: tuple[object, ...] = ()
        self._last: SaveHandle | None = None
        self._taken: SaveHandle | None = None  # the last one that was not skipped
        self._number = 0
        self._busy = threading.Lock()
        self._closed = False

    def prepare(self, state: Mapping[str, object]) -> None:
        """Makes the first save as quick as the later ones: buffers, writer, what lies beside.

        Args:
            state: What will be given to `save`.

        Raises:
            UsageError: If something in `state` cannot be saved.
            NoSpaceError: If there is not enough memory; see `staging_limit`.
            OutputError: If the directory of the run cannot be written any more.
        """
        with self._calling("prepare"):
            bound = self._bind(state)
            self._describe(bound)
            for slot in self._slots:
                slot.wait()
                slot.prepare(bound)

    def save(
        self, step: int, state: Mapping[str, object], *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Copies this rank's part of the state, and has it written in the background.

        Args:
            step: The training step, which names the directory; one that is complete already is
                replaced.
            state: Models, optimizers, schedulers, dataloaders and others, by name; values may
                be lists.
            metrics: Numbers to keep with the step, for `keep_best`.

        Returns:
            The handle of the save. What goes wrong from here on is raised by its `result`, on
            every rank; training is not interrupted.

        Raises:
            UsageError: If something in `state` cannot be saved, or the step is no count.
        """
        began = time.perf_counter()
        with self._calling("save"):
            bound = self._bind(state)
            attempt = self._session.attempt(step, metrics or {})
            save = Save(attempt, SaveHandle(step), began, after=self._taken)
            self._last = save.handle
            try:
                slot = self._slot(attempt)
            except SkippedError as error:
                logger.warning("%s", error)
                save.handle.fail(error)
                return save.handle
            try:
                self._describe(bound)
            except CkptkitError as error:
                save.error = error
            self._taken = save.handle
            slot.take(save, bound)
            return save.handle

    def resume(self, state: Mapping[str, object], *, step: int | None = None) -> int | None:
        """Loads the newest complete step of the run into the state, in place.

        The number of ranks and the way of sharding may have changed since. Saves that are still
        under way are waited for.

        Args:
            state: As for `save`; models may be on the meta device, optimizers may never have
                stepped.
            step: A step to take instead of the newest.

        Returns:
            The step that was loaded, or None where the run has none.

        Raises:
            ResumeError: If what is there does not fit the state, or if all of it is damaged.
            PeerError: If another rank does not take part in time.
        """
        with self._calling("resume"):
            for slot in self._slots:
                slot.wait()
            bound = self._bind(state)
            found = resume(
                bound,
                self._session.run.path,
                self._peers,
                timeout_seconds=self._settings.timeout_seconds,
                step=step,
            )
            self._bound = None  # parameters may have left the meta device
            return found

    def should_save(self, step: int) -> bool:
        """Tells whether it is time to save; the answer is the same on all ranks.

        Reasons are the interval, a signal, Slurm's end of the job, `request_save` and
        `ckptkit save-now`. Call it on every rank at every step.
        """
        return self._requests.should_save(step)

    def request_save(self, *, stop: bool = False) -> None:
        """Asks all ranks to save at one of the next steps; may be called on any rank.

        Args:
            stop: Whether `stop_requested` is to be set then.
        """
        self._requests.request_save(stop=stop)

    @property
    def stop_requested(self) -> bool:
        """Whether training should end after the save that `should_save` last asked for."""
        return self._requests.stop_requested

    def close(self) -> None:
        """Waits for the last save, and ends threads and processes.

        Raises:
            SaveError: If the last save failed, and nobody has asked for its result.
        """
        if self._closed:
            return
        self._closed = True
        for slot in self._slots:
            slot.close()
        self._requests.close()
        self._session.close()
        self._peers.close()
        error = self._last.unheard_error if self._last is not None else None
        if error is not None:
            raise error

    def _bind(self, state: Mapping[str, object]) -> BoundState:
        identity = tuple((key, id(value)) for key, value in state.items())
        if self._bound is None or identity != self._bound_to:
            settings, peers = self._settings, self._peers
            self._bound = bind(
                state, layout=settings.layout, rank=peers.rank, world_size=peers.world_size
            )
            self._bound_to = identity
        return self._bound

    def _describe(self, bound: BoundState) -> None:
        """Puts down what lies beside the shards, where that was not done for this state."""
        if self._described is not bound:
            self._session.describe(bound)
            self._described = bound

    def _slot(self, attempt: Attempt) -> SaveSlot:
        """Returns a free slot; by the user's choice it waits for one, or skips the save."""
        self._number += 1
        free = next((slot for slot in self._slots if slot.idle), None)
        if self._settings.in_flight == "skip" and not self._session.goes(
            attempt.name, here=free is not None
        ):
            raise SkippedError(
                f"{len(self._slots)} earlier saves are still under way"
                if len(self._slots) > 1
                else "the save before is still under way",
                where=f"step {attempt.step}",
            )
        if free is not None:
            return free
        slot = self._slots[self._number % len(self._slots)]
        slot.wait()
        return slot

    def _calling(self, what: str) -> _OneCall:
        if self._closed:
            raise UsageError("was closed already", where=f"Checkpointer.{what}")
        return _OneCall(self._busy, what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(CkptkitError):  # what ended the loop says more
            self.close()


def _requests(peers: Peers, session: Session, settings: Settings) -> SaveRequests:
    return SaveRequests(
        peers,
        session.run,
        interval=settings.interval,
        signals=settings.signals,
        slurm_margin_seconds=settings.slurm_margin_seconds,
        timeout_seconds=settings.timeout_seconds,
    )


class _OneCall:
    """Refuses a call while another thread is in one."""

    def __init__(self, lock: threading.Lock, what: str) -> None:
        self._lock = lock
        self._what = what

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise SaveError(
                "another thread is saving or resuming at this moment",
                where=f"Checkpointer.{self._what}",
                hint="call the Checkpointer from one thread, in the same order on every rank",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
