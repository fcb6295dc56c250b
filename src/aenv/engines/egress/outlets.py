"""The listeners that one proxy serves: it is started for the first of them, and again for all when it has died."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress

from aenv.cleanup import finish
from aenv.engines.egress import Egress
from aenv.errors import AEnvError, StartFailed

log = logging.getLogger("aenv.engine")
_PAUSE = 1.0
"""Seconds between two starts, at least."""


class Outlets:
    """Of one engine. ``uid`` is the user that the proxy becomes, under root."""

    def __init__(self, uid: int | None) -> None:
        self._uid = uid
        self._served: dict[str, tuple[socket.socket, Sequence[str]]] = {}
        self._egress: Egress | None = None
        self._opening = asyncio.Lock()
        self._minding: asyncio.Task[None] | None = None

    async def add(self, id: str, listener: socket.socket, allow: Sequence[str]) -> None:
        """Serve what comes to a listener, which stays the caller's to close after ``remove``.

        Cancelled, it may have been added or not: remove it.
        """
        async with self._opening:
            if self._egress is None or self._egress.died:
                await finish(self._open())
            assert self._egress is not None
            await self._egress.add(id, listener, allow)
            self._served[id] = listener, allow

    async def remove(self, id: str) -> None:
        """Close all connections that came to it. Gone already is success."""
        async with self._opening:
            self._served.pop(id, None)
            if self._egress is not None:
                await self._egress.remove(id)

    async def close(self) -> None:
        """End the proxy, and all connections with it."""
        self._served.clear()
        if self._minding is not None:
            self._minding.cancel()
        if self._egress is not None:
            await self._egress.close()

    async def _open(self) -> None:
        """Start the proxy, also for those whose proxy died."""
        self._egress = await Egress.start(self._uid)
        if self._minding is not None and self._minding is not asyncio.current_task():
            self._minding.cancel()
        self._minding = asyncio.create_task(self._mind(self._egress))
        for id, (listener, allow) in self._served.items():
            with suppress(AEnvError):  # it may be about to end
                await self._egress.add(id, listener, allow)

    async def _mind(self, egress: Egress) -> None:
        """Start another when it has died. One that dies at once does not keep the machine busy."""
        clock = asyncio.get_running_loop().time
        started = clock()
        await egress.wait()
        while self._served and self._egress is egress:
            await asyncio.sleep(started + _PAUSE - clock())
            started = clock()
            async with self._opening:
                if self._served and self._egress is egress:
                    try:
                        await self._open()
                    except StartFailed as exc:
                        log.warning("%s", exc)
