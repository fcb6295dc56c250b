"""A whole hub as one file: a tar with every name, version and package. Taking it in twice does no harm.

    hub.json                     what the file is
    names/NAME.json              who has access to a name
    versions/NAME@VERSION.json   a version
    past/NAME@VERSION.json       what is remembered of one that was deleted
    blobs/SHA256                 a package

Which versions a name has, and how all are found again, follows from these and is made anew where they are taken in.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
from msgspec import Struct

from aenv.cleanup import finish
from aenv.errors import Conflict, Invalid
from aenv.hub import records
from aenv.hub.packages import MOST
from aenv.hub.records import NAMES, PAST, Doc, Found, Name, Past, Shelf
from aenv.store import Put, Store
from aenv.store.blobs import PIECE, Blobs, unusable
from aenv.wire import Env, Status, timestamp

FORMAT = 1
_MOST_RECORD = 4 * 1024 * 1024
_SHOWN = 10
"""Conflicts that are named; of the others, only how many there are."""
_ATTEMPTS = 10
_MEMBER = re.compile(r"(?:(names|versions|past)/([^/]+)\.json|(blobs)/([0-9a-f]{64}))")


class Moved(NamedTuple):
    """How much was written, or added."""

    names: int = 0
    versions: int = 0
    packages: int = 0


class _About(Struct):
    format: int
    exported_at: str = ""


class _Version(Struct):
    env: Env
    doc: Doc
    order: float


async def export(store: Store, blobs: Blobs, file: Path) -> Moved:
    """Write a hub to a file, which must not be there. What changes meanwhile is in it or not, but never half."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with await asyncio.to_thread(_begin, temporary, file) as opened:
            with tarfile.open(fileobj=opened, mode="w", format=tarfile.PAX_FORMAT) as tar:
                moved = await _export(store, blobs, tar)
            await finish(asyncio.to_thread(_keep, opened, temporary, file))
    except OSError as exc:
        raise unusable(file.parent, exc) from exc
    finally:
        await finish(asyncio.to_thread(temporary.unlink, missing_ok=True))
    return moved


async def _export(store: Store, blobs: Blobs, tar: tarfile.TarFile) -> Moved:
    shelf = Shelf(store)
    names = versions = 0
    digests: dict[str, int] = {}
    _add(tar, "hub.json", _About(FORMAT, timestamp(time.time())))
    async for record in store.scan(NAMES):
        name = msgspec.json.decode(record.value, type=Name)
        known, name.versions = sorted(name.versions), {}
        _add(tar, f"names/{name.name}.json", name)
        names += 1
        for version in known:
            found = await shelf.found(name, 0, version)
            if found is None or found.env.status == Status.TESTING:
                continue  # it is nothing whole at this moment
            _add(tar, f"versions/{found.env.id}.json", _Version(found.env, found.doc, found.order))
            versions += 1
            if found.env.digest:
                digests[found.env.digest] = found.env.size
    async for record in store.scan(PAST):
        _add(tar, f"past/{record.key}.json", msgspec.json.decode(record.value, type=Past))
    for digest, size in digests.items():
        with tempfile.TemporaryFile() as spool:
            async for piece in blobs.open(digest):
                await asyncio.to_thread(spool.write, piece)
            spool.seek(0)
            info = tarfile.TarInfo(f"blobs/{digest}")
            info.size = size
            await finish(asyncio.to_thread(tar.addfile, info, spool))
    return Moved(names, versions, len(digests))


async def take_in(store: Store, blobs: Blobs, file: Path) -> Moved:
    """Add to a hub what ``export`` wrote. What is there already stays as it is.

    What is there and different is a ``Conflict`` that names it; then nothing was added.
    """
    try:
        names, new, digests = await _compare(store, file)
        packages = await _take_blobs(blobs, file, digests)
        added = await _take_records(Shelf(store), file, names, new)
    except (OSError, tarfile.TarError) as exc:
        raise Invalid(f"{file} is not the file of a hub: {exc}", hint="give one that 'export' wrote") from exc
    return Moved(added, len(new), packages)


async def _compare(store: Store, file: Path) -> tuple[dict[str, Name], set[str], set[str]]:
    """The names in a file, the versions that are new here, and the packages that these need."""
    shelf = Shelf(store)
    names: dict[str, Name] = {}
    new: set[str] = set()
    digests: set[str] = set()
    conflicts: list[str] = []
    for kind, key, opened in _members(file):
        await asyncio.sleep(0)
        if kind == "names":
            name = _name(opened, key)
            names[name.name] = name
            there = await shelf.name(name.name)
            if there is not None and _access(there[0]) != _access(name):
                conflicts.append(f"{name.name} has another owner or other access here")
        elif kind == "versions":
            version = _version(opened, key, names)
            there = await shelf.name(version.env.name)
            found = await shelf.found(*there, version.env.version) if there else None
            if found is None:
                new.add(version.env.id)
                digests |= {version.env.digest} - {""}
            elif _content(found.env, found.doc) != _content(version.env, version.doc):
                conflicts.append(f"{version.env.id} is different here")
    if conflicts:
        rest = f"; and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
        raise Conflict(
            f"{file} does not go with what is here: {'; '.join(conflicts[:_SHOWN])}{rest}",
            hint="nothing was added; delete the one or the other first, or use an empty hub",
        )
    return names, new, digests


