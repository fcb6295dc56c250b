"""Shells in a sandbox: with a terminal and without, how they end, and what ends with them."""

import asyncio
import os
import secrets
from contextlib import AsyncExitStack

import pytest

from aenv import http
from aenv.client.shell import Window, shell
from aenv.engines.conformance.bench import running_here
from aenv.errors import RateLimited, SandboxLost
from aenv.runtime import frames, shells
from tests.support import FIXTURES, sandbox

PATIENCE = 30.0


@pytest.fixture(scope="module")
def url():
    with sandbox(FIXTURES / "lab") as running:
        yield running.url


async def until(opened, text, seen=b""):
    """What was printed, once ``text`` is in it."""
    async with asyncio.timeout(PATIENCE):
        async for printed in opened:
            seen += printed.data
            if text in seen:
                return seen
    raise AssertionError(seen)


async def everything(opened):
    """All that is printed, by stream."""
    streams = {False: b"", True: b""}
    async with asyncio.timeout(PATIENCE):
        async for printed in opened:
            streams[printed.is_error] += printed.data
    return streams[False], streams[True]


async def gone(marker):
    async with asyncio.timeout(PATIENCE):
        while running_here(marker):
            await asyncio.sleep(0.02)


# Without a terminal


async def test_what_is_typed_is_run_to_the_end_of_it(url):
    async with shell(url, None) as opened:
        await opened.type(b"echo out; echo err >&2; tty; pwd\n")
        await opened.type(b"exit 7\n")
        out, err = await everything(opened)
    assert out.splitlines()[:2] == [b"out", b"not a tty"]
    assert (err, opened.code) == (b"err\n", 7)


async def test_the_end_of_the_input_ends_it(url):
    big = os.urandom(300_000).hex().encode()
    async with shell(url, None, ["sh", "-c", "wc -c"]) as opened:
        await opened.type(big)
        await opened.end_input()
        out, _ = await everything(opened)
    assert (int(out), opened.code) == (len(big), 0)


async def test_much_output_to_a_slow_user(url):
    async with shell(url, None, ["head -c 5000000 /dev/zero; echo done >&2"]) as opened:
        await asyncio.sleep(0.2)
        out, err = await everything(opened)
    assert (len(out), err, opened.code) == (5_000_000, b"done\n", 0)


async def test_what_is_left_in_the_background_does_not_keep_it(url):
    marker = f"9{secrets.randbelow(10**9)}"
    async with shell(url, None, [f"sleep {marker} & echo started"]) as opened:
        out, _ = await everything(opened)
    assert (out, opened.code) == (b"started\n", 0)
    await gone(f"sleep\0{marker}")


@pytest.mark.parametrize("window", [None, Window(24, 80)], ids=["pipes", "terminal"])
async def test_a_program_that_is_not_there(url, window):
    async with shell(url, None, ["no-such-program", "x"], window) as opened:
        streams = await everything(opened)
    assert b"".join(streams).strip() == b"no-such-program: No such file or directory"
    assert opened.code == 127


async def test_a_signal_is_its_end(url):
    async with shell(url, None, ["kill -9 $$"]) as opened:
        await everything(opened)
    assert opened.code == -9


# With one


async def test_a_terminal_of_the_users_size_and_kind(url):
    async with shell(url, None, (), Window(33, 101, "screen")) as opened:
        await opened.type(b"stty size; echo $TERM; tty; echo en''d\n")
        seen = await until(opened, b"\nend")
        assert b"33 101\r\n" in seen
        assert b"screen\r\n" in seen
        assert b"\n/dev/pts/" in seen
        await opened.resize(44, 55)
        await opened.type(b"stty size; echo en''d\n")
        assert b"44 55\r\n" in await until(opened, b"\nend")
        await opened.type(b"exit 3\n")
        await everything(opened)
    assert opened.code == 3


async def test_keys_reach_what_runs_in_it(url):
    """Ctrl-C interrupts, and Ctrl-D ends what is typed; a shell has job control."""
    line = "trap 'echo caught; exit 3' INT; echo rea''dy; while :; do sleep 0.1; done"
    async with shell(url, None, [line], Window(24, 80)) as opened:
        await until(opened, b"ready")
        await opened.type(b"\x03")
        out, _ = await everything(opened)
    assert b"caught" in out
    assert opened.code == 3
    async with shell(url, None, (), Window(24, 80)) as opened:
        await opened.type(b"case $- in *m*) echo job con''trol;; esac; cat; exit 5\n")
        await until(opened, b"job control")
        await opened.type(b"typed\n\x04")
        out, _ = await everything(opened)
    assert out.count(b"typed") >= 2
    assert opened.code == 5


async def test_it_ends_with_its_connection_and_all_that_it_started(url):
    marker = f"9{secrets.randbelow(10**9)}"
    stubborn = f"trap '' HUP TERM; sleep {marker} & sleep {marker}"
    async with shell(url, None, [stubborn], Window(24, 80)):
        async with asyncio.timeout(PATIENCE):
            while not running_here(f"sleep\0{marker}"):
                await asyncio.sleep(0.02)
    await gone(f"sleep\0{marker}")


# What is refused


async def opened(url, stack):
    """One more shell, as soon as there is room for it: those of an earlier test may not be gone yet."""
    while True:
        try:
            return await stack.enter_async_context(shell(url, None, ["cat"]))
        except RateLimited:
            await asyncio.sleep(0.05)


async def test_no_more_than_so_many(url):
    async with asyncio.timeout(PATIENCE):
        async with AsyncExitStack() as stack:
            for _ in range(shells.MOST_SHELLS):
                await opened(url, stack)
            with pytest.raises(RateLimited, match="8 shells are open"):
                async with shell(url, None):
                    pass
        async with AsyncExitStack() as stack:
            await opened(url, stack)


async def test_without_an_upgrade_there_is_none(url):
    answer = await http.request("POST", url, "/shell", retries=0)
    assert answer.status == 426
    assert b"a shell is reached by an upgrade" in answer.body


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frames.frames(frames.START, b"nonsense"), "what to run cannot be read"),
        (frames.frames(frames.START, b'{"rows": -1}'), "what to run cannot be read"),
        (frames.frames(frames.INPUT, b"ls\n"), "before there is a shell"),
        (b"s\xff\xff\xff\xff", "is too long"),
        (frames.frames(frames.START, b'{"command": ["cat"]}') + frames.frames(b"?"), "nothing is called"),
        (frames.frames(frames.START, b'{"command": ["cat"]}') + frames.frames(frames.SIZE, b"1"), "four bytes"),
        (frames.frames(frames.START, b'{"command": ["a\\u0000b", "c"]}'), "cannot be run"),
    ],
)
async def test_nonsense_is_told_and_ends_it(url, sent, why):
    async with asyncio.timeout(PATIENCE), http.upgrade(url, "/shell", frames.PROTOCOL) as connection:
        await connection.send(sent)
        seen = b"".join([piece async for piece in connection])
    found = dict(frames.Frames().feed(seen))
    assert why in found[frames.FAILED].decode()


async def test_a_sandbox_that_is_gone():
    with sandbox(FIXTURES / "lab") as running:
        async with shell(running.url, None, ["cat"]) as opened:
            await opened.type(b"x\n")
            await until(opened, b"x")
            running.process.kill()
            with pytest.raises(SandboxLost, match="the connection to the shell ended"):
                await everything(opened)
