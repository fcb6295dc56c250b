"""Forks of live instances that are given up, refused for odd reasons, or too late; and what libraries take them for."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time

import pytest

from aenv.engines.process import branch
from aenv.engines.process.branch import Branching
from aenv.engines.process.wire import receive_some
from aenv.errors import Unsupported
from tests.engines.process.lab import call, eventually, spec

BODY = """
import asyncio
import ctypes
import mmap
import shutil
import ssl
import threading
from pathlib import Path

kept = []


def stand_still() -> None:
    if kept:
        wait("here")


os.register_at_fork(before=stand_still)


@register_tool
def hold_forks() -> str:
    kept.append("forks")
    return ""


@register_tool
def number() -> int:
    return os.getpid()


@register_tool
def secret() -> str:
    return ssl.RAND_bytes(8).hex()


def own_library():
    # Another OpenSSL than Python's, as packages bring it along.
    if "library" not in globals():
        rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        shutil.copyfile(next(row[5] for row in rows if len(row) > 5 and "libcrypto" in row[5]), "/tmp/own.so")
        globals()["library"] = ctypes.CDLL("/tmp/own.so")
    return globals()["library"]


@register_tool
def secret_of_a_library() -> str:
    data = ctypes.create_string_buffer(8)
    assert own_library().RAND_bytes(data, 8) == 1
    return data.raw.hex()


@register_tool
def map_file() -> str:
    file = os.open(b"/tmp/\\xff\\r\\n", os.O_RDWR | os.O_CREAT)
    os.truncate(file, 4096)
    globals()["mapped"] = mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE)
    os.close(file)
    return ""


@register_tool
def share_file() -> str:
    file = os.open(b"/tmp/\\xff", os.O_RDWR | os.O_CREAT)
    os.truncate(file, 4096)
    globals()["shared"] = mmap.mmap(file, 4096)
    os.close(file)
    return ""


@register_tool
def unshare_file() -> str:
    globals().pop("shared").close()
    return ""


@register_tool
def fail_to_look() -> str:
    look = threading.enumerate

    def fail():
        threading.enumerate = look
        raise ValueError("no \\udcff threads today")

    threading.enumerate = fail
    return ""
"""

pytestmark = pytest.mark.asyncio


@pytest.fixture
def isolation(jailed):
    return jailed


@pytest.fixture
def given(study):
    """A spec of a forkable project, whose forks can be held at a door."""
    return study.write(BODY, forkable=True), {"datasource": str(study.data)}


@pytest.fixture
async def parent(jail, given):
    return await jail.create("parent", spec(given[0], **given[1]))


@pytest.fixture
def fork(jail, given, parent):
    async def made(id, of="parent"):
        return await jail.create(id, spec(given[0], forked_from=of, **given[1]))

    return made


# What libraries take it for


async def test_no_fork_has_the_number_of_one_that_it_comes_from(fork, parent):
    child, other = await fork("child"), await fork("other")
    grandchild = await fork("grandchild", of="child")
    assert [await call(one, "number") for one in (parent, child, other, grandchild)] == [2, 3, 3, 4]


@pytest.mark.parametrize("tool", ["secret", "secret_of_a_library"])
async def test_a_library_notices_that_it_is_in_a_fork(fork, parent, tool):
    await call(parent, tool)
    family = [parent, *await asyncio.gather(*(fork(f"child{n}") for n in range(2)))]
    family += [await fork(f"grandchild{n}", of="child0") for n in range(2)]
    drawn = [await call(one, tool) for one in family]
    # And what was forked after it has drawn, too.
    family = [family[1], *[await fork(f"late{n}", of="child0") for n in range(2)]]
    drawn += [await call(one, tool) for one in family]
    assert len(set(drawn)) == len(drawn)


# Given up


async def test_a_fork_that_is_given_up_leaves_others_what_is_theirs(jail, study, fork, parent):
    door = study.door("here")
    await call(parent, "hold_forks")
    for number in range(3):
        given_up = [asyncio.create_task(fork(f"a{number}-{n}")) for n in range(2)]
        await door.reached()  # the parent is about to fork for one of them
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)  # and goes on standing there
        others = [asyncio.create_task(fork(f"b{number}-{n}")) for n in range(2)]
        for n in range(2):
            await eventually("its order to be sent", functools.partial(_is_forked, jail, f"b{number}-{n}"))
        while not all(other.done() for other in others):
            door.open()
            await asyncio.wait(others, timeout=0.01)
            door._knock()
        assert [await call(await one, "number") for one in others] == [3, 3]


async def _is_forked(jail, id):
    return any(one.id == id and "fork" in one.phases for one in await jail.find())


# Refused


async def test_a_mapping_whose_name_is_no_text_is_carried(fork, parent):
    await call(parent, "map_file")
    assert await call(await fork("child"), "number") == 3


async def test_a_reason_that_is_no_text_is_told(fork, parent):
    await call(parent, "share_file")
    with pytest.raises(Unsupported, match=r"memory is shared with others: /tmp/\\udcff"):
        await fork("early")
    await call(parent, "unshare_file")
    assert await call(await fork("late"), "number") == 3


async def test_whatever_fails_is_told_and_the_next_fork_is_made(fork, parent):
    await call(parent, "fail_to_look")
    with pytest.raises(Unsupported, match="no .* threads today"):
        await fork("early")
    assert await call(await fork("late"), "number") == 3


# Too late


class _OneFork:
    """Forks once, as a machine does that has no more processes then."""

    def __init__(self) -> None:
        self.made = 0

    def fork(self) -> int:
        self.made += 1
        if self.made > 1:
            raise BlockingIOError("no more processes")
        return os.fork()


@pytest.fixture
def branching():
    ends = socket.socketpair()
    yield Branching(None, *ends, _OneFork())  # type: ignore[arg-type]
    for end in ends:
        end.close()


async def test_a_parent_waits_for_the_forks_that_were_made_beside_one_that_was_not(branching, monkeypatch):
    held, end = os.pipe()
    release = os.fdopen(end, "wb")
    said, say = os.pipe()
    wait = branch._wait

    def copy(descriptors, act):
        release.close()
        os.read(held, 1)
        os.write(say, b"copied")
        os._exit(0)

    def released(staging, until):
        release.close()
        wait(staging, until)

    monkeypatch.setattr(branch, "_never_back", copy)
    monkeypatch.setattr(branch, "_wait", released)
    made: list[int] = []
    order = {"until": time.monotonic() + 60}
    with pytest.raises(BlockingIOError):
        branching.fork([(order, []), (order, [])], [], made)
    os.set_blocking(said, False)
    try:
        assert os.read(said, 100) == b"copied"
    finally:
        release.close()
        os.waitpid(made[0], 0)
        for descriptor in (held, said, say):
            os.close(descriptor)


async def test_a_fork_that_nobody_waits_for_any_more_is_none(branching):
    mine, report = socket.socketpair()
    mine.shutdown(socket.SHUT_WR)  # nobody gives it users
    listener, log = os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDWR)
    made: list[int] = []
    branching.fork([({"until": time.monotonic() - 1}, [listener, report.detach(), log])], [], made)
    os.waitpid(made[0], 0)
    with mine:
        assert b"it took too long" in receive_some(mine)[0]
