"""The client of an object store, or of the Hub, as in fsspec: listing, reading, writing, claims.

Requests are repeated after transient errors. Errors are those of the client, which callers
translate.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

from ckptkit.core.errors import CkptkitError, OutputBusyError, RefusedError, UsageError
from ckptkit.core.threads import call_to_end, repeat
from ckptkit.storage.locations import S3_PROTOCOLS, check_below, is_hub_bucket
from ckptkit.storage.remote.errors import (
    ErrorTranslator,
    Fault,
    RetryPolicy,
    call_with_retries,
    describe_error,
    find_fault,
    lost_place_error,
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
# paramiko hangs where threads share a client, and sshfs answers a range with the whole file.
_UNSUITED = frozenset({"sftp", "ssh"})
_MARKS = ("ETag", "etag", "md5", "generation", "mtime", "LastModified", "last_modified", "created")
_HUB = "hf"
_OTHER_IS_THERE = frozenset({409, 412})
_GONE = 404
_UNKNOWN_CONDITION = frozenset({400, 501})
T = TypeVar("T")
AsError = Callable[[Exception, str, str], CkptkitError]


class ObjectInfo(Struct, frozen=True):
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
        self.is_bucket = is_hub_bucket(where)
        self._is_repository = protocol == _HUB and not self.is_bucket
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
        if self._is_repository:
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
        elif names and self.is_bucket:
            paths = [f"{root}/{name}" for name in names]
            self.retry(lambda: self.filesystem.remove_files(paths), f"delete {root}")
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
            if self._is_repository:
                data = read_hub_range(self.filesystem, path, start, stop, entry.size_bytes)
            else:
                data = self.filesystem.cat_file(path, start=start, end=stop)
            if len(data) != len(target):
                raise EOFError(f"{len(data):,} bytes came, {len(target):,} were asked for")
            target[:] = data

        self.retry(ask, f"read {path}")


_lock = threading.Lock()
_stores: WeakValueDictionary[tuple[int, str, bool, str], RemoteStore] = WeakValueDictionary()


def get_store(place: Place) -> RemoteStore:
    """Returns the client for a place; places with equal options share one while it is in use."""
    options = json.dumps(place.options, sort_keys=True, default=repr)
    key = os.getpid(), place.protocol, is_hub_bucket(place), options
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
        return "/".join(filter(None, (self.location, path)))

    def address(self, path: str) -> str:
        return "/".join(filter(None, (self.root, path)))

    def perform(self, path: str, operation: Callable[[], T], verb: str = "read") -> T:
        try:
            return operation()
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001  clients raise what they like
            raise self._as_error(error, self.where(path), verb) from None  # may hold secrets

    def entries(self, folder: str = "") -> dict[str, ObjectInfo]:
        objects = self.perform(folder, lambda: self.store.list_objects(self.address(folder)))
        return {f"{folder}/{path}" if folder else path: info for path, info in objects.items()}

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

    if protocol in _UNSUITED:
        raise UsageError(
            f"no storage was opened: no client for {protocol}:// reads ranges in several threads",
            where=where,
            hint="mount it, as with sshfs, and give the path",
        )
    arguments = dict(options)
    opened: Callable[..., Any] = partial(fsspec.filesystem, protocol, skip_instance_cache=True)
    if protocol in S3_PROTOCOLS:
        arguments = make_s3_options(arguments, connections=CONNECTIONS)
    if is_hub_bucket(where):
        from ckptkit.storage.remote.bucket import BucketFileSystem

        opened = BucketFileSystem
    try:
        filesystem = opened(**arguments)
    except CkptkitError:
        raise
    except ImportError as error:
        client = _CLIENTS.get(protocol)
        raise RefusedError(
            f"the client for {protocol}:// is not installed: {describe_error(error, options)}",
            where=where,
            hint=f"run `pip install {client}`" if client else "install what it names",
        ) from None
    except Exception as error:  # noqa: BLE001  clients raise what they like
        raise UsageError(
            f"no storage was opened: {describe_error(error, options)}",
            where=where,
            hint="see whether the URL and the names of the options are right",
        ) from None
    if protocol in S3_PROTOCOLS:
        filesystem.retries = 1  # `RemoteStore.retry` repeats requests; both together would multiply
    if protocol != _HUB and "use_listings_cache" not in options:
        # Not as an option, which some classes hand to a client that does not know it.
        filesystem.dircache.use_listings_cache = False
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


CLAIM_NAME = ".ckptkit-commit"
_RENEWAL_SECONDS = 15.0
_TRUSTED_SECONDS = 60.0  # without a renewal, after which the holder itself changes nothing more
_LEASE_SECONDS = 120.0  # without one, after which the holder counts as dead
_WAIT_SECONDS = 10.0  # for a commit of another run, which is short as a rule
_POLL_SECONDS = 0.5
_SETTLE_SECONDS = 2.0  # in a store that knows no conditions, before the claim is read back
_TRIES, _MOST_DIGITS = 20, 20
logger = logging.getLogger(__name__)


class _Claim(Struct, frozen=True):
    """The content of a claim."""

    writer: str = ""  # empty where no run holds it
    machine: str = ""
    process: str = ""
    beat: int = 0  # changes with each renewal
    names: frozenset[str] = frozenset()

    @property
    def is_dead(self) -> bool:
        """Whether its process was one of this machine, and has ended."""
        if not _identify_machine() or self.machine != _identify_machine() or not self.process:
            return False
        number = self.process.partition(" ")[0]
        is_number = number.isdecimal() and len(number) < _MOST_DIGITS
        return not is_number or _identify_process(int(number)) != self.process


_first_seen: dict[str, tuple[_Claim, float]] = {}
"""By the path of a claim: what this process has read last, and when it did so first."""


class _FoundClaim(Struct, frozen=True):
    """A claim as it was read."""

    etag: str  # what a condition can be made of
    claim: _Claim
    is_over: bool


class OutputClaim:
    """The claim of a run on a place: one run commits at a time, and a claim expires.

    OUT/.ckptkit-commit names the run, its process and every file that OUT may hold of unfinished
    commits. It is written only if there is none, renewed during the commit, and removed at its end.
    While the claim exists and the manifest does not, OUT holds no finished output. Threads share
    it.

    Attributes:
        names: The files that this commit and unfinished ones before it may have written.
    """

    def __init__(
        self, store: RemoteStore, root: str, location: str, translate_errors: ErrorTranslator
    ) -> None:
        self._store = store
        self._path = f"{root}/{CLAIM_NAME}"
        self._root = root
        self._location = location
        self._translate_errors = translate_errors
        self._writer = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._etag = ""
        self.names: frozenset[str] = frozenset()
        self._confirmed = 0.0
        self._ended: threading.Event | None = None

    @property
    def is_held(self) -> bool:
        return self._ended is not None

    def refuse_taken(self) -> frozenset[str]:
        """Refuses a place where another run commits; returns files that dead runs may have left.

        Waits for the next renewal where it cannot see whether the other run is alive.
        """
        claim = self._wait_for_end(0)
        return frozenset() if claim is None else claim.claim.names

    def take(self) -> None:
        """Claims the place. Waits briefly for another run, and takes over a dead one's claim.

        After a signal, the claim may be held.
        """
        for _ in range(_TRIES):
            claim = self._wait_for_end(_WAIT_SECONDS)
            if call_to_end(partial(self._try_to_claim, claim)):
                return
        raise self._taken_error()

    def _wait_for_end(self, seconds: float) -> _FoundClaim | None:
        """Returns the claim that this run may take over, None if there is none.

        A run that is alive is waited for so long only.
        """
        began, first = time.monotonic(), self._read()
        claim, has_told = first, False
        while claim is not None and not claim.is_over:
            is_here = bool(_identify_machine()) and claim.claim.machine == _identify_machine()
            is_alive = is_here or claim != first
            if is_alive and time.monotonic() - began >= seconds:
                raise self._taken_error()
            if not is_alive and not has_told:
                logger.warning(
                    "%s: a run on another machine holds %s; waiting up to %.0f s to see whether it"
                    " is alive",
                    *(self._location, CLAIM_NAME, _LEASE_SECONDS),
                )
                has_told = True
            time.sleep(_POLL_SECONDS)
            claim = self._read()
        return claim

    def add_names(self, names: Collection[str]) -> None:
        """Notes the files that the place may hold until the commit has ended."""
        if not self.names.issuperset(names):
            self.names |= set(names)
            self._renew()
            self.check()

    def check(self) -> None:
        """Checks that this run still owns the place, right before it changes something there."""
        if not self.is_held or time.monotonic() - self._confirmed > _TRUSTED_SECONDS:
            why = "another run may have taken this place over, since this one stood still"
            raise lost_place_error(why, self._location)

    def release(self, *, is_clean: bool) -> None:
        """Releases the claim; if the place holds unfinished files, it keeps their names."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        ended.set()
        trusted = time.monotonic() - self._confirmed <= _TRUSTED_SECONDS
        if not trusted:
            return
        try:
            with self._translate_errors():
                if is_clean or not self.names:
                    self._store.delete(self._root, [CLAIM_NAME])
                else:
                    self._write(self._encode_claim(writer=""), self._etag)
        except CkptkitError as error:
            logger.warning("the claim %s was left behind: %s", CLAIM_NAME, error)

    def _try_to_claim(self, earlier: _FoundClaim | None) -> bool:
        """Writes the claim in place of what was found there; returns whether it is this run's."""
        if earlier is not None:
            self.names |= earlier.claim.names
        data = self._encode_claim()
        with self._translate_errors():
            self._write(data, earlier.etag if earlier is not None else "")
            if self._store.get_small(self._path) != data:
                return False
            if not self._store.has_conditions or self._write(data, "") is not None:
                logger.warning(
                    "the store knows no conditional writes; a claim is read back instead"
                )
                time.sleep(_SETTLE_SECONDS)
                if self._store.get_small(self._path) != data:
                    return False
            entry = self._store.look_up(self._path)
        if entry is None:
            return False
        self._etag = entry.etag or entry.identity
        self._confirmed = time.monotonic()
        self._ended = repeat(_RENEWAL_SECONDS, self._keep, "ckptkit-claim")
        return True

    def _keep(self) -> None:
        try:
            self._renew()
        except CkptkitError as error:
            logger.warning("the claim on %s is not renewed: %s", self._location, error)

    def _renew(self) -> None:
        with self._lock, self._translate_errors():
            if not self.is_held:
                return
            asked = time.monotonic()
            data = self._encode_claim()
            etag = self._write(data, self._etag)
            if etag is None and self._store.get_small(self._path) == data:
                entry = self._store.look_up(self._path)  # the answer to a first try was lost
                etag = entry.etag if entry is not None else None
            if etag is not None:
                self._etag, self._confirmed = etag or self._etag, asked
            else:
                self._confirmed = 0.0

    def _read(self) -> _FoundClaim | None:
        with self._translate_errors():
            entry = self._store.look_up(self._path)
            data = self._store.get_small(self._path) if entry is not None else None
        if entry is None or data is None:
            return None
        try:
            claim = msgspec.json.decode(data, type=_Claim)
        except (ValueError, RecursionError):
            claim = _Claim()
        now = time.monotonic()
        before, since = _first_seen.get(self._path, (None, now))
        since = since if before == claim else now
        _first_seen[self._path] = claim, since
        # What a store says of times is trusted only where no clock can be that wrong.
        is_old = bool(entry.modified) and entry.modified + 30 * _LEASE_SECONDS < time.time()
        is_over = not claim.writer or is_old or claim.is_dead or now - since > _LEASE_SECONDS
        return _FoundClaim(entry.etag or entry.identity, claim, is_over)

    def _write(self, data: bytes, expected: str) -> str | None:
        return self._store.retry(
            lambda: self._store.put_if(self._path, data, expected), f"write {self._path}"
        )

    def _encode_claim(self, *, writer: str | None = None) -> bytes:
        claim = _Claim(
            writer=self._writer if writer is None else writer,
            machine=_identify_machine(),
            process=_identify_process(os.getpid()),
            beat=time.monotonic_ns(),
            names=self.names,
        )
        return msgspec.json.encode(claim, order="deterministic")

    def _taken_error(self) -> OutputBusyError:
        return OutputBusyError(
            "another run is putting its output there",
            where=self._location,
            hint="run one command at a time for an output; if that run was killed, run again: a"
            f" claim that is not renewed is taken over after {_LEASE_SECONDS:.0f} s",
        )


def _identify_machine() -> str:
    """Returns an identity of this machine and its namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _identify_process(number: int) -> str:
    """Returns an identity of a process on this machine; empty if it has ended."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in {"Z", "X"} else f"{number} {fields[18]}"
