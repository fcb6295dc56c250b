"""One HTTP/1.1 connection in front of an ASGI application.

Written on asyncio and httptools because every call passes here, and every idle sandbox pays for what a server does
by the clock. A small answer leaves in one write. ``benchmarks/calls.py`` measures it.
"""

from __future__ import annotations

import asyncio
import http
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import httptools

from aenv.runtime.service import log

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

IDLE = 90.0
"""Seconds after which an unused connection is closed; longer than a client keeps one."""
SLOW_HEAD = 30.0
"""Seconds a client may take to send the head of a request."""
MOST_HEAD = 64 * 1024
SLOW_BODY = 60.0
"""Seconds a client may be silent in the middle of a body."""
MOST_WAITING = 16
"""Requests that may wait for the answer to an earlier one on the same connection."""
MOST_UNREAD = 256 * 1024
"""Bytes of a body that wait for the application before the client is made to wait."""

_ONCE = frozenset((b"authorization", b"host"))
"""What two of in one request would be two requests in one."""
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}


class Connections:
    """The open connections of a server."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.open: set[Connection] = set()

    def __call__(self) -> Connection:
        return Connection(self)

    async def drain(self, patience: float) -> None:
        """Close what is idle, let answers under way end, then close the rest."""
        for connection in list(self.open):
            connection.finish()
        if busy := [connection.task for connection in self.open if connection.task is not None]:
            await asyncio.wait(busy, timeout=patience)
        for connection in list(self.open):
            connection.transport.abort()


class Connection(asyncio.Protocol):
    """Reads requests and answers them one after the other."""

    def __init__(self, server: Connections) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.transport: Any = None
        self.task: asyncio.Task[None] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._reading: Exchange | None = None
        """The request that is being received."""
        self._waiting: deque[Exchange] = deque()
        """Requests sent before the answer to an earlier one."""
        self._active: Exchange | None = None
        self._closing = False
        self._paused = False
        self.writable: asyncio.Future[None] | None = None
        """Set while the client reads more slowly than it is sent to."""
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._url: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []
        self._untold = 0
        """Bytes since the parser last told of a request or of a piece of its body: of a head, or of what is between
        pieces and after them."""
        self._in_head = False
        self._early: bytes | None = None
        """What came after a request to go on with another protocol."""
        self._framing = b""
        """The header that says where the body ends of a request that asks for another protocol, and has a body."""
        self._is_again = False
        """Whether a head is read that is known already."""
        self._taken_over = False
        self._hung_up = False

    @property
    def is_idle(self) -> bool:
        """Whether it was used, and nothing is under way on it now, in either direction. A new one is about to be."""
        if self._in_head or not self._url:
            return False
        under_way = self._active or self._reading or self._waiting or self._untold or self.writable
        return not (under_way or self.transport.get_write_buffer_size())

    def hang_up(self) -> bool:
        """Close it while it is idle; False when something has come by now, which is answered first.

        The client's side is shut before that is looked at: what it sends later is refused, so nothing is lost unread.
        Then ours is, so that it sees at once that this connection is no use.
        """
        if self.transport.is_closing():
            return True
        with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())) as sock:
            try:
                sock.shutdown(socket.SHUT_RD)
                self._hung_up = bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
                if not self._hung_up:
                    sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the client has left
        if self._hung_up:
            self._closing = True
        else:
            self.transport.close()
        return not self._hung_up

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._server.open.add(self)
        self._since = self._loop.time()
        self._timer = self._loop.call_later(SLOW_HEAD, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self.resume_writing()
        for exchange in (self._active, self._reading):
            if exchange is not None:
                exchange.leave()

    def eof_received(self) -> bool:
        """Whether it stays open for an answer."""
        return self._hung_up

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            self.pause_reading()
            return
        left = data
        self._untold += len(data)
        try:
            while left:
                left = self._feed(left)
        except httptools.HttpParserError:
            self._reject(400, b"not an HTTP request")
            return
        if self._untold > MOST_HEAD:
            self._reject(431, b"the head of the request is too long")

    def _feed(self, data: bytes) -> bytes:
        """Parse it; what is still to be parsed. The parser stops where another protocol may begin."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            rest = data[exc.args[0] :]
            if self._framing:  # it is the plain request that it also is, and its body comes next
                self._parser = httptools.HttpRequestParser(self)
                self._is_again = True
                self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % self._framing)
                return rest
            self._closing = True  # answered as the plain request it also is, unless the application takes over
            self._early = rest
        return b""

    def pause_writing(self) -> None:
        self.writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)
        self.writable = None
        if self._active is None:
            self._next()

    # httptools

    def on_message_begin(self) -> None:
        if self._is_again:
            return
        self._url, self._headers, self._untold = [], [], 0
        self._in_head = True
        self._since = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._url.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_again:
            self._is_again, self._framing, self._headers = False, b"", []
            return
        self._in_head = False
        self._untold = 0
        headers, self._headers = self._headers, []  # what comes after a chunked body is none of them
        if self.transport.is_closing():
            return
        try:
            url = httptools.parse_url(b"".join(self._url))
        except httptools.HttpParserInvalidURLError:
            self._reject(400, b"not a URL")
            return
        if fault := self._read_framing(headers):
            self._reject(400, fault)
            return
        path = (url.path or b"/").decode("latin-1")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path or b"/",
            "query_string": url.query or b"",
            "root_path": "",
            "headers": headers,
            "aenv.transport": self.transport,
        }
        if self._parser.should_upgrade() and not self._framing:
            scope["aenv.upgrade"] = self.take_over
        self._reading = Exchange(self, scope, keep_alive=self._parser.should_keep_alive())
        if self._active is None and self.writable is None:
            self._start(self._reading)
        else:
            self._waiting.append(self._reading)
            if len(self._waiting) >= MOST_WAITING:
                self.pause_reading()

    def _read_framing(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Look where the body ends; what is wrong, if two readers could disagree about it or about who asks."""
        seen, upgrades = set(), self._parser.should_upgrade()
        for name, value in headers:
            if name in _ONCE:
                if name in seen:
                    return b"more than one " + name.capitalize()
                seen.add(name)
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                return b"a Transfer-Encoding other than chunked"
            elif upgrades and (name == b"transfer-encoding" or (name == b"content-length" and int(value))):
                self._framing = b"%b: %b" % (name, value)
        return b""

    def on_body(self, part: bytes) -> None:
        self._since = self._loop.time()
        self._untold = 0
        if self._reading is not None:
            self._reading.add(part)

    def on_message_complete(self) -> None:
        self._untold = 0
        if self._reading is not None and not self._framing:
            self._reading.complete()
            self._reading = None

    # Exchanges

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        self.task = self._loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._server.app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("%s %s failed", exchange.scope["method"], exchange.scope["path"])
            if not exchange.begun:
                self._refuse(500, b"the runtime failed")
        finally:
            self._active = self.task = None
            self._since = self._loop.time()
            if self._taken_over:
                self.connection_lost(None)
            elif not exchange.done or not exchange.keep_alive or self._closing:
                self.transport.close()
            else:
                self._next()

    def take_over(self, protocol: str, headers: str = "") -> tuple[Any, bytes]:
        """Agree to go on with another protocol: the transport, whose protocol is to be replaced at once and which is
        the application's until it returns, and what the client has sent already. ``headers``: whole lines."""
        if self.transport.is_closing():
            raise ConnectionResetError("the client left")
        self._taken_over = True
        self.transport.write(_STATUS[101] + f"connection: upgrade\r\nupgrade: {protocol}\r\n{headers}\r\n".encode())
        return self.transport, self._early or b""

    def _next(self) -> None:
        """Take up the next request, once the client has read enough of the answers to earlier ones."""
        if self.writable is not None or self.transport.is_closing():
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        else:
            self.resume_reading()

    def _reject(self, status: int, reason: bytes) -> None:
        """Take no more requests: this one cannot be read. An earlier one still gets its answer."""
        self._closing = True
        broken, self._reading = self._reading, None
        if broken is not None and broken in self._waiting:
            self._waiting.remove(broken)
        if broken is not None and broken.begun:
            self.transport.abort()  # a second answer would be taken for that to another request
        elif self._active in (None, broken) and not self._waiting:
            self._refuse(status, reason)
        else:
            self.pause_reading()

    def _refuse(self, status: int, reason: bytes) -> None:
        """Answer what cannot be handled, and close."""
        if not self.transport.is_closing():
            head = b"content-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(reason)
            self.transport.write(_STATUS[status] + head + reason)
            self.transport.close()

    def finish(self) -> None:
        """Answer what was asked, and take no more."""
        self._closing = True
        if self._active is None:
            self.transport.close()

    def pause_reading(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def _check_idle(self) -> None:
        limit = SLOW_HEAD if self._in_head else SLOW_BODY if self._reading is not None else IDLE
        waits_for_client = self._active is None or (self._reading is self._active and not self._paused)
        if waits_for_client and self._loop.time() - self._since >= limit:
            self.transport.abort()
        else:
            self._timer = self._loop.call_later(SLOW_HEAD, self._check_idle)


class Exchange:
    """One request and its answer, as ASGI sees them."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_continue",
        "_gone",
        "_head",
        "_more",
        "_parts",
        "_size",
        "_told",
        "_waiter",
        "begun",
        "done",
        "keep_alive",
        "scope",
    )

    def __init__(self, connection: Connection, scope: dict[str, Any], *, keep_alive: bool) -> None:
        self._connection = connection
        self.scope = scope
        self.keep_alive = keep_alive
        self.begun = False
        self.done = False
        self._parts: list[bytes] = []
        self._size = 0
        self._more = True
        self._told = False
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""
        self._chunked = False
        self._continue = any(name == b"expect" for name, _ in scope["headers"])

    # From the connection

    def add(self, part: bytes) -> None:
        if self.done:
            return  # answered already: the rest of the body is of no interest
        self._parts.append(part)
        self._size += len(part)
        if self._size > MOST_UNREAD:
            self._connection.pause_reading()
        self._wake()

    def complete(self) -> None:
        self._more = False
        self._wake()

    def leave(self) -> None:
        self._gone = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ASGI

    async def receive(self) -> Message:
        if self._continue and self._more and not self.begun:
            self._continue = False
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._gone or self.done or self._parts or (not self._more and not self._told)):
            self._connection.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._told or ((self._gone or self.done) and not self._parts):
            return {"type": "http.disconnect"}
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._size = [], 0
        self._told = not self._more
        return {"type": "http.request", "body": body, "more_body": self._more}

    async def send(self, message: Message) -> None:
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            body = b""
        elif self._chunked and (body or not more):
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        if data := self._head + body:
            self._head = b""
            self.begun = True
            self._connection.transport.write(data)
        if not more:
            self.done = True
            self._wake()
        elif self._connection.writable is not None:
            await self._connection.writable

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        without_length = status not in (204, 304) and all(name != b"content-length" for name, _ in headers)
        self._chunked = without_length and self.scope["http_version"] != "1.0"
        self.keep_alive = self.keep_alive and self._chunked == without_length
        lines = [_STATUS[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
