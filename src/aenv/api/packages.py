"""Where the API service's environments come from, and the projects it has at hand: unpacked once, by their digest."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from aenv.auth.callers import Caller
from aenv.cleanup import finish
from aenv.errors import AEnvError, Invalid, StartFailed, TooLarge
from aenv.models import EnvRef
from aenv.project.archive import MAX_SIZE
from aenv.project.unpacked import MOST_KEPT, Placed, Unpacked, is_digest
from aenv.wire import Env

_DOWNLOAD = 600.0
"""Seconds that a package may take to come."""


class Source(Protocol):
    """Where environments are looked up, and packages come from: a hub in this process, a hub elsewhere."""

    async def resolve(self, ref: EnvRef, call_token: str, caller: Caller) -> Env:
        """The version that is meant: one that can run, and that the caller may see. ``call_token`` is the caller's
        own, for a source that has to ask somebody else; it is empty when a server goes on with what it had begun."""
        ...

    async def package(self, env: Env, call_token: str, caller: Caller) -> AsyncIterator[bytes]:
        """The archive of an environment, in pieces. It is checked against ``env.digest``."""
        ...


@runtime_checkable
class AtHand(Protocol):
    """A source whose projects lie on this machine already."""

    async def place(self, env: Env) -> Placed: ...


class Packages:
    """Projects by digest, below ``folder``: each is fetched once, whoever asks for it at the same time."""

    def __init__(self, source: Source, folder: Path, *, most: int = MOST_KEPT) -> None:
        self._source = source
        self._at_hand = source if isinstance(source, AtHand) else None
        self._folder = folder
        self._unpacked = Unpacked(folder, most=most)
        self._coming: dict[str, asyncio.Task[None]] = {}
        self.in_use: Callable[[], Iterable[str]] = tuple
        """Digests of what runs: whoever runs it says so here."""

    async def resolve(self, ref: EnvRef, call_token: str, caller: Caller) -> Env:
        return await self._source.resolve(ref, call_token, caller)

    async def place(self, env: Env, call_token: str, caller: Caller) -> Placed:
        """The project of an environment, fetched and unpacked when it is not here yet."""
        if self._at_hand is not None:
            return await self._at_hand.place(env)
        digest = env.digest.removeprefix("sha256:")
        if not is_digest(digest):
            raise Invalid(f"{env.id} has no package", hint=f"push it: 'aenv push {env.name}'")
        while (found := self._unpacked.find(digest)) is None:
            await self._fetched(env, digest, call_token, caller)
        return found

    async def close(self) -> None:
        """Give up what is on its way."""
        for task in (coming := list(self._coming.values())):
            task.cancel()
        if coming:
            await asyncio.wait(coming)

    async def _fetched(self, env: Env, digest: str, call_token: str, caller: Caller) -> None:
        """Wait until somebody has fetched it. Who leaves does not take it away from the others."""
        task = self._coming.get(digest)
        if task is None:
            task = asyncio.create_task(self._fetch(env, digest, call_token, caller))
            self._coming[digest] = task
            task.add_done_callback(lambda done: self._came(digest, done))
        await asyncio.wait({task})
        if task.cancelled():
            raise StartFailed(f"the package of {env.id} did not come: the server stops", hint="try again")
        task.result()

    def _came(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._coming[digest]
        if not task.cancelled():
            task.exception()  # when all who asked have left, nobody hears it

    async def _fetch(self, env: Env, digest: str, call_token: str, caller: Caller) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                try:
                    async with asyncio.timeout(_DOWNLOAD) as limit:
                        found = await self._download(env, call_token, caller, file)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise StartFailed(f"the package of {env.id} did not come within {_DOWNLOAD:g} s") from None
                if found != digest:
                    raise StartFailed(f"the package of {env.id} is not the one that was published: its digest differs")
                file.seek(0)
                used = {digest.removeprefix("sha256:") for digest in self.in_use()}
                await finish(asyncio.to_thread(self._unpacked.put, file, digest, used))
        except OSError as exc:
            raise AEnvError(f"{self._folder} cannot hold {env.id}: {exc.strerror or exc}", hint="make room") from exc

    async def _download(self, env: Env, call_token: str, caller: Caller, file: BinaryIO) -> str:
        found, size = hashlib.sha256(), 0
        async with aclosing(_closing(await self._source.package(env, call_token, caller))) as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > MAX_SIZE:
                    raise TooLarge(f"the package of {env.id} is over {MAX_SIZE} bytes")
                found.update(piece)
                file.write(piece)
        return found.hexdigest()


async def _closing(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield piece
    finally:
        if (close := getattr(pieces, "aclose", None)) is not None:
            await close()
