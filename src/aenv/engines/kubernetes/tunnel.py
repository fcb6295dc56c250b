"""Pods reached through the API server, by forwarding a port: for engines outside of the pods' network.

Each connection is a WebSocket to the API server with two channels, one for bytes and one for what went wrong; both
begin by naming the port.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aenv import http
from aenv.engines.kubernetes.api import Cluster
from aenv.engines.kubernetes.manifests import PORT
from aenv.engines.tunnels import Tunnel
from aenv.errors import NetworkError

_PROTOCOL = "v4.channel.k8s.io"
_DATA, _TROUBLE = 0, 1
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_FINAL, _MASKED, _SHORT, _LONG = 0x80, 0x80, 126, 127
_MOST_FRAME = 16 * 1024 * 1024


class PortForward(Tunnel):
    """A tunnel to the runtime of one pod."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str, path: Path) -> None:
        super().__init__(path, pod)
        self._cluster, self._place = cluster, f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Forwarded]:
        async with self._cluster.switch(f"{self._place}?ports={PORT}", _PROTOCOL) as connection:
            yield Forwarded(connection)


class Forwarded:
    """One connection to the port of a pod."""

    def __init__(self, connection: http.Upgraded) -> None:
        self._connection = connection

    async def send(self, data: bytes) -> None:
        await self._connection.send(frame(_BINARY, bytes([_DATA]) + data))

    async def end_input(self) -> None:
        """There is no word for the end of one direction: what is answered ends the connection."""
        return

    async def output(self) -> AsyncIterator[bytes]:
        named: set[int] = set()
        async for kind, data in self._frames():
            if kind == _PING:
                await self._connection.send(frame(_PONG, data))
            if kind == _CLOSE:
                return
            if kind not in (_BINARY, _TEXT) or not data:
                continue
            channel, rest = data[0], data[1:]
            if channel not in named:  # the first word on each is the port
                named.add(channel)
                rest = rest[2:]
            if channel == _TROUBLE and rest:
                raise NetworkError(f"the pod's port is not forwarded: {rest.decode(errors='replace')[:500]}")
            if channel == _DATA and rest:
                yield rest

    async def _frames(self) -> AsyncIterator[tuple[int, bytes]]:
        held, whole, kind = bytearray(), bytearray(), 0
        async for piece in self._connection:
            held += piece
            while (found := _unframed(held)) is not None:
                first, data, size = found
                del held[:size]
                code = first & 0x0F
                if code in (_CLOSE, _PING, _PONG):
                    yield code, data
                    continue
                whole += data
                kind = code if code != _CONTINUED else kind
                if len(whole) > _MOST_FRAME:
                    raise NetworkError("the API server sends a message without end")
                if first & _FINAL:
                    yield kind, bytes(whole)
                    whole.clear()


def frame(kind: int, data: bytes) -> bytes:
    """A frame as a client sends it: masked."""
    size = len(data)
    if size < _SHORT:
        head = bytes([_FINAL | kind, _MASKED | size])
    elif size < 1 << 16:
        head = bytes([_FINAL | kind, _MASKED | _SHORT]) + size.to_bytes(2, "big")
    else:
        head = bytes([_FINAL | kind, _MASKED | _LONG]) + size.to_bytes(8, "big")
    mask = os.urandom(4)
    return head + mask + _masked(data, mask)


def _masked(data: bytes, mask: bytes) -> bytes:
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big")


def _unframed(held: bytearray) -> tuple[int, bytes, int] | None:
    """The first frame of what came: its first byte, its content and its length; None while it is not all there."""
    if len(held) < 2:
        return None
    size, place = held[1] & 0x7F, 2
    for mark, more in ((_SHORT, 2), (_LONG, 8)):
        if held[1] & 0x7F == mark:
            size, place = int.from_bytes(held[2 : 2 + more], "big"), 2 + more
    if size > _MOST_FRAME:
        raise NetworkError("the API server sends a frame without end")
    if len(held) < place + size:
        return None
    return held[0], bytes(held[place : place + size]), place + size
