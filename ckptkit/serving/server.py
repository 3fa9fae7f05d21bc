"""The server: an event loop in a thread of its own, which takes requests and sends bodies.

aiohttp parses requests. A body that cannot be continued is broken off by closing the connection:
the client has then received less than the announced length.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web
from msgspec import Struct

from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from ckptkit.core.text import Closing
from ckptkit.serving.connections import Connections, choose_most_connections
from ckptkit.serving.reading import ReadingLimits, SharedReading
from ckptkit.serving.s3_api import Answer, answer_error, answer_request, parse_request
from ckptkit.serving.s3_errors import S3Error
from ckptkit.serving.served_folder import TEMPORARY, ServedBucket, ServedFolder
from ckptkit.serving.served_objects import BUCKET, ServedObject
from ckptkit.serving.signatures import AccessKeys, check_signature, make_keys

logger = logging.getLogger(__name__)
STALLED_SECONDS = 60.0
"""A client that takes nothing for so long loses its connection, even if no other one waits."""
_WRITE_BYTES = 256 << 10  # what one call copies where the client is slower
_UNWAITED_BYTES = 64 << 10
_MOST_PORT = 65_535
_ACCESS_KEY = re.compile(r"[A-Za-z0-9._+=-]{1,128}")


class ServerAddress(Struct, frozen=True):
    """Where a server listens, and who may read.

    Attributes:
        host: An address, or a name that has one.
        port: Of TCP; 0 takes a free one.
        keys: What requests are signed with; None for requests without a signature.
    """

    host: str = "127.0.0.1"
    port: int = 0
    keys: AccessKeys | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MOST_PORT:
            raise UsageError(
                f"{self.port} is not a port from 0 to {_MOST_PORT:,}",
                where="--port",
                hint="leave it out for any free one",
            )
        if self.keys is None and not is_loopback(self.host):
            raise UsageError(
                f"serves everything to every machine that reaches {self.host}",
                where="--no-auth",
                hint="leave out --no-auth, or --host",
            )

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach it."""
        return not is_loopback(self.host)


def choose_address(
    host: str, port: int, access_key: str | None, secret_key: str | None, *, auth: bool
) -> ServerAddress:
    """Reads the options of a server; without keys, random ones are made."""
    if not auth:
        if access_key or secret_key:
            raise UsageError(
                "cannot be combined with keys, which sign requests",
                where="--no-auth",
                hint="leave one of the two out",
            )
        return ServerAddress(host, port)
    if access_key and secret_key:
        if not _ACCESS_KEY.fullmatch(access_key):
            raise UsageError(
                f"{access_key!r:.100} has characters that a signature cannot have in it",
                where="--access-key",
                hint="pass letters, digits and any of . _ - + =",
            )
        return ServerAddress(host, port, AccessKeys(access_key, secret_key))
    if access_key is not None or secret_key is not None:
        raise UsageError(
            "--access-key and --secret-key belong together, and neither may be empty",
            where="--access-key" if access_key else "--secret-key",
            hint="pass both, or none for random ones",
        )
    return ServerAddress(host, port, make_keys())


def is_loopback(host: str) -> bool:
    """Returns whether an address, or the name `localhost`, is of this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # of documentation


def find_own_address(family: socket.AddressFamily) -> str:
    """Returns the address by which other machines reach this one; nothing is sent for it."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
            unconnected.connect((_OUTSIDE[family], 9))
            return str(unconnected.getsockname()[0])
    except OSError:  # there is no network
        return "::1" if family is socket.AF_INET6 else "127.0.0.1"


def _name_of_host(header: str) -> str:
    """Returns the name or address in a Host header, without its port; empty if it has none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


class _RefusedRequests(logging.LoggerAdapter[logging.Logger]):
    """Takes what aiohttp logs: requests that are no HTTP, as errors with a traceback.

    Any client could fill the terminal with them. Errors of the server itself are logged by it.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(min(level, logging.DEBUG), msg, *args, **kwargs)


