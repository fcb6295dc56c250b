"""One sandbox of an engine on containers: what is to be known of it again by whoever finds it, and how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Generic, Self, TypeVar

from msgspec import Struct

from aenv.engines.printed import Printed
from aenv.engines.stages import Stages
from aenv.errors import SandboxLost
from aenv.models import Sandbox, SandboxSpec, State
from aenv.runtime.hidden import Hidden


class Facts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What must be known of a sandbox by whoever finds it again."""

    id: str
    env: str
    owner: str | None = None
    labels: dict[str, str] = {}
    created_at: float
    ttl: float | None = None
    startup_timeout: float = 500.0
    secrets: list[str] = []
    """Names of variables."""
    volumes: list[tuple[str, str]] = []
    """Owner and name of each."""
    second: str = ""
    """The image of its second container; empty when it has none."""

    @classmethod
    def of(cls, id: str, spec: SandboxSpec, now: float, **own: Any) -> Self:
        """Those of one that is asked for now; ``own`` are those that only this kind of engine has."""
        return cls(
            id=id,
            env=str(spec.env),
            owner=spec.owner,
            labels=spec.labels,
            created_at=now,
            ttl=None if spec.lasting else spec.ttl,
            startup_timeout=spec.startup_timeout,
            secrets=spec.secrets,
            volumes=[(one.owner, one.name) for one in spec.volumes],
            second=spec.second.image if spec.second is not None else "",
            **own,
        )


F = TypeVar("F", bound=Facts)


class Live(Generic[F]):
    """From the request, or from when it was found, to its end; and for a while after that."""

    def __init__(self, facts: F, hidden: Hidden | None) -> None:
        self.hidden = hidden
        self.begins(facts)
        self.state = State.CREATING
        self.reason = ""
        self.url = self.boot = ""
        self.stages = Stages()
        self.printed: Printed | None = None
        self.starting: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.facts.id

    def begins(self, facts: F) -> None:
        """This is what is known of it, and its time to live begins then."""
        self.facts = facts
        self.expires_at = facts.created_at + facts.ttl if facts.ttl is not None else None

    def begin(self, start: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start it. How that ends is told to whoever waits for it, if anybody does."""
        self.starting = asyncio.create_task(start)
        self.starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.starting

    @property
    def is_starting(self) -> bool:
        return self.starting is not None and not self.starting.done()

    def require_running(self) -> None:
        if self.state is not State.RUNNING:
            raise SandboxLost(f"{self.id} is {self.state.lower()}{f': {self.reason}' if self.reason else ''}")

    def hide(self, secrets: Mapping[str, str]) -> None:
        """Show the values of these no more."""
        self.hidden = Hidden.of(secrets, secrets)
        if self.hidden is not None and self.printed is not None:
            self.printed.hide(self.hidden)

    def shown(self, text: str) -> str:
        """That without its secrets."""
        return text if self.hidden is None else self.hidden.text(text)

    @property
    def told(self) -> str:
        """What there is to say of its state, secrets and all."""
        return self.reason

    @property
    def sandbox(self) -> Sandbox:
        return Sandbox(
            url=self.url if self.state is State.RUNNING else "",
            id=self.id,
            state=self.state,
            reason=self.shown(self.told),
            env=self.facts.env,
            owner=self.facts.owner,
            labels=self.facts.labels,
            boot=self.boot,
            created_at=self.facts.created_at,
            expires_at=self.expires_at,
            phases=self.stages.seconds,
        )
