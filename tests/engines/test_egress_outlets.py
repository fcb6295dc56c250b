"""The listeners that one proxy serves, and a proxy that dies under them."""

import asyncio
import os
import signal
import socket

import pytest

from aenv.engines import egress
from aenv.engines.egress import Egress, clients, outlets
from aenv.engines.egress.outlets import Outlets
from aenv.errors import Invalid, StartFailed
from tests.engines.egress_servers import NOBODY, Door, Server, hello, status, until


@pytest.fixture
async def served():
    found = Outlets(NOBODY)
    yield found
    await found.close()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def door(listener):
    return Door(listener.getsockname()[1])


async def test_one_proxy_serves_all_and_ends_with_them(listener):
    async with Server(hello) as server:
        found = Outlets(NOBODY)
        await found.remove("never was")
        allow = [f"127.0.0.1:{server.port}"]
        with socket.create_server(("127.0.0.1", 0)) as other:
            await asyncio.gather(found.add("box-1", listener, allow), found.add("box-2", other, allow))
            pid = found._egress.pid
            for one in (listener, other):
                assert status(await door(one).get(server.port)) == 200
            closed = door(other)
        await found.remove("box-2")
        with pytest.raises(ConnectionRefusedError):
            await closed.connect()
        assert status(await door(listener).get(server.port)) == 200
        await found.close()
        assert not os.path.exists(f"/proc/{pid}")


async def test_all_are_served_again_when_it_dies(served, listener):
    async with Server(hello) as server:
        allow = [f"127.0.0.1:{server.port}"]
        gone = socket.create_server(("127.0.0.1", 0))
        await served.add("gone", gone, allow)
        await served.add("box-1", listener, allow)
        gone.close()
        for _ in range(2):
            first = served._egress
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda first=first: served._egress is not first)
            assert status(await door(listener).get(server.port)) == 200
        await served.remove("box-1")
        await served.remove("gone")
        last = served._egress
        os.kill(last.pid, signal.SIGKILL)
        await last.wait()
        with socket.create_server(("127.0.0.1", 0)) as late:
            await served.add("late", late, allow)
            assert status(await door(late).get(server.port)) == 200


async def test_one_that_cannot_be_started_is_tried_again(served, listener, monkeypatch):
    monkeypatch.setattr(outlets, "_PAUSE", 0.01)
    start, failed = Egress.start, 0

    async def broken(uid):
        nonlocal failed
        failed += 1
        if failed < 4:
            raise StartFailed("no more processes")
        return await start(uid)

    async with Server(hello) as server:
        await served.add("box-1", listener, [f"127.0.0.1:{server.port}"])
        first = served._egress
        monkeypatch.setattr(Egress, "start", broken)
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: served._egress is not first)
        assert status(await door(listener).get(server.port)) == 200


async def test_who_is_cancelled_takes_nobody_elses_proxy_along(served, listener):
    async with Server(hello) as server:
        allow = [f"127.0.0.1:{server.port}"]
        await served.add("box-1", listener, allow)
        os.kill(served._egress.pid, signal.SIGKILL)
        await served._egress.wait()
        with socket.create_server(("127.0.0.1", 0)) as other:
            adding = asyncio.create_task(served.add("box-2", other, allow))
            await asyncio.sleep(0)
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
            await served.remove("box-2")
        assert status(await door(listener).get(server.port)) == 200


def test_lists_that_no_proxy_can_serve():
    egress.check(["example.org:443", "*.example.org:443"])
    with pytest.raises(Invalid, match="cannot be allowed"):
        egress.check(["nonsense"])
    with pytest.raises(Invalid, match="too long"):
        egress.check([f"host-{number}.example:443" for number in range(10_000)])


@pytest.mark.parametrize(
    ("allowed", "own"),
    [
        ([], "localhost,127.0.0.1,::1"),
        (["localhost:80", "[::1]:80", "example.org:443"], "127.0.0.1"),
        (["127.0.0.1:1"], "localhost,::1"),
    ],
)
def test_what_programs_inside_are_told(allowed, own):
    told = clients.variables(allowed)
    assert {told[name] for name in ("http_proxy", "HTTPS_PROXY", "all_proxy")} == {"http://127.0.0.1:3128"}
    assert told["NO_PROXY"] == told["no_proxy"] == own