class ServedTotals(Struct):
    """What was served so far: answered requests, and bytes of objects."""

    requests: int = 0
    size_bytes: int = 0


class ModelServer(Closing):
    """Serves a bucket until it is closed.

    Attributes:
        bucket: What is served; folders may be added and removed at any time.
        url: The endpoint, such as `http://127.0.0.1:9000`.
        totals: What was served so far.
    """

    def __init__(
        self,
        bucket: ServedBucket,
        address: ServerAddress,
        limits: ReadingLimits,
        report: Callable[[ServedFolder, CkptkitError], None],
    ) -> None:
        """Starts to listen.

        Args:
            bucket: What is served.
            address: Where, and to whom.
            limits: Threads and buffers.
            report: Is called once for each folder that is no longer served, from any thread.
        """
        self.bucket = bucket
        self.url = ""
        self.totals = ServedTotals()
        self._address = address
        self._limits = limits
        self._report = report
        self._began = datetime.now(UTC)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ckptkit-serve", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def drop(self, name: str) -> None:
        """Removes a folder from the bucket, and frees what was kept for reading it."""
        self.bucket.drop(name)
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._reading.forget)

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
        host, port = self._address.host, self._address.port
        self._server = web.Server(self._handle, access_log=None, logger=_RefusedRequests(logger))
        self._connections = Connections(self._server, choose_most_connections())
        self._reading = SharedReading(self._limits)
        try:
            name, bound = (await self._connections.listen(host, port))[:2]
        except (socket.gaierror, UnicodeError) as error:
            raise OutputError(
                f"{host!r} is no address of this machine:"
                f" {getattr(error, 'strerror', None) or error}",
                where="--host",
                hint="pass an address such as --host 0.0.0.0, or leave it out for 127.0.0.1",
            ) from error
        except (OSError, OverflowError) as error:
            raise OutputError(
                f"cannot listen on port {port} of {host}:"
                f" {getattr(error, 'strerror', None) or error}",
                where="--port",
                hint="pass another --port, or leave it out for any free one",
            ) from error
        if ipaddress.ip_address(name).is_unspecified:
            name = find_own_address(socket.AF_INET6 if ":" in name else socket.AF_INET)
        shown = f"[{name}]" if ":" in name else name
        self.url = f"http://{shown}:{bound}"

    async def _end(self) -> None:
        self._reading.close()
        handlers = asyncio.all_tasks() - {asyncio.current_task()}
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        self._connections.close()
        await self._server.shutdown(0.0)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id, is_head = secrets.token_hex(8).upper(), request.method == "HEAD"
        self.totals.requests += 1
        await self._connections.begin_request(request.transport)
        try:
            answer = self._answer(request)
            if answer.entry is not None:
                folder = self._find_folder(answer.entry)
                if not is_head:
                    return await self._send_object(request, answer, folder, request_id)
        except S3Error as error:
            answer = answer_error(error, request_id, request.raw_path, is_head=is_head)
        except Exception:
            # Without its query, which has the signature of a presigned URL.
            logger.exception("a request for %r failed", request.raw_path.partition("?")[0])
            answer = answer_error(_unexpected(), request_id, request.raw_path, is_head=is_head)
        response = _make_response(answer, request_id)
        if request.method not in {"GET", "HEAD"}:
            response.force_close()  # its body is not read
        await response.prepare(request)
        if not is_head:
            await response.write(answer.body)
        await response.write_eof()
        return response

    def _answer(self, request: web.BaseRequest) -> Answer:
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            before = headers.get(name.lower())
            headers[name.lower()] = value if before is None else f"{before},{value}"
        parsed = parse_request(request.method, request.raw_path, headers)
        if self._address.keys is not None:
            check_signature(parsed, self._address.keys, datetime.now(UTC))
        else:
            # A page in a browser may resolve its own name to this machine; the name shows that.
            host = headers.get("host", "")
            if not is_loopback(_name_of_host(host).removeprefix(f"{BUCKET}.")):
                raise S3Error("AccessDenied", f"The host {host[:100]!r} is not this machine.")
        return answer_request(parsed, self.bucket, self._began)

    def _find_folder(self, entry: ServedObject) -> ServedFolder:
        folder = self.bucket.folder_of(entry.key)
        if folder is None or folder.objects[entry.key] is not entry:
            raise S3Error("ServiceUnavailable", "The object was replaced just now; try again.")
        if folder.failure is not None:
            raise _as_s3_error(folder.failure)
        return folder

    async def _send_object(
        self, request: web.BaseRequest, answer: Answer, folder: ServedFolder, request_id: str
    ) -> web.StreamResponse:
        """Sends bytes of an object; breaks the connection off where they are not proven."""
        entry, response = answer.entry, _make_response(answer, request_id)
        assert entry is not None  # noqa: S101  narrows the type
        with folder.used() as is_open, self._connections.kept(request.transport):
            if not is_open:
                raise S3Error("NoSuchKey", "The specified key does not exist.")
            cut = partial(_break_off, request)
            parts = self._reading.read(folder, entry, answer.start, answer.stop, cut)
            try:
                async with aclosing(parts):
                    async for view in parts:
                        if not response.prepared:
                            await response.prepare(request)
                        await self._write(request, response, view)
            except (ConnectionError, TimeoutError) as error:
                logger.debug("a client went away: %s", error)
                _break_off(request)
            except CkptkitError as error:
                _end_body(request, response)  # before anything else can fail
                self._announce(folder, error)
                if not response.prepared:
                    raise _as_s3_error(error) from error
            except Exception:
                logger.exception("a request for %r failed", entry.key)
                _end_body(request, response)
                if not response.prepared:
                    raise _unexpected() from None
        if not response.prepared:  # an object without bytes
            await response.prepare(request)
        return response

    async def _write(
        self, request: web.BaseRequest, response: web.StreamResponse, view: memoryview
    ) -> None:
        """Sends a part; when this returns, the transport has no view of its buffer any more."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("closed by the client")
        transport.set_write_buffer_limits(high=0)  # a write then waits until all of it is sent
        for start in range(0, len(view), _WRITE_BYTES):
            part = view[start : start + _WRITE_BYTES]
            try:
                async with asyncio.timeout(STALLED_SECONDS):
                    # aiohttp does not wait after small ones.
                    await response.write(part if len(part) > _UNWAITED_BYTES else bytes(part))
            except TimeoutError:
                transport.abort()  # it still has a view of the buffer, which others get next
                raise
            if len(part) > _UNWAITED_BYTES and transport.get_write_buffer_size():
                raise RuntimeError("a part of a buffer that others get next is still to be sent")
            self.totals.size_bytes += len(part)

    def _announce(self, folder: ServedFolder, error: CkptkitError) -> None:
        if folder.failure is not None and not folder.is_reported:
            folder.is_reported = True
            self._report(folder, error)

    def __enter__(self) -> Self:
        return self


def _make_response(answer: Answer, request_id: str) -> web.StreamResponse:
    headers = {**answer.headers, "x-amz-request-id": request_id, "Server": "ckptkit"}
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.content_length = answer.size_bytes
    return response


def _break_off(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _end_body(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Breaks off a body that was begun, so that nothing else is taken for a part of it."""
    if response.prepared:
        _break_off(request)


def _unexpected() -> S3Error:
    return S3Error("InternalError", "The server failed; see its log.")


def _as_s3_error(error: CkptkitError) -> S3Error:
    """Returns the answer for a source that cannot be read, or is not what it was."""
    code = "ServiceUnavailable" if isinstance(error, TEMPORARY) else "InternalError"
    return S3Error(code, f"{error}", {"Reason": error.code})
