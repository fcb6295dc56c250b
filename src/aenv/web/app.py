"""A service as one ASGI application: a table of routes behind one door.

Beside the routes that it is given it serves ``/health``, ``/metrics``, ``/openapi.json`` and ``/docs``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any

import msgspec

from aenv import __version__
from aenv.auth.callers import Caller, Scope
from aenv.errors import NetworkError
from aenv.runtime.access import Hosts
from aenv.runtime.protocol import Receive, Send
from aenv.tracing import Tracer
from aenv.web import openapi, pages
from aenv.web.exchange import Exchange
from aenv.web.metrics import CONTENT_TYPE, Metrics
from aenv.web.routes import Call, Route, Streamed
from aenv.web.table import Table
from aenv.wire import Audited

MAX_BODY = 8 * 1024 * 1024


class App:
    """The HTTP surface of one service."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        title: str,
        authenticate: Callable[[str | None], Awaitable[Caller]],
        guard: Hosts,
        audit: Callable[[Audited], None] | None = None,
        max_body: int = MAX_BODY,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.title = title
        self.table = Table(complete(routes, self))
        self.authenticate = authenticate
        self.guard = guard
        self.audit = audit
        self.max_body = max_body
        self.metrics = metrics or Metrics()
        self.tracer = tracer
        self.draining = False
        """Whether it is about to stop: it serves as before, and whoever asks after its health is told so."""
        self.stopping = False
        self._requests: set[asyncio.Task[Any]] = set()
        self._endless: set[asyncio.Future[None]] = set()
        """One for each stream without an end: settled, it ends."""
        self._others: set[asyncio.Future[None]] = set()
        """One for each handler and each other stream: settled, it is cut short."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a service speaks HTTP, not {scope['type']}")
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            await Exchange(self, scope, receive, send).run()
        finally:
            self._requests.discard(task)

    async def close(self, patience: float = 5.0) -> None:
        """Take no more requests, end the endless streams, wait so long for the rest, and cut short what is left."""
        self.stopping = True
        for futures in (self._endless, self._others):
            for future in futures:
                _settle(future)
            if waiting := self._requests - {asyncio.current_task()}:
                await asyncio.wait(waiting, timeout=patience)

    @contextmanager
    def waited_for(self, *, endless: bool = False) -> Iterator[asyncio.Future[None]]:
        """A future that says when to stop waiting for something."""
        group = self._endless if endless else self._others
        cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.add(cut)
        if self.stopping and endless:
            _settle(cut)
        try:
            yield cut
        finally:
            group.discard(cut)

    # Its own routes, in the order of the table below.

    async def health(self, call: Call) -> dict[str, str]:
        """Whether the service answers, and is to be sent more: 503 when it is about to stop."""
        if self.draining:
            raise NetworkError("this server is about to stop", hint="ask another one, or again in a moment")
        return {"status": "ok", "service": self.title, "version": __version__}

    async def show_metrics(self, call: Call) -> Annotated[Streamed, "text/plain; version=0.0.4"]:
        """What the service did so far, for Prometheus: a scraper needs a token for reading."""
        return _page(self.metrics.text().encode(), CONTENT_TYPE)

    async def show_openapi(self, call: Call) -> Annotated[Streamed, "application/json"]:
        """This description, as OpenAPI 3.1."""
        return _page(self._openapi, "application/json")

    async def show_docs(self, call: Call) -> Annotated[Streamed, "text/html; charset=utf-8"]:
        """This description, as a page to read."""
        return _page(self._docs, "text/html; charset=utf-8", pages.HEADERS)

    @cached_property
    def _openapi(self) -> bytes:
        return msgspec.json.encode(openapi.describe(self.title, self.table.endpoints))

    @cached_property
    def _docs(self) -> bytes:
        return pages.page(openapi.describe(self.title, self.table.endpoints)).encode()


def complete(routes: Sequence[Route], app: App) -> list[Route]:
    """The routes of a service with those that every service has."""
    given = {(route.method, route.path) for route in routes}
    own = [
        Route("GET", "/health", app.health, None),
        Route("GET", "/metrics", app.show_metrics, Scope.READ),
        Route("GET", "/openapi.json", app.show_openapi, None),
        Route("GET", "/docs", app.show_docs, None),
    ]
    return [*routes, *(route for route in own if (route.method, route.path) not in given)]


def _page(body: bytes, content_type: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Streamed:
    async def chunks() -> AsyncIterator[bytes]:
        yield body

    return Streamed(chunks(), content_type=content_type, size=len(body), headers=headers)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
