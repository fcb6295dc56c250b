"""What containers cost: to make one and call it, beside a bare ``docker run``; and a command in one, by the agent in
it, beside the daemon's own exec."""

from __future__ import annotations

import asyncio
import io
import os
import platform as machines
import secrets
import subprocess
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from aenv import agent, http
from aenv.agent import recipe
from aenv.engines.docker.daemon import Daemon
from aenv.errors import AEnvError, NetworkError, NotFound
from aenv.runtime.second import Second
from benchmarks import daemon as daemons
from benchmarks import owners
from benchmarks.daemon import Site
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.platform import Platform, pooled, serving

MOST_CREATE, MOST_WARM, MOST_MANY, MOST_SECOND = 1.5, 1 / 20, 1.3, 1 / 10
SEQUENCE = 3
"""Containers one after the other, of each side in each round."""
MANY = 50
"""Containers at once."""
COMMANDS = 10
"""That a round runs, one after the other."""
_PATIENCE = 120.0
_PAUSE = 0.005
_CREATE = "container, create to first call"
_TRUE = "int main(void) { return 0; }\n"


def lacking() -> str:
    """Why containers cannot be measured here; empty when they can."""
    return daemons.lacking()


def create(effort: Effort) -> list[Line]:
    """From a new ``Environment`` in a container to its first answer: made anew, and where a warm one waits."""
    with daemons.site() as site, ExitStack() as stack:
        bare = stack.enter_context(_bare(site))
        engine = stack.enter_context(owners.owner("docker", **site.variables))
        platform = stack.enter_context(_platform(site))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aenv-bench-warm-")))
        warm = stack.enter_context(pooled(platform, folder, "pooled", 2))
        for owner in (engine, warm):
            owner.ask("sequence", count=1)
        bare(1)

        def anew() -> float:
            seconds: list[float] = engine.ask("sequence", count=SEQUENCE)
            return median(seconds)

        def claim() -> float:
            (seconds,) = warm.ask("sequence", count=1)
            platform.fill()  # so that what is made again disturbs nobody
            return float(seconds)

        def ready() -> float:
            return median(claim() for _ in range(SEQUENCE))

        def run() -> float:
            return median(bare(1) for _ in range(SEQUENCE))

        platform.fill()
        made, claimed, ran = interleave(effort.rounds(7), anew, ready, run)
        platform.check_claims()
    return [
        line(_CREATE, "ms", made, "docker run", ran, limit=MOST_CREATE, scale=1e3),
        line(f"{_CREATE}, warm", "ms", claimed, "docker run", ran, limit=MOST_WARM, scale=1e3),
    ]


def many(effort: Effort) -> list[Line]:
    """50 containers at once, until all of them are ready."""
    with daemons.site() as site, _bare(site) as bare, owners.owner("docker", **site.variables) as engine:
        engine.ask("sequence", count=1)
        bare(1)

        def together() -> float:
            seconds: float = engine.ask("fill", count=MANY, at_once=MANY)
            engine.ask("call", at_once=MANY)
            engine.ask("empty")
            return seconds

        ours, other = interleave(2 if effort.quick else 3, together, lambda: bare(MANY))
    return [line(f"{MANY} containers at once", "s", ours, "docker run", other, limit=MOST_MANY)]


@contextmanager
def _platform(site: Site) -> Iterator[Platform]:
    """A platform on the daemon. Nothing of it is left there."""
    names: list[str] = []
    try:
        with serving("--engine", "docker", **site.variables) as platform:
            names = daemons.engines(platform.home)
            yield platform
    finally:
        daemons.ask(daemons.clear(Daemon(site.address), names))


@contextmanager
def _bare(site: Site) -> Iterator[Callable[[int], float]]:
    """Runs so many containers at once, as ``docker run`` does with the same image, project and network, until all are
    healthy; the seconds that takes. Removing them is not counted."""
    with tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/tmp") as folder, asyncio.Runner() as runner:
        os.chmod(folder, 0o777)
        yield lambda count: runner.run(_run(site, Path(folder), count))
        runner.run(http.close())


async def _run(site: Site, folder: Path, count: int) -> float:
    daemon = Daemon(site.address)
    names = [f"aenv-bench-{secrets.token_hex(6)}" for _ in range(count)]
    try:
        begin = time.perf_counter()
        await asyncio.gather(*(_healthy(daemon, site.image, folder / f"{name}.sock", name) for name in names))
        return time.perf_counter() - begin
    finally:
        for name in names:
            with suppress(NotFound):
                await daemon.ask("DELETE", f"/containers/{name}", query={"force": "1", "v": "1"})


