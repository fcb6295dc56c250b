"""Checks of what outlives a sandbox, and of sandboxes that outlive their time: volumes, and lasting ones."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv.cleanup import finish
from aenv.engines.conformance.bench import Bench, Box, refusal, require
from aenv.engines.conformance.table import check
from aenv.errors import Conflict, StartFailed, Unsupported
from aenv.models import State, Volume

SIZE = 16 * 1024 * 1024
MOUNT = "/home/admin/data"
_FILL = "import sys\nwith open(sys.argv[1], 'wb') as file:\n    for _ in range(64):\n        file.write(bytes(2**20))\n"


async def lasting(bench: Bench) -> None:
    """A lasting sandbox does not end when its ttl is over, nor when it is told a new one."""
    box = await bench.start(ttl=1.0, lasting=True)
    with_end = (await bench.engine.get(box.id)).expires_at
    require(with_end is None, f"expires_at is {with_end}")
    try:
        told = await bench.engine.update(box.id, ttl=0.5)
        require(told.expires_at is None, f"once it is told a ttl, expires_at is {told.expires_at}")
    except Unsupported:
        pass  # an engine that changes no sandbox does not end this one either
    bench.waiting = "its ttl to be over"
    await asyncio.sleep(2.0)
    require((await bench.engine.get(box.id)).state is State.RUNNING, "it ended all the same")
    require(await box.answers(), "it does not answer")


async def volume_outlives(bench: Bench) -> None:
    """What is written to a volume is there for the next sandbox that has it."""
    async with _owner(bench) as owner:
        first = await _start(bench, owner)
        await first.tool("write", path=f"{MOUNT}/note.txt", text="kept")
        require(await first.tool("read", path=f"{MOUNT}/note.txt") == "kept", "it is not there for itself")
        await bench.engine.delete(first.id)
        second = await _start(bench, owner)
        found = await second.tool("read", path=f"{MOUNT}/note.txt")
        require(found == "kept", f"the next sandbox reads {found!r}")
        await second.tool("write", path=f"{MOUNT}/note.txt", text="changed")


async def volumes_apart(bench: Bench) -> None:
    """Volumes of one name that two owners have are two, and so are two names of one owner."""
    async with _owner(bench) as one, _owner(bench) as other:
        first = await _start(bench, one)
        await first.tool("write", path=f"{MOUNT}/note.txt", text="mine")
        for owner, name in ((other, "data"), (one, "else")):
            box = await _start(bench, owner, name)
            found = await box.tool("read", path=f"{MOUNT}/note.txt")
            require(found is None, f"the volume {name!r} of {owner!r} has what was written to another: {found!r}")


async def volume_for_one(bench: Bench) -> None:
    """A volume is one sandbox's at a time: who comes second does not start, and hears who has it."""
    async with _owner(bench) as owner:
        first = await _start(bench, owner)
        exc = await refusal(_start(bench, owner), Conflict, StartFailed)
        require(first.id in str(exc), f"the error does not name {first.id}: {exc}")
        require(await first.tool("echo", text="still here") == "still here", "a tool gave a wrong answer")
        await bench.engine.delete(first.id)
        await _start(bench, owner)


async def volume_is_full(bench: Bench) -> None:
    """A volume holds what it was asked for: who writes more gets an error, and the sandbox goes on answering."""
    async with _owner(bench) as owner:
        box = await _start(bench, owner)
        await box.tool("write", path=f"{MOUNT}/note.txt", text="before")
        done = await box.exec([await box.tool("python"), "-IS", "-c", _FILL, f"{MOUNT}/big"])
        require(done.returncode != 0, f"64 MiB fit into a volume of {SIZE // 1024**2} MiB")
        require("No space left" in done.stderr or "Disk quota" in done.stderr, f"the error is {done.stderr!r}")
        require(await box.tool("read", path=f"{MOUNT}/note.txt") == "before", "what was there is gone")

        async def told() -> bool:
            return "full" in (await bench.engine.get(box.id)).reason

        await bench.eventually("its reason to say that the volume is full", told)
        require((await bench.engine.get(box.id)).state is State.RUNNING, "it is not RUNNING any more")


async def volume_is_deleted(bench: Bench) -> None:
    """Volumes are listed with what they hold, and deleted when no sandbox has them; the next is empty."""
    async with _owner(bench) as owner:
        await bench.engine.delete_volume(owner, "data")
        require(await bench.engine.volumes(owner) == {}, "an owner without volumes has some")
        box = await _start(bench, owner)
        await box.tool("write", path=f"{MOUNT}/note.txt", text="x" * 2**20)
        await refusal(bench.engine.delete_volume(owner, "data"), Conflict)
        await bench.engine.delete(box.id)
        found = await bench.engine.volumes(owner)
        require(list(found) == ["data"] and found["data"] >= 2**20, f"volumes() shows {found}")
        await bench.engine.delete_volume(owner, "data")
        require(await bench.engine.volumes(owner) == {}, "it is listed when it is deleted")
        again = await _start(bench, owner)
        require(await again.tool("read", path=f"{MOUNT}/note.txt") is None, "what was deleted is back")


async def _start(bench: Bench, owner: str, name: str = "data") -> Box:
    return await bench.start(volumes=[Volume(owner=owner, name=name, mount=MOUNT, size=SIZE)])


@asynccontextmanager
async def _owner(bench: Bench) -> AsyncIterator[str]:
    """An owner whose volumes, and the sandboxes that have them, are gone when the block is over."""
    owner = f"aenv-conformance-{secrets.token_hex(4)}"
    try:
        yield owner
    finally:
        await finish(_forget(bench, owner))


async def _forget(bench: Bench, owner: str) -> None:
    await bench.clean()
    for name in await bench.engine.volumes(owner):
        await bench.engine.delete_volume(owner, name)


CHECKS = (
    check(lasting),
    check(volume_outlives, needs="volumes"),
    check(volumes_apart, needs="volumes"),
    check(volume_for_one, needs="volumes"),
    check(volume_is_full, needs="volumes"),
    check(volume_is_deleted, needs="volumes"),
)
