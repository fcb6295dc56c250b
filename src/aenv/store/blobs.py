"""Packages by their sha256: in a folder of this machine, or in a bucket (``bucket``).

What was acknowledged is on the disk. What is read is checked: the last piece of a blob is given only when all of it is
what its name says.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from aenv.cleanup import finish
from aenv.errors import AEnvError, Invalid, NotFound, StorageFull, TooLarge, did_you_mean

PIECE = 256 * 1024
"""Most bytes that are read at once."""
_DIGEST = re.compile("[0-9a-f]{64}", re.ASCII)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Blob(NamedTuple):
    """One that is kept."""

    digest: str
    size: int
    modified: float
    """When it was put last, though it was there before: seconds since the epoch."""


class Damaged(AEnvError):
    """What is kept is not what was put."""


class Blobs(ABC):
    """Bytes under their sha256, in hexadecimal."""

    @abstractmethod
    async def put(self, chunks: AsyncIterator[bytes], *, most: int) -> tuple[str, int]:
        """Keep what comes, and tell its digest and size; ``TooLarge`` when it is more than ``most`` bytes.

        All of it is kept, or nothing: also when the chunks end in an exception, or no room is left (``StorageFull``).
        """

    @abstractmethod
    def open(self, digest: str) -> AsyncIterator[bytes]:
        """The bytes in pieces; ``NotFound``, or ``Damaged`` before the last piece."""

    @abstractmethod
    async def exists(self, digest: str) -> bool: ...

    @abstractmethod
    async def delete(self, digest: str, *, before: float | None = None) -> bool:
        """Remove one; with ``before``, only when it was not put since. Whether it is gone; gone already is, too."""

    @abstractmethod
    def all(self) -> AsyncIterator[Blob]:
        """Every blob, in no order."""

    async def close(self) -> None:  # noqa: B027  a folder holds nothing
        """Let go."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self.close())


_PLACES = {"file": "aenv.store.blobs:open_folder", "s3": "aenv.store.bucket:open_bucket"}
"""What opens the place that an address begins with."""


async def open_blobs(url: str) -> Blobs:
    """The blobs in ``file:PATH`` or ``s3://bucket/prefix?endpoint=https://host:port&region=name``."""
    scheme, colon, _ = url.partition(":")
    if not colon:
        hint = "use file:PATH or s3://bucket/prefix?endpoint=https://host:port"
        raise Invalid("the address of the packages does not say what is there", hint=hint)
    if scheme not in _PLACES:
        raise Invalid(f"packages cannot be kept in {scheme[:32]!r}", hint=did_you_mean(scheme[:32], _PLACES))
    module, _, function = _PLACES[scheme].partition(":")
    opened: Blobs = await getattr(import_module(module), function)(url)
    return opened


