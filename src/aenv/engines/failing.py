"""Engines that misbehave on purpose, to test whatever waits for sandboxes, provisions them and cleans up.

``PaperEngine`` is honest and makes sandboxes on paper: records with no process behind them. ``NeverReadyEngine`` is
one of its kind; ``SlowEngine`` and ``FailingEngine`` stand before any engine, before one of paper by default.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec

from aenv.engines.base import Engine
from aenv.errors import AEnvError, NotFound, StartFailed
from aenv.models import Sandbox, SandboxSpec, Second, State

_POWERS = (
    *("check_second", "check_resources", "check_fork", "output", "update", "exec", "upload", "download", "expose"),
)


class PaperEngine(Engine):
    """Keeps records, and runs nothing: what it makes is RUNNING at once, at an address where nobody answers."""

    name = "paper"

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        """What is alive, by id."""
        self.deleted: list[str] = []
        """Every id that was to be deleted, in order."""

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        if id not in self.sandboxes:
            self.sandboxes[id] = self._made(id, spec)
        return self.sandboxes[id]

    async def get(self, id: str) -> Sandbox:
        if id not in self.sandboxes:
            raise NotFound(f"there is no sandbox {id!r}")
        return self.sandboxes[id]

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        wanted = (labels or {}).items()
        return [sandbox for sandbox in self.sandboxes.values() if wanted <= sandbox.labels.items()]

    async def delete(self, id: str) -> None:
        self.deleted.append(id)
        self.sandboxes.pop(id, None)

    async def update(self, id: str, *, ttl: float) -> Sandbox:
        changed = msgspec.structs.replace(await self.get(id), expires_at=time.time() + ttl)
        self.sandboxes[id] = changed
        return changed

    def check_second(self, second: Second | None) -> None:
        return  # on paper, everything can be had

    def _made(self, id: str, spec: SandboxSpec) -> Sandbox:
        now = time.time()
        return Sandbox(
            url=f"unix:/nonexistent/{id}",
            id=id,
            env=str(spec.env),
            owner=spec.owner,
            labels=spec.labels,
            created_at=now,
            expires_at=None if spec.ttl is None else now + spec.ttl,
        )


class NeverReadyEngine(PaperEngine):
    """What it makes stays CREATING, with a reason that a person should see, until it is deleted."""

    name = "never-ready"

    def __init__(self, reason: str = "waiting for a place that never comes") -> None:
        super().__init__()
        self._reason = reason

    def _made(self, id: str, spec: SandboxSpec) -> Sandbox:
        made = super()._made(id, spec)
        return msgspec.structs.replace(made, url="", state=State.CREATING, reason=self._reason)


class _Before(Engine):
    """Passes everything on to the engine behind it."""

    def __init__(self, inner: Engine | None) -> None:
        self.inner = PaperEngine() if inner is None else inner
        self.cannot = self.inner.cannot
        for power in _POWERS:
            setattr(self, power, getattr(self.inner, power))

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        return await self.inner.create(id, spec)

    async def get(self, id: str) -> Sandbox:
        return await self.inner.get(id)

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        return await self.inner.find(labels)

    async def delete(self, id: str) -> None:
        await self.inner.delete(id)

    async def close(self) -> None:
        await self.inner.close()


class SlowEngine(_Before):
    """Each verb takes so many seconds longer; with ``ready``, what was created is CREATING for so many seconds."""

    name = "slow"

    def __init__(
        self,
        inner: Engine | None = None,
        *,
        create: float = 0.0,
        get: float = 0.0,
        find: float = 0.0,
        delete: float = 0.0,
        ready: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self._seconds = {"create": create, "get": get, "find": find, "delete": delete}
        self._ready = ready
        self._ready_at: dict[str, float] = {}

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(self._seconds["create"])
        made = await super().create(id, spec)
        self._ready_at.setdefault(id, time.monotonic() + self._ready)
        return self._shown(made)

    async def get(self, id: str) -> Sandbox:
        await asyncio.sleep(self._seconds["get"])
        return self._shown(await super().get(id))

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        await asyncio.sleep(self._seconds["find"])
        return [self._shown(found) for found in await super().find(labels)]

    async def delete(self, id: str) -> None:
        await asyncio.sleep(self._seconds["delete"])
        await super().delete(id)
        self._ready_at.pop(id, None)

    def _shown(self, found: Sandbox) -> Sandbox:
        if found.state is State.RUNNING and time.monotonic() < self._ready_at.get(found.id, 0.0):
            return msgspec.structs.replace(found, url="", state=State.CREATING)
        return found


class FailingEngine(_Before):
    """The verbs that are given an error raise it, the first ``times`` times; create does when none is given.

    ``late`` verbs do their work first and fail then, as when an answer is lost on its way.
    """

    name = "failing"

    def __init__(
        self,
        inner: Engine | None = None,
        *,
        create: AEnvError | None = None,
        get: AEnvError | None = None,
        find: AEnvError | None = None,
        delete: AEnvError | None = None,
        times: int | None = None,
        late: bool = False,
    ) -> None:
        super().__init__(inner)
        given = {"create": create, "get": get, "find": find, "delete": delete}
        self._errors = {verb: error for verb, error in given.items() if error is not None}
        if not self._errors:
            self._errors["create"] = StartFailed("this engine fails on purpose")
        self._left: dict[str, int | None] = dict.fromkeys(self._errors, times)
        self._late = late

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        self._fail("create", late=False)
        made = await super().create(id, spec)
        self._fail("create", late=True)
        return made

    async def get(self, id: str) -> Sandbox:
        self._fail("get", late=False)
        found = await super().get(id)
        self._fail("get", late=True)
        return found

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        self._fail("find", late=False)
        found = await super().find(labels)
        self._fail("find", late=True)
        return found

    async def delete(self, id: str) -> None:
        self._fail("delete", late=False)
        await super().delete(id)
        self._fail("delete", late=True)

    def _fail(self, verb: str, *, late: bool) -> None:
        if verb not in self._errors or late is not self._late:
            return
        left = self._left[verb]
        if left is None or left > 0:
            self._left[verb] = None if left is None else left - 1
            raise self._errors[verb]
