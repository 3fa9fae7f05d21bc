"""The events of a watch, their totals, and the totals as metrics for Prometheus.

The metrics are few and have no histograms. With `prometheus_client`, `--metrics-port` would need an
extra that existing installations lack.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckptkit.core.errors import OutputError
from ckptkit.version import __version__

EventName = Literal[
    "serving",  # the address of the metrics
    "started",  # the watch has the lock of the run
    "waiting",  # another watch has the lock, or a step is still written to
    "seen",  # a committed step is to be pushed
    "building",  # its model or adapter is being built
    "pushing",  # what was built is verified and is being uploaded
    "progress",  # in JSON lines: how far a build or an upload is, now and then
    "pushed",  # commit and tag are on the Hub
    "passed",  # a step is not pushed, and need not be
    "failed",  # a step cannot be pushed; the watch continues with others
    "retrying",  # the network, the Hub or a disk failed; another attempt follows
    "pruned",  # steps were removed from the run
    "note",  # what was chosen
    "warning",
    "stopped",  # the last event
]


class WatchEvent(Struct, frozen=True):
    """An event of a watch.

    Attributes:
        name: Its kind.
        step: The step concerned, if there is one.
        facts: Further fields, as JSON values.
    """

    name: EventName
    step: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        step = {} if self.step is None else {"step": self.step}
        return {"event": self.name} | step | dict(self.facts)


WatchListener = Callable[[WatchEvent], None]


class WatchTotals(Struct):
    """The totals of the events of a watch.

    Attributes:
        pushed: Steps that were pushed since the watch started.
        failures: Steps that could not be pushed, by the code of the error.
        retries: Attempts that failed and were repeated, by the code of the error.
        pruned: Steps that were removed from the run.
        uploaded_bytes: Bytes that were uploaded.
        push_seconds: Time to build, verify and push the pushed steps.
        newest_step: The newest complete step of the run; None where none was seen.
        last_step: The step that was pushed last.
        last_unix_seconds: When it was pushed.
        waiting: Steps that wait for their push, including the one in progress.
        phase: What the watch does now.
        step: The step in progress.
    """

    pushed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    pruned: int = 0
    uploaded_bytes: int = 0
    push_seconds: float = 0.0
    newest_step: int | None = None
    last_step: int | None = None
    last_unix_seconds: float | None = None
    waiting: int = 0
    phase: str = "idle"
    step: int | None = None

    def add(self, event: WatchEvent, now: float) -> None:
        """Adds an event that happened at a time in seconds since the epoch."""
        facts = event.facts
        self.waiting = facts.get("waiting", self.waiting)
        self.newest_step = facts.get("newest", self.newest_step)
        match event.name:
            case "building" | "pushing":
                self.phase, self.step = event.name, event.step
            case "pushed":
                self.pushed += 1
                self.uploaded_bytes += facts.get("uploaded_bytes", 0)
                self.push_seconds += facts.get("seconds", 0.0)
                self.last_step, self.last_unix_seconds = event.step, now
            case "failed" | "retrying":
                counts = self.failures if event.name == "failed" else self.retries
                code = str(facts["error"]["code"])
                counts[code] = counts.get(code, 0) + 1
                self.phase = event.name  # a failed step ends its phase below
            case "pruned":
                self.pruned += len(facts["steps"])
            case _:
                pass
        if event.name in {"pushed", "failed", "passed"}:
            self.waiting = max(self.waiting - 1, 0)
        if event.name in {"pushed", "failed", "passed", "stopped"}:
            self.phase, self.step = "idle", None


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "ckptkit_watch_"
_PATH = "/metrics"
_PHASES = ("idle", "building", "pushing", "retrying")
_POLL_SECONDS = 0.1


class WatchMetrics:
    """Adds up the events of a watch; all methods can be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = WatchTotals()
        self._started = time.time()

    def listen(self, event: WatchEvent) -> None:
        with self._lock:
            self._totals.add(event, time.time())

    @property
    def totals(self) -> WatchTotals:
        """The totals so far."""
        with self._lock:
            totals = self._totals
            return replace(totals, failures=dict(totals.failures), retries=dict(totals.retries))

    def text(self) -> str:
        """Returns the metrics in the text format of Prometheus.

        Source:
            https://prometheus.io/docs/instrumenting/exposition_formats/, "Text-based format".
        """
        return "".join(f"{line}\n" for line in _lines(self.totals, self._started))


