"""Allow-lists on real daemons: what a container reaches and what not, and a proxy that outlives its own death, that of
its engine, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from aenv.engines.docker import doors, exits
from aenv.engines.docker.engine import DockerEngine
from aenv.errors import Conflict, Invalid, SandboxLost, Unsupported
from aenv.models import State
from tests.engines.docker.beside import dual, imported, inspected, run
from tests.engines.docker.lab import PATIENCE, Harbour, call, eventually, of_image, probe, python
from tests.engines.egress_servers import Server, descriptors, hello, until

GET = """
import sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as exc:
    print(exc.code, exc.read().decode())
except OSError as exc:
    print("nobody:", exc)
"""
BIND = """
import errno, socket
for option in (0, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as made:
            if option:
                made.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                made.bind((host, 3128))
                made.listen()
                print("taken", option, host)
            except OSError as exc:
                print(errno.errorcode[exc.errno])
"""
DIRECT = """
import socket, sys
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "10.0.0.1"), (socket.AF_INET, "1.1.1.1")):
    with socket.socket(family) as made:
        made.settimeout(10)
        try:
            made.connect((address, int(sys.argv[1])))
            print("reached", address)
        except OSError as exc:
            print("nobody")
"""
LISTENING = "0100007F:0C38 00000000:0000 0A"
"""How Linux shows that somebody listens at the port of the proxy."""
SQUAT = """
import os, pathlib, socket, sys
place = pathlib.Path("/tmp/project")
place.mkdir()
(place / "config.json").write_text('{"name": "squat", "version": "1.0.0"}')
(place / "tools.py").write_text("import aenv\\n@aenv.register_tool\\ndef nothing() -> None: ...")
taken = socket.create_server(("127.0.0.1", 3128))
if os.fork() == 0:
    sys.stdin.close()
    while True:
        taken.accept()[0].close()
os.execvp("python3", ["python3", "-m", "aenv.runtime", str(place)])
"""


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[Server, dict[str, list[str]], Server]]:
    """A server, the network of a sandbox that may reach it alone, and another server."""
    async with Server(hello) as allowed, Server(hello) as other:
        yield allowed, {"allow": [f"127.0.0.1:{allowed.port}"]}, other


async def get(harbour: Harbour, engine: DockerEngine, id: str, url: str) -> str:
    """What is answered to a program inside that knows of no proxy but by its variables."""
    code, text = await harbour.run(engine, id, "python3", "-c", GET, url)
    assert code == 0, text
    return text.strip()


async def reached(harbour: Harbour, engine: DockerEngine, id: str, server: Server) -> bool:
    return await get(harbour, engine, id, f"http://127.0.0.1:{server.port}/") == "200 hello"


async def have(process: int, most: int) -> bool:
    """Whether a process has no more descriptors than that."""
    return int(descriptors(process)) <= most


def listeners() -> int:
    """Sockets of this process that listen at the proxy's port, wherever that is."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as one:
            own = one.getsockname()
            found += isinstance(own, tuple) and own[1] == 3128
    return found


def proxy_of(engine: DockerEngine) -> int:
    """The proxy's process."""
    assert engine._host is not None
    egress = engine._host.exits._outlets._egress
    assert egress is not None
    return egress.pid


# What is reached


async def test_what_is_listed_is_reached_and_nothing_else(harbour: Harbour) -> None:
    async with harbour.engine() as engine, two_servers() as (server, network, other):
        await engine.create("one", probe(network=network))
        assert await reached(harbour, engine, "one", server)
        refused = await get(harbour, engine, "one", f"http://127.0.0.1:{other.port}/")
        wanted = f"127.0.0.1:{other.port}"
        assert refused == (
            f"403 {wanted} is not in network.allow\n"
            f'To allow it, add "{wanted}" to deployConfig.network.allow in config.json.'
        )
        assert "403 example.org:443 is not in network.allow" in await get(harbour, engine, "one", "https://example.org")
        code, text = await harbour.run(engine, "one", "python3", "-c", DIRECT, str(server.port))
        assert (code, text.split()) == (0, ["nobody"] * 3)
        _, text = await harbour.run(engine, "one", *python("print(open('/proc/net/dev').read())"))
        assert [line.split(":")[0].strip() for line in text.splitlines() if ":" in line] == ["lo"]
        found = await harbour.daemon.ask("GET", f"/containers/aenv-{harbour.state}-one/json")
        assert found["HostConfig"]["NetworkMode"] == "none"
        assert other.received == []


