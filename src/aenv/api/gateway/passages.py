"""The way of one request: to which sandbox, and the head that it goes there with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aenv.api.gateway.failures import Busy
from aenv.api.gateway.heads import Head
from aenv.api.gateway.upstream import Sandbox

if TYPE_CHECKING:
    from aenv.api.gateway.balancer import Crew


class Passage:
    """Where a request goes. It counts as one of the sandbox's calls until it is left."""

    __slots__ = ("_head", "_left", "_owner_token", "crew", "head", "is_bound", "port", "sandbox")

    def __init__(
        self,
        sandbox: Sandbox,
        head: Head,
        owner_token: str | None = None,
        *,
        port: int = 0,
        crew: Crew | None = None,
        is_bound: bool = False,
        with_authorization: bool = True,
    ) -> None:
        self._head = head
        self._owner_token = owner_token
        """What is shown to the sandbox in place of what came."""
        self._left = False
        self.sandbox = sandbox
        self.port = port
        """0 is the sandbox itself."""
        self.crew = crew
        """The service, of which the sandbox is a replica."""
        self.is_bound = is_bound
        """Whether no other replica will do."""
        self.head = head.to_port(with_authorization=with_authorization) if port else self._written()
        sandbox.calls += 1

    @property
    def service(self) -> str:
        return "" if self.crew is None else self.crew.id

    @property
    def is_of_session(self) -> bool:
        return self._head.replica is not None

    @property
    def call_id(self) -> bytes | None:
        """What the sandbox knows the call by, should it be asked for it again."""
        return self._head.headers.get(b"aenv-call-id")

    def move(self, sandbox: Sandbox) -> None:
        """Go to another replica instead."""
        if sandbox is not self.sandbox:
            self.sandbox.calls -= 1
            sandbox.calls += 1
            self.sandbox = sandbox
            self.head = self._written()

    def leave(self) -> None:
        """It is over. Safe to call twice."""
        if not self._left:
            self._left = True
            self.sandbox.calls -= 1

    def _written(self) -> bytes:
        sandbox, head = self.sandbox, self._head
        if not sandbox.is_beyond:
            return head.to_sandbox(sandbox.target.prefix, self._owner_token)
        if b"aenv-hop" in head.headers:
            raise Busy(
                f"instance {sandbox.place.id} is not where another server takes it to be", hint="ask again in a moment"
            )
        hop = b"AEnv-Hop: %b\r\n" % (b"instance" if self.crew is None else b"service")
        return head.to_sandbox(sandbox.target.prefix, self._owner_token, more=hop)
