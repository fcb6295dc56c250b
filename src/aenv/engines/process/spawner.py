"""The trusted process behind the engine: it starts zygotes, has instances forked, looks at them, and ends them.

It runs nothing of an author's and takes nothing that comes from inside at its word. An embedded one lives as long as
the socket to its owner; one with a name until it is told to end, or has neither an owner nor a sandbox. Whatever it
made dies with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aenv import config
from aenv.engines.process import cgroups, kernel, powers, state
from aenv.engines.process.freezer import Freezer
from aenv.engines.process.jail import first_user
from aenv.engines.process.sandboxes import Sandboxes
from aenv.engines.process.site import Site
from aenv.errors import AEnvError, StartFailed

_LONGEST = 2**26
"""Bytes of one request."""
_DESERTED = 10.0
"""Seconds after which one with a name, but without an owner and a sandbox, ends by itself."""
_BURIAL = 1.0
"""Seconds between two looks for the dead."""


class Control:
    """Requests of the engine, each answered when it is done: a line of JSON each way."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self.stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._owners = 0
        self._left = asyncio.get_running_loop().time()
        """When the last owner left."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._owners += 1
        try:
            while not self.stop.is_set() and (line := await reader.readline()):
                task = asyncio.create_task(self._answer(json.loads(line), writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except OSError:
            pass  # it left in the middle of something
        finally:
            self._owners -= 1
            self._left = asyncio.get_running_loop().time()
            if not self.stop.is_set():
                writer.close()

    async def until_deserted(self, place: Path) -> None:
        """Decide to end when nobody has wanted anything for a while, or nobody can find ``place`` any more. Who comes
        after that is not answered."""
        # What may keep it from ending is too much to have each of it wake this.
        while place.exists() and not self._deserted:  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(_DESERTED / 2)
        self.stop.set()

    @property
    def _deserted(self) -> bool:
        since = asyncio.get_running_loop().time() - self._left
        return not (self._owners or self._tasks or self._sandboxes.any) and since >= _DESERTED

    async def _answer(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        reply: dict[str, Any] = {"n": request["n"]}
        try:
            if request["do"] == "end":
                self.stop.set()
                reply["result"] = None
            elif request["do"] == "retire":  # end, if nobody else would miss it
                reply["result"] = self._owners == 1 and not self._sandboxes.any
                if reply["result"]:
                    self.stop.set()
            else:
                reply["result"] = await _VERBS[request["do"]](self._sandboxes, **request["with"])
        except AEnvError as exc:
            reply["error"] = exc.to_wire()
        except asyncio.CancelledError:
            reply["error"] = StartFailed("it was deleted while it started").to_wire()
        except Exception as exc:
            reply["error"] = AEnvError(f"the spawner failed: {exc!r}").to_wire()
        with suppress(OSError):
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()


class Orphans:
    """Buries what falls to this process when its own parent is gone, and dies: nobody else waits for it.

    What this process started is waited for where it was started, at once. So who is dead at two looks is an orphan.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._seen: frozenset[int] = frozenset()
        self._looking = False

    def somebody_died(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_later(_BURIAL, self._look)

    def _look(self) -> None:
        self._looking = False
        dead = _dead_children()
        for pid in dead & self._seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = dead - self._seen
        if self._seen:
            self.somebody_died()


def _dead_children() -> frozenset[int]:
    found = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            for pid in listed.read_text().split():
                status = Path("/proc", pid, "stat").read_text()
                if status.rpartition(")")[2].split()[0] == "Z":
                    found.add(int(pid))
    return frozenset(found)


_VERBS: dict[str, Callable[..., Awaitable[Any]]] = {
    "hello": Sandboxes.hello,
    "create": Sandboxes.create,
    "get": Sandboxes.get,
    "find": Sandboxes.find,
    "delete": Sandboxes.delete,
    "update": Sandboxes.update,
    "hide": Sandboxes.hide,
    "door": Sandboxes.door,
    "output": Sandboxes.output,
    "used": Sandboxes.used,
    "volumes": Sandboxes.volumes,
    "delete_volume": Sandboxes.delete_volume,
}


def main(control: int, isolation: str, name: str) -> None:
    """Serve the owner at the other end of ``control``; a name means that others may come and go as well."""
    if sys.platform == "linux":
        kernel.become_subreaper()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each sandbox takes four of them, or five
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_run(socket.socket(fileno=control), isolation, name))


async def _run(owner: socket.socket, isolation: str, name: str) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=owner, limit=_LONGEST)
    try:
        found = powers.choose(isolation)
        directory = state.Directory.make(name or None)
        try:
            site = _site(directory, isolation, found)
        except BaseException:
            directory.remove()
            raise
    except (AEnvError, OSError) as exc:
        error = exc if isinstance(exc, AEnvError) else AEnvError(f"this machine refused: {exc}")
        writer.write(json.dumps({"n": 0, "error": error.to_wire()}).encode() + b"\n")
        await writer.drain()
        return
    sandboxes = Sandboxes(site)
    control = Control(sandboxes)
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, control.stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, Orphans().somebody_died)
    ends: list[asyncio.Task[Any]] = [asyncio.create_task(control.stop.wait())]
    serving = asyncio.create_task(control.serve(reader, writer))
    if name:
        path = directory.path / "control.sock"
        await asyncio.start_unix_server(control.serve, str(path), limit=_LONGEST)
        ends.append(asyncio.create_task(control.until_deserted(path)))
    else:
        ends.append(serving)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await sandboxes.close()
    if site.freezer is not None:
        await asyncio.to_thread(site.freezer.close)
    if site.groups is None or await asyncio.to_thread(cgroups.remove_soon, site.groups, kill=True):
        directory.remove()  # what is left is found by what is written there
    os._exit(0)


def _site(directory: state.Directory, isolation: str, found: powers.Powers) -> Site:
    """Take what there is to take, and write down what must be cleared away if this process cannot."""
    groups = cgroups.make(directory.path.name) if found.cgroups else None
    freezer = _freezer(groups) if groups and found.namespaces else None
    roots = {name: str(path) for name, path in groups.roots.items()} if groups else {}
    roots |= freezer.roots if freezer else {}
    try:
        directory.record({"pid": os.getpid(), "control_groups": roots})
    except AEnvError:
        if freezer is not None:
            freezer.close()
        if groups is not None:
            groups.remove()
        raise
    return Site(directory.path, isolation, found, first_user(os.getpid()), groups, config.get("spare"), freezer)


def _freezer(groups: cgroups.Tree) -> Freezer | None:
    """What instances are held by that nobody calls. Where there is none, they are not."""
    try:
        return Freezer.make(groups)
    except OSError:
        return None
