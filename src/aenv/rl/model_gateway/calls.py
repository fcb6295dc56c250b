"""One call through the gateway: read, translated, asked of a server, recorded, and answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec

from aenv.cleanup import finish
from aenv.errors import AEnvError, Invalid, ModelError, RateLimited
from aenv.http import Response, Stream
from aenv.models import NOT_JSON, to_json
from aenv.rl.completions import Usage
from aenv.rl.model_gateway import chat, messages, responses
from aenv.rl.model_gateway.chat import Asked, Body, Collected
from aenv.rl.model_gateway.episodes import ModelEpisode, Record
from aenv.rl.model_gateway.events import DONE, Events
from aenv.rl.model_gateway.upstreams import PATH, Again, AtFault, Tries, Upstream, Upstreams
from aenv.rl.models import MOST_ANSWER
from aenv.rl.trajectory import Tokens

log = logging.getLogger("aenv.rl")
LEFT = "the client left"
_NO_PARAMETERS = ("messages", "tools")


class Streaming(Protocol):
    """A stream in a client's dialect."""

    def feed(self, chunk: Body) -> Iterator[bytes]: ...
    def end(self, answer: Body) -> bytes: ...
    def broken(self, message: str) -> bytes: ...


class Dialect(NamedTuple):
    """What a client speaks."""

    name: str
    request: Callable[[Body], Body]
    answer: Callable[[Body, Body], Body]
    failure: Callable[[int, str], Body]
    streaming: Callable[[Asked, Body], Streaming]


CHAT = Dialect("chat", chat.request, chat.answer, chat.failure, lambda asked, _: chat.Streaming(asked))
RESPONSES = Dialect(
    "responses", responses.request, responses.answer, responses.failure, lambda _, body: responses.Streaming(body)
)
MESSAGES = Dialect(
    "messages", messages.request, messages.answer, messages.failure, lambda _, body: messages.Streaming(body)
)


