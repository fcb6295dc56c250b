"""What the gateway must be told: where an instance is, whose it is, and who shows a token."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from aenv.auth.callers import Caller
from aenv.errors import AEnvError


class Place(Struct, frozen=True):
    """Where an instance is reached."""

    id: str
    url: str
    """``unix:/path/to.sock``, or ``http://host:port`` with any path in front of the sandbox's own."""
    owner: str
    """Whose platform tokens open it."""
    token: str
    """The sandbox's owner token."""
    failure: AEnvError | None = None
    """Why it cannot be reached, when it cannot: not ready, never became so, or lost. Only those who may use the
    instance hear it, so it is part of the answer and not raised: to others there is no such instance."""


class Directory(Protocol):
    """Who and where, as the API service knows it."""

    def known(self, id: str) -> Place | None:
        """Where a running instance is, if that is known without asking anybody: every call comes here."""
        ...

    async def place(self, id: str) -> Place:
        """The same, whomever it takes to ask. Raises NotFound; an instance that is there but not to be reached is a
        place with a ``failure``. It is asked again after a connection broke: the answer says why, once that is known.
        """
        ...

    async def caller(self, token: str) -> Caller:
        """Whose platform token this is; Unauthorized when it is none."""
        ...

    def touched(self, id: str) -> None:
        """Somebody uses the instance. Said with every call, so it must cost next to nothing."""
        ...
