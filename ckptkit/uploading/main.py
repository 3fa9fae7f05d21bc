"""The program of the process that uploads: like the writer's, but it may speak to a store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckptkit.core.errors import SaveError
from ckptkit.storage.syscalls import Capabilities, detect_capabilities
from ckptkit.uploading.failures import as_failure as as_failure_of_store
from ckptkit.uploading.finishing import finish
from ckptkit.uploading.store import Store
from ckptkit.uploading.uploader import Uploader
from ckptkit.writer.failures import as_failure
from ckptkit.writer.main import run
from ckptkit.writer.messages import Answer, Buffer, Channel, Failed, Message
from ckptkit.writer.upload_messages import Finish, Remote, Upload
from ckptkit.writer.watching import Tally


def main() -> None:
    """Serves the socket whose number is the first argument; the second is the niceness."""
    run(UploadDesk(detect_capabilities()))
    os._exit(0)  # threads of the store's client would be waited for


@dataclass(slots=True)
class UploadDesk:
    """Does requests, and answers every failure.

    Attributes:
        capabilities: What the platform offers.
    """

    capabilities: Capabilities
    _uploader: Uploader | None = None
    _known: Remote | None = None
    _store: Store | None = field(default=None, repr=False)

    def attach(self, message: Buffer, channel: Channel) -> None:  # noqa: ARG002
        """Refuses a buffer, of which this process has no use."""
        os.close(channel.take_descriptor())

    def do(self, message: Message, tally: Tally) -> Answer:
        """Does a request.

        Returns:
            Its answer, `Failed` where it could not be done.
        """
        attempt = str(getattr(message, "attempt", ""))
        try:
            return self._done(message, tally)
        except OSError as error:  # of the local disk: the store's are errors of ours
            where = str(getattr(message, "folder", ""))
            return Failed(attempt, as_failure(error, where).to_json())
        except Exception as error:  # noqa: BLE001  whatever it is, the trainer has to know
            remote = getattr(message, "remote", None) or Remote("")
            return Failed(attempt, as_failure_of_store(error, remote.url, remote.options).to_json())

    def _done(self, message: Message, tally: Tally) -> Answer:
        if isinstance(message, Upload):
            if self._uploader is None:
                self._uploader = Uploader(self.capabilities)
            return self._uploader.upload(message, self._store_of(message.remote), tally)
        if isinstance(message, Finish):
            return finish(message, self._store_of(message.remote), tally)
        raise SaveError(
            f"a {type(message).__name__} was received where an upload was expected",
            hint="trainer and uploader are of different versions; start the job again",
        )

    def _store_of(self, remote: Remote) -> Store:
        if self._store is None or (remote.url, remote.options) != (
            self._known and self._known.url,
            self._known and self._known.options,
        ):
            self._known, self._store = remote, Store(remote)
        return self._store
