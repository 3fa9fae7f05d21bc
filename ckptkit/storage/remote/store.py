"""The client of an object store, or of the Hub, through fsspec: listing, reading and writing.

Requests are repeated after transient errors. Errors are those of the client, which callers
translate.
"""

from __future__ import annotations

import json
import os
import posixpath
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from ckptkit.core.errors import CkptkitError, RefusedError, UsageError
from ckptkit.storage.locations import S3_PROTOCOLS, check_below
from ckptkit.storage.remote.errors import (
    Fault,
    RetryPolicy,
    call_with_retries,
    describe_error,
    find_fault,
    status_of,
)
from ckptkit.storage.remote.s3 import (
    delete_s3_objects,
    get_s3_object,
    head_s3_object,
    list_s3_objects,
    make_s3_options,
    read_s3_range,
    split_s3_path,
)

if TYPE_CHECKING:
    from ckptkit.storage.places import Place


_KINDS = {"dataset": "datasets/", "space": "spaces/"}


def pin_revision(filesystem: Any, path: str) -> str:
    """Returns a path such as `org/name@main/folder` with the commit that its revision names now.

    A branch may move between two requests; a commit does not.
    """
    from huggingface_hub import HfApi

    resolved = filesystem.resolve_path(path)
    if not hasattr(resolved, "repo_id"):  # a bucket, which has no commits
        return path.rstrip("/")
    client = HfApi(endpoint=filesystem.endpoint, token=filesystem.token)
    info = client.repo_info(
        resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type
    )
    root = f"{_KINDS.get(resolved.repo_type, '')}{resolved.repo_id}@{info.sha}"
    return f"{root}/{resolved.path_in_repo}".rstrip("/")


def read_hub_range(filesystem: Any, path: str, start: int, stop: int, size_bytes: int) -> bytes:
    """Returns the bytes `[start, stop)` of a file with one request, reading nothing ahead."""
    with filesystem.open(path, "rb", cache_type="none", size=size_bytes) as file:
        file.seek(start)
        data: bytes = file.read(stop - start)
    return data


