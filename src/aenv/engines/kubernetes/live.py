"""One sandbox of a cluster, as this process knows it beyond what its pod says."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from aenv.engines.kubernetes.manifests import Facts
from aenv.engines.printed import Printed
from aenv.engines.stages import Stages
from aenv.engines.tunnels import Tunnel
from aenv.errors import SandboxLost
from aenv.models import Sandbox, State
from aenv.runtime.hidden import Hidden


class Live:
    """From the request, or from when it was found, to its end; and for a while after that."""

    def __init__(self, facts: Facts, hidden: Hidden | None, *, found: bool) -> None:
        self.hidden, self.found = hidden, found
        """``found``: somebody else asked for it."""
        self.begins(facts)
        self.brings = not found
        """Whether the start that is under way brings it what it waits for, or leaves that to somebody else."""
        self.state = State.CREATING
        self.reason = ""
        self.url = self.boot = ""
        self.stages = Stages()
        self.printed: Printed | None = None
        self.tunnel: Tunnel | None = None
        self.over_since = 0.0
        self.starting: asyncio.Task[None] | None = None
        self.deleting: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.facts.id

    def begins(self, facts: Facts) -> None:
        """This is what its pod says of it, and then its time to live begins."""
        self.facts = facts
        self.expires_at = facts.created_at + facts.ttl if facts.ttl is not None else None

    def begin(self, start: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start it. How that ends is told to whoever waits for it, if anybody does."""
        self.starting = asyncio.create_task(start)
        self.starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.starting

    @property
    def is_starting(self) -> bool:
        return self.starting is not None and not self.starting.done()

    def end(self, state: State, reason: str, when: float) -> None:
        """It is over; who comes first says why."""
        self.stages.end()
        if not self.state.over:
            self.state, self.reason, self.over_since = state, reason, when

    def require_running(self) -> None:
        if self.state is not State.RUNNING:
            raise SandboxLost(f"{self.id} is {self.state.lower()}{f': {self.reason}' if self.reason else ''}")

    @property
    def sandbox(self) -> Sandbox:
        return Sandbox(
            url=self.url if self.state is State.RUNNING else "",
            id=self.id,
            state=self.state,
            reason=self.reason if self.hidden is None else self.hidden.text(self.reason),
            env=self.facts.env,
            owner=self.facts.owner,
            labels=self.facts.labels,
            boot=self.boot,
            created_at=self.facts.created_at,
            expires_at=self.expires_at,
            phases=self.stages.seconds,
        )

    async def close(self) -> None:
        """Let go of all that this process holds of it."""
        if self.printed is not None:
            await self.printed.close()
        if self.tunnel is not None:
            await self.tunnel.close()
