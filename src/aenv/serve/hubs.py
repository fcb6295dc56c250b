"""Where an API service's environments come from: the hub of this process, or one elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aenv.auth.callers import Caller
from aenv.client.hub import HubClient
from aenv.errors import Conflict
from aenv.hub.records import RUNNABLE
from aenv.hub.service import Hub
from aenv.models import EnvRef
from aenv.wire import Env, Status


class HubHere:
    """The hub of this process, as the API service sees it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def resolve(self, ref: EnvRef, call_token: str, caller: Caller) -> Env:
        return await self._hub.resolve(caller, ref)

    async def package(self, env: Env, call_token: str, caller: Caller) -> AsyncIterator[bytes]:
        return (await self._hub.package(caller, env.name, env.version))[1]


class HubElsewhere:
    """A hub that is asked over the network, with the token of whoever asks us."""

    def __init__(self, url: str, own_token: str | None) -> None:
        self._url = url
        self._own_token = own_token
        """For what was begun at another server, and is gone on with here."""

    async def resolve(self, ref: EnvRef, call_token: str, caller: Caller) -> Env:
        env = await self._client(call_token).get(ref)
        if env.status not in RUNNABLE or not env.digest:
            why = env.reason or ("it has no package" if not env.digest else f"it is {Status(env.status).title}")
            raise Conflict(f"{env.id} cannot be run: {why}", hint="push its package, or name another version")
        return env

    async def package(self, env: Env, call_token: str, caller: Caller) -> AsyncIterator[bytes]:
        return self._client(call_token).package(env)

    def _client(self, call_token: str) -> HubClient:
        return HubClient(self._url, call_token or self._own_token)
