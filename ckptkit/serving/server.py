"""The server: an event loop in a thread of its own, which takes requests and sends bodies.

aiohttp parses requests. Threads make the parts of bodies; all clients share so many parts as fit
into memory, and the client that waits longest gets the next one. A body that cannot be continued is
broken off by closing the connection: the client has then received less than the announced length.

A connection needs no key. It is idle unless bytes of an object are sent; idle ones are closed in
time, and earlier where others need the room.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import posixpath
import re
import secrets
import socket
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from msgspec import Struct

from ckptkit.core.arrays import aligned_buffer
from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from ckptkit.core.text import Closing
from ckptkit.core.threads import Throttle, WorkerThread
from ckptkit.formats.discovery import parse_step
from ckptkit.serving.planned_folder import PART_BYTES, TEMPORARY, PlannedFile, PlannedFolder
from ckptkit.serving.plans import ServePlan
from ckptkit.serving.s3_api import (
    BUCKET,
    Answer,
    S3Error,
    answer_error,
    answer_request,
    parse_request,
)
from ckptkit.serving.signatures import AccessKeys, check_signature, make_keys
from ckptkit.storage.places import is_url, local_path

logger = logging.getLogger(__name__)
STALLED_SECONDS = 60.0
"""A client that takes nothing for so long loses its connection, even if no other one waits."""
PATIENCE_SECONDS = 20.0
"""What a client may take over one part while others wait: 0.4 MB/s."""
IDLE_SECONDS = 20.0
"""A connection that has no bytes of an object to send is closed so long after its last request."""
_MOST_CONNECTIONS = 1024
_DESCRIPTORS = 4096  # of the process, where its hard limit allows it
_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 16  # before others are closed to make room
_UNTAKEN_BYTES = 64 << 10
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
_QUIET_SECONDS = 60.0  # between two messages about connections that cannot be accepted
_WRITE_BYTES = 256 << 10  # what one call copies where the client is slower
_MOST_PORT = 65_535
_ACCESS_KEY = re.compile(r"[A-Za-z0-9._+=-]{1,128}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_DEFAULT_NAME = "model"
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # of documentation


class ServeRequest(Struct, frozen=True):
    """What is served, where, and to whom.

    Attributes:
        plan: What is planned for each source.
        host: An address to listen on, or a name that has one.
        port: Of TCP; 0 takes a free one.
        keys: What requests are signed with; None for requests without a signature.
        name: The prefix of all keys; None for the name of the source.
        follow: Whether the source is a run whose newest step is served.
        poll_seconds: How often a run is looked at; None for a default by its storage.
    """

    plan: ServePlan
    host: str = "127.0.0.1"
    port: int = 0
    keys: AccessKeys | None = None
    name: str | None = None
    follow: bool = False
    poll_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is not a name of letters, digits, dots, hyphens and underscores",
                where="--name",
                hint="pass a name such as --name llama",
            )

    @property
    def prefix(self) -> str:
        """The prefix of all keys, without a slash at its end."""
        if self.name is not None:
            return self.name
        src = self.plan.job.src
        path = str(src) if is_url(src) else local_path(src).absolute().as_posix()
        name = posixpath.basename(path.rstrip("/"))
        if parse_step(name) is not None and not self.follow:
            run = posixpath.basename(posixpath.dirname(path.rstrip("/")))
            name = f"{run}-{name}" if run else name
        return name if _NAME.fullmatch(name) else _DEFAULT_NAME


def choose_keys(
    host: str, port: int, access_key: str | None, secret_key: str | None, *, auth: bool
) -> AccessKeys | None:
    """Checks the options of a server, and returns the keys, which may be random, or none."""
    if not 0 <= port <= _MOST_PORT:
        raise UsageError(
            f"{port} is not a port from 0 to {_MOST_PORT:,}",
            where="--port",
            hint="leave it out for any free one",
        )
    if not auth and (access_key or secret_key):
        raise UsageError(
            "cannot be combined with keys, which sign requests",
            where="--no-auth",
            hint="leave one of the two out",
        )
    if not auth and not is_loopback(host):
        raise UsageError(
            f"serves everything to every machine that reaches {host}",
            where="--no-auth",
            hint="leave out --no-auth, or --host",
        )
    if not auth:
        return None
    if access_key is None and secret_key is None:
        return make_keys()
    if not (access_key and secret_key):
        raise UsageError(
            "--access-key and --secret-key belong together, and neither may be empty",
            where="--access-key" if access_key else "--secret-key",
            hint="pass both, or none for random ones",
        )
    if not _ACCESS_KEY.fullmatch(access_key):
        raise UsageError(
            f"{access_key!r:.100} has characters that a signature cannot have in it",
            where="--access-key",
            hint="pass letters, digits and any of . _ - + =",
        )
    return AccessKeys(access_key, secret_key)


def is_loopback(host: str) -> bool:
    """Returns whether an address, or the name `localhost`, is of this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _show_address(name: str) -> str:
    """Returns an address in a URL; for that of all interfaces, one that other machines reach."""
    if ipaddress.ip_address(name).is_unspecified:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
                unconnected.connect((_OUTSIDE[family], 9))  # nothing is sent for it
                name = str(unconnected.getsockname()[0])
        except OSError:  # there is no network
            name = "::1" if family is socket.AF_INET6 else "127.0.0.1"
    return f"[{name}]" if ":" in name else name


