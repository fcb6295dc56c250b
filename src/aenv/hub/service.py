"""The hub: versions of environments, who may see and change them, and which one a reference means."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from weakref import WeakValueDictionary

import msgspec

from aenv import config
from aenv.auth.callers import Caller
from aenv.cleanup import finish
from aenv.engines.base import Engine
from aenv.errors import AEnvError, Conflict, Forbidden, Invalid, NotFound
from aenv.hub import records
from aenv.hub.builtin import publish
from aenv.hub.packages import Package, Packages, Turn, sweep
from aenv.hub.reading import Contents, Unreadable
from aenv.hub.records import ENVS, PAST, RUNNABLE, Doc, Found, Mark, Name, Past, Shelf
from aenv.models import RANGE, EnvRef
from aenv.project import versions
from aenv.project.composed import lock
from aenv.store import Change, Delete, Put, Store
from aenv.store.blobs import Blobs
from aenv.wire import PAGE, Env, EnvRequest, EnvStatus, Locked, Policy, PolicyChange, Status, timestamp

log = logging.getLogger("aenv.hub")

_ATTEMPTS = 30
"""Times that a change is tried again because somebody else was faster."""
_PAUSE = 0.002
_LONGEST_REASON = 1000
_SWEEP = 3600.0
"""Seconds between two searches for packages that nobody needs."""

T = TypeVar("T")
_Listed = tuple[list[Env], int]
_Planned = tuple[list[Change], T]


class Hub:
    """Environments by ``name@version``. What it is given stays open when it closes.

    Whoever may not see a name is told that there is none. ``engine`` runs what is pushed once, to read what it offers;
    ``folder`` is where packages lie meanwhile.
    """

    def __init__(
        self, store: Store, blobs: Blobs, engine: Engine, *, folder: Path | None = None, builtins: bool = True
    ) -> None:
        self._store = store
        self._shelf = Shelf(store)
        self._blobs = blobs
        self._packages = Packages(store, blobs, engine, folder or config.home() / "hub")
        self._builtins = builtins
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Remove what a hub that was killed left, and publish the built-in environments that are new."""
        await self._packages.start()
        if self._builtins:
            try:
                await publish(self)
            except BaseException:
                await finish(self.close())
                raise
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait((self._sweeping,))
        await self._packages.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self.close())

    # Versions

    async def create(self, caller: Caller, request: EnvRequest) -> Env:
        """Make a version. Whoever makes the first one of a name owns the name."""
        records.check_name(request.name)
        records.check_version(request.version)

        async def plan() -> _Planned[Env]:
            name, revision = await self._name_for(caller, request.name)
            id = f"{name.name}@{request.version}"
            past = await self._shelf.past(id) or Past()
            if request.version in name.versions:
                raise Conflict(
                    f"{id} is there already", hint="push another version, or use --force while it is unreleased"
                )
            if past.released:
                raise Conflict(f"{id} was released, and then deleted", hint="push another version")
            if len(name.versions) >= records.MOST_VERSIONS:
                hint = "delete some that nobody needs"
                raise Conflict(f"{name.name} has {len(name.versions)} versions; that is the most", hint=hint)
            now = time.time()
            at = timestamp(now)
            env = Env(id=id, name=name.name, version=request.version, created_at=at, updated_at=at)
            records.describe(env, request)
            env.updated_at = at
            records.advance(env, _announced(request))
            doc = Doc(history=past.history)
            doc.note("created", caller)
            found = Found(name=name, env=env, doc=doc, name_revision=revision, order=now)
            return [*found.puts(), Delete(PAST, id)], found.whole

        return await self._change(request.name, plan)

    async def update(self, caller: Caller, name: str, version: str, request: EnvRequest) -> Env:
        """Replace what is said of a version. What its package says, its configs, stays as it is there."""
        if (request.name, request.version) != (name, version):
            raise Invalid(
                f"the body is about {request.name[:100]}@{request.version[:100]}, the address about {name}@{version}",
                hint="send both alike",
            )

        def edit(found: Found) -> None:
            records.unreleased(found.env)
            _idle(found.env)
            records.describe(found.env, request, configs=not found.env.digest)
            if not found.env.digest and (status := _announced(request)) != found.env.status:
                records.advance(found.env, status)
                found.env.reason = ""
            found.doc.note("updated", caller)

        return (await self._edit(caller, name, version, edit)).whole

    async def get(self, caller: Caller, name: str, version: str | None = None) -> Env:
        """A version: an exact one, or the newest that a range admits, one that can run if there is any."""
        return (await self._find(caller, name, version)).whole

    async def resolve(self, caller: Caller, ref: EnvRef) -> Env:
        """The version to run. One that was yanked is meant only by who names it exactly. Its documents are left out."""
        name, _ = await self._name(caller, ref.name)
        mark = name.versions.get(ref.version or "")
        if mark is None:
            chosen = {version for version, mark in name.versions.items() if mark.runnable and not mark.yanked}
            if not chosen and name.versions:
                hint = f"'aenv versions {name.name}' shows what became of each"
                raise NotFound(f"no version of {name.name!r} can be run", hint=hint)
            version = versions.resolve(ref, chosen)
        else:
            version = ref.version or ""
        read = await self._shelf.env(f"{name.name}@{version}")
        if read is None:
            raise NotFound(f"no version of {name.name!r} is {version}: it was deleted at this moment")
        env = read.env
        env.owner = name.owner
        if env.status not in RUNNABLE or not env.digest:
            why = env.reason or ("it has no package" if not env.digest else f"it is {Status(env.status).title}")
            raise Conflict(f"{env.id} cannot be run: {why}", hint="push its package, or name another version")
        return env

    async def list(
        self,
        caller: Caller,
        *,
        name: str = "",
        tags: Sequence[str] = (),
        tool: str = "",
        owner: str = "",
        limit: int = PAGE,
        offset: int = 0,
    ) -> _Listed:
        """A page of the versions that a caller sees, the newest first, and how many there are.

        They have all of these tags, that tool, that owner, and a name that contains ``name``.
        """
        facets = records.facets_of(tags=tags, tools=[tool] if tool else (), owner=owner)
        page = await self._shelf.page(caller, facets, name, limit, offset)
        return [await self._shelf.seen(record) for record in page.records], page.total

    async def versions(self, caller: Caller, name: str, *, limit: int = PAGE, offset: int = 0) -> _Listed:
        """The versions of a name, the newest first."""
        found, _ = await self._name(caller, name)
        page = await self._store.find(ENVS, {"name": found.name}, limit=limit, offset=offset)
        return [await self._shelf.seen(record) for record in page.records], page.total

    async def exists(self, caller: Caller, name: str, version: str) -> bool:
        records.check_name(name)
        records.check_version(version)
        found = await self._shelf.name(name)
        return found is not None and found[0].name == name and found[0].reads(caller) and version in found[0].versions

    async def status(self, caller: Caller, name: str, version: str) -> EnvStatus:
        env = (await self._find(caller, name, version)).env
        title = Status(env.status).title
        return EnvStatus(name=env.name, version=env.version, status=env.status, title=title, reason=env.reason)

    async def release(self, caller: Caller, name: str, version: str) -> Env:
        """Fix a version for ever. One that is released already is left as it is. What it needs must be fixed before."""
        unfixed = await self._unfixed((await self._writable(caller, name, version)).env)

        def edit(found: Found) -> None:
            if found.env.status == Status.RELEASED:
                return
            if unfixed:
                raise Conflict(
                    f"{found.env.id} needs {unfixed}, which may still change", hint=f"release {unfixed} first"
                )
            if found.env.yanked:
                raise Conflict(f"{found.env.id} was yanked: {found.env.yanked}", hint="push another version")
            records.advance(found.env, Status.RELEASED)
            _touch(found, "released", caller)

        return (await self._edit(caller, name, version, edit)).whole

    async def _unfixed(self, env: Env) -> str:
        """What a version needs that is not released, if there is anything."""
        for locked in env.locked.values():
            needed = await self._shelf.env(locked.env)
            if needed is None or needed.env.status != Status.RELEASED:
                return locked.env
        return ""

    async def yank(self, caller: Caller, name: str, version: str, reason: str = "") -> Env:
        """Withdraw a version for ever: only who names it exactly still gets it."""
        reason = " ".join(reason.split())[:_LONGEST_REASON] or "no reason was given"

        def edit(found: Found) -> None:
            _idle(found.env)
            found.env.yanked = reason
            _touch(found, f"yanked: {reason}", caller)

        return (await self._edit(caller, name, version, edit)).whole

    async def delete(self, caller: Caller, name: str, version: str) -> None:
        """Remove a version on which nobody depends. What is released, only an admin may remove."""

        async def plan() -> _Planned[None]:
            found = await self._writable(caller, name, version)
            env = found.env
            _idle(env)
            released = env.status == Status.RELEASED
            yank = f"withdraw it instead: 'aenv yank {env.id}'"
            if released and not caller.admin:
                raise Conflict(f"{env.id} is released and stays", hint=yank)
            if users := await self._shelf.dependants(caller, found):
                raise Conflict(f"{env.id} is needed by {', '.join(users)}", hint=yank)
            found.doc.note("deleted", caller)
            del found.name.versions[env.version]
            past = msgspec.json.encode(Past(history=found.doc.history, released=released))
            return [
                records.put_name(found.name, found.name_revision),
                Delete(ENVS, env.id, expect=found.env_revision),
                Delete(records.DOCS, env.id),
                Put(PAST, env.id, past),
            ], None

        await self._change(name, plan)

    # Packages

    async def upload(self, caller: Caller, name: str, version: str, chunks: AsyncIterator[bytes]) -> Env:
        """Give a version its package, which is read in a sandbox. One that cannot be read fails the version.

        When it ends in any other way, the version is what it was before.
        """
        before = await self._writable(caller, name, version)
        records.unreleased(before.env)
        records.advance(msgspec.structs.replace(before.env), Status.TESTING)
        async with (
            self._packages.received(chunks, caller.owner, before.env) as package,
            self._packages.reading(caller.owner, before.env.id) as turn,
        ):
            locked = await lock(before.env, package.project.depends_on, lambda ref: self.resolve(caller, ref))
            return (await self._read(caller, before, package, locked, turn)).whole

    async def _read(
        self, caller: Caller, before: Found, package: Package, locked: dict[str, Locked], turn: Turn
    ) -> Found:
        now = before
        reason = ""
        contents = Contents()

        async def become(edit: Callable[[Found], None]) -> None:
            nonlocal now
            now = await self._edit(caller, before.name.name, before.env.version, edit, turn)

        def test(found: Found) -> None:
            records.unreleased(found.env)
            if found.env.status == Status.TESTING:  # and it is our turn: who read it before is dead
                found.env.status = Status.FAILED
            if _state(found.env) != _state(before.env):
                raise Conflict(f"{found.env.id} was changed while its package came", hint="look what is there now")
            records.advance(found.env, Status.TESTING)

        def succeed(found: Found) -> None:
            records.advance(found.env, Status.READY)
            package.describe(found, contents)
            found.env.locked = locked
            _touch(found, f"package {package.digest[:12]}", caller)

        def fail(found: Found) -> None:
            records.advance(found.env, Status.FAILED)
            found.env.reason = reason
            found.env.digest, found.env.size, found.env.tools, found.env.locked = "", 0, [], {}
            found.doc = Doc(history=found.doc.history)
            _touch(found, "failed", caller)

        def restore(found: Found) -> None:
            found.env = before.env

        try:
            await finish(become(test))
            contents = await self._packages.read(package, caller.owner)
            await self._packages.keep(package)
            await finish(become(succeed))
        except Unreadable as exc:
            reason = exc.message
            await finish(become(fail))
            raise
        except BaseException:
            if now.env.status == Status.TESTING:
                with suppress(AEnvError):  # somebody else has said what it is
                    await finish(become(restore))
            raise
        return now

    async def package(self, caller: Caller, name: str, version: str | None = None) -> tuple[Env, AsyncIterator[bytes]]:
        """A version and the bytes of its package."""
        env = (await self._find(caller, name, version)).env
        if not env.digest:
            raise NotFound(f"{env.id} has no package", hint="its author pushes it with 'aenv push'")
        return env, self._blobs.open(env.digest)

    # Policies

    async def policy(self, caller: Caller, name: str) -> Policy:
        """Who may see a name, and who may push to it. Who may push sees who else may."""
        found, _ = await self._name(caller, name)
        if not found.writes(caller):
            return Policy(owner=found.owner, public=found.public)
        return _policy(found)

    async def set_policy(self, caller: Caller, name: str, change: PolicyChange) -> Policy:
        """Change who may see a name, who may push to it, or whose it is. Its owner may, and an admin."""
        records.check_users([*(change.readers or ()), *(change.writers or ())], "readers and writers")
        if change.owner is not None:
            records.check_users([change.owner], "owner")

        async def plan() -> _Planned[Policy]:
            found, revision = await self._name(caller, name)
            if not caller.owns(found.owner):
                raise Forbidden(f"only {found.owner}, its owner, may change who has access to {found.name}")
            given = {key: value for key, value in msgspec.structs.asdict(change).items() if value is not None}
            found = msgspec.structs.replace(found, **given)
            found.readers = sorted(set(found.readers))
            found.writers = sorted(set(found.writers))
            if (users := len({*found.readers, *found.writers})) > records.MOST_USERS:
                raise Invalid(f"{users} readers and writers; {records.MOST_USERS} is the most", hint="make it public")
            changes: list[Change] = [records.put_name(found, revision)]
            for kept in await self._shelf.envs({"name": found.name}):
                kept.env.owner = found.owner
                changes.append(records.put_env(kept, found))
            return changes, _policy(found)

        return await self._change(name, plan)

    # Finding, and changing what was found

    async def _name(self, caller: Caller, name: str) -> tuple[Name, int]:
        """A name that the caller may see, and its revision."""
        records.check_name(name)
        found = await self._shelf.name(name)
        if found is None or found[0].name != name or not found[0].reads(caller):
            raise records.missing(name, await self._shelf.near(caller, name))
        return found

    async def _name_for(self, caller: Caller, name: str) -> tuple[Name, int]:
        """A name that the caller may push to, made when nobody has it."""
        found = await self._shelf.name(name)
        if found is None:
            return Name(name=name, owner=caller.owner, created=time.time()), 0
        if not found[0].reads(caller):
            raise Conflict(f"the name {name!r} is taken", hint="choose another one")
        if found[0].name != name:
            hint = "use that name, or choose another one"
            raise Conflict(f"{name!r} and {found[0].name!r}, which is there, differ in case only", hint=hint)
        records.writable(found[0], caller)
        return found

    async def _find(self, caller: Caller, name: str, version: str | None) -> Found:
        """A version that the caller may see."""
        if version is not None and not RANGE.fullmatch(version):
            raise Invalid(f"{version[:100]!r} is not a version", hint="use 1.0.1, ^1.0, ~1.0, 1.0 or latest")
        found, revision = await self._name(caller, name)
        exact = version if version in found.versions else None
        chosen = exact or versions.resolve(EnvRef(name, version), _candidates(found, version))
        if (read := await self._shelf.found(found, revision, chosen)) is None:
            raise NotFound(f"no version of {name!r} is {chosen}: it was deleted at this moment")
        read.env.owner = found.owner
        return read

    async def _writable(self, caller: Caller, name: str, version: str) -> Found:
        """An exact version that the caller may change."""
        records.check_version(version)
        found = await self._find(caller, name, version)
        records.writable(found.name, caller)
        return found

    async def _edit(
        self, caller: Caller, name: str, version: str, edit: Callable[[Found], None], turn: Turn | None = None
    ) -> Found:
        """Change a version; with ``turn``, only while the caller has it."""

        async def plan() -> _Planned[Found]:
            found = await self._writable(caller, name, version)
            edit(found)
            return [*found.puts(), *([await turn.held()] if turn else [])], found

        return await self._change(name, plan)

    async def _change(self, name: str, plan: Callable[[], Awaitable[_Planned[T]]]) -> T:
        """Do what ``plan`` says of a name. It is asked again when another hub on the same store was faster."""
        async with self._changing.setdefault(name.lower(), asyncio.Lock()):
            for attempt in range(_ATTEMPTS):
                changes, result = await plan()
                try:
                    await self._store.change(*changes)
                    return result
                except Conflict:
                    await asyncio.sleep(random.uniform(0, _PAUSE * 2 ** min(attempt, 6)))  # noqa: S311
        raise Conflict(f"others change {name} all the time", hint="try again")

    async def _sweep(self) -> None:
        while True:
            try:
                await sweep(self._store, self._blobs)
            except AEnvError as exc:
                log.warning("packages that nobody needs are still there: %s", exc)
            await asyncio.sleep(_SWEEP)