CONNECTIONS = 32
_CLIENTS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}
_MARKS = ("ETag", "etag", "md5", "generation", "mtime", "LastModified", "last_modified", "created")
_HUB = "hf"
_OTHER_IS_THERE = frozenset({409, 412})
_GONE = 404
_UNKNOWN_CONDITION = frozenset({400, 501})
T = TypeVar("T")
AsError = Callable[[Exception, str, str], CkptkitError]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a listing shows it.

    Attributes:
        size_bytes: Its size.
        identity: Changes when it is replaced.
        etag: For conditional requests; empty where the store has none.
        modified: When it was written, in seconds since 1970; 0 where that is unknown.
    """

    size_bytes: int
    identity: str
    etag: str = ""
    modified: float = 0.0


class RemoteStore:
    """A client of a store; threads share it. Make it with `get_store`."""

    def __init__(self, protocol: str, options: Mapping[str, Any], where: str) -> None:
        self.protocol = protocol
        self.options = dict(options)
        self.is_s3 = protocol in S3_PROTOCOLS
        self.has_conditions = True
        # Other clients retry by themselves.
        self.retry_policy = RetryPolicy() if self.is_s3 else RetryPolicy(attempts=2)
        self.filesystem = _open_filesystem(protocol, self.options, where)

    def retry(self, ask: Callable[[], T], what: str) -> T:
        return call_with_retries(ask, partial(self.retry_policy.wait_before, what=what))

    def path_of(self, location: str) -> str:
        """Returns the client's path of a URL; a path on the Hub is pinned to the current commit."""
        if self.is_s3:
            return location.partition("://")[2].strip("/")
        path: str = self.filesystem._strip_protocol(location)  # noqa: SLF001  fsspec's own name
        if self.protocol == _HUB:
            return self.retry(lambda: pin_revision(self.filesystem, path), location)
        return path.rstrip("/")

    def list_objects(self, path: str) -> dict[str, ObjectInfo]:
        return {name: entry for name, entry in self._list_all(path).items() if not _is_marker(name)}

    def list_folder_markers(self, path: str) -> list[str]:
        entries = self._list_all(path).items() if self.is_s3 else ()
        return [name for name, entry in entries if _is_marker(name) and not entry.size_bytes]

    def _list_all(self, path: str) -> dict[str, ObjectInfo]:
        def ask() -> dict[str, ObjectInfo]:
            if self.is_s3:
                return {n: _parse_info(info) for n, info in list_s3_objects(self.filesystem, path)}
            self.filesystem.invalidate_cache()
            try:
                infos: Mapping[str, Mapping[str, Any]] = self.filesystem.find(path, detail=True)
            except FileNotFoundError as error:
                if find_fault(error) is Fault.NO_BUCKET:
                    raise
                return {}
            prefix = f"{path}/".lstrip("/")
            return {
                name.lstrip("/").removeprefix(prefix): _parse_info(info)
                for name, info in infos.items()
                if name.lstrip("/").startswith(prefix) and info.get("type") == "file"
            }

        return self.retry(ask, f"list {path}")

    def list_folders(self, path: str, folders: Collection[str]) -> dict[str, ObjectInfo]:
        """Returns the objects right below a path, and those in some folders there."""

        def ask() -> list[Mapping[str, Any]]:
            self.filesystem.invalidate_cache()
            try:
                infos: list[Mapping[str, Any]] = self.filesystem.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                if find_fault(error) is Fault.NO_BUCKET:
                    raise
                return []
            return infos

        objects = {}
        for info in self.retry(ask, f"list {path}"):
            name = info["name"].rstrip("/").rpartition("/")[2]
            if info["name"].rstrip("/") == path:
                continue  # the marker of the folder itself
            if info.get("type") == "file" and not _is_marker(info["name"]):
                objects[name] = _parse_info(info)
            elif name in folders:
                inside = self.list_objects(f"{path}/{name}")
                objects |= {f"{name}/{inner}": entry for inner, entry in inside.items()}
        return objects

    def get_small(self, path: str) -> bytes | None:

        def ask() -> bytes | None:
            try:
                if self.is_s3:
                    return get_s3_object(self.filesystem, path)
                data: bytes = self.filesystem.cat_file(path)
            except FileNotFoundError:
                return None
            return data

        return self.retry(ask, f"read {path}")

    def put_small(self, path: str, data: bytes) -> None:

        def ask() -> object:
            if not self.is_s3:
                return self.filesystem.pipe_file(path, data)
            bucket, key, _ = split_s3_path(self.filesystem, path)
            return self.filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=data)

        self.retry(ask, f"write {path}")

    def put_if(self, path: str, data: bytes, expected: str) -> str | None:
        """Writes a small object if the existing one has the ETag `expected`, empty for none.

        It makes a single request. Returns the new ETag, empty where the store has none; None if
        another object exists. Stores without such conditions write in any case; `has_conditions` is
        false then.
        """
        if not self.is_s3:
            return self._put_new(path, data, may_exist=bool(expected))
        bucket, key, _ = split_s3_path(self.filesystem, path)
        condition = {"IfMatch": expected} if expected else {"IfNoneMatch": "*"}
        conditions = condition if self.has_conditions else {}
        try:
            answer = self.filesystem.call_s3(
                "put_object", Bucket=bucket, Key=key, Body=data, **conditions
            )
        except Exception as error:
            status = status_of(error)
            if conditions and (status in _OTHER_IS_THERE or (expected and status == _GONE)):
                return None
            if not conditions or status not in _UNKNOWN_CONDITION:
                raise
            self.has_conditions = False
            return self.put_if(path, data, expected)
        return str(answer["ETag"])

    def _put_new(self, path: str, data: bytes, *, may_exist: bool) -> str | None:
        for _ in range(2):
            try:
                if may_exist or not self.has_conditions:
                    self.filesystem.pipe_file(path, data)
                else:
                    self.filesystem.pipe_file(path, data, mode="create")
            except FileExistsError:
                return None
            except FileNotFoundError:  # a store with folders that have to be made
                self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            except (TypeError, ValueError, NotImplementedError):
                self.has_conditions = False
            else:
                break
        return ""

    def delete(self, root: str, names: Sequence[str]) -> None:
        """Removes objects below bucket and prefix, by exact names; missing ones are no error.

        Everything that is removed from a store is removed here.
        """
        for name in names:
            check_below(name, root)
        if self.is_s3 and names:
            bucket, prefix, _ = split_s3_path(self.filesystem, root)
            start = f"{prefix}/" if prefix else ""
            keys = [start + name for name in names]
            self.retry(lambda: delete_s3_objects(self.filesystem, bucket, keys), f"delete {root}")
        elif names:
            for name in names:
                self.retry(partial(self._delete, f"{root}/{name}"), f"delete {root}/{name}")

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):  # also where the answer to a first try was lost
            self.filesystem.rm_file(path)

    def look_up(self, path: str) -> ObjectInfo | None:
        """Returns a single object, also where listings do not show it yet; None if absent."""
        head = partial(head_s3_object, self.filesystem) if self.is_s3 else self.filesystem.info

        def ask() -> ObjectInfo | None:
            try:
                info = head(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return _parse_info(info) if info.get("type") == "file" else None

        return self.retry(ask, f"look up {path}")

    def read_into(self, path: str, start: int, target: memoryview, entry: ObjectInfo) -> None:

        def ask() -> None:
            if self.is_s3:
                read_s3_range(self.filesystem, path, start, target, entry.etag)
                return
            stop = start + len(target)
            if self.protocol == _HUB:
                data = read_hub_range(self.filesystem, path, start, stop, entry.size_bytes)
            else:
                data = self.filesystem.cat_file(path, start=start, end=stop)
            if len(data) != len(target):
                raise EOFError(f"{len(data):,} bytes came, {len(target):,} were asked for")
            target[:] = data

        self.retry(ask, f"read {path}")


_lock = threading.Lock()
_stores: WeakValueDictionary[tuple[int, str, str], RemoteStore] = WeakValueDictionary()


def get_store(place: Place) -> RemoteStore:
    """Returns the client for a place; places with equal options share one while it is in use."""
    options = json.dumps(place.options, sort_keys=True, default=repr)
    key = os.getpid(), place.protocol, options
    with _lock:
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = RemoteStore(place.protocol, place.options, str(place))
        return store


class RemoteFolder:
    """The objects below a URL, by their paths relative to it; what their client raises is ours."""

    def __init__(
        self, place: Place, as_error: AsError, *, retry_policy: RetryPolicy | None = None
    ) -> None:
        """Connects with the first request.

        `as_error` makes the error that is raised of a client's error, the place for messages, and
        what was not done: `read`, `written` or `removed`.
        """
        self.location = place.location
        self._as_error = as_error
        if retry_policy is None:
            self.store = get_store(place)
        else:
            self.store = RemoteStore(place.protocol, place.options, place.location)
            self.store.retry_policy = retry_policy
        self.root = self.perform("", lambda: self.store.path_of(self.location))

    def below(self, folder: str) -> RemoteFolder:
        inner = copy(self)
        inner.location, inner.root = self.where(folder), self.address(folder)
        return inner

    def where(self, path: str) -> str:
        return posixpath.join(self.location, path) if path else self.location

    def address(self, path: str) -> str:
        return posixpath.join(self.root, path) if path else self.root

    def perform(self, path: str, operation: Callable[[], T], verb: str = "read") -> T:
        try:
            return operation()
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  clients raise what they like
            raise self._as_error(error, self.where(path), verb) from None  # may hold secrets

    def entries(self, folder: str = "") -> dict[str, ObjectInfo]:
        objects = self.perform(folder, lambda: self.store.list_objects(self.address(folder)))
        return {posixpath.join(folder, path): entry for path, entry in objects.items()}

    def look_up(self, path: str) -> ObjectInfo | None:
        return self.perform(path, lambda: self.store.look_up(self.address(path)))

    def get(self, path: str) -> bytes | None:
        return self.perform(path, lambda: self.store.get_small(self.address(path)))

    def put(self, path: str, data: bytes) -> None:
        """Puts a small object, which becomes visible as a whole."""
        self.perform(path, lambda: self.store.put_small(self.address(path), data), "written")

    def remove(self, *paths: str) -> None:
        if paths:
            where = paths[0] if len(paths) == 1 else ""
            self.perform(where, lambda: self.store.delete(self.root, paths), "removed")

    def folder_markers(self, folder: str) -> list[str]:
        names = self.perform(folder, lambda: self.store.list_folder_markers(self.address(folder)))
        return [f"{folder}/{name}" for name in names]


def _is_marker(name: str) -> bool:
    return not name or name.endswith("/")


def _open_filesystem(protocol: str, options: Mapping[str, Any], where: str) -> Any:
    import fsspec

    arguments = dict(options)
    if protocol in S3_PROTOCOLS:
        arguments = make_s3_options(arguments, connections=CONNECTIONS)
    if protocol != _HUB:  # whose class counts unknown options among its own
        arguments.setdefault("use_listings_cache", False)
    try:
        filesystem = fsspec.filesystem(protocol, skip_instance_cache=True, **arguments)
    except ImportError as error:
        client = _CLIENTS.get(protocol)
        raise RefusedError(
            f"the client for {protocol}:// is not installed: {describe_error(error, options)}",
            where=where,
            hint=f"run `pip install {client}`" if client else "install what it names",
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"no storage was opened: {describe_error(error, options)}",
            where=where,
            hint="see whether the URL and the names of the options are right",
        ) from None
    if protocol in S3_PROTOCOLS:
        filesystem.retries = 1  # `RemoteStore.retry` repeats requests; both together would multiply
    return filesystem


def _parse_info(info: Mapping[str, Any]) -> ObjectInfo:
    etag = str(info.get("ETag") or info.get("etag") or "")
    size = int(info.get("size") or 0)
    hub = info.get("xet_hash") or info.get("blob_id")
    marks = [str(hub)] if hub else [str(info[mark]) for mark in _MARKS if info.get(mark)]
    identity = f"{(etag or '-'.join(marks)).strip(chr(34))}-{size:x}"
    written = (info.get(mark) for mark in ("LastModified", "last_modified", "mtime", "created"))
    times = (value for value in written if isinstance(value, (datetime, int, float)))
    modified = next(times, 0.0)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    return ObjectInfo(size, identity, etag, float(modified))
