"""What passes between a sandbox and whoever carries its calls to the instances that it depends on.

A sandbox asks for one of them by its alias and for one of a few things; it names no address and holds no token. Each
message is JSON behind its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

PATH = "/children"
PROTOCOL = "aenv-children"
"""What a carrier names in ``Upgrade``."""
MOST = 64 * 1024 * 1024
"""Bytes of a message."""
AT_ONCE = 64
"""Questions of a sandbox that are answered at once."""
_LENGTH = struct.Struct("!I")


class Ask(Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A question for one that the sandbox depends on."""

    id: int
    """Which answer is for it, on this connection."""
    call: Annotated[str, Meta(pattern=r"\A[0-9a-f]{24}\Z")]
    """The call's id: asked again under it over another connection, it is not run again. It goes into a header of a
    request that has a token in it, so nothing else can be one."""
    alias: str
    kind: Literal["list_tools", "call_tool", "call_reward", "call_function", "reset"]
    name: str | None = None
    arguments: Raw = Raw(b"null")
    seed: int | None = None
    timeout: float


class Cancel(Struct, frozen=True, tag=True):
    """Nobody waits for that answer any more."""

    id: int


class Ready(Struct, frozen=True, tag=True):
    """The sandbox has all that it needs of them, or cannot go on."""

    error: dict[str, Any] | None = None


class Answer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a question: a value, or the error that it is raised as."""

    id: int
    value: Raw = Raw(b"null")
    error: dict[str, Any] | None = None


decode_asked = msgspec.json.Decoder(Ask | Cancel | Ready).decode
decode_answer = msgspec.json.Decoder(Answer).decode


class NoMessage(ValueError):
    """What came is no message."""


def written(message: Ask | Cancel | Ready | Answer) -> bytes:
    """A message as it is sent."""
    data = msgspec.json.encode(message)
    return _LENGTH.pack(len(data)) + data


class Messages:
    """Puts together what comes in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete. ``NoMessage`` when one is too long."""
        self._rest += data
        while len(self._rest) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._rest)
            if size > MOST:
                raise NoMessage(f"a message of {size} bytes is too long")
            if len(self._rest) < _LENGTH.size + size:
                return
            message = bytes(self._rest[_LENGTH.size : _LENGTH.size + size])
            del self._rest[: _LENGTH.size + size]
            yield message
