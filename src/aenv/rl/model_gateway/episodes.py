"""Episodes of the gateway: a key each, what it may still ask for, and what it has asked."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import msgspec
from msgspec import Struct

from aenv.errors import AEnvError, Invalid, ModelError, RateLimited, Unauthorized
from aenv.rl.model_gateway.upstreams import Upstream
from aenv.rl.trajectory import Tokens

MOST_HELD = 64 * 1024 * 1024
"""Weight of the requests of one episode that are under way."""
MOST_KEPT = 256 * 1024 * 1024
"""Bytes that are kept of one episode, unless its owner says otherwise."""
TOGETHER = 0.25
"""Seconds within which the same request may come again after a refusal that its sender need not know of: agents that
sample send several at once."""
MANY = 100
"""Requests that may be refused, however they differ."""


class Limits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an episode may ask for; None is no limit.

    Where tokens are counted, its calls are made one after the other, and each may write what is left.
    """

    max_calls: int | None = None
    max_tokens: int | None = None
    """Read and written, of all calls together."""
    max_completion_tokens: int | None = None
    """Written alone."""
    deadline: float | None = None
    """Seconds after its begin."""
    max_bytes: int | None = MOST_KEPT
    """Of what is kept of it."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise Invalid(f"{name} is {value!r}", hint="give a number over 0, or none for no limit")


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a model through the gateway, in OpenAI's form whatever its client speaks."""

    messages: list[dict[str, Any]] = []
    """What the model was given; this, ``tools`` and ``parameters`` are kept of calls that were answered."""
    tools: list[dict[str, Any]] = []
    parameters: dict[str, Any] = {}
    """All else that was sent, such as ``temperature``."""
    message: dict[str, Any] | None = None
    """What it answered; None where nothing came."""
    model: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: Tokens | None = None
    dialect: str = "chat"
    streamed: bool = False
    error: str = ""
    """Why the answer is not whole."""
    began_at: float = 0.0
    """Unix time."""
    seconds: float = 0.0


