"""What an image may ask of the daemon beside its command, and a runtime that is none: both are hostile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from aenv.engines import inside, tunnels
from aenv.engines.docker import doors, starting
from aenv.engines.docker.containers import name as container
from aenv.engines.docker.engine import DockerEngine
from aenv.errors import SandboxLost
from aenv.models import State
from tests.engines.docker.beside import dual, run
from tests.engines.docker.lab import Harbour, call, eventually, of_image, probe, python
from tests.engines.docker.test_faults import image as built

TOOL = b"import aenv\n@aenv.register_tool\ndef hello() -> str:\n    return 'hello'\n"
FILL = """
import errno, os, sys
for place in sys.argv[1:]:
    file = os.open(place + "/big", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(file, bytes(2**20))
    except OSError as exc:
        print(place, errno.errorcode[exc.errno])
"""
LISTEN = (
    "import os, socket, threading, time",
    "server = socket.socket(socket.AF_UNIX)",
    "server.bind('/run/aenv/runtime.sock')",
    "server.listen(100)",
)
WELL = r"b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}'"


LOOK = ("cat", "/proc/self/mountinfo")


def mounted(text: str) -> dict[str, str]:
    """What is where in a container, and of which kind: of two at a place, the one on top."""
    return {line.split()[4]: line.partition(" - ")[2].split()[0] for line in text.splitlines()}


# What an image asks of the daemon


@asynccontextmanager
async def greedy(harbour: Harbour) -> AsyncIterator[str]:
    """An image with volumes and a check of its health; the user of sandboxes may write in one of them."""
    lines = (
        f"FROM {harbour.base_image}",
        "USER root",
        "COPY tools.py /app/",
        'RUN ["python3", "-c", "import os; os.makedirs(\'/data\'); os.chmod(\'/data\', 0o1777)"]',
        'VOLUME ["/data", "/var/lib/more/", "/work", "odd"]',
        "HEALTHCHECK --interval=1s CMD true",
    )
    async with built(harbour.daemon, "\n".join(lines), **{"tools.py": TOOL}) as name:
        yield name


async def test_the_volumes_of_an_image_are_bounded(harbour: Harbour) -> None:
    async with greedy(harbour) as name, harbour.engine() as engine:
        made = await engine.create("one", of_image(name, resources={"memory": "256Mi", "ephemeralStorage": "16Mi"}))
        kinds = mounted((await harbour.run(engine, "one", *LOOK))[1])
        assert [kinds[place] for place in ("/data", "/var/lib/more", "/work", "/odd")] == ["tmpfs"] * 4
        code, text = await harbour.run(engine, "one", "python3", "-c", FILL, "/data", "/work", "/tmp")
        assert (code, text.split()) == (0, ["/data", "ENOSPC", "/work", "ENOSPC", "/tmp", "ENOSPC"])
        found = await harbour.daemon.ask("GET", f"/containers/{container(harbour.state, 'one')}/json")
        assert not (found["State"].get("Health") or {}).get("Status")
        assert found["Config"]["Healthcheck"]["Test"] == ["NONE"]
        assert await call(made, "hello") == "hello"
        await engine.delete("one")
        assert await harbour.left() == []


async def test_those_of_a_second_one_too(harbour: Harbour, program: Path) -> None:
    async with greedy(harbour) as name, harbour.engine() as engine:
        made = await engine.create("one", dual(name, resources={"memory": "512Mi", "ephemeralStorage": "16Mi"}))
        kinds = mounted(await run(made, list(LOOK)))
        assert [kinds[place] for place in ("/data", "/var/lib/more", "/work", "/odd")] == ["tmpfs"] * 4
        printed = await run(made, ["python3", "-c", FILL, "/data", "/tmp", "/shared"], timeout=60)
        assert printed.split() == ["/data", "ENOSPC", "/tmp", "ENOSPC", "/shared", "ENOSPC"]
        assert (await engine.get("one")).state is State.RUNNING
        await engine.delete("one")


# What is in memory


async def test_who_fills_all_that_is_in_memory_lives_on(harbour: Harbour) -> None:
    places = ("/tmp", "/work", "/dev/shm")
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(resources={"memory": "256Mi"}))
        code, text = await harbour.run(engine, "one", "python3", "-c", FILL, *places)
        assert (code, text.split()) == (0, [word for place in places for word in (place, "ENOSPC")])
        assert await call(made, "echo", text="x") == "x"
        kinds = mounted((await harbour.run(engine, "one", *LOOK))[1])
        sizes = [f"test -d {one} -a -w {one} && df -k --output=size {one} | tail -1 || echo 0" for one in kinds]
        _, text = await harbour.run(engine, "one", "sh", "-c", "\n".join(sizes))
        assert sum(map(int, text.split())) <= 200 * 1024
        await engine.delete("one")


async def test_either_of_two_may_fill_what_they_share(harbour: Harbour, image: str) -> None:
    places = ("/shared", "/tmp", "/work", "/dev/shm")
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image, resources={"memory": "1Gi"}))
        code, text = await harbour.run(engine, "one", "python3", "-c", FILL, *places)
        assert (code, text.split()) == (0, [word for place in places for word in (place, "ENOSPC")])
        done = await call(made, "second", command="busybox dd if=/dev/zero of=/tmp/big bs=1M", timeout=60)
        assert "No space left" in done["stderr"]
        assert (await engine.get("one")).state is State.RUNNING
        assert await call(made, "echo", text="x") == "x"
        await engine.delete("one")


# Runtimes that are none


async def test_one_that_answers_without_an_end(harbour: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more is read of it than an answer may have."""
    lines = (
        *LISTEN,
        "def flood(connection):",
        "    asked = connection.recv(65536).split()[1]",
        f"    if asked == b'/health' and os.path.exists('/tmp/well'): connection.sendall({WELL}); return",
        "    open('/tmp/well', 'w')",
        r"    connection.sendall(b'HTTP/1.1 503 No\r\nContent-Length: 900000000\r\n\r\n')",
        "    try:",
        "        while True: connection.sendall(bytes(2**20))",
        "    except OSError: pass",
        "while True:",
        "    threading.Thread(target=flood, args=(server.accept()[0],), daemon=True).start()",
    )
    asked: dict[str, int] = {}
    request = http.request

    async def noted(method: str, base: str, path: str, **options: Any) -> http.Response:
        asked[path.partition("?")[0]] = options.get("most", http.MOST_BODY)
        return await request(method, base, path, **options)

    for module in (starting, inside):
        monkeypatch.setattr(module.http, "request", noted)
    async with harbour.image(*python(*lines)) as name, harbour.engine() as engine:
        await engine.create("one", of_image(name))
        with pytest.raises(SandboxLost, match="more than anybody asked for"):
            await engine.upload("one", "/tmp/x", b"")
        with pytest.raises(SandboxLost, match="more than anybody asked for"):
            await engine.exec("one", ["true"])
        assert asked["/health"] == asked["/files"] == 64 * 1024
        assert asked["/exec"] == 16 * 1024**2
        await engine.delete("one")


async def test_one_that_never_hangs_up(harbour: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tunnel, it keeps nothing of ours."""
    lines = (
        *LISTEN,
        "kept = []",
        "while True:",
        "    kept.append(server.accept()[0])",
        "    kept[-1].recv(65536)",
        f"    if len(kept) == 1: kept[-1].sendall({WELL})",
    )
    monkeypatch.setattr(doors, "outlook", lambda daemon, about: None)
    monkeypatch.setattr(tunnels, "_LINGER", 0.5)
    monkeypatch.setattr(tunnels, "_MOST_OPEN", 4)
    async with harbour.image(*python(*lines)) as name, harbour.engine() as engine:
        made = await engine.create("one", of_image(name))
        await http.close()
        tunnel = await eventually("no connection", lambda: closed(engine))
        before = len(os.listdir("/proc/self/fd"))
        waiting = [await asyncio.open_unix_connection(made.url.removeprefix("unix:")) for _ in range(4)]
        await eventually("all connections", lambda: opened(tunnel, 4))
        reader, writer = await asyncio.open_unix_connection(made.url.removeprefix("unix:"))
        assert await reader.read() == b""  # one more than it takes
        writer.close()
        for _, writer in waiting:
            writer.close()
        await eventually("no connection", lambda: closed(engine))
        await eventually("as many descriptors as before", lambda: few(before))
        await engine.delete("one")


async def few(most: int) -> bool:
    await http.close()  # what the engine asked meanwhile
    return len(os.listdir("/proc/self/fd")) <= most


async def closed(engine: DockerEngine) -> Any:
    """Its tunnel, once nobody is there any more."""
    held = engine._live["one"].holds._exit_callbacks  # type: ignore[attr-defined]
    (tunnel,) = [
        one for _, exit in held if isinstance(one := getattr(exit.__wrapped__, "__self__", None), tunnels.Tunnel)
    ]
    return None if tunnel._open else tunnel


async def opened(tunnel: tunnels.Tunnel, many: int) -> bool:
    return len(tunnel._open) == many
