"""A small HTTP proxy that counts what passes through it, and misbehaves where it is told to."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

_BLOCK = 64 << 10
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


@dataclass(frozen=True)
class Seen:
    """A request that came in, and what went back."""

    method: str  # of the request
    path: str  # with the query
    headers: dict[str, str]  # of the request, names in lower case
    status: int  # of the answer; 0 where none was given
    received: int  # bytes of the request's body
    sent: int  # bytes of the answer's body that went out


@dataclass
class Fault:
    """What goes wrong with the requests that match."""

    pattern: str  # searched in `METHOD /bucket/key?query`
    times: int | None = 1  # how many requests it is for; None for all
    status: int = 0  # answered instead of asking the server; 0 to ask it
    code: str = "InternalError"  # S3's name of the error, for the body
    message: str = "injected"  # what the body says besides
    headers: dict[str, str] = field(default_factory=dict)  # of that answer
    cut_after: int | None = None  # bytes of the body after which the connection is closed, or None
    wait: threading.Event | None = None  # holds the request back until it is set
    seconds: float = 0.0  # how long the answer is held back
    lose_answer: bool = False  # whether the server is asked, and the connection then closed
    before: Callable[[], None] | None = None  # called before the server is asked
    hide: str = ""  # keys that match are left out of listings
    met: int = 0


class Proxy:
    """The proxy, which runs in threads of this process until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._faults: list[Fault] = []
        handler = type("Handler", (_Handler,), {"proxy": self, "server_address": (host, port)})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def log(self) -> list[Seen]:
        """What came in since the last reset, in the order of the answers' ends."""
        with self._lock:
            return list(self._seen)

    @property
    def requests(self) -> Counter[str]:
        """How many requests came in, by method."""
        return Counter(one.method for one in self.log)

    @property
    def sent(self) -> Counter[str]:
        """Bytes of answers' bodies, by method: `sent["GET"]` is what was read."""
        return self._total("sent")

    @property
    def received(self) -> Counter[str]:
        """Bytes of requests' bodies, by method."""
        return self._total("received")

    def add(self, fault: Fault) -> Fault:
        """Has something go wrong from now on; `fault.met` counts how often it did."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def fail(
        self, pattern: str, status: int = 500, code: str = "InternalError", times: int | None = 1
    ) -> Fault:
        return self.add(Fault(pattern, times, status=status, code=code))

    def cut(self, pattern: str, after: int, times: int | None = 1) -> Fault:
        return self.add(Fault(pattern, times, cut_after=after))

    def slow(self, pattern: str, seconds: float, times: int | None = None) -> Fault:
        return self.add(Fault(pattern, times, seconds=seconds))

    def hide(self, keys: str) -> Fault:
        """Leaves keys that match out of all listings, as a store that lags does."""
        return self.add(Fault(r"^GET /[^?]*\?.*list-type", None, hide=keys))

    def reset(self) -> None:
        """Behaves from now on, and counts from zero."""
        with self._lock:
            for fault in self._faults:
                if fault.wait is not None:
                    fault.wait.set()
            self._faults.clear()
            self._seen.clear()

    def close(self) -> None:
        self.reset()
        self._server.shutdown()
        self._thread.join()
        self._server.close_all()

    def note(self, seen: Seen) -> None:
        with self._lock:
            self._seen.append(seen)

    def faults_of(self, request: str) -> list[Fault]:
        """Returns what is to go wrong with a request, and counts it as done."""
        with self._lock:
            found = [
                fault
                for fault in self._faults
                if (fault.times is None or fault.met < fault.times)
                and re.search(fault.pattern, request)
            ]
            for fault in found:
                fault.met += 1
            return found

    def _total(self, name: str) -> Counter[str]:
        totals: Counter[str] = Counter()
        for one in self.log:
            totals[one.method] += getattr(one, name)
        return totals


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is nothing to report."""

    def close_all(self) -> None:
        self.server_close()
        for one in list(self._open):
            with suppress(OSError):  # closed by its own thread meanwhile
                one.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    proxy: ClassVar[Proxy]
    server_address: ClassVar[tuple[str, int]]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
        """Says nothing: the log is kept by the proxy."""

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self._body()
        if len(body) < int(self.headers.get("Content-Length", 0)):
            self.close_connection = True  # its client is gone, and no store does half a request
            return
        faults = self.proxy.faults_of(f"{self.command} {self.path}")
        status = sent = 0
        try:
            status, sent = self._answer(body, faults)
        except OSError:
            self.close_connection = True
        finally:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.proxy.note(Seen(self.command, self.path, headers, status, len(body), sent))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _answer(self, body: bytes, faults: list[Fault]) -> tuple[int, int]:
        for fault in faults:
            _endure(fault)
            if fault.status:
                return self._refuse(fault)
        upstream = http.client.HTTPConnection(*self.server_address, timeout=120)
        try:
            headers = {n: v for n, v in self.headers.items() if n.lower() not in _HOP_BY_HOP}
            headers.pop("Expect", None)
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            if any(fault.lose_answer for fault in faults):
                answer.read()
                self.close_connection = True
                return 0, 0
            return self._pass_on(answer, faults)
        finally:
            upstream.close()

    def _refuse(self, fault: Fault) -> tuple[int, int]:
        text = f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>"
        data = b"" if self.command == "HEAD" else text.encode()
        self.send_response(fault.status)
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return fault.status, len(data)

    def _pass_on(self, answer: http.client.HTTPResponse, faults: list[Fault]) -> tuple[int, int]:
        hidden = [fault.hide for fault in faults if fault.hide]
        cut = min((f.cut_after for f in faults if f.cut_after is not None), default=None)
        length = answer.getheader("Content-Length")
        whole = _without_keys(answer.read(), hidden) if hidden or length is None else None
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        if answer.status not in {204, 304}:
            self.send_header("Content-Length", str(length if whole is None else len(whole)))
        self.end_headers()
        if self.command == "HEAD":
            return answer.status, 0
        if whole is not None:
            self.wfile.write(whole)
            return answer.status, len(whole)
        return answer.status, self._copy(answer, cut)

    def _copy(self, answer: http.client.HTTPResponse, cut: int | None) -> int:
        sent = 0
        while block := answer.read(_BLOCK if cut is None else min(_BLOCK, cut - sent)):
            self.wfile.write(block)
            sent += len(block)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
        return sent


def _endure(fault: Fault) -> None:
    if fault.before is not None:
        fault.before()
    if fault.wait is not None:
        fault.wait.wait(60)
    if fault.seconds:
        threading.Event().wait(fault.seconds)


def _without_keys(listing: bytes, hidden: list[str]) -> bytes:
    def judged(entry: re.Match[bytes]) -> bytes:
        key = _KEY.search(entry.group())
        name = key.group(1).decode() if key else ""
        return b"" if any(re.search(pattern, name) for pattern in hidden) else entry.group()

    return _ENTRY.sub(judged, listing)
