"""`Checkpointer`: what a training loop calls.

Its calls run one at a time, outside of the caller's modes of torch.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, Unpack, cast, get_args

import torch
import torch.distributed as dist

from ckptkit.core.arguments import check_names
from ckptkit.core.errors import CkptkitError, SaveError, UsageError
from ckptkit.core.manifest import Manifest
from ckptkit.core.text import a_kind
from ckptkit.core.threads import call_at_exit
from ckptkit.runs.marks import FileLocks
from ckptkit.runs.retention import Retention
from ckptkit.storage.local.disk import Closable
from ckptkit.storage.locations import MARKS_FOLDER, is_run_in
from ckptkit.storage.places import Place, is_url, local_path, place_of
from ckptkit.training.agree.barrier import SharedAnswers
from ckptkit.training.agree.peers import Peers, open_peers
from ckptkit.training.agree.save_requests import SaveRequestWatcher
from ckptkit.training.export.export import Exporter, ExportHandle, ExportOptions, make_request
from ckptkit.training.handle import SaveHandle, SaveReport, SkippedError
from ckptkit.training.pushing import FollowedPushes, Pushing
from ckptkit.training.resume.resume import decline, resume, resume_from
from ckptkit.training.run_folders import RunFolder, TrainingRun
from ckptkit.training.save.frozen import FrozenFiles
from ckptkit.training.save.saver import Save, SaveSlot
from ckptkit.training.save.writer_process import WriterTimeouts
from ckptkit.training.settings import Options, Settings, check_choice, check_options, check_shared
from ckptkit.training.sidecar import SidecarFolders, collect_sidecar, run_facts
from ckptkit.training.state.collect import Binding, BoundState, MissingGroups, WholeState
from ckptkit.training.state.models import check_modes, plain_torch
from ckptkit.training.tiers.save import open_committer
from ckptkit.training.tiers.url_run import UrlRun, check_place
from ckptkit.version import __version__
from ckptkit.writer.sweep import sweep

logger = logging.getLogger(__name__)

_LOCK = "the lock of the run"
_STEPS = 10**18  # numbers with more digits are not found among the names of directories
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
        self._named = run
        self._settings = settings = check_options(options)
        timeouts = WriterTimeouts(settings.stall_seconds, settings.timeout_seconds)
        self._peers = peers = open_peers(run, timeout_seconds=settings.timeout_seconds)
        with ExitStack() as undo:
            undo.callback(peers.close)
            # `saved_before` is the number of the last save of earlier jobs.
            self._run, lock, self._saved_before = open_run(run, peers, settings)
            if lock is not None:
                undo.callback(lock.close)
            # It commits on rank 0; on all ranks it drains what earlier jobs left on nodes' disks.
            self._process = self._run.process(timeouts, f"committer of rank {peers.rank}")
            undo.callback(self._process.close)
            self._pushing: _Pushes = None
            if settings.hub is not None:
                if peers.rank == 0:
                    rules = settings.retention
                    self._pushing = Pushing(self._run, settings.hub, rules, peers.store)
                else:
                    self._pushing = FollowedPushes(self._run, settings.hub, peers.store)
                undo.callback(self._pushing.close)
            self._requests = SaveRequestWatcher(
                peers,
                self._run,
                interval=settings.interval,
                signals=settings.signals,
                slurm_margin_seconds=settings.slurm_margin_seconds,
                timeout_seconds=settings.timeout_seconds,
            )
            undo.callback(self._requests.close)
            self._committer = open_committer(
                self._run,
                self._process,
                peers,
                settings,
                # Without a reference to this object, whose binding keeps models alive.
                retire=partial(_find_retired, self._run, settings.retention, self._pushing),
                listener=partial(_listen, self._pushing, settings.listener),
            )
            undo.callback(self._committer.close)
            self._saved_before = max(self._saved_before, self._committer.recover())
            if settings.local is not None and peers.rank == 0:
                self._run.sweep()
            undo.pop_all()
        # In the node's folder first: a slow shared storage must not block the training thread.
        places = [settings.local.absolute()] if settings.local is not None else []
        folders = [place / MARKS_FOLDER / peers.nonce for place in (*places, self._run.path)]
        self._sidecars = SidecarFolders(folders, settings.max_in_flight)
        self._answers = SharedAnswers(peers.store)
        self._frozen = FrozenFiles(peers.nonce, peers.rank, settings.max_in_flight)
        with plain_torch():
            self._slots = [
                SaveSlot(peers, settings, self._committer.end, self._frozen)
                for _ in range(settings.max_in_flight)
            ]
        self._binding = Binding(settings.layout, rank=peers.rank, world_size=peers.world_size)
        self._exporter = Exporter(peers, settings.sidecar, settings.timeout_seconds)
        self._unclosed: list[Closable] = [self._exporter, *self._slots, self._committer]
        self._unclosed += [self._frozen, self._requests, self._process]
        self._unclosed += [self._sidecars] if peers.rank == 0 else []
        self._unclosed += [part for part in (lock, self._pushing) if part is not None]
        self._unclosed.append(peers)
        self._count = 0  # of the calls of `save`
        self._tries: Counter[int] = Counter()  # of each step
        self._handles: list[SaveHandle] = []  # of saves under way, and of failures to be raised
        self._failed = FailedSaves()
        self._taken: SaveHandle | None = None  # the last one that was not skipped
        self._was_asked = False  # whether the next save was requested
        self._busy = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        # Threads end with the interpreter, which would lose a save under way. It runs before the
        # handler that waits for pushes, which was registered with the first of them.
        self._leave_exit = call_at_exit(self._close_at_exit)

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
            self._write_sidecar(bound)
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

            save = self._begin_save(step, name, began)
            self._save(save, find_state, metrics)
        self._failed.warn()
        return save.handle

    def _save(
        self,
        save: Save,
        find_state: Callable[[], BoundState | WholeState],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Takes a save through its states; see `ckptkit.training.save.saver`."""
        self._committer.place(save)
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
                self._describe(save, bound, metrics)
                slot.stage(
                    save,
                    bound.holdings(save.step),
                    () if isinstance(bound, WholeState) else bound.models,
                )
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
            origin = {
                "path": str(self._run.place),
                "format": "live",
                "step": step,
                "world_size": self._peers.world_size,
            }
            request = make_request(out, options, origin)
            return self._exporter.export(find_bound, request, partial(self._save_as, step or 0))

    def _save_as(self, step: int, bound: BoundState, name: str) -> SaveHandle:
        save = self._begin_save(step, name, time.perf_counter())
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
        group: dist.ProcessGroup | None = None,
        grow: Sequence[str] = (),
        renamed: Mapping[str, str | None] | None = None,
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
            group: A process group, such as that of HSDP's replicate dimension. Of a tensor that
                several of its ranks hold alike, one rank reads the bytes and sends them to the
                others. None issues no collective.
            grow: Patterns (`*`, `?`, `[…]`) of names of tensors in the model that may have more
                rows than in the step, or not be in it. The rows that it has are loaded; all else
                stays as the model made it, with optimizer states of zeros, or none.
            renamed: Names of tensors or modules in the step, and what they are called in the model;
                None for those that were dropped. A step that fits the model as it is, such as one
                that was saved since, is loaded without it.

        Returns:
            The step that was loaded, None if the run has none, 0 if `folder` does not name one.

        Raises:
            ResumeError: If the step does not fit the state, or if all steps are damaged.
            PeerError: If another rank does not take part in time.
        """
        run, peers, timeout = self._run, self._peers, self._settings.timeout_seconds
        with self._calling("resume") as check_modes:
            for handle in self._handles:
                handle.wait()
            self._saved_before = max(self._saved_before, self._committer.recover())
            self._frozen.forget()
            try:
                check_modes()
                choice = missing_groups or self._settings.missing_groups
                check_choice({"missing_groups": choice}, "missing_groups", get_args(MissingGroups))
                bound = self._binding.of(state).resuming(
                    self._settings.unfit_optimizer, choice, grow, renamed
                )
            except Exception as error:
                decline(peers, error, timeout_seconds=timeout)
                raise
            loaded_step: int | None
            if folder is not None:
                place = (
                    place_of(folder, self._settings.storage_options)
                    if is_url(folder)
                    else local_path(folder).absolute()
                )
                loaded_step = resume_from(bound, place, peers, timeout_seconds=timeout, group=group)
            else:
                loaded_step = resume(
                    *(bound, run.place, peers),
                    timeout_seconds=timeout,
                    step=step,
                    prefix=run.prefix,
                    group=group,
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
        return _unpushed(self._pushing)

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
        self._leave_exit()
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
            self._process.kill()
            self._committer.kill()
            for slot in self._slots:
                slot.kill()
            self._peers.close()
        with suppress(CkptkitError):  # it was logged when it happened
            self.close()

    def _begin_save(self, step: object, name: str | None, began: float) -> Save:
        """Names a save, the same on all ranks, even if one has missed a step.

        `name` is that of its directory, if that is not named by the step.

        Raises:
            UsageError: If it would replace the directory that this program runs in.
        """
        self._count += 1
        count = _check_step(step)
        self._tries[count] += 1
        number = self._tries[count]
        attempt = f"{self._peers.nonce}-{count}-{number}"
        final = self._run.step_folder(count) if name is None else self._run.named_folder(name)
        if isinstance(final, Path) and is_run_in(final):
            raise UsageError(
                "the save would replace the directory that this program runs in",
                where=str(final),
                hint="save to another directory, such as one below it",
            )
        manifest = Manifest(
            kind="training",
            source={
                "step": count,
                "world_size": self._peers.world_size,
                "layout": self._settings.layout,
                "attempt": attempt,
                "save_number": self._saved_before + self._count,
                "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            options={},
            versions={"ckptkit": __version__, "torch": torch.__version__},
            tensors={},
        )
        save = Save(
            number=self._count,
            name=attempt,
            step=count,
            folder=self._run.working_folder(final, self._peers.nonce, number),
            final=final,
            manifest=manifest.to_document(),
            handle=SaveHandle(count),
            began=began,
            retires=name is None,
        )
        if isinstance(self._pushing, Pushing):
            self._pushing.follow(save.handle, save.step_name)
        return save

    def _describe(
        self, save: Save, bound: BoundState | WholeState, metrics: Mapping[str, float] | None
    ) -> None:
        """Adds the metrics and the sidecar folder to a save."""
        if not isinstance(metrics, Mapping | None):
            raise UsageError(f"expected numbers by name, got {a_kind(metrics)}", where="metrics")
        try:
            numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
        except (TypeError, ValueError, OverflowError) as error:
            message = f"expected a number for each name: {error}"
            raise UsageError(message, where="metrics") from error
        infinite = [name for name, value in numbers.items() if not math.isfinite(value)]
        if infinite:
            logger.warning("not finite, and kept as null: metrics %s", ", ".join(sorted(infinite)))
        finite = {**numbers, **dict.fromkeys(infinite)}
        source = {**save.manifest["source"], "metrics": finite}
        save.manifest = {**save.manifest, "source": source}
        save.beside = self._write_sidecar(bound)

    def _write_sidecar(self, bound: BoundState | WholeState) -> str:
        """Writes the sidecar of later steps on rank 0, and returns its folder.

        It is a new one if something changed, since others may be in use.
        """
        if self._peers.rank != 0:
            return ""
        modules = [model.module for model in bound.models]
        objects = [*modules, *(entry.optimizer for entry in bound.optimizers)]
        places = [(other.key, other.position, other.kind, other.file) for other in bound.others]

        if not self._sidecars.describes(objects, places):
            files = collect_sidecar(modules, self._settings.sidecar)
            self._sidecars.write([*files, run_facts(bound.facts(), modules)], objects, places)
        return str(self._sidecars.folder)

    def _slot_for(self, save: Save) -> SaveSlot | None:
        """Returns the slot of a save; None if it is skipped, which all ranks do or none.

        The slot may be in use. A requested save is never skipped.
        """
        free = next((slot for slot in self._slots if slot.idle), None)
        slot = free or self._slots[save.number % len(self._slots)]
        if self._settings.in_flight != "skip" or self.stop_requested or self._was_asked:
            return slot
        try:
            # All ranks do what the first one that asks can do.
            own = "skip" if free is None else "go"
            if self._answers.first(f"start/{save.name}", own) == "go":
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
        return f"<Checkpointer {str(self._named)!r}: {rank}, {'closed' if self._closed else state}>"

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


_Pushes = Pushing | FollowedPushes | None


def _unpushed(pushing: _Pushes) -> frozenset[int]:
    return pushing.outstanding if isinstance(pushing, Pushing) else frozenset()


def _find_retired(
    run: TrainingRun[Any],
    retention: Retention,
    pushing: _Pushes,
    step: int,
    source: Mapping[str, Any],
) -> Sequence[Path | Place]:
    """Returns the steps to remove once a new one is durable; none if they are unknown."""
    try:
        retired = run.retired_by(step, source, retention)
        waiting = {str(run.step_folder(unpushed)) for unpushed in _unpushed(pushing)}
        return [place for place in retired if str(place) not in waiting]
    except CkptkitError as error:
        logger.warning("no step is retired by step %d: %s", step, error)
        return ()


def _listen(
    pushing: _Pushes, listener: Callable[[SaveReport], None] | None, report: SaveReport
) -> None:
    """Has a committed step pushed, and calls the user's listener."""
    if pushing is not None:
        pushing.listen(report)
    if listener is not None:
        listener(report)


