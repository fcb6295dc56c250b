"""Which zygote an instance comes from: one for each owner and project, preloaded where that is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aenv.engines.process.seconds import MOUNTS
from aenv.engines.process.site import Site
from aenv.engines.process.zygotes import Key, NotPreloadable, Zygote
from aenv.engines.stages import Stages
from aenv.errors import AEnvError

IDLE = 600.0
"""Seconds after which a zygote that nobody needs is ended."""
_Place = tuple[Key, bool]


class Nursery:
    """The zygotes of one spawner."""

    def __init__(self, site: Site, retired: Callable[[Zygote], None]) -> None:
        """``retired`` is told of each zygote that forks no more."""
        self._site = site
        self._retired = retired
        self._numbers = 0
        self._zygotes: dict[_Place, asyncio.Task[Zygote]] = {}
        self._stages: dict[_Place, Stages] = {}
        """Where the time of each start goes, or went."""
        self._bare: dict[Key, list[str]] = {}
        """Projects whose import must not be shared, and why."""
        self._retiring: set[asyncio.Task[None]] = set()

    async def zygote(self, spec: dict[str, Any], stages: Stages) -> Zygote:
        """The zygote for a spec: the one that runs, or a new one. Whoever comes meanwhile waits for the same.
        ``stages`` is told where the time goes."""
        site = self._site
        datasource = spec["datasource"] if site.powers.namespaces else ""
        volumes = tuple(sorted(volume["mount"] for volume in spec.get("volumes", ())))
        # What is in a second sandbox's mounts is nothing that an import could see, whenever it is done.
        mounts = volumes + MOUNTS if spec.get("second") else volumes
        key = Key(
            *(spec["owner"], spec["project"], spec["stamp"], spec["interpreter"], site.network(spec), datasource),
            mounts,
            forkable=not site.why_not_forked(spec),
        )
        preload = spec["preload"]
        if preload == "auto" and (site.isolation == "strict" or volumes):
            # A hostile import would reach every later fork of its zygote; and an import may look into a volume.
            preload = False
        if preload is False:
            return await self._shared(key, False, spec, stages)
        try:
            zygote = await self._shared(key, preload, spec, stages) if key not in self._bare else None
        except NotPreloadable as exc:
            self._bare[key] = exc.reasons
            zygote = None
        if zygote is None:
            zygote = await self._shared(key, False, spec, stages)
            zygote.reasons = self._bare[key]
            return zygote
        # What a warm one will be told is not known yet, but for the names of its secrets.
        told = dict.fromkeys(spec["secrets"], "") if spec["warm"] else {}
        if preload == "auto" and zygote.comes_too_late(site.variables(spec) | told | spec["environment_variables"]):
            return await self._shared(key, False, spec, stages)
        return zygote

    async def close(self) -> None:
        for starting in list(self._zygotes.values()):
            starting.cancel()
            with suppress(AEnvError, OSError, asyncio.CancelledError):
                await (await starting).close()
        if self._retiring:
            await asyncio.wait(set(self._retiring))

    async def _shared(self, key: Key, preload: bool | str, spec: dict[str, Any], stages: Stages) -> Zygote:
        place = (key, bool(preload))
        starting = self._zygotes.get(place)
        if starting is None or _over(starting):  # it may have failed when nobody waited for it any more
            self._stages[place] = Stages()
            starting = self._zygotes[place] = asyncio.create_task(self._start(place, preload, spec))
        try:
            if starting.done():
                zygote = starting.result()
            else:
                with stages.following(self._stages[place]):
                    zygote = await asyncio.shield(starting)
        except BaseException:
            if starting.done() and self._zygotes.get(place) is starting:
                self._forget(place)
            raise
        zygote.used = asyncio.get_running_loop().time()
        return zygote

    async def _start(self, place: _Place, preload: bool | str, spec: dict[str, Any]) -> Zygote:
        self._numbers += 1
        variables = self._site.variables(spec)
        patience = spec["startup_timeout"]
        stages, memory = self._stages[place], spec["memory"]
        zygote = await Zygote.start(self._site, self._numbers, place[0], preload, variables, patience, memory, stages)
        retiring = asyncio.create_task(self._retire(place, zygote))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        return zygote

    def _forget(self, place: _Place) -> None:
        del self._zygotes[place], self._stages[place]

    async def _retire(self, place: _Place, zygote: Zygote) -> None:
        """Forget a zygote when it dies, or when nobody has needed it for a while."""
        loop = asyncio.get_running_loop()
        ended = asyncio.create_task(zygote.ended())
        while not ended.done():
            unused = loop.time() - zygote.used if not zygote.instances else 0.0
            if unused >= IDLE:
                break
            await asyncio.wait((ended,), timeout=IDLE - unused)
        current = self._zygotes.get(place)
        if current is not None and current.done() and _made(current) is zygote:
            self._forget(place)
        self._retired(zygote)
        ended.cancel()
        await asyncio.wait((ended,))
        await zygote.close()


def _made(starting: asyncio.Task[Zygote]) -> Zygote | None:
    return None if starting.cancelled() or starting.exception() is not None else starting.result()


def _over(starting: asyncio.Task[Zygote]) -> bool:
    if not starting.done():
        return False
    zygote = _made(starting)
    return zygote is None or zygote.dead
