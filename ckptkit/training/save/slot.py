"""A save slot: a buffer, the process that writes it, the cached plan, and this rank's record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from ckptkit.core.errors import CkptkitError, SaveError, UsageError
from ckptkit.core.threads import WorkerThread
from ckptkit.engine.progress import Stage
from ckptkit.training.agree.peers import Peers
from ckptkit.training.handle import SaveHandle
from ckptkit.training.save.file_layout import ReplicaSample, SavePlan, Signatures, plan_save
from ckptkit.training.save.frozen import FrozenFiles, WaveFiles
from ckptkit.training.save.saver import OURS, Save, SaveBackend
from ckptkit.training.save.shared_memory import SharedBuffer
from ckptkit.training.save.staging import Staged, Stager, measure_copy_limit
from ckptkit.training.save.writer_process import WriterProcess, WriterTimeouts
from ckptkit.training.settings import Settings
from ckptkit.training.state.collect import BoundState, expected_state_bytes
from ckptkit.training.state.memory_changes import call_before_changes
from ckptkit.training.state.objects import is_plain, serialise, torch_archive
from ckptkit.training.state.pieces import ObjectValue, Piece
from ckptkit.training.step_names import RNG
from ckptkit.writer.messages import Inline, Persist, Written

logger = logging.getLogger(__name__)


class SaveSlot:
    """The resources of one save, and the thread that writes it.

    A second save waits until the first has ended. Each wave is written by the writer process, which
    is killed if it hangs. After the last wave the save is handed to the backend.
    """

    def __init__(
        self,
        peers: Peers,
        settings: Settings,
        backend: SaveBackend,
        frozen: FrozenFiles,
    ) -> None:
        """Starts a thread; `prepare`, or the first save, allocates memory and starts the writer.

        Args:
            peers: The other ranks.
            settings: The options.
            backend: Ends the saves.
            frozen: Shared by all slots.
        """
        self._peers = peers
        self._settings = settings
        self._buffer = SharedBuffer()
        self._writer = WriterProcess(
            WriterTimeouts(settings.stall_seconds, settings.timeout_seconds), self._buffer
        )
        self._stager = Stager(self._buffer)
        self._worker = WorkerThread("ckptkit-saver")
        self._backend = backend
        self._frozen = frozen
        self._signatures = Signatures()
        self._plan: SavePlan | None = None
        self._restless = frozen.restless
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
        plan = self._plan_for(pieces)
        # Large enough for later saves, so that it need not grow.
        further_bytes = expected_state_bytes(bound, pieces, self._signatures.of(pieces)[0])
        self._stager.close()
        limit, needed = self._settings.staging_limit_bytes, plan.buffer_bytes + further_bytes
        self._buffer.reserve(needed if limit is None else min(needed, limit))
        self._log_buffer_note()
        self._copy_limit = measure_copy_limit(self._buffer)
        self._stager.load(plan)
        self._writer.start()
        self._guard(bound)

    def take(self, save: Save, find_state: Callable[[Save], BoundState]) -> None:
        """Copies this rank's part of the state, and leaves the rest to the background.

        Any error is the outcome of the save, here and on the other ranks, which wait for this one.

        Args:
            save: May have failed already.
            find_state: Describes the save's attempt and returns the state; called once an earlier
                save has ended.
        """
        try:
            waited = time.perf_counter()
            if self._current is not None:  # an earlier save ends within a bounded time
                self._current.wait_freed()
            save.handle.waited_seconds = time.perf_counter() - waited
            self._current = save.handle
            if save.error is None:
                self._stage(save, find_state(save))
        except UsageError as error:
            save.error = error
            save.handle.heard()
            raise
        except CkptkitError as error:
            save.error = error
        except Exception as error:  # a bug of ours must not end the training
            logger.exception("staging %s", save.attempt)
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

    def kill(self) -> None:
        self._writer.kill()

    def close(self) -> None:
        """Waits for the save under way, and ends the thread and the writer."""
        self._worker.close()
        self._writer.close()
        self._unguard()
        self._stager.close()
        self._buffer.close()

    def _stage(self, save: Save, bound: BoundState) -> None:
        holdings = bound.holdings(save.attempt.step)
        plan = self._plan_for(holdings.pieces)
        self._guard(bound)
        files = self._frozen.files_for(plan, holdings.pieces, self._stager, save.attempt)
        save.staged_bytes = plan.data_bytes - (0 if files.frozen else plan.frozen_bytes)
        save.copy_limit = self._copy_limit
        *earlier, last = files.waves
        for number, of_wave in enumerate(earlier):
            staged = self._stager.stage(plan, holdings.pieces, number, frozen=files.frozen)
            save.handle.staging(staged)
            # The next wave needs the buffer.
            samples = plan.replica_samples if number == 0 else ()
            write = partial(self._write, save, of_wave, staged, samples)
            self._worker.submit(write).result()
            if save.error is not None:
                return
        staged = self._stager.stage(plan, holdings.pieces, len(earlier), frozen=files.frozen)
        save.handle.staging(staged)
        record, inline = record_of(
            plan,
            holdings.objects,
            rank=self._peers.rank,
            world_size=self._peers.world_size,
            attempt=save.attempt.name,
            step=save.attempt.step,
        )
        record["dispensable"] = list(holdings.dispensable)
        record["values"] = list(holdings.values)
        samples = plan.replica_samples
        record["replicas"] = [
            [s.unit, s.path, s.offsets, (s.unit, s.path) in plan.of_rank_0] for s in samples
        ]
        small = (*inline, *holdings.files)
        save.handle.blocked_seconds = time.perf_counter() - save.began
        write = partial(self._write, save, last, staged, () if earlier else samples, small, record)
        self._worker.submit_unwatched(write)

    def _write(
        self,
        save: Save,
        files: WaveFiles,
        staged: Staged,
        samples: Sequence[ReplicaSample],
        inline: tuple[Inline, ...] = (),
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Has a wave written, in the thread; an error is stored in the save.

        Args:
            save: The save.
            files: Files of the buffer, and files to link.
            staged: The copies into the buffer, which may still be running on a device.
            samples: Of replicas, in this wave.
            inline: Small files, with the last wave.
            record: The rank's record, with the last wave.
        """
        try:
            staged.wait()
            if save.error is not None:
                return
            if record is not None and not save.answers and not files.links:
                plain = WaveFiles(files.images)
                save.rewrite = partial(self._write, save, plain, staged, samples, inline, record)
            size_bytes = sum(image.size_bytes for image in files.images)
            stage = Stage(f"writing step {save.attempt.step}, rank 0", size_bytes)
            answer = self._writer.request(
                Persist(
                    attempt=save.attempt.name,
                    folder=str(save.attempt.folder),
                    images=files.images,
                    inline=inline,
                    record=record,
                    record_path=f".ranks/{self._peers.rank}.json",
                    links=files.links,
                    keeps=files.keeps,
                    ranges=files.ranges,
                    replicas=[(sample.start, sample.stop) for sample in samples],
                ),
                stage if self._peers.rank == 0 else None,
            )
            assert isinstance(answer, Written)  # noqa: S101  the answer to `Persist`
            save.answers.append(answer)
            files.on_written(answer)
        except CkptkitError as error:
            save.error = error
        except Exception as error:
            logger.exception("saving %s", save.attempt)
            save.error = SaveError(f"{type(error).__name__}: {error}", hint=OURS)

    def _finish(self, save: Save) -> None:
        save.durable = time.perf_counter()
        self._backend.end(save)

    def _plan_for(self, pieces: Sequence[Piece]) -> SavePlan:
        owners, signature = self._signatures.of(pieces)
        restless, plan = self._frozen.restless, self._plan
        if plan is None or plan.signature != signature or self._restless != restless:
            limit = self._settings.staging_limit_bytes
            plan = plan_save(
                pieces, owners, rank=self._peers.rank, limit_bytes=limit, restless=restless
            )
            self._plan, self._restless = plan, restless
        return plan

    def _log_buffer_note(self) -> None:
        """Logs each new note about the buffer once."""
        if self._buffer.note != self._last_note:
            self._last_note = self._buffer.note
            logger.warning("rank %d: %s", self._peers.rank, self._last_note)

    def _guard(self, bound: BoundState) -> None:
        """Makes optimizers and loads of this state wait for copies that are under way."""
        models = tuple(model.module for model in bound.models)
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
    objects: Sequence[ObjectValue],
    *,
    rank: int,
    world_size: int,
    attempt: str,
    step: int,
) -> tuple[dict[str, Any], tuple[Inline, ...]]:
    """Returns the rank's record, without what its writer adds, and the files of its objects."""
    units: dict[str, Mapping[str, Any]] = dict(plan.record_units)
    files: list[Inline] = []
    by_unit: dict[str, list[ObjectValue]] = {}
    for value in objects:
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
    }
    return document, tuple(files)


def objects_file(
    objects: Sequence[ObjectValue], rank: int, file_number: int
) -> tuple[Inline, list[list[Any]]]:
    """Puts the objects of one DCP directory into a file of consecutive archives.

    Args:
        objects: At least one, all of one unit.
        rank: For the name of the file.
        file_number: Its index among the files that the rank writes into the directory.

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