def open_run(
    run: str | PathLike[str], peers: Peers, settings: Settings
) -> tuple[TrainingRun[Any], FileLocks | None, int]:
    """Opens a run on all ranks, which rank 0 creates, locks and sweeps; see `Checkpointer`."""
    held: list[FileLocks] = []  # on rank 0, unless the file system has no locks
    undo = ExitStack()
    try:
        place = _check_place(run, settings)
    except UsageError as error:  # so that the other ranks fail at once
        peers.refuse(_LOCK, error, timeout_seconds=settings.timeout_seconds)
        raise

    def make() -> TrainingRun[Any]:
        if isinstance(place, Path):
            return RunFolder(place, prefix=settings.prefix)
        assert settings.local is not None  # noqa: S101  `_check_place` requires it
        return UrlRun(place, settings.local, peers.nonce, settings.prefix)

    def take(options: Sequence[Mapping[str, Any]]) -> int:
        check_shared(options)
        opened_run = make()
        if isinstance(opened_run, UrlRun):
            opened_run.open()
        elif isinstance(opened_run, RunFolder):
            lock = opened_run.lock()
            if lock is not None:  # without a lock another job may be saving there
                undo.callback(lock.close)
                held.append(lock)
                for note in sweep(opened_run.path):
                    logger.info("%s", note)
        return opened_run.last_save_number()

    with undo:
        saved_before = peers.agree(
            _LOCK, settings.shared(), take, timeout_seconds=settings.timeout_seconds
        )
        opened: list[TrainingRun[Any]] = []
        problem: CkptkitError | None = None
        try:
            opened.append(make())
            opened[0].check()
        except CkptkitError as error:
            problem = error
        peers.raise_first(
            "the directory of the run", problem, timeout_seconds=settings.timeout_seconds
        )
        undo.pop_all()
    return opened[0], held[0] if held else None, saved_before


def _check_place(run: str | PathLike[str], settings: Settings) -> Path | Place:
    """Returns the place of a run that the user named."""
    if not is_url(run):
        if settings.storage_options:
            raise UsageError(
                "cannot be combined with a run that is a directory",
                where="storage_options",
                hint="leave them out, or save to a URL",
            )
        return local_path(run)
    place = place_of(run, settings.storage_options)
    check_place(place)
    if settings.local is None:
        raise UsageError(
            "is required for a run at a URL: steps are durable there first and uploaded from there",
            where="local",
            hint='pass local="/nvme/run": a directory on the node\'s own disk, kept between jobs,'
            " with room for two steps of its ranks",
        )
    return place


def _check_step(step: object) -> int:
    try:
        count = -1 if isinstance(step, bool) else operator.index(cast("SupportsIndex", step))
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"expected a count of steps, got {step!r}", where="step")
    if count >= _STEPS:
        raise UsageError(
            f"expected a count of at most {len(str(_STEPS)) - 1} digits, got {count}",
            where="step",
            hint="count steps from 0, or give the directory a name of its own with `name`",
        )
    return count
