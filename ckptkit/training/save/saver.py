"""Drives a save on this rank, from the call to the committed step.

A save goes through these states, in this order:

    prepare    `SaveSlot.prepare`, or the first save: the plan of the files, the shared buffer, the
               writer process
    stage      `SaveSlot.stage`: this rank's tensors are copied into the buffer; training goes on
    hand over  `SaveSlot.hand_over`: whatever happened, a thread has the save from here on
    persist    `SaveSlot._persist`: the writer makes this rank's files durable, the record last
    commit     `SaveCommitter.settle`: all ranks agree, and rank 0 gives the folder its name
    free       the handle has its result, and the slot takes the next save

A state that does not fit into the buffer is staged and persisted in waves. With the nodes' own
disks (`ckptkit.training.tiers.save`) a step is committed twice: on the nodes, which frees the slot,
and after its drain.

What is waited for has one word each:

    freed      `save` waits until the earlier save in its slot has freed it: `waited_seconds`
    staged     changes of parameters, and the writer, wait until devices have staged their copies
    ended      the commit waits until the previous save, in whatever slot, has ended; on the nodes'
               own disks until it is freed
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from torch import nn

from ckptkit.core.errors import CkptkitError, PeerError, SaveError, UsageError, error_from_json
from ckptkit.core.manifest import Manifest
from ckptkit.core.threads import WorkerThread
from ckptkit.engine.progress import Stage
from ckptkit.runs.step_manifests import read_findings
from ckptkit.storage.manifests import read_manifest
from ckptkit.storage.places import Place, open_source
from ckptkit.training.agree.barrier import SaveBarrier
from ckptkit.training.agree.peers import Peers
from ckptkit.training.handle import SaveHandle, SaveReport
from ckptkit.training.save.file_layout import (
    ReplicaSample,
    SavePlan,
    Signatures,
    plan_save,
    plan_whole,
)
from ckptkit.training.save.frozen import FrozenFiles, WaveFiles
from ckptkit.training.save.staging import SharedBuffer, Staged, Stager, measure_copy_limit
from ckptkit.training.save.writer_process import WriterProcess, WriterTimeouts
from ckptkit.training.settings import Settings
from ckptkit.training.sidecar import configuration_of
from ckptkit.training.state.collect import BoundModel, BoundState, expected_state_bytes
from ckptkit.training.state.memory_changes import call_before_changes
from ckptkit.training.state.objects import is_plain, serialise, torch_archive
from ckptkit.training.state.pieces import Holdings, ObjectValue, Piece
from ckptkit.training.step_names import RNG, name_save
from ckptkit.writer.messages import (
    Commit,
    Discard,
    Drain,
    Inline,
    Persist,
    RecordProof,
    StepCommitted,
    Written,
)

logger = logging.getLogger(__name__)
OURS = "this is a bug of ckptkit; please report it with the log's traceback"
_MOST_FAILED = 8  # failed saves whose folders are still to be removed
_TIMES = 3  # removals of each folder, since late ranks may still write into it
_VISIBLE_SECONDS = 60.0


class Save(Struct):
    """One try to save one step. What names it is the same on every rank."""

    number: int  # of the save in this session, as this rank counts them
    name: str  # unique in the run: the session's nonce, the step and the number of the try
    step: int  # the training step
    folder: Path  # the working folder that this rank writes into
    final: Path | Place  # the step's directory
    manifest: Mapping[str, Any]  # the manifest without the files
    handle: SaveHandle  # the caller's handle
    began: float = 0.0  # `time.perf_counter` at the call of `save`
    retires: bool = True  # whether older steps are removed for it, by the rules of retention
    shares: bool = False  # whether files of others may be in the step's directory, and stay there
    # The previous save, which ends first, so that the later of two saves of a step stays
    after: SaveHandle | None = None
    beside: str = ""  # a folder whose files are copied next to the shards; empty for none
    # The working folder of all ranks, if this rank writes into another one first
    shared: Path | None = None
    staged_bytes: int = 0  # tensor bytes that this rank copies
    copy_limit: float = 0.0  # bytes per second of a plain warm copy; 0 if unknown
    durable: float = 0.0  # `time.perf_counter` when this rank's files were durable
    local_seconds: float = 0.0  # from the call until the step was durable on the nodes' own disks
    answers: list[Written] = field(default_factory=list)  # of the writer, one for each wave
    error: CkptkitError | None = None  # what failed on this rank
    # Writes this rank's files again, into the current folder; None if the buffer does not have all
    # of them any more
    rewrite: Callable[[], None] | None = None

    @property
    def step_name(self) -> str:
        return Path(self.final).name

    def __str__(self) -> str:
        return name_save(self.step, self.final)

    def outcome(self) -> dict[str, Any]:
        """Returns this rank's outcome: `{"proof": …}` or `{"error": …}`."""
        if self.error is not None:
            return {"error": self.error.to_json()}
        proof = next((a.proof for a in reversed(self.answers) if a.proof is not None), None)
        if proof is None:
            error = SaveError("the writer gave no proof of what it wrote", where="writer")
            return {"error": error.to_json()}
        return {
            "proof": {
                "rank": proof.rank,
                "path": proof.path,
                "size_bytes": proof.size_bytes,
                "crc32": proof.crc32,
            }
        }


