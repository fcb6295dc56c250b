"""Messages between the processes of this engine: four bytes of length, then JSON, with descriptors beside them."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from aenv.engines.process.output import Printed
from aenv.errors import SandboxLost, StartFailed

LARGEST = 1024 * 1024
"""Bytes of one message that a trusted process takes from one that is not."""
IMPORTING = {"phase": "import"}
"""What a process says when it begins to import the author's modules."""
_MOST_DESCRIPTORS = 8
"""Of a message that a trusted process takes from one that is not."""
_MOST_GIVEN = 16
"""Of one that it sends."""
_PASS_PIDFD, _PIDFD, _PASS_RIGHTS = 76, 4, 83
"""Names that Python's socket module does not have: SO_PASSPIDFD and SCM_PIDFD, since Linux 6.5, and SO_PASSRIGHTS,
since 6.16."""
_NO_LINGER = struct.pack("ii", 0, 0)


def send(sock: socket.socket, message: Any) -> None:
    """Send on a blocking socket."""
    sock.sendall(frame(message))


def frame(message: Any) -> bytes:
    """A message as it is sent."""
    data = json.dumps(message).encode()
    return struct.pack("I", len(data)) + data


class Channel:
    """The trusted side of a socket whose other side may be hostile: never blocks, and takes nothing too large."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pid: int | None = None
        """Who sent the last message, as the kernel knows it; only between ``ask_who`` and ``take_pidfd``."""
        self._pidfd: int | None = None
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    def ask_who(self) -> None:
        """Have the kernel say who sends what comes next."""
        if hasattr(socket, "SO_PASSCRED"):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, _PASS_PIDFD, 1)

    def take_pidfd(self) -> int | None:
        """A handle on the process that sent the last message, and no more asking. From now on the other side may send
        no descriptors, where the kernel can refuse them."""
        pidfd, self._pidfd = self._pidfd, None
        if hasattr(socket, "SO_PASSCRED"):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
            with suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, _PASS_PIDFD, 0)
                self.sock.setsockopt(socket.SOL_SOCKET, _PASS_RIGHTS, 0)
            if pidfd is None and self.pid:
                with suppress(OSError):
                    pidfd = os.pidfd_open(self.pid)
        return pidfd

    async def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """``SandboxLost`` when nobody reads it. With descriptors it must be small: it is sent in one piece."""
        try:
            while descriptors:
                try:
                    socket.send_fds(self.sock, [frame(message)], descriptors)
                    return
                except BlockingIOError:
                    await until(self.sock.fileno(), writable=True)
            await asyncio.get_running_loop().sock_sendall(self.sock, frame(message))
        except OSError as exc:
            raise SandboxLost("the other side is gone") from exc

    async def receive(self) -> tuple[Any, list[int]]:
        """The next message with the descriptors that came so far; ``SandboxLost`` at the end, or when it is none."""
        while True:
            if len(self._buffer) >= 4:
                size = struct.unpack_from("I", self._buffer)[0]
                if size > LARGEST:
                    raise SandboxLost(f"a message of {size} bytes came from inside")
                if len(self._buffer) >= 4 + size:
                    data = bytes(self._buffer[4 : 4 + size])
                    del self._buffer[: 4 + size]
                    descriptors, self._descriptors = self._descriptors, []
                    try:
                        return json.loads(data), descriptors
                    except (ValueError, RecursionError) as exc:
                        discard(descriptors)
                        raise SandboxLost("a message from inside is not JSON") from exc
            try:
                self._take()
            except BlockingIOError:
                await until(self.sock.fileno())
            except ConnectionError as exc:
                raise SandboxLost("the other side is gone") from exc

    def _take(self) -> None:
        data, ancillary = _receive(self.sock)
        for kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                self._descriptors += _descriptors(content)
            elif kind == _PIDFD:
                if self._pidfd is not None:
                    os.close(self._pidfd)
                self._pidfd = struct.unpack("i", content)[0]
            else:
                self.pid = struct.unpack("3i", content)[0]
        if len(self._descriptors) > _MOST_DESCRIPTORS:
            discard(self._descriptors)
            self._descriptors = []
            raise SandboxLost("too many descriptors came from inside")
        if not data:
            raise SandboxLost("the other side is gone")
        self._buffer += data

    def close(self) -> None:
        discard(self._descriptors)
        self._descriptors = []
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self.sock.close()


def connect() -> tuple[Channel, Printed, int, int]:
    """What a child says and what it prints, and the child's own ends of the two."""
    mine, theirs = socket.socketpair()
    try:
        printed_read, printed_write = os.pipe()
    except OSError:
        mine.close()
        theirs.close()
        raise
    return Channel(mine), Printed(printed_read), theirs.detach(), printed_write


def receive_some(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Some bytes, and the descriptors that came with them."""
    data, ancillary = _receive(sock, _MOST_GIVEN)
    return data, [found for kind, content in ancillary if kind == socket.SCM_RIGHTS for found in _descriptors(content)]


def _receive(sock: socket.socket, most: int = _MOST_DESCRIPTORS) -> tuple[bytes, list[tuple[int, bytes]]]:
    space = socket.CMSG_SPACE(most * 4) + 2 * socket.CMSG_SPACE(16)
    # What is executed later must not have them.
    data, ancillary, _, _ = sock.recvmsg(65536, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    return data, [(kind, content) for level, kind, content in ancillary if level == socket.SOL_SOCKET]


def _descriptors(content: bytes) -> list[int]:
    found = array.array("i")
    found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return list(found)


def words(value: object, most: int = 16 * 1024) -> str:
    """Text that came from inside, as far as it is text and not too long."""
    return value[:most] if isinstance(value, str) else ""


def failure(value: object) -> StartFailed:
    """What went wrong inside, whatever it was called there."""
    told = value if isinstance(value, dict) else {}
    return StartFailed(words(told.get("message")) or "it failed without a word", hint=words(told.get("hint")) or None)


def discard(descriptors: Iterable[int]) -> None:
    """Close what came from inside. A socket may have been told to linger, and would hold this process with it."""
    for descriptor in descriptors:
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            continue
        with sock, suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def until(descriptor: int, *, writable: bool = False) -> None:
    """Wait until a descriptor can be read from, or written to."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)

    def is_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(descriptor, is_ready)
    try:
        await ready
    finally:
        remove(descriptor)
