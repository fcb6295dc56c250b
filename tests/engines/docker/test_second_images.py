"""The agent in real containers: unmodified images without Python, without a shell, and with another C library."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.docker.daemon import Daemon
from aenv.errors import AEnvError, NotFound, SandboxLost
from aenv.runtime.second import Second
from tests.engines.docker.beside import take
from tests.support import until

LABEL = "aenv.test.second"


def answers(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
        sock.connect(str(path))
        return True
    return False


@asynccontextmanager
async def second(address: str, image: bytes, program: Path, **host: Any) -> AsyncIterator[tuple[Daemon, str, Second]]:
    """A container of that image, whose first process is the agent, and what speaks to it from another container's
    place: the directory that both share."""
    daemon = await Daemon.find(address)
    name = f"aenv-test-second-{secrets.token_hex(6)}"
    try:
        await daemon.ask("POST", "/volumes/create", body={"Name": name, "Labels": {LABEL: "1"}})
        volume = await daemon.ask("GET", f"/volumes/{name}")
        link = Path(volume["Mountpoint"])
        if not link.is_dir():
            pytest.skip("the daemon's volumes are not on this machine")
        await take(daemon, name, image)
        os.chown(link, 1000, 1000)
        body = {
            "Image": name,
            "Entrypoint": ["/aenv/agent/aenv-agent", "/aenv/link/second.sock"],
            "Cmd": [],
            "User": "1000:1000",
            "Labels": {LABEL: "1"},
            "HostConfig": {
                "Binds": [f"{name}:/aenv/link", f"{program}:/aenv/agent/aenv-agent:ro"],
                "NetworkMode": "none",
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "PidsLimit": 200,
                "Memory": 64 * 1024 * 1024,
                "MemorySwap": 64 * 1024 * 1024,
                "Tmpfs": {"/tmp": "rw,mode=1777"},
                **host,
            },
        }
        made = await daemon.ask("POST", "/containers/create", query={"name": name}, body=body)
        await daemon.ask("POST", f"/containers/{made['Id']}/start")
        # The path of a socket is short, and a volume's is not.
        short = Path("/tmp", name[-12:])
        short.symlink_to(link)
        try:
            await until(lambda: answers(short / "second.sock"), "the agent")
            yield daemon, made["Id"], Second(str(short / "second.sock"))
        finally:
            short.unlink()
    finally:
        for what in (f"/containers/{name}", f"/volumes/{name}", f"/images/{name}"):
            with suppress(NotFound):
                await daemon.ask("DELETE", what, query={"force": "1"})


async def test_an_image_with_nothing_but_a_shell(daemon: str, busybox: bytes, program: Path) -> None:
    async with second(daemon, busybox, program) as (_, _, found):
        result = await found.exec("id -u; cat /proc/1/comm; echo err >&2; cat; exit 3", input="in")
        assert (result.stdout, result.stderr, result.returncode) == ("1000\naenv-agent\nin", "err\n", 3)
        await found.write("/tmp/a/b", b"data", mode=0o700)
        assert await found.read("/tmp/a/b") == b"data"
        with pytest.raises(AEnvError, match="Read-only file system"):
            await found.write("/etc/x", b"data")
        assert (await found.exec("sleep 1000", timeout=0.5)).timed_out
        async with found.shell("tty; stty size", rows=30, columns=90) as shell:
            printed = b"".join([piece async for piece in shell])
        assert printed == b"/dev/pts/0\r\n30 90\r\n"
        results = await asyncio.gather(*(found.exec(f"echo {number}", timeout=120) for number in range(50)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(50)]


async def test_an_image_with_another_c_library_and_no_shell(daemon: str, musl: bytes, program: Path) -> None:
    async with second(daemon, musl, program) as (_, _, found):
        result = await found.exec(["/bin/hello", "x"], input="typed")
        assert (result.stdout, result.returncode) == ("2 1000 typed", 7)
        with pytest.raises(NotFound) as caught:
            await found.exec("true")
        assert "no shell" in str(caught.value.hint)


async def test_a_command_can_do_nothing_to_the_agent(daemon: str, busybox: bytes, program: Path) -> None:
    hostile = (
        "kill -TERM 1; kill -KILL 1; kill -STOP 1",
        "cat /proc/1/mem /proc/1/environ > /dev/null; ls /proc/1/fd",
        "kill -9 -1",
        "echo x > /aenv/agent/aenv-agent",
    )
    async with second(daemon, busybox, program) as (_, _, found):
        for line in hostile:
            await found.exec(line, timeout=30)
            assert (await found.exec("echo well")).stdout == "well\n"
        status = (await found.exec("cat /proc/self/status")).stdout
        assert "NoNewPrivs:\t1" in status
        assert "CapEff:\t0000000000000000" in status


async def test_processes_without_number_end_with_their_command(daemon: str, busybox: bytes, program: Path) -> None:
    async with second(daemon, busybox, program) as (_, _, found):
        result = await found.exec("f() { f & f & wait; }; f & while :; do :; done", timeout=1)
        assert result.timed_out
        shown = await _patiently(found, "ls -d /proc/[0-9]*")
        assert len(shown.split()) < 10


async def _patiently(found: Second, line: str) -> str:
    """What a command prints, as soon as there is room for one."""
    for _ in range(200):
        try:
            result = await found.exec(line)
        except AEnvError as exc:
            if "temporarily unavailable" not in str(exc):
                raise
        else:
            if result.returncode == 0:
                return result.stdout
        await asyncio.sleep(0.05)
    raise AssertionError("there was never room for a command")


async def test_memory_that_is_used_up_ends_the_command_alone(daemon: str, busybox: bytes, program: Path) -> None:
    async with second(daemon, busybox, program) as (_, _, found):
        result = await found.exec("x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done", timeout=60)
        assert result.returncode != 0
        assert (await found.exec("echo well")).stdout == "well\n"


async def test_it_ends_when_it_is_asked_to(daemon: str, busybox: bytes, program: Path) -> None:
    async with second(daemon, busybox, program) as (api, id, found):
        task = asyncio.create_task(found.exec("sleep 1000"))
        while "sleep" not in (await found.exec("ps")).stdout:
            assert not task.done()
        await api.ask("POST", f"/containers/{id}/kill", query={"signal": "SIGTERM"})
        with pytest.raises(SandboxLost):
            await task
        state = (await api.ask("POST", f"/containers/{id}/wait"))["StatusCode"]
        assert state == 0
        with pytest.raises(SandboxLost):
            await found.exec("true")


async def test_it_is_killed(daemon: str, busybox: bytes, program: Path) -> None:
    async with second(daemon, busybox, program) as (api, id, found):
        task = asyncio.create_task(found.exec("echo x; sleep 1000"))
        while "sleep" not in (await found.exec("ps")).stdout:
            assert not task.done()
        await api.ask("POST", f"/containers/{id}/kill", query={"signal": int(signal.SIGKILL)})
        with pytest.raises(SandboxLost):
            await task