class ModelEpisode:
    """One episode, as its owner sees it."""

    def __init__(self, url: str, limits: Limits, hidden: tuple[str, ...] = ()) -> None:
        self.id = secrets.token_hex(8)
        self.key = f"ek-{secrets.token_urlsafe(24)}"
        """What clients give as their API key."""
        self.url = url
        self.limits = limits
        self.hidden = hidden
        """Variables with keys of providers, which its agent is not to have."""
        self.kept = 0
        """Bytes of what is known of it, here or where it is told."""
        self._records: list[bytes] = []
        """As JSON, which takes a tenth of what objects do."""
        self.failure: ModelError | None = None
        """The first failure of the model's servers: after it, nothing more is answered."""
        self.is_spent = False
        """Whether a call was refused since a limit is reached."""
        self.trouble: ModelError | None = None
        """What its latest call has met, while that is asked again."""
        self.upstream: Upstream | None = None
        """The server that it is on."""
        self.serial = limits.max_tokens is not None or limits.max_completion_tokens is not None
        """Whether its calls are made one after the other, as what one writes decides about the next."""
        self.heard: Callable[[Record], Awaitable[None]] | None = None
        """Told of every answer before its client has all of it, one after the other. Nothing is recorded here then."""
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is done around every call."""
        self.insisted: Callable[[], None] | None = None
        """Told once, when its agent goes on to ask for what it is not given."""
        self._refused: dict[int, float] = {}
        """Hashes of what a limit was in the way of, and since when."""
        self.used_at = self._began = time.monotonic()
        """When anybody wanted something of it."""
        self._calls = self._held = 0
        self._prompt = self._completion = 0
        self._closed = ""
        self._has_ended = False
        self._under_way: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()
        self._hearing = asyncio.Lock()

    @property
    def base_url(self) -> str:
        """The base for clients of OpenAI that send the key."""
        return f"{self.url}/v1"

    @property
    def path_url(self) -> str:
        """The same, with the key in its path: for clients that send another one."""
        return f"{self.url}/episode/{self.key}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """What tells an agent's program where its model is."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_AUTH_TOKEN": self.key,
        }

    @property
    def records(self) -> list[Record]:
        """Its calls, as far as nobody else was told of them."""
        return [msgspec.json.decode(record, type=Record) for record in self._records]

    def hold(self, weight: int) -> None:
        """So much more of its requests is held, or less."""
        if weight > 0 and self._held + weight > MOST_HELD:
            raise RateLimited(f"the episode's requests under way are over {MOST_HELD} bytes")
        self._held += weight

    @asynccontextmanager
    async def asking(self, request: bytes) -> AsyncIterator[None]:
        """Around a call; raises what it is refused with."""
        came_at = time.monotonic()
        async with self._turn if self.serial else nullcontext():
            self.check(request, came_at)
            self._calls += 1
            with self.around():
                yield

    def check(self, request: bytes, came_at: float) -> None:
        """Raises what a request is refused with, which came then, in ``time.monotonic``."""
        if self._has_ended:
            raise Unauthorized("the episode has ended")
        if self.failure is not None:
            self._insist()
            raise ModelError(f"an earlier call has failed: {self.failure.message}")
        if why := self._closed or self._reached():
            self.is_spent, now = True, time.monotonic()
            if len(self._refused) >= MANY or came_at > self._refused.setdefault(hash(request), now) + TOGETHER:
                self._insist()
            raise RateLimited(why)

    def _reached(self) -> str:
        """Which limit is in the way of a call."""
        limits = self.limits
        reached = (
            ("calls", self._calls, limits.max_calls),
            ("tokens", self._prompt + self._completion, limits.max_tokens),
            ("written tokens", self._completion, limits.max_completion_tokens),
            ("seconds", time.monotonic() - self._began, limits.deadline),
            ("bytes of records", self.kept, limits.max_bytes),
        )
        for what, used, most in reached:
            if most is not None and used >= most:
                return f"the episode's {most:g} {what} are used up"
        return ""

    def _insist(self) -> None:
        told, self.insisted = self.insisted, None
        if told is not None:
            told()

    @property
    def left(self) -> int | None:
        """How many tokens the next answer may have; None is no limit."""
        limits = self.limits
        given = (
            (limits.max_tokens, self._prompt + self._completion),
            (limits.max_completion_tokens, self._completion),
        )
        return min((most - used for most, used in given if most is not None), default=None)

    def keep(self, record: Record, *, pieces: int = 0) -> None:
        """A call has ended. ``pieces`` of a stream have come, which is what counts where nobody tells of tokens."""
        self._prompt += record.prompt_tokens or 0
        self._completion += pieces if record.completion_tokens is None else record.completion_tokens
        if self.heard is None:
            self._records.append(msgspec.json.encode(record))
            self.kept += len(self._records[-1])

    async def hear(self, record: Record) -> None:
        """What it has brought is told."""
        async with self._hearing:
            try:
                if self.heard is not None:
                    await self.heard(record)
            except RateLimited:
                self.is_spent = True
                raise
            except Exception as exc:
                self.fail(ModelError(f"an answer of the model could not be written down: {exc!r}"))
                raise ModelError("an answer of the model could not be written down") from exc

    def close(self, why: str) -> None:
        """Refuse all further calls."""
        self._closed = why

    def fail(self, error: AEnvError) -> None:
        """The servers have failed it."""
        if self.failure is None:
            self.failure = ModelError(error.message, hint=error.hint)

    def move(self, upstream: Upstream | None) -> None:
        """Be on that server."""
        if upstream is not self.upstream:
            for of, more in ((self.upstream, -1), (upstream, 1)):
                if of is not None:
                    of.episodes += more
            self.upstream = upstream

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._under_way)

    def calling(self, task: asyncio.Task[Any]) -> None:
        """A call is under way, which ends with the episode."""
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def end(self) -> None:
        """Refuse whatever comes, and end the calls under way: what they were answered is in its records then."""
        self._has_ended = True
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way))
        self.move(None)


class Episodes:
    """All that go on, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, ModelEpisode] = {}

    def add(self, episode: ModelEpisode) -> None:
        """Let its key in."""
        self._by_key[episode.key] = episode

    async def end(self, episode: ModelEpisode) -> None:
        """Let its key in no more."""
        self._by_key.pop(episode.key, None)
        await episode.end()

    def of(self, *keys: str) -> ModelEpisode:
        """The episode of the first of these that is a key."""
        found = next((self._by_key[key] for key in keys if key in self._by_key), None)
        if found is None:
            raise Unauthorized("there is no such episode, or it has ended", hint="use the key of an episode")
        found.used_at = time.monotonic()
        return found

    def unused(self, since: float) -> list[ModelEpisode]:
        """Those of which nobody has wanted anything since then, in ``time.monotonic``."""
        return [found for found in self._by_key.values() if found.used_at < since and not found.is_busy]

    def by_id(self, id: str) -> ModelEpisode | None:
        """The episode that its owner calls so."""
        return next((found for found in self._by_key.values() if found.id == id), None)
