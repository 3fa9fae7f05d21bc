"""A fault before the n-th system call of a process that changes a file or sends something.

The kernel itself reports the calls (seccomp's user notification), so that they count whichever
library makes them, on every thread. A second process watches: it lets calls go on, ends or signals
the process, or has a call fail. Needs Linux 5.14 on x86-64, and the standard library only, since
the writer's process runs it.

Source:
    https://man7.org/linux/man-pages/man2/seccomp_unotify.2.html
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

KILL, TERM, NO_SPACE, IO_ERROR = "SIGKILL", "SIGTERM", "ENOSPC", "EIO"
KILL_JOB, TERM_JOB = "SIGKILL to the job", "SIGTERM to the job"
ERRORS = (NO_SPACE, IO_ERROR)


@dataclass(frozen=True)
class Call:
    """A system call."""

    number: int
    kind: str  # what it does
    # The argument that is a descriptor; before a path, that of its folder.
    descriptor: int | None = None
    path: int | None = None  # the argument that is a path
    flags: int | None = None  # the argument with the flags of an opening


CALLS = {
    "open": Call(2, "open", path=0, flags=1),
    "openat": Call(257, "open", 0, 1, flags=2),
    "creat": Call(85, "open", path=0),
    "write": Call(1, "write", 0),
    "writev": Call(20, "write", 0),
    "pwrite64": Call(18, "write", 0),
    "pwritev": Call(296, "write", 0),
    "pwritev2": Call(328, "write", 0),
    "copy_file_range": Call(326, "write", 2),
    "sendfile": Call(40, "write", 0),
    "splice": Call(275, "write", 2),
    "sendto": Call(44, "send", 0),
    "sendmsg": Call(46, "send", 0),
    "fsync": Call(74, "sync", 0),
    "fdatasync": Call(75, "sync", 0),
    "syncfs": Call(306, "sync", 0),
    "truncate": Call(76, "resize", path=0),
    "ftruncate": Call(77, "resize", 0),
    "fallocate": Call(285, "resize", 0),
    "mkdir": Call(83, "mkdir", path=0),
    "mkdirat": Call(258, "mkdir", 0, 1),
    "rename": Call(82, "rename", path=0),
    "renameat": Call(264, "rename", 0, 1),
    "renameat2": Call(316, "rename", 0, 1),
    "link": Call(86, "link", path=1),
    "linkat": Call(265, "link", 2, 3),
    "symlink": Call(88, "link", path=1),
    "symlinkat": Call(266, "link", 1, 2),
    "unlink": Call(87, "remove", path=0),
    "unlinkat": Call(263, "remove", 0, 1),
    "rmdir": Call(84, "remove", path=0),
    "chmod": Call(90, "mode", path=0),
    "fchmod": Call(91, "mode", 0),
    "fchmodat": Call(268, "mode", 0, 1),
    "utimensat": Call(280, "mode", 0, 1),
}
_BY_NUMBER = {call.number: call for call in CALLS.values()}
NEED_ROOM = ("open", "write", "sync", "resize", "mkdir", "link", "rename")
"""Kinds that a full disk refuses."""


@dataclass(frozen=True)
class Fault:
    """What happens, and when."""

    act: str  # a signal, or an error. A full disk stays full; the other error happens once
    call: int  # at which of the calls at which it can happen; 0 for never
    folder: str  # calls count that change something below it
    log: str  # where the calls are written once the process has ended
    sends: bool = True  # whether what is sent through sockets counts as well

    def to_json(self) -> str:
        return json.dumps(vars(self))


class Reached(NamedTuple):
    """A call that was reached: its kind, and the path that it was about."""

    kind: str
    path: str


def can_happen(act: str, call: Reached) -> bool:
    """Whether a call may fail so; every call may be the last one before a signal."""
    if act == NO_SPACE:
        return call.kind in NEED_ROOM and not call.path.startswith("socket:")
    return act != IO_ERROR or not call.path.startswith("socket:")


def struck(fault: Fault, reached: Sequence[Reached]) -> Reached | None:
    """Returns the call at which the fault happened, None if it was not reached."""
    possible = [call for call in reached if can_happen(fault.act, call)]
    return possible[fault.call - 1] if 0 < fault.call <= len(possible) else None


def is_possible() -> bool:
    """Whether this machine has what is needed."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    return release >= (5, 14) and hasattr(os, "pidfd_open")


