"""What engines that are gone left at a daemon: containers, doors and projects, each with the reason why it is nobody's.

What belongs to somebody who may be alive stays: an engine that ends with its process holds a lock, and one that lives
on ends what is over at once. Volumes of services are never touched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from aenv.engines.docker import containers, keeping
from aenv.engines.docker.containers import ENGINE, FACTS, ID, KIND, PROJECT, SANDBOX, SECOND, SOCKETS
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.keepers import USES
from aenv.engines.docker.second import AGENT, SHARES
from aenv.errors import AEnvError, NotFound

OVER = 3600.0
"""Seconds after which nobody comes for what has ended, or was to end."""
_MAKING = 600.0
"""Seconds in which a door has got its container."""
_REMOVAL = 60.0
"""Seconds in which the daemon must have removed something."""


class Left(NamedTuple):
    """Something that is nobody's."""

    what: str
    """``container``, ``project``, ``agent``, ``door`` or ``volume``."""
    name: str
    why: str


async def sweep(daemon: Daemon, *, unused: float, dry_run: bool = False) -> list[Left]:
    """Remove what is left, and tell what that was. Projects go that no sandbox has used for ``unused`` seconds."""
    dead = frozenset(keeping.gone())
    found = [left async for left in _left(daemon, dead, unused)]
    if dry_run:
        return found
    told = [await _removed(daemon, left) for left in found]
    for engine in dead:
        keeping.bury(engine)
    return told


async def _left(daemon: Daemon, dead: frozenset[str], unused: float) -> AsyncIterator[Left]:
    now = time.time()
    seconds = await _containers(daemon, SECOND)  # before their main containers, so that none is missing there
    sandboxes = await _containers(daemon, SANDBOX)
    going = set()
    for row in sandboxes:
        if why := await _why(daemon, row, dead, now):
            going.add(row["Id"])
            yield Left("container", _name(row), why)
    staying = [row["Labels"] for row in sandboxes if row["Id"] not in going]
    there = {(labels.get(ENGINE), labels.get(ID)) for labels in staying}
    for row in seconds:
        if (row["Labels"].get(ENGINE), row["Labels"].get(ID)) not in there:
            yield Left("container", _name(row), "its main container is gone")
    used = {labels.get(USES) for labels in staying} | {row["Labels"].get(USES) for row in seconds}
    for kind in (PROJECT, AGENT):
        for row in await _containers(daemon, kind):
            if _name(row) not in used and int(row.get("Created") or now) < now - unused:
                yield Left(kind, _name(row), "no sandbox has it")
    for kind, what in ((SOCKETS, "door"), (SHARES, "volume")):
        found = await daemon.ask("GET", "/volumes", query={"filters": {"label": [f"{KIND}={kind}"]}})
        for volume in (found or {}).get("Volumes") or ():
            labels = volume.get("Labels") or {}
            is_old = _moment(volume.get("CreatedAt"), now) < now - _MAKING
            if labels.get(ENGINE) in dead or (is_old and (labels.get(ENGINE), labels.get(ID)) not in there):
                yield Left(what, str(volume["Name"]), "its container is gone")


async def _why(daemon: Daemon, row: Mapping[str, Any], dead: frozenset[str], now: float) -> str:
    """Why a sandbox is nobody's; nothing when it may be somebody's."""
    engine, state = row["Labels"].get(ENGINE, ""), str(row.get("State") or "").lower()
    if engine in dead:
        return "its program is gone"
    if state in ("running", "paused", "restarting", "removing", "stopping"):
        return "its time is over, and what was to end it is gone" if _overdue(engine, row["Labels"], now) else ""
    since = float(row.get("Created") or now)
    with suppress(NotFound):
        found = await daemon.ask("GET", f"/containers/{row['Id']}/json")
        if containers.ended(found) is not None:
            since = _moment((found.get("State") or {}).get("FinishedAt"), now)
        return "it does not run, and nobody came for it" if since < now - OVER else ""
    return ""


def _overdue(engine: str, labels: Mapping[str, str], now: float) -> bool:
    """Whether it should have ended long ago. Only engines of this home: others' may have been told to live longer."""
    known = containers.facts_of({FACTS: labels.get(FACTS, "")})
    if known is None or known.ttl is None or engine.startswith("_") or not (keeping.root() / engine).is_dir():
        return False
    told = keeping.Keeping(engine, lasting=True).expires(labels.get(ID, ""))
    return (told or known.created_at + known.ttl) < now - OVER


async def _removed(daemon: Daemon, left: Left) -> Left:
    path, query = (f"/volumes/{left.name}", {}) if left.what in ("door", "volume") else _container(left.name)
    try:
        async with asyncio.timeout(_REMOVAL):
            await daemon.ask("DELETE", path, query=query)
    except NotFound:
        return left
    except (AEnvError, TimeoutError) as exc:
        return left._replace(why=f"{left.why}, but it cannot be removed: {exc or 'the daemon takes too long'}")
    return left


def _container(name: str) -> tuple[str, dict[str, str]]:
    return f"/containers/{name}", {"force": "1", "v": "1"}


async def _containers(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    query = {"all": "1", "filters": {"label": [f"{KIND}={kind}"]}}
    found = await daemon.ask("GET", "/containers/json", query=query)
    return [{**row, "Labels": row.get("Labels") or {}} for row in found or ()]


def _name(row: Mapping[str, Any]) -> str:
    return str((row.get("Names") or [row["Id"]])[0]).lstrip("/")


def _moment(text: object, otherwise: float) -> float:
    """A time as the daemon writes it."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return otherwise
