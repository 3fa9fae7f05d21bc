"""Keys and values that all ranks see: a store of torch.distributed, or a dictionary.

No collective and no process group is involved, so nothing here can meet an operation of the
training, on the device or off it. Nothing waits inside a store for a key to appear either.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckptkit.core.errors import PeerError
from ckptkit.core.threads import WorkerThread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


logger = logging.getLogger(__name__)

MAX_VALUE_BYTES = 4 << 20
"""TCPStore drops a connection, and with it the training, that sends it more than 8 MiB."""

_OPERATION_SECONDS = 30.0  # a store answers in less than a millisecond, unless its host is stopped
_CONNECT_SECONDS = 10.0  # the training's own timeout, which else holds here, may be many minutes
_CLOSE_SECONDS = 1.0
_THREAD_NAME = "ckptkit-store"
_KEYS_AT_ONCE = 256  # of 1 MiB each, an answer of 256 MiB
_LOST = "the host of torch.distributed's store ended or is not reached; look at its log first"

T = TypeVar("T")


class KeyValueStore(Protocol):
    """Keys and values that all ranks see; no method waits for a key to appear."""

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes | None:
        """Returns a key's value, None where there is no such key."""

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values of all these keys, None while any of them is missing."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets a key to `desired` where its value is `expected`, all in one step.

        Both are text in UTF-8; an empty `expected` stands for a key that is not there. Returns
        `desired` if that is the value now, else what was found (`expected` for a missing key).
        """

    def delete(self, key: str) -> None:
        """Removes a key, where it is there."""


class LocalKeyValueStore:
    """The board of a single process, which its threads share."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Returns a key's value, None where there is no such key."""
        return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values of all these keys, None while any of them is missing."""
        with self._lock:
            found = [self._values[key] for key in keys if key in self._values]
        return found if len(found) == len(keys) else None

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets a key to `desired` where its value is `expected`, all in one step."""
        with self._lock:
            found = self._values.get(key)
            if found is None and expected:
                return expected
            if (found or b"") != expected:
                return found or b""
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
    """A part of a store of torch.distributed, seen through a connection of its own.

    Where the store's connection cannot be copied, because torch is too old or the host takes no
    further one, ours is the training's, on which a call of ours then takes its turn; none takes
    longer than one exchange with the host.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._given = store  # it may be the host of all connections, and end with its last user
        self._sender = _SenderThread(_THREAD_NAME)
        self._store: Any = store  # torch's stubs lack half of its methods
        self._prefix = prefix
        self._connect()

    def under(self, prefix: str) -> TorchKeyValueStore:
        """Returns a board for keys under a further prefix, on the same connection."""
        part = object.__new__(TorchKeyValueStore)
        part._given, part._store, part._sender = self._given, self._store, self._sender
        part._prefix = self._key(prefix)
        return part

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(
                f"a value of {len(value):,} bytes was found against {MAX_VALUE_BYTES:,}"
            )
        self._sender.run(lambda: self._store.set(self._key(key), value))

    def get(self, key: str) -> bytes | None:
        """Returns a key's value, None where there is no such key."""
        found = self.get_all([key])
        return found[0] if found else None

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        return self._sender.run(lambda: self._get_all([self._key(key) for key in keys]))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets a key to `desired` where its value is `expected`, all in one step."""
        name, old, new = self._key(key), expected.decode(), desired.decode()
        found: bytes = self._sender.run(lambda: self._store.compare_set(name, old, new))
        return found

    def delete(self, key: str) -> None:
        self._sender.run(lambda: self._store.delete_key(self._key(key)))

    def close(self) -> None:
        self._sender.close(_CLOSE_SECONDS)

    def _connect(self) -> None:
        """Takes a connection of its own, if it gets one soon."""
        clone = getattr(self._given, "clone", None)
        if clone is None:
            return
        try:
            self._store = self._sender.run(clone, _CONNECT_SECONDS)
        except PeerError as error:
            if isinstance(error.__cause__, TimeoutError):  # that courier still waits there
                logger.warning("the connection of the training is used for saves too: %s", error)
                self._sender.stop()
                self._sender = _SenderThread(_THREAD_NAME)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _get_all(self, keys: list[str]) -> list[bytes] | None:
        """Asks first whether the keys are there, because to get a missing one is to wait for it."""
        if not self._store.check(keys):
            return None
        if not self._store.has_extended_api():
            return [self._store.get(key) for key in keys]
        values: list[bytes] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            values += self._store.multi_get(keys[start : start + _KEYS_AT_ONCE])
        return values


def first_line(error: Exception) -> str:
    """Returns what an error says, without the stack of C++ frames that torch adds."""
    return (str(error).splitlines() or [""])[0]
