"""The trainer's end of the process that uploads: it is asked as a writer is, and told where to."""

from __future__ import annotations

from pathlib import PurePosixPath

from ckptkit.storage.names import WORK_INFIX
from ckptkit.training.writer_process import Patience, WriterProcess
from ckptkit.writer.messages import Commit, Committed, Discard, Request, Written
from ckptkit.writer.tier_messages import Drain
from ckptkit.writer.upload_messages import Finish, Remote, Upload


class UploadProcess(WriterProcess):
    """Takes the requests of a process that drains or commits, and has them done at a URL."""

    def __init__(
        self, patience: Patience, name: str, remote: Remote, session: tuple[str, str]
    ) -> None:
        """Starts nothing yet.

        Args:
            patience: How long to wait, and what to start.
            name: What it is called in messages.
            remote: The run.
            session: The job's nonce, and a local directory for what is being put together.
        """
        super().__init__(patience, name=name)
        self._remote = remote
        self._job, self._scratch = session
        self._failed: dict[str, str] = {}  # steps by attempt; empty for one that is seen to

    def request(self, request: Request) -> Written | Committed:
        """Has a request done, starting a process where none runs.

        What a failed attempt left at the URL stays until another step is whole, or the run is
        opened again: other ranks may be uploading that very step anew.

        Returns:
            The answer.

        Raises:
            CkptkitError: What went wrong.
        """
        if isinstance(request, Discard):
            self._failed.setdefault(request.attempt, _step_of(request.folder))
            return Written(request.attempt, 0, 0.0, 0.0)
        answer = super().request(self._translated(request))
        if isinstance(request, Commit):
            self._failed = dict.fromkeys(self._failed, "")
        return answer

    def _translated(self, request: Request) -> Request:
        if isinstance(request, Drain):
            return Upload(
                attempt=request.attempt,
                remote=self._remote,
                step=_name(request.folder),
                folder=request.folder,
                records=request.records,
                further=request.further,
                earlier=_name(request.earlier),
            )
        if isinstance(request, Commit):
            return Finish(
                attempt=request.attempt,
                remote=self._remote,
                step=_name(request.final),
                job=self._job,
                proofs=request.proofs,
                manifest=request.manifest,
                beside=request.beside,
                remove=tuple(map(_name, request.remove)),
                given_up=tuple({*self._failed.values()} - {"", _name(request.final)}),
                scratch=self._scratch,
                visible_seconds=request.visible_seconds,
            )
        return request


def _step_of(folder: str) -> str:
    """Returns the step that a working folder was to become."""
    return _name(folder).removeprefix(".").partition(WORK_INFIX)[0]


def _name(place: str) -> str:
    return PurePosixPath(place).name
