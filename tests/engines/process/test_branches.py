"""Forks of live instances: what they have of their parent, what is their own, what cannot be carried, and every end."""

from __future__ import annotations

import asyncio
import os
import weakref
from contextlib import suppress
from pathlib import Path

import pytest

from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError, Forbidden, NetworkError, NotFound, SandboxLost, StartFailed, Unsupported
from tests.engines.process.lab import call, eventually, noticed, spec, works

BODY = """
import asyncio
import ctypes
import mmap
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from aenv import register_reward, register_teardown, register_tool

state = {"total": 0}
kept = []


@register_tool
def add(number: int) -> int:
    state["total"] += number
    return state["total"]


@register_tool
def write(path: str, text: str) -> str:
    with open(path, "a") as file:
        file.write(text)
    return Path(path).read_text()


@register_tool
def read(path: str) -> str:
    return Path(path).read_text() if os.path.exists(path) else ""


@register_tool
def remove(path: str) -> str:
    os.remove(path)
    return ""


@register_tool
def append(text: str) -> str:
    if not kept:
        kept.append(open("/tmp/open", "a+"))
    kept[0].write(text)
    kept[0].flush()
    kept[0].seek(0)
    return kept[0].read()


@register_tool
def draw() -> float:
    return random.random()


@register_tool
def me() -> dict:
    facts = dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\\t" in line)
    stage = os.access("/stage", os.X_OK)
    return {"user": os.getuid(), "pid": os.getpid(), "capabilities": facts["CapEff"], "stage": stage}


@register_tool
def others() -> list[str]:
    return sorted(name for name in os.listdir("/proc") if name.isdigit())


@register_tool
def hold(what: str) -> str:
    if what == "process":
        kept.append(subprocess.Popen(["sleep", "1000"]))
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="clock").start()
    elif what == "connection":
        kept.append(socket.create_server(("127.0.0.1", 0)))
    elif what == "pipe":
        kept.append(os.pipe())
    elif what == "memory":
        kept.append(mmap.mmap(-1, 1 << 20))
    elif what == "mapping":
        Path("/tmp/mapped").write_bytes(bytes(4096))
        kept.append(mmap.mmap(os.open("/tmp/mapped", os.O_RDWR), 4096, access=mmap.ACCESS_READ))
    elif what == "directory":
        os.mkdir("/tmp/gone")
        os.chdir("/tmp/gone")
        os.rmdir("/tmp/gone")
    elif what in ("database", "new database"):
        import sqlite3

        kept.append(sqlite3.connect("/tmp/kept.db"))
        if what == "database":
            kept[-1].execute("create table things (name text)")
            kept[-1].commit()
    elif what == "nameless":
        kept.append(open("/tmp/nameless", "w"))
        os.remove("/tmp/nameless")
    return what


@register_tool
async def begin() -> str:
    kept.append(asyncio.create_task(asyncio.sleep(1000), name="ticker"))
    return "begun"


@register_tool
async def wait() -> str:
    Path("waiting").write_text("it waits")
    await asyncio.sleep(1000)
    return ""


@register_tool
def escape() -> list[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    tried = []
    for flag in (1 << 28, 1 << 17, 1 << 29, 1 << 25):
        tried.append(0 if libc.unshare(flag) == 0 else ctypes.get_errno())
    tried.append(0 if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0 else ctypes.get_errno())
    return tried


@register_tool
def secret() -> str:
    return ssl.RAND_bytes(8).hex()


@register_tool
def both() -> int:
    # The same number in memory and in a file, as one step of an author's.
    state["total"] += 1
    Path("/tmp/both").write_text(str(state["total"]))
    return state["total"]


@register_tool
def look_at_both() -> list[int]:
    return [state["total"], int(Path("/tmp/both").read_text())]


@register_tool
def nap(seconds: float) -> str:
    Path("napping").write_text("it naps")
    time.sleep(seconds)
    return ""


@register_tool
def grow(path: str, size: int) -> str:
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"middle")
    return ""


@register_tool
def middle(path: str) -> list:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        return [size, file.read(6).decode(), os.stat(path).st_blocks < 1000]


@register_tool
def fill() -> int:
    written = 0
    with open("/tmp/full", "wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(1 << 16))
        except OSError:
            return written


@register_tool
def signal_first() -> int:
    try:
        os.kill(1, 0)
    except OSError as exc:
        return exc.errno
    return 0


@register_tool
def try_on_and_on() -> str:
    # A process of its own that takes a user namespace as soon as it may.
    program = "import ctypes, os; l = ctypes.CDLL(None)\\nwhile l.unshare(1 << 28): pass\\nopen('/tmp/escaped', 'w')"
    kept.append(subprocess.Popen([sys.executable, "-c", program]))
    return ""


@register_tool
def lie(message: str) -> str:
    data = message.encode()
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
            if sock.family == socket.AF_UNIX and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.send(struct.pack("I", len(data)) + data)
        except OSError:
            pass
    return ""


@register_tool
def leave() -> str:
    os._exit(3)


@register_reward
def total() -> float:
    return float(state["total"])
"""

