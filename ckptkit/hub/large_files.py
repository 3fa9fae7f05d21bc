"""Large files of a push: each read once for its hash, its digests and the upload together.

With `hf_xet` installed, what is read is both checked here and streamed to the store, which
returns the SHA-256 of what it received. Without it the Hub has to know the SHA-256 before it takes
a byte, so that a file is read here for its hash and digests, and by the client for sending.
"""

from __future__ import annotations

import hashlib
import posixpath
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptkit.core.checksums import Digest, digest_like, leaf_ranges
from ckptkit.core.errors import (
    HubError,
    RefusedError,
    VerificationError,
)
from ckptkit.core.manifest import LEAF_BYTES, Manifest
from ckptkit.core.text import size_text
from ckptkit.engine.outcome import BytesWritten, Listener, Waiting
from ckptkit.formats.safetensors.reader import HeaderTensor, read_header
from ckptkit.hub.client import Hub, forgo_xet, uses_xet
from ckptkit.hub.secrets import SecretSearch, refuse_secrets
from ckptkit.storage.base import Source

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    Additions = dict[str, CommitOperationAdd]

Sink = Callable[[bytes], None]
_HINT = "run `ckptkit verify` on the folder; write it again with `ckptkit consolidate`"


@dataclass(frozen=True, slots=True)
class DigestRange:
    """A range of a file with a digest in the manifest: a tensor, or the whole file."""

    what: str
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file that is streamed, and never held in memory as a whole.

    Attributes:
        path: Relative to its folder.
        size_bytes: Its size.
        parts: The ranges that are checked while it is read, in the order of their bytes.
        words: The metadata of its header.
    """

    path: str
    size_bytes: int
    parts: tuple[DigestRange, ...]
    words: bytes = b""


def large_file(
    source: Source, path: str, manifest: Manifest | None, *, check: bool = True
) -> LargeFile:
    """Reads the header of a file."""
    file = source.stat(path)
    parts: list[DigestRange] = []
    words = ""
    if path.endswith(".safetensors"):
        header = read_header(source, file)
        words = "\n".join(f"{key}={text}" for key, text in header.metadata.items())
        if manifest is not None and check:
            parts = _match_tensors(
                header.tensors, path, manifest, posixpath.join(source.location, path)
            )
    elif manifest is not None and path in manifest.files and manifest.files[path].digest:
        parts = [DigestRange(path, 0, file.size_bytes, manifest.files[path].digest)]
    return LargeFile(path, file.size_bytes, tuple(parts), words.encode(errors="replace"))


def _match_tensors(
    tensors: Iterable[HeaderTensor], path: str, manifest: Manifest, where: str
) -> list[DigestRange]:
    """Returns the ranges of the tensors of a file, which are those that the manifest has."""
    expected = {name: t for name, t in manifest.tensors.items() if t.file == path}
    parts = []
    for tensor in tensors:
        record = expected.pop(tensor.name, None)
        dtype, shape = tensor.dtype.name, tuple(tensor.shape)
        if record is None or (record.dtype, tuple(record.shape)) != (dtype, shape):
            raise VerificationError(
                f"tensor {tensor.name!r} is {dtype} {list(shape)}, unlike in the manifest",
                where=where,
                hint=_HINT,
            )
        what = f"tensor {tensor.name!r}"
        parts.append(DigestRange(what, tensor.start, tensor.stop, record.digest))
    if expected:
        raise VerificationError(
            f"tensor {min(expected)!r} of the manifest is not in it", where=where, hint=_HINT
        )
    return parts


class CheckedReader:
    """Reads a file once, checks its digests and searches it for secrets."""

    def __init__(
        self, source: Source, file: LargeFile, listener: Listener, secrets: Sequence[str] = ()
    ) -> None:
        self._source = source
        self._file = file
        self._listener = listener
        self._search = SecretSearch(secrets)
        self._digests: Mapping[int, Digest] = {
            number: digest_like(part.digest) for number, part in enumerate(file.parts)
        }

    def read_into(self, sink: Sink) -> None:
        """Passes every byte to the sink, in blocks of 8 to 16 MiB, and checks the digests."""
        for block in self._blocks():
            start, stop = block[0][0], block[-1][1]
            data = self._source.read(self._file.path, start, stop)
            self._search.add(data)
            where = self._source.location
            refuse_secrets([f"{kind} in {self._file.path}" for kind in self._search.kinds], where)
            sink(data)
            view = memoryview(data)
            for piece_start, piece_stop, number, leaf in block:
                if number is not None:
                    self._digests[number].add(leaf, view[piece_start - start : piece_stop - start])
            self._listener(BytesWritten(stop - start, self._file.path))
        for number, part in enumerate(self._file.parts):
            if self._digests[number].value(part.stop - part.start) != part.digest:
                raise VerificationError(
                    f"{part.what} has another digest than the manifest",
                    where=posixpath.join(self._source.location, self._file.path),
                    hint=_HINT,
                )

    def _blocks(self) -> Iterator[list[tuple[int, int, int | None, int]]]:
        """Yields `(start, stop, part, leaf)` of all bytes in order; no part for those between."""
        ranges: list[tuple[int, int, int | None]] = []
        at = 0
        for number, part in enumerate(self._file.parts):
            ranges += [(at, part.start, None), (part.start, part.stop, number)]
            at = part.stop
        ranges.append((at, self._file.size_bytes, None))
        block: list[tuple[int, int, int | None, int]] = []
        for start, stop, of_part in ranges:
            for leaf, (first, last) in enumerate(leaf_ranges(stop - start)):
                block.append((start + first, start + last, of_part, leaf))
                if start + last - block[0][0] >= LEAF_BYTES:
                    yield block
                    block = []
        if block:
            yield block


_AT_ONCE = 4
_SAMPLE_BYTES = 512
_WRITE_BYTES = 1 << 20  # the store's client queues a number of writes, whatever their size
_LARGE: dict[str, Any] = {"_upload_mode": "lfs", "_should_ignore": False}
"""Attributes of the client's operations that mark a large file, whatever its size."""
_SENT: dict[str, Any] = {"_is_uploaded": True}
"""Attributes that mark a file whose content the store has already."""


