"""What a service is made of: a table of routes, and what their handlers take and give.

A handler is an async callable. Its first parameter is the ``Call``. Of the others, those that the path template names
are parts of the path; ``body`` is the JSON body, or an ``Upload`` when it is annotated so; the rest are query
parameters, or headers where the annotation says ``Annotated[..., Header("Name")]``. What it returns is the ``data`` of
the envelope; a ``Paged`` goes with its total, and a ``Streamed`` goes out as it is. The summary and the description in
``/openapi.json`` are the handler's docstring.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from aenv.auth.callers import Caller, Scope
from aenv.errors import Invalid, TooLarge
from aenv.runtime.protocol import Receive

T = TypeVar("T")
Handler = Callable[..., Coroutine[Any, Any, Any]]


class Route(NamedTuple):
    """One line of a service's table."""

    method: str
    path: str
    """As in ``/env/{name}/versions``. A slash at the end makes no difference."""
    handler: Handler
    scope: Scope | None = Scope.READ
    """What a token must be for; None: open to anybody."""
    status: int = 200
    most: int | None = None
    """Most bytes of the body; None: what the whole service takes."""


class Call:
    """One request, as its handler sees it."""

    __slots__ = ("answer_headers", "caller", "headers", "peer_is_local", "request_id", "route", "target", "token")

    def __init__(
        self,
        *,
        caller: Caller,
        headers: Mapping[bytes, bytes],
        request_id: str,
        peer_is_local: bool,
        route: Route,
        token: str = "",
        target: str = "",
    ) -> None:
        self.caller = caller
        self.headers = headers
        """By lower-case name."""
        self.request_id = request_id
        self.peer_is_local = peer_is_local
        """Whether the connection came from this machine, and nobody passed the request on."""
        self.route = route
        self.token = token
        """The bearer itself, for passing on. It is in no log and no answer."""
        self.target = target
        """What the audit log shows as touched: the parts of the path, until a handler knows better."""
        self.answer_headers: list[tuple[bytes, bytes]] = []
        """What a handler adds to the head of its answer."""


class Header(NamedTuple):
    """Marks a parameter that is a header: ``Annotated[str | None, Header("Idempotency-Key")]``."""

    name: str
    about: str = ""


class Query(NamedTuple):
    """Gives a query parameter another name, or says what it is: ``Annotated[bool, Query("deleteStorage")]``."""

    name: str = ""
    about: str = ""


class Upload:
    """A body that is read as it comes: an async iterator of bytes, to be read once."""

    def __init__(self, receive: Receive, *, size: int | None, most: int) -> None:
        self._receive = receive
        self._most = most
        self._read = 0
        self.size = size
        """What the client says its length is; None when it does not say."""
        self.ended = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self.ended.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.ended.set()
                raise ClientLeft("the client left in the middle of its upload")
            if not message.get("more_body"):
                self.ended.set()
            if part := message.get("body", b""):
                self._read += len(part)
                if self._read > self._most:
                    raise TooLarge(f"the body is over {self._most} bytes")
                return bytes(part)
        raise StopAsyncIteration


class ClientLeft(Invalid):
    """Nobody is there to hear the answer. The status is for the audit log."""

    status = 499


class Paged(Generic[T]):
    """A part of a list, and how long all of it is. Its handler takes ``limit`` and ``offset``, which are checked."""

    __slots__ = ("items", "total")

    def __init__(self, items: list[T], total: int) -> None:
        self.items = items
        self.total = total


class Streamed:
    """An answer that goes out as it is, piece by piece. Its client's leaving closes ``chunks``."""

    __slots__ = ("chunks", "content_type", "endless", "headers", "size")

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        content_type: str,
        size: int | None = None,
        headers: Iterable[tuple[bytes, bytes]] = (),
        endless: bool = False,
    ) -> None:
        self.chunks = chunks
        self.content_type = content_type
        self.size = size
        self.headers = tuple(headers)
        self.endless = endless
        """Whether it has no end of its own: then nobody waits for it when the service stops."""