def calls_of(log: Path) -> list[Reached]:
    """Returns the calls that were reached, in order; waits for their log."""
    until, failure = time.monotonic() + 30, Path(f"{log}.error")
    while not log.exists():
        assert not failure.exists(), failure.read_text()
        assert time.monotonic() < until, f"{log} was not written"
        time.sleep(0.002)
    return [Reached(*line) for line in json.loads(log.read_text())]


def arm(fault: Fault) -> None:
    """Has this happen to this process, from now on. It is not to start other programs."""
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    armed = os.getpid()
    watching = os.fork()
    if watching == 0:
        _watch(armed, shared, fault)
    _prctl(_PR_SET_PTRACER, watching)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    program = _filter()
    code = ctypes.create_string_buffer(b"".join(program))
    header = _Program(len(program), ctypes.cast(code, ctypes.c_void_p))
    # Nothing may be sent to the watching process from here on: sending would wait for it.
    listener = _syscall(_SECCOMP, _SET_MODE_FILTER, _FLAGS, ctypes.byref(header))
    shared[:4] = struct.pack("i", listener)


_SECCOMP, _PIDFD_GETFD = 317, 438
_SET_MODE_FILTER = 1
_TSYNC, _NEW_LISTENER, _TSYNC_ESRCH = 1, 8, 16
_FLAGS = _TSYNC | _NEW_LISTENER | _TSYNC_ESRCH
_PR_SET_NO_NEW_PRIVS, _PR_SET_PTRACER = 38, 0x59616D61
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def _syscall(*arguments: object) -> int:
    result: int = _LIBRARY.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _prctl(option: int, value: int) -> None:
    _LIBRARY.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


_LOAD, _IF_EQUAL, _IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_X86_64 = 0xC000003E
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _filter() -> list[bytes]:
    """Returns the program that the kernel runs before each call."""

    def line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    program = [
        line(_LOAD, _MACHINE_AT),
        line(_IF_EQUAL, _X86_64, 1),
        line(_RETURN, _ALLOW),
        line(_LOAD, _NUMBER_AT),
    ]
    for call in _BY_NUMBER.values():
        if call.flags is None:
            program += [line(_IF_EQUAL, call.number, 0, 1), line(_RETURN, _NOTIFY)]
            continue
        program += [
            line(_IF_EQUAL, call.number, 0, 4),
            line(_LOAD, _ARGUMENTS_AT + 8 * call.flags),
            line(_IF_SET, _CHANGING, 0, 1),
            line(_RETURN, _NOTIFY),
            line(_RETURN, _ALLOW),
        ]
    return [*program, line(_RETURN, _ALLOW)]


_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_GO_ON = 1


