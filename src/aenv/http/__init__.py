"""The one door to the network: a pool of HTTP/1.1 connections for each process and event loop.

Written on asyncio and httptools because every tool call passes here: ``benchmarks/http_client.py`` measures it
against the usual clients. It speaks to ``http://``, ``https://`` and ``unix:/path/to.sock``, and follows no redirects.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import re
import ssl
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from aenv.errors import Invalid, NetworkError
from aenv.http.connections import (
    MOST_BODY as MOST_BODY,
)
from aenv.http.connections import (
    Connection,
    NeverAnswered,
    NeverTaken,
)
from aenv.http.connections import (
    NotSent as NotSent,
)
from aenv.http.connections import (
    Response as Response,
)
from aenv.http.connections import (
    Target as Target,
)
from aenv.http.connections import (
    target as target,
)
from aenv.http.streams import Stream as Stream
from aenv.http.upgrades import SWITCHED as SWITCHED
from aenv.http.upgrades import Upgraded as Upgraded

IDLE = 60.0
"""Seconds an unused connection is kept; shorter than a sandbox keeps its side."""
MOST_IDLE = 512
CONNECT_TIMEOUT = 10.0
BUSY = (429, 503)
RECONNECTS = 2
"""A process that is gone stays gone: asking it ten times would only hide that."""
_UNKNOWN = "whether it did what was asked is not known"
_BACKOFF = 0.05
_LONGEST_BACKOFF = 5.0
_drawn = random.SystemRandom().random
"""For pauses: what an application draws from, which may be seeded, goes on as if nobody had been asked again."""

C = TypeVar("C", bound=Connection)
_trusted: dict[tuple[str, int], ssl.SSLContext] = {}
"""Servers that are known by other authorities than the machine's, or that want to know who asks."""


def trust(base: str, context: ssl.SSLContext) -> None:
    """From now on, ask the server at that address in this way."""
    where = target(base)
    _trusted[where.host, where.port] = context


async def request(
    method: str,
    base: str,
    path: str,
    *,
    headers: bytes = b"",
    body: bytes = b"",
    retries: int = 2,
    repeatable: bool = False,
    most: int = MOST_BODY,
    reconnecting: float = 0.0,
) -> Response:
    """Send a request and read the whole answer, of at most so many bytes.

    ``headers`` are complete lines. What is safe is tried again, with growing pauses: an answer of 429 or 503, and,
    when the request is ``repeatable``, one that was cut off, up to ``retries`` times; a connection that could not be
    made, at most ``RECONNECTS`` times, or up to ``retries`` times for the first ``reconnecting`` seconds: as long as
    a server takes to restart. There is no time-out here: put ``asyncio.timeout`` around it.
    """
    where = target(base)
    head = b"%bContent-Length: %d\r\n\r\n" % (_head(method, where, path, headers), len(body))
    begun = asyncio.get_running_loop().time()
    attempt = 0
    while True:
        try:
            response = await _pool().exchange(where, head, body, repeatable, most)
            if response.status not in BUSY or attempt >= retries:
                return response
            pause = _retry_after(response)
        except NotSent as exc:
            if isinstance(exc.__cause__, ssl.SSLCertVerificationError):  # nobody becomes known by waiting
                raise
            restarting = asyncio.get_running_loop().time() < begun + reconnecting
            if attempt >= (retries if restarting else min(retries, RECONNECTS)):
                raise
            pause = None
        except NetworkError:
            if attempt >= retries or not repeatable:
                raise
            pause = None
        attempt += 1
        if pause is None:
            pause = min(_BACKOFF * 2 ** min(attempt, 10), _LONGEST_BACKOFF) * (0.5 + _drawn())
        await asyncio.sleep(pause)


@asynccontextmanager
async def stream(
    method: str,
    base: str,
    path: str,
    *,
    headers: bytes = b"",
    body: bytes | AsyncIterable[bytes] = b"",
    size: int | None = None,
    patience: float | None = None,
) -> AsyncIterator[Stream]:
    """Send a request and read its answer as it comes, by iterating over what this yields. Leaving ends the connection.

    A body that is iterated over is sent as fast as the server takes it, in chunks unless its ``size`` is told; an
    answer that is not read makes the server wait. ``patience`` is the longest silence, in seconds; None is for ever.
    Nothing is tried again.
    """
    where = target(base)
    if isinstance(body, bytes):
        size = len(body)
    length = b"Transfer-Encoding: chunked" if size is None else b"Content-Length: %d" % size
    head = b"%b%b\r\n\r\n" % (_head(method, where, path, headers), length)
    connection = await _pool().connect(where, Stream)
    try:
        await connection.begin(where, head, body, size, patience)
        yield connection
    finally:
        connection.abort()


