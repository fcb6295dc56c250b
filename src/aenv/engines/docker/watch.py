"""What the daemon tells of containers as it happens, without a gap: also when it was gone for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from aenv.engines.docker.daemon import Daemon
from aenv.errors import AEnvError

log = logging.getLogger("aenv.engine")
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_OVERLAP = 1.0
"""Seconds before the last word, from which on everything is told again: who hears something twice must not mind."""
_SILENCE = 60.0
"""Seconds without a word after which nobody may be there any more, and the stream is opened again."""


class Watch:
    """One stream of events, which is opened again when it ends."""

    def __init__(
        self,
        daemon: Daemon,
        label: str,
        tell: Callable[[str, str, Mapping[str, str]], None],
        look: Callable[[bool], Awaitable[None]],
    ) -> None:
        """``tell`` gets what happened, the container's own id and its attributes, for those with that label. ``look``
        is awaited after a gap, in which things may have happened that are never told: with True when the daemon itself
        was gone."""
        self._daemon, self._label, self._tell, self._look = daemon, label, tell, look
        self._since = time.time() - _OVERLAP
        self._heard_at = 0.0
        self._task = asyncio.create_task(self._listen())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        pause = _PAUSE
        while True:
            begun = time.monotonic()
            try:
                await self._hear()
                said = "it ended the stream"
            except AEnvError as exc:
                said = exc.message
            log.debug("events of %s stopped: %s", self._daemon.shown, said)
            pause = _PAUSE if time.monotonic() - begun > _LONGEST_PAUSE else _longer(pause)
            # A daemon that lives ends no stream: who was cut off may not have seen it go and come back.
            is_silent = time.monotonic() - self._heard_at >= _SILENCE
            pause = await self._catch_up(pause, gone=not is_silent)

    async def _catch_up(self, pause: float, *, gone: bool) -> float:
        """Wait until the daemon answers, and look what happened in the gap: before anything is told that comes after
        it. The pause that it took in the end."""
        while True:
            await asyncio.sleep(pause)
            try:
                await self._daemon.greet()
                await self._look(gone)
                return pause
            except AEnvError as exc:
                gone, pause = True, _longer(pause)
                log.debug("%s does not answer yet: %s", self._daemon.shown, exc)

    async def _hear(self) -> None:
        filters = {"type": ["container"], "label": [self._label]}
        query = {"filters": filters, "since": f"{self._since:.9f}"}
        self._heard_at = time.monotonic()
        async with aclosing(self._daemon.lines("GET", "/events", query=query, patience=_SILENCE)) as events:
            async for event in events:
                self._heard_at = time.monotonic()
                self._since = max(self._since, _time(event) - _OVERLAP)
                actor = event.get("Actor")
                attributes = actor.get("Attributes") if isinstance(actor, dict) else None
                if isinstance(actor, dict) and isinstance(attributes, dict):
                    self._tell(str(event.get("Action") or ""), str(actor.get("ID") or ""), attributes)


def _longer(pause: float) -> float:
    return min(pause * 2, _LONGEST_PAUSE)


def _time(event: Mapping[str, Any]) -> float:
    told = event.get("timeNano")
    return told / 1e9 if isinstance(told, int) else 0.0
