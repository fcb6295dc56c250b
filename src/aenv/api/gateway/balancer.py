"""Services: which replica takes a request, and what happens to it when that one is gone.

A request that was not sent, or that only looks, goes to another replica. One that was sent may have run, and is never
run again elsewhere: the replica that has it may be asked again under the call's id, which it knows.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from time import monotonic

from aenv.api.gateway.failures import Busy, SessionGone
from aenv.api.gateway.heads import Head
from aenv.api.gateway.passages import Passage
from aenv.api.gateway.places import Place, Replicas, Services
from aenv.api.gateway.upstream import Pair, Sandbox, Unreachable, Upstream
from aenv.errors import AEnvError, NetworkError, NotFound

NEWS = 2.0
"""Seconds in which somebody may learn what became of a replica that is not to be reached."""
LONGEST = 60.0
"""Most seconds that a request waits for a replica that is starting."""
SHUNNED = 1.0
"""Seconds for which others are asked first, after a replica took no connection."""
UNUSED = 60.0
"""Seconds after which a service that nobody calls is forgotten here."""
MOST_RECENT = 8192
"""Calls of which is known who has them."""


class Crew:
    """A service, and the connections to its replicas."""

    __slots__ = ("_turn", "id", "members", "ready", "replicas", "tokens", "used_at")

    def __init__(self, replicas: Replicas, connections: Callable[[Place], Sandbox], turn: int = 0) -> None:
        self.id = replicas.id
        self.replicas = replicas
        self.tokens = Pair(replicas.token)
        """What opens each of them."""
        self.ready = [connections(place) for place in replicas.ready if place.failure is None]
        leaving = [connections(place) for place in replicas.leaving if place.failure is None]
        self.members = {sandbox.place.id: sandbox for sandbox in (*leaving, *self.ready)}
        """Those, too, that take only calls of their sessions."""
        self.used_at = monotonic()
        self._turn = turn

    def choose(self, tried: Collection[str] = ()) -> Sandbox | None:
        """The ready replica with the fewest calls, among equals the next in turn; one that took no connection lately
        only when there is no other."""
        return self._fewest(tried, shunned=False) or self._fewest(tried, shunned=True)

    def _fewest(self, tried: Collection[str], *, shunned: bool) -> Sandbox | None:
        ready = self.ready
        size, turn = len(ready), self._turn
        best, fewest = None, 0
        for step in range(turn, turn + size):
            sandbox = ready[step % size]
            calls = sandbox.calls
            if best is not None and calls >= fewest:
                continue
            if tried and sandbox.place.id in tried:
                continue
            if not shunned and sandbox.shunned_until and sandbox.shunned_until > monotonic():
                continue
            best, fewest, self._turn = sandbox, calls, (step + 1) % size
            if not calls:
                break
        return best

    @property
    def turn(self) -> int:
        return self._turn


class Balancer:
    """Shares the calls of services out."""

    def __init__(self, services: Services, connections: Callable[[Place], Sandbox]) -> None:
        """``connections`` gives those to a place."""
        self.crews: dict[str, Crew] = {}
        self._services = services
        self._connections = connections
        self._recent: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        """Which replica was sent a call last, by the service and the call's id."""
        self._asking: dict[str, asyncio.Task[Replicas]] = {}

    # Which replica

    def known(self, id: str) -> Crew | None:
        """A service, when nobody must be asked for it."""
        replicas = self._services.known(id)
        if replicas is None:
            return None
        crew = self.crews.get(id)
        return crew if crew is not None and crew.replicas is replicas else self._crew(replicas)

    async def find(self, id: str) -> Crew | None:
        """The same, whomever it takes to ask; None when there is no such service."""
        crew = self.known(id)
        if crew is not None:
            return crew
        try:
            return await self._heard(id, LONGEST)
        except NotFound:
            return None
        except (NetworkError, TimeoutError) as exc:
            raise _busy(exc) from exc

    def share(self, crew: Crew, head: Head, owner_token: str | None) -> Passage | None:
        """The way to a replica that takes the request; None when there is none, as far as is known."""
        head.to_service()
        bound = head.replica
        if bound is None and self._recent and (call_id := head.call_id) is not None:
            bound = self._recent.get((crew.id, call_id))
            if bound is not None and bound not in crew.members and head.method == b"DELETE":
                bound = None  # there is nothing to cancel
        sandbox = crew.choose() if bound is None else crew.members.get(bound)
        if sandbox is None:
            return None
        crew.used_at = monotonic()
        return Passage(sandbox, head, owner_token, crew=crew, is_bound=bound is not None)

    async def passage(self, crew: Crew, head: Head, owner_token: str | None) -> Passage:
        """The same, after asking who else there is."""
        passage = self.share(crew, head, owner_token)
        if passage is not None:
            return passage
        try:
            crew = await self._heard(crew.id, LONGEST)
        except (NetworkError, TimeoutError) as exc:
            raise _busy(exc) from exc
        passage = self.share(crew, head, owner_token)
        if passage is not None:
            return passage
        if head.replica is not None:
            raise _gone()
        if not crew.ready:
            raise _nobody(crew)
        raise _unknown("the replica that was sent this call before is gone")

    def sent(self, passage: Passage) -> None:
        """The request is on its way: whoever speaks of the same call means that replica."""
        call_id = passage.call_id
        if call_id is not None:
            recent = self._recent
            recent[passage.service, call_id] = passage.sandbox.place.id
            if len(recent) > MOST_RECENT:
                recent.popitem(last=False)

    # Connections

    async def connect(self, passage: Passage) -> Upstream:
        """A connection for a request of which nothing was sent: to another replica, where that is needed."""
        crew = passage.crew
        assert crew is not None
        deadline, pause = monotonic() + NEWS, 0.02
        tried: set[str] = set()
        while True:
            sandbox = passage.sandbox
            try:
                upstream = sandbox.take(0) or await sandbox.connect(0)
                crew = passage.crew = self.known(crew.id) or crew
                if not sandbox.is_closed:
                    return upstream
                upstream.give_up()
                failed = Unreachable("it has just left")
            except Unreachable as exc:
                failed = exc
            self.shun(passage)
            tried.add(sandbox.place.id)
            if passage.is_bound or (other := crew.choose(tried)) is None:
                crew = passage.crew = await self._news(crew)
                if passage.is_bound and sandbox.place.id not in crew.members:
                    raise _gone() if passage.is_of_session else _unknown("the replica that has this call is gone")
                other = crew.members[sandbox.place.id] if passage.is_bound else crew.choose(tried)
            if other is None or passage.is_bound:
                if monotonic() > deadline:
                    raise Busy(
                        f"service {crew.id} does not take the call: replica {sandbox.place.id}: {failed.message}",
                        hint="ask again in a moment: nothing ran",
                    )
                await asyncio.sleep(pause)
                pause *= 2
                tried.clear()
                other = other or crew.choose()
            if other is not None:
                passage.move(other)

    async def reconnect(self, passage: Passage, *, only_looks: bool) -> Upstream:
        """A connection after one broke without an answer. When the replica is gone that may have done what was asked,
        raises that this is not known."""
        crew = passage.crew
        assert crew is not None
        self.shun(passage)
        if only_looks and not passage.is_bound:
            if (other := crew.choose((passage.sandbox.place.id,))) is not None:
                passage.move(other)
            return await self.connect(passage)
        id = passage.sandbox.place.id
        deadline, pause = monotonic() + NEWS, 0.02
        lost: AEnvError = _unknown(f"replica {id} of service {crew.id} was lost before it answered")
        if only_looks and passage.is_of_session:
            lost = _gone()
        while True:
            try:
                if not passage.sandbox.is_closed:
                    return await passage.sandbox.connect(0)
            except Unreachable:
                pass
            try:
                crew = passage.crew = await self._news(crew)
            except NotFound as exc:
                raise lost from exc
            if id not in crew.members or monotonic() > deadline:
                raise lost
            passage.move(crew.members[id])
            await asyncio.sleep(pause)
            pause *= 2

    def shun(self, passage: Passage) -> None:
        """A replica was not to be reached, or broke off: leave it alone for a moment, and have somebody look."""
        passage.sandbox.shunned_until = max(passage.sandbox.shunned_until, monotonic() + SHUNNED)
        self._ask(passage.service)

    # News

    def _ask(self, id: str) -> asyncio.Task[Replicas]:
        """Have it found out how a service is: once, however many want to know."""
        task = self._asking.get(id)
        if task is None:
            task = self._asking[id] = asyncio.get_running_loop().create_task(self._asked(id))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting
        return task

    async def _asked(self, id: str) -> Replicas:
        try:
            async with asyncio.timeout(LONGEST):
                replicas = await self._services.find(id)
        finally:
            self._asking.pop(id, None)
        self._crew(replicas)
        return replicas

    async def _heard(self, id: str, patience: float) -> Crew:
        async with asyncio.timeout(patience):
            return self._crew(await asyncio.shield(self._ask(id)))

    async def _news(self, crew: Crew) -> Crew:
        """The service as it is now, if anybody says so soon."""
        try:
            crew = await self._heard(crew.id, NEWS)
        except NotFound as exc:
            raise NotFound(f"service {crew.id} is gone: it was deleted") from exc
        except (NetworkError, TimeoutError):
            return crew
        if isinstance(crew.replicas.failure, NotFound):
            raise crew.replicas.failure.with_traceback(None)
        return crew

    def _crew(self, replicas: Replicas) -> Crew:
        before = self.crews.get(replicas.id)
        if before is not None and (before.replicas is replicas or before.replicas == replicas):
            before.replicas = replicas
            return before
        crew = Crew(replicas, self._connections, before.turn if before is not None else 0)
        self.crews[replicas.id] = crew
        if before is not None:
            for id, sandbox in before.members.items():
                if crew.members.get(id) is not sandbox:
                    sandbox.retire()
        return crew

    def look(self) -> None:
        """Learn who has left, and forget services that nobody calls. Called every now and then."""
        oldest = monotonic() - UNUSED
        for id, crew in list(self.crews.items()):
            if crew.used_at < oldest:
                del self.crews[id]
            else:
                self.known(id)

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()


def _busy(exc: Exception) -> Busy:
    if isinstance(exc, NetworkError):
        return Busy(exc.message, hint=exc.hint)
    return Busy(f"no replica took the call within {LONGEST:g} s", hint="ask again: nothing ran")


def _nobody(crew: Crew) -> AEnvError:
    failure = crew.replicas.failure
    if isinstance(failure, Busy | NotFound):
        return failure.with_traceback(None)
    why = f": {failure.message}" if failure is not None else ""
    hint = (failure.hint if failure is not None else None) or "ask again in a moment: nothing ran"
    return Busy(f"service {crew.id} has no replica that takes calls{why}", hint=hint)


def _gone() -> SessionGone:
    return SessionGone("the replica that had this session is gone", hint="begin a new one: call initialize")


def _unknown(what: str) -> NetworkError:
    return NetworkError(what, hint="whether it did what was asked is not known")
