"""Runs shares of a plan on the nodes of a Ray cluster, and again elsewhere when one is lost.

Every node gets one process, so the limits of a process are those of the node. Ray is imported only
when it is needed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from msgspec import Struct, field

from ckptkit.core.errors import CkptkitError, EngineError, error_from_json
from ckptkit.plan.plan import Share
from ckptkit.storage.locations import current_directory

logger = logging.getLogger(__name__)
_QUEUED = 2  # shares that a worker has before it, so that it need not wait for the next
_LOSSES = 4  # workers that may be lost over one share before it is taken for the reason
_SHUN_SECONDS = 2.0  # for which a node gets no new worker, longer with each that was lost there
_MOST_CORES = 8  # that threads of one process can keep busy
_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 120.0  # without any worker at all
_ERROR = "error"

Values = Mapping[str, Any]
RunShare = Callable[[Share], Values]


OpenWorker = Callable[[int], AbstractContextManager[RunShare]]
"""Prepares a worker that has so many cores of its node, and gives what runs shares there."""


def run_on_ray(
    open_worker: OpenWorker,
    deal: Callable[[int], Sequence[Share]],
    take: Callable[[Share, Values], None],
    *,
    cores: int | None = None,
    memory_bytes: int | None = None,
) -> None:
    """Runs shares on all nodes of the cluster that `ray.init` finds, or of one on this machine.

    `open_worker`: is sent to every node. `deal`: returns the shares, for a number of nodes. `take`:
    receives the result of each share, once, in any order, in the calling thread. `cores` and
    `memory_bytes`: what a worker takes of its node, as Ray counts it; None for the cores of the
    node, eight at most, and to claim no memory.
    """
    ray = import_ray()
    with _connected(ray), ExitStack() as stack:
        crew = _RayCrew(ray, open_worker, cores, memory_bytes)
        stack.callback(crew.dismiss)
        crew.run(deal(len(crew.nodes())), take)


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "Ray is not installed",
            where="--engine ray",
            hint="run `pip install ray` on every node of the cluster",
        ) from error
    return ray


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    with _own_signals():
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"the Ray cluster cannot be reached: {_last_line(error)}",
                where="--engine ray",
                hint="see `ray status`; RAY_ADDRESS names the cluster, and without it the one of"
                " this machine is taken, or one started for this command",
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Puts back the handler that Ray replaces while it starts, which ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


class RayWorker:
    """The process of one node. Errors of ckptkit are returned as plain values."""

    def __init__(self, open_worker: OpenWorker, cores: int, folder: str) -> None:
        with suppress(OSError):  # then relative paths are not found, and an error says so
            os.chdir(folder)
        self._open_worker = open_worker
        self._cores = cores
        self._stack = ExitStack()
        self._run: RunShare | None = None

    def open(self) -> Values:
        """Prepares to run shares."""
        try:
            self._run = self._stack.enter_context(self._open_worker(self._cores))
        except CkptkitError as error:
            return {_ERROR: error.to_json()}
        return {}

    def run(self, share: Share) -> Values:
        """Runs a share; `open` went before."""
        assert self._run is not None  # noqa: S101  narrows the type
        try:
            return self._run(share)
        except CkptkitError as error:
            return {_ERROR: error.to_json()}


class _Hired(Struct, eq=False):
    actor: Any
    node: str
    host: str
    is_open: bool = False
    shares: list[Share] = field(default_factory=list)


class _RayCrew:
    """The workers of a cluster, one a node, and what each is working on."""

    def __init__(
        self, ray: Any, open_worker: OpenWorker, cores: int | None, memory_bytes: int | None
    ) -> None:
        self._ray = ray
        self._cores, self._memory_bytes = cores, memory_bytes
        self._open_worker = open_worker
        self._hired: dict[str, _Hired] = {}
        self._calls: dict[Any, tuple[_Hired, Share | None]] = {}
        self._waiting: deque[Share] = deque()
        self._losses: dict[Share | str, int] = {}
        self._shunned: dict[str, float] = {}

    def nodes(self) -> Sequence[tuple[str, int, str]]:
        """Returns identity, cores and name of every node that can work."""
        nodes = [
            (node["NodeID"], int(node["Resources"].get("CPU", 0)), node["NodeManagerHostname"])
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return [node for node in nodes if node[1]]

    def run(self, shares: Sequence[Share], take: Callable[[Share, Values], None]) -> None:
        self._waiting.extend(shares)
        alone_since = looked_at = -_PATIENCE_SECONDS
        while self._waiting or any(hired.shares for hired in self._hired.values()):
            now = time.monotonic()
            if now - looked_at >= _POLL_SECONDS:
                self._hire()
                looked_at = now
                if self._hired or alone_since < 0:
                    alone_since = now
                elif now - alone_since > _PATIENCE_SECONDS:
                    raise EngineError(
                        f"no node of the Ray cluster was there for {_PATIENCE_SECONDS:.0f} seconds",
                        where="--engine ray",
                        hint="see `ray status`; nodes with at least one CPU are used",
                    )
            self._deal()
            if not self._calls:
                time.sleep(_POLL_SECONDS)
                continue
            ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_POLL_SECONDS)
            for call in ready:
                self._settle(call, take)

    def dismiss(self) -> None:
        """Ends all workers, whatever they are doing."""
        for hired in self._hired.values():
            with suppress(Exception):  # it is gone already
                self._ray.kill(hired.actor)

    def _hire(self) -> None:
        """Starts a worker on every node that has none."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        now = time.monotonic()
        for node, cores, host in self.nodes():
            if node in self._hired or self._shunned.get(node, now) > now:
                continue
            taken = min(cores, self._cores or _MOST_CORES)
            options: dict[str, Any] = {
                "num_cpus": taken,
                "max_restarts": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            if self._memory_bytes is not None:
                options["memory"] = self._memory_bytes
            actor = self._ray.remote(RayWorker).options(**options)
            worker = actor.remote(self._open_worker, taken, str(current_directory() or ""))
            hired = self._hired[node] = _Hired(worker, node, host)
            self._calls[worker.open.remote()] = (hired, None)

    def _deal(self) -> None:
        # Fewest first: the last shares of all should not wait behind one another.
        for length in range(_QUEUED):
            for hired in self._hired.values():
                if self._waiting and hired.is_open and len(hired.shares) == length:
                    share = self._waiting.popleft()
                    hired.shares.append(share)
                    self._calls[hired.actor.run.remote(share)] = (hired, share)

    def _settle(self, call: Any, take: Callable[[Share, Values], None]) -> None:
        assignment = self._calls.pop(call, None)
        if assignment is None:
            return  # it was lost with another call to the same worker
        hired, share = assignment
        try:
            answer: Values = self._ray.get(call)
        except self._ray.exceptions.RayTaskError:
            raise  # a bug: errors of ckptkit are returned
        except self._ray.exceptions.RayError as error:
            self._lose(hired, error)
            return
        if _ERROR in answer:
            raise error_from_json(answer[_ERROR]).located(f"node {hired.host}")
        if share is None:
            hired.is_open = True
            logger.info("a worker on %s is ready", hired.host)
        else:
            hired.shares.remove(share)
            take(share, answer)

    def _lose(self, hired: _Hired, error: Exception) -> None:
        """Gives the shares of a lost worker to others."""
        logger.warning("a worker on %s was lost: %s", hired.host, type(error).__name__)
        del self._hired[hired.node]
        self._calls = {call: to for call, to in self._calls.items() if to[0] is not hired}
        with suppress(Exception):  # it is gone, as far as Ray knows
            self._ray.kill(hired.actor)
        for share in reversed(hired.shares):
            self._waiting.appendleft(share)
        losses = self._losses[hired.node] = self._losses.get(hired.node, 0) + 1
        # A node that is gone counts as alive for a while.
        self._shunned[hired.node] = time.monotonic() + losses * _SHUN_SECONDS
        if not hired.shares and (self._hired or losses < _LOSSES):
            return
        if hired.shares:
            losses = self._losses[hired.shares[0]] = self._losses.get(hired.shares[0], 0) + 1
        if losses < _LOSSES:
            return
        doing = "worked on the same part" if hired.shares else "prepared themselves"
        raise EngineError(
            f"{_LOSSES} workers were lost while they {doing}, the last on {hired.host}:"
            f" {_last_line(error)}",
            where="--engine ray",
            hint="all nodes need the same ckptkit; where a machine has too little memory, pass"
            " --memory-limit to have it reserved; Ray's logs are in /tmp/ray/session_latest",
        )


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
