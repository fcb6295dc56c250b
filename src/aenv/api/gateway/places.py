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


class Replicas(Struct, frozen=True):
    """A service, as calls to it are shared out."""

    id: str
    owner: str
    """Whose platform tokens open it."""
    token: str
    """The owner token of each of its replicas."""
    ready: tuple[Place, ...] = ()
    """Replicas that take calls."""
    leaving: tuple[Place, ...] = ()
    """Replicas that take only calls of sessions that are theirs, until they are gone."""
    failure: AEnvError | None = None
    """Why there is nobody to take a call, where there is nobody."""


class Services(Protocol):
    """Which services there are, as the API service knows it."""

    def known(self, id: str) -> Replicas | None:
        """A service, if it is known without asking anybody: every call comes here. The same object for as long as
        nothing about it has changed."""
        ...

    async def find(self, id: str) -> Replicas:
        """The same, whomever it takes to ask, also after a replica could not be reached. One that is just starting is
        waited for a while. Raises NotFound."""
        ...


class Answered(Struct):
    """A call that the gateway carried or refused, once it is over. Times are those of ``time.monotonic``."""

    place: Place | None
    """The sandbox; None when the call did not get as far as one."""
    service: str
    """The service that was asked for; empty when it was an instance."""
    method: bytes
    path: bytes
    """As the sandbox sees it."""
    status: int
    """Of the answer that the client got; 0 when it left before."""
    began: float
    answered: float
    """When the head of the answer came; when it ended, if none did."""
    ended: float
    request_id: bytes
    trace: bytes
    """The ``traceparent`` that the sandbox was given; empty without one."""
    timing: bytes
    """The sandbox's ``Server-Timing``."""
    exposed: bool = False
    """Whether it went to a port inside, and not to the sandbox itself: then the path is not one of ours."""


class Watcher(Protocol):
    """Who is told of every call."""

    def answered(self, call: Answered) -> None:
        """Said with every call, so it must cost next to nothing, and must not raise."""
        ...


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
