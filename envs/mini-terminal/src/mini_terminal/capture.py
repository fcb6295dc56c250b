"""What a command prints, in bounded memory, and pipes that others still write to."""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import termios
import threading
from typing import NamedTuple

LIMIT = 64 * 1024
"""Most bytes of one stream that are kept: the first half and the last half of what was printed."""
CHUNK = 64 * 1024
_HALF = LIMIT // 2


class Text(NamedTuple):
    """A stream as text."""

    text: str
    truncated: bool
    binary: bool
    """It held bytes that are not UTF-8; each is shown as U+FFFD."""


class Stream:
    """The read end of a pipe, and the beginning and the end of what came out of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Take what is there, a chunk at most; False at the end of the pipe."""
        try:
            data = os.read(self.descriptor, CHUNK)
        except BlockingIOError:
            return True
        self.add(data)
        return bool(data)

    def drain(self) -> None:
        """Take what is in the pipe now, and nothing that comes later: a program in the background may never stop."""
        left = struct.unpack("i", fcntl.ioctl(self.descriptor, termios.FIONREAD, b"\0" * 4))[0]
        while left > 0:
            try:
                data = os.read(self.descriptor, min(left, CHUNK))
            except BlockingIOError:
                return
            if not data:
                return
            self.add(data)
            left -= len(data)

    def add(self, data: bytes) -> None:
        """Keep more, within the limit."""
        self.total += len(data)
        room = _HALF - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-_HALF:]
        if len(self._tail) > 2 * _HALF:
            del self._tail[:-_HALF]

    def text(self) -> Text:
        if self.total <= LIMIT:
            text, binary = _decoded(bytes(self._head + self._tail))
            return Text(text, False, binary)
        head, tail = bytes(self._head), bytes(self._tail[-_HALF:])
        head, tail = head[: whole(head)], tail[_beginning(tail) :]
        first, first_binary = _decoded(head)
        last, last_binary = _decoded(tail)
        mark = f"\n[... {self.total - len(head) - len(tail)} bytes left out ...]\n"
        return Text(first + mark + last, True, first_binary or last_binary)

    def take(self) -> bytes:
        """What is kept, and begin anew."""
        data = bytes(self._head + self._tail[-_HALF:])
        self.total = 0
        self._head.clear()
        self._tail.clear()
        return data

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def release(self) -> None:
        """Let go of the pipe. Where somebody still writes to it, it is read on, so that the writer lives."""
        try:
            ended = os.read(self.descriptor, CHUNK) == b""
        except BlockingIOError:
            ended = False
        if ended:
            self.close()
        else:
            leftovers.add(self.descriptor)


def whole(data: bytes) -> int:
    """How much of ``data`` does not end inside a character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(data) - back if length > back else len(data)
    return len(data)


def _beginning(data: bytes) -> int:
    """Where the first whole character of ``data`` begins."""
    return next((place for place, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)


def _decoded(data: bytes) -> tuple[str, bool]:
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="replace"), True


class Leftovers:
    """Pipes of commands that have ended while a program in the background still writes.

    Closed, they would end that program at its next line; unread, they would stop it. So one thread reads and forgets.
    """

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._lock = threading.Lock()

    def add(self, descriptor: int) -> None:
        with self._lock:
            if self._selector is None:
                selector = selectors.DefaultSelector()
                try:
                    threading.Thread(target=self._forget, args=(selector,), daemon=True).start()
                except RuntimeError:  # there may be no more threads
                    selector.close()
                    os.close(descriptor)
                    return
                self._selector = selector
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _forget(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
                try:
                    ended = os.read(key.fd, CHUNK) == b""
                except BlockingIOError:
                    continue
                if ended:
                    with self._lock:
                        selector.unregister(key.fd)
                    os.close(key.fd)


leftovers = Leftovers()
