"""How a sandbox starts: its pod, what is brought to it, and the first time that it answers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from contextlib import suppress

import msgspec

from aenv import http
from aenv.cleanup import finish
from aenv.engines.kubernetes import manifests, pods
from aenv.engines.kubernetes.api import Full
from aenv.engines.kubernetes.ground import Ground
from aenv.engines.kubernetes.live import Live
from aenv.engines.kubernetes.manifests import MAIN
from aenv.engines.kubernetes.pods import Pod
from aenv.engines.kubernetes.tunnel import PortForward
from aenv.errors import AEnvError, Conflict, Invalid, NetworkError, NotFound, SandboxLost, StartFailed, TooLarge
from aenv.models import SandboxSpec, State
from aenv.runtime import delivery
from aenv.runtime.warm import UNFIT

log = logging.getLogger("aenv.engine")
_FIRST, _LONGEST = 0.005, 0.1
"""Seconds between two looks whether it answers."""
_HEALTH = 10.0
"""Seconds in which a sandbox must say how it is."""
_MOST_HEALTH = 64 * 1024
_BRINGING = 300.0
"""Seconds that bringing a project may take."""
_PULLING = 15.0
"""Seconds for which an image may be not to be had: a registry that restarts is asked a few times."""
_ROOM, _LONGEST_ROOM = 1.0, 5.0
"""Seconds, about, after which a quota that left no room is tried again."""
_NOT_YET = 503
_SERVING = (401, 403, 404, 409)
"""What a runtime answers that has been brought all it needs."""
GONE = "its pod was deleted, and not by this engine: its node was drained, or somebody deleted it"


class Patience:
    """The time that a start may take. It stands still while the cluster has no room, though not for ever."""

    def __init__(self, limit: asyncio.Timeout, longest: float) -> None:
        self._limit, self._longest = limit, longest
        self._left = 0.0
        self.holds = False

    def hold(self) -> None:
        now = asyncio.get_running_loop().time()
        self._left = (self._limit.when() or now) - now
        self._limit.reschedule(now + self._left + self._longest)
        self.holds = True

    def go_on(self) -> None:
        now = asyncio.get_running_loop().time()
        self._longest = (self._limit.when() or now) - now - self._left
        self._limit.reschedule(now + self._left)
        self.holds = False


class Starting:
    """One start."""

    def __init__(self, ground: Ground, live: Live, patience: Patience | None = None) -> None:
        """Without ``patience``, the time that it waits for room is time that it takes."""
        self._ground, self._live, self._patience = ground, live, patience
        self._pulling_since = 0.0

    async def bring_up(self, spec: SandboxSpec) -> None:
        """From a spec to a sandbox that is healthy."""
        ground, live = self._ground, self._live
        live.stages.begin("project")
        project = b"" if spec.image else await ground.package(spec.project, spec.stamp)
        sees = (spec.image or ground.site.base_image, hashlib.sha256(project).hexdigest())
        if sees in ground.bare:
            spec = msgspec.structs.replace(spec, preload=False)
        content = delivery.pack(manifests.brought(spec), project)
        await ground.have_network(spec.network)
        if spec.volumes:
            await self._make_with_volumes(spec)
        else:
            await self._make(spec)
        try:
            await self.arrive(content)
        except AEnvError:
            if not self._is_unfit(spec):
                raise
            log.info("%s begins again: its project must not be imported before there is an instance", live.id)
            ground.bare.add(sees)
            await finish(ground.remove(live.id))
            bare = msgspec.structs.replace(spec, preload=False)
            await self._make(bare)
            await self.arrive(delivery.pack(manifests.brought(bare), project))

    async def _make_with_volumes(self, spec: SandboxSpec) -> None:
        self._live.stages.begin("volumes")
        is_made = False
        try:
            async with self._ground.volumes.taken(spec.volumes, self._live.id):
                await self._make(spec)
                is_made = True
        except Conflict:
            if is_made:  # and another one has its volumes
                await finish(self._ground.remove(self._live.id))
            raise

    async def _make(self, spec: SandboxSpec) -> None:
        """Have its pod made, once a quota leaves room for that."""
        ground, live = self._ground, self._live
        live.stages.begin("create")
        pause = _ROOM
        while True:
            try:
                await ground.make(spec, live.facts)
                break
            except Conflict:
                if await self._take_over():
                    break
            except Full as exc:
                self._wait_for_room(exc.message)
                await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311
                pause = min(pause * 1.3, _LONGEST_ROOM)
                live.begins(manifests.facts(live.id, spec, ground.cluster.now()))
        live.reason = ""
        self._has_room()

    def _wait_for_room(self, reason: str) -> bool:
        """Stand still, and say why; whether it only begins to."""
        live, patience = self._live, self._patience
        live.reason = reason
        if patience is None or patience.holds:
            return False
        patience.hold()
        live.state = State.PENDING
        live.stages.begin("room")
        return True

    def _has_room(self) -> bool:
        """Go on; whether it had stood still."""
        live, patience = self._live, self._patience
        if patience is None or not patience.holds:
            return False
        patience.go_on()
        live.state = State.CREATING
        live.stages.begin("schedule")
        return True

    async def _take_over(self) -> bool:
        """Its name is taken. By one that another engine of this state made: then that is it. False when it is free by
        now: who has it was about to leave."""
        ground, live = self._ground, self._live
        try:
            pod = await ground.look(live.id)
        except NotFound:
            return False
        known = pods.facts_of(pod)
        if known is None or pod.state != ground.site.state:
            raise Conflict(f"the name {live.id} is taken by a pod that is none of this engine's", hint="use another id")
        if pod.going:
            await finish(ground.remove(live.id))
            return False
        if pod.over:
            raise Conflict(f"{live.id} has ended", hint="use another id")
        ground.cache.note(pod)
        live.facts, live.found, live.expires_at = known, True, pod.expires_at
        return True

    def _is_unfit(self, spec: SandboxSpec) -> bool:
        if not spec.warm or spec.preload != "auto":
            return False
        entry = self._ground.cache.get(self._live.id)
        end = entry.pod.end_of(MAIN) if entry is not None else None
        return end is not None and end.exit_code == UNFIT

    async def arrive(self, content: bytes | None) -> None:
        """From a pod that was asked for to one that is healthy. ``content`` is brought to it; None when somebody else
        has done that, or does."""
        live = self._live
        live.stages.begin("schedule")
        url = await self._way(await self._address())
        live.stages.begin("image" if not self._runs() else "boot")
        if content is not None:
            await self._bring(url, content)
        live.stages.begin("import")
        await self._healthy(url)
        live.url = url

    async def _address(self) -> str:
        """Where it is, once a node has taken it."""
        while True:
            pod = await self._alive()
            await self._mind_room(pod)
            if pod.url:
                return pod.url
            await self._ground.cache.changed(self._live.id, 1.0)

    async def _mind_room(self, pod: Pod) -> None:
        """While no node has room, its time to live does not run: it begins when one has."""
        known = self._live.facts
        if pods.lacks_room(pod):
            if self._wait_for_room(self._live.reason) and known.ttl is not None:
                await self._live_for(max(known.ttl, known.startup_timeout) + known.startup_timeout)
        elif self._has_room() and known.ttl is not None:
            await self._live_for(known.ttl)

    async def _live_for(self, seconds: float) -> None:
        moment = self._ground.cluster.now() + seconds
        with suppress(NotFound, NetworkError):  # then the next look at its pod tells, or it has the time that it had
            await self._ground.set_expiry(self._live.id, moment)
            self._live.expires_at = moment

    async def _way(self, address: str) -> str:
        """How it is reached from here."""
        ground, live = self._ground, self._live
        if ground.site.direct:
            return address
        if live.tunnel is None:
            path = ground.socket(live.id)
            live.tunnel = PortForward(ground.cluster, ground.site.namespace, live.id, path)
            await live.tunnel.open()
        return live.tunnel.url

    async def _bring(self, url: str, content: bytes) -> None:
        """Bring it what it waits for, as soon as it does."""
        live = self._live
        headers = f"Authorization: Bearer {self._ground.key(live.id)}\r\n".encode()
        pause, perhaps = _FIRST, live.found
        while True:
            await self._alive()
            try:
                async with asyncio.timeout(_BRINGING):
                    answer = await http.request(
                        "PUT", url, delivery.PATH, headers=headers, body=content, retries=0, most=_MOST_HEALTH
                    )
            except http.NotSent:
                answer = None
            except (NetworkError, TimeoutError, TooLarge):
                answer, perhaps = None, True
            if answer is not None and answer.status != _NOT_YET:
                said = answer.body[:500].decode(errors="replace")
                # Another engine of this state may have been faster.
                if answer.status == 200 or delivery.ALREADY in said or (answer.status in _SERVING and perhaps):
                    return
                if answer.status in _SERVING:
                    hint = "build the image with this version of aenvironment"
                    raise StartFailed("the runtime in the image takes no delivery, so it is an older one", hint=hint)
                raise Invalid(f"the sandbox refused what it was brought: {said}")
            await self._nap(pause)
            pause = min(pause * 1.3, _LONGEST)

    async def _healthy(self, url: str) -> None:
        live = self._live
        pause = _FIRST
        while True:
            await self._alive()
            try:
                async with asyncio.timeout(_HEALTH):
                    answer = await http.request("GET", url, "/health", retries=0, most=_MOST_HEALTH)
            except (NetworkError, TimeoutError, TooLarge):
                answer = None
            if answer is not None:
                live.stages.begin("health")
                if answer.status == 200:
                    live.boot = answer.headers.get(b"aenv-boot", b"").decode("latin-1")
                    return
            await self._nap(pause)
            pause = min(pause * 1.2, _LONGEST)

    async def _nap(self, seconds: float) -> None:
        """A pause, which news of its pod end."""
        await self._ground.cache.changed(self._live.id, seconds)

    def _runs(self) -> bool:
        entry = self._ground.cache.get(self._live.id)
        found = entry.pod.container(MAIN) if entry is not None else None
        return found is not None and found.state.running is not None

    async def _alive(self) -> Pod:
        """Its pod; raises when that has ended, or will never run."""
        entry = self._ground.cache.get(self._live.id)
        if entry is None:
            raise SandboxLost(GONE)
        pod = entry.pod
        if pod.over:
            raise SandboxLost(await why(self._ground, pod, entry.facts))
        if pod.going:
            raise SandboxLost(GONE)
        self._live.reason = pods.stalled(pod)
        if not pods.pulls_in_vain(pod):
            self._pulling_since = 0.0
        elif not self._pulling_since:
            self._pulling_since = time.monotonic()
        if pods.hopeless(pod) or (self._pulling_since and time.monotonic() - self._pulling_since > _PULLING):
            raise StartFailed(self._live.reason)
        return pod


async def why(ground: Ground, pod: Pod, known: manifests.Facts) -> str:
    """Why a sandbox ended, in words for a person."""
    return pods.ended(pod, known, await ground.words(pod.name, pod))[1]
