"""The servers behind the gateway: which of them takes a call, and what is tried again.

They are the operator's alone: nothing that a client sends says where a call goes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import msgspec

from aenv import config, http
from aenv.control import plain_header
from aenv.errors import AEnvError, Invalid, ModelError, TooLarge
from aenv.http import Response, Stream
from aenv.models import to_json
from aenv.rl.models import AGAIN, MOST_ANSWER

PATH = "/chat/completions"
REST = 5.0
"""Seconds that a server which failed is left alone, where another can be asked."""
_LONGEST_REST = 60.0
"""Seconds, however many a server asks for."""
_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_SHOWN = 300
_SLOW = 2
"""How often a call may take all the time that an answer has."""
_REFUSED = (400, 404, 413, 422)
"""Statuses by which a server tells a client that its request is wrong."""
_FAILS = 500
"""By which a server says that it has failed at a request, and not that it is busy or behind something that is."""
_AT_FAULT = 2
"""Failures at a request, of servers that are well, after which it is the request."""
_WORD = 30.0
"""Seconds in which a server that is well says a word."""
_HELLO = [{"role": "user", "content": "Hello."}]
_drawn = random.SystemRandom().uniform


class Upstream:
    """A server that speaks OpenAI's chat completions."""

    def __init__(self, url: str, *, key_variable: str = "", model: str = "") -> None:
        """``url`` is its base, such as ``http://gpu-1:8000/v1``; ``key_variable`` names the environment variable that
        the provider's key is in; ``model`` is what it is asked for, whichever model an agent names."""
        self.url = url.rstrip("/")
        self.key_variable = key_variable
        self.model = model
        http.target(self.url)
        self._key = config.named(key_variable) if key_variable else ""
        if key_variable and not self._key:
            raise Invalid(f"the variable {key_variable} is not set", hint="it is to hold the key of the provider")
        self.headers = b"Content-Type: application/json\r\n"
        if self._key:
            self.headers += f"Authorization: Bearer {plain_header(self._key, key_variable)}\r\n".encode()
        self.episodes = 0
        """That are on it."""
        self.resting_until = 0.0
        self.refuses_tokens: set[bool] = set()
        """Whether it refuses to give token ids: of streams, of other answers."""

    def without_key(self, text: str) -> str:
        """What it said, fit for agents."""
        return text.replace(self._key, "...") if self._key else text

    def said(self, body: bytes) -> str:
        """The beginning of an answer, without the key."""
        return self.without_key(body[: _SHOWN + len(self._key)].decode(errors="replace"))[:_SHOWN]

    def __repr__(self) -> str:
        return f"Upstream({self.url!r})"


class Upstreams:
    """Several servers of the same model."""

    def __init__(
        self,
        upstreams: Sequence[str | Upstream],
        *,
        timeout: float,
        retries: int,
        allowed_fields: Collection[str] = (),
    ) -> None:
        self.all = [Upstream(given) if isinstance(given, str) else given for given in upstreams]
        if not self.all:
            raise Invalid("no server of a model is given", hint="give upstreams=['http://host:8000/v1']")
        self.timeout = timeout
        self.retries = retries
        self.allowed_fields = frozenset(allowed_fields)
        """What agents may ask of them beside what all may."""

    def choose(self, last: Upstream | None, tried: Collection[Upstream] = ()) -> Upstream:
        """The one that an episode was on, whose cache knows its prompt; else the one with the fewest episodes. One that
        was tried only where there is no other."""
        now = asyncio.get_running_loop().time()
        awake = [upstream for upstream in self.all if upstream.resting_until <= now]
        fresh = [upstream for upstream in awake if upstream not in tried] or awake
        if not fresh:
            return min(self.all, key=lambda upstream: upstream.resting_until)
        return last if last in fresh else min(fresh, key=lambda upstream: upstream.episodes)

    async def is_well(self, upstream: Upstream, model: str) -> bool:
        """Whether a server that has failed at a request answers another: a word with a word."""
        asked = {"model": upstream.model or model, "messages": _HELLO, "max_completion_tokens": 1}
        try:
            async with asyncio.timeout(_WORD):
                return (await self.ask("POST", PATH, upstream, to_json(asked))).status == 200
        except (ModelError, TimeoutError):
            return False

    async def ask(self, method: str, path: str, upstream: Upstream, body: bytes) -> Response:
        """One answer as a whole. What may go well when it is asked again is an ``Again``."""
        try:
            async with asyncio.timeout(self.timeout) as limit:
                asked = http.request(
                    method, upstream.url, path, headers=upstream.headers, body=body, retries=0, most=MOST_ANSWER
                )
                return _looked_at(upstream, await asked)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Again(upstream, f"the model did not answer within {self.timeout:g} s", slow=True) from None
        except ModelError:
            raise
        except TooLarge as exc:  # it would be again
            raise ModelError(f"the model's answer cannot be taken: {exc.message}") from exc
        except AEnvError as exc:
            raise Again(upstream, f"the model did not answer: {exc.message}") from exc

    @asynccontextmanager
    async def stream(self, path: str, upstream: Upstream, body: bytes) -> AsyncIterator[Stream | Response]:
        """An answer as it comes; a ``Response`` where the server refused."""
        loop = asyncio.get_running_loop()
        begun, entered = loop.time(), False
        try:
            streaming = http.stream(
                "POST", upstream.url, path, headers=upstream.headers, body=body, patience=self.timeout
            )
            async with streaming as stream:
                if stream.status != 200:
                    whole = Response(stream.status, stream.headers, await stream.read(MOST_ANSWER))
                    entered = True
                    yield _looked_at(upstream, whole)
                else:
                    entered = True
                    yield stream
        except AEnvError as exc:
            if entered or isinstance(exc, ModelError):
                raise
            if isinstance(exc, TooLarge):
                raise ModelError(f"the model's answer cannot be taken: {exc.message}") from exc
            slow = loop.time() - begun >= self.timeout
            raise Again(upstream, f"the model did not answer: {exc.message}", slow=slow) from exc