@asynccontextmanager
async def upgrade(
    base: str,
    path: str,
    protocol: str,
    *,
    headers: bytes = b"",
    body: bytes = b"",
    patience: float = CONNECT_TIMEOUT,
    method: str = "POST",
) -> AsyncIterator[Upgraded]:
    """Ask to go on with another protocol. What this yields has status 101 when the server agreed, and is then
    read and written; else it is the server's answer. Leaving ends the connection. ``patience`` is for the answer."""
    where = target(base)
    lines = b"%bConnection: Upgrade\r\nUpgrade: %b\r\n" % (headers, protocol.encode())
    head = b"%bContent-Length: %d\r\n\r\n" % (_head(method, where, path, lines), len(body))
    connection = await _pool().connect(where, Upgraded)
    try:
        await connection.begin(where, head, body, len(body), patience)
        if connection.status == SWITCHED:
            connection.endless()
        yield connection
    finally:
        connection.abort()


def _head(method: str, where: Target, path: str, headers: bytes) -> bytes:
    path = where.prefix + path
    if not (path.isascii() and path.isprintable()) or " " in path or headers.count(b"\n") != headers.count(b"\r\n"):
        raise Invalid(f"{path!r} or a header of its request has characters that HTTP does not carry")
    return b"%b %b HTTP/1.1\r\n%b%b" % (method.encode(), path.encode(), where.head, headers)


def _retry_after(response: Response) -> float | None:
    """What the server asked for, and a little more, so that not all who were refused come back at once."""
    try:
        pause = float(response.headers[b"retry-after"])
    except (KeyError, ValueError):
        return None
    return min(pause, 60.0) * (1 + 0.25 * _drawn()) if pause >= 0 else None


class _Pool:
    """Connections of one event loop in one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._idle: dict[Target, deque[Connection]] = {}
        self._kept = 0

    async def exchange(self, where: Target, head: bytes, body: bytes, repeatable: bool, most: int) -> Response:
        while True:
            connection = self._take(where, surely=not repeatable)
            reused = connection is not None
            if connection is None:
                connection = await self.connect(where, Connection)
            try:
                response = await connection.exchange(head, body, most)
            except NeverAnswered as exc:
                refused = isinstance(exc, NeverTaken) and not where.secure  # which writes more than requests
                if reused and (repeatable or refused):  # most likely closed while it lay idle
                    continue
                hint = None if repeatable else _UNKNOWN
                raise NetworkError(f"{where.shown} closed the connection without an answer", hint=hint) from exc
            if connection.reusable:
                self._give(where, connection)
            return response

    def _take(self, where: Target, *, surely: bool) -> Connection | None:
        """One that was used before; ``surely`` leaves out those whose end has come and was not heard of yet."""
        idle = self._idle.get(where)
        oldest = self.loop.time() - IDLE
        while idle:
            connection = idle.pop()
            self._kept -= 1
            if connection.reusable and connection.since > oldest and not (surely and connection.stirs):
                return connection
            connection.close()
        return None

    def _give(self, where: Target, connection: Connection) -> None:
        connection.since = self.loop.time()
        idle = self._idle.setdefault(where, deque())
        idle.append(connection)
        self._kept += 1
        while idle[0].since < connection.since - IDLE:
            self._drop(idle)
        while self._kept > MOST_IDLE:
            self._drop(min(filter(None, self._idle.values()), key=lambda kept: kept[0].since))
        if len(self._idle) > MOST_IDLE:
            self._idle = {where: idle for where, idle in self._idle.items() if idle}

    def _drop(self, idle: deque[Connection]) -> None:
        """Close the one that was not used for the longest time."""
        idle.popleft().close()
        self._kept -= 1

    async def connect(self, where: Target, kind: type[C]) -> C:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if where.socket is not None:
                    _, connection = await self.loop.create_unix_connection(kind, where.socket)
                else:
                    tls = _trusted.get((where.host, where.port)) or _tls() if where.secure else None
                    _, connection = await self.loop.create_connection(kind, where.host, where.port, ssl=tls)
        except TimeoutError as exc:
            raise NotSent(f"{where.shown} did not take a connection within {CONNECT_TIMEOUT:g} s") from exc
        except OSError as exc:
            raise NotSent(f"cannot connect to {where.shown}: {_why(exc)}") from exc
        return connection

    async def close(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
        self._idle.clear()
        self._kept = 0


def _why(exc: OSError) -> str:
    """In the system's words. asyncio tells the address instead, once for each that the host has."""
    numbers = dict.fromkeys(int(number) for number in re.findall(r"\[Errno (\d+)\] Connect call failed", str(exc)))
    return ", ".join(map(os.strerror, numbers)) or exc.strerror or str(exc)


_pools: dict[tuple[int, int], _Pool] = {}


def _pool() -> _Pool:
    loop = asyncio.get_running_loop()
    key = (os.getpid(), id(loop))
    pool = _pools.get(key)
    if pool is None or pool.loop is not loop:
        # A forked child leaves its parent's sockets alone; a closed loop's are gone with it.
        for old, found in list(_pools.items()):
            if old[0] != key[0] or found.loop.is_closed():
                del _pools[old]
        pool = _pools[key] = _Pool(loop)
    return pool


async def close() -> None:
    """Close the idle connections of this event loop."""
    await _pool().close()


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
