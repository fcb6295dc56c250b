"""Where sandboxes are, for the gateway of a controller. It knows no tokens: each sandbox judges by itself who comes."""

from __future__ import annotations

from aenv.api.gateway.failures import Busy
from aenv.api.gateway.places import Place
from aenv.auth.callers import Caller
from aenv.engines.base import Engine
from aenv.errors import AEnvError, NotFound, SandboxLost, Unauthorized, loss
from aenv.models import Sandbox, State

_MOST = 10_000
"""Places that are remembered."""


class EngineDirectory:
    """The gateway's ``Directory`` over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places: dict[str, Place] = {}

    def known(self, id: str) -> Place | None:
        return self._places.get(id)

    async def place(self, id: str) -> Place:
        self._places.pop(id, None)
        try:
            found = await self._engine.get(id)
        except NotFound as exc:  # whoever asks knew of it: it is not there any more
            return Place(id, "", "", "", SandboxLost(f"{id} is gone: {exc.message}"))
        if found.state is not State.RUNNING or not found.url:
            return Place(id, "", found.owner or "", "", _failure(found))
        if len(self._places) >= _MOST:
            self._places.clear()
        place = self._places[id] = Place(id, found.url, found.owner or "", "")
        return place

    def forget(self, id: str) -> None:
        """A sandbox was deleted."""
        self._places.pop(id, None)

    async def caller(self, token: str) -> Caller:
        raise Unauthorized("a controller carries calls to sandboxes, and asks for no token of its own")

    def touched(self, id: str) -> None:
        return


def _failure(found: Sandbox) -> AEnvError:
    """Why a sandbox cannot be reached."""
    if found.state.over:
        return loss(found.reason)(f"{found.id} is gone: {found.reason or found.state.lower()}")
    return Busy(f"{found.id} does not run yet", hint="ask again when it is Running")