class Again(ModelError):
    """May go well when it is asked again."""

    def __init__(
        self, upstream: Upstream, message: str, *, answered: int = 0, after: float | None = None, slow: bool = False
    ) -> None:
        super().__init__(message)
        self.upstream = upstream
        self.answered = answered
        """With which status, when it did."""
        self.after = after
        """Seconds after which the server says so."""
        self.slow = slow
        """Whether it took all the time that an answer has."""


class AtFault(Invalid):
    """A request that servers fail at which are well."""


class Tries:
    """How often one call is asked: in a round each server once, and with a pause between two rounds."""

    def __init__(self, upstreams: Upstreams, model: str | None = None) -> None:
        """``model`` is which one is asked; None where it is not a model that is asked."""
        self._upstreams = upstreams
        self._model = model
        self.tried: set[Upstream] = set()
        """In this round."""
        self._rounds = self._slow = self._at_fault = 0

    async def again(self, exc: Again) -> None:
        """Wait until it is to be asked again; raises what it has met when it was asked often enough, and ``AtFault``
        when it is the request that is to be another."""
        if exc.answered == _FAILS and self._model is not None:
            is_well = await self._upstreams.is_well(exc.upstream, self._model)
        else:
            is_well = False
        self._at_fault += is_well
        if self._at_fault >= _AT_FAULT:
            raise AtFault(exc.message)
        now = asyncio.get_running_loop().time()
        if not is_well:
            exc.upstream.resting_until = now + max(REST, exc.after or 0.0)
        self._slow += exc.slow
        self.tried.add(exc.upstream)
        rest = (upstream for upstream in self._upstreams.all if upstream not in self.tried)
        is_round = not any(upstream.resting_until <= now for upstream in rest)
        self._rounds += is_round
        if self._slow >= _SLOW or self._rounds > self._upstreams.retries:
            raise ModelError(exc.message) from exc
        if is_round:
            self.tried.clear()
            pause = min(_PAUSE * 2 ** (self._rounds - 1), _LONGEST_PAUSE) * _drawn(0.5, 1.0)
            await asyncio.sleep(max(pause, min(exc.after or 0.0, _LONGEST_PAUSE)))


def _looked_at(upstream: Upstream, response: Response) -> Response:
    """An answer that a client may be given: one, or that its request was wrong."""
    status = response.status
    if status == 200:
        return response
    words = f"the model answered with status {status}: {upstream.said(response.body)}"
    if status in AGAIN:
        raise Again(upstream, words, answered=status, after=_after(response))
    if status not in _REFUSED or not _tells(status, response.body):
        raise ModelError(words)
    told = upstream.without_key(response.body.decode(errors="replace"))
    return Response(status, response.headers, told.encode())


def _after(response: Response) -> float | None:
    """How long a server wants to be left alone."""
    try:
        after = float(response.headers[b"retry-after"])
    except (KeyError, ValueError):
        return None
    return min(after, _LONGEST_REST) if after >= 0 else None


def _tells(status: int, body: bytes) -> bool:
    """Whether the model's server says what is wrong. What has no such path, for its base URL is wrong, says no more."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    names = ("error", "message") if status == 404 else ("error", "message", "detail")
    return isinstance(found, dict) and any(found.get(name) for name in names)