class Call:
    """One call of an episode."""

    def __init__(
        self, dialect: Dialect, episode: ModelEpisode, upstreams: Upstreams, data: bytes, *, tokens: bool
    ) -> None:
        try:
            self._body: Body = msgspec.json.decode(data, type=dict[str, Any])
            asked, fields = dialect.request(self._body), upstreams.allowed_fields
            self._asked = Asked(asked, tokens=tokens, most=episode.left, allowed_fields=fields)
            self._sent = to_json(self._asked.body)
        except NOT_JSON as exc:
            raise Invalid(f"the request is no JSON object that could be sent on: {exc}") from exc
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise Invalid(f"the request is not as its dialect has it: {exc!r}") from exc
        self._dialect = dialect
        self._episode = episode
        self._upstreams = upstreams
        self._tries = Tries(upstreams, str(self._body.get("model") or ""))
        self._plain: Upstream | None = None
        """A server that refused this call, perhaps for what we added."""
        self._is_kept = False
        self._began = time.monotonic()
        self._began_at = time.time()

    @property
    def streamed(self) -> bool:
        return self._asked.streamed

    # Asking

    async def whole(self) -> Response:
        """The answer, in the client's dialect."""
        with self._noted():
            while True:
                upstream = self._upstream()
                try:
                    response = await self._upstreams.ask("POST", PATH, upstream, self._told(upstream))
                except Again as exc:
                    await again(self._tries, self._episode, exc)
                    continue
                if not self._is_refused(upstream, response):
                    return await self._answered(upstream, response)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """However it ends, there is a record of it."""
        try:
            yield
        except RateLimited:
            raise
        except AtFault as exc:
            self._episode.trouble = None
            self._keep(exc.message)
            raise
        except Exception as exc:
            failed = _unread(exc)
            self._episode.fail(failed)
            self._keep(failed.message)
            raise failed from exc
        except asyncio.CancelledError:
            self._keep(LEFT)
            raise

    def _keep(self, error: str) -> None:
        if not self._is_kept:
            self._is_kept = True
            self._episode.keep(self._record(None, error))

    def _upstream(self) -> Upstream:
        upstream = self._upstreams.choose(self._episode.upstream, self._tries.tried)
        self._episode.move(upstream)
        return upstream

    def _told(self, upstream: Upstream) -> bytes:
        plain = self._asked.wants_tokens and (upstream is self._plain or self.streamed in upstream.refuses_tokens)
        if not plain and not upstream.model:
            return self._sent
        body = self._asked.without_tokens() if plain else self._asked.body
        return to_json({**body, "model": upstream.model} if upstream.model else body)

    def _is_refused(self, upstream: Upstream, response: Response) -> bool:
        """Whether the server may refuse what we added, and is to be asked without: SGLang gives no ids in a stream."""
        if response.status not in (400, 422) or b"token_ids" not in response.body:
            return False
        asked = self._asked.wants_tokens and upstream is not self._plain
        if not asked or self.streamed in upstream.refuses_tokens:
            return False
        self._plain = upstream
        return True

    def _came(self, upstream: Upstream) -> None:
        """The server answers: what it refused before was what we added."""
        self._episode.trouble = None
        if upstream is self._plain:
            upstream.refuses_tokens.add(self.streamed)

    async def _answered(self, upstream: Upstream, response: Response) -> Response:
        if response.status != 200:  # the client's request was wrong, in the server's words
            self._episode.trouble = None
            self._keep(f"status {response.status}")
            if self._dialect is CHAT:
                return response
            words = _words(response.body)
            return Response(response.status, {}, to_json(self._dialect.failure(response.status, words)))
        self._came(upstream)
        try:
            found = msgspec.json.decode(response.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ModelError(f"the model answered with no JSON: {exc}") from exc
        await self._add(found)
        shown, changed = self._asked.shown(found)
        if self._dialect is CHAT and not changed:
            return response
        return Response(200, {}, to_json(self._dialect.answer(shown, self._body)))

    # Streams

    async def stream(self) -> AsyncIterator[Response | bytes]:
        """The answer as it comes: pieces, or first of all a ``Response`` where the server refused."""
        with self._noted():
            while True:
                upstream = self._upstream()
                try:
                    async with self._upstreams.stream(PATH, upstream, self._told(upstream)) as answer:
                        if isinstance(answer, Stream):
                            self._came(upstream)
                            async with aclosing(self._pieces(upstream, answer)) as pieces:
                                async for piece in pieces:
                                    yield piece
                            return
                        if not self._is_refused(upstream, answer):
                            yield await self._answered(upstream, answer)
                            return
                except Again as exc:
                    await again(self._tries, self._episode, exc)

    async def _pieces(self, upstream: Upstream, answer: Stream) -> AsyncGenerator[bytes]:
        streaming = self._dialect.streaming(self._asked, self._body)
        events, pieces, collected = Events(), chat.Pieces(), Collected()
        done, size = False, 0
        try:
            async for piece in answer:
                size += len(piece)
                if size > MOST_ANSWER:
                    raise ModelError(f"the model's stream is over {MOST_ANSWER} bytes")
                for data in events.feed(piece):
                    if data == DONE or not data.strip():
                        done |= data == DONE
                        continue
                    chunk = pieces.read(data)
                    collected.add(chunk)
                    shown = b"".join(streaming.feed(chunk))
                    if shown:
                        yield shown
            if not done and collected.finish_reason is None:
                raise ModelError("the model's stream ended in the middle of an answer")
            await self._add(collected.answer)
            yield streaming.end(collected.answer)
        except Exception as exc:
            words = upstream.without_key(_unread(exc).message)
            if not isinstance(exc, RateLimited):
                self._episode.fail(ModelError(words))
            await self._add_so_far(collected, words)
            yield streaming.broken(words)
        finally:  # the client left, or its episode has ended
            await finish(self._add_so_far(collected, LEFT))

    # Recording

    async def _add_so_far(self, collected: Collected, error: str) -> None:
        await self._add(collected.answer if collected.pieces else None, error, pieces=collected.pieces)

    async def _add(self, answer: Body | None, error: str = "", *, pieces: int = 0) -> None:
        """Keep what came, once; the episode is told of it, unless its model has failed."""
        if self._is_kept:
            return
        record = self._record(answer, error)
        self._is_kept = True
        self._episode.keep(record, pieces=pieces)
        if record.message is not None and self._episode.failure is None:
            await finish(self._episode.hear(record))  # whoever leaves meanwhile: it has come, and counts

    def _record(self, answer: Body | None, error: str = "") -> Record:
        record = Record(
            dialect=self._dialect.name,
            streamed=self.streamed,
            error=error,
            began_at=self._began_at,
            seconds=time.monotonic() - self._began,
        )
        if answer is None:  # and what was asked is not kept: nobody learns from it
            return record
        body = self._asked.body
        completion = chat.checked(answer, "the model")
        choice, usage, tokens = completion.choices[0], completion.usage or Usage(), completion.tokens or Tokens()
        return msgspec.structs.replace(
            record,
            messages=body["messages"],
            tools=body.get("tools") or [],
            parameters={name: value for name, value in body.items() if name not in _NO_PARAMETERS},
            message={name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
            | {"role": "assistant", "content": choice.message.content},
            model=completion.model,
            finish_reason=choice.finish_reason or "",
            prompt_tokens=_counted(usage.prompt_tokens, tokens.prompt),
            completion_tokens=_counted(usage.completion_tokens, tokens.completion),
            tokens=completion.tokens,
        )


def _unread(exc: Exception) -> AEnvError:
    """What fails on the way of an answer is no fault of the agent's, also where it is one of ours."""
    if isinstance(exc, AEnvError):
        return exc
    log.exception("an answer of a model could not be read", exc_info=exc)
    return ModelError(f"the model's answer could not be read: {exc!r}")


def _counted(told: int | None, ids: list[int] | None) -> int | None:
    """How many tokens there are: as the server tells, or as many as it gives. None are ever given back."""
    if told is None:
        return None if ids is None else len(ids)
    return max(told, 0)


async def again(tries: Tries, episode: ModelEpisode, exc: Again) -> None:
    """Wait until it is to be asked again. When it was asked often enough, there is no episode."""
    episode.trouble = exc
    try:
        await tries.again(exc)
    except ModelError as failed:
        episode.fail(failed)
        raise


async def models(episode: ModelEpisode, upstreams: Upstreams) -> Response:
    """Which models there are."""
    tries = Tries(upstreams)
    while True:
        try:
            response = await upstreams.ask("GET", "/models", upstreams.choose(episode.upstream, tries.tried), b"")
        except Again as exc:
            await again(tries, episode, exc)
        else:
            episode.trouble = None
            return response


def _words(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body)
        error = found.get("error", found) if isinstance(found, dict) else found
        return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body[:1000].decode(errors="replace")
