"""One sandbox of a cluster, as this process knows it beyond what its pod says."""

from __future__ import annotations

import asyncio

from aenv.engines import live
from aenv.engines.kubernetes.manifests import Facts
from aenv.engines.tunnels import Tunnel
from aenv.models import State
from aenv.runtime.hidden import Hidden


class Live(live.Live[Facts]):
    """One that is a pod."""

    def __init__(self, facts: Facts, hidden: Hidden | None, *, found: bool) -> None:
        super().__init__(facts, hidden)
        self.found = found
        """Whether somebody else asked for it."""
        self.brings = not found
        """Whether the start that is under way brings it what it waits for, or leaves that to somebody else."""
        self.tunnel: Tunnel | None = None
        self.over_since = 0.0
        self.deleting: asyncio.Task[None] | None = None

    def end(self, state: State, reason: str, when: float) -> None:
        """It is over; who comes first says why."""
        self.stages.end()
        if not self.state.over:
            self.state, self.reason, self.over_since = state, reason, when

    async def close(self) -> None:
        """Let go of all that this process holds of it."""
        if self.printed is not None:
            await self.printed.close()
        if self.tunnel is not None:
            await self.tunnel.close()
