"""Packages on their way: received, unpacked, read in their turn, kept; and the removal of those that nobody needs."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from aenv.cleanup import finish
from aenv.engines.base import Engine
from aenv.errors import AEnvError, Conflict, Invalid, RateLimited, TooLarge
from aenv.hub import reading, records
from aenv.hub.reading import Contents
from aenv.hub.records import BUSY, Doc, Found, Shelf
from aenv.project import Project, archive
from aenv.project import read as read_project
from aenv.store import Delete, Put, Store
from aenv.store.blobs import PIECE, Blobs, unusable, write_all
from aenv.wire import Env, EnvRequest, Tool

MOST = archive.MAX_SIZE
"""Bytes of a package."""
KEPT = 3600.0
"""Seconds for which a package stays that no version has, or has yet."""
_READINGS = 4
"""Packages that are read at once: one of each owner."""
_RECEIVED, _RECEIVED_OF_ONE = 32, 4
"""Packages that come at once, of everybody and of one owner."""
_PATIENCE = 300.0
"""Seconds to wait for one's turn."""
_LEASE, _RENEWAL = 30.0, 8.0
"""Seconds after which a reader that was not heard of is dead, and between two signs of its life."""
_LOOKED_UP = 100
"""Packages that are looked up at once."""

T = TypeVar("T")


@dataclass(frozen=True)
class Package:
    """An archive that is complete and sound, and what is in it."""

    file: Path
    digest: str
    size: int
    project: Project

    async def chunks(self) -> AsyncIterator[bytes]:
        with self.file.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE):
                yield piece

    def said(self, env: Env) -> EnvRequest:
        """What the package says of its version; where it says nothing, what was said before."""
        project = self.project
        return EnvRequest(
            name=env.name,
            version=env.version,
            description=project.description,
            tags=list(project.tags),
            code_url=project.value("codeUrl") or env.code_url,
            artifacts=project.value("artifacts") or env.artifacts,
            build_config=project.value("buildConfig"),
            test_config=project.value("testConfig"),
            deploy_config=project.value("deployConfig"),
        )

    def describe(self, found: Found, contents: Contents) -> None:
        """Let a version be what its package is."""
        env = found.env
        records.describe(env, self.said(env))
        env.digest, env.size, env.reason = self.digest, self.size, ""
        env.tools = [Tool(name=tool.name) for tool in contents.tools]
        found.doc = Doc(
            digest=self.digest,
            readme=contents.readme,
            tools=contents.tools,
            functions=contents.functions,
            rewards=contents.rewards,
            history=found.doc.history,
        )


class Packages:
    """What one hub receives and reads, below ``folder``."""

    def __init__(self, store: Store, blobs: Blobs, engine: Engine, folder: Path) -> None:
        self._store = store
        self._blobs = blobs
        self._engine = engine
        self._folder = folder
        self._own = _Folder()
        self._readings = asyncio.Semaphore(_READINGS)
        self._coming = asyncio.Semaphore(_RECEIVED)
        self._owners: WeakValueDictionary[tuple[str, str], asyncio.Semaphore] = WeakValueDictionary()

    async def start(self) -> None:
        """Take a folder, and remove those that were left by hubs that were killed."""
        try:
            await asyncio.to_thread(self._own.take, self._folder)
        except OSError as exc:
            raise unusable(self._folder, exc) from exc

    async def close(self) -> None:
        await asyncio.to_thread(self._own.leave)

    @asynccontextmanager
    async def received(self, chunks: AsyncIterator[bytes], owner: str, env: Env) -> AsyncIterator[Package]:
        """An archive that comes, once it is complete, sound, and the one of that version."""
        async with _turn(self._turns("coming", owner, _RECEIVED_OF_ONE), self._coming):
            room = self._own.path / secrets.token_hex(8)
            try:
                await self._done(room.mkdir)
                package = await self._received(chunks, room)
                project = package.project
                if (project.name, project.version) != (env.name, env.version):
                    raise Invalid(
                        f"the package is {project.name}@{project.version}, not {env.id}",
                        hint="push it under the name and version of its config.json",
                    )
                records.describe(msgspec.structs.replace(env), package.said(env))
                yield package
            finally:
                await finish(asyncio.to_thread(shutil.rmtree, room, ignore_errors=True))

    @asynccontextmanager
    async def reading(self, owner: str, id: str) -> AsyncIterator[Turn]:
        """The owner's turn to have a package read, and nobody else's who pushes the same version."""
        async with _turn(self._turns("reading", owner, 1), self._readings):
            turn = Turn(self._store, id)
            await turn.take()
            renewing = asyncio.create_task(turn.renew())
            try:
                yield turn
            finally:
                renewing.cancel()
                await finish(turn.leave(renewing))

    async def read(self, package: Package, owner: str) -> Contents:
        """What a package offers; ``Unreadable`` when that cannot be told."""
        return await reading.read(self._engine, package.project, owner=owner, stamp=package.digest)

    async def keep(self, package: Package) -> None:
        digest, _ = await self._blobs.put(package.chunks(), most=MOST)
        if digest != package.digest:
            raise AEnvError(f"{package.file} was changed while it was read", hint="push it again")

    async def _received(self, chunks: AsyncIterator[bytes], room: Path) -> Package:
        digest, size = hashlib.sha256(), 0
        path, root = room / "package", room / "project"
        with await self._done(path.open, "xb", 0) as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > MOST:
                    raise TooLarge(f"the package has more than {MOST} bytes")
                digest.update(chunk)
                await self._done(write_all, file.fileno(), chunk)
        await self._done(_unpack, path, root)
        return Package(path, digest.hexdigest(), size, await self._done(read_project, root))

    async def _done(self, work: Callable[..., T], *arguments: Any) -> T:
        """In a thread, and to its end, whoever leaves meanwhile."""
        result: list[T] = []

        async def run() -> None:
            result.append(await asyncio.to_thread(work, *arguments))

        try:
            await finish(run())
        except OSError as exc:
            raise unusable(self._folder, exc) from exc
        return result[0]

    def _turns(self, what: str, owner: str, most: int) -> asyncio.Semaphore:
        found = self._owners.get((what, owner))
        if found is None:
            found = self._owners[what, owner] = asyncio.Semaphore(most)
        return found


