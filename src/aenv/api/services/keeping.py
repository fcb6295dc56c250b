"""Which services this process looks after: those that it was asked for, and those of processes that are gone.

A process of the same server's name takes over at once. One of another name, which cannot reach those replicas and has
to start new ones, does so only when no server of that name was heard of for a while.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec

from aenv.api import peers
from aenv.api.clock import steady
from aenv.api.lives import ENGINE, Lives
from aenv.api.reaper import SILENT
from aenv.api.records import InstanceRecord
from aenv.api.services.keeper import Keeper, Site
from aenv.api.services.records import KEPT_FOR, Kept, Records, ServiceRecord
from aenv.auth.callers import Caller
from aenv.errors import AEnvError, Conflict
from aenv.store import Store

log = logging.getLogger("aenv.api")

BEAT = 1.0
"""Seconds between two looks for keepers that are gone."""
SWEEP = 30.0
"""Seconds between two looks at all services."""
START = 30.0
"""Seconds that the start waits until services were looked at."""
_PAGE = 1000


class Keepers:
    """The keepers of one process."""

    def __init__(self, store: Store, lives: Lives, key: bytes) -> None:
        self.records = Records(store)
        self.site = Site(self.records, lives, key)
        self._store = store
        self._lives = lives
        self._peers = lives.peers
        self._keepers: dict[str, Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._heard: set[str] = set()
        """Other processes that were there, or are named as keepers."""
        lives.listeners.append(self._ended)

    async def start(self) -> None:
        """Take in this server's services, and look after them from now on."""
        try:
            async with asyncio.timeout(START):
                await self._sweep()
        except TimeoutError:
            log.warning("not every service was looked at within %g s; that goes on", START)
        except AEnvError as exc:
            log.warning("services could not be looked at yet: %s", exc)
        self._looking = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """Let go. Replicas live on; another process, or the next one here, looks after them."""
        tasks = [*self._tasks.values(), *filter(None, [self._looking])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def get(self, id: str) -> Keeper | None:
        """The keeper of a service, where this process is."""
        return self._keepers.get(id)

    @property
    def looked_after(self) -> list[ServiceRecord]:
        """The services that are looked after here, as far as is known."""
        return [keeper.record for keeper in self._keepers.values()]

    def keep(self, kept: Kept, call_token: str = "", caller: Caller | None = None) -> None:
        """Look after a service whose record says so."""
        id = kept.record.id
        if keeper := self._keepers.get(id):  # it was found in the store already
            keeper.changed(kept, call_token, caller)
            return
        keeper = self._keepers[id] = Keeper(self.site, kept, call_token, caller)
        task = self._tasks[id] = asyncio.create_task(keeper.run(), name=f"service {id}")
        task.add_done_callback(lambda _: self._dropped(id, keeper))

    def _dropped(self, id: str, keeper: Keeper) -> None:
        if self._keepers.get(id) is keeper:
            del self._keepers[id], self._tasks[id]

    def _ended(self, record: InstanceRecord) -> None:
        if keeper := self._keepers.get(record.service):
            keeper.ended(record.id)

    # Services of processes that are gone

    async def _repeat(self) -> None:
        sweep_at = steady() + SWEEP
        while True:
            await asyncio.sleep(BEAT)
            try:
                async with asyncio.timeout(ENGINE):
                    if steady() >= sweep_at:
                        await self._sweep()
                        sweep_at = steady() + SWEEP
                    else:
                        await self._look()
            except (AEnvError, TimeoutError) as exc:
                log.warning("services of others could not be looked at: %s", exc or "it took too long")
            except Exception:
                log.exception("services of others could not be looked at")

    async def _look(self) -> None:
        """Take over from those that have just gone."""
        self._heard |= {peer.boot for peer in self._peers.others}
        for keeper in [boot for boot in self._heard if not self._peers.alive(boot)]:
            found, _ = await self.records.find({"keeper": keeper, "over": "no"}, limit=_PAGE)
            if not found:
                self._heard.discard(keeper)
            for kept in found:
                await self._looked_at(kept)

    async def _sweep(self) -> None:
        """Look at all services; forget what is long over."""
        async for kept in self.records.scan():
            record = kept.record
            if not record.over:
                await self._looked_at(kept)
            elif self._lives.clock.now() - record.updated_at > KEPT_FOR:
                with suppress(Conflict):
                    await self.records.remove(kept)

    async def _looked_at(self, kept: Kept) -> None:
        record = kept.record
        if record.id in self._keepers or await self._is_there(record.keeper):
            return
        if record.server == self._lives.name or await self._is_inherited(kept):
            await self._take_over(kept)

    async def _is_there(self, keeper: str) -> bool:
        """Whether a process looks after what it keeps; also one that has come just now."""
        if keeper == self._peers.me.boot:
            return False
        if self._peers.alive(keeper):
            return True
        known = keeper in self._heard or not self._store.shared
        self._heard.add(keeper)
        return not known and await self._store.get(peers.KIND, keeper) is not None

    async def _is_inherited(self, kept: Kept) -> bool:
        """Whether a server is long gone, and what its service has stored can be had here."""
        if self._peers.silence(kept.record.server) <= SILENT:
            return False
        volume = kept.record.volume
        return volume is None or volume.name in await self._lives.engine.volumes(volume.owner)

    async def _take_over(self, kept: Kept) -> None:
        """Look after a service from now on, if nobody else was faster."""
        record, me = kept.record, self._peers.me
        if (record.keeper, record.server) != (me.boot, me.name):
            try:
                kept = await self.records.save(kept, msgspec.structs.replace(record, keeper=me.boot, server=me.name))
            except Conflict:
                return
            log.info("looking after service %s from now on", record.id)
        if record.id not in self._keepers:
            self.keep(kept)
