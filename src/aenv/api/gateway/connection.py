"""A client's connection to the gateway: requests read off it, answers written to it in the same order."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools

from aenv.api.gateway import failures
from aenv.api.gateway.exchange import Exchange
from aenv.api.gateway.failures import BadRequest, HeadTooLong, TooSlow
from aenv.api.gateway.heads import MOST_HEAD, Head, Headers
from aenv.api.gateway.upstream import Upstream, stirs
from aenv.errors import AEnvError
from aenv.runtime.relay import Relay

if TYPE_CHECKING:
    from aenv.api.gateway.gateway import Gateway

IDLE = 90.0
"""Seconds after which an unused connection is closed; longer than a client keeps one."""
SLOW_HEAD = 30.0
"""Seconds a client may take to send the head of a request."""
SLOW_BODY = 60.0
"""Seconds a client may be silent in the middle of a body."""
STALLED = 60.0
"""Seconds in which a client must take something of what it is sent."""
LINGER = 5.0
"""Seconds a client has to hear that the rest of its request is not wanted."""
FAREWELL = 1.0
"""Seconds in which what a client has just sent arrives, when we end."""
MOST_WAITING = 16
"""Requests that may wait for the answer to an earlier one."""
PROBED = 60
"""Seconds of silence after which a client's machine is asked whether it is still there."""
_HUNG_UP = getattr(select, "POLLRDHUP", 0)
_RESET = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """Reads requests, and has them answered one after the other.

    A client that closes its side has left, also when it only meant that it sends no more: the two look the same, and
    a call that nobody waits for must end.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self.transport: Any = None
        self.stalled = False
        """Whether the client takes less than it is sent."""
        self._parser = httptools.HttpRequestParser(self)
        self._active: Exchange | None = None
        """The request that is being answered."""
        self._waiting: deque[Exchange] = deque()
        """Requests that came before the answer to an earlier one."""
        self._reading: Exchange | None = None
        """The request of which more is to come."""
        self._last: tuple[Exchange, Head] | None = None
        """The request after which the parser stops, because it may be the end of HTTP."""
        self._switching: Exchange | None = None
        """The request after which nothing is HTTP any more, if the sandbox agrees."""
        self._relay: Relay | None = None
        self._fault: AEnvError | None = None
        """What is wrong with what the client sends; it hears so in its turn."""
        self._closing = False
        """Whether no more requests are taken."""
        self._starting = False
        self._lingers = False
        self._paused = False
        self._in_head = False
        self._is_again = False
        """Whether a head is read that is known already."""
        self._url = b""
        self._headers: Headers = []
        self._size = 0
        self._untold = 0
        """Bytes since the parser last told of a request or of a piece of its body; a line without end is never told."""
        self._since = 0.0
        """When the client last did what it is waited for."""
        self._unsent = 0
        self._moved = 0.0

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def ends(self) -> bool:
        """Whether the answer under way is the last one."""
        return self._closing and not self._waiting and self._fault is None

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._since = self.now
        _probe(transport.get_extra_info("socket"))
        if not self._gateway.admit(self):
            self._reject(failures.Busy("the gateway has too many connections", hint="try again in a moment"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.lost(self)
        self._leave()

    def eof_received(self) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        if self._switching is not None:
            self._switching.early += data
        else:
            self._untold += len(data)
            self._read(data)
            if self._untold > MOST_HEAD:
                self._too_long()
            if self._fault is not None:
                self._reject(self._fault)
            if self._active is not None:
                self._active.flush()
            else:
                self._next()
        self.regulate()

    def pause_writing(self) -> None:
        self.stalled = True
        if self._active is not None:
            self._active.hold(True)

    def resume_writing(self) -> None:
        self.stalled = False
        if self._active is not None:
            self._active.hold(False)
        else:
            self._next()

    # Reading requests

    def _read(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as exc:
                data = self._upgrade(data[exc.args[0] :])
            except httptools.HttpParserError as exc:
                self._fault = self._fault or BadRequest(f"that is not HTTP: {exc}")
                return

    def _upgrade(self, rest: bytes) -> bytes:
        """The parser takes what follows for another protocol: what of it is HTTP all the same."""
        if self._fault is not None or self._last is None:
            return b""
        exchange, head = self._last
        if head.upgrade is not None:
            self._switching = exchange
            exchange.early = rest
            return b""
        # Not passed on: it is the plain request that it also is, and its body comes next.
        self._parser = httptools.HttpRequestParser(self)
        self._is_again = True
        return b"POST / HTTP/1.1\r\n%b\r\n%b" % (head.framing, rest)

    def on_message_begin(self) -> None:
        if not self._is_again:
            self._url, self._headers, self._size, self._untold = b"", [], 0, 0
            self._in_head = True
            self._since = self.now

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._grow(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value) + 4)
        if self._in_head and self._fault is None:
            self._headers.append((name, value))

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MOST_HEAD:
            self._too_long()

    def _too_long(self) -> None:
        self._fault = self._fault or HeadTooLong(f"the head of the request is over {MOST_HEAD} bytes")

    def on_headers_complete(self) -> None:
        if self._is_again:
            self._is_again = False
            return
        self._in_head = False
        self._size = self._untold = 0
        if self._fault is not None or self.transport.is_closing():
            return
        parser = self._parser
        try:
            head = Head(
                parser.get_method(),
                self._url,
                self._headers,
                version=parser.get_http_version(),
                keep_alive=parser.should_keep_alive(),
            )
        except AEnvError as exc:
            self._fault = exc
            return
        gateway = self._gateway
        watch = gateway.watching.begin(head) if gateway.watching is not None else None
        exchange = self._reading = Exchange(self, head, gateway.router, watch)
        self._last = (exchange, head) if parser.should_upgrade() else None
        if not head.has_body:
            exchange.received = True
        self._waiting.append(exchange)

    def on_body(self, part: bytes) -> None:
        self._since = self.now
        self._untold = 0
        if self._reading is not None:
            self._reading.add(part)

    def on_message_complete(self) -> None:
        self._untold = 0
        exchange = self._reading
        if exchange is None or self._fault is not None:
            return
        if self._parser.should_upgrade() and not exchange.received:
            return  # the parser stops here, but the body is still to come
        self._reading = None
        exchange.end()

    # Answering them

    def _next(self) -> None:
        """Take up the next request, once the client has read enough of the answers to earlier ones."""
        if self._starting or self._lingers:
            return
        self._starting = True
        while self._waiting and self._active is None and not self.stalled and not self.transport.is_closing():
            self._active = self._waiting.popleft()
            self._active.start()
        self._starting = False
        if self._active is not None or self._waiting or self._lingers or self.transport.is_closing():
            return
        if self._fault is not None:
            self._reject(self._fault)
        elif self._closing:
            self._part()

    def send(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def finished(self, exchange: Exchange, *, keep: bool) -> None:
        """An answer is complete."""
        self._active = None
        self._since = self.now
        if not exchange.received:
            self._linger()
        elif not keep:
            self.transport.close()
        else:
            self._next()
            self.regulate()

    def cut(self, *, hard: bool) -> None:
        """An answer broke off: end the connection, so that the client knows."""
        self._active = None
        if hard and not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self.transport.close()

    def join(self, upstream: Upstream, rest: bytes, exchange: Exchange) -> None:
        """Client and sandbox go on with a protocol of their own."""
        self._relay = Relay(self.transport, upstream.transport, active=exchange.touch)
        self._relay.begin(exchange.early, rest, one_full=self.stalled, other_full=upstream.full)
        self._relay.ended.add_done_callback(lambda _: self._parted(upstream, exchange))

    def _parted(self, upstream: Upstream, exchange: Exchange) -> None:
        upstream.connection_lost(None)
        exchange.over()
        self._gateway.lost(self)

    def _reject(self, fault: AEnvError) -> None:
        """Take no more requests: this one cannot be read. Earlier ones still get their answers."""
        self._fault = fault
        self._closing = True
        broken, self._reading = self._reading, None
        if broken is not None and broken is self._active:
            broken.refuse(fault)
        elif broken is not None:
            self._waiting.remove(broken)
        if self._active is None and not self._waiting:
            if not self._lingers and not self.transport.is_closing():
                self.send(failures.answer(fault, close=True, page=False))
                self._linger()
        else:
            self.regulate()

    def _linger(self, patience: float = LINGER) -> None:
        """Close, after the client had time to read the answer: closed at once, what it still sends would destroy it."""
        self._lingers = self._closing = True
        self._since = self.now + patience - LINGER
        self._waiting.clear()
        if self.transport.is_closing():
            return
        self._pause(False)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client has left already
            self.transport.abort()

    def _part(self) -> None:
        """End a connection on which nothing was asked. What the client may just be asking does not run: it is told so
        beforehand, since the mere end of the connection would leave that open."""
        busy = failures.Busy("this server has ended", hint="ask again: nothing ran")
        self.send(failures.answer(busy, close=True, page=False))
        self._linger(FAREWELL)

    def _leave(self) -> None:
        self._closing = True
        self._waiting.clear()
        if self._active is not None:
            active, self._active = self._active, None
            active.abandon()

    # The pace

    def regulate(self) -> None:
        """Read on, or let the client wait."""
        reading = self._switching or self._reading
        full = len(self._waiting) >= MOST_WAITING or (reading is not None and reading.is_full)
        self._pause(full or (self._fault is not None and not self._lingers))

    def _pause(self, paused: bool) -> None:
        if paused is not self._paused and self._relay is None and not self.transport.is_closing():
            self._paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self._since = self.now
                self.transport.resume_reading()

    def check(self, now: float) -> None:
        """End a client that keeps us waiting, and notice one that is gone. Called every now and then."""
        if self._relay is None and self._active is not None:
            self._active.touch()
        if self._is_stuck(now):
            self.abort()
        elif self._relay is not None:
            return
        elif self._lingers:
            if now - self._since > LINGER:
                self.transport.abort()
        elif self._paused:
            if _HUNG_UP and stirs(self.transport.get_extra_info("socket").fileno(), _HUNG_UP):
                self.transport.abort()
        elif self._in_head:
            if now - self._since > SLOW_HEAD:
                self._reject(TooSlow(f"the head of the request took longer than {SLOW_HEAD:g} s"))
        elif self._reading is not None:
            if now - self._since > SLOW_BODY:
                self._reject(TooSlow(f"nothing came of the request's body for {SLOW_BODY:g} s"))
        elif self._active is None and now - self._since > IDLE:
            self.transport.close()

    def _is_stuck(self, now: float) -> bool:
        """Whether nothing of what waits to be sent has been taken for too long."""
        unsent = self.transport.get_write_buffer_size() if self._relay is None else self._relay.unsent
        if unsent != self._unsent or not unsent:
            self._unsent, self._moved = unsent, now
        return now - self._moved > STALLED

    def finish(self) -> None:
        """Answer what was asked, and take no more."""
        self._closing = True
        if self._relay is None and self._active is None and not self._waiting and not self._lingers:
            self._part()

    def abort(self) -> None:
        """End it, whatever is under way."""
        if self._relay is not None:
            self._relay.cut()
        else:
            self.transport.abort()


def _probe(sock: socket.socket) -> None:
    """Have the system notice a client whose machine is gone without a word."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBED)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBED // 4)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
