"""Serves a checkpoint, or the newest steps of a run, to clients of S3 until it is closed.

An event loop in a thread of its own takes requests, which aiohttp parses. A body that cannot be
continued is broken off by closing the connection: the client has then received less than the
announced length.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from aiohttp import web
from botocore.credentials import Credentials
from msgspec import Struct

from ckptkit.core.errors import AccessError, CkptkitError, OutputError, StorageError, UsageError
from ckptkit.core.text import Closing, event_of_note
from ckptkit.engine.outcome import Event, Planned
from ckptkit.hub.watch.watched_steps import WatchedRun, default_poll_seconds
from ckptkit.runs.find_run import find_run
from ckptkit.serving import s3_api
from ckptkit.serving.planned_folder import TEMPORARY, IdleReaders, PartMaker, PlannedFolder
from ckptkit.serving.plans import ServePlan, newest_step
from ckptkit.serving.s3_api import Answer, S3Error
from ckptkit.storage.places import is_url

logger = logging.getLogger(__name__)
PATIENCE_SECONDS = 30.0
"""Who takes nothing for so long, or no whole part while others wait for one, is disconnected."""
IDLE_SECONDS = 20.0
"""A connection that sends no whole request for so long is closed."""
_WRITE_BYTES = 256 << 10
_KEPT_STEPS = 2  # the newest, and the one before for clients that read it already
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # of documentation
_AGAIN = "start the server again once the source is complete"
_HTTP = logging.getLogger(f"{__name__}.http")  # of aiohttp
_HTTP.setLevel(logging.CRITICAL)  # requests that are no HTTP are errors there: anyone can send them


class ServeEvent(Struct, frozen=True):
    """Something that happened, with facts that are JSON values."""

    name: str
    facts: Mapping[str, Any]


ServeListener = Callable[[ServeEvent], None]


def choose_keys(host: str, auth: bool | tuple[str, str]) -> Credentials | None:  # noqa: FBT001
    """Returns the keys of a server, by default random ones; None for requests without signature."""
    if auth is False and not is_loopback(host):
        raise UsageError(
            f"serves everything to every machine that reaches {host}",
            where="--no-auth",
            hint="leave out --no-auth, or --host",
        )
    if isinstance(auth, bool):
        return s3_api.make_keys() if auth else None
    if not re.fullmatch(r"[A-Za-z0-9._+=-]{1,128}", auth[0]) or not auth[1]:
        raise UsageError(
            f"{auth[0]!r:.100} has characters that signatures cannot have, or the secret is empty",
            where="--access-key",
            hint="pass letters, digits and any of . _ - + =, and a secret key",
        )
    return Credentials(*auth)


def is_loopback(host: str) -> bool:
    """Returns whether an address, or the name `localhost`, is of this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Serving(Closing):
    """A server with what it serves; a context manager.

    Attributes:
        url: The endpoint, such as `http://127.0.0.1:9000`.
        prefix: The prefix of all keys, without a slash at its end.
        folders: What is served, by prefix.
        requests: How many were answered so far.
        size_bytes: How many bytes of objects were sent so far.
    """

    def __init__(
        self,
        plan: ServePlan,
        listener: ServeListener | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Credentials | None = None,
        name: str | None = None,
        follow: bool = False,
        poll_seconds: float | None = None,
    ) -> None:
        """Plans what is served, and starts to listen; raises what refuses it.

        The listener receives events, from several threads; its errors are logged.
        """
        src = plan.job.src
        self._plan, self._listener, self._host, self._keys = plan, listener, host, keys
        self.prefix = plan.choose_name(name, follow=follow)
        self.folders: dict[str, PlannedFolder] = {}
        self.requests = self.size_bytes = 0
        self._began, self._readers = datetime.now(UTC), IdleReaders()
        self._failed = WeakSet[PlannedFolder]()  # whose failure was reported
        self._stopped, self._stack = threading.Event(), ExitStack()
        try:
            if not follow:
                self._add(self.prefix, plan)
            else:
                self._run = WatchedRun(find_run(src), None)
                self._refused: dict[str, str] = {}  # digests of steps, by names in the bucket
                self._served: dict[str, str] = {}  # the same, oldest first
                self._serve_newest()
                if not self._served:
                    self._tell("waiting", self.prefix, message=f"{src} has no complete step yet")
            is_remote = is_url(src) or any(one.is_remote for one in self.folders.values())
            makers = PartMaker(plan.job.resources, is_remote=is_remote)
            self._parts = self._stack.enter_context(makers)
            listening = self._stack.enter_context(_listen(host, port))
            name, bound = listening.getsockname()[:2]
            self.url = f"http://{_show_address(name)}:{bound}"
            self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
            self._stack.callback(_start("ckptkit-serve", lambda: self._answer_all(listening)).join)
            self._stack.callback(self._loop.call_soon_threadsafe, self._ended.set)
        except BaseException:
            self.close()
            raise
        if follow:
            seconds = poll_seconds or default_poll_seconds(src)
            _start("ckptkit-follow", lambda: self._follow(seconds))

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients of S3 find the server and its keys."""
        keys = self._keys or Credentials("none", "none")
        named = {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
        regions = dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), s3_api.REGION)
        return {"AWS_ENDPOINT_URL": self.url, **named, **regions}

    @property
    def warning(self) -> str:
        """What a user has to know who lets other machines in; empty for this machine alone."""
        if is_loopback(self._host):
            return ""
        return (
            f"other machines reach this server at {self.url}: requests are signed, but nothing is"
            " encrypted, so that whatever is between can read what is sent"
        )

    @property
    def location(self) -> str:
        """The place of what is served, as an `s3://` URL."""
        return f"s3://{s3_api.BUCKET}/{self.prefix}/"

    def close(self) -> None:
        """Ends all connections at once, and frees the port; a second call does nothing."""
        self._stopped.set()
        self._stack.close()
        self._drop(*self.folders)

    # --- what is served ---

    def _tell(self, event: str, name: str, **facts: Any) -> None:
        try:
            if self._listener is not None:
                self._listener(ServeEvent(event, {"name": name, **facts}))
        except Exception:
            logger.exception("the event %r could not be reported", event)

    def _tell_notes(self, name: str, event: Event) -> None:
        for note in event.notes if isinstance(event, Planned) else ():
            self._tell(event_of_note(note), name, message=note)

    def _add(self, name: str, plan: ServePlan) -> None:
        """Plans a source, and serves it instead of what had its name."""
        listener = partial(self._tell_notes, name)
        folder = PlannedFolder(plan, listener, _AGAIN, self._readers)
        before, self.folders[name] = self.folders.get(name), folder
        if before is not None:
            before.close()
        objects = [
            {"key": f"{name}/{path}", "bytes": file.size_bytes, "etag": file.etag}
            for path, file in folder.files.items()
        ]
        self._tell("added", name, source=folder.path, bytes=folder.size_bytes, objects=objects)
        listener(Planned(folder.notes))

    def _drop(self, *names: str) -> None:
        for name in names:
            if (folder := self.folders.pop(name, None)) is not None:
                folder.close()

    def _follow(self, seconds: float) -> None:
        """Looks for newer steps of the run until the server is closed."""
        while not self._stopped.wait(seconds):
            try:
                self._serve_newest()
            except CkptkitError as error:
                self._tell("skipped", self.prefix, error=error.to_json())
            except Exception:
                logger.exception("the run cannot be followed; it is looked at again")
        self._drop(*self.folders)  # what was planned when it was closed

    def _serve_newest(self) -> None:
        """Adds the newest step, if it is not served yet, and drops old ones."""
        newest = newest_step(self._run)
        if newest is None:
            return
        name, digest = f"{self.prefix}/{newest.name}", newest.digest
        if digest not in (self._served.get(name), self._refused.get(name)):
            try:
                self._add(name, self._plan.of_step(self._run.place_of(newest)))
            except CkptkitError as error:
                if not isinstance(error, AccessError | StorageError):
                    self._refused[name] = digest
                raise
            self._served.pop(name, None)
            self._served[name] = digest
        for old in list(self._served)[:-_KEPT_STEPS]:
            del self._served[old]
            self._drop(old)
            self._tell("removed", old)

    # --- requests, in the event loop ---

    def _answer_all(self, listening: socket.socket) -> None:
        """Answers what comes until the server is closed."""

        async def serve() -> None:
            server = web.Server(
                self._handle, access_log=None, logger=_HTTP, keepalive_timeout=IDLE_SECONDS
            )
            accepting = await self._loop.create_server(server, sock=listening)
            await self._ended.wait()
            accepting.close()
            for handler in server.connections:
                _break_off(handler)

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(serve())

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id, is_head = secrets.token_hex(8).upper(), request.method == "HEAD"
        target = request.raw_path.partition("?")[0]  # a query has the signature of a presigned URL
        name, folder, response = "", None, None
        self.requests += 1
        try:
            answer, name, folder = self._answer(request)
            response = _make_response(answer, request_id)
            if folder is not None and not is_head:
                await self._send_object(request, response, answer, folder)
        except Exception as error:
            if not isinstance(error, S3Error | CkptkitError | ConnectionError | TimeoutError):
                logger.exception("a request for %r failed", target)
            if folder is not None and folder.failure is not None and folder not in self._failed:
                self._failed.add(folder)
                self._tell("failed", name, error=folder.failure.to_json())
            if response is not None and response.prepared:
                _break_off(request.protocol)  # nothing else may be taken for a part of the body
                return response
            answer = s3_api.answer_error(_as_s3_error(error), request_id, target)
            response = _make_response(answer, request_id)
        if request.method not in {"GET", "HEAD"}:
            response.force_close()  # its body is not read
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await response.prepare(request)
                await response.write_eof(b"" if is_head else answer.body)
        except TimeoutError:
            _break_off(request.protocol)
        return response

    def _answer(self, request: web.BaseRequest) -> tuple[Answer, str, PlannedFolder | None]:
        """Returns the answer, and for an object its folder, by its prefix."""
        sent = request.headers
        headers = {name.lower(): ",".join(sent.getall(name)) for name in sent}
        parsed = s3_api.parse_request(request.method, request.raw_path, headers)
        if self._keys is not None:
            s3_api.check_signature(parsed, self._keys, datetime.now(UTC))
        elif not _is_this_machine(host := headers.get("host", "")):
            # A page in a browser may resolve its own name to this machine; the name shows that.
            raise S3Error("AccessDenied", f"The host {host[:100]!r} is not this machine.")
        folders = list(self.folders.items())
        files = {f"{n}/{path}": one for n, folder in folders for path, one in folder.files.items()}
        answer = s3_api.answer_request(parsed, dict(sorted(files.items())), self._began)
        for name, folder in folders:
            if answer.entry and folder.files.get(answer.key[len(name) + 1 :]) is answer.entry:
                if folder.failure is not None:
                    raise folder.failure
                return answer, name, folder
        return answer, "", None

    async def _send_object(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        answer: Answer,
        folder: PlannedFolder,
    ) -> None:
        assert answer.entry is not None  # noqa: S101  narrows the type
        with folder.used() as is_open:
            if not is_open:
                raise S3Error("NoSuchKey", "The specified key does not exist.")
            read = self._parts.read(folder, answer.entry, answer.start, answer.stop)
            async with aclosing(read) as parts:
                async for part in parts:
                    await response.prepare(request)
                    began = self._loop.time()
                    for start in range(0, len(part), _WRITE_BYTES):
                        is_slow = self._loop.time() - began > PATIENCE_SECONDS
                        if is_slow and self._parts.waiting:
                            raise TimeoutError
                        piece = bytes(part[start : start + _WRITE_BYTES])
                        async with asyncio.timeout(PATIENCE_SECONDS):
                            await response.write(piece)
                        self.size_bytes += len(piece)


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=128)
    except (OSError, OverflowError, UnicodeError) as error:
        message, where = f"cannot listen on port {port} of {host}", "--port"
        hint = "pass another --port, or leave it out for any free one"
        if isinstance(error, socket.gaierror | UnicodeError):
            message, where = f"{host!r} is no address of this machine", "--host"
            hint = "pass an address such as --host 0.0.0.0, or leave it out for 127.0.0.1"
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{message}: {reason}", where=where, hint=hint) from error


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


def _is_this_machine(header: str) -> bool:
    """Says whether a Host header has a name or an address of this machine only."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name.removeprefix(f"{s3_api.BUCKET}."))


def _start(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _make_response(answer: Answer, request_id: str) -> web.StreamResponse:
    headers = {**answer.headers, "x-amz-request-id": request_id, "Server": "ckptkit"}
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.content_length = answer.stop - answer.start or len(answer.body)
    return response


def _break_off(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()


def _as_s3_error(error: Exception) -> S3Error:
    """Returns the answer for a source that cannot be read, or is not what it was; or for a bug."""
    if isinstance(error, S3Error):
        return error
    if not isinstance(error, CkptkitError):
        return S3Error("InternalError", "The server failed; see its log.")
    code = "ServiceUnavailable" if isinstance(error, TEMPORARY) else "InternalError"
    return S3Error(code, f"{error}", Reason=error.code)
