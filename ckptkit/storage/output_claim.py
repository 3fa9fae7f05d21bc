"""The claim of a run on a place in a store: one run commits at a time, and a claim expires.

OUT/.ckptkit-commit names the run, its process and every file that OUT may hold of unfinished
commits. It is written only if there is none, renewed during the commit, and removed at its end.
While the claim exists and the manifest does not, OUT holds no finished output.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, OutputBusyError
from ckptkit.core.threads import repeat
from ckptkit.storage.remote.errors import ErrorTranslator, lost_place_error
from ckptkit.storage.remote.store import RemoteStore

CLAIM_NAME = ".ckptkit-commit"
_RENEWAL_SECONDS = 15.0
_TRUSTED_SECONDS = 60.0  # without a renewal, after which the holder itself changes nothing more
_LEASE_SECONDS = 120.0  # without one, after which the holder counts as dead
_WAIT_SECONDS = 10.0  # for a commit of another run, which is short as a rule
_POLL_SECONDS = 0.5
_SETTLE_SECONDS = 2.0  # in a store that knows no conditions, before the claim is read back
_TRIES = 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A claim as it was read: its content, and what a condition can be made of."""

    etag: str
    document: Mapping[str, Any]
    names: frozenset[str]
    is_over: bool


class OutputClaim:
    """One run's claim on a place in a store; threads share it.

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
        """Refuses a place where another run commits; returns files that dead runs may have left."""
        claim = self._read()
        if claim is not None and not claim.is_over:
            raise self._taken_error()
        return frozenset() if claim is None else claim.names

    def take(self) -> None:
        """Claims the place. Waits briefly for another run, and takes over a dead one's claim."""
        for _ in range(_TRIES):
            claim = self._wait_for_end()
            if self._try_to_claim(claim):
                return
        raise self._taken_error()

    def _wait_for_end(self) -> _Claim | None:
        """Returns the claim that this run may take over, None if there is none."""
        began, first = time.monotonic(), self._read()
        claim = first
        while first is not None and claim is not None and not claim.is_over:
            waited = time.monotonic() - began
            machine = _identify_machine()
            is_here = bool(machine) and claim.document.get("machine") == machine
            is_alive = claim.etag != first.etag or (is_here and not _is_dead(claim.document))
            if is_alive and waited > _WAIT_SECONDS:
                raise self._taken_error()
            if waited > _LEASE_SECONDS:
                break
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

    def _try_to_claim(self, earlier: _Claim | None) -> bool:
        """Writes the claim in place of what was found there; returns whether it is this run's."""
        if earlier is not None:
            self.names |= earlier.names
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

    def _read(self) -> _Claim | None:
        with self._translate_errors():
            entry = self._store.look_up(self._path)
            data = self._store.get_small(self._path) if entry is not None else None
        if entry is None or data is None:
            return None
        document: object = None
        with suppress(ValueError, RecursionError):
            document = json.loads(data)
        if not isinstance(document, dict):
            document = {}
        names = document.get("names")
        is_old = bool(entry.modified) and entry.modified + 30 * _LEASE_SECONDS < time.time()
        return _Claim(
            entry.etag or entry.identity,
            document,
            frozenset(map(str, names if isinstance(names, list) else ())),
            is_over=not document.get("writer") or is_old or _is_dead(document),
        )

    def _write(self, data: bytes, expected: str) -> str | None:
        return self._store.retry(
            lambda: self._store.put_if(self._path, data, expected), f"write {self._path}"
        )

    def _encode_claim(self, *, writer: str | None = None) -> bytes:
        return json.dumps(
            {
                "writer": self._writer if writer is None else writer,
                "machine": _identify_machine(),
                "process": _identify_process(os.getpid()),
                "beat": time.monotonic_ns(),
                "names": sorted(self.names),
            }
        ).encode()

    def _taken_error(self) -> OutputBusyError:
        return OutputBusyError(
            "another run is putting its output there",
            where=self._location,
            hint="run one command at a time for an output; if that run was killed, run again in"
            f" {_LEASE_SECONDS:.0f} s",
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


_MOST_DIGITS = 20


def _is_dead(document: Mapping[str, Any]) -> bool:
    process = str(document.get("process", ""))
    if not _identify_machine() or document.get("machine") != _identify_machine() or not process:
        return False
    number = process.partition(" ")[0]
    is_number = number.isdecimal() and len(number) < _MOST_DIGITS
    return not is_number or _identify_process(int(number)) != process
