"""A program that uses the process engine: it makes, calls and releases instances of one project as its parent asks.

A request is a line ``{"do": verb, ...}``, its answer a line, too. ``open`` starts the engine, ``sequence`` has one
instance after the other answer a first call, ``fill`` makes many that live, ``call`` calls each of them, ``serve``
makes one for others to call, ``empty`` releases all, ``close`` ends the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from aenv import Environment, http, project
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.specs import complete
from aenv.models import EnvRef, Sandbox, SandboxSpec
from benchmarks.wire import ARGUMENTS, EXPECTED

LIFE = 3600.0
"""Seconds an instance may live: longer than any run."""


class Owner:
    """The instances of one program, each isolated in every way there is, and without a network."""

    def __init__(self, root: Path) -> None:
        self._engine = ProcessEngine(isolation="strict")
        self._project = project.read(root)
        self._live: list[Environment] = []
        self._served = AsyncExitStack()

    def _provision(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        wanted = msgspec.structs.replace(spec, ttl=LIFE, network="none", preload=True)
        return self._engine.provision(complete(wanted, self._project))

    def _environment(self) -> Environment:
        return Environment(self._project.name, provision=self._provision)

    async def open(self) -> float:
        return await _timed(self._engine.isolated())

    async def sequence(self, count: int) -> list[float]:
        """Seconds from a new ``Environment`` to its first answer. Releasing it is not counted."""
        seconds = []
        for _ in range(count):
            env = self._environment()
            try:
                seconds.append(await _timed(_call(env)))
            finally:
                await env.release()
        return seconds

    async def fill(self, count: int, at_once: int) -> float:
        envs = [self._environment() for _ in range(count)]
        self._live += envs
        return await _timed(_each((env.initialize for env in envs), at_once))

    async def call(self, at_once: int) -> float:
        return await _timed(_each((partial(_call, env) for env in self._live), at_once))

    async def serve(self) -> dict[str, str | None]:
        sandbox = await self._served.enter_async_context(self._provision(SandboxSpec(env=EnvRef(self._project.name))))
        return {"url": sandbox.url, "token": sandbox.token}

    async def empty(self) -> float:
        live, self._live = self._live, []
        seconds = await _timed(_each((env.release for env in live), len(live) or 1))
        await self._served.aclose()
        return seconds

    async def close(self) -> float:
        await http.close()
        return await _timed(self._engine.close())


async def _call(env: Environment) -> None:
    result = await env.call_tool("add", ARGUMENTS)
    assert result.structured == {"result": EXPECTED}, result


async def _each(jobs: Iterable[Callable[[], Awaitable[Any]]], at_once: int) -> None:
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())


async def _timed(work: Awaitable[Any]) -> float:
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


async def _serve(root: Path) -> None:
    owner = Owner(root)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        answer = await getattr(owner, request.pop("do"))(**request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await owner.empty()
    await owner.close()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
