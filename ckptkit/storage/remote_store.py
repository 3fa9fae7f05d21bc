"""One account on one object store, through fsspec: listing it, and reading ranges of its objects.

Nothing here gives up at the first failure, and nothing here knows what a checkpoint is. Errors
are the client's own; who calls knows what was asked for, and tells them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ckptkit.core.errors import RefusedError, UsageError
from ckptkit.storage.hub_files import hub_range, pinned_root
from ckptkit.storage.remote_errors import is_without_bucket, told
from ckptkit.storage.retries import Patience, retried
from ckptkit.storage.s3_ranges import S3_PROTOCOLS, s3_head, s3_options, s3_range

if TYPE_CHECKING:  # the process that uploads does without numpy
    from ckptkit.storage.places import Place

CONNECTIONS = 32
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
_MARKS = ("ETag", "etag", "md5", "generation", "mtime", "LastModified", "last_modified", "created")
_HUB = "hf"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as a listing shows it.

    Attributes:
        size_bytes: Its size.
        identity: Changes when it is replaced.
        etag: What a request can be made to depend on; empty where the store has no such thing.
        modified: When it was written, in seconds since 1970; 0 where that is unknown.
    """

    size_bytes: int
    identity: str
    etag: str = ""
    modified: float = 0.0


class RemoteStore:
    """A client of a store; threads share it. Make it with `store_of`."""

    def __init__(self, protocol: str, options: Mapping[str, Any], where: str) -> None:
        self.protocol = protocol
        self.options = dict(options)
        self.is_s3 = protocol in S3_PROTOCOLS
        # Other clients ask again by themselves.
        self.patience = Patience() if self.is_s3 else Patience(attempts=2)
        self.filesystem = _filesystem(protocol, self.options, where)

    def path_of(self, location: str) -> str:
        """Returns what the client calls a URL; one of the Hub is fixed to the commit it has now."""
        path: str = self.filesystem._strip_protocol(location)  # noqa: SLF001  fsspec's own name
        if self.protocol == _HUB:
            return retried(lambda: pinned_root(self.filesystem, path), self.patience, what=location)
        return path.rstrip("/")

    def listing(self, path: str) -> dict[str, StoredObject]:
        """Returns all objects below a path, by their paths relative to it.

        Raises:
            Exception: Whatever the client raises; also where there is no such bucket, but not
                where a folder is empty or missing.
        """

        def ask() -> Mapping[str, Mapping[str, Any]]:
            self.filesystem.invalidate_cache()
            try:
                found: Mapping[str, Mapping[str, Any]] = self.filesystem.find(path, detail=True)
            except FileNotFoundError as error:
                if is_without_bucket(error):
                    raise
                return {}
            return found

        found = retried(ask, self.patience, what=f"list {path}")
        prefix = f"{path}/".lstrip("/")
        objects = {}
        for name, info in found.items():
            relative = name.lstrip("/").removeprefix(prefix)
            if relative != name.lstrip("/") and info.get("type") == "file":
                objects[relative] = _object_of(info)
        return objects

    def listing_of(self, path: str, folders: Collection[str]) -> dict[str, StoredObject]:
        """Returns the objects right below a path, and those in some folders there.

        Raises:
            Exception: Whatever the client raises; a missing folder is no error.
        """

        def ask() -> list[Mapping[str, Any]]:
            self.filesystem.invalidate_cache()
            try:
                found: list[Mapping[str, Any]] = self.filesystem.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                if is_without_bucket(error):
                    raise
                return []
            return found

        objects = {}
        for info in retried(ask, self.patience, what=f"list {path}"):
            name = info["name"].rstrip("/").rpartition("/")[2]
            if info.get("type") == "file":
                objects[name] = _object_of(info)
            elif name in folders:
                inside = self.listing(f"{path}/{name}")
                objects |= {f"{name}/{inner}": one for inner, one in inside.items()}
        return objects

    def look_up(self, path: str) -> StoredObject | None:
        """Returns a single object, whether or not listings show it yet; None where it is not.

        Raises:
            Exception: Whatever the client raises but that.
        """
        given = self.filesystem, path

        def ask() -> StoredObject | None:
            try:
                info = s3_head(*given) if self.is_s3 else self.filesystem.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return _object_of(info) if info.get("type") == "file" else None

        return retried(ask, self.patience, what=f"look up {path}")

    def read_into(self, path: str, start: int, target: memoryview, known: StoredObject) -> None:
        """Fills `target` from byte `start` of an object on, with one request that succeeds.

        Raises:
            Exception: Whatever the client raises; `EOFError` if fewer bytes came.
        """

        def ask() -> None:
            if self.is_s3:
                s3_range(self.filesystem, path, start, target, known.etag)
                return
            stop = start + len(target)
            if self.protocol == _HUB:
                data = hub_range(self.filesystem, path, start, stop, known.size_bytes)
            else:
                data = self.filesystem.cat_file(path, start=start, end=stop)
            if len(data) != len(target):
                raise EOFError(f"{len(data):,} bytes came, {len(target):,} were asked for")
            target[:] = data

        retried(ask, self.patience, what=f"read {path}")


_lock = threading.Lock()
_stores: WeakValueDictionary[tuple[int, str, str], RemoteStore] = WeakValueDictionary()


def store_of(place: Place) -> RemoteStore:
    """Returns the client for a place; places with equal options share one while it is in use.

    Raises:
        UsageError: If the options are not those of such a storage.
        RefusedError: If the client for it is not installed.
    """
    options = json.dumps(place.options, sort_keys=True, default=repr)
    key = os.getpid(), place.protocol, options
    with _lock:
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = RemoteStore(place.protocol, place.options, str(place))
        return store


def _filesystem(protocol: str, options: Mapping[str, Any], where: str) -> Any:
    import fsspec

    given = dict(options)
    if protocol in S3_PROTOCOLS:
        given = s3_options(given, connections=CONNECTIONS)
    if protocol != _HUB:  # whose class counts unknown options among its own
        given.setdefault("use_listings_cache", False)
    try:
        filesystem = fsspec.filesystem(protocol, skip_instance_cache=True, **given)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        raise RefusedError(
            f"the client for {protocol}:// is not installed: {told(error, options)}",
            where=where,
            hint=f"pip install 'ckptkit-toolkit[{extra}]'" if extra else "install what it names",
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"no storage was opened: {told(error, options)}",
            where=where,
            hint="see whether the URL and the names of the options are right",
        ) from None
    if protocol in S3_PROTOCOLS:
        filesystem.retries = 1  # `retried` asks again, and would multiply what it does
    return filesystem


def _object_of(info: Mapping[str, Any]) -> StoredObject:
    etag = str(info.get("ETag") or info.get("etag") or "")
    size = int(info.get("size") or 0)
    hub = info.get("xet_hash") or info.get("blob_id")
    marks = [str(hub)] if hub else [str(info[mark]) for mark in _MARKS if info.get(mark)]
    identity = f"{(etag or '-'.join(marks)).strip(chr(34))}-{size:x}"
    return StoredObject(size, identity, etag, _seconds(info))


def _seconds(info: Mapping[str, Any]) -> float:
    for mark in ("LastModified", "last_modified", "mtime", "created"):
        found = info.get(mark)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, (int, float)):
            return float(found)
    return 0.0
