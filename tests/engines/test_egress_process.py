"""The egress proxy as a process: many connections and sandboxes, its beginning and end, and nothing left of either."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
import venv
from pathlib import Path

import pytest

from aenv.engines.egress import proxy
from aenv.engines.egress.proxy import Proxy
from aenv.errors import Invalid, StartFailed
from tests.engines.egress_servers import (
    NOBODY,
    PATIENCE,
    Door,
    Server,
    added,
    descriptors,
    echo,
    hello,
    process,
    request,
    status,
    until,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process engine proxies on Linux alone")


async def test_the_usual_clients_work_and_show_why_something_is_denied():
    async with Server(hello) as server, process() as egress:
        async with added(egress, "box-1", f"127.0.0.1:{server.port}") as door:

            def ask():
                opener = urllib.request.build_opener(
                    urllib.request.ProxyHandler({"http": f"http://127.0.0.1:{door.port}"})
                )
                with opener.open(f"http://127.0.0.1:{server.port}/x", timeout=PATIENCE) as answer:
                    assert answer.read() == b"hello"
                tunnel = http.client.HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE)
                tunnel.set_tunnel("127.0.0.1", server.port)
                tunnel.request("GET", "/")
                assert tunnel.getresponse().read() == b"hello"
                tunnel.close()
                with pytest.raises(urllib.error.HTTPError) as caught:
                    opener.open("http://evil.example/secret?token=1", timeout=PATIENCE)
                said = caught.value.read().decode()
                caught.value.close()
                assert "evil.example:80" in said
                assert '"evil.example:80" to deployConfig.network.allow' in said
                denied = http.client.HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE)
                denied.set_tunnel("evil.example", 443)
                with pytest.raises(OSError, match=r"403 evil\.example:443 is not in network\.allow"):
                    denied.request("GET", "/")
                denied.close()

            await asyncio.to_thread(ask)


async def test_the_machines_own_resolver_is_asked():
    name = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        found = set()
    if not found or not all(address.startswith("127.") for address in found):
        pytest.skip("this machine's own name does not lead to loopback")
    address = sorted(found)[0]
    async with Server(hello) as server, process() as egress:
        async with added(egress, "box-1", f"{name}:{server.port}") as door:
            assert "not public" in await door.tunnel(f"{name}:{server.port}")
        if address == "127.0.0.1":
            async with added(egress, "box-2", f"{name}:{server.port}", f"{address}:{server.port}") as door:
                assert status(await door.get(server.port, host=name)) == 200


async def test_a_slow_client_slows_its_server_down():
    total = 64 * 1024 * 1024
    sent = 0

    async def flood(connection):
        nonlocal sent
        await connection.head()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        piece = bytes(65536)
        while sent < total:
            await connection.send(piece)
            sent += len(piece)

    async with Server(flood) as server, process() as egress:
        async with added(egress, "box-1", f"127.0.0.1:{server.port}") as door:
            reader, writer = await door.connect()
            reader._transport.pause_reading()
            writer.write(request("127.0.0.1", server.port))
            before, still = -1, 0
            while still < 20:  # nothing moves any more
                await asyncio.sleep(0.02)
                before, still = sent, still + 1 if sent == before and sent else 0
            assert sent < total
            with open(f"/proc/{egress.pid}/status") as file:
                resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
            assert resident < 80_000
            reader._transport.resume_reading()
            received = 0
            async with asyncio.timeout(PATIENCE):
                while data := await reader.read(1 << 20):
                    received += len(data)
            assert received > total
            writer.close()


# Many of them


async def test_two_hundred_at_once_are_all_answered():
    async with Server(hello) as server, process() as egress:
        async with added(egress, "box-1", f"127.0.0.1:{server.port}") as door:
            answers = await asyncio.gather(*(door.get(server.port) for _ in range(200)))
    assert [status(answer) for answer in answers] == [200] * 200


async def test_a_sandbox_has_so_many_connections_and_others_have_theirs():
    async with Server(echo) as server, process() as egress:
        address = f"127.0.0.1:{server.port}"
        async with added(egress, "box-1", address) as door, added(egress, "box-2", address) as other:
            opening = [asyncio.create_task(door.tunnel(address)) for _ in range(proxy.MOST_CONNECTIONS + 20)]
            await until(lambda: sum(task.done() for task in opening) == proxy.MOST_CONNECTIONS)
            reader, writer = await other.tunnel(address)
            writer.write(b"mine")
            async with asyncio.timeout(PATIENCE):
                assert await reader.readexactly(4) == b"mine"
            assert len(server.received) == proxy.MOST_CONNECTIONS + 1
            writer.close()
            for task in opening:
                if task.done():
                    task.result()[1].close()
            for _, late in await asyncio.gather(*opening):
                late.close()


async def test_descriptors_that_run_short_are_shared(monkeypatch):
    monkeypatch.setattr(proxy.resource, "getrlimit", lambda _: (40, 40))  # eight for all, eight for those with fewer
    found = Proxy()
    async with Server(echo) as server:
        address = f"127.0.0.1:{server.port}"
        doors = []
        for number in range(4):
            listener = socket.create_server(("127.0.0.1", 0))
            found.add(f"box-{number}", listener, [address])
            doors.append(Door(listener.getsockname()[1]))
        greedy = [asyncio.create_task(doors[0].tunnel(address)) for _ in range(12)]
        await until(lambda: sum(task.done() for task in greedy) == 8)
        modest = [await door.tunnel(address) for door in doors[1:] for _ in range(2)]
        assert all(isinstance(opened, tuple) for opened in modest)
        assert sum(task.done() for task in greedy) == 8
        for _, writer in modest:
            writer.close()
        for task in greedy:
            if task.done():
                task.result()[1].close()
        for _, writer in await asyncio.gather(*greedy):
            writer.close()
        for number in range(4):
            await found.remove(f"box-{number}")
    assert found.open == 0


async def test_no_descriptor_is_left_whatever_happened():
    async def moody(connection):
        head = await connection.head()
        if b"/cut" in head:
            connection.writer.transport.abort()
        elif b"/slow" in head:
            await connection.some()
        else:
            await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")

    async with Server(moody) as server, process() as egress:
        address = f"127.0.0.1:{server.port}"
        async with added(egress, "box-0", address) as door:
            await door.get(server.port)
        before = descriptors(egress.pid)
        for number in range(3):
            async with added(egress, f"box-{number}", address, "127.0.0.1:1") as door:
                for path in ("/", "/cut", "/") * 5:
                    await door.get(server.port, path)
                await door.tunnel("127.0.0.1:1")
                await door.tunnel("127.0.0.1:2")
                await door.ask(b"nonsense\r\n\r\n")
                left = [await door.tunnel(address) for _ in range(3)]
                _, slow = await door.connect()
                slow.write(request("127.0.0.1", server.port, "/slow"))
                _, aborted = await door.connect()
                aborted.write(b"GET http://")
                await aborted.drain()
                aborted.transport.abort()
                left[0][1].transport.abort()
            for _, writer in [*left[1:], (None, slow)]:
                writer.close()
            with socket.socket() as no_listener, pytest.raises(StartFailed):
                await egress.add("bad", no_listener, [])
        await until(lambda: descriptors(egress.pid) == before)


# Adding, removing, ending


async def test_removal_closes_the_listener_and_live_tunnels_of_that_sandbox_alone():
    async with Server(echo) as server, process() as egress:
        address = f"127.0.0.1:{server.port}"
        async with added(egress, "stays", address) as other:
            kept_reader, kept_writer = await other.tunnel(address)
            async with added(egress, "goes", address) as door:
                reader, writer = await door.tunnel(address)
                waiting = await door.connect()
            async with asyncio.timeout(PATIENCE):
                for end in (reader, waiting[0]):
                    with pytest.raises(ConnectionResetError):
                        await end.read()
            with pytest.raises(ConnectionRefusedError):
                await door.connect()
            await until(lambda: server.ends == ["reset"])
            kept_writer.write(b"here")
            async with asyncio.timeout(PATIENCE):
                assert await kept_reader.readexactly(4) == b"here"
            for end in (writer, waiting[1], kept_writer):
                end.close()
            await egress.remove("goes")
            await egress.remove("never was")


async def test_what_cannot_be_added_is_refused_and_the_rest_goes_on(tmp_path):
    async with Server(hello) as server, process() as egress:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            with pytest.raises(Invalid, match="'nonsense' cannot be allowed"):
                await egress.add("box-1", listener, ["nonsense"])
            with pytest.raises(Invalid, match="too long"):
                await egress.add("box-1", listener, [f"host-{number}.example:443" for number in range(10_000)])
        with socket.socket(socket.AF_UNIX) as local:
            local.bind(str(tmp_path / "socket"))
            local.listen()
            with pytest.raises(StartFailed, match="not a TCP listener"):
                await egress.add("box-1", local, [])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            with pytest.raises(StartFailed, match="box-1: "):
                await egress.add("box-1", datagrams, [])
        with open(tmp_path / "file", "w") as file:
            with pytest.raises(StartFailed, match="box-1: "):
                await egress.add("box-1", file, [])
        async with added(egress, "box-1", f"127.0.0.1:{server.port}") as door:
            with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(StartFailed, match="already"):
                await egress.add("box-1", listener, [])
            assert status(await door.get(server.port)) == 200


async def test_many_are_added_and_removed_at_once_and_a_cancelled_one_spoils_nothing():
    async with process() as egress:
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(50)]
            allow = [f"host-{number}.example:443" for number in range(500)]
            adding = [
                asyncio.create_task(egress.add(f"box-{number}", listener, allow))
                for number, listener in enumerate(listeners)
            ]
            await asyncio.sleep(0)
            for task in adding[::5]:
                task.cancel()
            await asyncio.gather(*adding, return_exceptions=True)
            await asyncio.gather(*(egress.remove(f"box-{number}") for number in range(50)))
            before = descriptors(egress.pid)
            await egress.add("last", listeners[0], allow)
            await until(lambda: descriptors(egress.pid) == before + 1)


async def test_a_proxy_that_dies_is_noticed():
    async with process() as egress:
        async with added(egress, "box-1", "example.org:443"):
            assert not egress.died
            os.kill(egress.pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                await egress.wait()
            assert egress.died
            with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(StartFailed, match="gone") as caught:
                await egress.add("box-2", listener, ["example.org:443"])
            assert "AENV_DEBUG=1" in caught.value.hint


async def test_it_is_this_package_that_runs_whatever_the_interpreter_has(tmp_path, monkeypatch):
    venv.create(tmp_path / "other", symlinks=True)
    bases = {"base": str(tmp_path / "other"), "platbase": str(tmp_path / "other")}
    packages = Path(sysconfig.get_path("purelib", "venv", bases))
    (packages / "aenv").mkdir()
    (packages / "aenv" / "__init__.py").write_text("raise SystemExit('another package of that name')\n")
    (packages / "needs.pth").write_text(sysconfig.get_path("purelib"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "other" / "bin" / "python"))
    async with Server(hello) as server, process() as egress:
        async with added(egress, "box-1", f"127.0.0.1:{server.port}") as door:
            assert status(await door.get(server.port)) == 200


async def test_a_proxy_that_dies_meanwhile_ends_what_waits_for_it():
    async with process() as egress:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            os.kill(egress.pid, signal.SIGSTOP)
            allow = [f"host-{number}.example:443" for number in range(2000)]
            adding = [asyncio.create_task(egress.add(f"box-{number}", listener, allow)) for number in range(20)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in adding)
            os.kill(egress.pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                found = await asyncio.gather(*adding, return_exceptions=True)
    assert all(isinstance(failure, StartFailed) for failure in found)


STARTER = """
import asyncio, socket, sys
from aenv.engines.egress import Egress

