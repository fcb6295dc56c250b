"""Instances that play several episodes, one after the other: kept between them, and put back by the author's reset."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import msgspec

from aenv.client.provision import Control, Provision
from aenv.errors import AEnvError, RateLimited, StartFailed
from aenv.models import Sandbox, SandboxSpec

log = logging.getLogger("aenv.rl")
_STALE = 0.1
"""The share of its time to live after which an instance is given all of it again."""


class Reuse:
    """A provision over another one, for the length of a run. Whoever asks for what was given back gets that again.

    Only what was said to be clean is kept: an instance in which an episode failed, or which somebody may still reach,
    ends with its episode. What the other provision can do beside giving sandboxes, this one can, too.
    """

    def __init__(self, provision: Provision, most: int, room: int) -> None:
        """``most``: episodes of an instance; ``room``: instances that there may be, idle ones among them."""
        self.plain = provision
        """Where new ones come from."""
        self._most = most
        self._room = room
        self._live = 0
        """Instances that there are, or will be in a moment."""
        self._in_use: dict[int, _Kept] = {}
        """By the identity of the sandbox that its user has: not every provision gives each a name of its own."""
        self._idle: list[_Kept] = []
        """The newest last."""
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @asynccontextmanager
    async def __call__(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        kept = await self._taken(_kind(spec)) or await self._made(spec)
        self._in_use[id(kept.sandbox)] = kept
        try:
            yield kept.sandbox
        finally:
            del self._in_use[id(kept.sandbox)]
            if kept.clean and not self._closed and kept.episodes < self._most:
                self._idle.append(kept)
            else:
                await self._end(kept)

    def earlier(self, sandbox: Sandbox | None) -> int:
        """How many episodes an instance has had before the one that it is in use for."""
        kept = self._in_use.get(id(sandbox))
        return 0 if kept is None else kept.episodes - 1

    def keep(self, sandbox: Sandbox | None) -> None:
        """Say of an instance in use that another episode can be played in it."""
        kept = self._in_use.get(id(sandbox))
        if kept is not None and not kept.sandbox.attached:
            kept.clean = True

    async def close(self) -> None:
        """End what is idle, and from now on whatever is given back: nobody will ask for it."""
        self._closed = True
        await self._end_idle()

    async def _end_idle(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(self._end, idle))

    async def _taken(self, kind: bytes) -> _Kept | None:
        while (kept := next((kept for kept in reversed(self._idle) if kept.kind == kind), None)) is not None:
            self._idle.remove(kept)
            try:
                await self._extend(kept)
            except AEnvError as exc:
                log.info("[ENV:%s] cannot be used again: %s", kept.sandbox.id, exc)
                await self._end(kept)
            except BaseException:
                await self._end(kept)
                raise
            else:
                kept.clean = False
                kept.episodes += 1
                return kept
        return None

    async def _made(self, spec: SandboxSpec) -> _Kept:
        while self._idle and self._live >= self._room:
            await self._end(self._idle.pop(0))  # of another kind, or it would have been taken
        try:
            return await self._new(spec)
        except (RateLimited, StartFailed):
            if not self._idle:
                raise
        await self._end_idle()  # there may be no room as long as they have it
        return await self._new(spec)

    async def _new(self, spec: SandboxSpec) -> _Kept:
        self._live += 1
        try:
            async with AsyncExitStack() as stack:
                sandbox = await stack.enter_async_context(self.plain(spec))
                return _Kept(_kind(spec), await self._known(sandbox, spec), stack.pop_all())
        except BaseException:
            self._live -= 1
            raise

    async def _known(self, sandbox: Sandbox, spec: SandboxSpec) -> Sandbox:
        """The sandbox with what it is made of, so that this is asked once, and not for every episode. An object of its
        own, whoever else has it."""
        if sandbox.digest or not hasattr(self.plain, "package"):
            return msgspec.structs.replace(sandbox)
        package = await cast(Control, self.plain).package(spec)
        return msgspec.structs.replace(sandbox, **package._asdict())

    async def _extend(self, kept: _Kept) -> None:
        """Let every episode have nearly all of the time to live, as one in a new instance has."""
        sandbox = kept.sandbox
        if sandbox.expires_at is None or not hasattr(self.plain, "extend"):
            return
        life = sandbox.expires_at - sandbox.created_at
        now = time.monotonic()
        if now - kept.since > _STALE * life:
            await cast(Control, self.plain).extend(sandbox.id, life)
            kept.since = now

    async def _end(self, kept: _Kept) -> None:
        try:
            await kept.stack.aclose()
        except Exception as exc:  # what is left of it ends with its lease
            log.warning("[ENV:%s] could not be released: %s", kept.sandbox.id, exc)
        finally:
            self._live -= 1


class _Kept:
    """An instance, and what is to be done to give it back."""

    __slots__ = ("clean", "episodes", "kind", "sandbox", "since", "stack")

    def __init__(self, kind: bytes, sandbox: Sandbox, stack: AsyncExitStack) -> None:
        self.kind = kind
        self.sandbox = sandbox
        self.stack = stack
        self.episodes = 1
        self.since = time.monotonic()
        """When its time to live last began."""
        self.clean = False


def _kind(spec: SandboxSpec) -> bytes:
    """What instances that can stand in for each other have in common. The seed is told by the reset."""
    return msgspec.json.encode(msgspec.structs.replace(spec, seed=None))
