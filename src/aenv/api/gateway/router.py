"""Where a request goes: the instance it names, whether its caller may use it, and the head it goes there with."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from aenv.api.gateway.exposed import Exposed, Names
from aenv.api.gateway.failures import Busy
from aenv.api.gateway.heads import Head
from aenv.api.gateway.places import Directory, Place
from aenv.api.gateway.upstream import Idle, Sandbox, Unreachable, Upstream, opens
from aenv.auth.callers import Caller, Scope
from aenv.errors import NetworkError, NotFound, NotServed, SandboxLost, Unauthorized, Unsupported
from aenv.runtime.access import Hosts

NEWS = 2.0
"""Seconds in which somebody may learn why a sandbox is not there any more."""
MOST_FORGOTTEN = 256
"""Sandboxes to which nothing is open that are remembered."""
_MOST_NAMES = 256


class Passage(NamedTuple):
    """The way of a request."""

    sandbox: Sandbox
    port: int
    """0 is the sandbox itself."""
    head: bytes


class Router:
    """Finds the way for a request."""

    def __init__(self, directory: Directory, hosts: Hosts, names: Names, *, legacy: bool) -> None:
        self.directory = directory
        self.sandboxes: dict[str, Sandbox] = {}
        self.idle = Idle()
        self._hosts = hosts
        self._names = names
        self._legacy = legacy
        self._plain: set[bytes] = set()
        """Names that are no exposed port's; a client sends the same one every time."""

    def is_exposed(self, head: Head) -> bool:
        """Whether a request came to the name of an exposed port."""
        host = head.headers.get(b"host", b"")
        if host in self._plain:
            return False
        if self._names.matches(host):
            return True
        if len(self._plain) < _MOST_NAMES:
            self._plain.add(host)
        return False

    def wanted(self, head: Head, *, exposed: bool) -> Exposed | None:
        """The instance and port that a request is for; ``None`` when it asks after the gateway's own health."""
        if exposed:
            return self._names.read(head.headers[b"host"], time.time())
        self._hosts.check_host(head)
        id = head.address()
        if id is not None:
            return Exposed(id, 0)
        if head.path == b"/health" and head.method in (b"GET", b"HEAD"):
            return None
        if head.for_a_service:
            raise Unsupported("services are not served here yet")
        raise NotServed(
            f"{head.path.decode('latin-1')} is not served on the data port",
            hint="name an instance: /env-instance/<id>/..., or the header AEnvCore-EnvInstance-ID",
        )

    def at_once(self, wanted: Exposed, head: Head) -> Passage | None:
        """The way, when nobody must be asked for it: for every call but the first with a platform's token."""
        place = None if wanted.port else self.directory.known(wanted.id)
        if place is None or place.failure is not None:
            return None
        sandbox = self.sandbox(place)
        token, _ = head.token()
        if token is not None and sandbox.opens(token):
            return Passage(sandbox, 0, head.to_sandbox(sandbox.target.prefix, None))
        if token is None and self._legacy:
            return Passage(sandbox, 0, head.to_sandbox(sandbox.target.prefix, place.token))
        return None

    async def find(self, wanted: Exposed, head: Head) -> Passage:
        """The way, whomever it takes to ask."""
        if wanted.port:
            return await self._to_port(wanted, head)
        token, in_url = head.token()
        if token == "" or (token is None and not self._legacy):
            raise Unauthorized(
                "an instance is used with a token",
                hint="send it as 'Authorization: Bearer ...'; clients that cannot need --legacy-data-plane",
            )
        place = await self._place(wanted.id)
        owner_token = None
        if token is None:
            owner_token = place.token if place is not None else None
        elif place is None or not opens(place, token):
            place = await self._allowed(place, token, in_url=in_url)
            owner_token = place.token if place is not None else None
        if place is None:
            raise NotFound(f"there is no instance {wanted.id!r}", hint="it may have ended, or be another owner's")
        if place.failure is not None:
            raise place.failure.with_traceback(None)
        sandbox = self.sandbox(place)
        return Passage(sandbox, 0, head.to_sandbox(sandbox.target.prefix, owner_token))

    async def _allowed(self, place: Place | None, token: str, *, in_url: bool) -> Place | None:
        """The place, if the owner of this platform token may go there. What others may not use does not exist."""
        if in_url:
            raise Unauthorized("the token in this URL is not the instance's", hint="ask for a new URL")
        caller = await self._asked_caller(token)
        caller.require(Scope.RUN)
        return place if place is not None and caller.owns(place.owner) else None

    async def _to_port(self, wanted: Exposed, head: Head) -> Passage:
        place = await self._place(wanted.id)
        if place is None:
            raise NotFound("the instance behind this address is gone")
        if place.failure is not None:
            raise place.failure.with_traceback(None)
        sandbox = self.sandbox(place)
        token, _ = head.token()
        ours = token and (sandbox.opens(token) or await self._is_caller(token))
        return Passage(sandbox, wanted.port, head.to_port(with_authorization=not ours))

    async def _is_caller(self, token: str) -> bool:
        try:
            await self._asked_caller(token)
        except Unauthorized:
            return False
        return True

    async def _asked_caller(self, token: str) -> Caller:
        try:
            return await self.directory.caller(token)
        except NetworkError as exc:
            raise Busy(exc.message, hint=exc.hint) from exc

    async def _place(self, id: str) -> Place | None:
        place = self.directory.known(id)
        if place is not None:
            return place
        try:
            return await self.directory.place(id)
        except NotFound:
            return None
        except NetworkError as exc:
            raise Busy(exc.message, hint=exc.hint) from exc

    def sandbox(self, place: Place) -> Sandbox:
        """The connections to a place."""
        found = self.sandboxes.get(place.id)
        if found is None or (found.place is not place and found.place != place):
            if found is not None:
                found.close()
            found = self.sandboxes[place.id] = Sandbox(place, self.idle)
        return found

    async def connect(self, sandbox: Sandbox, port: int) -> Upstream:
        """A new connection. When there is none to be had, raises the reason, if anybody learns it soon."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + NEWS, 0.02
        while True:
            try:
                return await sandbox.connect(port)
            except Unreachable as exc:
                failed = exc
            place = await self._news(sandbox)
            if loop.time() > deadline:
                raise SandboxLost(f"instance {place.id} is gone: {failed.message}")
            sandbox = self._moved(sandbox, place)
            await asyncio.sleep(pause)
            pause *= 2

    async def reconnect(self, sandbox: Sandbox, port: int) -> Upstream:
        """A new connection after one broke. Raises what became of the instance, if that is known."""
        return await self.connect(self._moved(sandbox, await self._news(sandbox)), port)

    def _moved(self, sandbox: Sandbox, place: Place) -> Sandbox:
        """The sandbox at the place where its instance is now; what was written for the old one must fit there."""
        found = self.sandbox(place)
        if found.target.prefix != sandbox.target.prefix:
            raise Busy(f"instance {place.id} has moved", hint="ask again")
        return found

    async def _news(self, sandbox: Sandbox) -> Place:
        """Where an instance is whose connection broke. Raises what became of it."""
        id = sandbox.place.id
        try:
            async with asyncio.timeout(NEWS):
                place = await self.directory.place(id)
        except NotFound as exc:
            raise SandboxLost(f"instance {id} is gone: it was deleted") from exc
        except (NetworkError, TimeoutError):
            return sandbox.place
        if place.failure is not None:
            raise place.failure.with_traceback(None)
        return place

    def expire(self, now: float) -> None:
        """Close what nobody has used for long, and forget where nobody goes."""
        self.idle.expire(now)
        if len(self.sandboxes) > MOST_FORGOTTEN:
            self.sandboxes = {id: sandbox for id, sandbox in self.sandboxes.items() if sandbox.open}
