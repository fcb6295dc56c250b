"""Storage that outlives containers: the same images that the process engine keeps its volumes in.

A volume's image is the file of a loop device, which the daemon mounts for as long as the container runs, as a volume
of that container alone. So it holds what it was asked for and no more, and it is one sandbox's at a time. That takes
an engine that is root on the daemon's machine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from aenv.cleanup import finish
from aenv.engines.docker import doors
from aenv.engines.docker.containers import ENGINE, ID, KIND, short
from aenv.engines.docker.daemon import Daemon
from aenv.engines.process import loops
from aenv.engines.process import volumes as images
from aenv.engines.process.volumes import Held, Volumes
from aenv.errors import AEnvError, Conflict, StartFailed
from aenv.models import Volume

STORAGE = "volume"
"""The kind of a daemon's volume that is made for one container, and goes with it."""


def missing() -> str:
    """Why this process cannot give volumes to containers, as far as that can be seen at once."""
    if os.geteuid() != 0:
        return "this process is not root, and attaches no image to a device"
    return loops.missing()


class Storage:
    """The volumes of one home, as one engine gives them to containers of its daemon."""

    def __init__(self, daemon: Daemon, engine: str, seen: Callable[[str], str]) -> None:
        """``seen``: where this process finds what the daemon has at a path; empty when it sees nothing."""
        self._daemon, self._engine, self._seen = daemon, engine, seen
        elsewhere = "" if seen("/") else "this process does not see the directories of the daemon's volumes"
        self._volumes = _Volumes(why_not=missing() or elsewhere)
        self._places: dict[str, str] = {}
        """Where the daemon mounts an image, by the image."""

    async def take(
        self, wanted: Sequence[Volume], id: str, leaving: Callable[[], bool], into: list[Held]
    ) -> list[tuple[str, str]]:
        """Lock those volumes for a sandbox, and make the daemon's volumes for them: the name of each and its place
        inside. The devices stay with whoever has ``into`` until ``mounted`` is called."""
        if not wanted:
            return []
        asked = images.check((one.owner, one.name, one.mount, one.size) for one in wanted)
        await self._volumes.take(asked, id, leaving, into)
        made = []
        for held in into:
            name = self._name(id, held)
            try:
                held.mounted, device = await asyncio.to_thread(loops.attach_device, str(held.image))
            except OSError as exc:
                raise StartFailed(f"the volume {held.name!r} cannot be had: {exc.strerror or exc}") from exc
            driver = {"type": loops.KIND, "device": device, "o": "nosuid,nodev,discard"}
            labels = {ENGINE: self._engine, ID: id, KIND: STORAGE}
            found = await self._daemon.make_volume(name, driver, labels)
            self._places[str(held.image)] = self._seen(str(found.get("Mountpoint") or ""))
            made.append((name, held.mount))
        return made

    def mounted(self, into: Sequence[Held]) -> None:
        """The daemon has mounted them: the devices are its own to hold."""
        for held in into:
            if held.mounted >= 0:
                os.close(held.mounted)
                held.mounted = -1
            with self._opened(held) as folder, suppress(OSError):
                os.rmdir("lost+found", dir_fd=folder)

    async def hold_again(self, wanted: Sequence[tuple[str, str]], id: str, leaving: Callable[[], bool]) -> list[Held]:
        """Those of a sandbox that was found again. Where another engine watches it too, that one has the locks."""
        into: list[Held] = []
        for owner, name in wanted:
            with suppress(Conflict):
                held = await self._volumes.hold_again(owner, name, id, leaving)
                into.append(held)
                with suppress(AEnvError):
                    found = await self._daemon.ask("GET", f"/volumes/{self._name(id, held)}") or {}
                    self._places[str(held.image)] = self._seen(str(found.get("Mountpoint") or ""))
        return into

    async def release(self, id: str, names: Sequence[tuple[str, str]], held: list[Held]) -> None:
        """Give back what a sandbox had whose container is gone, or has ended."""
        try:
            for owner, name in names:
                await doors.remove_volume(self._daemon, self._named(id, owner, name), self._engine)
        finally:
            for one in held:
                self._places.pop(str(one.image), None)
            await self._volumes.release(held)

    def leave(self, held: list[Held]) -> None:
        """Let go of the locks of a sandbox that lives on."""
        for one in held:
            self._volumes.leave(one)
        held.clear()

    def full(self, held: Sequence[Held]) -> str:
        """Which of them are full, in words."""
        return "; ".join(filter(None, (self._full(one) for one in held)))

    def _full(self, held: Held) -> str:
        with self._opened(held) as folder:
            if folder < 0:
                return ""
            held.mounted = folder
            try:
                return held.full
            finally:
                held.mounted = -1

    async def used(self, owner: str) -> dict[str, int]:
        """The owner's volumes, and the bytes in use in each."""
        return await self._volumes.used_with(owner, self._in_use)

    async def delete(self, owner: str, name: str) -> None:
        await self._volumes.delete(owner, name)

    def _in_use(self, held: Held) -> int | None:
        with self._opened(held) as folder:
            if folder < 0:
                return None
            found = os.fstatvfs(folder)
            return (found.f_blocks - found.f_bfree) * found.f_frsize

    @contextmanager
    def _opened(self, held: Held) -> Iterator[int]:
        """The root of a volume that the daemon has mounted; -1 when it has not. Open, it could not be unmounted."""
        place = self._places.get(str(held.image), "")
        folder = -1
        if place and doors.is_mounted(place):
            with suppress(OSError):
                folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            if folder >= 0:
                os.close(folder)

    def _name(self, id: str, held: Held) -> str:
        return self._named(id, held.owner, held.name)

    def _named(self, id: str, owner: str, name: str) -> str:
        return f"aenv-volume-{short(self._engine, id, owner, name)}"


class _Volumes(Volumes):
    """Images that a daemon mounts, instead of this process."""

    async def take(self, wanted: Any, holder: str, leaving: Callable[[], bool], into: list[Held]) -> None:
        await super().take(wanted, holder, leaving, into)
        for held in into:
            await finish(asyncio.to_thread(images.note_free, held))

    async def hold_again(self, owner: str, name: str, holder: str, leaving: Callable[[], bool]) -> Held:
        path = self._place(owner, name)
        await self._reserve(path)
        held = Held({"owner": owner, "name": name, "mount": "", "size": 0}, path, holder, leaving)
        held.size = images.size_of(path)
        self._held[path] = held
        try:
            await finish(asyncio.to_thread(images.lock, held))
        except BaseException:
            del self._held[path]
            held.released.set()
            raise
        return held

    def leave(self, held: Held) -> None:
        if held.lock >= 0:
            os.close(held.lock)
        self._held.pop(held.path, None)
        held.released.set()

    async def used_with(self, owner: str, look: Callable[[Held], int | None]) -> dict[str, int]:
        self._able()
        mounted = {held.path: size for held in self._held.values() if (size := look(held)) is not None}
        return await asyncio.to_thread(images.listed, self._place(owner), mounted)
