"""Ports inside the sandbox, for its owner: a connection to ``/ports/<port>`` becomes one to a server there.

The server in the sandbox may listen on loopback only, and the sandbox may have no network at all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

from aenv.errors import Invalid, NetworkError
from aenv.runtime import carried, frames
from aenv.runtime.answers import Request
from aenv.runtime.relay import Relay

CONNECT_TIMEOUT = 5.0
PROTOCOL = "tcp"
"""What a client names in ``Upgrade``."""
_LOOPBACK = ("127.0.0.1", "::1")


class UpgradeRequired(Invalid):
    status = 426


class Tunnel(NamedTuple):
    """What answers a request that wants a connection to a port."""

    port: int


def wanted(request: Request, port: str) -> Tunnel:
    """What a request for ``/ports/<port>`` asks for."""
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise Invalid(f"{port!r} is not a port", hint="ports are from 1 to 65535")
    if (request.header(b"upgrade") or "").lower() != PROTOCOL:
        raise UpgradeRequired("a port is reached by an upgrade", hint="send 'Connection: Upgrade' and 'Upgrade: tcp'")
    return Tunnel(int(port))


class Shell(NamedTuple):
    """What answers a request that wants a shell."""


def shell_wanted(request: Request) -> Shell:
    """What a request for ``/shell`` asks for."""
    if (request.header(b"upgrade") or "").lower() != frames.PROTOCOL:
        hint = f"'aenv instance shell' does it: send 'Connection: Upgrade' and 'Upgrade: {frames.PROTOCOL}'"
        raise UpgradeRequired("a shell is reached by an upgrade", hint=hint)
    return Shell()


class Socket(NamedTuple):
    """What answers a request that wants a session as a WebSocket."""

    key: str


def socket_wanted(request: Request) -> Socket:
    """What a request for ``/openenv/ws`` asks for."""
    key = request.header(b"sec-websocket-key")
    if (request.header(b"upgrade") or "").lower() != "websocket" or not key:
        raise UpgradeRequired("a session is a WebSocket", hint="send 'Connection: Upgrade' and 'Upgrade: websocket'")
    if request.header(b"sec-websocket-version") != "13":
        raise UpgradeRequired("WebSocket is spoken in version 13", hint="send 'Sec-WebSocket-Version: 13'")
    return Socket(key)


class Carrier(NamedTuple):
    """What answers a request that offers to carry calls to what the sandbox depends on."""


def carrier_wanted(request: Request) -> Carrier:
    """What a request for ``/children`` asks for."""
    if (request.header(b"upgrade") or "").lower() != carried.PROTOCOL:
        hint = f"send 'Connection: Upgrade' and 'Upgrade: {carried.PROTOCOL}'"
        raise UpgradeRequired("calls are carried over an upgraded connection", hint=hint)
    return Carrier()


class Tunnels:
    """The open tunnels of a sandbox."""

    def __init__(self, active: Callable[[], None]) -> None:
        """``active`` is called whenever something passes."""
        self._active = active
        self._open: set[Relay] = set()

    async def serve(self, tunnel: Tunnel, scope: MutableMapping[str, Any]) -> None:
        """Join the client's connection with one to the port, until they end. NetworkError when nobody listens there."""
        take_over = scope.get("aenv.upgrade")
        if take_over is None:
            raise UpgradeRequired("the connection cannot be upgraded", hint="send 'Connection: Upgrade'")
        inside = await _dial(tunnel.port)
        try:
            client, early = take_over(PROTOCOL)
        except ConnectionError:
            inside.transport.abort()
            return
        relay = Relay(client, inside.transport, active=self._active)
        relay.begin(early, inside.early, other_ended=inside.ended)
        self._open.add(relay)
        try:
            await asyncio.shield(relay.ended)
        finally:
            self._open.discard(relay)
            relay.cut()

    def close(self) -> None:
        for relay in self._open:
            relay.cut()


class _Waiting(asyncio.Protocol):
    """A connection that is not joined yet. Its server may be the one who speaks first."""

    def __init__(self) -> None:
        self.early = b""
        self.ended = False
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.early += data
        self.transport.pause_reading()

    def eof_received(self) -> bool:
        self.ended = True
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


async def _dial(port: int) -> _Waiting:
    loop = asyncio.get_running_loop()
    reason = ""
    for host in _LOOPBACK:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, waiting = await loop.create_connection(_Waiting, host, port)
        except OSError as exc:
            reason = reason or (os.strerror(exc.errno) if exc.errno else "it does not take a connection")
            continue
        if not waiting.lost:
            return waiting
        reason = reason or "it closed the connection at once"
    raise NetworkError(f"nothing in the sandbox answers on port {port}: {reason}", hint="is its server started?")
