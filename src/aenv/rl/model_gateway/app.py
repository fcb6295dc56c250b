"""The gateway over HTTP: who asks, in which dialect, and how the answer goes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

from aenv.errors import AEnvError, Forbidden, Invalid, ModelError, NotServed, RateLimited, TooLarge, Unauthorized
from aenv.http import Response
from aenv.models import to_json
from aenv.rl.model_gateway.calls import CHAT, MESSAGES, RESPONSES, Call, Dialect, models
from aenv.rl.model_gateway.episodes import Episodes, ModelEpisode
from aenv.rl.model_gateway.upstreams import Upstreams
from aenv.runtime.access import Hosts
from aenv.runtime.protocol import App as Asgi
from aenv.runtime.protocol import Message, Receive, Send

MOST_REQUEST = 32 * 1024 * 1024
"""Bytes of one request, with those for its values: as many as Anthropic takes."""
_VALUE = 16
"""Bytes that each value in it counts for: ``{}`` is two bytes on the way, and sixty in here."""
MODELS = "/v1/models"
QUICK = 0.05
"""A call that takes longer is watched for its client's leaving; a quick one is not worth it."""
_JSON = (b"content-type", b"application/json")
_NO_STORE = (b"cache-control", b"no-store")
_NEVER = (b"x-should-retry", b"false")
"""What clients of OpenAI and Anthropic do not ask again after."""
_EVENTS = [(b"content-type", b"text/event-stream"), _NO_STORE]


class Request(NamedTuple):
    """The head of a request."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]


class App:
    """Routes of models for whoever has the key of an episode; all others go to ``owner``, where there is one."""

    def __init__(
        self, episodes: Episodes, upstreams: Upstreams, guard: Hosts, *, tokens: bool, owner: Asgi | None = None
    ) -> None:
        self._episodes = episodes
        self._upstreams = upstreams
        self._guard = guard
        self._tokens = tokens
        self._owner = owner

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if self._owner is not None and not path.startswith(("/v1/", "/episode/")):
            await self._owner(scope, receive, send)
            return
        request = Request(scope["method"], path, dict(scope["headers"]))
        dialect = MESSAGES if path.endswith("/messages") else CHAT
        answer = _Answer(send)
        try:
            self._guard.check_host(request)
            episode, route = self._episode(request)
            dialect = self._dialect(request.method, route)
            async with _body(request, receive, episode) as data:
                work = asyncio.create_task(self._work(episode, route, dialect, data, answer))
                episode.calling(work)
                await _until_done(work, receive)
        except AEnvError as exc:
            if not answer.has_begun:
                await _whole(_failure(exc, dialect), send, (_NEVER,))

    def _episode(self, request: Request) -> tuple[ModelEpisode, str]:
        """Whose request it is, and the path without that."""
        parts = request.path.split("/", 3)
        if parts[1] == "episode" and len(parts) == 4:
            return self._episodes.of(parts[2]), f"/{parts[3]}"
        header = request.headers.get(b"authorization", b"")
        bearer = header[7:].strip() if header[:7].lower() == b"bearer " else b""
        # Some clients of Anthropic send both where both are set, and one of them may be meant for somebody else.
        keys = (bearer, request.headers.get(b"x-api-key", b""))
        return self._episodes.of(*(key.decode("latin-1") for key in keys)), request.path

    def _dialect(self, method: str, route: str) -> Dialect:
        found = ROUTES.get((method, route))
        if found is None:
            raise NotServed(f"{method} {route} is not served here", hint=", ".join(path for _, path in ROUTES))
        return found

    async def _work(self, episode: ModelEpisode, route: str, dialect: Dialect, data: bytes, send: Send) -> None:
        if route == MODELS:
            episode.check(data, time.monotonic())
            await _whole(await models(episode, self._upstreams), send)
            return
        async with episode.asking(data):
            call = Call(dialect, episode, self._upstreams, data, tokens=self._tokens)
            if call.streamed:
                await self._stream(call, send)
            else:
                await _whole(await call.whole(), send)

    async def _stream(self, call: Call, send: Send) -> None:
        begun = False
        async with aclosing(call.stream()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if isinstance(piece, Response):
                    await _whole(piece, send)
                    return
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _until_done(work: asyncio.Task[None], receive: Receive) -> None:
    """Wait for an answer. Its client's leaving ends what is done for it, and so does the end of its episode."""
    gone: asyncio.Task[None] | None = None
    try:
        await asyncio.wait((work,), timeout=QUICK)
        if not work.done():
            gone = asyncio.create_task(_until_gone(receive))
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if gone is not None:
            gone.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
    if not work.cancelled():
        work.result()
    elif gone is None or not gone.done() or gone.cancelled():
        raise Unauthorized("the episode has ended")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _body(request: Request, receive: Receive, episode: ModelEpisode) -> AsyncIterator[bytes]:
    """The body of a request, which its episode holds as long as the block goes on."""
    length = request.headers.get(b"content-length", b"")
    parts, weight, more = [], 0, True
    if length.isdigit() and int(length) > MOST_REQUEST:
        raise TooLarge(f"the request is over {MOST_REQUEST} bytes")
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Invalid("the client left in the middle of its request")
            part: bytes = message["body"]
            more_weight = len(part) + _VALUE * sum(map(part.count, (b",", b"[", b"{")))
            episode.hold(more_weight)
            weight += more_weight
            parts.append(part)
            if weight > MOST_REQUEST:
                raise TooLarge(f"the request is over {MOST_REQUEST} bytes")
            more = message["more_body"]
        yield b"".join(parts)
    finally:
        episode.hold(-weight)


class _Answer:
    """Where an answer goes, and whether any of it has gone."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)


async def _whole(response: Response, send: Send, more: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    headers = [_JSON, _NO_STORE, (b"content-length", b"%d" % len(response.body)), *more]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


def _failure(exc: AEnvError, dialect: Dialect) -> Response:
    """In the client's dialect. Whatever is wrong with a request is 400 there."""
    known = isinstance(exc, (Unauthorized, Forbidden, NotServed, RateLimited, TooLarge, ModelError))
    status = exc.status if known else 400 if isinstance(exc, Invalid) else 500
    words = exc.message if exc.hint is None else f"{exc.message} ({exc.hint})"
    return Response(status, {}, to_json(dialect.failure(status, words)))


ROUTES: Mapping[tuple[str, str], Dialect] = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/responses"): RESPONSES,
    ("POST", "/v1/messages"): MESSAGES,
    ("GET", MODELS): CHAT,
}
