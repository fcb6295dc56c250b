"""The one door to the network: a pool of HTTP/1.1 connections for each process and event loop.

Written on asyncio and httptools because every tool call passes here: ``benchmarks/http_client.py`` measures it
against the usual clients. It speaks to ``http://``, ``https://`` and ``unix:/path/to.sock``, and follows no redirects.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import ssl
from collections import deque
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from aenv.errors import Invalid, NetworkError, TooLarge

IDLE = 60.0
"""Seconds an unused connection is kept; shorter than a sandbox keeps its side."""
MOST_IDLE = 512
MOST_HEAD = 1024 * 1024
MOST_BODY = 1024 * 1024 * 1024
CONNECT_TIMEOUT = 10.0
CHUNK = 256 * 1024
BUSY = (429, 503)
RECONNECTS = 2
"""A process that is gone stays gone: asking it ten times would only hide that."""
_BACKOFF = 0.05
_LONGEST_BACKOFF = 5.0


class NotSent(NetworkError):
    """No connection could be made, so nothing was asked."""


class Response(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Target(NamedTuple):
    """Where a base URL points."""

    host: str
    port: int
    secure: bool
    socket: str | None
    prefix: str
    head: bytes
    """The ``Host`` line."""

    @property
    def shown(self) -> str:
        return self.socket or f"{self.host}:{self.port}"


@functools.lru_cache(maxsize=4096)
def target(base: str) -> Target:
    """Take a base URL apart; an ``Invalid`` says what is wrong with it."""
    if base.startswith("unix:"):
        return Target("localhost", 0, False, base.removeprefix("unix:"), "", b"Host: localhost\r\n")
    try:
        url = urlsplit(base)
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError as exc:
        raise Invalid(f"{base!r} is not an address: {exc}") from exc
    if url.scheme not in ("http", "https") or not url.hostname:
        raise Invalid(f"{base!r} is not an address", hint="use http://host:port")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return Target(
        url.hostname,
        port,
        url.scheme == "https",
        None,
        url.path.rstrip("/"),
        f"Host: {host}:{port}\r\n".encode(),
    )


async def request(
    method: str,
    base: str,
    path: str,
    *,
    headers: bytes = b"",
    body: bytes = b"",
    retries: int = 2,
    repeatable: bool = False,
) -> Response:
    """Send a request and read the whole answer.

    ``headers`` are complete lines. What is safe is tried again, with growing pauses: an answer of 429 or 503, and,
    when the request is ``repeatable``, one that was cut off, up to ``retries`` times; a connection that could not be
    made, at most ``RECONNECTS`` times. There is no time-out here: put ``asyncio.timeout`` around it.
    """
    where = target(base)
    line = f"{method} {where.prefix}{path} HTTP/1.1\r\n"
    if not line.isascii() or " " in path or headers.count(b"\n") != headers.count(b"\r\n"):
        raise Invalid(f"{path!r} or a header of its request has characters that HTTP does not carry")
    head = b"%b%b%bContent-Length: %d\r\n\r\n" % (line.encode(), where.head, headers, len(body))
    attempt = 0
    while True:
        try:
            response = await _pool().exchange(where, head, body, repeatable)
            if response.status not in BUSY or attempt >= retries:
                return response
            pause = _retry_after(response)
        except NotSent:
            if attempt >= min(retries, RECONNECTS):
                raise
            pause = None
        except NetworkError:
            if attempt >= retries or not repeatable:
                raise
            pause = None
        attempt += 1
        if pause is None:
            pause = min(_BACKOFF * 2 ** min(attempt, 10), _LONGEST_BACKOFF) * (0.5 + random.random())  # noqa: S311
        await asyncio.sleep(pause)


def _retry_after(response: Response) -> float | None:
    try:
        pause = float(response.headers[b"retry-after"])
    except (KeyError, ValueError):
        return None
    return min(pause, 60.0) if pause >= 0 else None


class _Pool:
    """Connections of one event loop in one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._idle: dict[Target, deque[_Connection]] = {}
        self._kept = 0

    async def exchange(self, where: Target, head: bytes, body: bytes, repeatable: bool) -> Response:
        while True:
            connection = self._take(where)
            reused = connection is not None
            if connection is None:
                connection = await self._connect(where)
            try:
                response = await connection.exchange(head, body)
            except _NeverAnswered as exc:
                if reused and repeatable:  # most likely closed while it lay idle
                    continue
                raise NetworkError(f"{where.shown} closed the connection without an answer") from exc
            if connection.reusable:
                self._give(where, connection)
            return response

    def _take(self, where: Target) -> _Connection | None:
        idle = self._idle.get(where)
        oldest = self.loop.time() - IDLE
        while idle:
            connection = idle.pop()
            self._kept -= 1
            if connection.reusable and connection.since > oldest:
                return connection
            connection.close()
        return None

    def _give(self, where: Target, connection: _Connection) -> None:
        connection.since = self.loop.time()
        idle = self._idle.setdefault(where, deque())
        idle.append(connection)
        self._kept += 1
        while self._kept > MOST_IDLE or idle[0].since < connection.since - IDLE:
            crowd = idle if idle[0].since < connection.since - IDLE else next(filter(None, self._idle.values()))
            crowd.popleft().close()
            self._kept -= 1
        if len(self._idle) > MOST_IDLE:
            self._idle = {where: idle for where, idle in self._idle.items() if idle}

    async def _connect(self, where: Target) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if where.socket is not None:
                    _, connection = await self.loop.create_unix_connection(_Connection, where.socket)
                else:
                    tls = _tls() if where.secure else None
                    _, connection = await self.loop.create_connection(_Connection, where.host, where.port, ssl=tls)
        except TimeoutError as exc:
            raise NotSent(f"{where.shown} did not take a connection within {CONNECT_TIMEOUT:g} s") from exc
        except OSError as exc:
            raise NotSent(f"cannot connect to {where.shown}: {exc.strerror or exc}") from exc
        return connection

    async def close(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
        self._idle.clear()
        self._kept = 0


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


class _NeverAnswered(Exception):
    """The connection ended before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.since = 0.0
        self.reusable = False
        self._transport: Any = None
        self._answer: asyncio.Future[Response] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self._heard = False
        self._headed = False
        self._sent = False

    async def exchange(self, head: bytes, body: bytes) -> Response:
        self._reset()
        self._answer = asyncio.get_running_loop().create_future()
        self.reusable = False
        try:
            if len(body) <= CHUNK:
                self._sent = True
                self._transport.write(head + body)
            else:
                await self._upload(head, body)
            return await self._answer
        finally:
            if not self.reusable:  # cut, refused, or left in the middle: its state is unknown
                self._transport.abort()
            self._answer = None

    async def _upload(self, head: bytes, body: bytes) -> None:
        self._transport.write(head)
        for start in range(0, len(body), CHUNK):
            answer = self._answer
            if answer is None or answer.done():  # refused half-way, 413 for example
                return
            if self._drained is not None:
                await asyncio.wait((self._drained, answer), return_when=asyncio.FIRST_COMPLETED)
            self._sent = start + CHUNK >= len(body)
            self._transport.write(body[start : start + CHUNK])

    def close(self) -> None:
        self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self.resume_writing()
        if self._answer is None or self._answer.done():
            return
        if not self._heard:
            self._answer.set_exception(_NeverAnswered())
        elif exc is None and self._headed and not self._has_length():
            self._finish()
        else:
            self._answer.set_exception(NetworkError("the connection was cut in the middle of an answer"))

    def _has_length(self) -> bool:
        return b"content-length" in self._headers or b"transfer-encoding" in self._headers

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self._transport.abort()  # nobody asked
            return
        self._heard = True
        if not self._headed:
            self._size += len(data)
            if self._size > MOST_HEAD:
                self._fail(TooLarge("the head of the answer is too long"))
                self._transport.abort()
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(NetworkError(f"the answer is not HTTP: {exc}"))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._headed, self._size = True, 0

    def on_body(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > MOST_BODY:
            self._fail(TooLarge(f"the answer is over {MOST_BODY} bytes"))
            self._transport.abort()
        else:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue and the like
            self._headers, self._headed = {}, False
            return
        self.reusable = self._sent and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done():
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._answer.set_result(Response(self._parser.get_status_code(), self._headers, body))