async def test_programs_inside_are_told_as_on_the_process_engine(harbour: Harbour) -> None:
    network = {"allow": ["localhost:1", "example.org:443"]}
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(network=network, environment_variables={"ALL_PROXY": "mine"}))
        assert await call(made, "environ", name="https_proxy") == "http://127.0.0.1:3128"
        assert await call(made, "environ", name="NO_PROXY") == "127.0.0.1,::1"
        assert await call(made, "environ", name="ALL_PROXY") == "mine"
        alone = await engine.create("two", probe())
        assert await call(alone, "environ", name="https_proxy") is None


async def test_a_name_that_leads_to_this_machine_is_denied(harbour: Harbour) -> None:
    name = socket.gethostname()
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        found = set()
    if not found or not all(address.startswith("127.") for address in found):
        pytest.skip("this machine's own name does not lead to loopback")
    async with harbour.engine() as engine, Server(hello) as server:
        await engine.create("one", probe(network={"allow": [f"{name}:{server.port}", f"localhost:{server.port}"]}))
        denied = await get(harbour, engine, "one", f"http://{name}:{server.port}/")
        assert "leads to an address that is not public" in denied
        assert await get(harbour, engine, "one", f"http://localhost:{server.port}/") == "200 hello"


async def test_nothing_on_the_list_is_nothing_to_reach(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        await engine.create("one", probe(network={"allow": []}))
        found = await get(harbour, engine, "one", "http://example.org/")
        assert found.startswith("403 example.org:80 is not in network.allow")


async def test_each_sandbox_has_its_own_list(harbour: Harbour) -> None:
    async with harbour.engine() as engine, two_servers() as (server, network, other):
        mirrored = {"allow": [f"127.0.0.1:{other.port}"]}
        await asyncio.gather(
            engine.create("one", probe(network=network)), engine.create("two", probe(network=mirrored))
        )
        assert await reached(harbour, engine, "one", server)
        assert await reached(harbour, engine, "two", other)
        assert not await reached(harbour, engine, "one", other)
        await engine.delete("one")
        assert await reached(harbour, engine, "two", other)


async def test_the_import_of_a_project_may_use_it(harbour: Harbour, tmp_path: Path) -> None:
    async with harbour.engine() as engine, two_servers() as (server, network, _):
        code = f"""
            import urllib.request
            from aenv import register_tool

            FOUND = urllib.request.urlopen("http://127.0.0.1:{server.port}/", timeout=60).read().decode()

            @register_tool
            def found() -> str:
                return FOUND
        """
        (tmp_path / "src").mkdir()
        lines = [line.removeprefix(" " * 12) for line in code.strip("\n").splitlines()]
        (tmp_path / "src" / "tools.py").write_text("\n".join(lines))
        (tmp_path / "config.json").write_text(json.dumps({"name": "early", "version": "1.0.0"}))
        made = await engine.create("one", probe(tmp_path, network=network))
        assert await call(made, "found") == "hello"


# The second container


async def test_the_second_container_has_the_same_list_and_a_network_of_its_own(
    harbour: Harbour, busybox: bytes, program: Path
) -> None:
    async with (
        imported(harbour.address, busybox) as image,
        harbour.engine() as engine,
        two_servers() as (server, network, other),
    ):
        made = await engine.create("one", dual(image, network=network))
        fetch = "busybox wget -q -O - http://127.0.0.1:{}/ 2>&1"
        assert await run(made, fetch.format(server.port)) == "hello"
        denied = await call(made, "second", command=fetch.format(other.port))
        assert (denied["returncode"], "403" in denied["stdout"]) == (1, True)
        assert await reached(harbour, engine, "one", server)
        assert (await inspected(harbour, "one"))["HostConfig"]["NetworkMode"] == "none"
        _, own = await harbour.run(engine, "one", *python("import os; print(os.readlink('/proc/self/ns/net'))"))
        assert await run(made, "busybox readlink /proc/self/ns/net") != own
        await engine.delete("one")
        assert await harbour.left() == []


# Hostile code


async def test_nobody_inside_takes_its_port(harbour: Harbour) -> None:
    async with harbour.engine() as engine, two_servers() as (server, network, _):
        await engine.create("one", probe(network=network))
        code, text = await harbour.run(engine, "one", "python3", "-c", BIND)
        assert (code, text.split()) == (0, ["EADDRINUSE"] * 6)
        _, text = await harbour.run(engine, "one", *python("import os; print(os.listdir('/run/aenv'))"))
        assert text == "['runtime.sock']\n"
        assert await reached(harbour, engine, "one", server)


async def test_whoever_takes_it_first_keeps_only_itself_from_the_network(
    harbour: Harbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = exits.listen

    def late(process: str, container: str) -> socket.socket:
        """Not before the program inside has the port."""
        monkeypatch.setattr(exits, "listen", listen)
        deadline = time.monotonic() + PATIENCE
        while LISTENING not in Path(f"{process}/net/tcp").read_text():
            assert time.monotonic() < deadline, "the port was not taken"
            time.sleep(0.01)
        return listen(process, container)

    monkeypatch.setattr(exits, "listen", late)
    async with (
        harbour.image("python3", "-c", SQUAT) as image,
        harbour.engine() as engine,
        two_servers() as (server, network, _),
    ):
        await engine.create("one", of_image(image, network=network))
        await engine.create("two", probe(network=network))
        assert (await get(harbour, engine, "one", f"http://127.0.0.1:{server.port}/")).startswith("nobody")
        assert await reached(harbour, engine, "two", server)
        code, text = await harbour.run(
            engine,
            "one",
            *python(
                "import os, pathlib, signal",
                "for one in pathlib.Path('/proc').glob('[0-9]*'):",
                "    if b'taken' + b'.accept' in (one / 'cmdline').read_bytes():",
                "        os.kill(int(one.name), signal.SIGKILL)",
            ),
        )
        assert code == 0, text
        await eventually("a way out of a port that is free", lambda: reached(harbour, engine, "one", server))


def test_the_network_of_another_process_is_not_entered() -> None:
    with pytest.raises(SandboxLost, match="not in the control group"):
        exits.listen("/proc/self", "f" * 64)
    with pytest.raises(SandboxLost, match="is gone"):
        exits.listen("/proc/0", "f" * 64)


async def test_a_port_that_is_taken_is_told(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        await engine.create("one", probe(network={"allow": []}))
        found = await harbour.daemon.ask("GET", f"/containers/aenv-{harbour.state}-one/json")
        assert engine._host is not None
        with pytest.raises(Conflict, match="somebody else's"):
            exits.listen(engine._host.seen(f"/proc/{found['State']['Pid']}"), found["Id"])


# Ends


async def test_a_proxy_that_is_killed_is_there_again(harbour: Harbour) -> None:
    async with harbour.engine() as engine, two_servers() as (server, network, _):
        await engine.create("one", probe(network=network))
        assert await reached(harbour, engine, "one", server)
        for _ in range(2):
            before = proxy_of(engine)
            os.kill(before, signal.SIGKILL)
            await eventually("another proxy", lambda: reached(harbour, engine, "one", server))
            assert proxy_of(engine) != before
        await engine.create("two", probe(network=network))
        assert await reached(harbour, engine, "two", server)


async def test_who_is_found_again_has_its_proxy_again(harbour: Harbour, image: str) -> None:
    async with two_servers() as (server, network, other):
        async with harbour.engine() as engine:
            await engine.create("one", dual(image, network=network))
            assert await reached(harbour, engine, "one", server)
            first = proxy_of(engine)
        assert not os.path.exists(f"/proc/{first}")
        async with harbour.engine() as engine:
            made = await engine.get("one")
            assert made.state is State.RUNNING
            assert await reached(harbour, engine, "one", server)
            assert not await reached(harbour, engine, "one", other)
            assert await run(made, f"busybox wget -q -O - http://127.0.0.1:{server.port}/") == "hello"
            await engine.delete("one")
            assert await harbour.left() == []


async def test_of_two_engines_the_one_that_is_left_has_the_proxy(harbour: Harbour) -> None:
    async with two_servers() as (server, network, _), harbour.engine() as second:
        async with harbour.engine() as first:
            await first.create("one", probe(network=network))
            assert (await second.get("one")).state is State.RUNNING
            assert await reached(harbour, second, "one", server)
        await eventually("the other engine's proxy", lambda: reached(harbour, second, "one", server))
        await second.delete("one")


async def test_nothing_is_left_of_what_has_ended(harbour: Harbour) -> None:
    async with harbour.engine() as engine, two_servers() as (server, network, _):
        await engine.create("stays", probe(network=network))
        before = descriptors(proxy_of(engine))
        for number in range(3):
            await engine.create(f"box-{number}", probe(network=network))
            assert await reached(harbour, engine, f"box-{number}", server)
            await engine.delete(f"box-{number}")
        await eventually("listeners to be closed", lambda: have(proxy_of(engine), before))
        assert listeners() == 1
        process = proxy_of(engine)
        await engine.delete("stays")
        assert await harbour.left() == []
        assert listeners() == 0
    assert not os.path.exists(f"/proc/{process}")


async def test_a_container_that_dies_takes_its_way_out_along(harbour: Harbour) -> None:
    async with harbour.engine() as engine, two_servers() as (_, network, _):
        await engine.create("stays", probe(network=network))
        before = descriptors(proxy_of(engine))
        await engine.create("one", probe(network=network))
        await harbour.daemon.ask("POST", f"/containers/aenv-{harbour.state}-one/kill")
        await eventually("its listener to be closed", lambda: have(proxy_of(engine), before))
        await engine.delete("one")


async def test_an_engine_that_is_killed_leaves_no_proxy(harbour: Harbour, home: Path) -> None:
    code = f"""
import asyncio, os
from aenv.engines.docker.engine import DockerEngine
from tests.engines.docker.lab import probe

async def main():
    engine = DockerEngine(address={harbour.address!r}, base_image={harbour.base_image!r})
    await engine.create("one", probe(network={{"allow": ["127.0.0.1:1"]}}))
    print(engine._engine, engine._host.exits._outlets._egress.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        name, proxy = (await asyncio.to_thread(other.stdout.readline)).split()
        os.kill(other.pid, signal.SIGKILL)
        await until(lambda: not os.path.exists(f"/proc/{proxy}"))
    finally:
        other.kill()
        other.wait()
    async with harbour.engine(state="") as engine:
        await engine.find()
        await harbour.gone(label=f"aenv.engine={name}")


# What cannot be


async def test_what_is_no_list(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        for allow, words in (
            (["nonsense"], "cannot be allowed"),
            ([f"host-{number}.example:443" for number in range(10_000)], "too long"),
        ):
            with pytest.raises(Invalid, match=words):
                await engine.create("one", probe(network={"allow": allow}))
        assert await harbour.left() == []


async def test_where_the_engine_cannot_enter_it_says_so(harbour: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "outlook", lambda daemon, about: None)
    async with harbour.engine() as engine:
        with pytest.raises(Unsupported, match="not root on the daemon's machine") as caught:
            await engine.create("one", probe(network={"allow": ["example.org:443"]}))
        assert re.search("'none' or 'full'", str(caught.value.hint))
        await engine.delete("one")
        assert await harbour.left() == []


async def test_a_kernel_of_its_own_is_no_network_of_this_machine() -> None:
    async def inspect(container: str) -> dict[str, object]:
        return {}

    found = exits.Exits(inspect, lambda path: path)
    assert "runsc keeps" in found.missing("runsc")
    assert "cannot enter" in exits.Exits(inspect, lambda path: "").missing("")
