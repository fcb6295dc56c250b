"""Whether a live sandbox can be forked at this moment, and what its fork must open again.

A fork has the memory of its parent, one thread, and none of what belongs to the parent alone: its connections, its
processes, memory that it shares with others. Where the author's code has any of that, it is said, and there is no fork.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aenv.errors import AEnvError, Unsupported
from aenv.runtime import files, functions
from aenv.runtime.app import App
from aenv.runtime.threads import NAME
from aenv.runtime.warm import Driver

if TYPE_CHECKING:
    from aenv.runtime.server import Server

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_SQLITE = b"SQLite format 3\0"
_LINGERING = 1.0
"""Seconds in which the runtime's threads must end, which have nothing to do."""


class Carried(NamedTuple):
    """An open file, which a fork opens again under the same number."""

    descriptor: int
    path: str
    flags: int
    position: int


def known() -> dict[int, str]:
    """The descriptors of this process, and what each of them is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one of the directory itself
            continue
    return found


Order = tuple[dict[str, Any], list[int]]
"""A fork that is asked for, and the descriptors for it."""


class Means(Protocol):
    """How an engine has a sandbox forked."""

    def asked(self) -> tuple[list[dict[str, Any]], list[int]] | None:
        """What is said, of which at most one asks for a fork, with the descriptors for that; None when nobody will say
        anything any more."""

    def fork(self, orders: Sequence[Order], carried: list[Carried], made: list[int]) -> None:
        """Fork this process for each of these. Back when the forks have all that is of this moment; ``made`` are then
        children that make them, and end. What a fork goes on with never returns here."""

    def refuse(self, order: dict[str, Any], why: str) -> None:
        """There is no fork."""


class Forking:
    """The forks of one sandbox, made while its loop stands still."""

    def __init__(self, means: Means, driver: Driver, app: App, server: Server, own: dict[int, str]) -> None:
        """``own``: the descriptors that are the runtime's."""
        self._means = means
        self._driver = driver
        self._app = app
        self._server = server
        self._own = own
        self._orders: list[Order] = []
        self._making: asyncio.Task[None] | None = None
        self._children: dict[int, int] = {}
        """Processes that make a fork, and a handle on each."""

    def watch(self, lifeline: int, stop: asyncio.Event, heard: Callable[[], None]) -> None:
        """Do what is asked, until ``lifeline`` ends, which sets ``stop``. ``heard`` is told when somebody waits."""
        loop = asyncio.get_running_loop()

        def hear() -> None:
            asked = self._means.asked()
            if asked is None:
                loop.remove_reader(lifeline)
                stop.set()
                return
            heard()
            messages, descriptors = asked
            self._orders += [(message, descriptors) for message in messages if "number" in message]
            if self._orders and self._making is None:
                self._making = loop.create_task(self._make_all())

        loop.add_reader(lifeline, hear)

    async def _make_all(self) -> None:
        """Make what is asked for, and what is asked for meanwhile."""
        try:
            while self._orders:
                await self._make_some()
        finally:
            self._making = None

    async def _make_some(self) -> None:
        """Make what is asked for by now, or refuse it: whatever it is that fails, who asked is told."""
        made: list[int] = []
        done, why = 0, ""
        try:
            if any(order["until"] < time.monotonic() for order, _ in self._orders):
                raise Unsupported("it was busy for too long")
            self._check_calls()
            functions.rest_threads(loop := asyncio.get_running_loop())
            files.rest_threads(loop)
            await self._driver.standstill(lambda: self._make(made))
            done = len(made)
        except Exception as exc:
            done = len(self._orders)
            why = str(exc) if isinstance(exc, AEnvError | OSError) else f"the runtime failed: {exc!r}"
        over, self._orders = self._orders[:done], self._orders[done:]
        for order, _ in over[len(made) :]:
            self._means.refuse(order, why)
        for child in made:
            self._bury_later(child)
        for descriptor in (one for _, given in over for one in given):
            os.close(descriptor)

    def _bury_later(self, child: int) -> None:
        """Wait for a child's end, which others may have done."""
        loop = asyncio.get_running_loop()
        handle = self._children[child] = os.pidfd_open(child)

        def bury() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            del self._children[child]
            with suppress(ChildProcessError):
                os.waitpid(child, 0)

        loop.add_reader(handle, bury)

    def _make(self, made: list[int]) -> None:
        """While the loop stands still: all that is asked for, in the same place."""
        given = (one for _, descriptors in self._orders for one in descriptors)
        ours = (*given, *self._of_clients(), *self._children.values(), self._server.door.fileno())
        own = self._own | dict.fromkeys(ours, "")
        if reason := next(obstacles(self._children), ""):
            raise Unsupported(reason)
        self._means.fork(self._orders, list(carried(own)), made)

    def _check_calls(self) -> None:
        if self._app.wrapped is not None:
            raise Unsupported("it has an MCP server of its own")
        if self._app.calls:
            raise Unsupported(f"calls under way: {len(self._app.calls)}")
        mine = asyncio.current_task()
        for task in asyncio.all_tasks():
            code = getattr(task.get_coro(), "cr_code", None)
            if task is not mine and not getattr(code, "co_filename", "").startswith(_OURS):
                raise Unsupported(f"a task of the author's runs on its loop: {task.get_name()}")

    def _of_clients(self) -> Iterator[int]:
        for connection in self._server.connections.open:
            sock = connection.transport.get_extra_info("socket")
            if sock is not None:
                yield sock.fileno()


