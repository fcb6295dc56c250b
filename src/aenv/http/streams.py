"""An answer that is read as it comes, to a request that may be sent as it is made."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable
from typing import TypeVar

from aenv.errors import Invalid, NetworkError, TooLarge
from aenv.http.connections import CHUNK, Connection, NeverAnswered, Response, Target

T = TypeVar("T")


class Stream(Connection):
    """An answer as it comes: ``status`` and ``headers``, then its body in pieces. Made by ``stream``."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._where = ""
        self._patience: float | None = None
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._over = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    async def begin(
        self, where: Target, head: bytes, body: bytes | AsyncIterable[bytes], size: int | None, patience: float | None
    ) -> None:
        """Send the request, and wait for the head of its answer."""
        self._where, self._patience = where.shown, patience
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(head)
        pieces = _cut(body) if isinstance(body, bytes) else body
        left = size
        async for piece in pieces:
            if self._answer.done():  # refused half-way
                break
            if left is not None:
                left -= len(piece)
            if left is not None and left < 0:
                raise Invalid(f"the body has more than the {size} bytes that were announced")
            if piece:
                self._transport.write(piece if size is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
            if self._drained is not None:
                await self._silence(asyncio.wait((self._drained, self._answer), return_when=asyncio.FIRST_COMPLETED))
        else:
            if left:
                raise Invalid(f"the body has {left} bytes less than were announced")
            if size is None:
                self._transport.write(b"0\r\n\r\n")
        try:
            self.status, self.headers, _ = await self._silence(self._answer)
        except NeverAnswered as exc:
            raise NetworkError(f"{self._where} closed the connection without an answer") from exc

    async def _silence(self, waiting: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._patience) as limit:
                return await waiting
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise NetworkError(f"{self._where} was silent for {self._patience:g} s") from exc

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._unread -= len(piece)
                yield piece
            if self._error is not None:
                raise self._error
            if self._over:
                return
            self._transport.resume_reading()
            self._news = asyncio.get_running_loop().create_future()
            await self._silence(self._news)

    async def read(self, most: int) -> bytes:
        """The whole body, which is not to have more than so many bytes."""
        parts, size = [], 0
        async for piece in self:
            parts.append(piece)
            size += len(piece)
            if size > most:
                raise TooLarge(f"the answer is over {most} bytes")
        return b"".join(parts)

    def abort(self) -> None:
        if self._answer is not None and not self._answer.cancel() and not self._answer.cancelled():
            self._answer.exception()  # nobody waits for it any more
        if not self._is_lost:  # one that was closed with something left to send does not bear it then
            self._transport.abort()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._error = self._error or error
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.status_known and not self._over:
            if exc is None and not self._has_length():
                self._over = True
            else:
                self._error = self._error or NetworkError("the connection was cut in the middle of an answer")
        self._wake()

    @property
    def status_known(self) -> bool:
        return self._answer is not None and self._answer.done()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        status = self._parser.get_status_code()
        if status >= 200 and self._answer is not None and not self._answer.done():
            self._answer.set_result(Response(status, self._headers, b""))

    def on_body(self, part: bytes) -> None:
        self._untold = 0
        self._pieces.append(part)
        self._unread += len(part)
        if self._unread > CHUNK:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._headers, self._headed = {}, False
            return
        self._over = True
        self._wake()


async def _cut(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), CHUNK):
        yield body[start : start + CHUNK]
