"""Ending sandboxes: each once at a time, again until it worked, and none in the way of another."""

from __future__ import annotations

import asyncio
import logging
import random

from aenv.engines.base import Engine
from aenv.errors import AEnvError

log = logging.getLogger("aenv.api")

AT_ONCE = 64
"""Sandboxes that are ended at the same time."""
PATIENCE = 30.0
"""Seconds that an engine has to end one, before it is asked anew."""
_PAUSE, _LONGEST_PAUSE = 0.5, 60.0


class Endings:
    """Sandboxes of one engine that are to end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._room = asyncio.Semaphore(AT_ONCE)
        self._ending: dict[str, asyncio.Task[None]] = {}

    def begin(self, id: str) -> asyncio.Task[None]:
        """See to it that a sandbox ends. It is done when the engine has said so."""
        task = self._ending.get(id)
        if task is None:
            task = self._ending[id] = asyncio.create_task(self._end(id))
            task.add_done_callback(lambda _: self._ending.pop(id, None))
        return task

    async def wait(self, id: str) -> None:
        """End a sandbox, and wait until it is gone, or until it is clear that this takes longer."""
        await asyncio.wait((self.begin(id),), timeout=PATIENCE)

    async def close(self, grace: float) -> None:
        """Let what is under way end. What takes longer is found again by its record."""
        if ending := list(self._ending.values()):
            _, left = await asyncio.wait(ending, timeout=grace)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=PATIENCE)

    async def _end(self, id: str) -> None:
        pause = _PAUSE
        while True:
            try:
                async with self._room, asyncio.timeout(PATIENCE):
                    await self._engine.delete(id)
                return
            except TimeoutError:
                log.warning("%s has not ended after %g s; trying again", id, PATIENCE)
            except AEnvError as exc:
                log.warning("%s has not ended: %s; trying again", id, exc)
            except Exception:
                log.exception("the engine failed to end %s; trying again", id)
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311
            pause = min(pause * 2, _LONGEST_PAUSE)