async def _healthy(daemon: Daemon, image: str, socket: Path, name: str) -> None:
    body = {
        "Image": image,
        "Cmd": ["/app"],
        "Env": [f"AENV_SOCKET=/door/{socket.name}"],
        "HostConfig": {"Binds": [f"{owners.PROJECT}:/app:ro", f"{socket.parent}:/door"], "NetworkMode": "none"},
    }
    await daemon.ask("POST", "/containers/create", query={"name": name}, body=body)
    await daemon.ask("POST", f"/containers/{name}/start")
    deadline = time.monotonic() + _PATIENCE
    while True:
        with suppress(NetworkError):
            if (await http.request("GET", f"unix:{socket}", "/health", retries=0)).status == 200:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} is not healthy within {_PATIENCE:g} s")
        await asyncio.sleep(_PAUSE)


class _Container(NamedTuple):
    daemon: Daemon
    id: str
    second: Second


def lacking_second() -> str:
    """Why commands in containers cannot be measured here; empty when they can."""
    try:
        agent.binary()
    except AEnvError as exc:
        return str(exc)
    return lacking()


def second(effort: Effort) -> list[Line]:
    """A command in a second container by its agent, and by the daemon's own exec."""
    with daemons.site() as site, asyncio.Runner() as runner:
        container = _container(Daemon(site.address))
        made = runner.run(container.__aenter__())
        try:

            def by_agent() -> float:
                return runner.run(_by_agent(made))

            def by_daemon() -> float:
                return runner.run(_by_daemon(made))

            by_agent(), by_daemon()
            ours, other = interleave(effort.rounds(11), by_agent, by_daemon)
        finally:
            runner.run(container.__aexit__(None, None, None))
    return [line("command in second", "ms", ours, "docker exec", other, limit=MOST_SECOND, scale=1e3)]


async def _by_agent(container: _Container) -> float:
    begin = time.perf_counter()
    for _ in range(COMMANDS):
        result = await container.second.exec(["/bin/true"])
        assert result.returncode == 0, result
    return (time.perf_counter() - begin) / COMMANDS


async def _by_daemon(container: _Container) -> float:
    daemon, body = container.daemon, {"Cmd": ["/bin/true"], "AttachStdout": True, "AttachStderr": True}
    begin = time.perf_counter()
    for _ in range(COMMANDS):
        made = await daemon.ask("POST", f"/containers/{container.id}/exec", body=body)
        async with daemon.hijack(f"/exec/{made['Id']}/start", body={"Detach": False, "Tty": False}) as running:
            async for _ in running:
                pass
        found = await daemon.ask("GET", f"/exec/{made['Id']}/json")
        assert found["ExitCode"] == 0, found
    return (time.perf_counter() - begin) / COMMANDS


@asynccontextmanager
async def _container(daemon: Daemon) -> AsyncIterator[_Container]:
    """One that holds nothing but a program that does nothing, and the agent."""
    name = f"aenv-benchmark-{secrets.token_hex(6)}"
    short = Path("/tmp", name[-12:])  # a socket's path is short, and a volume's is not
    try:
        await daemon.ask("POST", "/volumes/create", body={"Name": name})
        link = Path((await daemon.ask("GET", f"/volumes/{name}"))["Mountpoint"])
        link.chmod(0o777)
        query = {"fromSrc": "-", "repo": name, "tag": "latest"}
        async for said in daemon.lines("POST", "/images/create", query=query, content=_image()):
            assert "error" not in said, said
        body = {
            "Image": name,
            "Entrypoint": ["/aenv/agent", "/aenv/link/second.sock"],
            "User": "1000:1000",
            "HostConfig": {
                "Binds": [f"{name}:/aenv/link", f"{agent.binary()}:/aenv/agent:ro"],
                "NetworkMode": "none",
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
            },
        }
        made = await daemon.ask("POST", "/containers/create", query={"name": name}, body=body)
        await daemon.ask("POST", f"/containers/{made['Id']}/start")
        deadline = time.monotonic() + 30
        while not (link / "second.sock").exists():
            assert time.monotonic() < deadline, "the agent did not come up"
            await asyncio.sleep(0.01)
        short.symlink_to(link)
        yield _Container(daemon, made["Id"], Second(str(short / "second.sock")))
    finally:
        short.unlink(missing_ok=True)
        for what in (f"/containers/{name}", f"/volumes/{name}", f"/images/{name}"):
            with suppress(NotFound):
                await daemon.ask("DELETE", what, query={"force": "1"})


def _image() -> bytes:
    compiler = recipe.compiler(machines.machine())
    assert compiler is not None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "true"
        command = [compiler, "-static", "-O2", "-x", "c", "-o", program, "-"]
        subprocess.run(command, input=_TRUE, text=True, check=True)
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w") as archive:
            archive.add(program, "bin/true")
        return held.getvalue()
