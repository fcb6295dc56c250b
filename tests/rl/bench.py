"""Help for tests of rollouts: a home with a few environments, a real engine, and what a test puts between the two."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv import Environment
from aenv.client.local import Embedded, resolve
from aenv.engines.base import Engine
from aenv.engines.process.engine import ProcessEngine
from aenv.models import Sandbox, SandboxSpec
from aenv.rl import Episode, Task
from tests.engines.process.lab import Family
from tests.support import eventually

SABOTEUR = Path(__file__).parent / "faults" / "saboteur"
TURNS = 3
"""Turns that ``worker`` plays, and so what an episode of it that goes well is scored."""
WORDS = """
from aenv import register_reward, register_tool

@register_tool
def work() -> str:
    return "done"

@register_reward
def first() -> float:
    return 1.0

@register_reward
def second(value: float = 2.0) -> dict:
    return {"score": value, "why": "because"}
"""
"""An environment that has no reset, and two rewards."""
Between = Callable[[Sandbox], AbstractAsyncContextManager[Sandbox]]


def write_env(home: Path, name: str, module: str) -> None:
    """An environment of one module, as if it had been fetched to a home."""
    root = home / "envs" / name / "1.0.0"
    (root / "src").mkdir(parents=True)
    (root / "src" / "custom_env.py").write_text(module)
    (root / "config.json").write_text(json.dumps({"name": name, "version": "1.0.0"}))


@contextmanager
def new_home() -> Iterator[Path]:
    """A home with the environments of these tests: a short path, since sockets are below it."""
    home = Path(tempfile.mkdtemp(prefix="aerl-", dir="/tmp"))
    home.chmod(0o755)
    shutil.copytree(SABOTEUR, home / "envs" / "saboteur" / "1.0.0", ignore=shutil.ignore_patterns("__pycache__"))
    write_env(home, "words", WORDS)
    write_env(home, "unimportable", "raise RuntimeError('broken on purpose at import')\n")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AENV_HOME", str(home))
            patch.setenv("AENV_SPARE", "0")  # so that instances can be counted
            for name in ("AENV_SYSTEM_URL", "AENV_HUB_URL", "AENV_API_KEY", "AENV_ENGINE", "DUMMY_INSTANCE_IP"):
                patch.delenv(name, raising=False)
            yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


class Bench(Embedded):
    """The embedded mode on an engine of a test's own."""

    def __init__(self, engine: Engine, home: Path) -> None:
        super().__init__()
        self.engine = engine
        self.home = home
        self.family = Family(home)
        self.made: list[str] = []
        """Every instance that there was."""
        self.between: Between | None = None
        """What stands between a client and its sandbox."""

    def _engine(self) -> Engine:
        return self.engine

    @asynccontextmanager
    async def _provided(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with self.engine.provision(resolve(spec)) as sandbox:
            self.made.append(sandbox.id)
            if self.between is None:
                yield sandbox
            else:
                async with self.between(sandbox) as seen:
                    yield seen

    def __call__(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self._provided(spec)

    def env(self, name: str = "saboteur", **options: Any) -> Environment:
        """An environment on this engine, not started."""
        given = {"startup_timeout": 60.0, "max_retries": 2, **options}
        return Environment(name, provision=self, **given)

    async def alive(self) -> list[str]:
        """What the engine has that has not ended."""
        return [found.id for found in await self.engine.find() if not found.state.over]

    async def empty(self) -> None:
        """Wait until nothing is left: neither in the engine's books, nor as processes."""

        async def look() -> bool:
            return not await self.alive() and not self.family.instances() and not self.family.firsts()

        await eventually("the end of every instance", look, 30.0)


@asynccontextmanager
async def benches(isolation: str | None = None) -> AsyncIterator[Bench]:
    with new_home() as home:
        async with ProcessEngine(isolation=isolation) as engine:
            yield Bench(engine, home)


async def worker(env: Episode, task: Task) -> str:
    """Works as often as there are turns."""
    for _ in range(TURNS):
        await env.call_tool("work")
    return "finished"


async def idle(env: Episode, task: Task) -> str:
    """Does nothing."""
    return "idle"


async def for_ever(env: Episode, task: Task) -> None:
    await asyncio.Event().wait()
