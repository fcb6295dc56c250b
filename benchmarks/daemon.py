"""The daemon that containers are measured on: the one that is named or there, else one that is started for the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from aenv import config, http
from aenv.engines.docker.containers import ENGINE
from aenv.engines.docker.daemon import Daemon
from aenv.errors import AEnvError, NotFound

_PROGRAMS = ("dockerd", "containerd", "runc", "iptables")


class Site(NamedTuple):
    """A daemon, and the base image that it has."""

    address: str
    image: str

    @property
    def variables(self) -> dict[str, str]:
        """For programs that have their sandboxes there."""
        return {"AENV_DOCKER_HOST": self.address, "AENV_BASE_IMAGE": self.image}


def lacking() -> str:
    """Why nothing can be measured on a daemon here; empty when it can."""
    if _found():
        return ""
    try:
        from tests import daemons
        from tests.daemons import rootfs
    except ImportError as exc:
        return f"no Docker answers, and the tools for development are not installed: {exc}"
    if reason := daemons.missing(*_PROGRAMS):
        return f"no Docker answers, and none can be started: {reason}"
    return "" if rootfs.archive().exists() else "no Docker answers, and there is no root file system: make components"


@contextmanager
def site() -> Iterator[Site]:
    """A daemon for the length of a block, with the base image of the sources as they are, unless one is named."""
    from tests import daemons

    named = os.environ.get("AENV_BASE_IMAGE")
    if address := _found():
        yield Site(address, named or daemons.base_image(address))
        return
    with daemons.ground(f"bench-{os.getpid()}") as ground:
        address = ground.dockerd()
        yield Site(address, daemons.base_image(address))


def _found() -> str:
    try:
        daemon = ask(Daemon.find())
    except AEnvError:
        return ""
    return str(config.get("docker_host") or config.get("docker_default") or daemon.base)


def ask(work: Coroutine[Any, Any, Any]) -> Any:
    """What a daemon answers, where no loop runs."""

    async def asked() -> Any:
        try:
            return await work
        finally:
            await http.close()

    return asyncio.run(asked())


def engines(home: Path) -> list[str]:
    """The engines that live on in a home."""
    return [place.name for place in (home / "docker").glob("*") if not place.name.startswith("_")]


async def left(daemon: Daemon, names: Iterable[str]) -> list[str]:
    """Containers and volumes of those engines, as paths of the daemon's."""
    found = []
    for name in names:
        query = {"all": "1", "filters": {"label": [f"{ENGINE}={name}"]}}
        found += [f"/containers/{row['Id']}" for row in await daemon.ask("GET", "/containers/json", query=query)]
        volumes = (await daemon.ask("GET", "/volumes", query=query))["Volumes"]
        found += [f"/volumes/{row['Name']}" for row in volumes or ()]
    return found


async def clear(daemon: Daemon, names: Iterable[str]) -> None:
    """Remove what lives on of them."""
    for path in await left(daemon, names):
        with suppress(NotFound):
            await daemon.ask("DELETE", path, query={"force": "1", "v": "1"})
