"""A program that has instances of the project in its directory: it makes, calls and releases them as its parent asks.

Its argument says where they come from: ``engine``, the process engine and nothing else; ``docker``, the engine on
containers; ``settings``, wherever an ``Environment`` gets them here, embedded or from a platform; ``gateway``, a
platform that is on another machine.

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
from aenv.client.platform import Platform
from aenv.client.provision import Provision
from aenv.engines import load_engine
from aenv.engines.base import Engine
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.specs import complete
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.wire import Instance
from benchmarks.wire import ARGUMENTS, EXPECTED

LIFE = 3600.0
"""Seconds an instance may live: longer than any run."""


class Owner:
    """The instances of one program, from wherever the settings say."""

    def __init__(self) -> None:
        self._project = project.read(Path.cwd())
        self._live: list[Environment] = []

    def _provision(self) -> Provision | None:
        return None

    def _environment(self) -> Environment:
        return Environment(self._project.name, ttl=LIFE, provision=self._provision())

    async def sequence(self, count: int) -> list[float]:
        """Seconds from a new ``Environment`` to its first answer. Releasing it is not counted."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            env = self._environment()
            try:
                await _call(env)
                seconds.append(time.perf_counter() - begin)
            finally:
                await env.release()
        return seconds

    async def fill(self, count: int, at_once: int) -> float:
        envs = [self._environment() for _ in range(count)]
        self._live += envs
        return await _timed(each((env.initialize for env in envs), at_once))

    async def call(self, at_once: int) -> float:
        return await _timed(each((partial(_call, env) for env in self._live), at_once))

    async def empty(self) -> float:
        live, self._live = self._live, []
        return await _timed(each((env.release for env in live), len(live) or 1))

    async def close(self) -> float:
        return await _timed(http.close())


class EngineOwner(Owner):
    """Instances of an engine of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: Engine = self._made()
        self._served = AsyncExitStack()

    def _made(self) -> Engine:
        return ProcessEngine()

    def _provision(self) -> Provision:
        return self._provide

    def _provide(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self._engine.provision(complete(spec, self._project))

    async def open(self) -> float:
        assert isinstance(self._engine, ProcessEngine)
        return await _timed(self._engine.isolated())

    async def serve(self) -> dict[str, str | None]:
        wanted = SandboxSpec(env=EnvRef(self._project.name), ttl=LIFE)
        sandbox = await self._served.enter_async_context(self._provide(wanted))
        return {"url": sandbox.url, "token": sandbox.token}

    async def empty(self) -> float:
        await self._served.aclose()
        return await super().empty()

    async def close(self) -> float:
        return await super().close() + await _timed(self._engine.close())


class DockerOwner(EngineOwner):
    """Instances that are containers."""

    def _made(self) -> Engine:
        return load_engine("docker")


class Remote(Platform):
    """A platform whose sandboxes cannot be reached but by its gateway, as from another machine."""

    async def _sandbox(self, instance: Instance, attached: bool = False) -> Sandbox:
        return await super()._sandbox(msgspec.structs.replace(instance, socket=""), attached)


class GatewayOwner(Owner):
    """Instances of a platform, reached by its gateway."""

    def _provision(self) -> Provision:
        return Remote(None)


KINDS: dict[str, type[Owner]] = {
    "engine": EngineOwner,
    "docker": DockerOwner,
    "settings": Owner,
    "gateway": GatewayOwner,
}


async def _call(env: Environment) -> None:
    result = await env.call_tool("add", ARGUMENTS)
    assert result.structured == {"result": EXPECTED}, result


async def each(jobs: Iterable[Callable[[], Awaitable[Any]]], at_once: int) -> None:
    """Do all of them, so many at a time."""
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


async def serve(owner: Any) -> None:
    """Do what the lines on standard input ask for, by the methods of an owner."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        answer = await getattr(owner, request.pop("do"))(**request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await owner.empty()
    await owner.close()


async def _main(kind: str) -> None:
    await serve(KINDS[kind]())


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