pytestmark = pytest.mark.asyncio


@pytest.fixture
async def parent(jail: ProcessEngine, study):
    """A live instance of a forkable project."""
    sandbox = await jail.create("parent", _spec(study))
    await call(sandbox, "add", number=5)
    return sandbox


_roots = weakref.WeakKeyDictionary()


def _spec(study, **fields):
    if study not in _roots:
        _roots[study] = study.write(BODY, forkable=True)
    return spec(_roots[study], **fields)


async def fork(engine, study, id, of="parent", **fields):
    return await engine.create(id, _spec(study, forked_from=of, **fields))


@pytest.fixture
def isolation(jailed):
    return jailed


async def test_a_fork_begins_where_its_parent_is_and_goes_a_way_of_its_own(jail, study, parent):
    for path in ("notes.txt", "/tmp/notes.txt", "/home/sandbox/notes.txt"):
        await call(parent, "write", path=path, text="before ")
    await call(parent, "remove", path="config.json")
    child = await fork(jail, study, "child")
    assert [await call(one, "add", number=n) for one, n in ((child, 1), (parent, 10), (child, 1))] == [6, 15, 7]
    for path in ("notes.txt", "/tmp/notes.txt", "/home/sandbox/notes.txt"):
        assert await call(child, "write", path=path, text="child") == "before child"
        assert await call(parent, "write", path=path, text="parent") == "before parent"
    assert await call(child, "read", path="config.json") == ""
    assert child.boot != parent.boot


async def test_a_file_that_is_open_is_the_forks_own(jail, study, parent):
    assert await call(parent, "append", text="one ") == "one "
    child = await fork(jail, study, "child")
    assert await call(child, "append", text="child") == "one child"
    assert await call(parent, "append", text="parent") == "one parent"


async def test_generators_go_on_where_they_were(jail, study, parent):
    await call(parent, "draw")
    child = await fork(jail, study, "child")
    assert await call(child, "draw") == await call(parent, "draw")


async def test_what_is_to_be_secret_differs(jail, study, parent):
    await call(parent, "secret")
    children = await asyncio.gather(*(fork(jail, study, f"child{n}") for n in range(2)))
    assert len({await call(one, "secret") for one in (parent, *children)}) == 3


HELD = """
@register_tool
def hold_forks() -> str:
    kept.append("forks")
    return ""


def stand_still() -> None:
    if kept:
        Path(DATA, "here").read_bytes()


os.register_at_fork(before=stand_still)
"""


@pytest.mark.parametrize("preload", [True, False])
async def test_files_and_memory_are_of_the_same_moment(jail, study, preload):
    door, root = study.door("here"), study.write(BODY + HELD, forkable=True)
    given = {"datasource": str(study.data), "preload": preload}
    parent = await jail.create("parent", spec(root, **given))
    await call(parent, "both")
    await call(parent, "hold_forks")
    stop = asyncio.Event()

    async def change():
        while not stop.is_set():
            await call(parent, "both")

    for number in range(3):
        made = asyncio.create_task(jail.create(f"child{number}", spec(root, forked_from="parent", **given)))
        # Where one stands at the door, no call is under way, and those that come now wait for the end of the fork.
        await door.reached()
        stop.clear()
        changing = [asyncio.create_task(change()) for _ in range(4)]
        door.open()
        child = await made
        stop.set()
        await asyncio.gather(*changing)
        memory, file = await call(child, "look_at_both")
        assert memory == file
        assert await call(parent, "both") > memory


async def test_a_file_with_holes_is_copied_with_them(jail, study, parent):
    await call(parent, "grow", path="/tmp/holes", size=20 * 1024**3)
    child = await fork(jail, study, "child")
    assert await call(child, "middle", path="/tmp/holes") == [20 * 1024**3, "middle", True]


async def test_a_full_disk_is_forked_as_it_is(jail, study, leftovers):
    small = {"memory": "256Mi", "ephemeralStorage": "16Mi"}
    parent = await jail.create("parent", _spec(study, resources=small))
    assert await call(parent, "fill") > 10 * 1024**2
    child = await fork(jail, study, "child", resources=small)
    assert await call(child, "add", number=1) == 1
    assert await call(parent, "add", number=2) == 2
    await call(parent, "remove", path="/tmp/full")
    assert await call(await fork(jail, study, "after", resources=small), "add", number=1) == 3


