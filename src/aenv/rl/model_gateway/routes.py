"""Episodes of a gateway for owners elsewhere, over HTTP; the table is at the bottom."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from aenv.auth.callers import Caller, Scope
from aenv.errors import NotFound, Unauthorized
from aenv.rl.model_gateway.episodes import Limits, ModelEpisode, Record
from aenv.rl.model_gateway.gateway import ModelGateway
from aenv.runtime.access import Hosts
from aenv.web.app import App
from aenv.web.routes import Call, Route

TITLE = "AEnvironment model gateway"
KEPT = 600.0
"""Seconds for which an episode that has ended is known."""
ABANDONED = 24 * 3600.0
"""Seconds after which an episode ends that nobody has asked for or in."""


class Begun(Struct, frozen=True):
    """An episode that was begun."""

    id: str
    key: str
    """What its agent gives as its API key."""
    base_url: str
    variables: dict[str, str]


class Kept(Struct, frozen=True):
    """What is known of an episode."""

    id: str
    records: list[Record]
    spent: bool
    """Whether a call was refused since a limit is reached."""
    failure: str | None
    """What the servers of the model failed at, first."""


class Desk:
    """What owners can ask."""

    def __init__(self) -> None:
        self.gateway: ModelGateway | None = None
        self._ended: dict[str, tuple[float, ModelEpisode]] = {}
        """When, and which: an owner whose connection broke off may ask again what there was."""

    async def begin(self, call: Call, body: Limits) -> Begun:
        """Begin an episode, with limits. One that nobody asks for or in for a day is ended."""
        assert self.gateway is not None
        now = time.monotonic()
        self._ended = {id: found for id, found in self._ended.items() if found[0] > now - KEPT}
        for left in self.gateway.episodes.unused(now - ABANDONED):
            await self.gateway.episodes.end(left)
        episode = self.gateway.begin(body)
        return Begun(episode.id, episode.key, episode.base_url, episode.variables)

    async def show(self, call: Call, id: str) -> Kept:
        """What an episode has asked and was answered so far. It is known for ten minutes after its end."""
        return _kept(self._found(id))

    async def end(self, call: Call, id: str) -> Kept:
        """End an episode: its key opens nothing more. What is known of it then is all."""
        episode = self._found(id)
        assert self.gateway is not None
        await self.gateway.episodes.end(episode)
        self._ended.setdefault(id, (time.monotonic(), episode))
        return _kept(episode)

    def _found(self, id: str) -> ModelEpisode:
        assert self.gateway is not None
        found = self.gateway.episodes.by_id(id) or self._ended.get(id, (0.0, None))[1]
        if found is None:
            raise NotFound(f"there is no episode {id[:64]!r}, or it has ended")
        found.used_at = time.monotonic()
        return found


def _kept(episode: ModelEpisode) -> Kept:
    failure = None if episode.failure is None else episode.failure.message
    return Kept(episode.id, episode.records, episode.is_spent, failure)


def _only(token: str) -> Callable[[str | None], Awaitable[Caller]]:
    async def authenticate(given: str | None) -> Caller:
        if given is None or not hmac.compare_digest(given.encode(), token.encode()):
            raise Unauthorized("the owner's token is needed", hint="send it as 'Authorization: Bearer ...'")
        return Caller("owner", frozenset({Scope.RUN}))

    return authenticate


def routes(desk: Desk) -> Sequence[Route]:
    """What an owner's token opens."""
    return [
        Route("POST", "/episodes", desk.begin, Scope.RUN, 201),
        Route("GET", "/episodes/{id}", desk.show, Scope.RUN),
        Route("DELETE", "/episodes/{id}", desk.end, Scope.RUN),
    ]


def owned(token: str, guard: Hosts) -> tuple[Desk, App]:
    """The application of owners, which waits for its gateway."""
    desk = Desk()
    return desk, App(routes(desk), title=TITLE, authenticate=_only(token), guard=guard)
