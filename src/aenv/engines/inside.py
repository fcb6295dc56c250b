"""What an engine asks the runtime in a sandbox: commands and files. Paths are then resolved in there, and nothing out
here follows a link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from aenv import http
from aenv.errors import CallTimeout, Conflict, SandboxLost, from_wire
from aenv.models import ExecResult, to_json

_ANSWER = 10.0
"""Seconds that a sandbox has, over those of a command, to say how it went."""
_FILE = 60.0
"""Seconds that a file may take, into a sandbox or out of it."""


class Door(NamedTuple):
    """Where a sandbox is, and the token that opens it to the engine."""

    id: str
    url: str
    key: str


class _Executed(msgspec.Struct):
    data: ExecResult


async def execute(door: Door, command: Sequence[str], timeout: float) -> ExecResult:
    """Run a command."""
    body = to_json({"command": list(command), "timeout": timeout})
    headers = b"Content-Type: application/json\r\n"
    response = await _ask(door, "POST", "/exec", headers, body, timeout=timeout + _ANSWER)
    try:
        return msgspec.json.decode(response.body, type=_Executed).data
    except msgspec.DecodeError as exc:
        raise SandboxLost(f"{door.id} answered with nonsense: {exc}") from exc


async def upload(door: Door, path: str, content: bytes) -> None:
    """Write a file."""
    await _ask(door, "PUT", f"/files?path={quote(path)}", b"Content-Type: application/octet-stream\r\n", content)


async def download(door: Door, path: str) -> bytes:
    """Read a file."""
    response = await _ask(door, "GET", f"/files?path={quote(path)}")
    if response.headers.get(b"content-type") != b"application/octet-stream":
        raise Conflict(f"{path} is a directory", hint="download its files one by one")
    return response.body


async def _ask(
    door: Door, method: str, path: str, headers: bytes = b"", body: bytes = b"", *, timeout: float = _FILE
) -> http.Response:
    headers += f"Authorization: Bearer {door.key}\r\n".encode()
    try:
        async with asyncio.timeout(timeout):
            response = await http.request(method, door.url, path, headers=headers, body=body, retries=0)
    except TimeoutError:
        raise CallTimeout(f"{door.id} did not answer within {timeout:g} s") from None
    if response.status != 200:
        try:
            wire = msgspec.json.decode(response.body, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise SandboxLost(f"{door.id} answered {response.status} with nonsense: {exc}") from exc
        raise from_wire({**wire, "message": wire.get("error")})
    return response
