"""Two servers on one Redis behind a balancer, as a site would have them, for tests.

The balancer passes bytes. It asks each server after its health, and gives a new connection to one that is well; one
that takes no connection is passed over at once.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from tests.platform.support import Platform, Program, end_sandboxes, new_home
from tests.store.servers import free_port
from tests.support import Reply

_EVERY = 0.1
_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Balancer:
    """Listens on a port, and passes connections on to servers on other ports of this machine."""

    def __init__(self) -> None:
        self.port = 0
        self.ports: list[int] = []
        """Of the servers."""
        self._well: set[int] = set()
        self._turns = itertools.count()
        self._passing: set[asyncio.Task[Any] | None] = set()
        """The loop itself holds none of them."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def well(self) -> set[int]:
        """Ports of the servers that said they are well."""
        return set(self._well)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        while True:
            with suppress(OSError):
                server = await asyncio.start_server(self._pass_on, "127.0.0.1", free_port())
                break
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        checking = asyncio.create_task(self._check())
        await self._stop.wait()
        checking.cancel()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _check(self) -> None:
        while True:
            for port in list(self.ports):
                if await self._is_well(port):
                    self._well.add(port)
                else:
                    self._well.discard(port)
            await asyncio.sleep(_EVERY)

    async def _is_well(self, port: int) -> bool:
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(_HEALTH)
                    return b" 200 " in await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._passing.add(asyncio.current_task())
        try:
            there = await self._connected()
            if there is None:
                return
            try:
                await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
            finally:
                there[1].transport.abort()
        finally:
            self._passing.discard(asyncio.current_task())
            writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the next server: of those that are well, or else of any that takes one."""
        turn = next(self._turns)
        ports = self.ports[turn % 2 :] + self.ports[: turn % 2]
        for port in sorted(ports, key=lambda port: port not in self._well):
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
            self._well.discard(port)
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until they end; what is lost at one end is cut at the other."""
    try:
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()
    except (OSError, asyncio.CancelledError):
        writer.transport.abort()


class Replicas(Platform):
    """Two servers that share a store and a home, as one platform: whatever asks it goes through the balancers."""

    def __init__(
        self, home: Path, control: Balancer, data: Balancer, *options: str, variables: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(home, variables=variables)
        self.control, self.data = control.url, data.url
        self.servers = [Platform(home, *options, "--data-url", data.url, variables=variables) for _ in range(2)]
        self.losing = 0
        """After so many questions, one of them is killed, and started again meanwhile; 0 is never."""
        self._balancers = control, data
        self._turns = itertools.cycle(self.servers)
        self._starting: threading.Thread | None = None

    def start(self) -> None:
        """Have both running."""
        self.settle()
        for server in self.servers:
            if not server.alive:
                server.start()
            self.token = server.token
        self.admit()

    def admit(self) -> None:
        """Tell the balancers where the servers are."""
        for balancer, place in zip(self._balancers, (0, 1), strict=True):
            balancer.ports = [server._ports[place] for server in self.servers if server._ports is not None]

    def lose_one(self) -> Platform:
        """Kill one of them, the other one than last time, and start it again, which goes on when this is back."""
        self.settle()
        lost = next(self._turns)
        lost.kill()
        self._starting = threading.Thread(target=lost.start)
        self._starting.start()
        return lost

    def settle(self) -> None:
        """Wait until whatever was started again runs."""
        if self._starting is not None:
            self._starting.join()
            self._starting = None

    @property
    def alive(self) -> bool:
        self.settle()
        return all(server.alive for server in self.servers)

    @property
    def text(self) -> str:
        return "".join(server.text for server in self.servers)

    def end(self) -> None:
        self.settle()
        for server in self.servers:
            if server.alive:
                server.signal(signal.SIGTERM)
        for server in self.servers:
            server.end()
        end_sandboxes(self.home)

    # One of them may be killed on the way

    def _asked(self) -> None:
        if self.losing:
            self.losing -= 1
            if not self.losing:
                self.lose_one()

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = "", **options: Any) -> Reply:
        self._asked()
        return super().ask(method, path, body, token=token, **options)

    def call(
        self, id: str, method: str, path: str, body: Any = None, *, token: str | None = "", **options: Any
    ) -> Reply:
        self._asked()
        return super().call(id, method, path, body, token=token, **options)

    @contextmanager
    def program(self, script: str, **variables: str) -> Iterator[Program]:
        with super().program(script, **variables) as program:
            self._asked()
            yield program


@contextmanager
def replicas(store: str, **variables: str) -> Iterator[Replicas]:
    """Two servers on a store, behind balancers, that are ready. They and all that they made end with the block."""
    with ExitStack() as stack:
        home = stack.enter_context(new_home())
        control, data = stack.enter_context(Balancer()), stack.enter_context(Balancer())
        found = Replicas(home, control, data, "--store", store, variables=variables)
        stack.callback(found.end)
        found.start()
        yield found