Retire = Callable[[int, Mapping[str, Any]], Sequence[Path | Place]]
"""From a step and its manifest's `source` to the steps that are removed once it is durable."""


class SaveCommitter:
    """Commits saves to shared storage: ranks agree, rank 0 commits, each rank reports.

    Every save ends within a bounded time: other ranks are waited for up to `timeout_seconds`. The
    listener is called in the thread that ends the save.
    """

    def __init__(
        self,
        barrier: SaveBarrier,
        process: WriterProcess | None,
        *,
        retire: Retire,
        timeout_seconds: float,
        listener: Callable[[SaveReport], None] | None,
    ) -> None:
        """Starts nothing; only rank 0 has a process that commits, and asks what to retire."""
        self._barrier = barrier
        self._process = process
        self._retire = retire
        self._timeout_seconds = timeout_seconds
        self._listener = listener
        # By name, each with its folder and how often that is still to be removed.
        self._failed: dict[str, tuple[Path, int]] = {}

    @property
    def rank(self) -> int:
        return self._barrier.rank

    def place(self, save: Save) -> None:
        """Sets the folder that this rank writes into."""

    def recover(self) -> int:
        """Drains steps that are durable on the nodes' disks only; returns the last save number."""
        return 0

    def end(self, save: Save) -> None:
        """Ends a save that this rank has written, after the previous one."""
        if save.after is not None:
            save.after.wait()
        self.settle(save)

    def kill(self) -> None:
        """Makes queued saves fail soon."""

    def close(self) -> None:
        """Waits for queued saves."""

    def copy_files(
        self, save: Save, process: WriterProcess, target: Path, verb: str, earlier: str = ""
    ) -> None:
        """Has this rank's files copied from its folder; an error is stored in the save."""
        try:
            request = Drain(
                attempt=save.name,
                folder=str(save.folder),
                target=str(target),
                records=(save.outcome()["proof"]["path"],),
                earlier=earlier,
            )
            size_bytes = sum(answer.size_bytes for answer in save.answers)
            stage = Stage(f"{verb} {save}, rank 0", size_bytes)
            process.request(request, stage if self.rank == 0 else None)
        except CkptkitError as error:
            save.error = error
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("%s %s", verb, save)
            save.error = SaveError(f"{type(error).__name__}: {error}", hint=OURS)

    def settle(self, save: Save) -> bool:
        """Agrees on a save, commits and reports it; returns whether it was committed."""
        try:
            report = _report(save, self._agree(save))
        except CkptkitError as error:
            self._remove_failed()
            fail(save, error)
        except Exception as error:  # a bug of ours must not leave the caller waiting
            logger.exception("ending the save of %s", save)
            fail(save, SaveError(f"{type(error).__name__}: {error}", hint=OURS))
        else:
            if self.rank == 0:
                logger.info("%s", report)
                for name, reason in sorted(report.lost.items()):
                    logger.error(
                        "%s was saved without the state of %s, and no older step is removed"
                        " for it: %s",
                        save,
                        name,
                        reason,
                    )
            for note in report.notes:
                logger.warning("%s, rank %d: %s", save, self.rank, note)
            save.handle.succeed(report)
            try:
                if self._listener is not None:
                    self._listener(report)
            except BaseException:  # the user's code, in our thread, may even exit
                logger.exception("the listener of saves failed")
            self._remove_failed()
            return True
        return False

    def _agree(self, save: Save) -> Mapping[str, Any]:
        """Exchanges the outcomes of all ranks, and returns what was committed."""

        def find() -> Outcome | None:
            manifest = find_committed(save.final, save.name)
            if manifest is None:
                return None
            lost = read_findings(manifest).lost
            return {"committed": {"size_bytes": manifest.size_bytes, "lost": lost}}

        # Rank 0 commits after it has waited for all, so the others have to wait for both.
        timeout_seconds = self._timeout_seconds * (1 if self._process is not None else 2)
        agree = partial(
            self._barrier.agree_on, save, save.outcome(), timeout_seconds=timeout_seconds
        )
        try:
            agreed = agree_on_commit(agree, partial(self._commit, save), find, str(save))
        except CkptkitError:
            if self._process is not None:  # no rank will commit it any more
                self._give_up(save)
            raise
        if "error" in agreed:
            raise error_from_json(agreed["error"])
        answer: Mapping[str, Any] = agreed["committed"]
        return answer

    def _commit(self, save: Save, values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Commits, on rank 0, a save that every rank has answered.

        `values` are the outcomes by rank; the result, for every rank, is `{"committed": …}` or
        `{"error": …}`.
        """
        assert self._process is not None  # noqa: S101  rank 0 decides
        errors = [(rank, v["error"]) for rank, v in enumerate(values) if "error" in v]
        try:
            if errors:
                rank, document = errors[0]
                more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
                raise error_from_json(document).located(f"rank {rank}{more}")
            retired = self._retire(save.step, save.manifest["source"]) if save.retires else ()
            answer = self._process.request(
                Commit(
                    attempt=save.name,
                    folder=str(save.folder),
                    final=str(save.final),
                    proofs=tuple(RecordProof(**value["proof"]) for value in values),
                    manifest=save.manifest,
                    beside=save.beside,
                    remove=tuple(map(str, retired)),
                    visible_seconds=min(_VISIBLE_SECONDS, self._timeout_seconds / 2),
                    shared=save.shares,
                )
            )
        except CkptkitError as error:
            self._give_up(save)
            return {"error": error.to_json()}
        assert isinstance(answer, StepCommitted)  # noqa: S101  the answer to `Commit`
        for note in answer.notes:
            logger.warning("%s: %s", save, note)
        return {"committed": {"size_bytes": answer.size_bytes, "lost": dict(answer.lost)}}

    def _give_up(self, save: Save) -> None:
        """Has the folder of a failed save removed later."""
        self._failed[save.name] = (save.folder, _TIMES)
        while len(self._failed) > _MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _remove_failed(self) -> None:
        """Removes the folders of failed saves; called while no rank waits for a commit."""
        if self._process is None:
            return
        try:
            for name, (folder, times) in list(self._failed.items()):
                if times > 1:
                    self._failed[name] = (folder, times - 1)
                else:
                    del self._failed[name]
                if not discard_folder(self._process, name, folder):
                    return  # if storage hangs, each further one would wait for a timeout
        except Exception:  # a bug of ours must not leave the caller waiting
            logger.exception("removing the folders of failed saves")


def discard_folder(process: WriterProcess, attempt: str, folder: Path) -> bool:
    """Has the working folder of a failed save removed; returns whether that was tried."""
    try:
        process.request(Discard(attempt, str(folder)))
    except CkptkitError as error:
        logger.warning("the working folder %s could not be removed: %s", folder, error)
        return False
    return True


def fail(save: Save, error: CkptkitError) -> None:
    """Ends a save that is not committed."""
    hint = f" ({error.hint})" if error.hint else ""
    logger.error("%s was not saved: %s%s", save, error, hint)
    save.handle.fail(error)


def _report(save: Save, committed: Mapping[str, Any]) -> SaveReport:
    blocked = save.handle.blocked_seconds
    waited = save.handle.waited_seconds
    rate = save.staged_bytes / (blocked - waited) if blocked > waited else 0.0
    return SaveReport(
        step=save.step,
        path=save.final,
        size_bytes=sum(answer.size_bytes for answer in save.answers),
        total_bytes=committed["size_bytes"],
        blocked_seconds=blocked,
        bytes_per_second=rate,
        copy_limit_share=rate / save.copy_limit if save.copy_limit else 0.0,
        durable_seconds=save.durable - save.began,
        committed_seconds=time.perf_counter() - save.began,
        writer_cpu_seconds=sum(answer.cpu_seconds for answer in save.answers),
        notes=tuple(dict.fromkeys(note for a in save.answers for note in a.notes)),
        waited_seconds=waited,
        local_seconds=save.local_seconds,
        linked_bytes=sum(answer.linked_bytes for answer in save.answers),
        lost=committed.get("lost", {}),
    )


Outcome = Mapping[str, Any]


def agree_on_commit(
    agree: Callable[[Callable[[list[Any]], Outcome]], Outcome],
    commit: Callable[[Sequence[Outcome]], Outcome],
    find: Callable[[], Outcome | None],
    what: str,
) -> Outcome:
    """Returns on all ranks the outcome of a commit by rank 0, which may end before it tells them.

    Args:
        agree: Lets rank 0 decide on the values of all ranks.
        commit: Decides, by a commit.
        find: Returns the outcome of a commit that rank 0 did not tell, None where there was none.
        what: Is committed, for messages.
    """
    decided: list[Outcome] = []

    def decide(values: list[Any]) -> Outcome:
        decided.append(commit(values))
        return decided[0]

    try:
        return agree(decide)
    except CkptkitError as error:
        if decided:
            logger.warning("the outcome of %s could not be sent to all ranks: %s", what, error)
            return decided[0]
        found = find() if isinstance(error, PeerError) else None
        if found is None:
            raise
        logger.info("%s was committed, after which %s", what, error)
        return found


def find_committed(final: Path | Place, attempt: str) -> Manifest | None:
    """Returns the manifest of a save or export, None where another attempt, or nothing, is."""
    try:
        with closing(open_source(final)) as source:
            manifest = read_manifest(source)
    except (CkptkitError, OSError):
        return None
    return manifest if manifest.source.get("attempt") == attempt else None


class SaveSlot:
    """What one save needs: a buffer, the process that writes it, and the thread that follows it.

    A second save waits until the first is freed. The writer is killed if it hangs.
    """

    def __init__(
        self,
        peers: Peers,
        settings: Settings,
        end: Callable[[Save], None],
        frozen: FrozenFiles,
    ) -> None:
        """Starts a thread; `prepare`, or the first save, allocates memory and starts the writer.

        `end` commits what this rank has written. All slots share the files of frozen weights.
        """
        self._peers = peers
        self._settings = settings
        self._buffer = SharedBuffer()
        self._writer = WriterProcess(
            WriterTimeouts(settings.stall_seconds, settings.timeout_seconds), self._buffer
        )
        self._stager = Stager(self._buffer)
        self._worker = WorkerThread("ckptkit-saver")
        self._end = end
        self._frozen = frozen
        self._signatures = Signatures()
        self._plan: SavePlan | None = None
        self._changing = frozen.changing
        self._copy_limit = 0.0
        self._last_note = ""
        self._guarded: tuple[nn.Module, ...] | None = None
        self._unguard: Callable[[], None] = lambda: None
        self._current: SaveHandle | None = None

    @property
    def idle(self) -> bool:
        return self._current is None or self._current.freed

    def prepare(self, bound: BoundState) -> None:
        """Allocates the memory for a save, and starts the writer, once the next save may begin."""
        if self._current is not None:
            self._current.wait_freed()
        pieces = bound.holdings(0).pieces  # cached, so the first save finds them faster
        plan = self._plan_for(bound.models, pieces)
        # Large enough for later saves, so that it need not grow.
        further_bytes = expected_state_bytes(bound, pieces, self._signatures.of(pieces)[0])
        self._stager.close()
        limit, needed = self._settings.staging_limit_bytes, plan.buffer_bytes + further_bytes
        self._buffer.reserve(needed if limit is None else min(needed, limit))
        self._log_buffer_note()
        self._copy_limit = measure_copy_limit(self._buffer)
        self._stager.load(plan)
        self._writer.start()
        self._guard(bound.models)

    @contextmanager
    def hand_over(self, save: Save) -> Iterator[None]:
        """Waits until the slot is free, runs the block that stages, and has a thread go on.

        Any error of the block is the outcome of the save, here and on the other ranks, which wait
        for this one. The save may have failed already.
        """
        try:
            waited = time.perf_counter()
            if self._current is not None:  # it is freed within a bounded time
                self._current.wait_freed()
            save.handle.waited_seconds = time.perf_counter() - waited
            self._current = save.handle
            yield
        except UsageError as error:
            save.error = error
            save.handle.mark_known()
            raise
        except CkptkitError as error:
            save.error = error
        except Exception as error:  # a bug of ours must not end the training
            logger.exception("staging %s", save)
            save.error = SaveError(f"{type(error).__name__}: {error}", hint=OURS)
        except BaseException as error:  # such as Ctrl-C
            save.error = SaveError(f"the save was interrupted by {type(error).__name__}")
            raise
        finally:
            self._current = save.handle
            self._log_buffer_note()
            if not save.handle.blocked_seconds:
                save.handle.blocked_seconds = time.perf_counter() - save.began
            self._worker.submit_unwatched(partial(self._finish, save))

    def copy_ahead(self, holdings: Holdings) -> Staged | None:
        """Copies a state while ranks agree on its save, if it is one wave; for an idle slot."""
        plan = self._plan_for((), holdings.pieces)
        if len(plan.images) > 1 or plan.frozen_bytes:
            return None
        return self._stager.stage(plan, holdings.pieces)

    def stage(
        self,
        save: Save,
        holdings: Holdings,
        models: Sequence[BoundModel] = (),
        copied: Staged | None = None,
    ) -> None:
        """Copies this rank's part of the state; the last wave is persisted in the background.

        `copied`: what `copy_ahead` has copied of the same holdings.
        """
        pieces = holdings.pieces
        if holdings.whole:
            plan = plan_whole(holdings.whole, pieces)
        else:
            plan = self._plan_for(models, pieces)
        self._guard(models)
        waves, with_frozen = self._frozen.files_for(plan, pieces, self._stager, save)
        save.staged_bytes = plan.data_bytes - (0 if with_frozen else plan.frozen_bytes)
        save.copy_limit = self._copy_limit
        for number, wave in enumerate(waves):
            staged = copied or self._stager.stage(plan, pieces, number, frozen=with_frozen)
            if holdings.whole:  # some of its tensors exist only during the call
                staged.wait()
            save.handle.add_copy(staged)
            samples = plan.replica_samples if number == 0 else ()
            if number < len(waves) - 1:  # the next wave needs the buffer
                write = partial(self._persist, save, wave, staged, samples)
                self._worker.submit(write).result()
                if save.error is not None:
                    return
                continue
            record, small = record_of(
                plan,
                holdings,
                rank=self._peers.rank,
                world_size=self._peers.world_size,
                attempt=save.name,
                step=save.step,
            )
            save.handle.blocked_seconds = time.perf_counter() - save.began
            write = partial(self._persist, save, wave, staged, samples, small, record)
            self._worker.submit_unwatched(write)

    def join(self) -> None:
        """Makes each device's current stream wait for copies, so that it may change tensors."""
        self._stager.join()

    def kill(self) -> None:
        self._writer.kill()

    def close(self) -> None:
        """Waits for the save under way, and ends the thread and the writer."""
        self._worker.close()
        self._writer.close()
        self._unguard()
        self._stager.close()
        self._buffer.close()

    def _persist(
        self,
        save: Save,
        files: WaveFiles,
        staged: Staged,
        samples: Sequence[ReplicaSample],
        inline: tuple[Inline, ...] = (),
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Has a wave written, in the thread; an error is stored in the save.

        The copies may still be running on a device. Small files and the rank's record come with the
        last wave.
        """
        try:
            staged.wait()
            if save.error is not None:
                return
            if record is not None and not save.answers and not files.links:
                plain = WaveFiles(files.images)
                save.rewrite = partial(self._persist, save, plain, staged, samples, inline, record)
            size_bytes = sum(image.size_bytes for image in files.images)
            stage = Stage(f"writing {save}, rank 0", size_bytes)
            answer = self._writer.request(
                Persist(
                    attempt=save.name,
                    folder=str(save.folder),
                    images=files.images,
                    inline=inline,
                    record=record,
                    record_path=f".ranks/{self._peers.rank}.json",
                    links=files.links,
                    keeps=files.keeps,
                    ranges=files.ranges,
                    replicas=tuple((sample.start, sample.stop) for sample in samples),
                    waves_before=len(save.answers),
                ),
                stage if self._peers.rank == 0 else None,
            )
            assert isinstance(answer, Written)  # noqa: S101  the answer to `Persist`
            save.answers.append(answer)
            self._frozen.take_answer(files, save, answer)
        except CkptkitError as error:
            save.error = error
        except Exception as error:
            logger.exception("saving %s", save)
            save.error = SaveError(f"{type(error).__name__}: {error}", hint=OURS)

    def _finish(self, save: Save) -> None:
        save.durable = time.perf_counter()
        self._end(save)

    def _plan_for(self, bound: Sequence[BoundModel], pieces: Sequence[Piece]) -> SavePlan:
        owners, signature = self._signatures.of(pieces)
        changing, plan = self._frozen.changing, self._plan
        if plan is None or plan.signature != signature or self._changing != changing:
            limit = self._settings.staging_limit_bytes
            plan = plan_save(
                pieces,
                owners,
                rank=self._peers.rank,
                limit_bytes=limit,
                changing=changing,
                models={(m.unit, m.path): configuration_of(m.module) for m in bound},
            )
            self._plan, self._changing = plan, changing
        return plan

    def _log_buffer_note(self) -> None:
        """Logs each new note about the buffer once."""
        if self._buffer.note != self._last_note:
            self._last_note = self._buffer.note
            logger.warning("rank %d: %s", self._peers.rank, self._last_note)

    def _guard(self, bound: Sequence[BoundModel]) -> None:
        """Makes optimizers and loads of this state wait for copies that are under way."""
        models = tuple(model.module for model in bound)
        if self._guarded is None or list(map(id, models)) != list(map(id, self._guarded)):
            self._unguard()
            with ExitStack() as undo:
                undo.callback(call_before_changes(self._stager.join, models))
                undo.callback(call_before_changes(self._frozen.forget, models, steps=False))
                self._unguard = undo.pop_all().close
            self._guarded = models


_MOST_ARCHIVES = 4096
_archives: dict[str, bytes] = {}  # of plain values, by their text, since 1 == True


def record_of(
    plan: SavePlan,
    holdings: Holdings,
    *,
    rank: int,
    world_size: int,
    attempt: str,
    step: int,
) -> tuple[dict[str, Any], tuple[Inline, ...]]:
    """Returns the rank's record, without what its writer adds, and its small files."""
    units: dict[str, Mapping[str, Any]] = dict(plan.record_units)
    files: list[Inline] = []
    by_unit: dict[str, list[ObjectValue]] = {}
    for value in holdings.objects:
        by_unit.setdefault(value.unit, []).append(value)
    for unit, values in by_unit.items():
        record = units.get(unit, {"tensors": [], "chunks": [], "data_files": [], "expected": []})
        names = record["data_files"]
        file, rows = objects_file(values, rank, len(names))
        units[unit] = {
            **record,
            "objects": rows,
            "data_files": [*names, file.path.rpartition("/")[2]],
        }
        files.append(file)
    document = {
        "rank": rank,
        "world_size": world_size,
        "attempt": attempt,
        "step": step,
        "units": units,
        "dispensable": holdings.dispensable,
        "values": holdings.values,
        "replicas": [
            [s.unit, s.path, s.offsets, (s.unit, s.path) in plan.of_rank_0]
            for s in plan.replica_samples
        ],
    }
    return document, (*files, *holdings.files)


def objects_file(
    objects: Sequence[ObjectValue], rank: int, file_number: int
) -> tuple[Inline, list[list[Any]]]:
    """Puts the objects of one DCP directory into a file of consecutive archives.

    Returns:
        The file, and `[path, file_number, start, length]` for each object.
    """
    data = bytearray()
    rows: list[list[Any]] = []
    for item in objects:
        value, archive = item.value, item.archive
        if not archive and is_plain(value):
            text = repr(value)
            archive = _archives.get(text, b"")
            if not archive:
                if len(_archives) >= _MOST_ARCHIVES:
                    _archives.clear()
                archive = _archives[text] = torch_archive(value)
        elif not archive and item.key_path[0] == RNG:  # ours and large; known to be readable
            archive = torch_archive(value)
        elif not archive:
            archive = serialise(value, ".".join(map(str, item.key_path)))
        rows.append([list(item.key_path), file_number, len(data), len(archive)])
        data += archive
    unit = objects[0].unit
    name = f"__{rank}_{file_number}.distcp"
    return Inline(f"{unit}/{name}" if unit else name, bytes(data)), rows
