"""What a sandbox is brought when it is up, where its engine cannot give it along: its variables, its arguments, and its
project where no image has that. Values that nobody else is to see are then in no description of the sandbox.

It is brought once, by whoever has the engine's token. Until then the sandbox answers nothing but that it waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from aenv import config
from aenv.errors import AEnvError, Conflict, Invalid, StartFailed, TooLarge, Unauthorized
from aenv.models import to_json
from aenv.project import archive
from aenv.runtime.answers import Response
from aenv.runtime.protocol import Connections, Message, Receive, Send
from aenv.runtime.sending import send_whole

PATH = "/delivery"
ALREADY = "it was brought already"
"""What is said to whoever comes later; also when it serves."""
FOLDER = "project"
"""Where a project is that was brought, in the work directory."""
MOST = archive.MAX_SIZE + 8 * 1024 * 1024
_BACKLOG = 64


class Brought(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is sent as the first line, in JSON; an archive of the project may follow."""

    variables: dict[str, str] = {}
    arguments: list[str] = []
    project: bool = False
    """Whether an archive follows."""


def pack(brought: Brought, project: bytes = b"") -> bytes:
    """What an engine sends."""
    return to_json(brought) + b"\n" + project


def receive(host: str, port: int, work: Path) -> tuple[Brought, Path | None]:
    """Wait until it is brought, set the variables, and unpack the project where one came; and where that is."""
    from aenv.runtime.server import bind, loop_factory

    key = config.get("engine_token_sha256")
    if not key:
        raise Invalid("nobody could bring this sandbox what it waits for", hint="AENV_ENGINE_TOKEN_SHA256 is not set")
    with _at_end(_exit):
        door = _Door(key)
        with bind(host, port) as sock, asyncio.Runner(loop_factory=loop_factory()) as runner:
            brought, data = runner.run(door.wait(sock))
        if door.is_ended:
            _exit()
        config.set_environment(brought.variables)
        if not brought.project:
            return brought, None
        target = work / FOLDER
        archive.unpack(io.BytesIO(data), target)
        os.chdir(target)
        return brought, target


@contextmanager
def _at_end(act: Callable[[], object]) -> Iterator[None]:
    """Who is asked to end does, also as the first process of a container, which no signal ends by itself."""
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit() -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


class _Door:
    """Takes one delivery."""

    def __init__(self, key_sha256: str) -> None:
        self._key = key_sha256
        self._taken: asyncio.Future[tuple[Brought, bytes]] | None = None
        self.is_ended = False
        """Whether it was asked to end; then what it took is nothing."""

    async def wait(self, sock: socket.socket) -> tuple[Brought, bytes]:
        loop = asyncio.get_running_loop()
        self._taken = loop.create_future()
        connections = Connections(self._app)
        # What is raised in the midst of a request, its parser would take for the request's fault.
        with _at_end(lambda: loop.call_soon_threadsafe(self._end)):
            server = await loop.create_server(connections, sock=sock, backlog=_BACKLOG)
            try:
                return await self._taken
            finally:
                server.close()
                await connections.drain(1.0)

    def _end(self) -> None:
        self.is_ended = True
        if self._taken is not None and not self._taken.done():
            self._taken.set_result((Brought(), b""))

    async def _app(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            taken = await self._take(scope, receive)
        except AEnvError as exc:
            await send_whole(_response(exc.status, {"success": False, "error": exc.message, **exc.to_wire()}), send)
            return
        assert self._taken is not None
        self._taken.set_result(taken)
        await send_whole(_response(200, {"success": True, "data": None}), send)

    async def _take(self, scope: Message, receive: Receive) -> tuple[Brought, bytes]:
        if (scope["method"], scope["path"]) != ("PUT", PATH):
            raise _Waiting("the sandbox waits for what its engine brings it")
        if not self._opens(dict(scope["headers"]).get(b"authorization", b"")):
            raise Unauthorized(f"{PATH} needs the engine's token")
        self._check_free()
        body = await _body(receive)
        self._check_free()  # another one may have been faster
        head, _, data = body.partition(b"\n")
        try:
            brought = msgspec.json.decode(head, type=Brought)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise Invalid(f"what is brought cannot be read: {exc}") from None
        return brought, data

    def _check_free(self) -> None:
        if self._taken is None or self._taken.done():
            raise Conflict(ALREADY)

    def _opens(self, header: bytes) -> bool:
        kind, _, token = header.partition(b" ")
        given = hashlib.sha256(token.strip()).hexdigest()
        return kind.lower() == b"bearer" and hmac.compare_digest(given, self._key.lower())


class _Waiting(StartFailed):
    status = 503


async def _body(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Invalid("what is brought was cut off")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST:
            raise TooLarge(f"more than {MOST} bytes were brought")
        if not message.get("more_body"):
            return b"".join(parts)


def _response(status: int, body: dict[str, Any]) -> Response:
    return Response(status, to_json(body))
