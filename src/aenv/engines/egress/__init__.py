"""Network for sandboxes that have none: a proxy process that reaches what an allow-list names.

Here is the side of whoever starts it; ``outlets`` does that for an engine. ``process`` is the process: ``proxy`` serves
sandboxes, ``messages`` reads what they and the servers send, ``rules`` says what is allowed. ``clients`` is what
programs in a sandbox are told.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from aenv import config
from aenv.engines.egress.rules import Rules
from aenv.engines.process import jail
from aenv.errors import Invalid, StartFailed

LARGEST_MESSAGE = 128 * 1024
_LONGEST_LIST = LARGEST_MESSAGE - 1024
"""Bytes, in a message that has an id, too."""
_PROCESS = "from aenv.engines.egress.process import main; main({}, {})"
_REPLY_TIMEOUT = 30.0
_END_TIMEOUT = 5.0
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""What Python itself may need to start. Nothing else of the environment is its business."""


def check(allow: Sequence[str]) -> None:
    """Refuse a list that no proxy can serve."""
    Rules(allow)
    if len(json.dumps(list(allow))) > _LONGEST_LIST:
        raise Invalid("the allow-list is too long", hint="use *.suffix:port for many hosts of one domain")


class Egress:
    """The proxy process, as the one that started it sees it. It ends with the socket between the two."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.pid = process.pid
        self._ended = asyncio.Event()
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._replies: deque[asyncio.Future[dict[str, str]]] = deque()
        """Those that are waited for, in the order of their messages."""
        self._sending = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None
        """Waited for while the process has not read what was sent before."""
        control.setblocking(False)
        self._loop.add_reader(control, self._receive)

    @classmethod
    async def start(cls, uid: int | None = None) -> Self:
        """Start a proxy; as root, ``uid`` is the user it becomes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220  a watcher's thread would be in the way of forks
                    jail.python(sys.executable, _PROCESS.format(theirs.fileno(), uid), site=True),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={name: value for name, value in config.environment().items() if name in _VARIABLES},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as exc:
                ours.close()
                raise StartFailed(f"the egress proxy cannot be started: {exc}") from exc
        return cls(process, ours)

    @property
    def died(self) -> bool:
        """Whether the process is gone, for whatever reason; ``wait`` returns when it is."""
        return self._ended.is_set()

    async def wait(self) -> None:
        await self._ended.wait()

    async def add(self, id: str, listener: socket.socket, allow: Sequence[str]) -> None:
        """Serve the connections that come to a listener; ``Invalid`` for a list that cannot be read.

        The listener stays the caller's to close. Cancelled, it may have been added or not: remove it.
        """
        check(allow)
        reply = await self._ask({"add": id, "allow": list(allow)}, [listener.fileno()])
        if "failed" in reply:
            raise StartFailed(f"the egress proxy does not serve {id}: {reply['reason']}")

    async def remove(self, id: str) -> None:
        """Close a sandbox's listener and its connections. Gone already is success, and so is a dead proxy."""
        try:
            await self._ask({"remove": id})
        except StartFailed:
            if not self.died:
                raise

    async def close(self) -> None:
        """End the process, and all connections with it."""
        if not self.died:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            try:
                async with asyncio.timeout(_END_TIMEOUT):
                    await self.wait()
            except TimeoutError:
                self._over()

    async def _ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, str]:
        data = json.dumps(message).encode()
        try:
            async with asyncio.timeout(_REPLY_TIMEOUT):
                async with self._sending:
                    reply = await self._send(data, descriptors)
                return await asyncio.shield(reply)
        except TimeoutError as exc:
            raise StartFailed(f"the egress proxy does not answer within {_REPLY_TIMEOUT:g} s") from exc

    async def _send(self, data: bytes, descriptors: Sequence[int]) -> asyncio.Future[dict[str, str]]:
        while not self.died:
            try:
                socket.send_fds(self._control, [data], descriptors)
            except BlockingIOError:
                self._room = self._loop.create_future()
                self._loop.add_writer(self._control, self._has_room)
                await self._room
            except ConnectionError:
                self._over()
            except OSError as exc:
                raise StartFailed(f"the egress proxy cannot be told: {exc}") from exc
            else:
                self._replies.append(self._loop.create_future())
                return self._replies[-1]
        raise self._gone()

    def _receive(self) -> None:
        try:
            data = self._control.recv(LARGEST_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._replies.popleft().set_result(json.loads(data))
        else:
            self._over()

    def _has_room(self) -> None:
        self._loop.remove_writer(self._control)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _over(self) -> None:
        """The process is gone, or of no use: nothing of it is left after this."""
        if self.died:
            return
        self._loop.remove_reader(self._control)
        self._has_room()
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._ended.set()
        while self._replies:
            self._replies.popleft().set_exception(self._gone())

    def _gone(self) -> StartFailed:
        return StartFailed(
            "the egress proxy is gone", hint="with AENV_DEBUG=1, what it says is shown on standard error"
        )