def choose_most_connections() -> int:
    """Raises the limit of open files, and returns how many connections leave half for files."""
    try:
        import resource  # not there on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):
        return _MOST_CONNECTIONS
    unlimited = resource.RLIM_INFINITY
    wanted = _DESCRIPTORS if hard == unlimited else min(hard, _DESCRIPTORS)
    if soft != unlimited and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return _MOST_CONNECTIONS if soft == unlimited else max(1, min(_MOST_CONNECTIONS, soft // 2))


class ServedBucket(Closing):
    """The folders that are served at the moment, by their prefixes; for several threads.

    Attributes:
        folders: By prefix, without a slash at its end.
        objects: Their files by key, in the order of keys.
    """

    def __init__(self) -> None:
        self.folders: Mapping[str, PlannedFolder] = {}
        self.objects: Mapping[str, PlannedFile] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Removes all folders, and what is added later."""
        self._is_closed = True
        for name in self.folders:
            self.put(name, None)

    def put(self, name: str, folder: PlannedFolder | None) -> None:
        """Exchanges a folder; the one of before is closed once nothing reads it any more."""
        with self._lock:
            folders = dict(self.folders)
            before = folders.pop(name, None)
            if self._is_closed and folder is not None:
                folder.close()
            elif folder is not None:
                folders[name] = folder
            found = {
                f"{n}/{path}": f for n, one in folders.items() for path, f in one.files.items()
            }
            self.folders, self.objects = folders, dict(sorted(found.items()))
        if before is not None:
            before.close()


class _RefusedRequests(logging.LoggerAdapter[logging.Logger]):
    """Takes what aiohttp logs: requests that are no HTTP, as errors with a traceback.

    Any client could fill the terminal with them. Errors of the server itself are logged by it.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(min(level, logging.DEBUG), msg, *args, **kwargs)


class ModelServer(Closing):
    """Serves a bucket until it is closed.

    Attributes:
        url: The endpoint, such as `http://127.0.0.1:9000`.
        requests: How many were answered so far.
        size_bytes: How many bytes of objects were sent so far.
    """

    def __init__(
        self,
        bucket: ServedBucket,
        request: ServeRequest,
        threads: int,
        parts: int,
        report: Callable[[str, CkptkitError], None],
    ) -> None:
        """Starts to listen, with so many threads that make parts, and so many parts in memory.

        `report` is called once for each folder that is no longer served, from any thread.
        """
        self._bucket, self._request, self._report = bucket, request, report
        self.url, self.requests, self.size_bytes = "", 0, 0
        self._throttle = Throttle(request.plan.job.resources.bytes_per_second)
        self._parts, self._buffers = asyncio.Semaphore(parts), list[memoryview]()
        self._workers = [WorkerThread(f"ckptkit-reader-{n}") for n in range(threads)]
        self._free: asyncio.LifoQueue[WorkerThread] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._idle: dict[web.RequestHandler, float] = {}  # since when, oldest first
        self._sending: dict[web.RequestHandler, float] = {}  # since when one part
        self._waiting = 0  # clients, for a part
        self._reported: weakref.WeakSet[PlannedFolder] = weakref.WeakSet()
        self._complained = -math.inf
        self._began = datetime.now(UTC)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ckptkit-serve", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all connections at once, and frees the port; a second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _start(self) -> None:
        host, port = self._request.host, self._request.port
        self._server = web.Server(self._handle, access_log=None, logger=_RefusedRequests(logger))
        self._most = choose_most_connections()
        self._loop.set_exception_handler(self._complain)
        try:
            listening = await self._loop.create_server(
                self._accept, host, port, backlog=_ACCEPTED_AT_ONCE
            )
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, socket.gaierror | UnicodeError):
                raise OutputError(
                    f"{host!r} is no address of this machine: {reason}",
                    where="--host",
                    hint="pass an address such as --host 0.0.0.0, or leave it out for 127.0.0.1",
                ) from error
            raise OutputError(
                f"cannot listen on port {port} of {host}: {reason}",
                where="--port",
                hint="pass another --port, or leave it out for any free one",
            ) from error
        for one in listening.sockets:
            with one.dup() as same:
                same.listen(_BACKLOG)  # more may wait than asyncio accepts at once
        name, bound = listening.sockets[0].getsockname()[:2]
        self.url = f"http://{_show_address(name)}:{bound}"
        self._listening, self._watching = listening, self._loop.create_task(self._watch())

    async def _end(self) -> None:
        self._throttle.stopped.set()
        for worker in self._workers:
            worker.stop()
        if self.url:
            self._listening.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for handler in self._server.connections:
            _break_off(handler)
        await self._server.shutdown(0.0)

    # --- connections ---

    def _accept(self) -> web.RequestHandler:
        """Takes a connection; where there are too many, the one that is idle longest is closed."""
        if len(self._idle) + len(self._sending) >= self._most:
            self._forget_closed()
            self._end_idle(max(0, len(self._idle) + len(self._sending) + 1 - self._most))
        handler = self._server()
        self._idle[handler] = self._loop.time()
        return handler

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Takes errors of the loop; asyncio tries again where a connection cannot be accepted."""
        error = context.get("exception")
        if not isinstance(error, OSError) or "socket" not in context:
            loop.default_exception_handler(context)
            return
        self._end_idle(1 + len(self._idle) // 8)
        if loop.time() - self._complained > _QUIET_SECONDS:
            self._complained = loop.time()
            logger.warning("connections cannot be accepted at the moment: %s", error)

    async def _watch(self) -> None:
        """Closes connections that ask for nothing, and those that are slow while others wait."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = self._loop.time()
            self._forget_closed()
            self._end_idle(sum(since < now - IDLE_SECONDS for since in self._idle.values()))
            for handler, since in self._sending.items():
                if self._waiting and now - since > PATIENCE_SECONDS:
                    _break_off(handler)

    def _forget_closed(self) -> None:
        late = self._loop.time() - _LOOK_SECONDS  # a newer one may not be made yet
        for handler in [h for h, at in self._idle.items() if at < late and not h.transport]:
            del self._idle[handler]

    def _end_idle(self, count: int) -> None:
        for handler in list(self._idle)[:count]:
            del self._idle[handler]
            _break_off(handler)  # which does not wait for a client that takes nothing

    @contextmanager
    def _sends(self, handler: web.RequestHandler) -> Iterator[None]:
        """Keeps a connection open in the block, in which bytes of an object are sent."""
        self._idle.pop(handler, None)
        if len(self._sending) >= self._most:
            raise S3Error("SlowDown", "Please reduce your request rate.")
        self._sending[handler] = math.inf
        try:
            yield
        finally:
            del self._sending[handler]
            self._idle[handler] = self._loop.time()

    # --- requests ---

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id, is_head = secrets.token_hex(8).upper(), request.method == "HEAD"
        self.requests += 1
        # Answers that were made before have to be taken first.
        transport = request.transport
        while transport and transport.get_write_buffer_size() > _UNTAKEN_BYTES:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(_PAUSE_SECONDS)
        self._idle.pop(request.protocol, None)
        self._idle[request.protocol] = self._loop.time()
        try:
            answer = self._answer(request)
            if answer.entry is not None:
                name, folder = self._find_folder(answer.key, answer.entry)
                if not is_head:
                    return await self._send_object(request, answer, name, folder, request_id)
        except S3Error as error:
            answer = answer_error(error, request_id, request.raw_path, is_head=is_head)
        except Exception as error:
            # Without its query, which has the signature of a presigned URL.
            logger.exception("a request for %r failed", request.raw_path.partition("?")[0])
            answer = answer_error(
                _as_s3_error(error), request_id, request.raw_path, is_head=is_head
            )
        response = _make_response(answer, request_id)
        if request.method not in {"GET", "HEAD"}:
            response.force_close()  # its body is not read
        await response.prepare(request)
        if not is_head:
            await response.write(answer.body)
        await response.write_eof()
        return response

    def _answer(self, request: web.BaseRequest) -> Answer:
        sent = request.headers
        headers = {name.lower(): ",".join(sent.getall(name)) for name in sent}
        parsed = parse_request(request.method, request.raw_path, headers)
        if self._request.keys is not None:
            check_signature(parsed, self._request.keys, datetime.now(UTC))
        else:
            # A page in a browser may resolve its own name to this machine; the name shows that.
            host = headers.get("host", "")
            if not is_loopback(_name_of_host(host).removeprefix(f"{BUCKET}.")):
                raise S3Error("AccessDenied", f"The host {host[:100]!r} is not this machine.")
        return answer_request(parsed, self._bucket.objects, self._began)

    def _find_folder(self, key: str, entry: PlannedFile) -> tuple[str, PlannedFolder]:
        for name, folder in self._bucket.folders.items():
            if folder.files.get(key.removeprefix(f"{name}/")) is entry:
                if folder.failure is not None:
                    raise _as_s3_error(folder.failure)
                return name, folder
        raise S3Error("ServiceUnavailable", "The object was replaced just now; try again.")

    async def _send_object(
        self,
        request: web.BaseRequest,
        answer: Answer,
        name: str,
        folder: PlannedFolder,
        request_id: str,
    ) -> web.StreamResponse:
        """Sends bytes of an object; breaks the connection off where they are not proven."""
        response = _make_response(answer, request_id)
        with self._sends(request.protocol), folder.used() as is_open:
            if not is_open:
                raise S3Error("NoSuchKey", "The specified key does not exist.")
            try:
                async with aclosing(self._read(folder, answer)) as parts:
                    async for part in parts:
                        if not response.prepared:
                            await response.prepare(request)
                        self._sending[request.protocol] = self._loop.time()
                        try:
                            await self._write(request, response, part)
                        except BaseException:
                            _break_off(request.protocol)  # whose buffer others get next
                            raise
                        self._sending[request.protocol] = math.inf
            except (ConnectionError, TimeoutError) as error:
                logger.debug("a client went away: %s", error)
            except Exception as error:
                if response.prepared:  # nothing else may be taken for a part of the body
                    _break_off(request.protocol)
                if not isinstance(error, CkptkitError):
                    logger.exception("a request for %r failed", answer.key)
                elif folder.failure is not None and folder not in self._reported:
                    self._reported.add(folder)
                    self._report(name, error)
                if not response.prepared:
                    raise _as_s3_error(error) from error
        if not response.prepared:  # an object without bytes
            await response.prepare(request)
        return response

    async def _read(
        self, folder: PlannedFolder, answer: Answer
    ) -> AsyncGenerator[memoryview, None]:
        """Yields the proven parts of a body; while one is sent, the next ones are made."""
        entry = answer.entry
        assert entry is not None  # noqa: S101  narrows the type
        ranges = entry.cut(answer.start, answer.stop)
        upcoming = next(ranges, None)
        made: deque[tuple[int, asyncio.Task[memoryview]]] = deque()
        try:
            while upcoming or made:
                # Who holds a part must not wait for another one.
                while upcoming and not (
                    made and (self._parts.locked() or len(made) > len(self._workers))
                ):
                    self._waiting += 1
                    try:
                        await self._parts.acquire()
                    finally:
                        self._waiting -= 1
                    low, high = upcoming
                    task = self._loop.create_task(self._make(folder, entry, low, high))
                    made.append((high - low, task))
                    upcoming = next(ranges, None)
                size, task = made[0]
                yield (await asyncio.shield(task))[:size]
                self._give_back(made.popleft()[1])
        finally:
            for _, task in made:
                task.add_done_callback(self._give_back)

    def _give_back(self, task: asyncio.Task[memoryview]) -> None:
        """Frees the buffer of a part; of errors, that of the first part was raised."""
        if not task.cancelled() and task.exception() is None:
            self._buffers.append(task.result())
        self._parts.release()

    async def _make(
        self, folder: PlannedFolder, entry: PlannedFile, start: int, stop: int
    ) -> memoryview:
        buffer = self._buffers.pop() if self._buffers else aligned_buffer(PART_BYTES)
        worker = await self._free.get()

        def fill() -> None:
            self._throttle.take(stop - start)
            folder.read_into(entry, start, buffer[: stop - start])

        try:
            await asyncio.wrap_future(worker.submit(fill))
        finally:
            self._free.put_nowait(worker)
        return buffer

    async def _write(
        self, request: web.BaseRequest, response: web.StreamResponse, part: memoryview
    ) -> None:
        """Sends a part; when this returns, the transport has no view of its buffer any more."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("closed by the client")
        transport.set_write_buffer_limits(high=0)  # a write then waits until all of it is sent
        for start in range(0, len(part), _WRITE_BYTES):
            piece = part[start : start + _WRITE_BYTES]
            is_small = len(piece) <= _UNTAKEN_BYTES  # after which aiohttp does not wait
            async with asyncio.timeout(STALLED_SECONDS):
                await response.write(bytes(piece) if is_small else piece)
            if not is_small and transport.get_write_buffer_size():
                raise RuntimeError("a part of a buffer that others get next is still to be sent")
            self.size_bytes += len(piece)


def _name_of_host(header: str) -> str:
    """Returns the name or address in a Host header, without its port; empty if it has none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _make_response(answer: Answer, request_id: str) -> web.StreamResponse:
    headers = {**answer.headers, "x-amz-request-id": request_id, "Server": "ckptkit"}
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.content_length = answer.size_bytes
    return response


def _break_off(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()


def _as_s3_error(error: Exception) -> S3Error:
    """Returns the answer for a source that cannot be read, or is not what it was; or for a bug."""
    if not isinstance(error, CkptkitError):
        return S3Error("InternalError", "The server failed; see its log.")
    code = "ServiceUnavailable" if isinstance(error, TEMPORARY) else "InternalError"
    return S3Error(code, f"{error}", {"Reason": error.code})
