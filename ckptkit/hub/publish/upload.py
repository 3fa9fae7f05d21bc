"""Sending large files, each read once for its hash, its digests and the network together.

With `hf_xet` at hand, what is read is both checked here and streamed to the store, which tells
the SHA-256 of what it was given. Without it the Hub wants to know the SHA-256 before it takes a
byte, so that a file is read here for its hash and digests, and by the client for sending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptkit.core.errors import HubError, RefusedError
from ckptkit.engine.outcome import Listener
from ckptkit.hub.client import Hub, forgo_xet, uses_xet
from ckptkit.hub.publish.source import LargeFile, OneReading
from ckptkit.storage.base import Folder

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


_AT_ONCE = 4
_SAMPLE_BYTES = 512
_WRITE_BYTES = 1 << 20  # the store's client queues a number of writes, whatever their size
_LARGE: Mapping[str, Any] = {"_upload_mode": "lfs", "_should_ignore": False}
"""How an operation of the client says that it belongs with the large files, whatever its size."""
_SENT: Mapping[str, Any] = {"_is_uploaded": True}
"""How it says that its content lies in the store already."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A large file whose content the Hub's store has; no commit names it yet."""

    path: str
    sha256: str
    size_bytes: int
    operation: CommitOperationAdd


class Sender:
    """Sends files of one folder to the store of one repository."""

    def __init__(
        self,
        hub: Hub,
        folder: Folder,
        *,
        revision: str,
        create_pr: bool,
        listener: Listener,
        secrets: Sequence[str] = (),
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._revision = revision
        self._create_pr = create_pr
        self._listener = listener
        self._secrets = secrets
        self._stopped = threading.Event()

    def hashed(self, files: Sequence[LargeFile]) -> dict[str, str]:
        """Reads files without sending them.

        Returns:
            The SHA-256 of each, by path.
        """
        found = self._all(files, lambda file: self._reading(file).sha256())
        return dict(zip([file.path for file in files], found, strict=True))

    def send(self, files: Sequence[LargeFile]) -> list[Sent]:
        """Sends files whose content the Hub may lack.

        Returns:
            What to commit for each.
        """
        if not files:
            return []
        return self._streamed(files) if self._takes_streams() else self._sent_by_client(files)

    def _reading(self, file: LargeFile) -> OneReading:
        return OneReading(self._folder, file, self._listener, self._secrets)

    def _takes_streams(self) -> bool:
        """Tells whether the store of this repository takes streams from this machine."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        if not uses_xet():
            return False
        try:
            from hf_xet import XetSession, XetUploadCommit
        except ImportError:
            return False
        if not (hasattr(XetSession, "new_upload_commit") and _has_streams(XetUploadCommit)):
            return False

        def ask() -> int:
            response = get_session().get(self._token_url(), headers=self._hub.headers())
            if response.status_code != 404:  # noqa: PLR2004  there is no such store
                hf_raise_for_status(response)
            return int(response.status_code)

        offered = self._hub.call(ask) == 200  # noqa: PLR2004  HTTP
        if not offered:  # mirrors have no such store, and the client does not ask
            forgo_xet()
        return offered

    def _token_url(self) -> str:
        revision = "None?create_pr=1" if self._create_pr else quote(self._revision, safe="")
        return f"{self._hub.api.endpoint}/api/models/{self._hub.repo_id}/xet-write-token/{revision}"

    def _streamed(self, files: Sequence[LargeFile]) -> list[Sent]:
        with self._xet_commit() as commit:
            found = self._all(files, lambda file: self._streamed_file(commit, file))
        return [self._sent(file, sha256) for file, sha256 in zip(files, found, strict=True)]

    @contextmanager
    def _xet_commit(self) -> Iterator[Any]:
        from hf_xet import XetSession

        headers = self._hub.headers()
        rest = {key: text for key, text in headers.items() if key.lower() != "authorization"}
        with (
            self._told(),
            XetSession().new_upload_commit(
                token_refresh_url=self._token_url(),
                token_refresh_headers=headers,
                custom_headers=rest,
            ) as commit,
        ):
            yield commit

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tells of what the store's client raises: errors of the operating system's kinds."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise HubError(
                f"the store of large files failed ({type(error).__name__})",
                where=self._hub.repo_id,
                hint="run it again; what was uploaded is not sent again",
            ) from error

    def _streamed_file(self, commit: Any, file: LargeFile) -> str:
        with self._told():
            stream = commit.start_upload_stream(name=file.path)
        try:
            self._reading(file).to(self._unless_stopped(stream.write))
        except BaseException:
            stream.abort()
            raise
        with self._told():
            return str(stream.finish().xet_info.sha256)

    def _unless_stopped(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def sink(data: bytes) -> None:
            if self._stopped.is_set():
                raise RefusedError("the upload was stopped, because of an error elsewhere")
            with self._told():
                for start in range(0, len(data), _WRITE_BYTES):
                    write(data[start : start + _WRITE_BYTES])

        return sink

    def _sent_by_client(self, files: Sequence[LargeFile]) -> list[Sent]:
        hashes = self.hashed(files)
        sent = [self._sent(file, hashes[file.path], uploaded=False) for file in files]
        self._hub.call(
            self._hub.api.preupload_lfs_files,
            self._hub.repo_id,
            additions=[one.operation for one in sent],
            revision=self._revision,
            create_pr=self._create_pr,
            free_memory=False,
        )
        return sent

    def _sent(self, file: LargeFile, sha256: str, *, uploaded: bool = True) -> Sent:
        operation = add_large(self._folder, file, sha256)
        for name, value in _SENT.items() if uploaded else ():
            setattr(operation, name, value)
        return Sent(file.path, sha256, file.size_bytes, operation)

    def _all(self, files: Sequence[LargeFile], do: Callable[[LargeFile], str]) -> list[str]:
        """Does something to all files, a few at once, and nothing more after an error."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="push") as pool:
            futures = [pool.submit(do, file) for file in files]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stopped.set()
                for future in futures:
                    future.cancel()
                raise


def _has_streams(kind: object) -> bool:
    return hasattr(kind, "start_upload_stream")


def add_large(folder: Folder, file: LargeFile, sha256: str) -> CommitOperationAdd:
    """Returns the client's operation for a file whose hash is known, which it then does not read.

    Args:
        folder: Where the file lies.
        file: The file.
        sha256: Its hash.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    operation = CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=b"")
    operation.path_or_fileobj = str(Path(folder.location, file.path).resolve())
    sample = folder.read(file.path, 0, min(_SAMPLE_BYTES, file.size_bytes))
    operation.upload_info = UploadInfo(
        size=file.size_bytes, sample=sample, sha256=bytes.fromhex(sha256)
    )
    for name, value in _LARGE.items():
        setattr(operation, name, value)
    return operation
