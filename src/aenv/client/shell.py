"""A shell in a sandbox, as its owner uses it from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from aenv import http
from aenv.errors import AEnvError, NetworkError, SandboxLost, from_wire
from aenv.models import to_json
from aenv.runtime.frames import END, ERRORS, EXIT, FAILED, INPUT, OUTPUT, PROTOCOL, SIZE, START, Frames, NoFrame
from aenv.runtime.frames import frames as framed
from aenv.runtime.frames import window as written_window

_MOST_FAILURE = 1024 * 1024


class Window(NamedTuple):
    """A terminal that a shell is to have."""

    rows: int
    columns: int
    term: str = ""


class Printed(NamedTuple):
    """A piece of what a shell printed."""

    data: bytes
    is_error: bool
    """Whether it went to the standard error, where there is no terminal."""


class Shell:
    """One that runs."""

    def __init__(self, connection: http.Upgraded) -> None:
        self._connection = connection
        self._pieces = aiter(connection)
        self._frames = Frames()
        self._heard: deque[tuple[bytes, bytes]] = deque()
        self.code: int | None = None
        """Its exit code, once it has ended: minus a signal's number when one ended it."""

    async def type(self, data: bytes) -> None:
        await self._connection.send(framed(INPUT, data))

    async def end_input(self) -> None:
        """Nothing more is typed."""
        await self._connection.send(framed(END))

    async def resize(self, rows: int, columns: int) -> None:
        await self._connection.send(framed(SIZE, written_window(rows, columns)))

    def __aiter__(self) -> Shell:
        return self

    async def __anext__(self) -> Printed:
        """What it prints next, until it has ended; ``SandboxLost`` when the connection ends before."""
        while self.code is None:
            try:
                if self._heard:
                    if (printed := self._understood(*self._heard.popleft())) is not None:
                        return printed
                    continue
                piece = await anext(self._pieces, None)
                if piece is None:
                    raise SandboxLost("the connection to the shell ended")
                self._heard.extend(self._frames.feed(piece))
            except (NoFrame, msgspec.MsgspecError, KeyError) as exc:
                raise NetworkError(f"what the shell sends cannot be read: {exc}") from exc
        raise StopAsyncIteration

    def _understood(self, kind: bytes, data: bytes) -> Printed | None:
        if kind in (OUTPUT, ERRORS):
            return Printed(data, kind == ERRORS)
        if kind == EXIT:
            self.code = msgspec.json.decode(data, type=dict[str, int])["code"]
        elif kind == FAILED:
            raise from_wire(msgspec.json.decode(data, type=dict[str, Any]))
        return None


@asynccontextmanager
async def shell(
    url: str, token: str | None, command: Sequence[str] = (), window: Window | None = None
) -> AsyncIterator[Shell]:
    """A shell in the sandbox at ``url``, for the length of a block: a terminal of that window, or with pipes.

    ``command`` is what runs in place of a shell: a line when it is one word, else a program and its arguments.
    """
    headers = f"Authorization: Bearer {token}\r\n".encode() if token else b""
    async with http.upgrade(url, "/shell", PROTOCOL, headers=headers) as connection:
        if connection.status != http.SWITCHED:
            raise _failure(connection.status, await connection.read(_MOST_FAILURE))
        start: dict[str, Any] = {"command": list(command) or None}
        if window is not None:
            start |= {"tty": True, "rows": window.rows, "columns": window.columns, "term": window.term}
        await connection.send(framed(START, to_json(start)))
        yield Shell(connection)


def _failure(status: int, body: bytes) -> AEnvError:
    try:
        wire = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return NetworkError(f"no shell was given: the answer has status {status}")
    return from_wire({**wire, "message": wire.get("error") or wire.get("message") or f"status {status}"})
