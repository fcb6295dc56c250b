"""Small parts of the process engine, each alone: messages, output, powers, and what is refused before anything runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import subprocess
from contextlib import suppress

import pytest

from aenv import Environment
from aenv.engines.process import output, powers
from aenv.engines.process.attest import attest, first_of
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.process.output import KEPT, Printed
from aenv.engines.process.powers import Lack, Powers
from aenv.engines.process.wire import LARGEST, Channel, close_all, discard, frame, receive_some, send
from aenv.errors import AEnvError, Invalid, SandboxLost, StartFailed, Unsupported
from tests.engines.process import lab
from tests.engines.process.lab import PATIENCE, eventually, probe

# Messages


@pytest.fixture
def pair():
    """A trusted side, and the other one."""
    mine, theirs = socket.socketpair()
    channel = Channel(mine)
    with theirs:
        yield channel, theirs
    channel.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_messages_go_both_ways_with_descriptors(pair):
    channel, theirs = pair
    reading, writing = os.pipe()
    socket.send_fds(theirs, [frame({"a": [1, "é"]})], [reading])
    message, passed = await channel.receive()
    assert message == {"a": [1, "é"]}
    os.write(writing, b"through")
    assert os.read(passed[0], 10) == b"through"
    assert os.get_inheritable(passed[0]) is False
    await channel.send({"b": 2})
    assert receive_some(theirs) == (struct.pack("I", 8) + b'{"b": 2}', [])
    close_all((*passed, reading, writing))


async def test_messages_are_put_together_and_taken_apart(pair):
    channel, theirs = pair
    one = struct.pack("I", 7) + b'{"n":1}'
    receiving = asyncio.create_task(channel.receive())
    for byte in one:
        theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await receiving)[0] == {"n": 1}
    theirs.send(one * 3)
    assert [(await channel.receive())[0] for _ in range(3)] == [{"n": 1}] * 3


async def test_a_large_message_does_not_wait_for_its_reader_in_one_piece(pair):
    channel, theirs = pair
    text = "x" * (LARGEST - 100)
    sending = asyncio.create_task(asyncio.to_thread(send, theirs, text))
    assert (await channel.receive())[0] == text
    await sending


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack("I", LARGEST + 1), "a message of 1048577 bytes"),
        (struct.pack("I", 2**32 - 1) + b"x", "a message of"),
        (struct.pack("I", 3) + b"{]}", "not JSON"),
        (struct.pack("I", 2) + b"\xff\xfe", "not JSON"),
        (struct.pack("I", 200_000) + b"[" * 200_000, "not JSON"),
        (b"", "the other side is gone"),
        (b"\x01\x00", "the other side is gone"),
    ],
)
async def test_what_is_no_message_is_the_end(pair, sent, why):
    channel, theirs = pair
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(SandboxLost, match=why):
        await channel.receive()


async def test_descriptors_that_nobody_asked_for_are_closed(pair):
    channel, theirs = pair
    before = descriptors()
    with open(os.devnull) as file:
        for _ in range(3):
            socket.send_fds(theirs, [b"\x08"], [file.fileno()] * 4)
    with pytest.raises(SandboxLost, match="too many descriptors"):
        await channel.receive()
    channel.close()  # a second time, it must not close what has their numbers by then
    assert descriptors() == before - 1


async def test_descriptors_of_a_message_that_is_none_are_closed(pair):
    channel, theirs = pair
    before = descriptors()
    with open(os.devnull) as file:
        socket.send_fds(theirs, [struct.pack("I", 2) + b"no"], [file.fileno()])
    with pytest.raises(SandboxLost, match="not JSON"):
        await channel.receive()
    assert descriptors() == before


async def test_a_socket_that_lingers_holds_nobody_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        full = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    full.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            full.send(b"x" * 65536)
    full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
    nothing = os.open(os.devnull, os.O_RDONLY)
    before = descriptors()
    async with asyncio.timeout(PATIENCE):
        await asyncio.to_thread(discard, [full.detach(), nothing])
    assert descriptors() == before - 2
    other.close()


async def test_the_kernel_says_who_sends(pair):
    channel, theirs = pair
    channel.ask_who()
    send(theirs, {})
    assert await channel.receive() == ({}, [])
    assert channel.pid == os.getpid()
    pidfd = channel.take_pidfd()
    assert pidfd is not None
    os.close(pidfd)


# Output


async def test_output_is_kept_up_to_a_bound():
    reading, writing = os.pipe()
    printed = Printed(reading)
    os.write(writing, b"first\n")
    await eventually("it", lambda: printed.since(0)[1] == b"first\n")
    assert printed.since(3) == (3, b"st\n")
    flood = asyncio.create_task(asyncio.to_thread(_write, writing, b"x" * (KEPT + 1000) + b"\nlast\n"))
    await eventually("the end of it", lambda: printed.last(1) == "last")
    await flood
    start, data = printed.since(0)
    assert len(data) == KEPT
    assert start == len(b"first\n") + 1000 + len(b"\nlast\n")
    os.close(writing)
    await eventually("its end", lambda: printed._descriptor < 0)
    assert printed.since(0) == (start, data)
    printed.close()


def _write(descriptor, data):
    while data:
        data = data[os.write(descriptor, data) :]


async def test_what_was_printed_last_is_not_lost_when_it_is_closed():
    reading, writing = os.pipe()
    printed = Printed(reading)
    os.write(writing, b"a\nb\nc\xff")
    printed.close()
    assert printed.last(2) == "b\nc\N{REPLACEMENT CHARACTER}"
    os.close(writing)


async def test_a_flood_of_single_bytes_is_read_now_and_then():
    read, write = os.pipe()
    printed = Printed(read)
    reads = 0
    some = printed._some

    def counted():
        nonlocal reads
        reads += 1
        return some()

    printed._some = counted
    for _ in range(1000):
        os.write(write, b"x")
        await asyncio.sleep(0)
    assert reads < 100
    os.close(write)
    printed.close()
    assert printed.since(0) == (0, b"x" * 1000)


async def test_a_flood_leaves_time_for_others(monkeypatch):
    monkeypatch.setattr(output, "_PAUSE", 3600.0)
    reading, writing = os.pipe()
    printed = Printed(reading)
    os.set_blocking(writing, False)
    os.write(writing, bytes(65536))
    await eventually("the first piece", lambda: printed.since(0)[1])
    os.write(writing, bytes(65536))
    for _ in range(20):
        await asyncio.sleep(0)
    with pytest.raises(BlockingIOError):
        os.write(writing, bytes(65536))
    assert len(printed.since(0)[1]) == 65536
    printed.close()
    os.close(writing)


# Powers


def test_modes_of_isolation():
    everything = Powers(True, True, True, True, True)
    assert powers.choose("auto", everything) == powers.choose("strict", everything) == everything
    assert powers.choose("none", everything) == Powers()
    lacking = Powers(True, True, True, False, True, (Lack("limits", "no memory controller", "mount it"),))
    assert powers.choose("auto", lacking) == lacking
    with pytest.raises(Unsupported, match="limits: no memory controller") as caught:
        powers.choose("strict", lacking)
    assert caught.value.hint == "mount it"
    with pytest.raises(Invalid, match="isolation 'stict' is not known") as caught:
        powers.choose("stict")
    assert "strict" in caught.value.hint


async def test_an_isolation_that_is_not_known_is_refused_and_leaves_nothing(home, leftovers):
    async with ProcessEngine(isolation="stict") as engine:
        with pytest.raises(Invalid, match="isolation 'stict' is not known"):
            await engine.create("a", probe())
    await leftovers.none()


# What a look from outside sees


def test_this_process_is_no_sealed_instance(pen):
    with pytest.raises(StartFailed, match="is not sealed") as caught:
        attest(
            os.getpid(),
            user=12345,
            group=12345,
            namespaces=("pid", "mnt"),
            apart_from=os.getpid(),
            filters=2,
            groups={"memory": "/elsewhere"},
        )
    said = str(caught.value)
    for wrong in ("another user", "shares the pid namespace", "shares the mnt namespace", "control group for memory"):
        assert wrong in said


def test_a_process_that_is_gone_is_no_sealed_instance():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(SandboxLost, match="ended before it was sealed"):
        attest(child, user=0, group=0, namespaces=(), apart_from=os.getpid(), filters=0, groups={})


def test_a_handle_on_any_other_process_is_not_on_the_first():
    own = os.pidfd_open(os.getpid())
    with open(os.devnull) as file:
        assert first_of(own, os.getpid()) is (os.getpid() == 1)
        assert first_of(file.fileno(), os.getpid()) is False
        assert first_of(10_000, os.getpid()) is False
    os.close(own)


# What is refused before anything runs


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"resources": {"memory": "0"}}, "memory '0'"),
        ({"resources": {"cpu": "-1"}}, "cpu '-1'"),
        ({"resources": {"memory": "lots"}}, "lots"),
    ],
)
async def test_specs_that_can_never_start(home, leftovers, fields, why):
    async with ProcessEngine(isolation="none") as engine:
        with pytest.raises(AEnvError, match=why) as caught:
            await engine.create("a", probe(**fields))
        assert isinstance(caught.value, Invalid)
    await leftovers.none()


async def test_a_project_that_is_not_there(home, leftovers):
    import msgspec

    async with ProcessEngine(isolation="none") as engine:
        for missing in ("", "/nowhere/at/all", __file__):
            with pytest.raises(Invalid, match="no project directory"):
                await engine.create("a", msgspec.structs.replace(probe(), project=missing))
    await leftovers.none()


async def test_an_id_that_is_no_name_is_refused(home):
    """Ids come from callers; none may reach the file system or break the host name."""
    async with ProcessEngine(isolation="auto") as engine:
        for id in ("", "a/b", "../x", "a\nb", "é" * 40, "x" * 1000, "\ud800"):
            with pytest.raises(Invalid, match="is not an id"):
                await engine.create(id, probe())
        sandbox = await engine.create("a.b-c_9", probe())
        assert await lab.call(sandbox, "echo", text="x") == "x"


# Programs of the machine


@pytest.mark.skipif(shutil.which("java") is None, reason="this machine has no Java")
async def test_java_starts_in_a_sandbox():
    async with Environment("mini-terminal") as env:
        found = await env.exec("java -Xmx64m -version")
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(shutil.which("fc-list") is None, reason="this machine has no fontconfig")
async def test_fonts_of_the_machine_are_found_in_a_sandbox():
    async with Environment("mini-terminal") as env:
        found = await env.exec("fc-list : family")
    here = subprocess.run(["fc-list", ":", "family"], capture_output=True, text=True, check=True)
    assert "Cannot load default config" not in found.stderr
    assert set(found.stdout.splitlines()) == set(here.stdout.splitlines())
