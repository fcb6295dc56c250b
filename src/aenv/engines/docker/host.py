"""A daemon as one engine uses it: its containers, by the engine's label, and what is asked of each."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aenv.engines.base import Used
from aenv.engines.docker import containers, doors, keeping, sweeping
from aenv.engines.docker import second as beside
from aenv.engines.docker.containers import ENGINE, KIND, SANDBOX, Site, short
from aenv.engines.docker.daemon import About, Daemon, is_unknown
from aenv.engines.docker.exits import Exits
from aenv.engines.docker.keeping import Keeping
from aenv.engines.docker.live import Live
from aenv.engines.docker.log import Log
from aenv.engines.docker.projects import Projects
from aenv.engines.docker.volumes import Storage
from aenv.engines.docker.watch import Watch
from aenv.engines.printed import Printed, last_words
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, SandboxError, SandboxLost, Unsupported

log = logging.getLogger("aenv.engine")
_REMOVED = "its container was removed, and not by this engine"
_STOP = 2
"""Seconds between TERM and KILL."""
UNUSED = 16
"""Projects that are kept, though no sandbox has them."""
_DRAIN = 2.0
"""Seconds in which the last words of one that has ended must have come."""
_GONE = 60.0
"""Seconds in which the daemon must have removed a container."""


class Host:
    """What an engine holds while it is open."""

    def __init__(self, daemon: Daemon, about: About, site: Site, kept: Keeping) -> None:
        self.daemon, self.about, self.site, self.keeping = daemon, about, site, kept
        self.projects = Projects(daemon)
        self.seconds = beside.Seconds(daemon, about, site)
        self._outlook = doors.outlook(daemon, about)
        self.storage = Storage(daemon, site.engine, self.seen)
        self.exits = Exits(self.inspect, self.seen)
        self._watch: Watch | None = None
        self._networks: bool | None = None
        self.bare: set[tuple[str, ...]] = set()
        """What is not imported before there is an instance, since the import must not be so early: the image, the
        project where that is not in it, and what else it sees."""

    @classmethod
    async def open(cls, address: str | None, engine: str, *, lasting: bool, runtime: str) -> Host:
        daemon = await Daemon.find(address)
        about = await daemon.about()
        if runtime and runtime not in about.runtimes:
            known = ", ".join(sorted(about.runtimes))
            raise Invalid(f"the daemon has no runtime {runtime!r}", hint=f"install it; it has: {known}")
        driver = "k8s-file" if about.name == "podman" else "json-file"
        site = Site(engine, driver, runtime, until_eof=not lasting, process="" if lasting else keeping.process())
        return cls(daemon, about, site, Keeping(engine, lasting=lasting))

    def watch(
        self, tell: Callable[[str, str, Mapping[str, str]], None], look: Callable[[bool], Awaitable[None]]
    ) -> None:
        """Be told of what happens to containers of this engine."""

        async def look_anew(gone: bool) -> None:
            await asyncio.to_thread(self._look_out)
            await look(gone)

        self._watch = Watch(self.daemon, f"{ENGINE}={self.site.engine}", tell, look_anew)

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()
        await self.exits.close()
        self.keeping.close()

    # Containers

    async def listed(self, kind: str = SANDBOX) -> list[dict[str, Any]]:
        """This engine's, whatever they do."""
        labels = [f"{ENGINE}={self.site.engine}", f"{KIND}={kind}"]
        found = await self.daemon.ask("GET", "/containers/json", query={"all": "1", "filters": {"label": labels}})
        return [row for row in found or () if isinstance(row, dict) and isinstance(row.get("Labels"), dict)]

    async def inspect(self, container: str) -> dict[str, Any]:
        found = await self.daemon.inspect(container)
        if not isinstance(found.get("Config"), dict):
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

    async def clear(self, id: str, *, second: bool) -> None:
        """Remove a sandbox's container and its door, and the ``second`` that it may have. Back when nothing is left."""
        engine = self.site.engine
        if second:
            await self.remove(beside.name(engine, id))
        await self.remove(containers.name(engine, id))
        await doors.remove_volume(self.daemon, self.door_volume(id), engine)
        if second:
            await self.seconds.remove_volumes(beside.shares(engine, id))
        self.keeping.forget(id)

    async def settle(self, live: Live, *, keep: bool) -> None:
        """Give back what only one that runs needs, and, unless it is to be kept, all the rest."""
        try:
            if live.second is not None and live.asked:
                await self.seconds.kill(live.second)
                if live.printed is not None:
                    live.printed.note(await self.seconds.news(live.second))
                await self.remove(live.second.container)
            if live.printed is not None:
                if live.ran and live.facts.volumes:
                    with suppress(AEnvError):
                        await live.printed.since(0)
                await live.printed.drained(_DRAIN)
        finally:
            await live.close()
            try:
                if live.asked and not keep:
                    await self.clear(live.id, second=live.second is not None)
            finally:
                mine = [(one.owner, one.name) for one in live.volumes if one.lock >= 0]
                await self.storage.release(live.id, live.facts.volumes if live.asked else mine, live.volumes)
        if live.asked:
            self.keeping.forget(live.id)
        if not keep and live.asked:
            live.asked, live.removed, live.made = False, True, ""

    async def remove(self, container: str) -> None:
        """Back when the daemon does not know it any more. One of that name that is none of this engine's stays."""
        pause = 0.02
        deadline = time.monotonic() + _GONE
        while True:
            try:
                found = await self.daemon.ask("GET", f"/containers/{container}/json") or {}
                if ((found.get("Config") or {}).get("Labels") or {}).get(ENGINE) != self.site.engine:
                    return
                await self.daemon.ask("DELETE", f"/containers/{container}", query={"force": "1", "v": "1"})
                return
            except NotFound:
                return
            except AEnvError as exc:
                if not isinstance(exc, Conflict) and not is_unknown(exc):  # then somebody else removes it
                    raise
                if time.monotonic() > deadline:
                    raise SandboxError(f"{container} could not be removed: {exc.message}") from exc
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)

    async def why(self, live: Live) -> tuple[bool, str]:
        """Whether it ended well, and the reason."""
        try:
            found = await self.inspect(live.container)
        except NotFound:
            return False, _REMOVED
        except AEnvError as exc:
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
            return last_words(await live.printed.last())
        except AEnvError:
            return ""

    def printed(self, live: Live) -> Printed:
        return Printed(Log(self.daemon, live.container), live.hidden)

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
        return self._outlook.before + path if path and self._outlook is not None and self._outlook.holds else ""

    def _look_out(self) -> None:
        """Another process may be the daemon by now."""
        self._outlook = doors.outlook(self.daemon, self.about)

    def check_data(self, path: str) -> None:
        """Refuse data that is not there, where that can be seen: some daemons would make the directory."""
        if path and self.seen(path) and not os.path.exists(self.seen(path)):
            raise Invalid(f"there is no datasource {path!r}", hint="give a path of this machine")

    async def network(self, wanted: object) -> str:
        """The daemon's word for a network: what a sandbox leaves to the engine is a network where there is one."""
        if isinstance(wanted, dict) and (why := self.exits.missing(self.site.runtime)):
            raise Unsupported(
                f"a container cannot be let out to some hosts only: {why}",
                hint="use 'none' or 'full', or an engine that is root on the daemon's machine, with the runtime runc",
            )
        if wanted == "none" or isinstance(wanted, dict):
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

    async def sweep(self) -> None:
        """Remove it; of projects that no sandbox has, the newest stay."""
        for left in await sweeping.sweep(self.daemon, kept=UNUSED):
            log.info("%s %s is removed: %s", left.what, left.name, left.why)
