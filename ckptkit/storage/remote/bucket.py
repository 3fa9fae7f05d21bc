"""Buckets of the Hub, by the calls of `huggingface_hub`: what stores use of fsspec, and no more.

`HfFileSystem` opens such URLs too. But it keeps listings, which another process makes stale; it
asks for a whole folder to look up a file, and has no transaction. Nothing is kept here, and copies
and removals of many files are one request.

A bucket has no conditional writes and no renames. It copies files within itself without moving
bytes: so files are sent to hidden names as soon as they are whole, and one request makes them
visible.

Source: huggingface_hub/hf_api.py and _buckets.py, 1.33 to 2.4.
"""

from __future__ import annotations

import errno
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptkit.core.errors import AccessError, NoSpaceError, RefusedError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_URL = re.compile(r"hf://buckets/([^/@]+/[^/@]+)(?:/(.+))?", re.IGNORECASE | re.DOTALL)
_NO_NAMES = frozenset({"", ".", ".."})
_NEEDED = "1.33"  # earlier ones say nothing of files that the Hub did not write or copy
_REFUSED = re.compile(r"HTTP status client error \((\d{3}) ")  # in the text of an error of hf_xet
_DENIED = frozenset({"401", "403"})


class BucketFileSystem:
    """The files of buckets; paths are `ORG/NAME/path/in/bucket`."""

    def __init__(self, *, endpoint: str | None = None, token: str | bool | None = None) -> None:
        """Sends nothing yet."""
        from huggingface_hub import HfApi, __version__, constants, errors

        if not hasattr(errors, "BucketBatchError"):
            raise RefusedError(
                f"huggingface_hub {__version__} was found, and buckets need {_NEEDED} or later",
                where="hf://buckets/",
                hint=f"run `pip install 'huggingface_hub>={_NEEDED}'`",
            )
        self._api: HfApi = HfApi(endpoint=endpoint, token=token, library_name="ckptkit")
        self._timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self.transaction = SimpleNamespace(files=[])  # a closed file is visible: none waits for it

    def start_transaction(self) -> None:
        """Does nothing: who writes several files closes them under other names, and copies."""

    def invalidate_cache(self) -> None:
        """Does nothing: there is no cache."""

    @staticmethod
    def _strip_protocol(location: str) -> str:
        match = _URL.fullmatch(location)
        if match is None or not _NO_NAMES.isdisjoint((match[2] or "-").split("/")):
            raise UsageError(
                "names no place in a bucket of the Hub",
                where=location,
                hint="write it as hf://buckets/ORG/NAME/FOLDER; buckets have no revisions",
            )
        return "/".join(filter(None, match.groups()))

    def find(self, path: str, *, detail: bool = True) -> dict[str, Mapping[str, Any]]:  # noqa: ARG002  fsspec's
        return {info["name"]: info for info in self._list(path, recursive=True)}

    def ls(self, path: str, *, detail: bool = True) -> list[Mapping[str, Any]]:  # noqa: ARG002  fsspec's
        return list(self._list(path, recursive=False))

    def _list(self, path: str, *, recursive: bool) -> Iterator[Mapping[str, Any]]:
        from huggingface_hub.errors import EntryNotFoundError

        bucket, prefix = _split(path)
        try:
            for entry in self._api.list_bucket_tree(bucket, prefix or None, recursive=recursive):
                # The Hub lists what only begins alike, too.
                if not prefix or entry.path.startswith(f"{prefix}/"):
                    yield _describe(bucket, entry)
        except EntryNotFoundError:
            return

    def info(self, path: str) -> Mapping[str, Any]:
        bucket, inner = _split(path)
        found = list(self._api.get_bucket_paths_info(bucket, [inner])) if inner else []
        if not found:
            raise FileNotFoundError(path)
        return _describe(bucket, found[0])

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Returns a file, or a range of it, by one request."""
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        bucket, inner = _split(path)
        headers = build_hf_headers(token=self._api.token, library_name="ckptkit")
        if start is not None and end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
        url = f"{self._api.endpoint}/buckets/{bucket}/resolve/{quote(inner)}"
        answer = http_backoff("GET", url, headers=headers, timeout=self._timeout)
        try:
            hf_raise_for_status(answer)
        except EntryNotFoundError:
            raise FileNotFoundError(path) from None
        data: bytes = answer.content
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise NotImplementedError("buckets have no conditional writes")
        self._batch(path, add=[(value, _split(path)[1])])

    def put_file(self, local: str | Path, path: str) -> None:
        """Sends a file of this machine, which becomes visible as a whole."""
        self._batch(path, add=[(str(local), _split(path)[1])])

    def open(self, path: str, _mode: str, *, block_size: int) -> _SentFile:  # noqa: ARG002  fsspec's
        return _SentFile(lambda local: self.put_file(local, path))

    def cp_file(self, source: str, target: str) -> None:
        self.copy_files({source: target})

    def copy_files(self, targets: Mapping[str, str]) -> None:
        """Has the Hub copy files within a bucket, all in one request up to a thousand."""
        bucket = _split(next(iter(targets)))[0]
        names = {_split(source)[1]: _split(target)[1] for source, target in targets.items()}
        hashes = {f.path: f.xet_hash for f in self._api.get_bucket_paths_info(bucket, list(names))}
        missing = next((name for name in names if name not in hashes), None)
        if missing is not None:
            raise FileNotFoundError(f"{bucket}/{missing}")
        copies = [("bucket", bucket, hashes[name], target) for name, target in names.items()]
        self._batch(bucket, copy=copies)

    def rm_file(self, path: str) -> None:
        self.remove_files([path])

    def remove_files(self, paths: Sequence[str]) -> None:
        """Removes files of one bucket; missing ones are no error."""
        from huggingface_hub.errors import BucketBatchError

        bucket, names = _split(paths[0])[0], [_split(path)[1] for path in paths]
        try:
            self._batch(bucket, delete=names)
        except BucketBatchError:
            if list(self._api.get_bucket_paths_info(bucket, names)):
                raise

    def _batch(self, path: str, **operations: Any) -> None:
        bucket = _split(path)[0]
        try:
            with _without_bars():
                self._api.batch_bucket_files(bucket, **operations)
        except ConnectionError as error:  # of hf_xet, which has tried again for minutes
            refused = _REFUSED.search(str(error))
            if refused is None:
                raise OSError(errno.EIO, f"the upload was broken off: {error}") from None
            self._api.bucket_info(bucket)  # says so if there is none
            if refused[1] in _DENIED:
                raise AccessError(
                    f"the Hub answered {refused[1]}, where permission to write was needed",
                    where=f"hf://buckets/{bucket}",
                    hint="log in with `hf auth login`, or set HF_TOKEN to a token that may write",
                ) from None
            raise OSError(errno.EIO, str(error)) from None


class _SentFile:
    """A file that is kept on this machine until it is whole, and sent when it is closed."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  without a name: a kill leaves none
        self.closed = False

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise NoSpaceError(
                "has no room for a file that is to be sent to a bucket",
                where=tempfile.gettempdir(),
                hint="set TMPDIR to a folder on a larger disk, or pass a smaller --max-shard-size",
            ) from None

    def close(self) -> None:
        if not self.closed:
            self._file.flush()
            self._file.seek(0)  # which some systems share with who opens the file by its number
            self._send(f"/dev/fd/{self._file.fileno()}")
            self.discard()

    def commit(self) -> None:
        """Does nothing: it is visible."""

    def discard(self) -> None:
        self.closed = True
        self._file.close()


def _split(path: str) -> tuple[str, str]:
    """Splits a path into bucket and name."""
    owner, name, *rest = path.split("/", 2)
    return f"{owner}/{name}", rest[0] if rest else ""


def _describe(bucket: str, entry: Any) -> Mapping[str, Any]:
    info = {"name": f"{bucket}/{entry.path}", "type": entry.type, "size": 0}
    if entry.type == "file":
        info |= {"size": entry.size, "xet_hash": entry.xet_hash}
        # Not `mtime`, which is that of the file that was sent.
        info |= {"last_modified": entry.uploaded_at} if entry.uploaded_at else {}
    return info


_showing = threading.Lock()
_hidden = 0
_were_shown = False


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hides the client's progress bars, which all threads share."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    global _hidden, _were_shown  # noqa: PLW0603  as the client's own setting is
    with _showing:
        if not _hidden:
            _were_shown = not are_progress_bars_disabled()
            if _were_shown:
                disable_progress_bars()
        _hidden += 1
    try:
        yield
    finally:
        with _showing:
            _hidden -= 1
            if not _hidden and _were_shown:
                enable_progress_bars()
