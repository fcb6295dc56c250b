"""Leases: an instance whose client is gone ends soon, because nobody says any more that it is wanted."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import weakref
from contextvars import Context

from aenv.client.api import ApiClient
from aenv.errors import AEnvError, Conflict, Forbidden, NotFound
from aenv.wire import LEASE

log = logging.getLogger("aenv.environment")
RENEWAL = LEASE / 3
"""Seconds between two renewals."""
AGAIN = LEASE / 20
"""Seconds after which it is tried again when one could not be renewed."""
AT_ONCE = 16
"""Renewals under way at the same time."""
ANSWER = 30.0
"""Seconds that one may take."""


class Leases:
    """Renews the leases of every instance that one event loop holds, in one background task."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._held: dict[str, ApiClient] = {}
        self._task: asyncio.Task[None] | None = None

    def hold(self, id: str, api: ApiClient) -> None:
        """Renew the lease of this instance from now on."""
        self._held[id] = api
        if self._task is None or self._task.done():
            run = asyncio.get_running_loop().create_task
            self._task = run(self._run(), name="aenv leases", context=Context())  # of all, not of who was first

    def drop(self, id: str) -> None:
        """It is given back: renew it no more."""
        self._held.pop(id, None)
        if not self._held and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        pause = RENEWAL
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.0))  # noqa: S311
            if os.getpid() != self.process:  # a forked child that went on with its parent's loop
                return
            turn = asyncio.Semaphore(AT_ONCE)
            renewed = await asyncio.gather(*(self._renew(id, api, turn) for id, api in list(self._held.items())))
            pause = RENEWAL if all(renewed) else AGAIN

    async def _renew(self, id: str, api: ApiClient, turn: asyncio.Semaphore) -> bool:
        try:
            async with turn, asyncio.timeout(ANSWER):
                await api.renew(id)
        except (NotFound, Conflict, Forbidden):
            self._held.pop(id, None)  # it has ended: whoever calls it next hears why
        except (AEnvError, TimeoutError) as exc:
            log.warning("[ENV:%s] its lease could not be renewed: %s", id, exc or "no answer")
            return False
        return True


_leases: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Leases] = weakref.WeakKeyDictionary()


def leases() -> Leases:
    """The leases of the running event loop, in this process."""
    loop = asyncio.get_running_loop()
    found = _leases.get(loop)
    if found is None or found.process != os.getpid():
        found = _leases[loop] = Leases()
    return found
