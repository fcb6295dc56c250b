"""Event streams: read piece by piece as a server sends them, and written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from aenv.errors import ModelError

MOST_EVENT = 16 * 1024 * 1024
"""Bytes of one event."""
DONE = b"[DONE]"
"""The last event of OpenAI's chat completions."""
_encode = msgspec.json.Encoder().encode


class Events:
    """Cuts a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """What has become complete with this piece."""
        data = self._rest + piece if self._rest else piece
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *whole, self._rest = data.split(b"\n\n")
        if len(self._rest) > MOST_EVENT:
            raise ModelError(f"an event of the model's stream is over {MOST_EVENT} bytes")
        for event in whole:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


def unnamed(data: Any) -> bytes:
    """An event of chat completions."""
    return b"data: %b\n\n" % _encode(data)


def named(data: dict[str, Any]) -> bytes:
    """An event that is called as its data's type is."""
    return b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode(), _encode(data))
