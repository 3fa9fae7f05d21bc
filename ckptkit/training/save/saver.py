"""A save after the training thread is done with it: written, agreed on, committed, reported."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from ckptkit.core.errors import CkptkitError, SaveError
from ckptkit.training.handle import SaveHandle
from ckptkit.training.save.commit import Attempt
from ckptkit.training.save.frozen import WaveFiles
from ckptkit.training.save.staging import Staged
from ckptkit.training.save.writer_process import WriterProcess
from ckptkit.writer.messages import Inline, Persist, Written

logger = logging.getLogger(__name__)
OURS = "this is a fault of ckptkit; please report it with the log's traceback"


@dataclass(frozen=True, slots=True)
class Wave:
    """What one message to the writer asks for.

    Attributes:
        files: What comes from the buffer, or is there already.
        staged: The copies into the buffer, which may still be running on a device.
        inline: Small files, with the last wave.
        record: The rank's record, with the last wave.
    """

    files: WaveFiles
    staged: Staged
    inline: tuple[Inline, ...] = ()
    record: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Save:
    """A save under way on this rank.

    Attributes:
        attempt: What is being tried.
        handle: What the caller holds.
        began: `time.perf_counter` at the call of `save`.
        after: The save before, which ends first: of two saves of a step the later one stays.
        staged_bytes: Tensor bytes that this rank copies.
        copy_limit: Bytes per second of a plain warm copy; 0 where unknown.
        durable: `time.perf_counter` when this rank's files were durable.
        local_seconds: From the call until the step was durable on the nodes' own disks.
        answers: Of the writer, one per wave.
        error: What went wrong on this rank.
        rewrite: Writes this rank's files once more, into the attempt's folder; None where the
            buffer does not hold all of them any more.
    """

    attempt: Attempt
    handle: SaveHandle
    began: float
    after: SaveHandle | None = None
    staged_bytes: int = 0
    copy_limit: float = 0.0
    durable: float = 0.0
    local_seconds: float = 0.0
    answers: list[Written] = field(default_factory=list)
    error: CkptkitError | None = None
    rewrite: Callable[[], None] | None = None

    def staged(self) -> None:
        self.handle.blocked_seconds = time.perf_counter() - self.began


class Ending(Protocol):
    """What becomes of a save once this rank's part is written."""

    def placed(self, attempt: Attempt) -> Attempt:
        """Returns an attempt with the folder that this rank writes into."""
        ...

    def recover(self) -> None:
        """Makes what is durable, but not at the shared place yet, a step there."""
        ...

    def end(self, save: Save) -> None:
        """Ends a save, or hands it on to what will; called in the thread that writes."""
        ...

    def kill(self) -> None:
        """Has what it was handed fail soon."""
        ...

    def close(self) -> None:
        """Waits for what it was handed."""
        ...


class Saver:
    """A thread that brings the saves of one buffer to their end, one after another.

    The listener is called in it: the next save of the buffer is not written before that returns.

    Every save ends within a bounded time: the writer is killed when it hangs, and other ranks
    are waited for as long as `timeout_seconds`.
    """

    def __init__(
        self,
        writer: WriterProcess,
        ending: Ending,
        *,
        rank: int,
    ) -> None:
        """Starts the thread; the writer is started with the first save, or by `prepare`.

        Args:
            writer: Writes this rank's files.
            ending: Ends what is written.
            rank: Of this process.
        """
        self._writer = writer
        self._ending = ending
        self._rank = rank
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ckptkit-saver", daemon=True)
        self._thread.start()

    def write(self, save: Save, wave: Wave) -> Future[None]:
        """Has a wave written; the future ends when the buffer may be used again.

        What goes wrong is kept for the end of the save.
        """
        written: Future[None] = Future()

        def work() -> None:
            try:
                self._write(save, wave)
            finally:
                written.set_result(None)

        self._work.put(work)
        return written

    def finish(self, save: Save) -> None:
        """Has the save agreed on, committed and reported, after all its waves."""
        self._work.put(lambda: self._finish(save))

    def kill(self) -> None:
        self._writer.kill()

    def close(self) -> None:
        """Ends the thread after what it was given, and the writer."""
        self._work.put(None)
        self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _write(self, save: Save, wave: Wave) -> None:
        try:
            wave.staged.wait()
            if save.error is not None:
                return
            if wave.record is not None and not save.answers and not wave.files.links:
                plain = replace(wave, files=WaveFiles(wave.files.images))
                save.rewrite = partial(self._write, save, plain)
            answer = self._writer.request(self._request(save, wave))
            assert isinstance(answer, Written)  # noqa: S101  the answer to `Persist`
            save.answers.append(answer)
            wave.files.heard(answer)
        except CkptkitError as error:
            save.error = error
        except Exception as error:
            logger.exception("saving step %d", save.attempt.step)
            save.error = SaveError(f"{type(error).__name__}: {error}", hint=OURS)

    def _request(self, save: Save, wave: Wave) -> Persist:
        return Persist(
            attempt=save.attempt.name,
            folder=str(save.attempt.folder),
            images=wave.files.images,
            inline=wave.inline,
            record=wave.record,
            record_path=f".ranks/{self._rank}.json",
            links=wave.files.links,
            keeps=wave.files.keeps,
            ranges=wave.files.ranges,
        )

    def _finish(self, save: Save) -> None:
        save.durable = time.perf_counter()
        self._ending.end(save)
