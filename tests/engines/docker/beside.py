"""Help for tests of second containers: images without Python, the agent, and what both containers are asked."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aenv import agent
from aenv.engines.docker import second as module
from aenv.engines.docker.daemon import Daemon
from aenv.errors import NotFound, Unsupported
from aenv.models import Sandbox, SandboxSpec, Second
from tests.engines.docker.lab import Harbour, call, probe
from tests.engines.docker.test_second_images import busybox, musl, take

__all__ = ["busybox", "compiled", "dual", "harbour", "image", "imported", "inspected", "kill", "musl", "program", "run"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent, which a home of its own for each test would have compiled each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(tmp_path_factory.mktemp("agent")))
        try:
            return agent.binary()
        except Unsupported as exc:
            pytest.skip(f"{exc} ({exc.hint})")


@pytest.fixture
def program(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(agent, "binary", lambda architecture=None: compiled)
    return compiled


@pytest.fixture
async def harbour(daemon: str, base_image: str, home: Path) -> AsyncIterator[Harbour]:
    found = Harbour(daemon, base_image)
    yield found
    await found.clear()


@asynccontextmanager
async def imported(daemon: str, content: bytes, *changes: str, **query: str) -> AsyncIterator[str]:
    """An image with those files."""
    asked = Daemon(daemon)
    name = f"localhost/aenv-test-second-{secrets.token_hex(6)}"
    await take(asked, name, content, changes=changes, **query)
    try:
        yield f"{name}:latest"
    finally:
        with suppress(NotFound):
            await asked.ask("DELETE", f"/images/{name}:latest", query={"force": "1"})


@pytest.fixture
async def image(daemon: str, busybox: bytes, program: Path) -> AsyncIterator[str]:
    """An image with a shell and a few tools, and nothing else."""
    async with imported(daemon, busybox) as name:
        yield name


def dual(image: str, **fields: Any) -> SandboxSpec:
    return probe(second=Second(image=image), **fields)


async def run(made: Sandbox, command: str | Sequence[str], **options: Any) -> str:
    """What a command in the second container prints; it must go well."""
    done = await call(made, "second", command=command, **options)
    assert done["returncode"] == 0, done
    printed: str = done["stdout"]
    return printed


async def inspected(harbour: Harbour, id: str) -> dict[str, Any]:
    """What the daemon says of a second container."""
    found: dict[str, Any] = await harbour.daemon.ask("GET", f"/containers/{module.name(harbour.state, id)}/json")
    return found


async def kill(harbour: Harbour, container: str) -> None:
    await harbour.daemon.ask("POST", f"/containers/{container}/kill", query={"signal": "SIGKILL"})