async def test_a_parent_that_is_deleted_while_it_is_forked_takes_its_forks_along_or_leaves_them(jail, study):
    for number in range(4):
        parent = await jail.create(f"p{number}", _spec(study))
        await call(parent, "add", number=5)
        forks = [asyncio.create_task(fork(jail, study, f"f{number}-{n}", of=f"p{number}")) for n in range(3)]
        await asyncio.wait(forks, timeout=number * 0.005)
        await jail.delete(f"p{number}")
        for made in await asyncio.gather(*forks, return_exceptions=True):
            if isinstance(made, BaseException):
                assert isinstance(made, SandboxLost | StartFailed | NotFound | Unsupported), made
            else:
                assert await call(made, "add", number=1) == 6
    assert await call(await jail.create("other", _spec(study)), "add", number=1) == 1


async def test_a_call_that_was_given_up_keeps_forks_away_only_while_it_runs(jail, study, parent):
    napping = asyncio.create_task(call(parent, "nap", seconds=1.0))
    await eventually("the nap", lambda: _there(parent, "napping"))
    napping.cancel()
    await asyncio.gather(napping, return_exceptions=True)
    with pytest.raises(Unsupported):
        await fork(jail, study, "early")

    numbers = iter(range(1000))

    async def forked():
        try:
            return await fork(jail, study, f"late{next(numbers)}")
        except Unsupported:
            return None

    assert await call(await eventually("a fork", forked), "add", number=1) == 6


async def test_many_at_once_have_users_and_processes_of_their_own_and_no_powers(jail, study, parent):
    children = await asyncio.gather(*(fork(jail, study, f"child{n}") for n in range(8)))
    found = [await call(one, "me") for one in (parent, *children)]
    assert len({one["user"] for one in found}) == 9
    assert {(one["pid"], one["capabilities"], one["stage"]) for one in found} == {
        (2, "0" * 16, False),
        (3, "0" * 16, False),
    }
    assert [await call(one, "others") for one in children] == [["1", "3"]] * 8
    assert [await call(one, "add", number=n) for n, one in enumerate(children)] == [5 + n for n in range(8)]


async def test_a_fork_of_a_fork_outlives_both(jail, study, parent):
    await fork(jail, study, "child")
    grandchild = await fork(jail, study, "grandchild", of="child")
    await jail.delete("child")
    await jail.delete("parent")
    assert await call(grandchild, "add", number=1) == 6
    assert [one.id for one in await jail.find()] == ["grandchild"]


async def test_a_parent_that_is_killed_leaves_its_forks(jail, study, parent, family):
    child = await fork(jail, study, "child")
    with pytest.raises(NetworkError):
        await call(parent, "leave")
    await eventually("its end to be noticed", lambda: _over(jail, "parent"))
    assert await call(child, "add", number=1) == 6


async def _over(engine, id):
    return (await engine.get(id)).state.over


async def test_a_fork_that_is_killed_leaves_its_parent(jail, study, parent):
    child = await fork(jail, study, "child")
    with pytest.raises(NetworkError):
        await call(child, "leave")
    await eventually("its end to be noticed", lambda: _over(jail, "child"))
    assert await call(parent, "add", number=1) == 6
    assert await call(await fork(jail, study, "other"), "add", number=1) == 7


async def test_forks_end_with_their_time(jail, study, parent):
    await fork(jail, study, "child", ttl=1.0)
    await eventually("it to end", lambda: _over(jail, "child"))
    assert "time to live" in (await jail.get("child")).reason


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("process", "a process of its runs: sleep"),
        ("thread", "a thread runs: clock"),
        ("connection", "a connection open"),
        ("pipe", "a pipe open"),
        ("memory", "memory is shared with others"),
        ("mapping", "memory is shared with others: /tmp/mapped"),
        ("directory", "its working directory is gone"),
        ("nameless", "no name any more"),
        ("database", "a database of SQLite's open"),
        ("new database", "a database of SQLite's open"),
    ],
)
async def test_what_cannot_be_carried_is_said_and_the_parent_goes_on(jail, study, parent, what, words):
    await call(parent, "hold", what=what)
    with pytest.raises(Unsupported, match=words):
        await fork(jail, study, "child")
    assert await call(parent, "add", number=1) == 6
    assert [one.id for one in await jail.find() if not one.state.over] == ["parent"]


