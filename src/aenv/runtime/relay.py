"""Two connections joined to one: what comes in on either goes out on the other, at the pace of the slower."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

HALF_CLOSED = 60.0
"""Seconds without a byte after which a connection that is closed in one direction is closed in both."""


class Relay:
    """Joins two transports until both have ended."""

    def __init__(self, one: Any, other: Any, *, active: Callable[[], None]) -> None:
        """Neither may have been lost already. ``active`` is called whenever something passes."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._active = active
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._sides = _Side(self, one), _Side(self, other)
        for side, beyond in (self._sides, self._sides[::-1]):
            side.beyond = beyond
            side.transport.set_protocol(side)
            if not side.transport.is_closing() and not side.transport.is_reading():
                side.transport.resume_reading()

    def begin(
        self,
        one: bytes = b"",
        other: bytes = b"",
        *,
        one_full: bool = False,
        other_full: bool = False,
        other_ended: bool = False,
    ) -> None:
        """Pass on what each side had received before the two were joined. One that is full already, so that its
        transport has said so, and will say when it is not, makes the other wait."""
        for side, is_full in zip(self._sides, (one_full, other_full), strict=True):
            if is_full:
                side.pause_writing()
        for side, data in zip(self._sides, (one, other), strict=True):
            if data:
                side.data_received(data)
        if other_ended and not self._sides[1].eof_received():
            self._sides[1].transport.close()

    def cut(self) -> None:
        """End it now."""
        for side in self._sides:
            if not side.lost:
                side.transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes that wait until the first of the two takes them."""
        one = self._sides[0]
        return 0 if one.lost else one.transport.get_write_buffer_size()

    def moved(self) -> None:
        self._last = self._loop.time()
        self._active()

    def half_closed(self) -> None:
        """One direction is over; the other may go on for as long as something passes."""
        left = self._last + HALF_CLOSED - self._loop.time()
        if left <= 0:
            self.cut()
        else:
            self._timer = self._loop.call_later(left, self.half_closed)

    def lost(self) -> None:
        if all(side.lost for side in self._sides):
            if self._timer is not None:
                self._timer.cancel()
            if not self.ended.done():
                self.ended.set_result(None)


class _Side(asyncio.Protocol):
    beyond: _Side

    def __init__(self, relay: Relay, transport: Any) -> None:
        self.transport = transport
        self.finished = False
        self.lost = False
        self._relay = relay

    def data_received(self, data: bytes) -> None:
        self._relay.moved()
        if not self.beyond.transport.is_closing():
            self.beyond.transport.write(data)

    def eof_received(self) -> bool:
        beyond = self.beyond
        self.finished = True
        if beyond.finished or beyond.transport.is_closing() or not beyond.transport.can_write_eof():
            return False
        beyond.transport.write_eof()
        self._relay.moved()
        self._relay.half_closed()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if exc is None:
            self.beyond.transport.close()
        else:
            self.beyond.transport.abort()
        self._relay.lost()

    def pause_writing(self) -> None:
        if not self.beyond.transport.is_closing():
            self.beyond.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.beyond.transport.is_closing():
            self.beyond.transport.resume_reading()