class LargeFileUploader:
    """Uploads files of one folder to the store of one repository."""

    def __init__(
        self,
        hub: Hub,
        folder: Source,
        *,
        revision: str,
        create_pr: bool,
        listener: Listener,
        secrets: Sequence[str],
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._revision = revision
        self._create_pr = create_pr
        self._listener = listener
        self._secrets = secrets
        self._stopped = threading.Event()
        target = "None?create_pr=1" if create_pr else quote(revision, safe="")
        self._token_url = f"{hub.api.endpoint}/api/models/{hub.repo_id}/xet-write-token/{target}"

    def hash_files(self, files: Sequence[LargeFile]) -> dict[str, str]:
        """Reads files without uploading them.

        Returns:
            The SHA-256 of each, by path.
        """

        def hash_file(file: LargeFile) -> str:
            digest = hashlib.sha256()
            self._reader(file).read_into(digest.update)
            return digest.hexdigest()

        return self._run_all(files, hash_file)

    def upload(self, files: Sequence[LargeFile]) -> Additions:
        """Uploads files whose content the Hub may lack.

        Returns:
            The operation to commit for each, by path.
        """
        if not files:
            return {}
        if self._takes_streams():
            hashes = self._stream(files)
            return {
                file.path: add_large(self._folder, file, hashes[file.path], is_sent=True)
                for file in files
            }
        hashes = self.hash_files(files)
        additions = {file.path: add_large(self._folder, file, hashes[file.path]) for file in files}
        size = size_text(sum(file.size_bytes for file in files))
        self._listener(Waiting(f"the Hub has taken {size}"))
        self._hub.call(
            self._hub.api.preupload_lfs_files,
            self._hub.repo_id,
            additions=list(additions.values()),
            revision=self._revision,
            create_pr=self._create_pr,
            free_memory=False,
        )
        return additions

    def _reader(self, file: LargeFile) -> CheckedReader:
        return CheckedReader(self._folder, file, self._listener, self._secrets)

    def _takes_streams(self) -> bool:
        """Returns whether the store of this repository accepts streams from this machine."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        if not uses_xet():
            return False
        try:
            from hf_xet import XetSession, XetUploadCommit
        except ImportError:
            return False
        has_commits = hasattr(XetSession, "new_upload_commit")
        if not (has_commits and hasattr(XetUploadCommit, "start_upload_stream")):
            return False

        def ask() -> int:
            response = get_session().get(self._token_url, headers=self._hub.headers())
            if response.status_code != 404:  # noqa: PLR2004  there is no such store
                hf_raise_for_status(response)
            return int(response.status_code)

        offered = self._hub.call(ask) == 200  # noqa: PLR2004  HTTP
        if not offered:  # mirrors have no such store, which the client does not check
            forgo_xet()
        return offered

    def _stream(self, files: Sequence[LargeFile]) -> dict[str, str]:
        from hf_xet import XetSession

        headers = self._hub.headers()
        rest = {key: text for key, text in headers.items() if key.lower() != "authorization"}
        with (
            self._translate_errors(),
            XetSession().new_upload_commit(
                token_refresh_url=self._token_url,
                token_refresh_headers=headers,
                custom_headers=rest,
            ) as commit,
        ):
            return self._run_all(files, lambda file: self._stream_file(commit, file))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translates what the store's client raises: built-in errors of Python."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise HubError(
                f"the store of large files failed ({type(error).__name__})",
                where=self._hub.repo_id,
                hint="run it again; uploaded files are not sent again",
            ) from error

    def _stream_file(self, commit: Any, file: LargeFile) -> str:
        with self._translate_errors():
            stream = commit.start_upload_stream(name=file.path)

        def write(data: bytes) -> None:
            if self._stopped.is_set():
                raise RefusedError("the upload was stopped because of an error with another file")
            with self._translate_errors():
                for start in range(0, len(data), _WRITE_BYTES):
                    stream.write(data[start : start + _WRITE_BYTES])

        try:
            self._reader(file).read_into(write)
        except BaseException:
            stream.abort()
            raise
        with self._translate_errors():
            return str(stream.finish().xet_info.sha256)

    def _run_all(
        self, files: Sequence[LargeFile], do: Callable[[LargeFile], str]
    ) -> dict[str, str]:
        """Calls a function that returns a hash for all files, a few at once; stops at an error."""
        paths = [file.path for file in files]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="push") as pool:
            futures = [pool.submit(do, file) for file in files]
            try:
                return dict(zip(paths, [future.result() for future in futures], strict=True))
            except BaseException:
                self._stopped.set()
                for future in futures:
                    future.cancel()
                raise


def add_large(
    folder: Source, file: LargeFile, sha256: str, *, is_sent: bool = False
) -> CommitOperationAdd:
    """Returns the client's operation for a file, which the client then does not hash.

    Args:
        folder: Where the file is.
        file: The file.
        sha256: Its hash.
        is_sent: Whether the Hub's store has its content, though no commit has it yet.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    operation = CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=b"")
    operation.path_or_fileobj = str(Path(folder.location, file.path).resolve())
    sample = folder.read(file.path, 0, min(_SAMPLE_BYTES, file.size_bytes))
    operation.upload_info = UploadInfo(
        size=file.size_bytes, sample=sample, sha256=bytes.fromhex(sha256)
    )
    for name, value in (_LARGE | _SENT if is_sent else _LARGE).items():
        setattr(operation, name, value)
    return operation
