"""`Checkpointer`: what a training loop calls.

Its calls run one at a time, outside of the caller's modes of torch.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Self, Unpack, get_args

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import CkptkitError, SaveError, UsageError
from ckptkit.storage.local.disk import Closable
from ckptkit.training.agree.peers import open_peers
from ckptkit.training.agree.save_requests import SaveRequestWatcher
from ckptkit.training.export.export import Exporter, ExportHandle, ExportOptions, make_request
from ckptkit.training.handle import SaveHandle, SkippedError
from ckptkit.training.resume.resume import decline, resume, resume_from
from ckptkit.training.save.frozen import FrozenFiles
from ckptkit.training.save.saver import Save, SaveSlot
from ckptkit.training.session import Session, open_session
from ckptkit.training.settings import Options, check_choice, check_options
from ckptkit.training.state.collect import Binding, BoundState, MissingGroups
from ckptkit.training.state.models import check_modes, plain_torch
from ckptkit.training.tiers.save import open_committer

logger = logging.getLogger(__name__)

_MANY_FAILURES = 3  # in a row: one or two may be a file system that was away for a while


def first_of(errors: Sequence[CkptkitError | None]) -> CkptkitError | None:
    """Returns the first error, with the number of later ones."""
    failures = [error for error in errors if error is not None]
    more = len(failures) - 1
    if more < 1:
        return failures[0] if failures else None
    first = failures[0]
    return type(first)(
        f"{first.message}; {more} later save{'s' if more > 1 else ''} failed as well",
        where=first.where,
        hint=first.hint,
    )


class FailedSaves:
    """Counts the saves that failed in a row, so that training is warned.

    Attributes:
        open: Saves that count once they have ended.
    """

    def __init__(self) -> None:
        self.open: deque[SaveHandle] = deque()
        self._count = 0
        self._last: CkptkitError | None = None

    def warn(self) -> None:
        """Warns the caller of the Checkpointer's method if many saves have failed in a row."""
        error = self.error()
        if error is None:
            return
        # The warning names the first line outside of ckptkit.
        level, frame = 1, inspect.currentframe()
        while frame and frame.f_back and frame.f_globals.get("__name__", "").startswith("ckptkit."):
            level, frame = level + 1, frame.f_back
        warnings.warn(str(error), RuntimeWarning, stacklevel=level)

    def error(self) -> SaveError | None:
        """Returns an error for many failures in a row, None if there were fewer."""
        while self.open and self.open[0].done():
            ended = self.open.popleft()
            if not ended.skipped:
                self._last = ended.error
                self._count = 0 if self._last is None else self._count + 1
        if self._last is None or self._count < _MANY_FAILURES:
            return None
        return SaveError(
            f"the last {self._count} saves failed, and nothing was saved since: {self._last}",
            hint=self._last.hint,
        )


