"""``KubernetesEngine``: the engine contract over pods of one namespace of a cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aenv import config
from aenv.cleanup import finish
from aenv.engines.base import Output
from aenv.engines.inside import Door, InsideEngine
from aenv.engines.kubernetes import manifests, overlays
from aenv.engines.kubernetes.api import Cluster
from aenv.engines.kubernetes.cache import Entry
from aenv.engines.kubernetes.ground import Ground, Traffic
from aenv.engines.kubernetes.live import Live
from aenv.engines.kubernetes.manifests import Site
from aenv.engines.kubernetes.pods import ended
from aenv.engines.kubernetes.starting import GONE, Patience, Starting
from aenv.engines.printed import Printed
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import NAME, Sandbox, SandboxSpec, Second, State
from aenv.runtime.hidden import Hidden

log = logging.getLogger("aenv.engine")
KEPT_FOR = 600.0
"""Seconds that a sandbox is kept after its end, with its reason and what it printed."""
_AGAIN = 5.0
"""Seconds for which whoever asks waits until one that is found again has answered."""
_TICK = 0.5
"""Seconds between two looks whose time is over."""
_SWEEP = 30.0
"""Seconds between two looks for what is over for long enough."""
_LAST = 10.0
"""Seconds in which what an engine that closes has begun must be done."""
_MOST_ENDING = 256
"""Sandboxes whose time is over that are ended at the same time."""
_EXPIRED = "its time to live is over"


class KubernetesEngine(InsideEngine):
    """Each sandbox is a pod.

    The cluster is that of ``kubeconfig`` and ``context``, or the one that this process is in a pod of. ``base_image``
    is for projects that have no image of their own. ``access`` says how pods are reached: at their addresses, which is
    for processes in their network, or by ``tunnel`` through the API server. ``extended`` names what only some nodes
    have that a sandbox may ask for.

    Without ``state`` all sandboxes end when the engine closes. With it, they live on, and other engines of the same
    ``state`` and ``key`` find them, at the same time too: the key is what the engine's own tokens follow from. The
    values of secrets are nowhere in the cluster, so one that found a sandbox hides them only once it is told them by
    ``hide``.
    """

    name = "kubernetes"
    shared = True
    images = True
    cannot: Mapping[str, str] = {
        "used": "a cluster does not tell what a pod has used",
        "datasource": "a pod does not see the directories of this machine",
        "volume-is-full": "how much of a volume is used is a matter of the cluster's storage, which does not tell",
    }

    def __init__(
        self,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        namespace: str | None = None,
        state: str = "",
        key: bytes | None = None,
        base_image: str | None = None,
        templates: str | None = None,
        access: str | None = None,
        extended: Sequence[str] | None = None,
    ) -> None:
        if state and not NAME.fullmatch(state):
            raise Invalid(f"state {state!r} is not a name", hint="use letters, digits, '-', '_' and '.'")
        self._kubeconfig, self._context = kubeconfig, context
        self._namespace: str | None = config.get("namespace", namespace)
        self._state = state
        self._engine = state or f"0{secrets.token_hex(8)}"
        """The label of its pods; that of one whose pods end with it begins with a digit, as nobody's name does."""
        self._key = key or secrets.token_bytes(32)
        self._base_image: str = config.get("base_image", base_image)
        self._templates: str = config.get("pod_templates", templates)
        self._access: str = config.get("pod_access", access)
        if self._access not in ("auto", "direct", "tunnel"):
            raise Invalid(f"pods cannot be reached by {self._access!r}", hint="use auto, direct or tunnel")
        names = config.get("extended_resources", None if extended is None else ",".join(extended))
        self._extended = manifests.extended(names)
        self._live: dict[str, Live] = {}
        self._ground: Ground | None = None
        self._opening = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._clock: asyncio.Task[None] | None = None
        self._ending: set[str] = set()
        """Those whose time is over, and that are on their way out."""

    @property
    def traffic(self) -> Traffic:
        """What it has asked of its cluster, and heard from it, since it opened."""
        return self._ground.traffic if self._ground is not None else Traffic()

    # The four verbs

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        manifests.check(id, spec)
        self.check_second(spec.second)
        self.check_fork(spec.forked_from)
        self.check_resources(spec.resources)
        if not spec.image and not await asyncio.to_thread(os.path.isdir, spec.project):
            raise Invalid(f"{spec.env} has no project directory {spec.project!r}", hint="give one that exists")
        ground = await self._open()
        live = self._live.get(id) or self._adopt(ground, id)
        while live is not None and live.deleting is not None:
            await asyncio.wait((live.deleting,))
            live = self._live.get(id)
        if live is None:
            hidden = Hidden.of(spec.secrets, spec.environment_variables)
            live = self._live[id] = Live(manifests.facts(id, spec, ground.cluster.now()), hidden, found=False)
            live.begin(self._begin(ground, live, spec))
        elif live.state.over:
            raise Conflict(f"{id} has ended: {live.reason}", hint="use another id")
        elif live.state is not State.RUNNING and not live.brings:
            # Who began it may be gone, and nobody else would bring it what it waits for.
            live.brings, live.hidden = True, Hidden.of(spec.secrets, spec.environment_variables)
            before = live.starting
            live.begin(self._begin(ground, live, spec))
            if before is not None:
                before.cancel()
        return await self._started(live)

    async def _started(self, live: Live) -> Sandbox:
        if live.starting is not None:
            try:
                await asyncio.wait((live.starting,))
            except asyncio.CancelledError:
                await finish(self.delete(live.id))
                raise
            if live.starting.cancelled():
                if live.deleting is not None:
                    await asyncio.wait((live.deleting,))
                raise StartFailed(f"{live.id} was removed while it started: {live.reason or 'it was deleted'}")
            live.starting.result()
        return live.sandbox

    async def get(self, id: str) -> Sandbox:
        return (await self._find(id)).sandbox

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        ground = await self._open()
        wanted = (labels or {}).items()
        for entry in ground.cache:
            if entry.facts.id not in self._live and wanted <= entry.facts.labels.items():
                self._adopt(ground, entry.facts.id)
        return [live.sandbox for live in self._live.values() if wanted <= live.facts.labels.items()]

    async def delete(self, id: str) -> None:
        live = self._live.get(id)
        if live is None and (not manifests.NAME.fullmatch(id) or not (self._state or self._ground)):
            return
        ground = await self._open()
        live = live or self._adopt(ground, id)
        if live is None:
            await ground.remove(id)
            return
        if live.deleting is None:
            live.deleting = asyncio.create_task(self._delete(ground, live, "it was deleted"))
            live.deleting.add_done_callback(lambda task: self._deleted(live, task))
        await asyncio.shield(live.deleting)

    async def _delete(self, ground: Ground, live: Live, reason: str, state: State = State.TERMINATED) -> None:
        if live.is_starting and live.starting is not None:
            live.starting.cancel()
            await asyncio.wait((live.starting,))
        live.end(state, reason, ground.cluster.now())
        await live.close()
        await ground.remove(live.id)
        if live.facts.volumes:
            await ground.volumes.leave(live.facts.volumes, live.id)
        self._live.pop(live.id, None)

    def _deleted(self, live: Live, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.warning("%s could not be deleted: %s", live.id, failure)
            live.deleting = None  # who asks again tries again

    async def close(self) -> None:
        ground = self._ground
        if ground is None:
            return
        if self._clock is not None:
            self._clock.cancel()
        try:
            leave = self._leave if self._state else self._end_with
            for failure in await asyncio.gather(*map(leave, list(self._live.values())), return_exceptions=True):
                if isinstance(failure, Exception):
                    log.warning("what could not be ended is left to its time to live: %s", failure)
            if self._background:
                await asyncio.wait(self._background, timeout=_LAST)
        finally:
            for task in list(self._background):
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._live.clear()
            self._ground = None
            await ground.close()

    async def _end_with(self, live: Live) -> None:
        """End one whose engine closes."""
        await self.delete(live.id)

    async def _leave(self, live: Live) -> None:
        """Let one live on. One that this engine starts ends with it: nobody would know what to bring to it."""
        if live.is_starting and live.starting is not None:
            if not live.found:
                await self.delete(live.id)
            live.starting.cancel()
            await asyncio.wait((live.starting,))
        if live.deleting is not None:
            await asyncio.wait((live.deleting,))
        await live.close()

    async def _open(self) -> Ground:
        if self._ground is not None:
            return self._ground
        async with self._opening:
            if self._ground is None:
                cluster = await Cluster.find(self._kubeconfig, self._context)
                site = Site(
                    namespace=self._namespace or cluster.namespace,
                    state=self._engine,
                    base_image=self._base_image,
                    longest=config.get("longest_life"),
                    templates=await asyncio.to_thread(overlays.read, self._templates),
                    direct=cluster.inside if self._access == "auto" else self._access == "direct",
                )
                ground = Ground(cluster, site, self._key, self._heard, lasting=bool(self._state))
                try:
                    await ground.open()
                except BaseException:
                    await finish(ground.close())
                    raise
                self._ground = ground
                self._clock = self._later(self._watch_the_clock(ground))
            return self._ground

    # From a request to a sandbox that runs

    async def _begin(self, ground: Ground, live: Live, spec: SandboxSpec) -> None:
        """Bring it up, or end it with the reason. A cancellation comes from its end, which clears up itself."""
        await self._arrive(ground, live, spec, spec.startup_timeout)

    async def _resume(self, ground: Ground, live: Live) -> None:
        """Wait for one that another engine began to start, or that runs."""
        left = max(live.facts.created_at + live.facts.startup_timeout - ground.cluster.now(), _AGAIN)
        await self._arrive(ground, live, None, left)

    async def _arrive(self, ground: Ground, live: Live, spec: SandboxSpec | None, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                if spec is None:
                    await Starting(ground, live).arrive(None)
                else:
                    await Starting(ground, live, _patience(spec, limit)).bring_up(spec)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            why = f": {live.reason}" if live.reason else await self._last_words(ground, live)
            waits = live.state is State.PENDING
            what = (
                "there was no room for it in all the time it had" if waits else f"it was not ready within {seconds:g} s"
            )
            await self._fail(ground, live, what + why, exc)
        except AEnvError as exc:
            await self._fail(ground, live, exc.message, exc)
        except Exception as exc:  # of this machine, or of an answer that nobody understands: nothing may be left of it
            log.exception("%s did not start", live.id)
            await self._fail(ground, live, f"this machine or the cluster is at fault: {exc!r}", exc)
        live.state, live.reason = State.RUNNING, ""
        live.stages.end()
        self._heard(live.id)

    async def _last_words(self, ground: Ground, live: Live) -> str:
        entry = ground.cache.get(live.id)
        words = await ground.words(live.id, entry.pod) if entry is not None else ""
        return f"; it printed last:\n{words}" if words.strip() else ""

    async def _fail(self, ground: Ground, live: Live, reason: str, cause: Exception) -> None:
        """Keep what is known of a start that failed, and let nothing of it run. What another engine starts, or has
        started, is that one's to end: it may be well, and is looked at anew by whoever asks next."""
        live.end(State.FAILED, reason, ground.cluster.now())
        entry = ground.cache.get(live.id)
        if isinstance(cause, Conflict) or (live.found and not live.brings and not isinstance(cause, SandboxLost)):
            self._live.pop(live.id, None)
            await live.close()
        elif entry is not None and not entry.pod.over:
            self._later(ground.remove(live.id))
        if isinstance(cause, AEnvError) and not isinstance(cause, (SandboxLost, NotFound)):
            raise type(cause)(live.shown(cause.message), hint=cause.hint) from cause
        raise StartFailed(f"{live.id} did not start: {live.sandbox.reason}") from cause

    # From there to its end

    def _heard(self, id: str) -> None:
        """There is news of a pod."""
        live, ground = self._live.get(id), self._ground
        if live is None or ground is None:
            return
        entry = ground.cache.get(id)
        if entry is None:
            if live.state is State.RUNNING and live.deleting is None:
                self._gone(live, ground.cluster.now())
            return
        if live.facts.ttl is not None:
            live.expires_at = entry.expires_at
        if live.state is State.RUNNING and live.deleting is None:
            if entry.pod.over:
                self._later(self._over(ground, live, entry))
            elif entry.pod.going:
                self._gone(live, ground.cluster.now())

    def _gone(self, live: Live, now: float) -> None:
        """Somebody else ended it: another engine because its time was over, or whoever."""
        if live.expires_at is not None and live.expires_at <= now:
            live.end(State.TERMINATED, _EXPIRED, now)
        else:
            live.end(State.FAILED, GONE, now)

    async def _over(self, ground: Ground, live: Live, entry: Entry) -> None:
        """One that ran has ended, or one of its containers has, and nobody asked it to."""
        words = await ground.words(live.id, entry.pod)
        well, reason = ended(entry.pod, entry.facts, words)
        if live.state is not State.RUNNING or live.deleting is not None:
            return
        live.end(State.TERMINATED if well else State.FAILED, reason, ground.cluster.now())
        if entry.pod.status.phase == "Running":  # its other container still does
            with suppress(NotFound):  # without what was printed, which may hold a secret
                await ground.stop(live.id, ended(entry.pod, entry.facts, "")[1])

    async def _watch_the_clock(self, ground: Ground) -> None:
        """End those whose time is over, and forget those that are over for long enough."""
        sweep_at = 0.0
        while True:
            await asyncio.sleep(_TICK)
            now = ground.cluster.now()
            if ground.leads:
                self._end_all(ground, ground.cache.due(now), _EXPIRED)
            if now > sweep_at:
                sweep_at = now + _SWEEP
                old = [live.id for live in self._live.values() if live.state.over and now - live.over_since > KEPT_FOR]
                if ground.leads:
                    old += ground.cache.over_before(now - KEPT_FOR)
                self._end_all(ground, old, "it is over")
                if ground.leads:
                    self._later(self._sweep_others(ground))

    def _end_all(self, ground: Ground, ids: Sequence[str], reason: str) -> None:
        """End these beside everything else: a node that is gone keeps nobody waiting but those on it."""
        for id in ids:
            if id not in self._ending and len(self._ending) < _MOST_ENDING:
                self._ending.add(id)
                self._later(self._end(ground, id, reason))

    async def _end(self, ground: Ground, id: str, reason: str) -> None:
        try:
            live = self._live.get(id) or self._adopt(ground, id)
            if live is not None and not live.state.over and not live.is_starting:
                live.end(State.TERMINATED, reason, ground.cluster.now())
            await self.delete(id)
            if live is not None and reason == _EXPIRED:  # whoever calls it next is told why it is gone
                live.deleting = None
                self._live[id] = live
        finally:
            self._ending.discard(id)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.warning("%s", failure, exc_info=None if isinstance(failure, AEnvError) else failure)

    # Found again

    async def _find(self, id: str) -> Live:
        live = self._live.get(id)
        if live is None and (self._state or self._ground is not None):
            ground = await self._open()
            live = self._adopt(ground, id)
        if live is None:
            raise NotFound(f"there is no sandbox {id!r}")
        if live.found and live.starting is not None and live.is_starting:
            await asyncio.wait((live.starting,), timeout=_AGAIN)
        return live

    def _adopt(self, ground: Ground, id: str) -> Live | None:
        """Take on a pod that another engine of this state made; None when there is none."""
        entry = ground.cache.get(id)
        if entry is None or (entry.pod.going and id not in self._live):
            return None
        live = self._live[id] = Live(entry.facts, None, found=True)
        live.expires_at = entry.expires_at
        if entry.pod.over:
            well, reason = ended(entry.pod, entry.facts, "")
            live.end(State.TERMINATED if well else State.FAILED, reason, entry.pod.over_since or ground.cluster.now())
            live.begin(self._read_words(ground, live, entry))
        elif ground.site.direct and (entry.pod.ready or _has_started(entry, ground.cluster.now())):
            live.state, live.url = State.RUNNING, entry.pod.url
        else:
            live.begin(self._resume(ground, live))
        return live

    async def _read_words(self, ground: Ground, live: Live, entry: Entry) -> None:
        """Add what one printed last that was found at its end."""
        live.reason = ended(entry.pod, entry.facts, await ground.words(live.id, entry.pod))[1]

    async def _sweep_others(self, ground: Ground) -> None:
        """Remove sandboxes of engines that should have removed them when they closed, and did not get to it."""
        now = ground.cluster.now()
        for pod in await ground.others():
            if pod.expires_at is not None and pod.expires_at < now:
                log.info("%s is removed: its time is over, and its engine is gone", pod.name)
                await ground.delete_other(pod)

    # Powers

    def check_second(self, second: Second | None) -> None:
        if second is not None and second.directory:
            raise Unsupported(
                f"the kubernetes engine cannot make a second container from a directory ({second.directory})",
                hint="make an image of it, and give that as the datasource",
            )

    def check_resources(self, resources: Mapping[str, str]) -> None:
        manifests.check_resources(resources, self._extended)

    async def output(self, id: str, start: int) -> Output:
        live = await self._find(id)
        ground = await self._open()
        if live.printed is None:
            live.printed = Printed(ground.log(id), live.hidden)
        return await live.printed.since(start)

    async def update(self, id: str, *, ttl: float) -> Sandbox:
        live = await self._find(id)
        if live.state.over:
            raise SandboxLost(f"{id} has ended: {live.reason}")
        if live.facts.ttl is not None:
            ground = await self._open()
            moment = ground.cluster.now() + ttl
            await ground.set_expiry(id, moment)
            live.expires_at = moment
        return live.sandbox

    async def hide(self, id: str, secrets: Mapping[str, str]) -> None:
        (await self._find(id)).hide(secrets)

    async def _door(self, id: str) -> Door:
        live = await self._find(id)
        live.require_running()
        return Door(id, live.url, (await self._open()).key(id))

    async def volumes(self, owner: str) -> dict[str, int]:
        return await (await self._open()).volumes.of(owner)

    async def delete_volume(self, owner: str, name: str) -> None:
        await (await self._open()).volumes.delete(owner, name)


def _patience(spec: SandboxSpec, limit: asyncio.Timeout) -> Patience | None:
    """What waits for room may do so as long as it would live. A replica may not: its service has to do without it; nor
    may what is made to be warm, which others wait behind."""
    if spec.lasting or spec.warm or spec.ttl is None:
        return None
    return Patience(limit, max(spec.ttl, spec.startup_timeout))


def _has_started(entry: Entry, now: float) -> bool:
    """Whether a pod has run for longer than a start may take: how it is now is for whoever asks it."""
    return entry.pod.runs and now > (entry.pod.runs_since or entry.facts.created_at) + entry.facts.startup_timeout