class Turn:
    """The right to have the package of a version read: one at a time has it, of all hubs on a store."""

    def __init__(self, store: Store, id: str) -> None:
        self._store = store
        self._id = id
        self._value = b'"%b"' % secrets.token_hex(8).encode()

    async def take(self) -> None:
        try:
            await self._store.change(self._put(0))
        except Conflict:
            raise Conflict(f"{self._id} is being pushed by somebody else", hint="wait until that is done") from None

    async def held(self) -> Put:
        """A change that can be made only while this has the right; ``Conflict`` when it has it no more."""
        record = await self._store.get(BUSY, self._id)
        if record is None or record.value != self._value:
            raise Conflict(f"{self._id} was pushed by somebody else meanwhile", hint="look what is there now")
        return self._put(record.revision)

    async def renew(self) -> None:
        """Give signs of life."""
        while True:
            await asyncio.sleep(_RENEWAL)
            with suppress(AEnvError):  # a store that is away for a moment hears of it the next time
                await self._store.change(await self.held())

    async def leave(self, renewing: asyncio.Task[None]) -> None:
        await asyncio.wait((renewing,))
        with suppress(AEnvError):  # it ends by itself
            await self._store.change(Delete(BUSY, self._id, expect=(await self.held()).expect))

    def _put(self, revision: int) -> Put:
        return Put(BUSY, self._id, self._value, expect=revision, expires_at=time.time() + _LEASE)


class _Folder:
    """A folder that belongs to this process for as long as it lives."""

    def __init__(self) -> None:
        self.path = Path()
        self._lock = -1

    def take(self, parent: Path) -> None:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(parent):
            for path in parent.iterdir():
                if path.is_dir():
                    _remove_dead(path)
            self.path = parent.absolute() / secrets.token_hex(8)
            self.path.mkdir(mode=0o711)
            self._lock = _locked(self.path / "lock")

    def leave(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One at a time makes or removes folders here."""
    lock = os.open(parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _locked(path: Path) -> int:
    """Lock a file, and make it if it is not there; ``BlockingIOError`` when somebody else has it locked."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove_dead(path: Path) -> None:
    with suppress(OSError):  # who made it is alive, or it is not ours to remove
        lock = _locked(path / "lock")
        try:
            shutil.rmtree(path)
        finally:
            os.close(lock)


def _unpack(path: Path, root: Path) -> None:
    with path.open("rb") as file:
        try:
            archive.unpack(file, root)
        except AEnvError as exc:
            if isinstance(exc.__cause__, OSError):
                raise exc.__cause__ from None
            raise


@asynccontextmanager
async def _turn(*turns: asyncio.Semaphore) -> AsyncIterator[None]:
    """Wait for all of these, one after the other."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_PATIENCE) as limit:
                for turn in turns:
                    await stack.enter_async_context(turn)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RateLimited("too many packages are being pushed", hint="try again later") from None
        yield


async def sweep(store: Store, blobs: Blobs, *, kept: float = KEPT) -> int:
    """Remove packages that no version has, and that were not put lately; how many."""
    before = time.time() - kept
    old: list[str] = []
    removed = 0
    async for blob in blobs.all():
        if blob.modified < before:
            old.append(blob.digest)
        if len(old) == _LOOKED_UP:
            removed += await _removed(store, blobs, old, before)
            old = []
    return removed + await _removed(store, blobs, old, before)


async def _removed(store: Store, blobs: Blobs, digests: list[str], before: float) -> int:
    needed = {kept.env.digest for kept in await Shelf(store).envs({"digest": digests})}
    gone = [await blobs.delete(digest, before=before) for digest in digests if digest not in needed]
    return sum(gone)
