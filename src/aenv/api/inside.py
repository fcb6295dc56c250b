"""What is asked of the runtime in a sandbox on its owner's behalf: commands, files, history, reset.

Paths are resolved in there. Answers are bounded, or passed on as they come; nothing waits without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import quote

import msgspec

from aenv import http
from aenv.api.gateway.places import Place
from aenv.errors import AEnvError, CallTimeout, NetworkError, SandboxError, SandboxLost, Unauthorized, from_wire

MOST = 32 * 1024 * 1024
"""Bytes of an answer that is read as a whole."""
_MOST_ERROR = 1024 * 1024
_LONGEST_WORD = 64 * 1024
"""Characters of what a sandbox refuses with."""
_SILENCE = 60.0
"""Seconds for which a file may stand still on its way."""
_JSON = b"Content-Type: application/json\r\n"
_BYTES = b"Content-Type: application/octet-stream\r\n"


async def ask(place: Place, method: str, path: str, body: bytes = b"", *, timeout: float) -> Any:
    """One request, and the data of its answer."""
    try:
        async with asyncio.timeout(timeout) as limit:
            response = await http.request(
                method, place.url, path, headers=_JSON + _token(place), body=body, retries=0, most=MOST
            )
    except NetworkError as exc:
        raise _lost(place, exc) from exc
    except TimeoutError:
        if not limit.expired():
            raise
        raise CallTimeout(f"{place.id} did not answer within {timeout:g} s") from None
    if response.status != 200:
        raise _failure(place, response.status, response.body)
    return _decoded(place, response.body)["data"]


class Opened:
    """A file, or the list of a directory, as it comes out of a sandbox. To be read to its end, or closed."""

    def __init__(self, stream: http.Stream, place: Place, stack: AsyncExitStack) -> None:
        kind = stream.headers.get(b"content-type", b"").partition(b";")[0]
        self.is_file = kind == b"application/octet-stream"
        length = stream.headers.get(b"content-length", b"")
        self.size = int(length) if length.isdigit() else None
        self._stream = stream
        self._pieces: AsyncIterator[bytes] = stream.__aiter__()
        self._place = place
        self._stack = stack

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._pieces)
        except NetworkError as exc:
            await self.aclose()
            raise _lost(self._place, exc) from exc
        except BaseException:
            await self.aclose()
            raise

    async def entries(self) -> Any:
        """The list of a directory."""
        try:
            return _decoded(self._place, await self._stream.read(MOST))["data"]
        except NetworkError as exc:
            raise _lost(self._place, exc) from exc
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        await self._stack.aclose()


async def read(place: Place, path: str) -> Opened:
    """Open a file."""
    stack = AsyncExitStack()
    try:
        stream = await stack.enter_async_context(
            http.stream("GET", place.url, _files(path), headers=_token(place), patience=_SILENCE)
        )
        if stream.status != 200:
            raise _failure(place, stream.status, await stream.read(_MOST_ERROR))
        return Opened(stream, place, stack)
    except NetworkError as exc:
        await stack.aclose()
        raise _lost(place, exc) from exc
    except BaseException:
        await stack.aclose()
        raise


async def write(place: Place, path: str, content: AsyncIterable[bytes], size: int | None) -> dict[str, Any]:
    """Write a file as its content comes; where it is then, and how large."""
    try:
        async with http.stream(
            *("PUT", place.url, _files(path)),
            headers=_BYTES + _token(place),
            body=content,
            size=size,
            patience=_SILENCE,
        ) as stream:
            answer = await stream.read(_MOST_ERROR)
            if stream.status != 200:
                raise _failure(place, stream.status, answer)
    except NetworkError as exc:
        raise _lost(place, exc) from exc
    found: dict[str, Any] = _decoded(place, answer)["data"]
    return found


def _files(path: str) -> str:
    return f"/files?path={quote(path, safe='/')}"


def _token(place: Place) -> bytes:
    return f"Authorization: Bearer {place.token}\r\n".encode()


def _lost(place: Place, exc: NetworkError) -> SandboxLost:
    """Not what a client would try again: part of it may have been done."""
    return SandboxLost(f"{place.id} did not answer: {exc.message}")


def _decoded(place: Place, body: bytes) -> dict[str, Any]:
    try:
        return {"data": None, **msgspec.json.decode(body, type=dict[str, Any])}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SandboxError(f"{place.id} answered with nonsense") from exc


def _failure(place: Place, status: int, body: bytes) -> AEnvError:
    """What the runtime refused with."""
    try:
        wire = _decoded(place, body)
    except SandboxError:
        return SandboxError(f"{place.id} answered {status} with nonsense")
    message, hint = (str(wire.get(key) or "")[:_LONGEST_WORD] for key in ("error", "hint"))
    found = from_wire({**wire, "message": message or f"it answered {status}", "hint": hint or None})
    if isinstance(found, Unauthorized):
        return SandboxError(f"{place.id} does not know this platform's token")
    return found
