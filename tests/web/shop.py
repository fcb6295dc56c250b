"""A small service with a handler of each kind, on a socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import msgspec

from aenv.auth.callers import Caller, Scope
from aenv.errors import (
    AEnvError,
    Conflict,
    NetworkError,
    NotFound,
    RateLimited,
    SandboxLost,
    StartFailed,
    Unauthorized,
    Unsupported,
)
from aenv.runtime.access import Hosts
from aenv.runtime.protocol import Connections
from aenv.web.app import App
from aenv.web.metrics import Metrics
from aenv.web.routes import Call, Header, Paged, Query, Route, Streamed, Upload
from aenv.wire import PAGE, Audited

TOKENS = {
    "t-read": Caller("ann", frozenset({Scope.READ}), "1"),
    "t-push": Caller("ann", frozenset({Scope.READ, Scope.PUSH}), "2"),
    "t-none": Caller("bob", frozenset(), "3"),
    "t-admin": Caller("root", frozenset({Scope.ADMIN}), "4"),
}
LARGEST_UPLOAD = 300_000
PIECE = b"x" * 100_000
FAILURES = {
    "conflict": Conflict("it is there", hint="take another name"),
    "network": NetworkError("the store does not answer"),
    "busy": RateLimited("too much"),
    "lost": SandboxLost("it is gone"),
    "start": StartFailed("it never started"),
    "later": Unsupported("not yet"),
    "plain": AEnvError("ours"),
    "half": NotFound("no file \udcff"),
    "bug": RuntimeError("the password is hunter2"),
}


class Part(msgspec.Struct):
    size: int


class Item(msgspec.Struct, kw_only=True, rename="camel"):
    """Something that is sold."""

    name: str
    """What ``people`` call it."""
    price_now: float = 0.0
    labels: dict[str, str] = {}
    parts: list[Part] = []
    extra: dict[str, Any] = {}


class Note(msgspec.Struct):
    text: str = ""


class Shop:
    """What happened, for tests to look at."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.audited: list[Audited] = []

    async def authenticate(self, token: str | None) -> Caller:
        if token not in TOKENS:
            raise Unauthorized("no such token" if token else "a token is needed")
        return TOKENS[token]

    async def list_items(
        self,
        call: Call,
        tag: list[str] | None = None,
        kind: Literal["old", "new"] | None = None,
        exact: bool = False,
        most: float | None = None,
        limit: int = PAGE,
        offset: int = 0,
    ) -> Paged[Item]:
        """List items.

        The ones of ``kind``, with each tag.
        """
        names = [*(tag or ()), f"{kind}-{exact}-{most}", *map(str, range(8))]
        return Paged([Item(name=name) for name in names[offset : offset + limit]], len(names))

    async def create_item(
        self,
        call: Call,
        body: Item,
        dry: Annotated[bool, Query("dryRun", "Change ``nothing``.")] = False,
        key: Annotated[str | None, Header("Idempotency-Key", "To ask twice.")] = None,
    ) -> Item:
        """Make an item."""
        call.target = body.name
        body.labels |= {"key": str(key), "dry": str(dry)}
        return body

    async def get_item(self, call: Call, name: str) -> dict[str, Any]:
        """One item, and who asks."""
        call.answer_headers.append((b"x-shop", b"open"))
        return {
            "name": name,
            "owner": call.caller.owner,
            "token": call.token,
            "local": call.peer_is_local,
            "agent": call.headers.get(b"user-agent", b"").decode(),
        }

    async def delete_item(self, call: Call, name: str) -> None:
        """Forget an item."""

    async def newest(self, call: Call) -> str:
        """The name of the newest item."""
        return "newest"

    async def note(self, call: Call, name: str, body: Note | None = None) -> Note | None:
        """Add a note, or take it away."""
        return body

    async def upload(self, call: Call, name: str, body: Upload) -> dict[str, int | None]:
        """Put its picture."""
        self.events.append("upload began")
        try:
            size = 0
            async for piece in body:
                size += len(piece)
                self.events.append("piece")
            return {"size": size, "declared": body.size}
        except AEnvError as exc:
            self.events.append(f"upload {type(exc).__name__}")
            raise
        except asyncio.CancelledError:
            self.events.append("upload cancelled")
            raise

    async def picture(
        self, call: Call, name: str, pieces: int = 3, size: int | None = None
    ) -> Annotated[Streamed, "image/x-fake"]:
        """Its picture."""
        return Streamed(self._pieces(name, pieces), content_type="image/x-fake", size=size, headers=[(b"etag", b'"1"')])

    async def _pieces(self, name: str, pieces: int) -> AsyncIterator[bytes]:
        try:
            if name == "missing":
                raise NotFound("no picture")
            for _ in range(pieces):
                yield PIECE
            if name == "broken":
                raise RuntimeError("the disk is gone")
        finally:
            self.events.append("picture closed")

    async def follow(self, call: Call) -> Streamed | Note:
        """What happens from now on."""

        async def lines() -> AsyncIterator[bytes]:
            try:
                yield b"first\n"
                await asyncio.Event().wait()
            finally:
                self.events.append("follow closed")

        return Streamed(lines(), content_type="text/plain", endless=True)

    async def slow(self, call: Call) -> None:
        """Take for ever."""
        self.events.append("slow began")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("slow ended")

    async def fail(self, call: Call, how: str) -> None:
        """Fail."""
        raise FAILURES[how]

    async def bulky(self, call: Call, size: int = 1000) -> str:
        """A large answer in one piece."""
        return "x" * size

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/item/", self.list_items),
            Route("POST", "/item/", self.create_item, Scope.PUSH, status=201),
            Route("GET", "/item/newest", self.newest),
            Route("GET", "/item/{name}", self.get_item),
            Route("DELETE", "/item/{name}", self.delete_item, Scope.PUSH),
            Route("PUT", "/item/{name}/note", self.note, Scope.PUSH),
            Route("PUT", "/item/{name}/picture", self.upload, Scope.PUSH, most=LARGEST_UPLOAD),
            Route("GET", "/item/{name}/picture", self.picture),
            Route("GET", "/follow", self.follow),
            Route("POST", "/slow", self.slow),
            Route("POST", "/fail/{how}", self.fail),
            Route("GET", "/bulky", self.bulky),
        ]

    def app(self) -> App:
        metrics = Metrics()
        metrics.gauge("aenv_items", "What there is.", lambda: 3)
        return App(
            self.routes(),
            title="Shop",
            authenticate=self.authenticate,
            guard=Hosts(loopback=True, allowed_hosts=["shop.test"]),
            audit=self.audited.append,
            max_body=100_000,
            metrics=metrics,
        )


class Server:
    """A shop that is open, in a thread of its own."""

    def __init__(self) -> None:
        self.shop = Shop()
        self.port = 0
        self.connections: Connections
        self.loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        self.app = self.shop.app()
        self.connections = Connections(self.app)
        self._stop = asyncio.Event()
        server = await self.loop.create_server(self.connections, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        await self.app.close(patience=0.2)
        await self.connections.drain(5)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def opened() -> Iterator[Server]:
    server = Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()
