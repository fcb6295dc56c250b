"""Two sockets and what goes between them: one piece at a time, so that the slower side sets the pace of both."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from aenv.engines.egress.messages import (
    CHUNKED,
    MOST_FIELDS,
    TO_THE_END,
    Request,
    read_answer,
    read_chunk_size,
)

IDLE = 600.0
"""Seconds after which a connection on which nothing moves is cut."""
HALF_IDLE = 60.0
"""The same once one side has said all it has to say."""
PIECE = 64 * 1024
MOST_ANSWER_HEAD = 256 * 1024
MOST_LINE = 4 * 1024
"""Bytes of a line between the chunks of a body."""
_RESET = struct.pack("ii", 1, 0)


class Refusal(Exception):
    """An answer of the proxy's own."""

    def __init__(self, status: int, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.hint = hint

    def wire(self) -> bytes:
        # Clients show the reason of a refused CONNECT, and rarely its body.
        body = f"{self.reason}\n{self.hint}\n" if self.hint else f"{self.reason}\n"
        head = f"HTTP/1.1 {self.status} {self.reason}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode("ascii")


class Gone(Exception):
    """One side ended in the middle of something."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.peer = peer


class TooLong(ValueError):
    """A head or a line is longer than it may be."""

    def __init__(self) -> None:
        super().__init__("a line or a head is longer than it may be")


class Peer:
    """One end of a conversation: a socket, and what was read from it beyond what was asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._rest = bytearray()
        self.moved = self._loop.time()
        """When it last sent or received."""
        self.answered = False
        """Whether an answer was begun, after which none of ours can follow."""
        self.clean = False
        """Whether the conversation came to its end. A socket that is closed before is reset, so that the other side
        does not take what it has for all there is."""

    @property
    def silent(self) -> bool:
        """Whether nothing was received that is not used yet."""
        return not self._rest

    async def read(self, most: int = PIECE) -> bytes:
        """Some bytes; none at the end."""
        if not self._rest:
            return await self._receive(most)
        data = bytes(self._rest[:most])
        del self._rest[:most]
        return data

    async def until(self, mark: bytes, most: int) -> bytes:
        """What stands before a mark, at most so many bytes. The mark is taken too."""
        seen = 0
        while (end := self._rest.find(mark, seen)) < 0 and len(self._rest) < most + len(mark):
            seen = max(0, len(self._rest) - len(mark) + 1)
            data = await self._receive()
            if not data:
                raise Gone(self)
            self._rest += data
        if not 0 <= end <= most:
            raise TooLong
        found = bytes(self._rest[:end])
        del self._rest[: end + len(mark)]
        return found

    async def send(self, data: bytes) -> None:
        await asyncio.sleep(0)  # who never has to wait would keep the loop from the others
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as exc:
            raise Gone(self) from exc
        self.moved = self._loop.time()

    async def send_chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """Say that nothing more will be sent."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    async def leave(self) -> None:
        """Let the other side read what it was sent: closing with something unread would throw that away."""
        self.end()
        while await self.read():
            pass

    def close(self) -> None:
        if not self.clean:
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._sock.close()

    async def _receive(self, most: int = PIECE) -> bytes:
        await asyncio.sleep(0)
        try:
            data = await self._loop.sock_recv(self._sock, most)
        except OSError as exc:
            raise Gone(self) from exc
        self.moved = self._loop.time()
        return data


class Idle:
    """Ends a block with ``TimeoutError`` when nothing moves between its peers."""

    def __init__(self, *peers: Peer) -> None:
        self._peers = peers
        self._loop = asyncio.get_running_loop()
        self._patience = IDLE
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def half(self) -> None:
        """One side has ended: the other may not be silent for as long."""
        self._patience = HALF_IDLE
        if self._timer is not None:
            self._timer.cancel()
        self._check()

    def _check(self) -> None:
        left = max(peer.moved for peer in self._peers) + self._patience - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        elif not self._limit.expired():
            self._limit.reschedule(self._loop.time())


async def exchange(client: Peer, server: Peer, request: Request, idle: Idle) -> None:
    """Carry out a request: both directions, until they have ended. The first failure ends both."""
    try:
        async with asyncio.TaskGroup() as group:
            if request.tunnel:
                client.answered = True
                await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                group.create_task(_pump(client, server, idle))
                await _pump(server, client, idle)
            else:
                await server.send(request.head)
                upload = group.create_task(_upload(client, server, request.length, idle))
                await _download(client, server, request)
                upload.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def _pump(source: Peer, sink: Peer, idle: Idle) -> None:
    """One direction of a tunnel."""
    while data := await source.read():
        await sink.send(data)
    sink.end()
    idle.half()


async def _upload(client: Peer, server: Peer, length: int, idle: Idle) -> None:
    """Send a request's body, and then see to it that a client that leaves is noticed."""
    try:
        await _copy_body(client, length, server, chunked=length == CHUNKED)
    except ValueError as exc:
        raise Refusal(400, f"bad request: {exc}") from exc
    except Gone as gone:
        if gone.peer is client:
            raise
        # The server wants no more of it, and may have said why.
    while await client.read():
        pass
    idle.half()


async def _download(client: Peer, server: Peer, request: Request) -> None:
    """Send the answer."""
    while True:
        try:
            answer = read_answer(await server.until(b"\r\n\r\n", MOST_ANSWER_HEAD), request)
        except ValueError as exc:
            raise Refusal(502, f"{request.address} gave an answer that cannot be read: {exc}") from exc
        if answer.status == 101:
            raise Refusal(502, f"{request.address} changed to a protocol that nobody asked for")
        if answer.status >= 200:
            break
        if request.modern:
            await client.send(answer.head)
    client.answered = True
    await client.send(answer.head)
    try:
        await _copy_body(server, answer.length, client, chunked=answer.chunked)
    except ValueError as exc:
        raise Gone(server) from exc


async def _copy_body(source: Peer, length: int, sink: Peer, *, chunked: bool) -> None:
    """Send on a body, and no byte that comes after it. Chunks are taken apart, so that only our own frames leave."""
    send = sink.send_chunk if chunked else sink.send
    if length == CHUNKED:
        while size := read_chunk_size(await source.until(b"\r\n", MOST_LINE)):
            await _copy_bytes(source, size, send)
            await source.until(b"\r\n", 0)
        for _ in range(MOST_FIELDS):
            if not await source.until(b"\r\n", MOST_LINE):
                break
        else:
            raise ValueError("too many trailers")
    elif length == TO_THE_END:
        while data := await source.read():
            await send(data)
    else:
        await _copy_bytes(source, length, send)
    if chunked:
        await sink.send(b"0\r\n\r\n")


async def _copy_bytes(source: Peer, count: int, send: Callable[[bytes], Awaitable[None]]) -> None:
    while count:
        data = await source.read(min(count, PIECE))
        if not data:
            raise Gone(source)
        count -= len(data)
        await send(data)