def obstacles(children: Collection[int] = ()) -> Iterator[str]:
    """What of this process cannot be carried along, in words. ``children`` are the runtime's own."""
    deadline = time.monotonic() + _LINGERING
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            if thread.name.startswith(NAME):  # one of ours, which was told to end
                thread.join(deadline - time.monotonic())
            if thread.is_alive():
                yield f"a thread runs: {thread.name}"
    while len(os.listdir("/proc/self/task")) > 1:  # one that has ended for Python may not have for the kernel
        if time.monotonic() > deadline:
            yield "threads run that Python does not know of"
            break
        time.sleep(0.001)
    try:
        os.getcwd()
    except OSError:
        yield "its working directory is gone"
    yield from (f"a process of its runs: {name}" for name in _processes(children))
    yield from (f"memory is shared with others: {name}" for name in _shared())


def _processes(ours: Collection[int]) -> Iterator[str]:
    """Others' processes of this namespace. Those of forks are in namespaces of their own."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (1, os.getpid(), *ours):
            continue
        try:
            status = os.fsdecode(Path("/proc", name, "status").read_bytes())
        except OSError:  # it has just ended
            continue
        rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if len(rows["NSpid"].split()) == 1 and not rows["State"].startswith("Z"):
            yield rows["Name"]


def _shared() -> Iterator[str]:
    """What is shared with other processes, or with a file that a fork has a copy of."""
    with open("/proc/self/maps", "rb") as file:  # a name need not be text
        for line in map(os.fsdecode, file):
            _, kind, _, _, _, *name = line.split(maxsplit=5)
            if kind[3] == "s" and not (name and _is_read_only(name[0].strip())):
                yield name[0].strip() if name else "a mapping without a name"


def _is_read_only(path: str) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def carried(own: dict[int, str]) -> Iterator[Carried]:
    """What is open beside ``own``; ``Unsupported`` for what is no file or directory that can be opened again."""
    for descriptor, name in known().items():
        if descriptor <= 2 or own.get(descriptor) in (name, ""):
            continue
        try:
            found = os.fstat(descriptor)
        except OSError:  # the one that listed them
            continue
        kind = stat.S_IFMT(found.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR) and name not in ("/dev/null", "/dev/zero", "/dev/urandom"):
            raise Unsupported(f"it has {_words(kind, name)} open")
        if not os.path.exists(name) or not os.path.samestat(os.stat(name), found):
            raise Unsupported(f"it has a file open that has no name any more: {name}")
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        flags = re.search(r"^flags:\s*(\d+)", facts, re.MULTILINE)
        if kind == stat.S_IFREG and _is_sqlite(descriptor):
            raise Unsupported(f"it has a database of SQLite's open, which knows its file by its inode: {name}")
        position = os.lseek(descriptor, 0, os.SEEK_CUR) if kind == stat.S_IFREG else 0
        yield Carried(descriptor, name, int(flags[1], 8) if flags else os.O_RDONLY, position)


def _is_sqlite(descriptor: int) -> bool:
    """Whether a file is a database of SQLite's, or may be one that nothing was written to."""
    try:
        beginning = os.pread(descriptor, len(_SQLITE), 0)  # to open it once more and close that would end its locks
    except OSError:  # it can only be written
        return False
    return beginning == _SQLITE or (not beginning and "_sqlite3" in sys.modules)


def _words(kind: int, name: str) -> str:
    words = {stat.S_IFSOCK: "a connection", stat.S_IFIFO: "a pipe", stat.S_IFCHR: f"the device {name}"}
    return words.get(kind, name)