def _lines(totals: WatchTotals, started: float) -> Iterator[str]:
    failures, retries = sorted(totals.failures.items()), sorted(totals.retries.items())
    info = {f'{{version="{__version__}"}}': 1}
    yield from _metric("info", "gauge", "The version that runs.", info)
    yield from _metric("start_time_seconds", "gauge", "When the watch started.", started)
    yield from _metric("pushed_steps_total", "counter", "Steps that were pushed.", totals.pushed)
    what = "Steps that could not be pushed as they are, by error."
    yield from _metric("failed_steps_total", "counter", what, _by_code(failures))
    what = "Tries that failed, by error."
    yield from _metric("retries_total", "counter", what, _by_code(retries))
    what = "Bytes that were uploaded."
    yield from _metric("uploaded_bytes_total", "counter", what, totals.uploaded_bytes)
    what = "Time that the pushed steps took to build, verify and push."
    yield from _metric("push_seconds_total", "counter", what, totals.push_seconds)
    what = "Steps that were removed from the run."
    yield from _metric("pruned_steps_total", "counter", what, totals.pruned)
    yield from _metric("waiting_steps", "gauge", "Steps that wait for their push.", totals.waiting)
    what = "The newest complete step of the run."
    yield from _metric("newest_step", "gauge", what, totals.newest_step)
    yield from _metric("last_pushed_step", "gauge", "The step pushed last.", totals.last_step)
    what = "When that was."
    yield from _metric("last_push_time_seconds", "gauge", what, totals.last_unix_seconds)
    phases = {f'{{phase="{phase}"}}': int(phase == totals.phase) for phase in _PHASES}
    yield from _metric("phase", "gauge", "What the watch does: 1 for that phase.", phases)


def _by_code(counts: list[tuple[str, int]]) -> dict[str, float]:
    # The codes of errors are lower-case words with hyphens: nothing in them needs an escape.
    return {f'{{code="{code}"}}': count for code, count in counts}


def _metric(
    name: str, kind: str, what: str, values: Mapping[str, float] | float | None
) -> Iterator[str]:
    """Yields the lines of a metric: one value, values by their labels, or None for no value."""
    yield f"# HELP {_PREFIX}{name} {what}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    labelled = values if isinstance(values, Mapping) else {} if values is None else {"": values}
    for labels, value in labelled.items():
        yield f"{_PREFIX}{name}{labels} {value!r}"


class MetricsServer:
    """Serves `/metrics` until it is closed."""

    def __init__(self, metrics: WatchMetrics, port: int, host: str) -> None:
        """Binds the port, and serves in a thread of its own.

        Args:
            metrics: The metrics to serve.
            port: Of TCP; 0 takes a free one.
            host: The address to listen on.
        """
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(metrics))
        except (OSError, OverflowError) as error:
            raise OutputError(
                f"cannot listen on port {port} of {host}:"
                f" {getattr(error, 'strerror', None) or error}",
                where="--metrics-port",
                hint="pass another port, or 0 for any free one",
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
        """Ends the thread, and frees the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(metrics: WatchMetrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "ckptkit"
        sys_version = ""
        timeout = 10  # seconds that a client may take to send its request

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: Any) -> None:  # the default writes each request to stderr
            return

        def _answer(self, *, with_body: bool) -> None:
            is_metrics = self.path.partition("?")[0] == _PATH
            body = (metrics.text() if is_metrics else f"look at {_PATH}\n").encode()
            self.send_response(200 if is_metrics else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    return Handler
