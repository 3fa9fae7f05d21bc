"""The ranks of a training: how they open a session, agree on values, and name the same directory.

They use a key-value store. A rank that waits for others polls with growing pauses until a deadline.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from ckptkit.core.errors import CkptkitError, PeerError, UsageError, error_from_json
from ckptkit.core.text import join_first
from ckptkit.storage.places import is_url, local_path
from ckptkit.training.agree.key_values import (
    MAX_VALUE_BYTES,
    KeyValueStore,
    LocalKeyValueStore,
    TorchKeyValueStore,
    first_line,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.2
_PAUSE_GROWTH = 1.1  # so that an answer is read at most a tenth later than it came
_GRACE_SECONDS = 5.0  # by which the others wait longer than rank 0, which knows the reason
_NAMED_RANKS = 8
_NONCE_BYTES = 4
_REFUSED = b"!"  # before the error of a rank without a value; no JSON starts with it
_LONGEST_ERROR = 2_000
_MOST_OPENINGS = 10_000
_OPENING = threading.Lock()  # openings are numbered, so they must not overlap

T = TypeVar("T")


def poll_until(fetch: Callable[[], T | None], timeout_seconds: float) -> T | None:
    """Calls `fetch` with growing pauses until it returns something; None if the time is up."""
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while (value := fetch()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(_PAUSE_GROWTH * pause, _LONGEST_PAUSE_SECONDS)
    return value


class Peers:
    """The ranks of one training, from the view of one of them.

    All methods may be called from several threads, as long as no two use the same topic.

    Attributes:
        rank: The number of this process, from 0.
        world_size: How many ranks there are.
        store: Shared by all ranks; keys with a first part other than `agree` are for callers.
        nonce: Names this session; the same on all ranks, different for each session.
    """

    def __init__(self, rank: int, world_size: int, store: KeyValueStore, nonce: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.nonce = nonce
        self._lock = threading.Lock()
        self._round_numbers: dict[str, int] = {}
        self._stale: list[tuple[float, str]] = []
        self._answered: list[tuple[float, str]] = []  # with unread answers

    def agree(
        self,
        topic: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        *,
        timeout_seconds: float,
    ) -> Any:
        """Lets rank 0 decide on the values of all ranks, and returns its decision on every rank.

        Every rank has to call this equally often for a topic, with a value that is JSON of at most
        4 MiB. `decide` is called on rank 0 only, with the values in the order of the ranks. A round
        that fails on one rank fails on all that wait for it, with the same error. Rank 0 waits
        `timeout_seconds` for the others, and they about as long.
        """
        self._sweep()
        key = self._next_round(topic)
        if self.rank:
            return self._ask(topic, key, value, timeout_seconds)
        try:
            values = self._collect(topic, key, value, timeout_seconds)
            answer = _encoded({"value": decide(values)})
        except Exception as error:
            document = _error_json(f"rank 0 failed to decide about {topic!r}", error)
            self._publish(key, _encoded({"error": document}), timeout_seconds)
            raise
        self._publish(key, answer, timeout_seconds)
        return json.loads(answer)["value"]

    def raise_first(
        self, topic: str, error: CkptkitError | None, *, timeout_seconds: float
    ) -> None:
        """Raises the first of the ranks' errors on all ranks, with its rank."""
        own = None if error is None else error.to_json()
        documents = self.agree(topic, own, lambda all_of: all_of, timeout_seconds=timeout_seconds)
        for rank, document in enumerate(documents):
            if document is not None:
                raise error_from_json(document).located(f"rank {rank}")

    def refuse(self, topic: str, error: Exception, *, timeout_seconds: float) -> None:
        """Takes part in a round with an error instead of a value, without waiting.

        All ranks that call `agree` in this round raise the error at once.
        """
        key = self._next_round(topic)
        document = _error_json(f"rank {self.rank} failed before {topic!r}", error)
        if self.rank:
            self.store.set(f"{key}/{self.rank}", _REFUSED + _encoded(document))
            self._forget(f"{key}/{self.rank}", timeout_seconds + 2 * _GRACE_SECONDS)
        else:
            self._publish(key, _encoded({"error": document}), timeout_seconds)

    def close(self) -> None:
        """Closes the connection; no method may be called after it.

        Rank 0 often hosts the store, and its program may end next, so it waits some seconds for
        ranks that have not read its last answers.
        """
        if not isinstance(self.store, TorchKeyValueStore):
            return
        with suppress(PeerError):
            poll_until(self._all_heard, _GRACE_SECONDS)
        self.store.close()

    def _all_heard(self) -> bool | None:
        """Returns whether every rank has deleted its values, as it does after an answer.

        A rank that did not come has none, and one that refused waits for nothing.
        """
        now = time.monotonic()
        with self._lock:
            self._answered = [entry for entry in self._answered if entry[0] > now]
            keys = [f"{key}/{rank}" for _, key in self._answered for rank in self._others]
        values = map(self.store.get, keys)
        return all(value is None or value.startswith(_REFUSED) for value in values) or None

    @property
    def _others(self) -> range:
        return range(1, self.world_size)

    def _next_round(self, topic: str) -> str:
        with self._lock:
            number = self._round_numbers[topic] = self._round_numbers.get(topic, 0) + 1
        return f"agree/{topic}/{number}"

    def _collect(self, topic: str, key: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Returns the values of all ranks; for rank 0."""
        keys = [f"{key}/{rank}" for rank in self._others]
        texts = poll_until(lambda: self._fetch(keys), timeout_seconds) if keys else []
        if texts is None:
            missing = [rank for rank, name in enumerate(keys, 1) if self.store.get(name) is None]
            raise PeerError(
                f"{name_ranks(missing)} did not answer within {timeout_seconds:g} s about {topic!r}"
            )
        refused = next((text for text in texts if text.startswith(_REFUSED)), None)
        if refused is not None:
            raise error_from_json(json.loads(refused.removeprefix(_REFUSED)))
        return [json.loads(text) for text in [_encoded(value), *texts]]

    def _fetch(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values of keys, None if any is missing; called while this rank waits."""
        return self.store.get_all(keys)

    def _publish(self, key: str, answer: bytes, timeout_seconds: float) -> None:
        if self.world_size > 1:
            self.store.set(f"{key}/answer", answer)
            self._forget(f"{key}/answer", timeout_seconds + 2 * _GRACE_SECONDS)
            with self._lock:
                self._answered.append((time.monotonic() + _GRACE_SECONDS, key))

    def _ask(self, topic: str, key: str, value: Any, timeout_seconds: float) -> Any:
        """Publishes this rank's value and returns the decision; for ranks other than 0."""
        try:
            part = _encoded(value)
        except (TypeError, ValueError) as error:
            part = _REFUSED + _encoded(_error_json(f"rank {self.rank} has no answer", error))
        self.store.set(f"{key}/{self.rank}", part)
        limit_seconds = timeout_seconds + _GRACE_SECONDS
        texts = poll_until(lambda: self._fetch([f"{key}/answer"]), limit_seconds)
        if texts is None:
            # Rank 0 may be about to read our value; without it, rank 0 would wait.
            self._forget(f"{key}/{self.rank}", timeout_seconds + 2 * _GRACE_SECONDS)
            raise PeerError(f"rank 0 did not decide within {timeout_seconds:g} s about {topic!r}")
        self.store.delete(f"{key}/{self.rank}")  # so that rank 0 knows that its answer was read
        answer = json.loads(texts[0])
        if "error" in answer:
            raise error_from_json(answer["error"])
        return answer["value"]

    def _forget(self, key: str, after_seconds: float) -> None:
        with self._lock:
            self._stale.append((time.monotonic() + after_seconds, key))

    def _sweep(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [key for when, key in self._stale if when <= now]
            self._answered = [entry for entry in self._answered if entry[0] > now]
            self._stale = [entry for entry in self._stale if entry[0] > now]
        for key in due:
            self.store.delete(key)


def open_peers(run: str | PathLike[str], *, timeout_seconds: float, is_place: bool = True) -> Peers:
    """Opens a new session with the other ranks of this training.

    All ranks of the default process group have to call this, in the same order. Without
    torch.distributed there is one rank. `run` is what they work on, the same on all of them; ranks
    may spell a directory or a URL in different ways.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return Peers(0, 1, LocalKeyValueStore(), secrets.token_hex(_NONCE_BYTES))
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    topic = {"named": str(run), "machine": "", "path": str(run), "inode": []}
    facts = place_facts(run) if is_place else topic
    # One topic for all openings, so that ranks that open different things fail at once.
    with _OPENING:
        store = TorchKeyValueStore(_default_store(), "ckptkit/runs")
        try:
            nonce = meet(store, rank, world_size, timeout_seconds=timeout_seconds)
            peers = Peers(rank, world_size, store.under(nonce), nonce)
            peers.agree(
                "what the ranks open",
                facts,
                lambda of_ranks: check_same_place(of_ranks, "the directory of the run"),
                timeout_seconds=timeout_seconds,
            )
        except BaseException:
            store.close()
            raise
    return peers


def meet(store: KeyValueStore, rank: int, world_size: int, *, timeout_seconds: float) -> str:
    """Agrees with all ranks on the nonce of a session.

    Openings are numbered by the answers of rank 0, and each answer names the nonces of its ranks. A
    rank that is not among them came after rank 0 had given up on it, and tries the next opening.
    """
    own = secrets.token_hex(_NONCE_BYTES)
    number = int(store.get(f"openings/{rank}") or 0) + 1
    if rank == 0:
        return _host(store, number, own, world_size, timeout_seconds)
    deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS
    for opening in range(number, number + _MOST_OPENINGS):
        answer = _join(store, opening, rank, own, deadline)
        if answer is None:
            break
        store.set(f"openings/{rank}", str(opening).encode())
        if own in answer["nonces"]:
            if "error" in answer:
                raise error_from_json(answer["error"])
            return str(answer["nonces"][0])
    raise PeerError(f"rank 0 did not open the run within {timeout_seconds:g} s")


def _host(
    store: KeyValueStore, number: int, own: str, world_size: int, timeout_seconds: float
) -> str:
    """Waits for the others, and publishes the outcome for those that came; for rank 0."""
    keys = [f"{number}/{rank}" for rank in range(1, world_size)]
    others = poll_until(lambda: store.get_all(keys), timeout_seconds) if keys else []
    error: PeerError | None = None
    here: list[bytes | None] = list(others or ())
    if others is None:
        here = [store.get(key) for key in keys]
        missing = [rank for rank, nonce in enumerate(here, 1) if nonce is None]
        error = PeerError(
            f"{name_ranks(missing)} did not open the run within {timeout_seconds:g} s"
        )
    nonces = [own, *(nonce.decode() for nonce in here if nonce is not None)]
    answer = {"nonces": nonces} | ({} if error is None else {"error": error.to_json()})
    store.set("openings/0", str(number).encode())
    store.set(f"{number}/answer", _encoded(answer))
    if error is not None:
        raise error
    return own


def _join(store: KeyValueStore, number: int, rank: int, own: str, deadline: float) -> Any:
    """Takes part in an opening and returns the answer of rank 0, None if there is none in time."""
    key = f"{number}/{rank}"
    store.set(key, own.encode())
    try:
        left = max(deadline - time.monotonic(), 0.0)
        text = poll_until(lambda: store.get(f"{number}/answer"), left)
    finally:
        store.delete(key)  # or rank 0 would take this rank for one that still waits
    return None if text is None else json.loads(text)


def _default_store() -> Store:
    # There is no public function for the store of the default process group.
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:  # MPI has none
        raise UsageError(
            "the process group has no store",
            hint="start torch.distributed with the backend gloo or nccl",
        )
    return store


def _encoded(value: Any) -> bytes:
    text = json.dumps(value).encode()
    if len(text) > MAX_VALUE_BYTES:
        raise ValueError(f"expected at most {MAX_VALUE_BYTES:,} bytes, got {len(text):,}")
    return text


def _error_json(what: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, CkptkitError):
        return error.to_json()
    text = f"{what}: {type(error).__name__}: {first_line(error)}"
    return PeerError(text[:_LONGEST_ERROR], hint="see the log of that rank").to_json()


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns, for example, `ranks 3, 7`; only the first ones if there are many."""
    named = join_first(map(str, ranks), len(ranks), _NAMED_RANKS)
    return f"rank{'s' if len(ranks) != 1 else ''} {named}"


_BOOT = Path("/proc/sys/kernel/random/boot_id")  # unlike a host name, it is unique
Facts = Mapping[str, Any]


def place_facts(named: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns JSON values that identify a directory."""
    if is_url(named):
        url = os.fspath(named).rstrip("/")
        return {"named": url, "machine": "", "path": url, "inode": []}
    text = os.fspath(local_path(named))
    real = Path(os.path.realpath(text))
    above = next((path for path in (real, *real.parents) if path.exists()), real)
    try:
        status = above.stat()
        inode = [status.st_dev, status.st_ino, *real.relative_to(above).parts]
    except OSError:
        inode = []
    return {"named": text, "machine": identify_machine(), "path": str(real), "inode": inode}


def check_same_place(of_ranks: Sequence[Facts], where: str) -> None:
    """Refuses directories that differ between ranks."""
    first = of_ranks[0]
    for rank, facts in enumerate(of_ranks):
        if not _are_same(first, facts):
            raise UsageError(
                f"is {_shown(facts)} on rank {rank} and {_shown(first)} on rank 0, where the same"
                " directory was expected on all ranks",
                where=where,
                hint="pass the same directory on every rank; a relative path starts at the working"
                " directory of each process",
            )


def _are_same(one: Facts, other: Facts) -> bool:
    if one["path"] == other["path"]:
        return True
    if one["machine"] == other["machine"]:
        return bool(one["inode"]) and one["inode"] == other["inode"]
    # Links may lead to different mounts of one file system on different machines.
    named = {os.path.normpath(facts["named"]) for facts in (one, other)}
    return len(named) == 1 and all(Path(name).is_absolute() for name in named)


def _shown(facts: Facts) -> str:
    same = facts["path"] == facts["named"]
    return repr(facts["named"]) if same else f"{facts['named']!r} (which is {facts['path']!r})"


@lru_cache(1)
def identify_machine() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