async def _take_blobs(blobs: Blobs, file: Path, digests: set[str]) -> int:
    missing = set(digests)
    for kind, digest, opened in _members(file):
        if kind == "blobs" and digest in missing:
            found, _ = await blobs.put(_pieces(opened), most=MOST)
            if found != digest:
                raise Invalid(f"{file}: the package {digest} is damaged", hint="export it again")
            missing.remove(digest)
    if missing:
        raise Invalid(f"{file}: {len(missing)} packages are missing, {min(missing)} is one", hint="export it again")
    return len(digests)


async def _take_records(shelf: Shelf, file: Path, names: dict[str, Name], new: set[str]) -> int:
    added = 0
    for kind, key, opened in _members(file):
        if kind == "names" and await shelf.name(names[key].name) is None:
            await shelf.store.change(records.put_name(names[key], 0))
            added += 1
        elif kind == "versions" and key in new:
            await _add_version(shelf, _version(opened, key, names))
        elif kind == "past" and await shelf.past(key) is None:
            await shelf.store.change(Put(PAST, key, msgspec.json.encode(_decoded(opened, key, Past)), expect=0))
    return added


async def _add_version(shelf: Shelf, version: _Version) -> None:
    for _ in range(_ATTEMPTS):
        there = await shelf.name(version.env.name)
        if there is None:
            break
        found = Found(name=there[0], env=version.env, doc=version.doc, name_revision=there[1], order=version.order)
        try:
            await shelf.store.change(*found.puts())
        except Conflict:
            if await shelf.env(version.env.id) is not None:
                raise
        else:
            return
    raise Conflict(f"{version.env.id} could not be added: others change its name", hint="try again")


def _members(file: Path) -> Iterator[tuple[str, str, IO[bytes]]]:
    """What is in a file of ours: of which kind, its name, and its content. Nothing is unpacked."""
    with tarfile.open(file, "r:") as tar:
        first = tar.next()
        if first is None or first.name != "hub.json" or not first.isreg():
            raise Invalid(f"{file} is not the file of a hub", hint="give one that 'export' wrote")
        about = _decoded(_opened(tar, first), "hub.json", _About)
        if about.format != FORMAT:
            message = f"{file} has version {about.format} of the format; this package knows {FORMAT}"
            raise Invalid(message, hint="upgrade aenvironment")
        while member := tar.next():
            match = _MEMBER.fullmatch(member.name)
            if match is None or not member.isreg():
                raise Invalid(f"{file} has an entry that no hub wrote: {member.name[:100]!r}")
            yield match[1] or match[3], match[2] or match[4], _opened(tar, member)


def _opened(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    opened = tar.extractfile(member)
    assert opened is not None
    return opened


def _decoded(opened: IO[bytes], key: str, type: type[Any]) -> Any:
    data = opened.read(_MOST_RECORD + 1)
    try:
        if len(data) > _MOST_RECORD:
            raise msgspec.DecodeError("it is too large")
        return msgspec.json.decode(data, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Invalid(f"{key[:200]!r} is not what a hub wrote: {exc}", hint="export it again") from exc


def _name(opened: IO[bytes], key: str) -> Name:
    name: Name = _decoded(opened, key, Name)
    records.check_name(name.name)
    records.check_users([name.owner, *name.readers, *name.writers], name.name)
    if name.name != key or name.versions:
        raise Invalid(f"the name {key[:100]!r} is not what a hub wrote", hint="export it again")
    return name


def _version(opened: IO[bytes], key: str, names: dict[str, Name]) -> _Version:
    version: _Version = _decoded(opened, key, _Version)
    env = version.env
    records.check_version(env.version)
    sound = env.status in list(Status) and env.status != Status.TESTING and version.doc.digest == env.digest
    if env.id != key or env.id != f"{env.name}@{env.version}" or env.name not in names or not sound:
        raise Invalid(f"the version {key[:200]!r} is not what a hub wrote", hint="export it again")
    return version


def _access(name: Name) -> tuple[Any, ...]:
    return name.name, name.owner, name.public, sorted(name.readers), sorted(name.writers)


def _content(env: Env, doc: Doc) -> bytes:
    return msgspec.json.encode((env, doc))


def _add(tar: tarfile.TarFile, name: str, value: Struct) -> None:
    data = msgspec.json.encode(value)
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


async def _pieces(opened: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(opened.read, PIECE):
        yield piece


def _begin(temporary: Path, file: Path) -> IO[bytes]:
    if file.exists():
        raise Conflict(f"{file} is there already", hint="name another file")
    return os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def _keep(opened: IO[bytes], temporary: Path, file: Path) -> None:
    opened.flush()
    os.fsync(opened.fileno())
    temporary.replace(file)
