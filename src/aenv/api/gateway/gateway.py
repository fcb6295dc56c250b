"""The data port as a whole: its listening sockets, its connections, its limits and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aenv.api.gateway.connection import Connection
from aenv.api.gateway.exposed import Names
from aenv.api.gateway.places import Directory, Services, Watcher
from aenv.api.gateway.router import Router
from aenv.api.gateway.watching import Watching
from aenv.runtime.access import Hosts
from aenv.tracing import Tracer

BACKLOG = 1024
EVERY = 1.0
"""Seconds between two looks at who keeps us waiting."""
GRACE = 10.0
_CUTTING = 2.0


class Gateway:
    """Passes requests on to the sandboxes they name. Also a factory of protocols, for whoever listens himself."""

    def __init__(
        self,
        directory: Directory,
        *,
        key: bytes,
        legacy: bool = False,
        open: bool = False,
        url: str = "",
        loopback: bool = True,
        allowed_hosts: Iterable[str] = (),
        ports_domain: str = "localhost",
        most_connections: int = 10_000,
        services: Services | None = None,
        watcher: Watcher | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """``key`` signs exposed URLs. ``legacy`` lets an instance's id stand in for a credential; ``open`` passes
        everything on, and leaves it to each sandbox to judge by itself who comes. ``url`` is how clients reach us,
        where that is not as they say. ``loopback`` says that only this machine gets here, which narrows the names it
        is called by; ``allowed_hosts`` widens them. ``ports_domain`` is the domain under which exposed ports get their
        names, or a URL of it when TLS ends in front of us, such as ``https://ports.example.com``. Without
        ``services`` there are none here. ``watcher`` is told of each call, and ``tracer`` makes a span of it.
        """
        self._names = Names(key, ports_domain)
        hosts = Hosts(loopback=loopback, allowed_hosts=allowed_hosts)
        self.router = Router(directory, hosts, self._names, legacy=legacy, open=open, url=url, services=services)
        self.watching = Watching(watcher, tracer) if watcher is not None or tracer is not None else None
        """Who wants to know of each call, if anybody does."""
        self.port = 0
        """Where clients reach us, once we listen."""
        self._most = most_connections
        self._open: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._empty = asyncio.Event()

    def __call__(self) -> Connection:
        """The protocol of one client's connection."""
        return Connection(self)

    async def listen(self, host: str = "127.0.0.1", port: int = 8081) -> int:
        """Begin to serve; the port, which with 0 the system chose."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self, host, port, backlog=BACKLOG)
        self._servers.append(server)
        self.port = server.sockets[0].getsockname()[1]
        return self.port

    def exposed_url(self, id: str, port: int, expires_at: float) -> str:
        """A URL of its own origin that leads to a port inside the instance, until then."""
        return self._names.url(id, port, expires_at, self.port)

    def ended(self, id: str) -> None:
        """The instance is gone: its connections are closed."""
        if sandbox := self.router.sandboxes.pop(id, None):
            sandbox.close()

    async def close(self, grace: float = GRACE) -> None:
        """Take no more requests, let calls in flight end for so long, then cut them."""
        self._closing = True
        for server in self._servers:
            server.close()
        for connection in list(self._open):
            connection.finish()
        await self._until_empty(grace)
        for connection in list(self._open):
            connection.abort()
        await self._until_empty(_CUTTING)
        if self._timer is not None:
            self._timer.cancel()
        self.router.close()

    async def _until_empty(self, patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                while self._open:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            return

    # From the connections

    def admit(self, connection: Connection) -> bool:
        """Take note of a new connection; False when there are too many."""
        self._open.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._look)
        return len(self._open) <= self._most and not self._closing

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._empty.set()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._open):
            connection.check(now)
        self.router.expire(now)
        self._timer = loop.call_later(EVERY, self._look) if self._open or self.router.idle else None
