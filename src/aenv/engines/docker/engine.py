"""``DockerEngine``: the engine contract over containers of one daemon, Docker's or Podman's."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from aenv import config
from aenv.cleanup import finish
from aenv.engines.base import Output, Used
from aenv.engines.docker import containers, volumes
from aenv.engines.docker import second as beside
from aenv.engines.docker.containers import ENGINE, ID, SECOND
from aenv.engines.docker.host import Host
from aenv.engines.docker.images import present
from aenv.engines.docker.live import Live
from aenv.engines.docker.starting import Starting, Taken
from aenv.engines.inside import Door, InsideEngine
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import NAME, Sandbox, SandboxSpec, Second, State
from aenv.runtime.hidden import Hidden

log = logging.getLogger("aenv.engine")
KEPT_FOR = 600.0
"""Seconds that a sandbox is kept after its end, with its reason and what it printed."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_AGAIN = 5.0
"""Seconds for which whoever asks waits until one that is found again has answered."""
_RETRY = 30.0
"""Seconds after which it is tried again to remove what could not be removed."""
_LOOK = 1.0
"""Seconds between two looks at how full the volumes of a sandbox are."""
_WEIGH = 10.0
"""Seconds between two looks at what a second container has written, where the daemon does not limit that."""


class DockerEngine(InsideEngine):
    """Each sandbox is a container.

    ``address`` is the daemon's; without one it is looked for. ``base_image`` is for projects that have no image of
    their own. ``runtime`` is one of the daemon's, such as ``runsc``. Without ``state`` all sandboxes end with this
    process, however it ends. With it, they live on when the engine closes, and another engine of the same ``state``
    finds them again.
    """

    name = "docker"
    images = True

    @property
    def cannot(self) -> Mapping[str, str]:  # type: ignore[override]
        """What depends on how this engine was made, and on where."""
        lacks: dict[str, str] = {}
        if not self._state:
            lacks["restart"] = "without a state, sandboxes end with the engine that made them"
        if why := volumes.missing():
            lacks["volumes"] = why
        return lacks

    def __init__(
        self, *, address: str | None = None, state: str = "", base_image: str | None = None, runtime: str = ""
    ) -> None:
        if state and not NAME.fullmatch(state):
            raise Invalid(f"state {state!r} is not a name", hint="use letters, digits, '-', '_' and '.'")
        self._address, self._state = address, state
        self._runtime: str = config.get("docker_runtime", runtime or None)
        self._base_image: str = config.get("base_image", base_image)
        self._engine = state or f"_{secrets.token_hex(6)}"
        self._live: dict[str, Live] = {}
        self._host: Host | None = None
        self._opening = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    # The four verbs

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        if not _ID.fullmatch(id):
            raise Invalid(f"{id!r} is not an id", hint="use letters, digits, '-', '_' and '.', at most 128")
        self.check_second(spec.second)
        self.check_fork(spec.forked_from)
        self.check_resources(spec.resources)
        containers.check(spec)
        _check_project(spec)
        host = await self._open()
        if self._state and id not in self._live:
            await self._adopt(host, id)
        while (live := self._live.get(id)) is not None and live.ending is not None and not live.ending.done():
            await asyncio.wait((live.ending,))
        if live is None:
            hidden = Hidden.of(spec.secrets, spec.environment_variables)
            known = containers.facts(id, spec, time.time())
            live = self._live[id] = Live(self._engine, known, hidden)
            live.begin(self._begin(host, live, spec))
        elif live.state.over:
            raise Conflict(f"{id} has ended: {live.reason}", hint="use another id")
        return await self._started(live)

    async def _started(self, live: Live) -> Sandbox:
        if live.starting is not None:
            try:
                await asyncio.wait((live.starting,))
            except asyncio.CancelledError:
                await finish(self.delete(live.id))
                raise
            if live.starting.cancelled():
                if live.ending is not None:
                    await asyncio.wait((live.ending,))
                if not live.state.over:
                    raise StartFailed(f"{live.id} had not answered when the engine was closed, and lives on")
                raise StartFailed(f"{live.id} was removed while it started: {live.reason}")
            live.starting.result()
        return live.sandbox

    async def get(self, id: str) -> Sandbox:
        return (await self._find(id)).sandbox

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        host = await self._open()
        rows = [row for row in await host.listed() if row["Labels"].get(ID) not in self._live]
        await asyncio.gather(*(self._adopt(host, row["Labels"].get(ID, "")) for row in rows))
        wanted = (labels or {}).items()
        return [live.sandbox for live in self._live.values() if wanted <= live.facts.labels.items()]

    async def delete(self, id: str) -> None:
        live = self._live.get(id)
        if live is not None:
            await asyncio.shield(self._end(live, State.TERMINATED, "it was deleted"))
            self._live.pop(id, None)
            live.disarm()
            if not live.removed and (live.asked or self._state):
                await (await self._open()).clear(id, second=live.second is not None or not live.asked)
        elif _ID.fullmatch(id) and (self._state or self._host is not None):
            await (await self._open()).clear(id, second=True)

    async def close(self) -> None:
        if self._state:
            for live in list(self._live.values()):
                if live.starting is not None and not live.starting.done():
                    if live.found:
                        live.starting.cancel()
                    else:  # nobody would know that it is there
                        self._end(live, State.TERMINATED, "its engine was closed")
                    await asyncio.wait((live.starting,))
                if live.ending is not None:
                    await asyncio.wait((live.ending,))
                await live.close()
                if self._host is not None:
                    self._host.storage.leave(live.volumes)
        else:
            await asyncio.gather(*(self.delete(id) for id in list(self._live)))
        self._live.clear()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        host, self._host = self._host, None
        if host is not None:
            await host.close()

    async def _open(self) -> Host:
        async with self._opening:
            if self._host is None:
                self._host = await Host.open(
                    self._address, self._engine, lasting=bool(self._state), runtime=self._runtime
                )
                self._host.watch(self._heard, self._look_again)
                self._later(self._sweep(self._host))
            return self._host

    async def prepare(self, spec: SandboxSpec) -> bool:
        containers.check(spec)
        _check_project(spec)
        host = await self._open()
        image = await present(host.daemon, spec.image or self._base_image)
        if spec.second is not None and spec.second.image:
            await present(host.daemon, spec.second.image)
        if not spec.image:
            await host.projects.keeper(spec.project, spec.stamp, image)
        return True

    # From a request to a sandbox that runs

    async def _begin(self, host: Host, live: Live, spec: SandboxSpec) -> None:
        """Bring it up, or end it with the reason. A cancellation comes from its end, which clears up itself."""
        start = Starting(host, live, self._base_image)
        try:
            await self._arrive(host, live, start.bring_up(spec), spec.startup_timeout)
        except Taken:
            await self._resume(host, live)

    async def _resume(self, host: Host, live: Live) -> None:
        """Go on with one that another engine began to start, or that runs."""
        await self._arrive(host, live, Starting(host, live, self._base_image).go_on(), live.facts.startup_timeout)

    async def _arrive(self, host: Host, live: Live, work: Coroutine[Any, Any, None], patience: float) -> None:
        try:
            async with asyncio.timeout(patience) as limit:
                await work
        except TimeoutError as exc:
            if not limit.expired():
                raise
            words = await host.last_words(live)
            await self._fail(host, live, f"it was not ready within {patience:g} s{words}", exc)
        except (SandboxLost, NotFound) as exc:
            await self._fail(host, live, exc.message, exc)
        except Conflict as exc:
            self._live.pop(live.id, None)
            await self._fail(host, live, exc.message, exc)
        except AEnvError as exc:
            await self._fail(host, live, exc.message, exc)
        except OSError as exc:
            await self._fail(host, live, f"this machine refused: {exc}", exc)
        live.state = State.RUNNING
        live.stages.end()
        self._arm(live)
        if live.volumes:
            live.holds.callback(asyncio.create_task(self._measure(host, live)).cancel)
        if live.second is not None and live.second.disk:
            live.holds.callback(asyncio.create_task(self._weigh(host, live, live.second)).cancel)
        if live.died.is_set():
            self._later(self._over(live))

    async def _measure(self, host: Host, live: Live) -> None:
        """Notice when a volume is full, and when it is not any more."""
        while True:
            live.full = await asyncio.to_thread(host.storage.full, live.volumes)
            await asyncio.sleep(_LOOK)

    async def _weigh(self, host: Host, live: Live, one: beside.Beside) -> None:
        """End it when its second container has written more than it may."""
        while True:
            await asyncio.sleep(_WEIGH)
            with suppress(AEnvError):
                if (wrote := await host.seconds.wrote(one)) > one.disk:
                    may = f"may have {one.disk / 1024**2:g} MiB"
                    reason = f"{beside.WHO} wrote {wrote / 1024**2:.0f} MiB, and {may}"
                    self._later(self._over(live, because=reason))
                    return

    async def _fail(self, host: Host, live: Live, reason: str, cause: Exception) -> None:
        """Keep what is known of a start that failed, and let nothing of it run."""
        live.end(State.FAILED, reason)
        if live.found and not isinstance(cause, (SandboxLost, NotFound, TimeoutError)):  # it may be well
            self._live.pop(live.id, None)
            await live.close()
            host.storage.leave(live.volumes)
        else:
            await asyncio.wait((self._end(live, live.state, reason, keep=True),))
        if isinstance(cause, AEnvError) and not isinstance(cause, (SandboxLost, NotFound)):
            raise type(cause)(live.shown(cause.message), hint=cause.hint) from cause
        hint = containers.end_hint(live.sandbox.reason)
        raise StartFailed(f"{live.id} did not start: {live.sandbox.reason}", hint=hint) from cause

    # From there to its end

    def _heard(self, action: str, container: str, attributes: Mapping[str, str]) -> None:
        """What the daemon tells of a container of ours."""
        live = self._live.get(attributes.get(ID, ""))
        if live is None or not live.has(container) or action not in ("die", "died", "destroy", "remove"):
            return
        live.died.set()
        if live.state is State.RUNNING:
            self._later(self._over(live))

    async def _look_again(self, gone: bool) -> None:
        """Nothing was heard of the daemon for a while, or it was gone: see which ended meanwhile."""
        host = await self._open()
        rows = [*await host.listed(), *await host.listed(SECOND)]
        running = {row.get("Id") for row in rows if row.get("State") == "running"}
        for live in list(self._live.values()):
            whole = live.made in running and (live.second is None or live.second.made in running)
            if live.made and not whole and not live.state.over and await host.has_ended(live):
                live.died.set()
                live.left_alone |= gone
                if live.state is State.RUNNING:
                    self._later(self._over(live))
            elif whole and gone and live.state is State.RUNNING:
                await Starting(host, live, self._base_image).open_again()

    async def _over(self, live: Live, *, because: str = "") -> None:
        """One that ran has ended, or its second container has, and nobody asked it to. ``because``: it must end, for
        this reason."""
        if live.state.over or live.ending is not None:
            return
        host = await self._open()
        well, reason = (False, because) if because else await host.why(live)
        if live.left_alone:
            well, reason = False, f"the daemon was gone for a while, and ended it: {reason}"
        elif not because and not await host.daemon.is_there():
            well, reason = False, f"the daemon is going or gone, and ended it: {reason}"
        if live.ending is None:
            live.end(State.TERMINATED if well else State.FAILED, reason)
            await asyncio.wait((self._end(live, live.state, reason, keep=True),))

    def _arm(self, live: Live) -> None:
        """Let it end when its time is over."""
        live.disarm()
        if live.expires_at is not None:
            left = max(live.expires_at - time.time(), 0.0)
            live.timer = asyncio.get_running_loop().call_later(left, lambda: self._later(self._expire(live)))

    async def _expire(self, live: Live) -> None:
        host = await self._open()
        told = host.keeping.expires(live.id)
        if told is not None and told > time.time() + 0.01:  # by another engine
            live.expires_at = told
            self._arm(live)
            return
        self._end(live, State.TERMINATED, self._time_is_over(live))

    def _time_is_over(self, live: Live) -> str:
        ttl = live.ttl if live.ttl is not None else (live.expires_at or 0.0) - live.facts.created_at
        return f"its time to live of {ttl:g} s is over"

    def _end(self, live: Live, state: State, reason: str, *, keep: bool = False) -> asyncio.Task[None]:
        """End a sandbox, whatever it is doing. Once, however many ask; who asks first says why. ``keep``: one that has
        ended already, and is kept for a while."""
        if live.ending is None:
            live.ending = asyncio.create_task(self._clear(live, state, reason, keep))
            live.ending.add_done_callback(lambda task: self._cleared(live, task, keep))
        return live.ending

    def _cleared(self, live: Live, task: asyncio.Task[None], keep: bool) -> None:
        """What could not be cleared up is tried again, when somebody asks and after a while."""
        loop = asyncio.get_running_loop()
        if task.cancelled():
            return
        if (failure := task.exception()) is None:
            live.timer = loop.call_later(KEPT_FOR, lambda: self._later(self._forget(live)))
            return
        log.warning("%s could not be cleared up, which is tried again: %s", live.id, failure)
        live.ending = None
        loop.call_later(_RETRY, lambda: self._later(self._clear_again(live) if keep else self._forget(live)))

    async def _clear_again(self, live: Live) -> None:
        if self._live.get(live.id) is live:
            await asyncio.wait((self._end(live, live.state, live.reason, keep=True),))

    async def _clear(self, live: Live, state: State, reason: str, keep: bool) -> None:
        if not live.state.over and live.starting is not None and not live.starting.done():
            live.starting.cancel()
            await asyncio.wait((live.starting,))
        was_running = live.state is State.RUNNING
        live.end(state, reason)
        host = await self._open()
        if live.made and (was_running or keep):
            with suppress(AEnvError):
                await host.stop(live, now=keep)
        # One with volumes is not kept: their devices may be another's by then.
        await host.settle(live, keep=keep and live.ran and not live.facts.volumes)

    async def _forget(self, live: Live) -> None:
        if self._live.get(live.id) is live:
            await self.delete(live.id)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._safely(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _safely(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except AEnvError as exc:
            log.warning("%s", exc)

    # Found again

    async def _find(self, id: str) -> Live:
        live = self._live.get(id)
        if live is None and _ID.fullmatch(id) and (self._state or self._host is not None):
            live = await self._adopt(await self._open(), id)
        if live is None:
            raise NotFound(f"there is no sandbox {id!r}")
        return live

    async def _adopt(self, host: Host, id: str) -> Live | None:
        """Take on a container that another engine of this name made; None when there is none, or it is long over."""
        try:
            found = await host.inspect(containers.name(self._engine, id))
        except NotFound:
            return None
        known = containers.facts_of(found["Config"].get("Labels"))
        if known is None or found["Config"]["Labels"].get(ENGINE) != self._engine or known.id != id:
            return None
        if (live := self._live.get(id)) is not None:
            return live
        hidden = Hidden.of(known.secrets, containers.environment(found))
        live = Live(self._engine, known, hidden)
        live.find(found)
        if (told := host.keeping.expires(id)) is not None:
            live.expires_at = told
        ended = containers.ended(found)
        if ended is not None and time.time() - ended.at > KEPT_FOR:
            await host.clear(id, second=bool(known.second))
            return None
        self._live[id] = live
        live.door = host.seen(containers.mount_source(found, containers.DOOR)) if known.door == "socket" else ""
        live.printed = host.printed(live)
        if ended is None and known.volumes:
            leaving = lambda: live.ending is not None or live.state.over  # noqa: E731
            live.volumes = await host.storage.hold_again(known.volumes, id, leaving)
        if ended is not None:
            live.died.set()
            live.state = State.RUNNING
            await self._over(live)
        elif live.expires_at is not None and live.expires_at <= time.time():
            await asyncio.shield(self._end(live, State.TERMINATED, self._time_is_over(live)))
        else:
            await asyncio.wait((live.begin(self._resume(host, live)),), timeout=_AGAIN)
        return live

    async def _sweep(self, host: Host) -> None:
        """Remove what engines that are gone have left, and what is over for long enough."""
        await host.sweep()
        if self._state:
            for row in await host.listed():
                if row["Labels"].get(ID) not in self._live:
                    await self._adopt(host, row["Labels"].get(ID, ""))

    # Powers

    def check_second(self, second: Second | None) -> None:
        if second is not None and second.directory:
            raise Unsupported(
                f"the docker engine cannot make a second container from a directory ({second.directory})",
                hint="make an image of it, and give that as the datasource",
            )

    async def output(self, id: str, start: int) -> Output:
        live = await self._find(id)
        if live.printed is None:
            return Output(start, b"")
        if live.second is not None and not live.state.over:
            live.printed.note(await (await self._open()).seconds.news(live.second))
        return await live.printed.since(start)

    async def update(self, id: str, *, ttl: float) -> Sandbox:
        live = await self._find(id)
        if live.state.over:
            raise SandboxLost(f"{id} has ended: {live.reason}")
        if not live.facts.lasting:
            live.ttl, live.expires_at = ttl, time.time() + ttl
            (await self._open()).keeping.set_expires(id, live.expires_at)
            self._arm(live)
        return live.sandbox

    async def hide(self, id: str, secrets: Mapping[str, str]) -> None:
        live = await self._find(id)
        live.require_running()
        live.hide(secrets)

    async def _door(self, id: str) -> Door:
        live = await self._find(id)
        live.require_running()
        return Door(id, live.url, (await self._open()).keeping.key(id))

    async def used(self, id: str) -> Used:
        live = await self._find(id)
        live.require_running()
        return await (await self._open()).used(live)

    async def volumes(self, owner: str) -> dict[str, int]:
        return await (await self._open()).storage.used(owner)

    async def delete_volume(self, owner: str, name: str) -> None:
        await (await self._open()).storage.delete(owner, name)


def _check_project(spec: SandboxSpec) -> None:
    if not spec.image and not os.path.isdir(spec.project):
        raise Invalid(f"{spec.env} has no project directory {spec.project!r}", hint="give one that exists")
