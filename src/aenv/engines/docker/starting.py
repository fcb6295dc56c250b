"""How a sandbox starts: its image, its container, its door, and the first time that it answers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import suppress
from typing import Any

import msgspec

from aenv import http
from aenv.cleanup import finish
from aenv.engines.docker import containers, doors, images
from aenv.engines.docker.containers import ENGINE, LINK, SECOND_SOCKET, Mounted
from aenv.engines.docker.host import Host
from aenv.engines.docker.images import Image
from aenv.engines.docker.keepers import USES
from aenv.engines.docker.live import Live
from aenv.errors import AEnvError, Conflict, NetworkError, SandboxLost, StartFailed, StorageFull
from aenv.models import SandboxSpec
from aenv.runtime.hidden import Hidden

log = logging.getLogger("aenv.engine")
_FIRST, _LONGEST = 0.005, 0.1
"""Seconds between two looks whether it answers."""
_HEALTH = 10.0
"""Seconds in which a sandbox must say how it is."""


class Starting:
    """One start."""

    def __init__(self, host: Host, live: Live, base_image: str) -> None:
        self._host, self._live, self._base_image = host, live, base_image

    async def bring_up(self, spec: SandboxSpec) -> None:
        """From a spec to a sandbox that is healthy."""
        host, live = self._host, self._live
        host.check_data(spec.datasource)
        live.stages.begin("image")
        image = await self._image(spec.image or self._base_image)
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
        live.stages.begin("create")
        door = "socket" if host.seen("/") else "tunnel"
        live.facts = msgspec.structs.replace(live.facts, door=door, python=containers.python(image))
        try:
            await self._create(spec, image, network, keeper, volumes)
        except AEnvError:
            if not keeper or await host.projects.keepers.is_there(keeper):
                raise
            host.projects.keepers.forget(keeper)  # another engine took it for unused, at this moment
            keeper = await host.projects.keeper(spec.project, spec.stamp, image)
            await self._create(spec, image, network, keeper, volumes)
        if live.second is not None and not live.ran:
            await finish(host.seconds.make(live.second, spec, task, network))
        live.stages.begin("start")
        if live.ran:
            await self.go_on()
        else:
            await self._run_all(image)
            await self.arrive()

    async def _image(self, reference: str) -> Image:
        return await images.present(self._host.daemon, reference, progress=lambda text: log.info("%s", text))

    async def _image_of_second(self, reference: str) -> Image:
        try:
            return await self._image(reference)
        except NetworkError:  # the daemon's own
            raise
        except AEnvError as exc:
            message = f"the image of the second container, {reference}, is not to be had: {exc.message}"
            raise type(exc)(message, hint=exc.hint) from exc

    async def _create(
        self, spec: SandboxSpec, image: Image, network: str, keeper: str, volumes: list[tuple[str, str]]
    ) -> None:
        host, live = self._host, self._live
        door = host.door_volume(live.id) if live.facts.door == "socket" else ""
        body = containers.body(
            spec,
            live.facts,
            image,
            site=host.site,
            mounted=Mounted(door, keeper, volumes, *(live.second.shares if live.second is not None else ())),
            network=network,
            key_sha256=hashlib.sha256(host.keeping.key(live.id).encode()).hexdigest(),
        )
        if keeper:
            body["Labels"][USES] = keeper
        live.memory = body["HostConfig"]["Memory"]
        # Not cancelled: what the daemon was asked to make is there, or is not, when this is over.
        await finish(self._make(door, body, spec))

    async def _make(self, door: str, body: dict[str, Any], spec: SandboxSpec) -> None:
        host, live = self._host, self._live
        if live.second is not None:
            try:
                await host.seconds.make_volumes(live.second, spec)
            except AEnvError:
                await self._remove_door("")
                raise
        if door:
            live.door = host.seen(await doors.make_volume(host.daemon, host.about, door, host.site.engine, live.id))
        try:
            made = await host.daemon.ask("POST", "/containers/create", query={"name": live.container}, body=body)
            live.made = str((made or {}).get("Id") or live.container)
        except AEnvError as exc:
            if isinstance(exc, Conflict) or "already in use" in exc.message:
                await self._take_over(door)
            else:
                await self._remove_door(door)
                raise
        live.printed = host.printed(live)

    async def _remove_door(self, door: str) -> None:
        with suppress(AEnvError):
            if door:
                await doors.remove_volume(self._host.daemon, door)
            if self._live.second is not None:
                await self._host.seconds.remove_volumes(self._live.second.shares)

    async def _take_over(self, door: str) -> None:
        """Its name is taken. By one that another engine of this name made: then that is it."""
        host, live = self._host, self._live
        found = await host.inspect(live.container)
        labels = found["Config"].get("Labels") or {}
        known = containers.facts_of(labels)
        if known is None or known.id != live.id or labels.get(ENGINE) != host.site.engine:
            await self._remove_door(door)
            raise Conflict(
                f"the name {live.container} is taken by a container that is none of this engine's",
                hint="remove that container, or use another id",
            )
        if containers.ended(found) is not None:
            raise Conflict(f"{live.id} has ended", hint="use another id")
        if live.second is not None and not known.second:
            await host.seconds.remove_volumes(live.second.shares)
        live.made = str(found.get("Id") or live.container)
        live.know(known, Hidden.of(known.secrets, containers.environment(found)))
        live.ran = True

    async def _run_all(self, image: Image) -> None:
        """Start both containers, or the one that there is."""
        starts = [self._run(image)]
        if (beside := self._live.second) is not None:
            starts.append(self._host.seconds.run(beside, self._live.holds))
        done = await asyncio.gather(*starts, return_exceptions=True)
        for failed in done:
            if failed is not None:
                raise failed

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
            if status not in ("running", "created", "configured", "initialized") or await host.has_ended(live):
                raise SandboxLost((await host.why(live))[1])
            await live.nap(_LONGEST)
        await self.arrive(was_up=time.time() > live.facts.created_at + live.facts.startup_timeout)

    async def arrive(self, *, was_up: bool = False) -> None:
        """Wait until it answers, and is healthy. One that has been up for long need not be healthy now."""
        live = self._live
        live.stages.begin("import")
        await self._guard_second()
        live.url = await self._open_door()
        pause = _FIRST
        while True:
            await self._alive()
            try:
                async with asyncio.timeout(_HEALTH):
                    answer = await http.request("GET", live.url, "/health", retries=0)
            except (NetworkError, TimeoutError):
                answer = None
            if answer is not None:
                live.stages.begin("health")
                if answer.status == 200 or was_up:
                    live.boot = answer.headers.get(b"aenv-boot", b"").decode("latin-1")
                    return
            await live.nap(pause)
            pause = min(pause * 1.2, _LONGEST)

    async def _guard_second(self) -> None:
        """Once the agent of the second container listens, let nobody there listen in its place. That it answers too is
        seen by the runtime, which is not healthy before."""
        beside = self._live.second
        link = self._host.seen(beside.link) if beside is not None else ""
        if not link or not doors.is_mounted(link):
            return
        pause = _FIRST
        while doors.seal(link, SECOND_SOCKET, LINK) is None:
            await self._alive()
            await self._live.nap(pause)
            pause = min(pause * 1.2, _LONGEST)

    async def _open_door(self) -> str:
        host, live = self._host, self._live
        place = host.keeping.socket(live.id)
        if live.door and doors.is_mounted(live.door):
            pause = _FIRST
            while (path := doors.seal(live.door)) is None:
                await self._alive()
                await live.nap(pause)
                pause = min(pause * 1.2, _LONGEST)
            doors.lead(place, path)
            return f"unix:{place}"
        await self._alive()
        tunnel = doors.Tunnel(host.daemon, live.container, live.facts.python, place)
        await tunnel.open()
        live.holds.push_async_callback(tunnel.close)
        return tunnel.url

    async def _alive(self) -> None:
        if self._live.died.is_set():
            raise SandboxLost((await self._host.why(self._live))[1])