class Checkpointer:
    """Saves the state of sharded training without stopping it, and resumes from it.

    Every rank creates one with the same arguments, and all ranks make the same calls in the same
    order. `save` copies this rank's part of the state once and returns; a separate process writes
    it, and when all ranks are done it becomes `checkpoint-N` in one step. No collective is issued:
    ranks agree through the store of torch.distributed.

    A save has the state at the call: parameters, optimizer, random numbers and the rest. Gradients
    are not saved, so a save in the middle of gradient accumulation resumes from the parameters as
    they are, without the gradients accumulated so far.

    One thread at a time may call methods. They run outside of the caller's modes of torch, such as
    `inference_mode` or a default device.
    """

    @check_names
    def __init__(self, run: str | PathLike[str], **options: Unpack[Options]) -> None:
        """Opens a run, and waits for the other ranks to do the same.

        Args:
            run: The directory of the run, created if it does not exist, or a URL.
            **options: See `Options`.

        Raises:
            UsageError: If an option is invalid.
            RefusedError: If the directory cannot be used, or another job is writing to it.
            PeerError: If another rank does not open it in time.
        """
        self._run = run
        self._settings = settings = check_options(options)
        self._peers = open_peers(run, timeout_seconds=settings.timeout_seconds)
        with ExitStack() as undo:
            undo.callback(self._peers.close)
            self._session: Session = open_session(run, self._peers, settings)
            undo.callback(self._session.close)
            self._requests = SaveRequestWatcher(
                self._peers,
                self._session.run,
                interval=settings.interval,
                signals=settings.signals,
                slurm_margin_seconds=settings.slurm_margin_seconds,
                timeout_seconds=settings.timeout_seconds,
            )
            undo.callback(self._requests.close)
            self._backend = open_committer(self._session, self._peers, settings)
            undo.pop_all()
        self._frozen = FrozenFiles(self._peers.nonce, self._peers.rank, settings.max_in_flight)
        with plain_torch():
            self._slots = [
                SaveSlot(self._peers, settings, self._backend.end, self._frozen)
                for _ in range(settings.max_in_flight)
            ]
        self._binding = Binding(
            settings.layout, rank=self._peers.rank, world_size=self._peers.world_size
        )
        self._exporter = Exporter(self._peers, settings.sidecar, settings.timeout_seconds)
        self._unclosed: list[Closable] = [self._exporter, *self._slots, self._backend]
        self._unclosed += [self._frozen, self._requests, self._session, self._peers]
        self._handles: list[SaveHandle] = []  # of saves under way, and of failures to be raised
        self._failed = FailedSaves()
        self._taken: SaveHandle | None = None  # the last one that was not skipped
        self._was_asked = False  # whether the next save was requested
        self._busy = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        # Threads end with the interpreter, which would lose a save under way. It runs before the
        # handler that waits for pushes, which was registered when the session was opened.
        atexit.register(self._close_at_exit)

    @check_names
    def prepare(self, state: Mapping[str, object]) -> None:
        """Makes the first save as quick as later ones: prepares buffers, writer and sidecar.

        Args:
            state: As for `save`.

        Raises:
            UsageError: If something in `state` cannot be saved.
            NoSpaceError: If there is not enough memory; see `staging_limit`.
            OutputError: If the directory of the run is not writable any more.
        """
        with self._calling("prepare") as check_modes:
            check_modes()
            bound = self._binding.of(state)
            self._session.write_sidecar(bound)
            for slot in self._slots:
                slot.prepare(bound)

    @check_names
    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metrics: Mapping[str, float] | None = None,
        name: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> SaveHandle:
        """Copies this rank's part of the state, and has it written in the background.

        Args:
            step: The training step, which names the directory; a complete one is replaced.
            state: Models, optimizers, schedulers, dataloaders and others, by name; values may
                be lists.
            metrics: Numbers to store with the step, for `keep_best`.
            name: Of a directory in the run to save to, instead of the one that the step names. A
                complete one is replaced; it is never retired, and only resumed from if `resume` is
                called with it as `folder`.
            files: Small files to add to the directory, by name; each is passed by one rank.

        Returns:
            The handle of the save. Later errors are raised by its `result`, on every rank; training
            is not interrupted.

        Raises:
            UsageError: If something in `state` cannot be saved, or the step is no count. It is
                raised on that rank; on the others it is the result of the save.
        """
        began = time.perf_counter()
        with self._calling("save") as check_modes:

            def find_state() -> BoundState:
                check_modes()
                return self._binding.of(state).with_files(files)

            save = self._session.begin_save(step, name, began)
            self._save(save, find_state, metrics)
        self._failed.warn()
        return save.handle

    def _save(
        self,
        save: Save,
        find_state: Callable[[], BoundState],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Takes a save through its states; see `ckptkit.training.save.saver`."""
        self._backend.place(save)
        save.after = self._taken
        self._handles = [h for h in self._handles if not h.done() or h.unheard_error]
        self._handles.append(save.handle)
        slot = self._slot_for(save)
        if slot is None:
            return
        self._taken = save.handle
        with slot.hand_over(save):
            if save.error is None:
                bound = find_state()
                self._session.describe(save, bound, metrics)
                slot.stage(save, bound)
        # Not of a call that raises, which training hears anyway.
        self._failed.open.append(save.handle)

    @check_names
    def export(
        self,
        out: str | PathLike[str],
        *,
        state: Mapping[str, object] | None = None,
        **options: Unpack[ExportOptions],
    ) -> ExportHandle:
        """Writes the final model folder from all ranks in parallel, without a gather.

        It has what `ckptkit consolidate` makes of a save; for a PEFT model it is the adapter.

        Args:
            out: A directory that does not exist, or is empty.
            state: As for `save`, with one model; by default that of the last call.
            **options: See `ExportOptions`.

        Returns:
            The handle, once this rank's bytes are durable; the directory appears when all are.

        Raises:
            CkptkitError: If the export failed on this rank; on the others it is the result.
        """
        with self._calling("export") as check_modes:

            def find_bound() -> BoundState:
                check_modes()
                return self._binding.again(state)

            step = self._taken.step if self._taken else None
            request = make_request(out, options, self._session.origin(step))
            return self._exporter.export(find_bound, request, partial(self._save_as, step or 0))

    def _save_as(self, step: int, bound: BoundState, name: str) -> SaveHandle:
        save = self._session.begin_save(step, name, time.perf_counter())
        was_asked, self._was_asked = self._was_asked, True  # so that it is not skipped
        self._save(save, lambda: bound)
        self._was_asked = was_asked
        return save.handle

    @check_names
    def resume(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        folder: str | PathLike[str] | None = None,
        missing_groups: MissingGroups | None = None,
    ) -> int | None:
        """Loads the newest complete step of the run into the state, in place.

        The number of ranks and the sharding may have changed since. It waits for saves under way.

        Args:
            state: As for `save`; models may be on the meta device, optimizers may never have
                stepped.
            step: A step to load instead of the newest.
            folder: A directory to load instead: of a step with a name of its own, of another run,
                or one that stock accelerate, Trainer or `dcp.save` wrote. Of any other checkpoint
                the model is loaded alone, as `load_into` does it.
            missing_groups: What to do if the step has parameter groups that an optimizer does not
                have: "error", or "drop" to leave their state out; None for what `Options` says.

        Returns:
            The step that was loaded, None if the run has none, 0 if `folder` does not name one.

        Raises:
            ResumeError: If the step does not fit the state, or if all steps are damaged.
            PeerError: If another rank does not take part in time.
        """
        run, peers, timeout = self._session.run, self._peers, self._settings.timeout_seconds
        with self._calling("resume") as check_modes:
            for handle in self._handles:
                handle.wait()
            self._session.count_from(self._backend.recover())
            self._frozen.forget()
            try:
                check_modes()
                choice = missing_groups or self._settings.missing_groups
                check_choice({"missing_groups": choice}, "missing_groups", get_args(MissingGroups))
                bound = self._binding.of(state).resuming(self._settings.unfit_optimizer, choice)
            except Exception as error:
                decline(peers, error, timeout_seconds=timeout)
                raise
            loaded_step: int | None
            if folder is not None:
                place = self._session.place_of(folder)
                loaded_step = resume_from(bound, place, peers, timeout_seconds=timeout)
            else:
                loaded_step = resume(
                    bound, run.place, peers, timeout_seconds=timeout, step=step, prefix=run.prefix
                )
            self._binding.forget()  # parameters may have left the meta device
            return loaded_step

    @check_names
    def should_save(self, step: int) -> bool:
        """Returns whether to save now; the same on all ranks.

        Reasons are the interval, a signal, Slurm's end of the job, `request_save` and
        `ckptkit save-now`. Call it on every rank at every step.
        """
        self._check_open("should_save")
        due, interval = self._requests.should_save(step), self._settings.interval
        self._was_asked = due and interval.seconds is None and not interval.due_at_step(step)
        self._failed.warn()
        return due

    @check_names
    def request_save(self, *, stop: bool = False) -> None:
        """Asks all ranks to save at one of the next steps; may be called on any rank.

        Args:
            stop: Whether `stop_requested` is to be set then.
        """
        self._check_open("request_save")
        self._requests.request_save(stop=stop)

    @property
    def stop_requested(self) -> bool:
        """Whether training should end after the save that `should_save` last asked for."""
        return self._requests.stop_requested

    @property
    def unpushed(self) -> Collection[int]:
        """The steps that wait for their push to the Hub, and should stay until then."""
        return self._session.unpushed

    @check_names
    def close(self) -> None:
        """Waits for the last save, and ends threads and processes.

        Pushes to the Hub are not waited for: a process goes on with them after the program. What is
        not pushed by now is logged on all ranks.

        After an interruption a further call continues; signal handlers are restored by then.

        Raises:
            SaveError: The first error of saves whose result was not asked for. Also if the last
                three saves or more failed.
        """
        if os.getpid() != self._pid:  # in a forked child, to which nothing of it belongs
            return
        self._closed = True
        problems: list[Exception] = []
        try:
            while self._unclosed:
                try:
                    self._unclosed[0].close()
                except Exception as error:  # noqa: BLE001  the others are closed nevertheless
                    problems.append(error)
                del self._unclosed[0]
        finally:
            self._requests.close()
        atexit.unregister(self._close_at_exit)
        unheard = first_of([handle.unheard_error for handle in self._handles])
        failure = unheard or self._failed.error()
        for handle in self._handles:
            handle.mark_known()
        if problems:
            raise problems[0] from failure
        if failure is not None:
            raise failure

    def _close_at_exit(self) -> None:
        """Waits for saves under way at the end of a program that did not call `close`."""
        if os.getpid() != self._pid:
            return
        until = time.monotonic() + self._settings.timeout_seconds
        for handle in self._handles:
            handle.wait(max(0.0, until - time.monotonic()))
        lost = [str(handle.step) for handle in self._handles if not handle.done()]
        if lost:
            logger.error(
                "step %s: the program ends before the save; call close() first",
                ", ".join(lost),
            )
            self._session.committer.kill()
            self._backend.kill()
            for slot in self._slots:
                slot.kill()
            self._peers.close()
        with suppress(CkptkitError):  # it was logged when it happened
            self.close()

    def _slot_for(self, save: Save) -> SaveSlot | None:
        """Returns the slot of a save; None if it is skipped, which all ranks do or none.

        The slot may be in use. A requested save is never skipped.
        """
        free = next((slot for slot in self._slots if slot.idle), None)
        slot = free or self._slots[save.number % len(self._slots)]
        if self._settings.in_flight != "skip" or self.stop_requested or self._was_asked:
            return slot
        try:
            if self._session.takes_place(save, here=free is not None):
                return slot
        except CkptkitError as error:
            if free is not None:
                save.error = error  # other ranks may wait for it
                return free
            logger.warning("%s was not saved: %s", save, error)
            save.handle.fail(error)
            return None
        skipped = SkippedError(
            f"{len(self._slots)} earlier saves are still under way"
            if len(self._slots) > 1
            else "the save before is still under way",
            where=str(save),
        )
        logger.warning("%s", skipped)
        save.handle.fail(skipped)
        return None

    @contextmanager
    def _calling(self, what: str) -> Iterator[Callable[[], None]]:
        """Refuses a call while another thread is in one, and suspends the caller's modes of torch.

        Yields:
            A function that refuses modes under which the state cannot be read or written.

        Raises:
            SaveError: If another thread is in a call.
        """
        self._check_open(what)
        if not self._busy.acquire(blocking=False):
            raise SaveError(
                "another thread is saving or resuming at this moment",
                where=f"Checkpointer.{what}",
                hint="call the Checkpointer from one thread, in the same order on every rank",
            )
        try:
            with plain_torch() as unsuited:
                yield partial(check_modes, unsuited, f"Checkpointer.{what}")
        finally:
            self._busy.release()

    def _check_open(self, what: str) -> None:
        if os.getpid() != self._pid:  # its threads and its buffer are not in a forked child
            raise UsageError(
                f"was opened by process {self._pid}, and this is a forked child",
                where=f"Checkpointer.{what}",
                hint="save from the process that opened it",
            )
        if self._closed:
            raise UsageError("was closed already", where=f"Checkpointer.{what}")

    def __repr__(self) -> str:
        under_way = [str(handle.step) for handle in self._handles if not handle.done()]
        state = f"saving step {', '.join(under_way)}" if under_way else "no save under way"
        rank = f"rank {self._peers.rank} of {self._peers.world_size}"
        return f"<Checkpointer {str(self._run)!r}: {rank}, {'closed' if self._closed else state}>"

    def __enter__(self) -> Self:
        self._check_open("__enter__")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CkptkitError as failure:  # the error that ended the loop is more useful
            error.add_note(f"the Checkpointer then closed with: {failure}")
        except Exception:
            logger.exception("closing the Checkpointer")
