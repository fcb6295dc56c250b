"""Event streams: read piece by piece as a server sends them, and written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from aenv.errors import ModelError

MOST_EVENT = 16 * 1024 * 1024
"""Bytes of one event."""
DONE = b"[DONE]"
"""The last event of OpenAI's chat completions."""
_END = re.compile(rb"\r?\n\r?\n")
_encode = msgspec.json.Encoder().encode


class Events:
    """Cuts a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._read = 0
        """Bytes of it in which no event ends."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """What has become complete with this piece."""
        self._rest += piece
        *whole, rest = _END.split(bytes(self._rest[self._read :]))
        if whole:
            whole[0] = bytes(self._rest[: self._read]) + whole[0]
            self._rest = bytearray(rest)
        self._read = max(len(self._rest) - 3, 0)  # what comes may end what has begun to end
        if len(self._rest) > MOST_EVENT:
            raise ModelError(f"an event of the model's stream is over {MOST_EVENT} bytes")
        for event in whole:
            lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


def unnamed(data: Any) -> bytes:
    """An event of chat completions."""
    return b"data: %b\n\n" % _encode(data)


def named(data: dict[str, Any]) -> bytes:
    """An event that is called as its data's type is."""
    return b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode(), _encode(data))
