"""A sandbox that nobody wants anything of: it lets nobody in, gives memory back and says so, until somebody calls.

Whoever looks after it may have it stand still meanwhile, from any moment to any other. So nothing may be under way by
then: no call, no stream, no connection on which something could come. Callers wait at the socket, which is seen from
outside, too.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aenv.runtime import trusted

if TYPE_CHECKING:
    from aenv.runtime.app import App
    from aenv.runtime.protocol import Connections

PAUSE = 0.1
"""Seconds that it is awake at least."""
_BACKLOG = 1024
_TURNS = 5
"""Of the event loop, until a connection that it has taken is one of ours."""
_CLOSING = 1.0
"""Seconds in which connections must be closed that nobody uses."""
_QUICK = 0.05
"""Seconds that giving back memory may take. Where it takes more, it is not done again: somebody may wait."""


class Door:
    """The socket that callers come to. Shut, it has them wait."""

    def __init__(self, sock: socket.socket, connections: Connections) -> None:
        self._socket = sock
        self._connections = connections
        self._server: asyncio.AbstractServer | None = None

    async def open(self, *, start_serving: bool = True) -> None:
        # Of a local socket, too: a server that was made for such a one removes its name when it closes.
        self._server = await asyncio.get_running_loop().create_server(
            self._connections, sock=self._socket, backlog=_BACKLOG, start_serving=start_serving
        )

    async def let_in(self) -> None:
        """Begin to serve where it was opened without that."""
        assert self._server is not None
        await self._server.start_serving()

    def shut(self) -> None:
        """Let nobody in until it is opened again."""
        assert self._server is not None
        self._socket, shut = self._socket.dup(), self._server
        shut.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()


class Resting:
    """When a sandbox rests: after so many seconds without a call, until it hears that somebody waits."""

    def __init__(self, after: float, say: Callable[[float], None]) -> None:
        """``say`` is told for how long nobody has called, when it rests."""
        self._after = after
        self._say = say
        self._called: asyncio.Future[None] | None = None
        self._tidies = True

    def heard(self) -> None:
        """Somebody waits at the door."""
        if self._called is not None and not self._called.done():
            self._called.set_result(None)

    async def watch(self, app: App, connections: Connections, door: Door) -> None:
        while True:
            # No call wakes this, which is what makes calls cheap.
            await asyncio.sleep(max(self._after - app.idle_seconds, PAUSE))
            if app.idle_seconds < self._after:
                continue
            if _is_busy(app, connections):  # somebody listens, or is connected: looked at again later
                await asyncio.sleep(self._after)
                continue
            self._tidy()
            door.shut()
            if await _left_alone(app, connections):
                self._called = asyncio.get_running_loop().create_future()
                with suppress(OSError):  # who heard it has gone, and this process goes, too
                    self._say(app.idle_seconds)
                await self._called
            await door.open()

    def _tidy(self) -> None:
        """Give back memory that is not needed."""
        if not self._tidies:
            return
        began = time.monotonic()
        gc.collect()
        _trim()
        self._tidies = time.monotonic() - began < _QUICK


def _is_busy(app: App, connections: Connections) -> bool:
    return bool(app.calls) or app.service.is_checked or not all(one.is_idle for one in connections.open)


async def _left_alone(app: App, connections: Connections) -> bool:
    """Close the connections that nobody uses; False when it turns out that somebody does."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    if _is_busy(app, connections) or not all(one.hang_up() for one in list(connections.open)):
        return False
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING):
            while connections.open:  # noqa: ASYNC110  a turn or two of the loop, and none tells
                await asyncio.sleep(0)
    return not _is_busy(app, connections) and not connections.open


def _trim() -> None:
    """Have the C library give back what it keeps for later, where it can."""
    if sys.platform == "linux":
        with trusted.imports():
            import ctypes
        with suppress(AttributeError, OSError):  # only that of GNU has it
            ctypes.CDLL(None).malloc_trim(0)
