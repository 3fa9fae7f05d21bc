"""Saves to URLs that belong to no run: staged on this node's disk, and uploaded from there.

A save goes through these states, between those of `ckptkit.training.save.saver`:

    place      a folder of this rank below TMPDIR; it is locked, and removed at the end of the
               program, or after a kill by the next one that needs such a folder
    persist    the writer makes this rank's files durable there
    upload     a process sends them, and the record last
    settle     all ranks agree; rank 0 puts the index, and last the manifest
"""

from __future__ import annotations

import posixpath
import shutil
import tempfile
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ckptkit.core.errors import NoSpaceError
from ckptkit.storage.local.disk import LOCAL_DISK
from ckptkit.storage.local.workdir import WorkFolder, claim_work_folder, sweep_work_folders
from ckptkit.storage.places import Place
from ckptkit.training.agree.barrier import SaveBarrier
from ckptkit.training.save.saver import Save, SaveCommitter
from ckptkit.training.save.writer_process import NICENESS, WriterTimeouts
from ckptkit.training.tiers.url_run import UploadProcess
from ckptkit.writer.messages import Remote
from ckptkit.writer.process import as_failure
from ckptkit.writer.upload.uploader import upload_command

_STAGED = "saves"
_NO_RUN = ("", "")  # no job that has opened it, no directory of its own


class UrlCommitter(SaveCommitter):
    """Commits saves at URLs, whose files it uploads. One save is under way at a time."""

    def __init__(
        self, barrier: SaveBarrier, timeouts: WriterTimeouts, *, timeout_seconds: float
    ) -> None:
        """Starts nothing yet, and makes no folder."""
        timeouts = replace(timeouts, command=partial(upload_command, niceness=NICENESS))
        name = f"uploader of rank {barrier.rank}"
        self._uploads = UploadProcess(timeouts, name, Remote(""), _NO_RUN)
        super().__init__(
            barrier,
            self._uploads if barrier.rank == 0 else None,
            retire=lambda *_: (),
            timeout_seconds=timeout_seconds,
            listener=None,
        )
        self._work: WorkFolder | None = None

    def place(self, save: Save) -> None:
        parent = Path(tempfile.gettempdir()).absolute()
        try:
            if self._work is not None and not self._work.is_held:
                self._work.remove()
                self._work = None
            if self._work is None:
                parent.mkdir(parents=True, exist_ok=True)  # it may have been removed since
                sweep_work_folders(parent, parent / _STAGED, LOCAL_DISK)
                self._work = claim_work_folder(parent, _STAGED, LOCAL_DISK)
        except OSError as error:
            raise as_failure(error, str(parent)) from error
        save.folder = self._work.files / save.step_name

    def end(self, save: Save) -> None:
        if save.after is not None:
            save.after.wait()
        url = save.final
        assert isinstance(url, Place)  # noqa: S101  it is what this class is for
        self._uploads.turn_to(Remote(posixpath.dirname(url), url.options))
        if isinstance(save.error, NoSpaceError):
            save.error = save.error.hinted(
                "a step is staged on the node's disk: set TMPDIR to a folder with room for it"
            )
        if save.error is None:
            self.copy_files(save, self._uploads, save.folder, "uploading")
        shutil.rmtree(save.folder, ignore_errors=True)  # a failed step is not uploaded again
        self.settle(save)

    def kill(self) -> None:
        self._uploads.kill()

    def close(self) -> None:
        self._uploads.close()
        if self._work is not None:
            self._work.remove()
            self._work = None
