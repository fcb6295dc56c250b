"""What Docker or Podman gives sandboxes here, in rows for ``aenv doctor``: what is so, and how to mend it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from aenv import config
from aenv.engines.docker.daemon import About, Daemon
from aenv.engines.docker.doors import outlook
from aenv.engines.docker.images import look
from aenv.errors import AEnvError, NotFound

HARDENED = "runsc"
"""gVisor: a kernel of its own for each container."""
_LIMITS = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpu": "CpuCfsQuota", "processes": "PidsLimit"}


class Row(NamedTuple):
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warn"]
    detail: str
    fix: str = ""


async def explain(address: str | None = None) -> list[Row]:
    """How it is with the daemon; one row when there is none."""
    try:
        daemon = await Daemon.find(address)
        about, info = await daemon.about(), await daemon.ask("GET", "/info")
        return [
            _daemon(daemon, about),
            Row("docker: storage", "ok", f"{about.storage} in {about.root}"),
            *_limits(info),
            _runtimes(daemon, info),
            _network(daemon, about),
            await _base_image(daemon, about),
        ]
    except AEnvError as exc:
        return [
            Row("docker", "warn", f"no sandboxes as containers: {exc.message}", exc.hint or "start Docker or Podman")
        ]


def _daemon(daemon: Daemon, about: About) -> Row:
    whose = "rootless" if about.rootless else "as root"
    detail = f"{about.name} {about.version} {whose} at {daemon.shown}, API {about.api}, {about.os}/{about.architecture}"
    return Row("docker", "ok", detail)


def _limits(info: Mapping[str, Any]) -> Iterator[Row]:
    version = f"control groups {info.get('CgroupVersion') or 1}"
    if lacking := [what for what, key in _LIMITS.items() if not info.get(key, key == "SwapLimit")]:
        fix = "let the daemon have control groups: as root, or delegate them to its user; swap needs swapaccount=1"
        yield Row("docker: limits", "warn", f"not limited here: {', '.join(lacking)} ({version})", fix)
    else:
        yield Row("docker: limits", "ok", f"{', '.join(_LIMITS)}, by {version}")


def _runtimes(daemon: Daemon, info: Mapping[str, Any]) -> Row:
    known = {name: str((found or {}).get("path") or "") for name, found in (info.get("Runtimes") or {}).items()}
    here = daemon.base.startswith("unix:")
    there = sorted(name for name, path in known.items() if not (here and os.path.isabs(path)) or os.path.exists(path))
    detail = f"{', '.join(there)}; {info.get('DefaultRuntime') or 'runc'} when nothing is said"
    chosen = config.get("docker_runtime")
    if chosen and chosen not in there:
        fix = f"install it, and name it in the daemon's settings, or unset AENV_DOCKER_RUNTIME, which is {chosen}"
        return Row("docker: runtimes", "warn", f"{chosen} is not there; there is {detail}", fix)
    if HARDENED not in there:
        return Row(
            "docker: runtimes", "ok", detail, f"for hostile code: install gVisor, AENV_DOCKER_RUNTIME={HARDENED}"
        )
    return Row("docker: runtimes", "ok", detail)


def _network(daemon: Daemon, about: About) -> Row:
    ways = ["none", *(["lists of hosts"] if outlook(daemon, about) is not None else [])]
    if "bridge" in about.networks:
        return Row("docker: network", "ok", ", ".join([*ways, "full by a bridge"]))
    detail = f"{', '.join(ways)}; not full: the daemon has no bridge"
    return Row("docker: network", "warn", detail, "let the daemon make its bridge")


async def _base_image(daemon: Daemon, about: About) -> Row:
    name = config.get("base_image")
    try:
        found = await look(daemon, name)
    except NotFound:
        fix = f"make base-image, or {about.name} pull {name}; AENV_BASE_IMAGE names another one"
        return Row("docker: base image", "warn", f"{name} is not there; only environments with an image run", fix)
    return Row("docker: base image", "ok", f"{name}, {found.platform}, {found.size / 1024**2:.0f} MiB")
