"""What passes between a shell in a sandbox and its user: a letter that says what it is, a length, and the data."""

from __future__ import annotations

import struct
from collections.abc import Iterator

PROTOCOL = "aenv-shell"
"""What a client names in ``Upgrade``."""
START, INPUT, SIZE, END = b"s", b"i", b"w", b"e"
"""From the user: what to run (JSON), what is typed, the window's rows and columns, and that nothing more is typed."""
OUTPUT, ERRORS, EXIT, FAILED = b"o", b"r", b"x", b"f"
"""To the user: what it prints to either stream, its exit code (JSON), and why there is none (JSON)."""
MOST = 64 * 1024
"""Bytes of data in one frame."""
_HEAD = struct.Struct("!cI")
_WINDOW = struct.Struct("!HH")


class NoFrame(ValueError):
    """What came is not a frame."""


def frames(kind: bytes, data: bytes = b"") -> bytes:
    """Data as it is sent: in one frame, or in several where it is long."""
    pieces = [data[start : start + MOST] for start in range(0, len(data), MOST)] or [b""]
    return b"".join(_HEAD.pack(kind, len(piece)) + piece for piece in pieces)


def window(rows: int, columns: int) -> bytes:
    return _WINDOW.pack(rows, columns)


def read_window(data: bytes) -> tuple[int, int]:
    try:
        rows, columns = _WINDOW.unpack(data)
    except struct.error as exc:
        raise NoFrame("a window's size has four bytes") from exc
    return rows, columns


class Frames:
    """Puts together what comes in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """What is complete: kinds and data. ``NoFrame`` when it cannot be."""
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._rest)
            if size > MOST:
                raise NoFrame(f"a frame of {size} bytes is too long")
            if len(self._rest) < _HEAD.size + size:
                return
            piece = bytes(self._rest[_HEAD.size : _HEAD.size + size])
            del self._rest[: _HEAD.size + size]
            yield kind, piece
