"""How a sandbox starts: its image, its container, its door, and the first time that it answers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from aenv import http
from aenv.cleanup import finish
from aenv.engines.docker import containers, doors, images
from aenv.engines.docker.containers import ENGINE, LINK, SECOND_SOCKET, Mounted
from aenv.engines.docker.deputy import Deputy
from aenv.engines.docker.host import Host
from aenv.engines.docker.images import Image
from aenv.engines.docker.keepers import USES
from aenv.engines.docker.live import Live
from aenv.engines.docker.second import WHO, Beside
from aenv.errors import (
    AEnvError,
    Conflict,
    Invalid,
    NetworkError,
    NotFound,
    SandboxLost,
    StartFailed,
    StorageFull,
    TooLarge,
)
from aenv.models import SandboxSpec
from aenv.runtime.hidden import Hidden
from aenv.runtime.warm import UNFIT

log = logging.getLogger("aenv.engine")
_FIRST, _LONGEST = 0.005, 0.1
"""Seconds between two looks whether it answers."""
_HEALTH = 10.0
"""Seconds in which a sandbox must say how it is."""
_MOST_HEALTH = 64 * 1024
"""Bytes in which it must."""
_NAMED = 10.0
"""Seconds in which a container is there whose name is taken."""
_COMING = ("created", "configured", "initialized", "running", "paused")
"""What one does that will be up, or may be."""
_ENDING = 1.0
"""Seconds in which the end of a container is told."""


class Taken(Exception):
    """Another engine of this name makes that sandbox, or has made it."""


class _Needs(NamedTuple):
    """What the containers of a start are made of."""

    spec: SandboxSpec
    image: Image
    task: Image
    """That of the second container."""
    network: str
    keeper: str
    """The container that keeps its project; empty when that is in the image."""
    volumes: list[tuple[str, str]]


class Starting:
    """One start."""

    def __init__(self, host: Host, live: Live, base_image: str) -> None:
        self._host, self._live, self._base_image = host, live, base_image

    async def bring_up(self, spec: SandboxSpec) -> None:
        """From a spec to a sandbox that is healthy."""
        host, live = self._host, self._live
        host.check_data(spec.datasource)
        live.stages.begin("image")
        image = await self._image(spec.image) if spec.image else await self._base()
        task = image if live.second is None else await self._image_of_second(live.second.reference)
        network = await host.network(spec.network)
        keeper = ""
        if not spec.image:
            live.stages.begin("project")
            keeper = await host.projects.keeper(spec.project, spec.stamp, image)
        volumes: list[tuple[str, str]] = []
        if spec.volumes:
            live.stages.begin("volumes")
            leaving = lambda: live.ending is not None or live.state.over  # noqa: E731
            volumes = await host.storage.take(spec.volumes, live.id, leaving, live.volumes)
        sees = (image.id, keeper, network, spec.datasource)
        if sees in host.bare:
            spec = msgspec.structs.replace(spec, preload=False)
        needs = _Needs(spec, image, task, network, keeper, volumes)
        try:
            await self._try(needs)
        except AEnvError:
            if not await self._is_unfit(spec):
                raise
            host.bare.add(sees)
            await self._begin_again()
            await self._try(needs._replace(spec=msgspec.structs.replace(spec, preload=False)))

    async def _try(self, needs: _Needs) -> None:
        """From all that it needs to a sandbox that is healthy."""
        host, live = self._host, self._live
        live.stages.begin("create")
        door = "socket" if host.seen("/") else "tunnel"
        live.facts = msgspec.structs.replace(live.facts, door=door, python=containers.python(needs.image))
        try:
            await self._create(needs)
        except AEnvError:
            if not needs.keeper or await host.projects.keepers.is_there(needs.keeper):
                raise
            needs = await self._kept_again(needs)
            await self._create(needs)
        if live.second is not None:
            await self._make_second(live.second, needs)
        live.stages.begin("start")
        starts = [self._run_main(needs)]
        if live.second is not None:
            starts.append(self._run_second(live.second, needs))
        for failed in await asyncio.gather(*starts, return_exceptions=True):
            if failed is not None:
                raise failed
        await self.arrive()

    async def _kept_again(self, needs: _Needs) -> _Needs:
        """The same with its project brought again: another engine took that for unused, at this moment."""
        spec, projects = needs.spec, self._host.projects
        projects.keepers.forget(needs.keeper)
        return needs._replace(keeper=await projects.keeper(spec.project, spec.stamp, needs.image))

    async def _is_unfit(self, spec: SandboxSpec) -> bool:
        """Whether it ended since its project must not be imported before there is an instance."""
        live = self._live
        if not spec.warm or containers.preload(spec) != "auto" or not live.ran:
            return False
        await live.nap(_ENDING)  # what failed may have seen it before the daemon told
        with suppress(AEnvError):
            if live.died.is_set():
                ended = await self._host.daemon.ask("POST", f"/containers/{live.container}/wait", timeout=_HEALTH)
                return bool((ended or {}).get("StatusCode") == UNFIT)
        return False

    async def _begin_again(self) -> None:
        """Remove what was made, so that another can take its place."""
        host, live = self._host, self._live
        log.info("%s begins again: %s", live.id, await host.last_words(live))
        await live.close()
        await finish(host.clear(live.id, second=live.second is not None))
        live.begin_again()

    async def _image(self, reference: str) -> Image:
        return await images.present(self._host.daemon, reference, progress=lambda text: log.info("%s", text))

    async def _base(self) -> Image:
        try:
            return await self._image(self._base_image)
        except (Invalid, StartFailed) as exc:
            hint = "make it with 'make base-image', or name another one with AENV_BASE_IMAGE"
            raise type(exc)(f"the base image is not to be had: {exc.message}", hint=hint) from exc

    async def _image_of_second(self, reference: str) -> Image:
        try:
            return await self._image(reference)
        except NetworkError:  # the daemon's own
            raise
        except AEnvError as exc:
            message = f"the image of the second container, {reference}, is not to be had: {exc.message}"
            raise type(exc)(message, hint=exc.hint) from exc

    async def _create(self, needs: _Needs) -> None:
        host, live, spec, keeper = self._host, self._live, needs.spec, needs.keeper
        door = host.door_volume(live.id) if live.facts.door == "socket" else ""
        shares = live.second.shares if live.second is not None else ()
        body = containers.body(
            spec,
            live.facts,
            needs.image,
            site=host.site,
            mounted=Mounted(door, keeper, needs.volumes, *shares),
            network=needs.network,
            key_sha256=hashlib.sha256(host.keeping.key(live.id).encode()).hexdigest(),
        )
        if keeper:
            body["Labels"][USES] = keeper
        live.memory = body["HostConfig"]["Memory"]
        # Not cancelled: what the daemon was asked to make is there, or is not, when this is over.
        await finish(self._make(door, body, spec))

    async def _make(self, door: str, body: dict[str, Any], spec: SandboxSpec) -> None:
        host, live = self._host, self._live
        live.asked = True
        if live.second is not None:
            await host.seconds.make_volumes(live.second, spec)
        if door:
            live.door = host.seen(await doors.make_volume(host.daemon, door, host.site.engine, live.id))
        deadline = time.monotonic() + _NAMED
        while not live.made:
            try:
                made = await host.daemon.ask("POST", "/containers/create", query={"name": live.container}, body=body)
                live.made = str((made or {}).get("Id") or live.container)
            except AEnvError as exc:
                if not isinstance(exc, Conflict) and "already in use" not in exc.message:
                    raise
                try:
                    await self._take_over(await host.inspect(live.container))
                except NotFound:  # its name is given away before it is there
                    if time.monotonic() > deadline:
                        raise exc from None
                    await asyncio.sleep(_LONGEST)
        live.printed = host.printed(live)

    async def _take_over(self, found: dict[str, Any]) -> None:
        """Its name is taken. By one that another engine of this name made: then that is it."""
        host, live = self._host, self._live
        labels = found["Config"].get("Labels") or {}
        known = containers.facts_of(labels)
        if known is None or known.id != live.id or labels.get(ENGINE) != host.site.engine:
            raise Conflict(
                f"the name {live.container} is taken by a container that is none of this engine's",
                hint="remove that container, or use another id",
            )
        if containers.ended(found) is not None:
            live.asked = False
            raise Conflict(f"{live.id} has ended", hint="use another id")
        if live.second is not None and not known.second:
            await host.seconds.remove_volumes(live.second.shares)
        live.hidden = Hidden.of(known.secrets, containers.environment(found))
        live.begins(known)
        live.find(found)
        live.door = host.seen(containers.mount_source(found, containers.DOOR)) if known.door == "socket" else ""
        live.printed = host.printed(live)
        raise Taken

    async def _make_second(self, beside: Beside, needs: _Needs) -> None:
        near = bool(self._host.seen("/"))
        await finish(self._host.seconds.make(beside, needs.spec, needs.task, needs.network, near=near))

    async def _run_main(self, needs: _Needs) -> None:
        """Start it; in another container where its project went before it had run."""
        host, live = self._host, self._live
        try:
            await self._run(needs.image)
        except StartFailed:
            if not needs.keeper or not await host.projects.keepers.has_lost(live.container, needs.keeper):
                raise
            live.made = ""
            if live.printed is not None:
                await live.printed.close()
            await finish(host.remove(live.container))
            await self._create(await self._kept_again(needs))
            await self._run(needs.image)

    async def _run_second(self, beside: Beside, needs: _Needs) -> None:
        """The same for the second one, and its agent."""
        host = self._host
        try:
            await host.seconds.run(beside, self._live.holds)
        except StartFailed:
            if not await host.seconds.has_lost_agent(beside):
                raise
            beside.made = ""
            await finish(host.remove(beside.container))
            await self._make_second(beside, needs)
            await host.seconds.run(beside, self._live.holds)

    async def _run(self, image: Image) -> None:
        host, live = self._host, self._live
        if host.site.until_eof:
            query = {"stream": "1", "stdin": "1"}
            await live.holds.enter_async_context(
                host.daemon.hijack(f"/containers/{live.container}/attach", query=query)
            )
        try:
            await host.daemon.ask("POST", f"/containers/{live.container}/start")
            live.ran = True
            host.storage.mounted(live.volumes)
        except (NetworkError, StorageFull):
            raise
        except AEnvError as exc:
            message, hint = containers.start_failure(exc.message, image.reference)
            raise StartFailed(message, hint=hint or exc.hint) from exc

    async def go_on(self) -> None:
        """From a container that is there, and that somebody else started or starts, to one that is healthy."""
        host, live = self._host, self._live
        while True:
            status = ((await host.inspect(live.container)).get("State") or {}).get("Status")
            if status == "running" and (live.second is None or await host.seconds.is_up(live.second)):
                break
            if status not in _COMING or await host.has_ended(live):
                raise SandboxLost((await host.why(live))[1])
            await live.nap(_LONGEST)
        await self.arrive(found=True)

    async def open_again(self) -> None:
        """Find its socket again where the link to it leads nowhere, or reach it by a tunnel: a daemon that starts while
        its containers live shows new volumes in the place of those that are in memory."""
        host, live = self._host, self._live
        if live.door and not host.keeping.socket(live.id).is_socket():
            live.door = host.seen(containers.mount_source(await host.inspect(live.container), containers.DOOR))
            await self._open_door(found=True)

    async def arrive(self, *, found: bool = False) -> None:
        """Wait until it answers, and is healthy. One that was ``found`` after its time to start need not be healthy."""
        live = self._live
        live.stages.begin("import")
        await self._let_out()
        await self._guard_second()
        live.url = await self._open_door(found=found)
        was_up = found and time.time() > live.facts.created_at + live.facts.startup_timeout
        pause = _FIRST
        while True:
            await self._alive()
            try:
                async with asyncio.timeout(_HEALTH):
                    answer = await http.request("GET", live.url, "/health", retries=0, most=_MOST_HEALTH)
            except (NetworkError, TimeoutError, TooLarge):
                answer = None
            if answer is not None:
                live.stages.begin("health")
                if answer.status == 200 or was_up:
                    live.boot = answer.headers.get(b"aenv-boot", b"").decode("latin-1")
                    return
            await live.nap(pause)
            pause = min(pause * 1.2, _LONGEST)

    async def _let_out(self) -> None:
        """Give both containers their way out. Where there is to be one, the runtime waits for it: the main one's is
        last."""
        host, live = self._host, self._live
        if live.facts.allow is not None:
            for container in (live.second.container if live.second is not None else "", live.container):
                if container:
                    await host.exits.open(container, live.facts.allow, live.holds)

    async def _guard_second(self) -> None:
        """Once the agent of the second container listens, let nobody there listen in its place. That it answers too is
        seen by the runtime, which is not healthy before."""
        beside = self._live.second
        if beside is not None and beside.agentless:
            await self._stand_in(beside)
            return
        link = self._host.seen(beside.link) if beside is not None else ""
        if not link or not doors.is_mounted(link):
            return
        pause = _FIRST
        while doors.seal(link, SECOND_SOCKET, LINK) is None:
            await self._alive()
            await self._live.nap(pause)
            pause = min(pause * 1.2, _LONGEST)

    async def _stand_in(self, beside: Beside) -> None:
        """Answer in the place of the agent."""
        host, live = self._host, self._live
        link = host.seen(await host.seconds.link(beside))
        if not link or not doors.is_mounted(link):
            await self._alive()
            raise StartFailed(f"{WHO} has no agent, and the engine does not see the volume of its socket")
        deputy = Deputy(host.daemon, beside.container)
        await deputy.open(link)
        live.holds.push_async_callback(deputy.close)

    async def _open_door(self, *, found: bool) -> str:
        host, live = self._host, self._live
        place = host.keeping.socket(live.id)
        if live.door and doors.is_mounted(live.door) and not (found and doors.seal(live.door) is None):
            pause = _FIRST
            while (path := doors.seal(live.door)) is None:
                await self._alive()
                await live.nap(pause)
                pause = min(pause * 1.2, _LONGEST)
            doors.lead(place, path)
            return f"unix:{place}"
        await self._alive()
        tunnel = doors.Exec(host.daemon, live.container, live.facts.python, place)
        await tunnel.open()
        live.holds.push_async_callback(tunnel.close)
        return tunnel.url

    async def _alive(self) -> None:
        if self._live.died.is_set():
            raise SandboxLost((await self._host.why(self._live))[1])
