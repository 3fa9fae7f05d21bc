"""The connections of a server: how many there are, and how long one may ask for nothing.

A connection needs no key. asyncio would accept all of them, and where
descriptors run out, log each failure and try again at once; so they are accepted here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

logger = logging.getLogger(__name__)
IDLE_SECONDS = 20.0
"""A connection that has no bytes of an object to send is closed so long after its last request."""
_MOST_CONNECTIONS = 1024
_DESCRIPTORS = 4096  # of the process, where its hard limit allows it
_BACKLOG = 1024
_UNTAKEN_BYTES = 64 << 10
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
_QUIET_SECONDS = 60.0  # between two messages about connections that cannot be accepted


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


class Connections:
    """Accepts connections, and closes idle ones: in time, and earlier where others need the room.

    A connection is idle unless bytes of an object are sent, which a client without a key does not
    get. Used from the thread of the event loop only.
    """

    def __init__(self, server: web.Server, most: int) -> None:
        """Takes what answers requests, and how many connections may be open."""
        self._server = server
        self._most = most
        self._idle: dict[asyncio.Transport, float] = {}  # since when, the longest first
        self._sending: set[asyncio.Transport] = set()
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._complained = -math.inf

    async def listen(self, host: str, port: int) -> tuple[Any, ...]:
        """Starts to accept connections; returns the first address, which has the port.

        Raises:
            OSError: If the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        bound = await loop.create_server(self._server, host, port, start_serving=False)
        self._sockets = [one.dup() for one in bound.sockets]
        bound.close()
        for one in self._sockets:
            one.listen(_BACKLOG)
        self._tasks = [loop.create_task(self._accept(one)) for one in self._sockets]
        self._tasks.append(loop.create_task(self._end_late()))
        address: tuple[Any, ...] = self._sockets[0].getsockname()
        return address

    async def begin_request(self, transport: asyncio.Transport | None) -> None:
        """Notes that a connection asks for something, once the answers before that were taken."""
        if transport is None:
            return
        while transport.get_write_buffer_size() > _UNTAKEN_BYTES:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(_PAUSE_SECONDS)
        self._note(transport)

    @contextmanager
    def kept(self, transport: asyncio.Transport | None) -> Iterator[None]:
        """Keeps a connection open in the block, in which bytes of an object are sent."""
        if transport is None:
            yield
            return
        self._idle.pop(transport, None)
        self._sending.add(transport)
        try:
            yield
        finally:
            self._sending.discard(transport)
            self._note(transport)

    def close(self) -> None:
        """Stops to listen, and ends all connections."""
        for task in self._tasks:
            task.cancel()
        for one in self._sockets:
            one.close()
        for transport in (*self._idle, *self._sending):
            transport.abort()

    def _note(self, transport: asyncio.Transport) -> None:
        self._idle.pop(transport, None)
        self._idle[transport] = asyncio.get_running_loop().time()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
                try:
                    await self._make_room()
                    transport, _ = await loop.connect_accepted_socket(self._server, accepted)
                except BaseException:
                    accepted.close()
                    raise
            except ConnectionError:
                continue  # the client has left already
            except OSError as error:
                self._complain(error)
                self._end_idle(1 + len(self._idle) // 8)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if transport not in self._sending:
                self._idle.setdefault(transport, loop.time())

    async def _make_room(self) -> None:
        """Ends the connection that is idle for the longest time; waits where none is."""
        while len(self._idle) + len(self._sending) >= self._most:
            self._forget_closed()
            open_ones = len(self._idle) + sum(not one.is_closing() for one in self._sending)
            if open_ones < self._most:
                return
            if self._idle:
                self._end_idle(1)
            else:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _end_late(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._forget_closed()
            first = loop.time() - IDLE_SECONDS
            self._end_idle(sum(since < first for since in self._idle.values()))

    def _end_idle(self, count: int) -> None:
        for transport in list(self._idle)[:count]:
            del self._idle[transport]
            transport.abort()  # which does not wait for a client that takes nothing

    def _forget_closed(self) -> None:
        for transport in [one for one in self._idle if one.is_closing()]:
            del self._idle[transport]

    def _complain(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._complained > _QUIET_SECONDS:
            self._complained = now
            logger.warning("connections cannot be accepted at the moment: %s", error)
