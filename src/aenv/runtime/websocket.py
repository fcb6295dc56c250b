"""The server's side of a WebSocket (RFC 6455): whole messages of text in and out, within a bound. No extensions."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Any

PROTOCOL = "websocket"
"""What a client names in ``Upgrade``."""
MOST_WAITING = 16
"""Messages that may wait for the answer to an earlier one."""
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CLOSING = 5.0
"""Seconds in which a client must agree that it is over."""
_MORE, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_LAST, _RESERVED, _MASKED = 0x80, 0x70, 0x80
NORMAL, GOING_AWAY, BROKEN, NOT_TAKEN, NOT_TEXT, REFUSED, TOO_LARGE, TRY_LATER = (
    *(1000, 1001, 1002, 1003, 1007, 1008, 1009, 1013),
)
"""Why a socket is closed."""


def accept(key: str) -> str:
    """What a client's ``Sec-WebSocket-Key`` is answered with."""
    return base64.b64encode(hashlib.sha1(key.encode() + _MAGIC, usedforsecurity=False).digest()).decode()


def frame(kind: int, data: bytes) -> bytes:
    """Data as a server sends it: in one frame, not masked."""
    size = len(data)
    if size < 126:
        return struct.pack("!BB", _LAST | kind, size) + data
    if size < 65536:
        return struct.pack("!BBH", _LAST | kind, 126, size) + data
    return struct.pack("!BBQ", _LAST | kind, 127, size) + data


class _Refused(Exception):
    """What came is nothing that is taken here."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class WebSocket(asyncio.Protocol):
    """A connection that has been switched to it, of which somebody reads one message after the other.

    It reads on while a message is answered, so that pings are answered and its end is seen at once.
    """

    def __init__(self, transport: Any, most: int) -> None:
        """``most``: bytes of a message, and of those that wait."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._transport = transport
        self._most = most
        self._read = bytearray()
        self._message = bytearray()
        self._kind = 0
        """Of the message that is being received; 0 between messages."""
        self._waiting: deque[str] = deque()
        self._size = 0
        """Of what waits."""
        self._wanted: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closing: asyncio.TimerHandle | None = None
        if (sock := transport.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
            _keep_alive(sock)

    def begin(self, early: bytes) -> None:
        """Take the connection over, and what it has brought already."""
        self._transport.set_protocol(self)
        if not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()
        self.data_received(early)

    async def receive(self) -> str | None:
        """The next message; ``None`` when there will be none."""
        while not self._waiting:
            if self._closing is not None or self.ended.done():
                return None
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        message = self._waiting.popleft()
        self._size -= len(message)
        return message

    async def send(self, text: bytes) -> None:
        """Send a message, at the pace of who reads it."""
        if self._closing is None and not self.ended.done():
            self._transport.write(frame(_TEXT, text))
            if self._writable is not None:
                await self._writable

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Say that it is over. The connection ends when the client has agreed, or does not."""
        if self._closing is None and not self.ended.done():
            self._transport.write(frame(_CLOSE, struct.pack("!H", code) + reason.encode()[:123]))
            self._closing = asyncio.get_running_loop().call_later(_CLOSING, self._transport.abort)
            self._wake()

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._read += data
        try:
            while self._take():
                pass
        except _Refused as exc:
            self._read.clear()
            self.close(exc.code, str(exc))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self.ended.set_result(None)
        self._waiting.clear()
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    # Frames

    def _take(self) -> bool:
        """Take a frame from what was read; False when none is complete."""
        read = self._read
        if len(read) < 2:
            return False
        kind, size, begin = read[0] & 0x0F, read[1] & 0x7F, 2
        if read[0] & _RESERVED or not read[1] & _MASKED:
            raise _Refused(BROKEN, "a frame of a client is masked, and has no extensions")
        if size > 125:
            begin = 4 if size == 126 else 10
            if len(read) < begin:
                return False
            size = int.from_bytes(read[2:begin])
        is_last = bool(read[0] & _LAST)
        if kind >= _CLOSE and (size > 125 or not is_last):
            raise _Refused(BROKEN, "a frame of control is short, and whole")
        if kind < _CLOSE and size + len(self._message) + self._size > self._most:
            raise _Refused(TOO_LARGE, f"messages are over {self._most} bytes")
        if len(read) < begin + 4 + size:
            return False
        mask, data = bytes(read[begin : begin + 4]), bytes(read[begin + 4 : begin + 4 + size])
        del read[: begin + 4 + size]
        self._taken(kind, _unmasked(mask, data), is_last)
        return True

    def _taken(self, kind: int, data: bytes, is_last: bool) -> None:
        if kind == _CLOSE:
            self.close()
            self._read.clear()
            self._transport.close()
        elif self._closing is not None or kind == _PONG:
            return
        elif kind == _PING:
            if self._writable is None:  # who does not read need not be answered
                self._transport.write(frame(_PONG, data))
        elif kind == _BINARY:
            raise _Refused(NOT_TAKEN, "messages are text")
        elif kind not in (_TEXT, _MORE) or (kind == _MORE) != bool(self._kind):
            raise _Refused(BROKEN, "a frame that does not follow what came before")
        else:
            self._kind = _TEXT
            self._message += data
            if is_last:
                self._complete()

    def _complete(self) -> None:
        whole, self._message, self._kind = self._message, bytearray(), 0
        if len(self._waiting) >= MOST_WAITING:
            raise _Refused(REFUSED, f"{MOST_WAITING} messages wait for an answer")
        try:
            message = whole.decode()
        except UnicodeDecodeError:
            raise _Refused(NOT_TEXT, "a message is not UTF-8") from None
        self._waiting.append(message)
        self._size += len(message)
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


def _unmasked(mask: bytes, data: bytes) -> bytes:
    size = len(data)
    whole = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data) ^ int.from_bytes(whole)).to_bytes(size)


def _keep_alive(sock: Any) -> None:
    """Find out within a minute that the client's machine is gone: nobody may have anything to send meanwhile."""
    with suppress(OSError, AttributeError):  # not every system has all of them
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