async def test_a_task_of_the_authors_and_a_call_under_way_are_not_carried(jail, study, parent):
    await call(parent, "begin")
    with pytest.raises(Unsupported, match="ticker"):
        await fork(jail, study, "child")
    waiting = asyncio.create_task(call(parent, "wait"))
    await eventually("the call", lambda: _there(parent, "waiting"))
    with pytest.raises(Unsupported, match="calls under way: 1"):
        await fork(jail, study, "other")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def _there(sandbox, path):
    return await call(sandbox, "read", path=path) != ""


async def test_nobody_takes_a_namespace_unasked(jail, study, parent):
    refused = [1, 1, 1, 1, 1]  # EPERM
    assert await call(parent, "escape") == refused
    child = await fork(jail, study, "child")
    assert [await call(one, "escape") for one in (parent, child)] == [refused, refused]
    assert await call(await fork(jail, study, "grandchild", of="child"), "escape") == refused


async def test_a_sibling_that_tries_on_and_on_does_not_get_its_relatives_namespace(jail, study, parent):
    sibling = await fork(jail, study, "sibling")
    await call(sibling, "try_on_and_on")
    for number in range(5):
        child = await fork(jail, study, f"child{number}")
        assert await call(child, "add", number=0) == 5
    assert await call(sibling, "read", path="/tmp/escaped") == ""


async def test_the_first_process_of_a_forks_namespace_is_out_of_its_reach(jail, study, parent):
    child = await fork(jail, study, "child")
    assert await call(child, "signal_first") == 1  # EPERM
    assert await call(await fork(jail, study, "grandchild", of="child"), "signal_first") == 1


async def test_who_speaks_of_forks_that_nobody_asked_for_is_ended(jail, study, parent):
    other = await jail.create("other", study.spec(BODY))
    with suppress(AEnvError):
        await call(parent, "lie", message='{"refused": 1, "why": "no"}')
    await eventually("its end", lambda: _over(jail, "parent"))
    assert "only hostile code" in (await jail.get("parent")).reason
    assert await call(other, "add", number=1) == 1


async def test_who_may_not_be_forked(jail, study, parent):
    await jail.create("plain", study.spec(BODY))
    with pytest.raises(Unsupported, match="does not say that it is forkable"):
        await jail.create("a", study.spec(BODY, forked_from="plain"))
    with pytest.raises(Forbidden, match="the same owner"):
        await fork(jail, study, "b", owner="somebody")
    with pytest.raises(NotFound):
        await fork(jail, study, "c", of="nobody")
    await jail.delete("parent")
    with pytest.raises((NotFound, SandboxLost)):
        await fork(jail, study, "d")


async def test_a_creation_that_is_given_up_leaves_nothing(jail, study, parent):
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        task = asyncio.create_task(fork(jail, study, f"child{delay}"))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait((task,))
        assert await call(parent, "add", number=0) == 5
    child = await fork(jail, study, "child")
    assert await call(child, "add", number=1) == 6


async def test_generations_have_an_end_that_is_told(jail, study, parent):
    made = ["parent"]
    for number in range(20):
        await fork(jail, study, f"g{number}", of=made[-1])
        made.append(f"g{number}")

    async def go_on() -> None:
        while len(made) < 40:
            await fork(jail, study, f"h{len(made)}", of=made[-1])
            made.append(f"h{len(made)}")

    with pytest.raises(Unsupported, match="generations"):
        await go_on()
    assert await call(await jail.get(made[-1]), "add", number=1) == 6


@pytest.mark.parametrize("role", ["zygote", "spawner"])
async def test_forks_end_with_what_made_them(jail, study, parent, family, role):
    child = await fork(jail, study, "child")
    namespace = (await jail.exec("child", ["readlink", "/proc/self/ns/pid"])).stdout.strip()
    assert _in(namespace)
    family.get(role).kill()
    await eventually("all in it to be gone", lambda: not _in(namespace))
    with pytest.raises(NetworkError):
        await call(child, "add", number=1)
    if role == "spawner":
        await noticed(jail)
    await works(jail)  # and what a dead spawner left is swept


def _in(namespace: str) -> list[str]:
    """The processes in a process namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "ns" / "pid") == namespace:
                found.append(process.name)
    return found


async def test_strict_isolation_forks_nothing(study, leftovers, jailed):
    async with ProcessEngine(isolation="strict") as engine:
        await engine.create("parent", _spec(study))
        with pytest.raises(Unsupported, match="strict isolation"):
            await fork(engine, study, "child")


async def test_a_forks_memory_is_counted_apart(jail, study, parent):
    await fork(jail, study, "child")
    used = [await jail.used(id) for id in ("parent", "child")]
    assert all(one.memory > 0 for one in used)
