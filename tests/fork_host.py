"""A process that has imported what is needed, and forks a child for each call that it is asked for.

Started as a program, this module is that process: it imports the modules that are its arguments,
calls the function behind `--prepare=`, and listens at the socket behind `--listen=`. A request is
the size of a JSON document with descriptors (which become the child's 0, 1, 2 and so on), and the
document. Its answers are lines: `[child]`, and `[child, status]` once that has ended. A child lives
no longer than the connection that asked for it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn, Self

ROOT = Path(__file__).resolve().parents[1]
MOST_STREAMS = 8
END_SECONDS = 30.0
Function = Callable[..., Any]


class Child:
    """A process that was forked for a call."""

    def __init__(self, host: ForkHost, answer: Path) -> None:
        self.pid = 0  # until it is known
        self.ended: int | None = None
        self._host = host
        self._answer = answer

    @property
    def status(self) -> int | None:
        """Its status once it has ended; minus the signal that ended it."""
        return self.wait(0)

    def wait(self, seconds: float | None = None) -> int | None:
        """Returns the status, None if it has not ended by then."""
        until = None if seconds is None else time.monotonic() + seconds
        self._host.listen(lambda: self.ended is not None, until)
        return self.ended

    def signal(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            if self.status is None:
                os.kill(self.pid, number)

    def result(self) -> Any:
        """Returns what its function has returned, which has to be JSON."""
        log = self._answer.with_suffix(".log")
        assert self.wait() == 0, log.read_text(errors="replace")[-16_000:]
        return json.loads(self._answer.read_text())


class ForkHost:
    """That process. Functions are those of modules that it can import; arguments are JSON."""

    def __init__(self, *modules: str, prepare: Function | None = None, **environment: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="forks-")
        self.folder = Path(self._scratch.name)
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.place = self.folder / "socket"
        prepared = [] if prepare is None else [f"--prepare={_name_of(prepare)}"]
        words = [*prepared, f"--listen={self.place}", *modules]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_host", *words],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the process that forks has ended"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(self.place))
        self._unread = b""
        self._lock = threading.RLock()
        self._started = 0
        self._children: dict[int, Child] = {}  # by number, those that have not ended
        self._asked: Child | None = None
        self.newest: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it and what it has forked."""
        self._socket.close()
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._scratch.cleanup()

    def start(
        self,
        function: Function,
        *arguments: Any,
        log: Path | None = None,
        streams: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a child, which appends what it prints to the log where it has no streams."""
        with self._lock, ExitStack() as stack:
            self._started += 1
            answer = self.folder / str(self._started)
            if not streams:
                file = stack.enter_context((log or answer.with_suffix(".log")).open("ab"))
                null = stack.enter_context(Path(os.devnull).open("rb"))
                streams = null.fileno(), file.fileno(), file.fileno()
            words = {"function": _name_of(function), "arguments": arguments, "answer": str(answer)}
            data = json.dumps({**words, "environment": environment and {**environment}}).encode()
            self._asked = child = Child(self, answer)
            socket.send_fds(self._socket, [len(data).to_bytes(8, "little")], streams)
            self._socket.sendall(data)
            self.listen(lambda: child.pid > 0)
            self.newest = child
            return child

    def run(self, function: Function, *arguments: Any, log: Path | None = None) -> int:
        """Returns the status of a child once it has ended."""
        status = self.start(function, *arguments, log=log).wait()
        assert status is not None
        return status

    def call(self, function: Function, *arguments: Any) -> Any:
        """Returns what a function returns in a child, which has to be JSON."""
        return self.start(function, *arguments).result()

    def capture(
        self,
        function: Function,
        *arguments: Any,
        given: str = "",
        streams: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        limit_seconds: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Returns what a child prints; `given` is its standard input, `streams` come behind it."""
        with ExitStack() as stack:
            options: Any = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
            files = [stack.enter_context(tempfile.TemporaryFile(**options)) for _ in range(3)]
            files[0].write(given)
            files[0].seek(0)
            streams = (*(file.fileno() for file in files), *streams)
            child = self.start(function, *arguments, streams=streams, environment=environment)
            status = child.wait(limit_seconds)
            if status is None:
                child.signal()
                raise subprocess.TimeoutExpired([function.__name__, *arguments], limit_seconds or 0)
            texts = [(file.seek(0), file.read())[1] for file in files[1:]]
            return subprocess.CompletedProcess([*arguments], status, *texts)

    def listen(self, is_done: Callable[[], bool], until: float | None = None) -> None:
        """Takes answers until something is so, or it is too late. Several threads may listen."""
        while True:
            with self._lock:
                while not is_done() and select.select([self._socket], [], [], 0)[0]:
                    data = self._socket.recv(1 << 16)
                    assert data, "the process that forks has ended"
                    *lines, self._unread = (self._unread + data).split(b"\n")
                    for line in lines:
                        self._note(*json.loads(line))
                if is_done() or (until is not None and time.monotonic() >= until):
                    return
            left = 0.1 if until is None else min(0.1, max(0.0, until - time.monotonic()))
            select.select([self._socket], [], [], left)

    def _note(self, pid: int, status: int | None = None) -> None:
        if status is None:
            assert self._asked is not None
            self._asked.pid, self._children[pid] = pid, self._asked
        else:  # which may be in the same message, where a child ends at once
            self._children.pop(pid).ended = status


def _name_of(function: Function) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _named(name: str) -> Function:
    module, _, function = name.partition(":")
    found: Function = getattr(importlib.import_module(module), function)
    return found


def live(call: Callable[[], object]) -> NoReturn:
    """Makes a call in a fork, and ends that as any program ends."""
    status = 1
    try:
        answer = call()
        status = answer if isinstance(answer, int) else 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  shown, and visible in the status
        traceback.print_exc()
    finally:
        # The teardown of gloo's threads, which may abort, is left out by os._exit.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                output.flush()
        os._exit(status)


def forked(call: Callable[[], object]) -> int:
    """Returns the number of a fork that makes a call."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        live(call)
    return child


def freeze() -> None:
    """Makes ready for forks: no lock may be held by another thread."""
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # no fork looks through what its parent made


def _answer(request: Mapping[str, Any], streams: Sequence[int]) -> object:
    """Does in a child what was asked for."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request["environment"] is not None:
        os.environ.clear()
        os.environ |= request["environment"]
        tempfile.tempdir = None  # this process may have found one by an environment of another test
    answer = _named(request["function"])(*request["arguments"])
    if not isinstance(answer, int | None):
        Path(request["answer"]).write_text(json.dumps(answer))
    return answer


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._children: dict[int, int] = {}  # by number, the descriptor of who has asked
        self._poll = select.poll()
        self._wake, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Does what is asked for until the input ends; what was forked ends then."""
        for descriptor in (0, self._wake, self._listener.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == 0:
                    self._kill({*self._clients})
                    return
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                elif descriptor == self._listener.fileno():
                    client, _ = self._listener.accept()
                    self._clients[client.fileno()] = client
                    self._poll.register(client, select.POLLIN | select.POLLHUP)
                else:
                    self._take(descriptor)
            while self._children:
                child, status = os.waitpid(-1, os.WNOHANG)
                if not child:
                    break
                self._say(self._children.pop(child), child, os.waitstatus_to_exitcode(status))

    def _take(self, descriptor: int) -> None:
        """Starts what a client asks for; one that has gone takes its children along."""
        client = self._clients[descriptor]
        size, streams, _, _ = socket.recv_fds(client, 8, MOST_STREAMS)
        if not size:
            self._kill({descriptor})
            self._poll.unregister(descriptor)
            self._clients.pop(descriptor).close()
            return
        data = b""
        while len(data) < int.from_bytes(size, "little"):
            data += client.recv(int.from_bytes(size, "little") - len(data))
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._listener, *self._clients.values()):
                os.close(other.detach())
            live(lambda: _answer(json.loads(data), streams))
        self._children[child] = descriptor
        for stream in streams:
            os.close(stream)
        self._say(descriptor, child)

    def _say(self, descriptor: int, *answer: int) -> None:
        with suppress(KeyError, OSError):  # who has asked is gone
            self._clients[descriptor].sendall(json.dumps(answer).encode() + b"\n")

    def _kill(self, clients: set[int]) -> None:
        for child, descriptor in self._children.items():
            if descriptor in clients:
                os.kill(child, signal.SIGKILL)
                self._children[child] = -1  # the next client may have the same number


def _main() -> None:
    place = ""
    for word in sys.argv[1:]:
        option, _, value = word.partition("=")
        if option == "--prepare":
            _named(value)()
        elif option == "--listen":
            place = value
        else:
            importlib.import_module(word)
    if "s3fs" in sys.modules:
        from tests.s3_client import prepare_clients

        prepare_clients()
    freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        os.write(1, b"ready\n")
        _Server(listener).serve()
    os._exit(0)


if __name__ == "__main__":
    _main()
