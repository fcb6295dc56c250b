"""The way out of a container that may reach some hosts only: a listener in its network, handed to the egress proxy.

Such a container has a network with nothing but loopback. The listener is made in there from outside: nothing in the
container leads to the proxy, so nobody inside can lead it elsewhere. Whoever takes its port first keeps only itself
from the network.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from threading import Thread
from typing import Any, TypeVar

from aenv.engines.egress.outlets import Outlets
from aenv.engines.process import jail, kernel
from aenv.engines.process.seal import PROXY_PORT
from aenv.errors import AEnvError, Conflict, NotFound, SandboxLost

T = TypeVar("T")
log = logging.getLogger("aenv.engine")
_BACKLOG = 128
_AGAIN, _LONGEST = 1.0, 10.0
"""Seconds between two tries, at first and later."""
_OWN_KERNELS = ("runsc", "kata")
"""Beginnings of the names of runtimes whose containers have a network that this machine's kernel does not know."""


class Exits:
    """Those of one engine's containers."""

    def __init__(self, inspect: Callable[[str], Awaitable[dict[str, Any]]], seen: Callable[[str], str]) -> None:
        """``seen``: where this process finds what the daemon has at a path; empty when it sees nothing."""
        self._inspect, self._seen = inspect, seen
        self._outlets = Outlets(jail.first_user(os.getpid()) + jail.SPAN - 1 if os.geteuid() == 0 else None)

    def missing(self, runtime: str) -> str:
        """Why there can be none, for containers that this runtime of the daemon's runs."""
        if runtime.startswith(_OWN_KERNELS):
            return f"{runtime} keeps the network of a container to itself"
        if not self._seen("/"):
            return "this process is not root on the daemon's machine, so it cannot enter the network of a container"
        own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _inside(own, lambda: None)
        except OSError as exc:
            return f"this process cannot enter the network of a container: {exc.strerror}"
        finally:
            os.close(own)
        return ""

    async def open(self, container: str, allow: Sequence[str], holds: AsyncExitStack) -> None:
        """Let a container that runs out to those hosts, until ``holds`` is closed.

        What stands in the way may go: the port may be that of a program inside, or of another engine of the same name,
        which watches the container too. So it is tried again, and the container lives on meanwhile.
        """
        if failed := await self._try(container, allow, holds):
            log.warning("%s reaches nobody yet: %s", container, failed)
            holds.push_async_callback(_end, asyncio.create_task(self._keep_trying(container, allow, holds)))

    async def close(self) -> None:
        await self._outlets.close()

    async def _keep_trying(self, container: str, allow: Sequence[str], holds: AsyncExitStack) -> None:
        pause, failed = _AGAIN, "once"
        while failed:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)
            failed = await self._try(container, allow, holds)

    async def _try(self, container: str, allow: Sequence[str], holds: AsyncExitStack) -> str:
        """Why it cannot be done now; nothing when it is done, or the container is gone."""
        try:
            found = await self._inspect(container)
            process = int((found.get("State") or {}).get("Pid") or 0)
            if process:
                await self._hand_over(listen(self._seen(f"/proc/{process}"), str(found["Id"])), container, allow, holds)
        except NotFound:
            return ""
        except AEnvError as exc:
            return exc.message
        except OSError as exc:
            return exc.strerror or str(exc)
        return ""

    async def _hand_over(
        self, listener: socket.socket, container: str, allow: Sequence[str], holds: AsyncExitStack
    ) -> None:
        async with AsyncExitStack() as made:
            made.callback(listener.close)
            made.push_async_callback(self._remove, container)
            await self._outlets.add(container, listener, allow)
            holds.push_async_callback(made.pop_all().aclose)

    async def _remove(self, container: str) -> None:
        with suppress(AEnvError):  # the proxy does not answer, and is given up when the engine ends
            await self._outlets.remove(container)


def listen(process: str, container: str) -> socket.socket:
    """A listener at the proxy's port, in the network of a container. ``process`` is its first one, as a directory below
    ``/proc``; ``container`` is the daemon's own name for it."""
    try:
        folder = os.open(process, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with open(os.open("cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)) as file:
                if container not in file.read():  # the number may be another process's by now
                    raise SandboxLost(f"{process} is not in the control group of its container")
            network = os.open("ns/net", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
    except (FileNotFoundError, ProcessLookupError):
        raise SandboxLost(f"{process} is gone") from None
    try:
        return _inside(network, lambda: socket.create_server(("127.0.0.1", PROXY_PORT), backlog=_BACKLOG))
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        raise Conflict(f"port {PROXY_PORT} is somebody else's there") from exc
    finally:
        os.close(network)


def _inside(network: int, work: Callable[[], T]) -> T:
    """Do something in a network, by a thread that does nothing else."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            kernel.setns(network, kernel.NEWNET)
            done.set_result(work())
        except Exception as exc:
            done.set_exception(exc)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return done.result()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
