"""What an engine asks the runtime in a sandbox: commands and files. Paths are then resolved in there, and nothing out
here follows a link."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from aenv import http
from aenv.engines.base import Engine
from aenv.errors import CallTimeout, Conflict, SandboxLost, TooLarge, from_wire
from aenv.models import ExecResult, to_json

_ANSWER = 10.0
"""Seconds that a sandbox has, over those of a command, to say how it went."""
_FILE = 60.0
"""Seconds that a file may take, into a sandbox or out of it."""
_MOST_RESULT, _MOST_WORDS = 16 * 1024 * 1024, 64 * 1024
"""Bytes of an answer: with what a command printed, and with nothing but how it went."""


class Door(NamedTuple):
    """Where a sandbox is, and the token that opens it to the engine."""

    id: str
    url: str
    key: str


class _Executed(msgspec.Struct):
    data: ExecResult


class InsideEngine(Engine):
    """An engine whose sandboxes all have the runtime inside, which runs commands and keeps files for it."""

    @abstractmethod
    async def _door(self, id: str) -> Door:
        """The door of a sandbox that runs; ``SandboxLost`` when it does not, ``NotFound`` when there is none."""

    async def exec(self, id: str, command: Sequence[str], *, timeout: float = 60.0) -> ExecResult:
        door = await self._door(id)
        body = to_json({"command": list(command), "timeout": timeout})
        headers = b"Content-Type: application/json\r\n"
        response = await _ask(door, "POST", "/exec", headers, body, timeout=timeout + _ANSWER, most=_MOST_RESULT)
        try:
            return msgspec.json.decode(response.body, type=_Executed).data
        except msgspec.DecodeError as exc:
            raise SandboxLost(f"{id} answered with nonsense: {exc}") from exc

    async def upload(self, id: str, path: str, content: bytes) -> None:
        headers = b"Content-Type: application/octet-stream\r\n"
        await _ask(await self._door(id), "PUT", f"/files?path={quote(path)}", headers, content, most=_MOST_WORDS)

    async def download(self, id: str, path: str) -> bytes:
        response = await _ask(await self._door(id), "GET", f"/files?path={quote(path)}", most=http.MOST_BODY)
        if response.headers.get(b"content-type") != b"application/octet-stream":
            raise Conflict(f"{path} is a directory", hint="download its files one by one")
        return response.body


async def _ask(
    door: Door, method: str, path: str, headers: bytes = b"", body: bytes = b"", *, timeout: float = _FILE, most: int
) -> http.Response:
    headers += f"Authorization: Bearer {door.key}\r\n".encode()
    try:
        async with asyncio.timeout(timeout):
            response = await http.request(method, door.url, path, headers=headers, body=body, retries=0, most=most)
    except TimeoutError:
        raise CallTimeout(f"{door.id} did not answer within {timeout:g} s") from None
    except TooLarge as exc:
        if most == http.MOST_BODY:  # a file may well be
            raise
        raise SandboxLost(f"{door.id} answered with more than anybody asked for: {exc.message}") from exc
    if response.status != 200:
        try:
            wire = msgspec.json.decode(response.body, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise SandboxLost(f"{door.id} answered {response.status} with nonsense: {exc}") from exc
        raise from_wire({**wire, "message": wire.get("error")})
    return response