def _watch(armed: int, shared: mmap.mmap, fault: Fault) -> NoReturn:
    """Lives in the second process until the first one is gone."""
    status = 1
    try:
        os.closerange(0, min(4096, os.sysconf("SC_OPEN_MAX")))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.setpgid(0, 0)  # it outlives the job
        process = os.pidfd_open(armed)
        while not any(shared[:4]):
            time.sleep(0.0002)
        descriptor = struct.unpack("i", shared[:4])[0]
        listener = _syscall(_PIDFD_GETFD, process, descriptor, 0)
        reached = list(_Watcher(armed, listener, fault).reached())
        draft = f"{fault.log}~"
        Path(draft).write_text(json.dumps(reached))
        Path(draft).replace(fault.log)
        status = 0
    except BaseException:  # noqa: BLE001  it is seen nowhere else
        Path(f"{fault.log}.error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


class _Watcher:
    def __init__(self, armed: int, listener: int, fault: Fault) -> None:
        self._armed = armed
        self._listener = listener
        self._fault = fault
        self._of_armed = cache(self._is_thread)

    def reached(self) -> Iterator[Reached]:
        """Yields each call that counts, until the process is gone."""
        count, poll = 0, select.poll()
        poll.register(self._listener, select.POLLIN)
        while any(event & select.POLLIN for _, event in poll.poll()):
            notice = bytearray(80)
            try:
                fcntl.ioctl(self._listener, _RECEIVE, notice)
            except OSError:  # the thread was interrupted by a signal, or has been killed
                continue
            identity, thread, _, number = struct.unpack_from("QIIi", notice)
            arguments = struct.unpack_from("6Q", notice, 32)
            call = _BY_NUMBER[number]
            error = 0
            place = self._place(call, thread, arguments) if self._of_armed(thread) else ""
            if self._counts(call, place, arguments):
                reached = Reached(call.kind, place)
                yield reached
                if can_happen(self._fault.act, reached):
                    count += 1
                    error = self._happen(count)
            answer = struct.pack("QqiI", identity, 0, -error, 0 if error else _GO_ON)
            with suppress(OSError):  # it has been killed, or interrupted by a signal
                fcntl.ioctl(self._listener, _SEND, bytearray(answer))

    def _happen(self, count: int) -> int:
        """Does what happens at a call; returns the error that it is to fail with, or 0."""
        act, at = self._fault.act, self._fault.call
        if act == NO_SPACE:
            return errno.ENOSPC if 0 < at <= count else 0
        if count == at:
            if act == IO_ERROR:
                return errno.EIO
            _ACTS[act](self._armed)
        return 0

    def _counts(self, call: Call, place: str, arguments: tuple[int, ...]) -> bool:
        if place.startswith("socket:"):
            is_wakeup = call.kind == "send" and arguments[2] == 1  # of an event loop by itself
            return self._fault.sends and not is_wakeup
        return place.startswith(self._fault.folder)

    def _is_thread(self, thread: int) -> bool:
        return Path(f"/proc/{self._armed}/task/{thread}").exists()

    def _place(self, call: Call, thread: int, arguments: tuple[int, ...]) -> str:
        """Returns the path that a call is about; of a socket, that it is one."""
        name = "" if call.path is None else self._text(arguments[call.path])
        if name.startswith("/"):
            return name
        link = "cwd"
        if call.descriptor is not None:
            descriptor = ctypes.c_int(arguments[call.descriptor] & 0xFFFFFFFF).value
            link = f"fd/{descriptor}" if descriptor >= 0 else "cwd"
        try:
            base = os.readlink(f"/proc/{thread}/{link}")  # noqa: PTH115  a socket is no path
        except OSError:
            return ""
        return f"{base}/{name}" if name else base

    def _text(self, address: int) -> str:
        try:
            memory = os.open(f"/proc/{self._armed}/mem", os.O_RDONLY)
        except OSError:  # it has been killed
            return ""
        try:
            data = os.pread(memory, 4096 - address % 4096, address)
            if b"\0" not in data:
                data += os.pread(memory, 4096, address + len(data))
        except OSError:
            return ""
        finally:
            os.close(memory)
        return os.fsdecode(data.partition(b"\0")[0])


def _signal_job(number: signal.Signals) -> Callable[[int], None]:
    """Returns what signals a process and the group of its parent: ranks and their writers."""

    def act(process: int) -> None:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        parent = int(fields[1])
        os.killpg(os.getpgid(parent), number)
        with suppress(ProcessLookupError):
            os.kill(process, number)

    return act


_ACTS: dict[str, Callable[[int], None]] = {
    KILL: lambda process: os.kill(process, signal.SIGKILL),
    TERM: lambda process: os.kill(process, signal.SIGTERM),
    KILL_JOB: _signal_job(signal.SIGKILL),
    TERM_JOB: _signal_job(signal.SIGTERM),
}
