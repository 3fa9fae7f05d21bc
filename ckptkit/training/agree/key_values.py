"""Keys and values that all ranks see: a store of torch.distributed, or a dictionary.

No collective and no process group is involved, so nothing here can interfere with operations of the
training, on the device or off it. No call waits inside a store for a key to appear.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ckptkit.core.errors import PeerError
from ckptkit.core.threads import WorkerThread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


logger = logging.getLogger(__name__)

MAX_VALUE_BYTES = 4 << 20
"""TCPStore closes a connection that sends it more than 8 MiB, which ends the training."""

_OPERATION_SECONDS = 30.0  # a store answers in less than a millisecond, unless its host is stopped
_CONNECT_SECONDS = 10.0  # the timeout of the training's own connection may be many minutes
# A thread that returns from C++ while the interpreter shuts down aborts the process (before Python
# 3.14), so one that still waits for the store is waited for.
_CLOSE_SECONDS = 30.0
_THREAD_NAME = "ckptkit-store"
_KEYS_AT_ONCE = 256  # with 1 MiB each, an answer of 256 MiB
_ABSENT = b"ckptkit: absent"  # no value of ours
_LOST = "the host of torch.distributed's store has ended or cannot be reached; see its log first"

T = TypeVar("T")


class LocalKeyValueStore:
    """The store of a single process, for its threads; no method waits for a key to appear."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values of all these keys, None if any of them is missing."""
        with self._lock:
            values = [self._values[key] for key in keys if key in self._values]
        return values if len(values) == len(keys) else None

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Atomically sets a key to `desired` if its value is `expected`.

        Both are text in UTF-8; an empty `expected` stands for a missing key. Returns `desired` if
        that is the value now, else the current value (`expected` for a missing key).
        """
        with self._lock:
            current = self._values.get(key)
            if current is None and expected:
                return expected
            if (current or b"") != expected:
                return current or b""
            self._values[key] = desired
            return desired

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)


class _SenderThread(WorkerThread):
    """Calls the store in a thread of its own, so that a caller can give up on it."""

    def run(self, operation: Callable[[], T], seconds: float | None = None) -> T:
        limit = _OPERATION_SECONDS if seconds is None else seconds
        if not self.is_alive:
            raise PeerError("the connection to the other ranks was closed")
        answer = self.submit(operation)
        try:
            return answer.result(limit)
        except TimeoutError as error:
            answer.cancel()
            raise PeerError(f"the store did not answer within {limit:.0f} s", hint=_LOST) from error
        except RuntimeError as error:  # torch's DistError and its subclasses are RuntimeErrors
            raise PeerError(f"the store failed: {first_line(error)}", hint=_LOST) from error


class TorchKeyValueStore:
    """A prefix of a store of torch.distributed, through a connection of its own.

    If the store's connection cannot be cloned, because torch is too old or the host accepts no
    further one, the training's connection is used, one request at a time.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._given = store  # kept alive, since it may be the host of all connections
        self._sender = _SenderThread(_THREAD_NAME)
        self._abandoned: _SenderThread | None = None
        self._store: Any = store  # torch's stubs lack half of its methods
        self._prefix = prefix
        clone = getattr(store, "clone", None)
        if clone is None:
            return
        try:
            self._store = self._sender.run(clone, _CONNECT_SECONDS)
        except PeerError as error:
            if isinstance(error.__cause__, TimeoutError):  # that thread still waits there
                logger.warning("the connection of the training is used for saves too: %s", error)
                self._sender.stop()
                self._abandoned = self._sender
                self._sender = _SenderThread(_THREAD_NAME)

    def under(self, prefix: str) -> TorchKeyValueStore:
        """Returns a store for keys under a further prefix, on the same connection."""
        part = object.__new__(TorchKeyValueStore)
        part._given, part._store, part._sender = self._given, self._store, self._sender
        part._abandoned = self._abandoned
        part._prefix = self._key(prefix)
        return part

    def set(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"expected at most {MAX_VALUE_BYTES:,} bytes, got {len(value):,}")
        self._sender.run(lambda: self._store.set(self._key(key), value))

    def get(self, key: str) -> bytes | None:
        # In one request: `get` of torch waits for a key that another rank deletes after a check.
        value = self.compare_set(key, _ABSENT, _ABSENT)
        return None if value == _ABSENT else value

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns None unless all exist; nobody may delete one meanwhile."""
        return self._sender.run(lambda: self._get_all([self._key(key) for key in keys]))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        name, old, new = self._key(key), expected.decode(), desired.decode()
        current: bytes = self._sender.run(lambda: self._store.compare_set(name, old, new))
        return current

    def delete(self, key: str) -> None:
        self._sender.run(lambda: self._store.delete_key(self._key(key)))

    def close(self) -> None:
        self._sender.close(_CLOSE_SECONDS)
        if self._abandoned is not None:
            self._abandoned.close(_CLOSE_SECONDS)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _get_all(self, keys: list[str]) -> list[bytes] | None:
        """Checks first whether the keys exist, because the store waits for a missing one."""
        if not self._store.check(keys):
            return None
        if not self._store.has_extended_api():
            return [self._store.get(key) for key in keys]
        values: list[bytes] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            values += self._store.multi_get(keys[start : start + _KEYS_AT_ONCE])
        return values


KeyValueStore = LocalKeyValueStore | TorchKeyValueStore
"""Keys and values that all ranks see."""


def first_line(error: Exception) -> str:
    """Returns the message of an error, without the stack of C++ frames that torch adds."""
    return (str(error).splitlines() or [""])[0]
