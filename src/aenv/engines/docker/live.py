"""One sandbox of a container engine, as the engine that watches it knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

from aenv.engines.docker import containers
from aenv.engines.docker.containers import Facts
from aenv.engines.docker.second import Beside
from aenv.engines.printed import Printed
from aenv.engines.process.volumes import Held
from aenv.engines.stages import Stages
from aenv.errors import SandboxLost
from aenv.models import Sandbox, State
from aenv.runtime.hidden import Hidden


class Live:
    """From the request to its end, and for a while after that."""

    def __init__(self, engine: str, facts: Facts, hidden: Hidden | None) -> None:
        self.container = containers.name(engine, facts.id)
        self._engine = engine
        self.know(facts, hidden)
        self.state = State.CREATING
        self.reason = ""
        self.full = ""
        """Which of its volumes are full, in words."""
        self.url = self.boot = ""
        self.stages = Stages()
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
        self.printed: Printed | None = None
        self.holds = AsyncExitStack()
        """What is let go when it is over."""
        self.died = asyncio.Event()
        self.starting: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def know(self, facts: Facts, hidden: Hidden | None) -> None:
        """What it is, as it was asked for."""
        self.facts, self.hidden = facts, hidden
        self.second = Beside(self._engine, facts.id, facts.second) if facts.second else None
        self.expires_at = facts.created_at + facts.ttl if facts.ttl is not None else None
        self.ttl = facts.ttl
        """Seconds that it was given last."""

    def find(self, inspected: Mapping[str, Any]) -> None:
        """It is what another engine made."""
        self.found = self.asked = self.ran = True
        self.made = str(inspected.get("Id") or self.container)
        self.memory = int((inspected.get("HostConfig") or {}).get("Memory") or 0)

    def begin_again(self) -> None:
        """Nothing is there of it any more, and another container takes its place."""
        self.know(self.facts, self.hidden)
        self.url = self.door = self.made = ""
        self.ran = False
        self.died = asyncio.Event()

    def begin(self, start: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start it. How that ends is told to whoever waits for it, if anybody does."""
        self.starting = asyncio.create_task(start)
        self.starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.starting

    def has(self, container: str) -> bool:
        """Whether that, by the daemon's own name, is a container of this sandbox."""
        return bool(container) and container in (self.made, self.second.made if self.second is not None else "")

    @property
    def id(self) -> str:
        return self.facts.id

    @property
    def sandbox(self) -> Sandbox:
        reason = "; ".join(filter(None, (self.reason, self.full)))
        return Sandbox(
            url=self.url if self.state is State.RUNNING else "",
            id=self.id,
            state=self.state,
            reason=reason if self.hidden is None else self.hidden.text(reason),
            env=self.facts.env,
            owner=self.facts.owner,
            labels=self.facts.labels,
            boot=self.boot,
            created_at=self.facts.created_at,
            expires_at=self.expires_at,
            phases=self.stages.seconds,
        )

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

    def require_running(self) -> None:
        if self.state is not State.RUNNING:
            raise SandboxLost(f"{self.id} is {self.state.lower()}{f': {self.reason}' if self.reason else ''}")

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