def _announced(request: EnvRequest) -> Status:
    """What a version without a package is. Who sends a status, as existing clients do, sends no package."""
    return Status.PENDING if request.status in (None, "") else Status.CREATED


def _idle(env: Env) -> None:
    if env.status == Status.TESTING:
        raise Conflict(f"the package of {env.id} is being read at this moment", hint="wait until that is done")


def _state(env: Env) -> tuple[int, str, str]:
    """What tells whether a version was changed."""
    return env.status, env.digest, env.updated_at


def _touch(found: Found, what: str, caller: Caller) -> None:
    found.env.updated_at = timestamp(time.time())
    found.doc.note(what, caller)


def _candidates(name: Name, version: str | None) -> list[str]:
    """Versions that a reference may mean: those that can run, else those that were not yanked, else any."""
    ref = EnvRef(name.name, version)
    tests: list[Callable[[Mark], bool]] = [
        lambda mark: mark.runnable and not mark.yanked,
        lambda mark: not mark.yanked,
        lambda mark: True,
    ]
    for test in tests:
        found = [known for known, mark in name.versions.items() if test(mark)]
        if versions.newest(found, ref) is not None:
            return found
    return list(name.versions)


def _policy(name: Name) -> Policy:
    return Policy(owner=name.owner, public=name.public, readers=name.readers, writers=name.writers)
