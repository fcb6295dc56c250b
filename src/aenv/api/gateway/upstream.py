"""Connections to sandboxes: made, kept for the next request, and given up."""

from __future__ import annotations

import asyncio
import errno
import hmac
import math
import select
import ssl
from collections import OrderedDict
from functools import cache, cached_property
from typing import Any, Protocol

import httptools
import msgspec

from aenv import http
from aenv.api.gateway.failures import Busy
from aenv.api.gateway.places import Place
from aenv.errors import NetworkError
from aenv.runtime import tokens

CONNECT_TIMEOUT = 5.0
IDLE = 60.0
"""Seconds an unused connection is kept; shorter than a sandbox keeps its side."""
MOST_IDLE = 1024
"""Unused connections that are kept, to all sandboxes together."""
MOST_REFUSAL = 64 * 1024
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Unreachable(NetworkError):
    """No connection to the sandbox can be made."""


class User(Protocol):
    """Whoever has the use of a connection."""

    def answer_received(self, data: bytes) -> None: ...

    def upstream_lost(self, error: Exception | None) -> None: ...

    def upstream_moves(self) -> None:
        """It became full, or has room again."""


class Upstream(asyncio.Protocol):
    """One connection to a sandbox, for one user at a time."""

    def __init__(self, sandbox: Sandbox, port: int) -> None:
        self.sandbox = sandbox
        self.port = port
        self.user: User | None = None
        self.transport: Any = None
        self.lost = False
        self.full = False
        """Whether the sandbox takes less than it is sent."""
        self.since = 0.0
        self._descriptor = -1

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.sandbox.open.add(self)
        self._descriptor = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        if self.user is None:
            self.transport.abort()  # nobody asked
        else:
            self.user.answer_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.sandbox.drop(self)
        user, self.user = self.user, None
        if user is not None:
            user.upstream_lost(exc)

    def pause_writing(self) -> None:
        self.full = True
        if self.user is not None:
            self.user.upstream_moves()

    def resume_writing(self) -> None:
        self.full = False
        if self.user is not None:
            self.user.upstream_moves()

    def hold(self, held: bool) -> None:
        """Take nothing from the sandbox for now, or go on."""
        if not self.transport.is_closing() and self.transport.is_reading() == held:
            if held:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def is_quiet(self) -> bool:
        """Whether it is open, and nothing has come since: not even its end, which we may not have been told yet."""
        return not (self.transport.is_closing() or self.full or stirs(self._descriptor, select.POLLIN))

    def give_up(self) -> None:
        """End it now, whatever is under way on it."""
        self.user = None
        self.transport.abort()


