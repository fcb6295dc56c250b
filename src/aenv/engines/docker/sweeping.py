"""What engines that are gone left at a daemon: containers, doors and projects, each with the reason why it is nobody's.

What belongs to somebody who may be alive stays: an engine that ends with its process holds a lock, and its containers
say which process that is; and one that lives on ends what is over at once. Storage of services is never touched.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from aenv.engines.docker import containers, keeping
from aenv.engines.docker.containers import ENGINE, FACTS, ID, KIND, PROCESS, PROJECT, SANDBOX, SECOND, SOCKETS
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.keepers import ABANDONED, FILLING, USES
from aenv.engines.docker.second import AGENT, SHARES, agent_image
from aenv.engines.docker.volumes import STORAGE
from aenv.errors import AEnvError, NotFound

OVER = 3600.0
"""Seconds after which nobody comes for what has ended, or was to end."""
_MAKING = 600.0
"""Seconds in which a door has got its container."""
_ELSEWHERE = 600.0
"""Seconds after which somebody else removes what a program that is dead left in its own home."""
_REMOVAL = 60.0
"""Seconds in which the daemon must have removed something."""
Row = dict[str, Any]
"""What a daemon tells of a container."""


class Left(NamedTuple):
    """Something that is nobody's."""

    what: str
    """``container``, ``project``, ``agent``, ``door`` or ``volume``."""
    name: str
    why: str
    engine: str = ""
    """Whose it was."""
    is_gone: bool = True
    """False when it could not be removed, which ``why`` says, too."""


async def sweep(daemon: Daemon, *, unused: float = 0.0, kept: int = 0, dry_run: bool = False) -> list[Left]:
    """Remove what is left, and tell what that was. Projects go that no sandbox has, once they are ``unused`` seconds
    old, but for the newest ``kept``."""
    known = frozenset(keeping.gone())  # before all else: those make nothing more
    seconds = await _containers(daemon, SECOND)  # before their main containers, so that none is missing there
    sandboxes = await _containers(daemon, SANDBOX)
    dead = known | {row["Labels"].get(ENGINE, "") for row in sandboxes if _is_of_dead(row)}
    found = [left async for left in _sandboxes(daemon, sandboxes, seconds, dead)]
    going = {left.name for left in found}
    staying = [row["Labels"] for row in (*sandboxes, *seconds) if _name(row) not in going]
    found += [left async for left in _kept(daemon, {labels.get(USES) for labels in staying}, unused, kept)]
    found += [left async for left in _volumes(daemon, staying, dead)]
    if dry_run:
        return found
    told = [await _removed(daemon, left) for left in found]
    failed = {left.engine for left in told if not left.is_gone}
    for engine in known - failed:
        keeping.bury(engine)
    return told


def _is_of_dead(row: Row) -> bool:
    """Whether its process is dead, whichever home that had; its own home comes first."""
    now = time.time()
    is_old = int(row.get("Created") or now) < now - _ELSEWHERE
    return is_old and keeping.is_dead(row["Labels"].get(PROCESS, ""))


async def _sandboxes(
    daemon: Daemon, sandboxes: Sequence[Row], seconds: Sequence[Row], dead: frozenset[str]
) -> AsyncIterator[Left]:
    there = set()
    for row in sandboxes:
        if why := await _why(daemon, row, dead, time.time()):
            yield Left("container", _name(row), why, row["Labels"].get(ENGINE, ""))
        else:
            there.add(_whose(row["Labels"]))
    for row in seconds:
        if _whose(row["Labels"]) not in there:
            yield Left("container", _name(row), "its main container is gone", row["Labels"].get(ENGINE, ""))


async def _kept(daemon: Daemon, used: Collection[object], unused: float, kept: int) -> AsyncIterator[Left]:
    """Keepers of projects and agents that no sandbox has, and those that were never filled."""
    now = time.time()
    for kind in (PROJECT, AGENT):
        rows = sorted(await _containers(daemon, kind), key=lambda row: -int(row.get("Created") or now))
        for row in rows:
            if _name(row).startswith(FILLING) and int(row.get("Created") or now) < now - ABANDONED:
                yield Left(kind, _name(row), "it was never filled")
        free = [row for row in rows if not _name(row).startswith(FILLING) and _name(row) not in used]
        for row in free[kept:]:
            if int(row.get("Created") or now) < now - unused:
                yield Left(kind, _name(row), "no sandbox has it")


async def _volumes(daemon: Daemon, staying: Sequence[Mapping[str, str]], dead: frozenset[str]) -> AsyncIterator[Left]:
    now, there = time.time(), set(map(_whose, staying))
    for kind, what in ((SOCKETS, "door"), (SHARES, "volume"), (STORAGE, "volume")):
        found = await daemon.ask("GET", "/volumes", query={"filters": {"label": [f"{KIND}={kind}"]}})
        for volume in (found or {}).get("Volumes") or ():
            labels = volume.get("Labels") or {}
            is_old = _moment(volume.get("CreatedAt"), now) < now - _MAKING
            is_loose = is_old and _whose(labels) not in there and kind != STORAGE  # which has data of a service
            if labels.get(ENGINE) in dead or is_loose:
                yield Left(what, str(volume["Name"]), "its container is gone", labels.get(ENGINE, ""))


def _whose(labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    return labels.get(ENGINE), labels.get(ID)


async def _why(daemon: Daemon, row: Row, dead: frozenset[str], now: float) -> str:
    """Why a sandbox is nobody's; nothing when it may be somebody's."""
    engine, state = row["Labels"].get(ENGINE, ""), str(row.get("State") or "").lower()
    if engine in dead:
        return "its program is gone"
    if state in ("running", "paused", "restarting", "removing", "stopping"):
        return "its time is over, and what was to end it is gone" if _overdue(engine, row["Labels"], now) else ""
    since = float(row.get("Created") or now)
    with suppress(NotFound):
        found = await daemon.inspect(row["Id"])
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
        await daemon.ask("DELETE", path, query=query, timeout=_REMOVAL)
        if left.what == AGENT:
            await daemon.ask("DELETE", f"/images/{agent_image(left.name)}", timeout=_REMOVAL)
    except NotFound:
        return left
    except AEnvError as exc:
        why = f"{left.why}, but it cannot be removed: {exc.message}"
        return left._replace(why=why, is_gone=False)
    return left


def _container(name: str) -> tuple[str, dict[str, str]]:
    return f"/containers/{name}", {"force": "1", "v": "1"}


async def _containers(daemon: Daemon, kind: str) -> list[Row]:
    query = {"all": "1", "filters": {"label": [f"{KIND}={kind}"]}}
    found = await daemon.ask("GET", "/containers/json", query=query)
    return [{**row, "Labels": row.get("Labels") or {}} for row in found or ()]


def _name(row: Row) -> str:
    return str((row.get("Names") or [row["Id"]])[0]).lstrip("/")


def _moment(text: object, otherwise: float) -> float:
    """A time as the daemon writes it."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return otherwise
