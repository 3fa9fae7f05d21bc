"""What a watch has done, for Prometheus to collect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ckptkit.core.errors import OutputError
from ckptkit.hub.watch.watch import Tally, WatchEvent
from ckptkit.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "ckptkit_watch_"
_PATH = "/metrics"
_PHASES = ("idle", "building", "pushing", "retrying")
_POLL_SECONDS = 0.1
_Labels = Mapping[str, str]


class WatchMetrics:
    """Listens to a watch, and says what came of it; both from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally = Tally()
        self._started = time.time()

    def listen(self, event: WatchEvent) -> None:
        with self._lock:
            self._tally.take(event, time.time())

    @property
    def tally(self) -> Tally:
        """What the events add up to so far."""
        with self._lock:
            found = self._tally
            return replace(found, failures=dict(found.failures), retries=dict(found.retries))

    def text(self) -> str:
        """Returns all of it in the text format of Prometheus.

        Source:
            https://prometheus.io/docs/instrumenting/exposition_formats/, "Text-based format".
        """
        return "".join(f"{line}\n" for line in _lines(self.tally, self._started))


def _lines(tally: Tally, started: float) -> Iterator[str]:
    info = {"version": __version__}
    yield from _family("info", "gauge", "The version that runs.", [(info, 1)])
    yield from _one("start_time_seconds", "gauge", "When the watch started.", started)
    yield from _one("pushed_steps_total", "counter", "Steps that were pushed.", tally.pushed)
    failures = [({"code": code}, count) for code, count in sorted(tally.failures.items())]
    what = "Steps that could not be pushed as they are, by error."
    yield from _family("failed_steps_total", "counter", what, failures)
    retries = [({"code": code}, count) for code, count in sorted(tally.retries.items())]
    yield from _family("retries_total", "counter", "Tries that failed, by error.", retries)
    what = "Bytes that were uploaded."
    yield from _one("uploaded_bytes_total", "counter", what, tally.uploaded_bytes)
    what = "Time that the pushed steps took to build, verify and push."
    yield from _one("push_seconds_total", "counter", what, tally.push_seconds)
    what = "Steps that were removed from the run."
    yield from _one("pruned_steps_total", "counter", what, tally.pruned)
    yield from _one("waiting_steps", "gauge", "Steps that wait for their push.", tally.waiting)
    what = "The newest complete step of the run."
    yield from _one("newest_step", "gauge", what, tally.newest_step)
    yield from _one("last_pushed_step", "gauge", "The step pushed last.", tally.last_step)
    what = "When that was."
    yield from _one("last_push_time_seconds", "gauge", what, tally.last_unix_seconds)
    phases = [({"phase": phase}, int(phase == tally.phase)) for phase in _PHASES]
    yield from _family("phase", "gauge", "What the watch does: 1 for that phase.", phases)


def _one(name: str, kind: str, what: str, value: float | None) -> Iterator[str]:
    yield from _family(name, kind, what, [] if value is None else [({}, value)])


def _family(
    name: str, kind: str, what: str, values: Sequence[tuple[_Labels, float]]
) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {what}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    for labels, value in values:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{_PREFIX}{name}{'{' + inside + '}' if inside else ''} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class MetricsServer:
    """Serves `/metrics` until it is closed."""

    def __init__(self, metrics: WatchMetrics, port: int, host: str = "127.0.0.1") -> None:
        """Binds the port, and serves in a thread of its own.

        Args:
            metrics: What to serve.
            port: Of TCP; 0 takes a free one.
            host: The address to listen at; only this machine can ask at the default.
        """
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(metrics))
        except (OSError, OverflowError) as error:
            raise OutputError(
                f"port {port} of {host} cannot be listened at:"
                f" {getattr(error, 'strerror', None) or error}",
                where="--metrics-port",
                hint="name another port, or 0 for any that is free",
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="ckptkit-metrics"
        )
        self._thread.daemon = True
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}{_PATH}"

    def close(self) -> None:
        """Ends the thread, and gives the port back."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(metrics: WatchMetrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "ckptkit"
        sys_version = ""
        timeout = 10  # seconds that a client may take to ask

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: Any) -> None:  # every scrape is no news
            return

        def _answer(self, *, with_body: bool) -> None:
            found = self.path.partition("?")[0] == _PATH
            body = (metrics.text() if found else f"look at {_PATH}\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    return Handler
