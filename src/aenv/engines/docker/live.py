"""One sandbox of a container engine, as the engine that watches it knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from aenv.engines import live
from aenv.engines.docker import containers
from aenv.engines.docker.containers import Facts
from aenv.engines.docker.second import Beside
from aenv.engines.process.volumes import Held
from aenv.models import State
from aenv.runtime.hidden import Hidden


class Live(live.Live[Facts]):
    """One that is a container."""

    def __init__(self, engine: str, facts: Facts, hidden: Hidden | None) -> None:
        self.container = containers.name(engine, facts.id)
        self._engine = engine
        super().__init__(facts, hidden)
        self.full = ""
        """Which of its volumes are full, in words."""
        self.memory = 0
        self.door = ""
        """The directory that its socket is in, where this engine sees it."""
        self.asked = False
        """Whether something of it may be at the daemon, which was asked for it."""
        self.removed = False
        """Whether nothing of it is there any more."""
        self.found = False
        """Whether another engine made it."""
        self.made = ""
        """The daemon's own name for its container; empty while there is none."""
        self.ran = False
        """Whether that was started."""
        self.volumes: list[Held] = []
        self.holds = AsyncExitStack()
        """What is let go when it is over."""
        self.died = asyncio.Event()
        self.left_alone = False
        """Whether the daemon was away when it ended, whoever tells of that."""
        self.ending: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def begins(self, facts: Facts) -> None:
        super().begins(facts)
        self.second = Beside(self._engine, facts.id, facts.second) if facts.second else None
        self.ttl = facts.ttl
        """Seconds that it was given last."""

    def find(self, inspected: Mapping[str, Any]) -> None:
        """It is what another engine made."""
        self.found = self.asked = self.ran = True
        self.made = str(inspected.get("Id") or self.container)
        self.memory = int((inspected.get("HostConfig") or {}).get("Memory") or 0)

    def begin_again(self) -> None:
        """Nothing is there of it any more, and another container takes its place."""
        self.begins(self.facts)
        self.url = self.door = self.made = ""
        self.ran = self.left_alone = False
        self.died = asyncio.Event()

    def has(self, container: str) -> bool:
        """Whether that, by the daemon's own name, is a container of this sandbox."""
        return bool(container) and container in (self.made, self.second.made if self.second is not None else "")

    @property
    def told(self) -> str:
        return "; ".join(filter(None, (self.reason, self.full)))

    def end(self, state: State, reason: str) -> None:
        """It is over; who comes first says why."""
        self.stages.end()
        if not self.state.over:
            self.state, self.reason = state, reason
        self.disarm()

    def disarm(self) -> None:
        """Nothing happens to it any more by itself; and no timer keeps it in memory."""
        if self.timer is not None:
            self.timer.cancel()

    async def nap(self, seconds: float) -> None:
        """A pause, which its death ends."""
        try:
            async with asyncio.timeout(seconds):
                await self.died.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Let go of all that this engine holds of it."""
        self.disarm()
        if self.printed is not None:
            await self.printed.close()
        await self.holds.aclose()
