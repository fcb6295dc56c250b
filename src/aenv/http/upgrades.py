"""A connection that goes on with another protocol, once the server has agreed to that."""

from __future__ import annotations

import httptools

from aenv.errors import NetworkError
from aenv.http.connections import Response
from aenv.http.streams import Stream

SWITCHED = 101


class Upgraded(Stream):
    """Bytes both ways, when ``status`` is ``SWITCHED``; else an answer like any other. Made by ``upgrade``."""

    def __init__(self) -> None:
        super().__init__()
        self._switched = False

    async def send(self, data: bytes) -> None:
        """Send, at the pace at which it is taken."""
        if self._transport.is_closing():
            raise NetworkError(f"{self._where} closed the connection")
        self._transport.write(data)
        if self._drained is not None:
            await self._drained

    def end_input(self) -> None:
        """Tell the server that no more will be sent; what it sends is read on."""
        if not self._transport.is_closing():
            self._transport.write_eof()

    def endless(self) -> None:
        """Whatever comes next may take for ever."""
        self._patience = None

    def data_received(self, data: bytes) -> None:
        if self._switched:
            self.on_body(data)
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._switched = True
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(Response(SWITCHED, {}, b""))
            if rest := data[exc.args[0] :]:
                self.on_body(rest)
        except httptools.HttpParserError as exc:
            self._fail(NetworkError(f"the answer is not HTTP: {exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = self._over or self._switched
        super().connection_lost(exc)