def stirs(descriptor: int, events: int) -> bool:
    """Whether one of these events, or an end, has come on a socket."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(0))


class Idle(OrderedDict["Upstream", None]):
    """All connections that are kept for the next request, the longest unused first."""

    def expire(self, now: float) -> None:
        """Close what nobody has used for long, and what is too much."""
        while self and (len(self) > MOST_IDLE or now - next(iter(self)).since > IDLE):
            self.popitem(last=False)[0].give_up()


class Sandbox:
    """A place, and the connections to it."""

    def __init__(self, place: Place, idle: Idle) -> None:
        self.place = place
        self.target = http.target(place.url)
        self.is_beyond = "/env-instance/" in self.target.prefix
        """Whether another server's gateway is there, which passes on to the sandbox."""
        self.calls = 0
        """Requests that are on their way to it, or in it."""
        self.shunned_until = 0.0
        """Until when others are asked first: it took no connection."""
        self.open: set[Upstream] = set()
        self._all_idle = idle
        self._idle: dict[int, list[Upstream]] = {}
        self.is_closed = False

    @cached_property
    def tokens(self) -> Pair:
        """What opens the sandbox."""
        return Pair(self.place.token)

    def take(self, port: int) -> Upstream | None:
        """A connection that was used before."""
        idle = self._idle.get(port)
        while idle:
            upstream = idle.pop()
            self._all_idle.pop(upstream, None)
            if upstream.is_quiet():
                return upstream
            upstream.give_up()
        return None

    def give(self, upstream: Upstream, now: float) -> None:
        """Keep a connection for the next request."""
        if self.is_closed:
            upstream.give_up()
            return
        upstream.user = None
        upstream.since = now
        upstream.hold(False)
        self._idle.setdefault(upstream.port, []).append(upstream)
        self._all_idle[upstream] = None
        if len(self._all_idle) > MOST_IDLE:
            self._all_idle.expire(now)

    def drop(self, upstream: Upstream) -> None:
        """It is lost."""
        self.open.discard(upstream)
        self._all_idle.pop(upstream, None)
        idle = self._idle.get(upstream.port)
        if idle and upstream in idle:
            idle.remove(upstream)

    def retire(self) -> None:
        """Keep no connection: what is under way ends, and no more is to come."""
        self._end()
        for upstream in [upstream for idle in self._idle.values() for upstream in idle]:
            upstream.give_up()

    def close(self) -> None:
        """Cut every connection."""
        self._end()
        for upstream in list(self.open):
            upstream.transport.abort()

    def _end(self) -> None:
        self.is_closed = True
        self.shunned_until = math.inf

    async def connect(self, port: int) -> Upstream:
        """A new connection, to the sandbox itself or to a port in it. Raises Unreachable."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                upstream = await self._dial(port)
                if port and not upstream.lost:
                    await _Handshake(upstream).done()
        except TimeoutError as exc:
            raise Unreachable(f"it did not take a connection within {CONNECT_TIMEOUT:g} s") from exc
        except OSError as exc:
            if exc.errno in _SHORT:
                raise Busy("the gateway has too many connections open", hint="try again in a moment") from exc
            raise Unreachable(f"no connection to it can be made: {exc.strerror or exc}") from exc
        if upstream.lost:
            raise Unreachable("it closed the connection at once")
        return upstream

    async def _dial(self, port: int) -> Upstream:
        loop, where = asyncio.get_running_loop(), self.target
        pause = 0.01
        while True:
            try:
                if where.socket is not None:
                    return (await loop.create_unix_connection(lambda: Upstream(self, port), where.socket))[1]
                tls = _tls() if where.secure else None
                return (await loop.create_connection(lambda: Upstream(self, port), where.host, where.port, ssl=tls))[1]
            except BlockingIOError:  # a local socket where too many wait already
                await asyncio.sleep(pause)
                pause *= 2


class Pair:
    """The tokens that a sandbox itself knows: its owner's, and those of agents that are made of it."""

    __slots__ = ("_agent", "_digest", "_owner")

    def __init__(self, owner: str) -> None:
        self._owner = owner.encode()
        self._digest = tokens.digest(owner)
        self._agent = tokens.agent_token(self._digest).encode()

    def has(self, token: str) -> bool:
        """Whether it is one of them."""
        given = token.encode()
        if hmac.compare_digest(given, self._owner) or hmac.compare_digest(given, self._agent):
            return True
        return "." in token and bool(tokens.agent_of(token, self._digest))


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Refusal(msgspec.Struct):
    error: str = "it said no more"
    hint: str | None = None


class _Handshake:
    """Turns a connection to a sandbox into one to a port in it."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._heard = 0
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def done(self) -> None:
        """Raises NetworkError when there is no way to the port."""
        upstream, place = self._upstream, self._upstream.sandbox.place
        upstream.user = self
        hop = "AEnv-Hop: instance\r\n" if upstream.sandbox.is_beyond else ""
        upstream.transport.write(
            f"POST {upstream.sandbox.target.prefix}/ports/{upstream.port} HTTP/1.1\r\nHost: localhost\r\n{hop}"
            f"Authorization: Bearer {place.token}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode()
        )
        try:
            await self._outcome
        except BaseException:
            upstream.give_up()
            raise
        upstream.user = None

    def answer_received(self, data: bytes) -> None:
        self._heard += len(data)
        if self._heard > MOST_REFUSAL:
            self._settle(NetworkError("the sandbox did not open the port"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            if self._parser.get_status_code() == 101 and not data[exc.args[0] :]:
                self._settle(None)
            else:
                self._settle(NetworkError("the sandbox did not open the port"))
        except httptools.HttpParserError:
            self._settle(NetworkError("the sandbox's answer is not HTTP"))

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() in (100, 101):
            return
        try:
            told = msgspec.json.decode(self._body, type=_Refusal)
        except (msgspec.DecodeError, UnicodeDecodeError):
            told = _Refusal()
        self._settle(NetworkError(told.error, hint=told.hint))

    def upstream_lost(self, error: Exception | None) -> None:
        self._settle(error or ConnectionResetError(errno.ECONNRESET, "the connection was closed"))

    def upstream_moves(self) -> None:
        """There is not that much to send."""

    def _settle(self, error: Exception | None) -> None:
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)
