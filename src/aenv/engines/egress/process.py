"""The proxy as a process: what the engine tells it, and the rights it gives up first."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from aenv.engines.egress import LARGEST_MESSAGE
from aenv.engines.egress.proxy import Proxy, log, on_alarm
from aenv.engines.process import kernel
from aenv.errors import Invalid

STALLED = 0.5
"""Seconds the process may be stuck in accept before the listener counts as tampered with."""
_MOST_THREADS = 32


class Control:
    """What the engine says. Messages are carried out one after the other, and answered in their order."""

    def __init__(self, sock: socket.socket, proxy: Proxy) -> None:
        self._sock = sock
        self._proxy = proxy
        self._messages: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue()

    async def run(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        loop.add_reader(self._sock, self._receive)
        while True:
            data, descriptors = await self._messages.get()
            reply = await self._carry_out(json.loads(data), descriptors)
            await loop.sock_sendall(self._sock, json.dumps(reply).encode())

    def _receive(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, LARGEST_MESSAGE, 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # not by way of the loop, which would wait for the resolver's threads
        self._messages.put_nowait((data, descriptors))

    async def _carry_out(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, str]:
        if "remove" in message:
            await self._proxy.remove(message["remove"])
            return {"done": message["remove"]}
        id = message["add"]
        listener: socket.socket | None = None
        try:
            if not descriptors:
                raise Invalid("no listener came with it")
            listener = socket.socket(fileno=descriptors[0])
            self._proxy.add(id, listener, message["allow"])
        except (Invalid, OSError) as exc:
            if listener is not None:
                listener.close()
            elif descriptors:
                os.close(descriptors[0])
            return {"failed": id, "reason": str(exc)}
        return {"done": id}


async def _serve(control: socket.socket) -> NoReturn:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MOST_THREADS, "resolver"))
    try:
        await Control(control, Proxy(stalled=STALLED)).run()
    except Exception as exc:
        log(f"the proxy failed: {type(exc).__name__}: {exc}")
        os._exit(1)


def main(descriptor: int, uid: int | None) -> None:
    """Carry out what is said on a socket, as that user, until the socket ends."""
    control = socket.socket(fileno=descriptor)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if uid is not None:
        # Not before exec: that user need not be able to read where Python is installed.
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.no_new_privileges()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, on_alarm)
    asyncio.run(_serve(control))