async def main():
    egress = await Egress.start(None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await egress.add("box-1", listener, [f"127.0.0.1:{sys.argv[1]}"])
        print(egress.pid, listener.getsockname()[1], flush=True)
    await egress.wait()

asyncio.run(main())
"""


async def test_the_death_of_who_started_it_ends_the_process_and_its_connections():
    async with Server(echo) as server:
        starter = subprocess.Popen(
            [sys.executable, "-c", STARTER, str(server.port)], stdout=subprocess.PIPE, text=True, process_group=0
        )
        try:
            line = await asyncio.to_thread(starter.stdout.readline)
            pid, port = map(int, line.split())
            reader, writer = await Door(port).tunnel(f"127.0.0.1:{server.port}")
            pidfd = os.pidfd_open(pid)
        finally:
            starter.kill()
            starter.wait()
            starter.stdout.close()
        try:
            ended = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
            async with asyncio.timeout(PATIENCE):
                await ended
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
            writer.close()


@pytest.mark.skipif(NOBODY is None, reason="only root can become somebody else")
async def test_it_runs_as_nobody_without_rights_or_environment(monkeypatch):
    monkeypatch.setenv("AENV_TEST_SECRET", "hidden")
    async with process() as egress:
        async with added(egress, "box-1", "example.org:443"):
            with open(f"/proc/{egress.pid}/status") as file:
                facts = dict(line.rstrip("\n").split(":\t", 1) for line in file)
            assert facts["Uid"].split() == facts["Gid"].split() == [str(NOBODY)] * 4
            assert facts["Groups"].strip() == ""
            assert {facts[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
            assert facts["NoNewPrivs"] == "1"
            with open(f"/proc/{egress.pid}/environ", "rb") as file:
                assert b"SECRET" not in file.read()
            assert os.getsid(egress.pid) == egress.pid


# A listener whose maker still holds it


async def test_options_of_a_listener_cannot_make_closing_wait():
    big = bytes(150_000)

    async def answer(connection):
        await connection.head()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(big) + big)

    async with Server(answer) as server, process() as egress:
        address = f"127.0.0.1:{server.port}"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            await egress.add("hostile", listener, [address])
            before = descriptors(egress.pid)
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(listener.getsockname())
                client.sendall(request("127.0.0.1", server.port))
                await until(lambda: descriptors(egress.pid) > before)
                # The answer is in the kernel, the client reads none of it, and the proxy closes after a while.
                await until(lambda: descriptors(egress.pid) == before)
                async with added(egress, "other", address) as door:
                    assert status(await door.get(server.port)) == 200
            await egress.remove("hostile")


class Held(socket.socket):
    """A listener whose other holder is always faster: it takes each connection, and lets accept wait for the next."""

    def setblocking(self, flag):
        super().setblocking(True)

    def accept(self):
        with self.dup() as other:
            socket.socket.accept(other)[0].close()
        return super().accept()


async def test_a_listener_that_is_made_to_wait_keeps_nobody_else_waiting(capfd):
    found = Proxy(stalled=0.2)
    before = signal.signal(signal.SIGALRM, proxy.on_alarm)
    async with Server(hello) as server:
        with Held() as hostile, socket.create_server(("127.0.0.1", 0)) as listener:
            hostile.bind(("127.0.0.1", 0))
            hostile.listen()
            address = hostile.getsockname()
            rescue = threading.Timer(10, lambda: socket.create_connection(address).close())
            rescue.start()
            try:
                found.add("hostile", hostile, [])
                found.add("other", listener, [f"127.0.0.1:{server.port}"])
                _, writer = await Door(address[1]).connect()
                assert status(await Door(listener.getsockname()[1]).get(server.port)) == 200
                assert hostile.fileno() < 0
                writer.close()
            finally:
                rescue.cancel()
                await found.remove("hostile")
                await found.remove("other")
                signal.signal(signal.SIGALRM, before)
    assert "hostile: somebody else changes its listener" in capfd.readouterr().err


async def test_a_listener_that_was_shut_down_is_let_go(capfd):
    async with process() as egress:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await egress.add("hostile", listener, [])
            before = descriptors(egress.pid)
            listener.shutdown(socket.SHUT_RDWR)
            await until(lambda: descriptors(egress.pid) == before - 1)
            await egress.remove("hostile")
    assert "hostile: its listener is of no use" in capfd.readouterr().err


# A sandbox without network

INSIDE = """
import json, os, socket, sys
from aenv.engines.process import kernel

report = socket.socket(fileno=int(sys.argv[1]))
port = int(sys.argv[2])
try:
    kernel.unshare(kernel.NEWUSER | kernel.NEWNET)
    kernel.loopback_up()
except OSError as exc:
    report.send(json.dumps({"impossible": str(exc)}).encode())
    sys.exit()
listener = socket.create_server(("127.0.0.1", 3128))
socket.send_fds(report, [b"{}"], [listener.fileno()])
listener.close()
report.recv(1)

def direct(address):
    try:
        socket.create_connection(address, 5).close()
        return "connected"
    except OSError as exc:
        return type(exc).__name__ + " " + os.strerror(exc.errno or 0)

def ask(raw):
    with socket.create_connection(("127.0.0.1", 3128), 10) as proxy:
        proxy.sendall(raw.encode())
        answer = b""
        while data := proxy.recv(65536):
            answer += data
    return answer.decode()

def get(host, port):
    return ask(f"GET http://{host}:{port}/ HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n")

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    datagrams.setblocking(False)
    try:
        datagrams.sendto(b"x", ("192.0.2.1", 53))
        udp = "sent"
    except OSError as exc:
        udp = os.strerror(exc.errno)
report.send(json.dumps({
    "interfaces": [name for _, name in socket.if_nameindex()],
    "udp": udp,
    "direct": direct(("127.0.0.1", port)),
    "beyond": direct(("192.0.2.1", 80)),
    "allowed": get("127.0.0.1", port),
    "tunnel": ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\nGET / HTTP/1.0\\r\\n\\r\\n"),
    "denied": get("127.0.0.1", int(sys.argv[3])),
    "metadata": get("169.254.169.254", 80),
}).encode())
"""


async def test_a_process_without_network_reaches_what_is_allowed_and_nothing_else():
    async def once(connection):
        await connection.head()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    loop = asyncio.get_running_loop()
    async with Server(once) as server, Server(once) as forbidden, process() as egress:
        with ours, theirs:
            command = [sys.executable, "-c", INSIDE, str(theirs.fileno()), str(server.port), str(forbidden.port)]
            child = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
            theirs.close()
            try:
                async with asyncio.timeout(PATIENCE):
                    data, passed, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 65536, 1)
                    if reason := json.loads(data or "{}").get("impossible"):
                        pytest.skip(f"no network namespace can be made here: {reason}")
                    with socket.socket(fileno=passed[0]) as listener:
                        await egress.add("box-1", listener, [f"127.0.0.1:{server.port}"])
                    ours.setblocking(False)
                    await loop.sock_sendall(ours, b"x")
                    found = json.loads(await loop.sock_recv(ours, 65536))
            finally:
                if child.poll() is None:
                    child.kill()
                child.wait()
    assert found["interfaces"] == ["lo"]
    assert found["udp"] == found["beyond"].partition(" ")[2] == "Network is unreachable"
    assert found["direct"] == "ConnectionRefusedError Connection refused"
    assert found["allowed"].startswith("HTTP/1.1 200 OK\r\n")
    assert found["allowed"].endswith("\r\n\r\nhello")
    assert found["tunnel"].startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert found["denied"].startswith("HTTP/1.1 403 ")
    assert found["metadata"].startswith("HTTP/1.1 403 ")
    assert len(server.received) == 2
    assert not forbidden.received
