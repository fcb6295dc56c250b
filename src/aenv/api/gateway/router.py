"""Where a request goes: the instance or service it names, and whether its caller may use it."""

from __future__ import annotations

import asyncio
import time

from aenv.api.gateway.balancer import Balancer
from aenv.api.gateway.exposed import Names
from aenv.api.gateway.failures import Busy
from aenv.api.gateway.heads import Address, Head
from aenv.api.gateway.passages import Passage
from aenv.api.gateway.places import Directory, Place, Replicas, Services
from aenv.api.gateway.upstream import Idle, Pair, Sandbox, Unreachable, Upstream
from aenv.auth.callers import Caller, Scope
from aenv.errors import NetworkError, NotFound, NotServed, SandboxLost, Unauthorized, Unsupported
from aenv.runtime.access import Hosts

NEWS = 2.0
"""Seconds in which somebody may learn why a sandbox is not there any more."""
MOST_FORGOTTEN = 256
"""Sandboxes to which nothing is open that are remembered."""
_MOST_NAMES = 256
_CARD = b"/agent-card.json"
"""How the path of a document ends that says where an agent is reached."""


class Router:
    """Finds the way for a request."""

    def __init__(
        self,
        directory: Directory,
        hosts: Hosts,
        names: Names,
        *,
        legacy: bool = False,
        open: bool = False,
        url: str = "",
        services: Services | None = None,
    ) -> None:
        """``open``: the tokens of sandboxes are not known here, and each judges by itself who comes. ``url`` is how
        clients reach us."""
        self.directory = directory
        self.balancer = None if services is None else Balancer(services, self.sandbox)
        self.sandboxes: dict[str, Sandbox] = {}
        self.idle = Idle()
        self._hosts = hosts
        self._names = names
        self._legacy = legacy
        self._url = url.rstrip("/")
        self._open = open
        self.draining = False
        """Whether this server is about to end: whoever asks after its health is told so, and sends it no more."""
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

    def wanted(self, head: Head, *, exposed: bool) -> Address | None:
        """What a request is for; ``None`` when it asks after the gateway's own health."""
        if exposed:
            return Address(*self._names.read(head.headers[b"host"], time.time()))
        self._hosts.check_host(head)
        address = head.address()
        if address is not None:
            if address.is_service and self.balancer is None:
                raise Unsupported("services are not served here")
            if head.path.endswith(_CARD):
                head.base = self._base(address, head)
            return address
        if head.path == b"/health" and head.only_looks:
            if self.draining:
                raise Busy("this server is about to end", hint="ask another one, or again in a moment")
            return None
        raise NotServed(
            f"{head.path.decode('latin-1')} is not served on the data port",
            hint="name an instance: /env-instance/<id>/..., or the header AEnvCore-EnvInstance-ID",
        )

    def _base(self, address: Address, head: Head) -> bytes:
        """Where the client sees the sandbox: as the server says that it asked first, if it asked another one."""
        if b"aenv-hop" in head.headers:
            return head.headers.get(b"aenv-base", b"")
        url = self._url or f"http://{head.headers[b'host'].decode('latin-1')}"
        return f"{url}/{'env-service' if address.is_service else 'env-instance'}/{address.id}".encode("latin-1")

    def at_once(self, wanted: Address, head: Head) -> Passage | None:
        """The way, when nobody must be asked for it: for every call but the first with a platform's token."""
        if wanted.is_service:
            return self._service_at_once(wanted.id, head)
        place = None if wanted.port else self.directory.known(wanted.id)
        if place is None or place.failure is not None:
            return None
        sandbox = self.sandbox(place)
        if self._open:
            return Passage(sandbox, head)
        token, _ = head.token()
        if token is not None and sandbox.tokens.has(token):
            return Passage(sandbox, head)
        if token is None and self._legacy:
            return Passage(sandbox, head, place.token)
        return None

    def _service_at_once(self, id: str, head: Head) -> Passage | None:
        assert self.balancer is not None
        crew = self.balancer.known(id)
        if crew is None:
            return None
        token, _ = head.token()
        if token is not None and crew.tokens.has(token):
            return self.balancer.share(crew, head, None)
        if token is None and self._legacy:
            return self.balancer.share(crew, head, crew.replicas.token)
        return None

    async def find(self, wanted: Address, head: Head) -> Passage:
        """The way, whomever it takes to ask."""
        if wanted.port:
            return await self._to_port(wanted, head)
        what = "service" if wanted.is_service else "instance"
        if self._open:
            if (found := await self._place(wanted.id)) is None:
                raise NotFound(f"there is no sandbox {wanted.id!r}", hint="it may have ended")
            return self._to(found, head)
        token, in_url = head.token()
        if token == "" or (token is None and not self._legacy):
            raise Unauthorized(
                f"{'a' if wanted.is_service else 'an'} {what} is used with a token",
                hint="send it as 'Authorization: Bearer ...'; clients that cannot need --legacy-data-plane",
            )
        if wanted.is_service:
            assert self.balancer is not None
            crew = await self.balancer.find(wanted.id)
            replicas = None if crew is None else crew.replicas
            owner_token = await self._shown(replicas, token, in_url=in_url)
            if crew is not None and owner_token is not None:
                return await self.balancer.passage(crew, head, owner_token or None)
        else:
            place = await self._place(wanted.id)
            owner_token = await self._shown(place, token, in_url=in_url)
            if place is not None and owner_token is not None:
                return self._to(place, head, owner_token or None)
        raise NotFound(f"there is no {what} {wanted.id!r}", hint="it may have ended, or be another owner's")

    def _to(self, place: Place, head: Head, owner_token: str | None = None) -> Passage:
        if place.failure is not None:
            raise place.failure.with_traceback(None)
        return Passage(self.sandbox(place), head, owner_token)

    async def _shown(self, there: Place | Replicas | None, token: str | None, *, in_url: bool) -> str | None:
        """The token that is shown to the sandbox in place of this one; empty when it is this one, None for who may not
        use what is there. What others may not use does not exist."""
        if token is None:
            return None if there is None else there.token
        if there is not None and Pair(there.token).has(token):
            return ""
        if in_url:
            raise Unauthorized("the token in this URL is not the instance's", hint="ask for a new URL")
        caller = await self._asked_caller(token)
        caller.require(Scope.RUN)
        return there.token if there is not None and caller.owns(there.owner) else None

    async def _to_port(self, wanted: Address, head: Head) -> Passage:
        place = await self._place(wanted.id)
        if place is None:
            raise NotFound("the instance behind this address is gone")
        if place.failure is not None:
            raise place.failure.with_traceback(None)
        sandbox = self.sandbox(place)
        token, _ = head.token()
        ours = token and (sandbox.tokens.has(token) or await self._is_caller(token))
        return Passage(sandbox, head, port=wanted.port, with_authorization=not ours)

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
        if found is not None and not found.is_closed:
            if found.place is place:
                return found
            if found.place.url == place.url and found.place.token == place.token:
                found.place = place
                return found
            found.close()
        found = self.sandboxes[place.id] = Sandbox(place, self.idle)
        return found

    async def connect(self, passage: Passage) -> Upstream:
        """A connection for a request of which nothing was sent. When there is none to be had, raises the reason, if
        anybody learns it soon."""
        if passage.crew is not None:
            assert self.balancer is not None
            return await self.balancer.connect(passage)
        return passage.sandbox.take(passage.port) or await self._connect(passage.sandbox, passage.port)

    async def _connect(self, sandbox: Sandbox, port: int) -> Upstream:
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + NEWS, 0.02
        while True:
            try:
                return await sandbox.connect(port)
            except Unreachable as exc:
                failed = exc
            place = await self._news(sandbox)
            if loop.time() > deadline:
                if sandbox.is_beyond:  # whoever passes on to it is not there, which says nothing of the sandbox
                    raise Busy(f"instance {place.id} cannot be reached: {failed.message}", hint="ask again in a moment")
                raise SandboxLost(f"instance {place.id} is gone: {failed.message}")
            sandbox = self._moved(sandbox, place)
            await asyncio.sleep(pause)
            pause *= 2

    async def reconnect(self, passage: Passage, *, only_looks: bool) -> Upstream:
        """A new connection after one broke. Raises what became of the instance, if that is known."""
        if passage.crew is not None:
            assert self.balancer is not None
            return await self.balancer.reconnect(passage, only_looks=only_looks)
        sandbox = passage.sandbox
        return await self._connect(self._moved(sandbox, await self._news(sandbox)), passage.port)

    def sent(self, passage: Passage) -> None:
        """A service's request is on its way."""
        if self.balancer is not None:
            self.balancer.sent(passage)

    def broke(self, passage: Passage) -> None:
        """A service's replica broke off, and is not asked again."""
        if self.balancer is not None:
            self.balancer.shun(passage)

    def moved(self, passage: Passage | None) -> bool:
        """Whether a service's request goes to another replica, since this one got nothing of it."""
        if passage is None or passage.crew is None:
            return False
        self.broke(passage)
        other = None if passage.is_bound else passage.crew.choose((passage.sandbox.place.id,))
        if other is not None:
            passage.move(other)
        return other is not None

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
        if self.balancer is not None:
            self.balancer.look()
        if len(self.sandboxes) > MOST_FORGOTTEN:
            crews = self.balancer.crews.values() if self.balancer is not None else ()
            members = {id for crew in crews for id in crew.members}
            self.sandboxes = {id: sandbox for id, sandbox in self.sandboxes.items() if sandbox.open or id in members}

    def close(self) -> None:
        """Cut every connection."""
        if self.balancer is not None:
            self.balancer.close()
        for sandbox in self.sandboxes.values():
            sandbox.close()
        self.sandboxes.clear()
