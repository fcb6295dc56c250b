"""One HTTP/1.1 connection of a client, and the address it goes to."""

from __future__ import annotations

import asyncio
import functools
import select
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from aenv.errors import Invalid, NetworkError, TooLarge

MOST_HEAD = 1024 * 1024
MOST_BODY = 1024 * 1024 * 1024
CHUNK = 256 * 1024


class NotSent(NetworkError):
    """No connection could be made, so nothing was asked."""


class Response(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Target(NamedTuple):
    """Where a base URL points."""

    host: str
    port: int
    secure: bool
    socket: str | None
    prefix: str
    head: bytes
    """The ``Host`` line."""

    @property
    def shown(self) -> str:
        return self.socket or f"{self.host}:{self.port}"


@functools.lru_cache(maxsize=4096)
def target(base: str) -> Target:
    """Take a base URL apart; an ``Invalid`` says what is wrong with it."""
    if base.startswith("unix:"):
        return Target("localhost", 0, False, base.removeprefix("unix:"), "", b"Host: localhost\r\n")
    try:
        url = urlsplit(base)
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError as exc:
        raise Invalid(f"{base!r} is not an address: {exc}") from exc
    if url.scheme not in ("http", "https") or not url.hostname:
        raise Invalid(f"{base!r} is not an address", hint="use http://host:port")
    if "@" in url.netloc:
        raise Invalid("an address with a user or a password in it is not used", hint="a token goes into AENV_API_KEY")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return Target(
        url.hostname,
        port,
        url.scheme == "https",
        None,
        url.path.rstrip("/"),
        f"Host: {host}:{port}\r\n".encode(),
    )


class NeverAnswered(Exception):
    """The connection ended before the first byte of an answer."""


class NeverTaken(NeverAnswered):
    """It had ended before the request was written, so that nobody has read that."""


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.since = 0.0
        self.reusable = False
        self._is_lost = False
        self._transport: Any = None
        self._answer: asyncio.Future[Response] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._most = MOST_BODY
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self._untold = 0
        """Bytes since the parser last told of a head or of a piece of the body; a line without end is never told."""
        self._heard = False
        self._headed = False
        self._sent = False
        self._is_whole = False
        """Whether the request is written in one piece."""

    async def exchange(self, head: bytes, body: bytes, most: int) -> Response:
        self._reset()
        self._most = most
        self._answer = asyncio.get_running_loop().create_future()
        self.reusable = False
        try:
            if len(body) <= CHUNK:
                self._sent = self._is_whole = True
                self._transport.write(head + body)
            else:
                await self._upload(head, body)
            return await self._answer
        finally:
            if not self.reusable:  # cut, refused, or left in the middle: its state is unknown
                self._transport.abort()
            self._answer = None

    async def _upload(self, head: bytes, body: bytes) -> None:
        self._transport.write(head)
        for start in range(0, len(body), CHUNK):
            answer = self._answer
            if answer is None or answer.done():  # refused half-way, 413 for example
                return
            if self._drained is not None:
                await asyncio.wait((self._drained, answer), return_when=asyncio.FIRST_COMPLETED)
            self._sent = start + CHUNK >= len(body)
            self._transport.write(body[start : start + CHUNK])

    def close(self) -> None:
        self._transport.close()

    @property
    def stirs(self) -> bool:
        """Whether something has come that nobody asked for: most likely its end, of which we were not told yet."""
        if self._transport.is_closing() or not hasattr(select, "poll"):
            return bool(self._transport.is_closing())
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable, self._is_lost = False, True
        self.resume_writing()
        if self._answer is None or self._answer.done():
            return
        if not self._heard:
            # Of a request in one piece, no more than a part was taken then.
            refused = isinstance(exc, BrokenPipeError) and self._is_whole
            self._answer.set_exception(NeverTaken() if refused else NeverAnswered())
        elif exc is None and self._headed and not self._has_length():
            self._finish()
        else:
            self._answer.set_exception(NetworkError("the connection was cut in the middle of an answer"))

    def _has_length(self) -> bool:
        return b"content-length" in self._headers or b"transfer-encoding" in self._headers

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self._transport.abort()  # nobody asked
            return
        self._heard = True
        self._untold += len(data)
        if self._untold > MOST_HEAD:
            self._fail(TooLarge("the head of the answer is too long"))
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(NetworkError(f"the answer is not HTTP: {exc}"))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._headed, self._size, self._untold = True, 0, 0

    def on_body(self, part: bytes) -> None:
        self._untold = 0
        self._size += len(part)
        if self._size > self._most:
            self._fail(TooLarge(f"the answer is over {self._most} bytes"))
            self._transport.abort()
        else:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue and the like
            self._headers, self._headed = {}, False
            return
        self.reusable = self._sent and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done():
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._answer.set_result(Response(self._parser.get_status_code(), self._headers, body))
