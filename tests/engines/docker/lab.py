"""Help for tests of the engine on containers: specs, images that misbehave, and what is left at a daemon."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from aenv.engines.base import Engine
from aenv.engines.conformance import projects
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.engine import DockerEngine
from aenv.engines.specs import complete
from aenv.errors import NotFound, from_wire
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.project import read
from aenv.runtime.tokens import digest
from tests import daemons
from tests.support import eventually

PATIENCE = 120.0
"""Seconds that anything may take on a busy machine before a test calls it stuck."""
TOKEN = "the owner's own"
MOST_IMAGE = 2 * 1024**3
"""Bytes of an image that goes from one daemon to another."""


def probe(project: Path = projects.PROBE, **fields: Any) -> SandboxSpec:
    """A spec of the project that the conformance list runs."""
    given = {"ttl": 600.0, "startup_timeout": PATIENCE, "network": "none", **fields}
    spec = SandboxSpec(env=EnvRef("probe"), project=str(project), owner_token_sha256=digest(TOKEN), **given)
    return complete(spec, read(project))


def of_image(image: str, **fields: Any) -> SandboxSpec:
    """A spec of an image."""
    given = {"ttl": 600.0, "startup_timeout": PATIENCE, "network": "none", **fields}
    return SandboxSpec(env=EnvRef("probe", "1.0.0"), image=image, owner_token_sha256=digest(TOKEN), **given)


async def call(sandbox: Sandbox, tool: str, **arguments: Any) -> Any:
    """What a tool answers."""
    import msgspec

    headers = f"Content-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    body = msgspec.json.encode(arguments)
    answer = await http.request("POST", sandbox.url, f"/tools/{tool}", headers=headers, body=body, retries=0)
    found = msgspec.json.decode(answer.body, type=dict[str, Any])
    if answer.status != 200:
        raise from_wire({**found, "message": found.get("error")})
    return found["data"]


async def over(engine: Engine, id: str) -> Sandbox:
    """The sandbox once it is over."""

    async def look() -> Sandbox | None:
        found = await engine.get(id)
        return found if found.state.over else None

    return await eventually(f"the end of {id}", look)


class Harbour:
    """A daemon, with what engines of a name have there."""

    def __init__(self, address: str, base_image: str) -> None:
        self.address, self.base_image = address, base_image
        self.daemon = Daemon(address)
        self.state = f"t{secrets.token_hex(5)}"
        self.engines: list[DockerEngine] = []

    def engine(self, *, state: str | None = None, **options: Any) -> DockerEngine:
        """An engine, of the name that all of this test have by default."""
        name = self.state if state is None else state
        made = DockerEngine(address=self.address, state=name, base_image=self.base_image, **options)
        self.engines.append(made)
        return made

    async def left(self, label: str | None = None) -> list[str]:
        """Containers and volumes with a label, by name."""
        filters = {"label": [label or f"aenv.engine={self.state}"]}
        found = await self.daemon.ask("GET", "/containers/json", query={"all": "1", "filters": filters})
        names = [name for row in found for name in row["Names"]]
        volumes = await self.daemon.ask("GET", "/volumes", query={"filters": filters})
        return [*names, *(row["Name"] for row in volumes["Volumes"] or ())]

    @asynccontextmanager
    async def image(self, *command: str, user: str = "") -> AsyncIterator[str]:
        """An image like the base image that runs another command, and as another user."""
        name = f"localhost/aenv-test-{secrets.token_hex(5)}"
        made = await self.daemon.ask(
            "POST", "/containers/create", query={"name": f"aenv-{self.state}-image"}, body={"Image": self.base_image}
        )
        try:
            changes = [f"ENTRYPOINT {json.dumps(command[:1])}", f"CMD {json.dumps(command[1:])}"]
            changes += [f"USER {user}"] if user else []
            query = {"container": made["Id"], "repo": name, "tag": "1", "changes": tuple(changes)}
            await self.daemon.ask("POST", "/commit", query=query, body={})
        finally:
            await self.daemon.ask("DELETE", f"/containers/{made['Id']}", query={"force": "1"})
        try:
            yield f"{name}:1"
        finally:
            await self.daemon.ask("DELETE", f"/images/{name}:1", query={"force": "1"})

    async def run(self, engine: DockerEngine, id: str, *command: str) -> tuple[int, str]:
        """A command inside: its exit code, and what it printed."""
        done = await engine.exec(id, command, timeout=PATIENCE)
        return done.returncode, done.stdout + done.stderr

    async def stopped(self, container: str) -> None:
        """Wait until a container has ended by itself."""

        async def look() -> bool:
            found = await self.daemon.ask("GET", f"/containers/{container}/json")
            return bool(found["State"]["Status"] == "exited")

        await eventually(f"{container} to end by itself", look)

    async def gone(self, part: str = "", label: str | None = None) -> None:
        """Wait until nothing is left with a label, or nothing of it with that part in its name."""

        async def look() -> bool:
            return not [name for name in await self.left(label) if part in name]

        await eventually(f"the end of {part or label or 'all'}", look)

    async def clear(self) -> None:
        """End all that the test made and left, and say what that was."""
        for engine in self.engines:
            for id in list(engine._live):
                await engine.delete(id)
            await engine.close()
        for name in await self.left():
            with suppress(NotFound):
                path = f"/containers{name}" if name.startswith("/") else f"/volumes/{name}"
                await self.daemon.ask("DELETE", path, query={"force": "1"})


@asynccontextmanager
async def own_daemon(
    dockerd: str, *options: str, disk: Path | None = None
) -> AsyncIterator[tuple[daemons.Ground, Harbour]]:
    """A Docker daemon of one test alone, with the base image of another. ``disk`` is the image of a file system that
    it has its data on."""
    if reason := daemons.missing("dockerd", "containerd", "runc", "iptables"):
        pytest.skip(reason)
    base = os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(dockerd)
    with daemons.ground(f"own-{os.getpid()}") as ground:
        if disk is not None:
            data = ground.folder / "docker" / "data"
            data.mkdir(parents=True)
            ground.run("mount", "-o", "loop", str(disk), str(data))
        address = ground.dockerd(*options)
        content = await Daemon(dockerd).fetch(f"/images/{base}/get", most=MOST_IMAGE, timeout=300.0)
        async with aclosing(Daemon(address).lines("POST", "/images/load", content=content)) as lines:
            failed = [line async for line in lines if "error" in line]
            assert not failed, failed
        harbour = Harbour(address, base)
        try:
            yield ground, harbour
        finally:
            await harbour.clear()


def python(*lines: str) -> Sequence[str]:
    """A command that runs these lines."""
    return ("python3", "-c", "\n".join(lines))


async def killed(harbour: Harbour, home: Path, spec: str, first: str = "") -> str:
    """The name of an engine without a state that made the sandbox ``one`` in another process, and was killed then.
    ``spec`` is what that process evaluates, and ``first`` what it does before."""
    script = f"""
        import asyncio
        from aenv.engines.docker.engine import DockerEngine
        from tests.engines.docker.beside import dual
        from tests.engines.docker.lab import of_image, probe

        async def main():
            {first}
            engine = DockerEngine(address={harbour.address!r}, base_image={harbour.base_image!r})
            await engine.create("one", {spec})
            print(engine._engine, flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "AENV_HOME": str(home)},
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    try:
        name = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
        assert name.startswith("_")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return name
