"""A daemon as one engine uses it: its containers, by the engine's label, and what is asked of each."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aenv.engines.base import Used
from aenv.engines.docker import containers, doors, keeping, second
from aenv.engines.docker.containers import ENGINE, ID, KIND, SANDBOX, SECOND, SOCKETS, Site, short
from aenv.engines.docker.daemon import About, Daemon
from aenv.engines.docker.keepers import USES
from aenv.engines.docker.keeping import Keeping
from aenv.engines.docker.live import Live
from aenv.engines.docker.printed import Printed
from aenv.engines.docker.projects import Projects
from aenv.engines.docker.volumes import STORAGE, Storage
from aenv.engines.docker.watch import Watch
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, SandboxError, SandboxLost, Unsupported

_REMOVED = "its container was removed, and not by this engine"
_STOP = 2
"""Seconds between TERM and KILL."""


class Host:
    """What an engine holds while it is open."""

    def __init__(self, daemon: Daemon, about: About, site: Site, kept: Keeping) -> None:
        self.daemon, self.about, self.site, self.keeping = daemon, about, site, kept
        self.projects = Projects(daemon)
        self.seconds = second.Seconds(daemon, about, site)
        self._before = doors.outlook(daemon, about)
        self.storage = Storage(daemon, site.engine, self.seen)
        self._watch: Watch | None = None
        self._networks: bool | None = None

    @classmethod
    async def open(cls, address: str | None, engine: str, *, lasting: bool, runtime: str) -> Host:
        daemon = await Daemon.find(address)
        about = await daemon.about()
        if runtime and runtime not in about.runtimes:
            known = ", ".join(sorted(about.runtimes))
            raise Invalid(f"the daemon has no runtime {runtime!r}", hint=f"install it; it has: {known}")
        driver = "k8s-file" if about.name == "podman" else "json-file"
        site = Site(engine, driver, runtime, until_eof=not lasting)
        return cls(daemon, about, site, Keeping(engine, lasting=lasting))

    def watch(
        self, tell: Callable[[str, str, Mapping[str, str]], None], look: Callable[[bool], Awaitable[None]]
    ) -> None:
        """Be told of what happens to containers of this engine."""
        self._watch = Watch(self.daemon, f"{ENGINE}={self.site.engine}", tell, look)

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()
        self.keeping.close()

    # Containers

    async def listed(self, kind: str = SANDBOX) -> list[dict[str, Any]]:
        """This engine's, whatever they do."""
        return await self._listed([f"{ENGINE}={self.site.engine}", f"{KIND}={kind}"])

    async def _listed(self, labels: list[str]) -> list[dict[str, Any]]:
        found = await self.daemon.ask("GET", "/containers/json", query={"all": "1", "filters": {"label": labels}})
        return [row for row in found or () if isinstance(row, dict) and isinstance(row.get("Labels"), dict)]

    async def inspect(self, container: str) -> dict[str, Any]:
        found = await self.daemon.ask("GET", f"/containers/{container}/json")
        if not isinstance(found, dict) or not isinstance(found.get("Config"), dict):
            raise SandboxLost(f"the daemon describes {container} in a way nobody understands")
        return found

    async def has_ended(self, live: Live) -> bool:
        """Whether its container, or the second one, has ended or is gone."""
        try:
            found = await self.inspect(live.container)
        except NotFound:
            return True
        if containers.ended(found) is not None or containers.is_going(found):
            return True
        return live.second is not None and bool(live.second.made) and bool(await self.seconds.why(live.second))

    async def stop(self, live: Live, *, now: bool = False) -> None:
        """End what runs in it: at once, or after it was asked to."""
        if not live.made:
            return
        with suppress(NotFound, Conflict):
            if now:
                await self.daemon.ask("POST", f"/containers/{live.container}/kill")
            else:
                await self.daemon.ask("POST", f"/containers/{live.container}/stop", query={"t": str(_STOP)})

    async def remove(self, container: str, patience: float) -> None:
        """Back when the daemon does not know it any more."""
        pause = 0.02
        deadline = time.monotonic() + patience
        while True:
            try:
                await self.daemon.ask("DELETE", f"/containers/{container}", query={"force": "1", "v": "1"})
                return
            except NotFound:
                return
            except Conflict as exc:  # somebody else removes it
                if time.monotonic() > deadline:
                    raise SandboxError(f"{container} could not be removed: {exc.message}") from exc
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)

    async def why(self, live: Live) -> tuple[bool, str]:
        """Whether it ended well, and the reason."""
        try:
            found = await self.inspect(live.container)
        except AEnvError as exc:
            if containers.is_unknown(exc):
                return False, _REMOVED
            return False, f"the daemon does not say how it ended: {exc.message}"
        ended = containers.ended(found)
        if containers.is_going(found):
            return False, _REMOVED
        if ended is None and live.second is not None and (reason := await self.seconds.why(live.second)):
            return False, reason
        if ended is None:
            return False, f"its container is {(found.get('State') or {}).get('Status') or 'in no state'}"
        return ended.well, ended.told(live.memory, await self._words(live))

    async def last_words(self, live: Live) -> str:
        """What it printed last, to be put at the end of a sentence; nothing when it printed nothing."""
        words = await self._words(live)
        return f"; it printed last:\n{words}" if words.strip() else ""

    async def _words(self, live: Live) -> str:
        if live.printed is None:
            return ""
        try:
            return containers.last_words(await live.printed.last())
        except AEnvError:
            return ""

    def printed(self, live: Live) -> Printed:
        return Printed(self.daemon, live.container, live.hidden)

    async def used(self, live: Live) -> Used:
        """What the daemon counts for it, and for its second container."""
        used = await self._used(live, live.container)
        if live.second is None:
            return used
        more = await self._used(live, live.second.container)
        return Used(used.cpu + more.cpu, used.memory + more.memory)

    async def _used(self, live: Live, container: str) -> Used:
        query = {"stream": "false", "one-shot": "true"}
        found = await self.daemon.ask("GET", f"/containers/{container}/stats", query=query)
        try:
            processor = found["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9
            memory = found["memory_stats"]
            details = memory.get("stats") or {}
            cached = details.get("total_inactive_file", details.get("inactive_file", 0)) or 0
            return Used(processor, max(int(memory["usage"]) - int(cached), 0))
        except (KeyError, TypeError, AttributeError) as exc:
            raise SandboxLost(f"the daemon does not say what {live.id} uses") from exc

    # What a container needs

    def door_volume(self, id: str) -> str:
        return f"aenv-door-{short(self.site.engine, id)}"

    def seen(self, path: str) -> str:
        """Where this process finds what the daemon has at that path; empty when it sees nothing of the daemon's."""
        return self._before + path if path and self._before is not None else ""

    def check_data(self, path: str) -> None:
        """Refuse data that is not there, where that can be seen: some daemons would make the directory."""
        if path and self.seen(path) and not os.path.exists(self.seen(path)):
            raise Invalid(f"there is no datasource {path!r}", hint="give a path of this machine")

    async def network(self, wanted: object) -> str:
        """The daemon's word for a network: what a sandbox leaves to the engine is a network where there is one."""
        if wanted == "none":
            return "none"
        if self._networks is None:
            found = await self.daemon.ask("GET", "/networks", query={"filters": {"driver": ["bridge"]}})
            self._networks = bool(found)
        if self._networks:
            return "bridge"
        if wanted == "full":
            raise Unsupported(
                "this daemon has no bridge, so its sandboxes have no network", hint="start it without --bridge=none"
            )
        return "none"

    # What others left

    async def sweep(self, kept_for: float) -> None:
        """Remove the containers and doors of engines that ended with their process, and projects nobody uses."""
        dead = set(keeping.gone())
        seconds = await self._listed([f"{KIND}={SECOND}"])
        rows = await self._listed([f"{KIND}={SANDBOX}"])
        for row in rows:
            engine = str(row["Labels"].get(ENGINE) or "")
            if not engine.startswith("_") or engine == self.site.engine:
                continue
            ended = row.get("State") in ("exited", "dead") and await self._ended_before(row, time.time() - kept_for)
            if engine in dead or ended:
                await self.remove(containers.name(engine, row["Labels"].get(ID, "")), 60.0)
        await self._sweep_seconds(seconds, dead)
        for kind in (SOCKETS, STORAGE, second.SHARES):
            for volume in await self._volumes(f"{KIND}={kind}"):
                if volume["Labels"].get(ENGINE, "") in dead:
                    await doors.remove_volume(self.daemon, volume["Name"])
        for engine in dead:
            keeping.bury(engine)
        await self.projects.sweep({row["Labels"].get(USES) for row in rows})
        await self.seconds.agents.sweep({row["Labels"].get(USES) for row in seconds})

    async def _sweep_seconds(self, rows: list[dict[str, Any]], dead: set[str]) -> None:
        """Remove second containers that have no main one."""
        for row in rows:
            engine, id = str(row["Labels"].get(ENGINE) or ""), str(row["Labels"].get(ID) or "")
            if engine not in dead:
                with suppress(NotFound):
                    await self.inspect(containers.name(engine, id))
                    continue
            await self.remove(second.name(engine, id), 60.0)
            await self.seconds.remove_volumes(second.shares(engine, id))

    async def _ended_before(self, row: Mapping[str, Any], moment: float) -> bool:
        with suppress(NotFound):
            ended = containers.ended(await self.inspect(str(row.get("Id"))))
            return ended is not None and ended.at < moment
        return False

    async def _volumes(self, label: str) -> list[dict[str, Any]]:
        found = await self.daemon.ask("GET", "/volumes", query={"filters": {"label": [label]}})
        rows = (found or {}).get("Volumes") or ()
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("Labels"), dict)]