def check_digest(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise Invalid(f"{digest[:80]!r} is not a sha256 in hexadecimal")


def missing(digest: str) -> NotFound:
    return NotFound(f"there is no package with the sha256 {digest}")


async def checked(pieces: AsyncIterator[bytes], digest: str, where: str) -> AsyncIterator[bytes]:
    """These pieces, the last of them only when all of them are right."""
    found = hashlib.sha256()
    held = b""
    async for piece in pieces:
        if held:
            yield held
        found.update(piece)
        held = piece
    if found.hexdigest() != digest:
        raise Damaged(
            f"{where} is damaged: its sha256 is {found.hexdigest()}", hint="put back a copy, or push the version again"
        )
    if held:
        yield held


async def open_folder(url: str) -> FileBlobs:
    """The blobs in the folder of ``file:PATH``, which is made when it is not there."""
    opened = FileBlobs(_folder(url))
    await asyncio.to_thread(opened.begin)
    return opened


def _folder(url: str) -> Path:
    name = url.removeprefix("file:").removeprefix("//")
    if not name or "\0" in name:
        raise Invalid(f"{url!r} names no folder", hint="use file:PATH")
    return Path(os.path.abspath(os.path.expanduser(name)))


class FileBlobs(Blobs):
    """Blobs as files. Several processes may share the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._coming = root / "coming"

    def begin(self) -> None:
        """Make the folder, and remove what a process that was killed had begun."""
        try:
            self._coming.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._coming.iterdir():
                with suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who is alive holds it
                    path.unlink()
        except OSError as exc:
            raise unusable(self.root, exc) from exc

    async def put(self, chunks: AsyncIterator[bytes], *, most: int) -> tuple[str, int]:
        file = _Coming(self._coming)
        try:
            await self._done(file.begin)
            digest, size = hashlib.sha256(), 0
            async for chunk in chunks:
                size += len(chunk)
                if size > most:
                    raise TooLarge(f"the package has more than {most} bytes")
                digest.update(chunk)
                await self._done(file.write, chunk)
            found = digest.hexdigest()
            await self._done(self._keep, file, found)
        finally:
            await self._done(file.discard)
        return found, size

    async def open(self, digest: str) -> AsyncIterator[bytes]:
        check_digest(digest)
        path = self._path(digest)
        async for piece in checked(_pieces(path, digest), digest, str(path)):
            yield piece

    async def exists(self, digest: str) -> bool:
        check_digest(digest)
        return await asyncio.to_thread(self._path(digest).is_file)

    async def delete(self, digest: str, *, before: float | None = None) -> bool:
        check_digest(digest)
        try:
            return await asyncio.to_thread(self._remove, digest, before)
        except OSError as exc:
            raise unusable(self.root, exc) from exc

    async def all(self) -> AsyncIterator[Blob]:
        for folder in await asyncio.to_thread(lambda: sorted(self.root.glob("[0-9a-f][0-9a-f]"))):
            for blob in await asyncio.to_thread(_listed, folder):
                yield blob

    def _path(self, digest: str) -> Path:
        return self.root / digest[:2] / digest

    def _keep(self, file: _Coming, digest: str) -> None:
        path = self._path(digest)
        file.sync()
        made = not path.parent.is_dir()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with self._alone():
            os.utime(file.path)
            os.replace(file.path, path)
        _sync_folder(path.parent)
        if made:
            _sync_folder(self.root)

    def _remove(self, digest: str, before: float | None) -> bool:
        path = self._path(digest)
        with self._alone():
            try:
                if before is not None and path.stat().st_mtime >= before:
                    return False
                path.unlink()
            except FileNotFoundError:
                pass
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody puts a blob while it is looked whether it may be removed."""
        lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    async def _done(self, work: Callable[..., None], *arguments: Any) -> None:
        """In a thread, and to its end: one that still writes must not meet a file that is closed."""
        try:
            await finish(asyncio.to_thread(work, *arguments))
        except OSError as exc:
            raise unusable(self.root, exc) from exc


class _Coming:
    """A file that is being written. It is locked for as long as it has no name that lasts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder
        self._descriptor = -1

    def begin(self) -> None:
        while True:
            self.path = self._folder / secrets.token_hex(8)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                return
            self.discard()  # somebody swept before it was locked

    def write(self, data: bytes) -> None:
        write_all(self._descriptor, data)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def discard(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self.path.unlink(missing_ok=True)
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def unusable(folder: Path, exc: OSError) -> AEnvError:
    """What an error of the file system means to the reader."""
    if exc.errno in _FULL:
        return StorageFull(f"no room is left in {folder}", hint="make room there; nothing was changed")
    hint = "make it writable for this user, or name another folder"
    return AEnvError(f"{folder} cannot hold packages: {exc.strerror or exc}", hint=hint)


async def _pieces(path: Path, digest: str) -> AsyncIterator[bytes]:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError:
        raise missing(digest) from None
    except OSError as exc:
        raise Damaged(f"{path} cannot be read: {exc.strerror or exc}") from exc
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece


def _listed(folder: Path) -> list[Blob]:
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if _DIGEST.fullmatch(path.name):
                status = path.stat()
                found.append(Blob(path.name, status.st_size, status.st_mtime))
    return found


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
