"""Sandboxes that several engines know, engines that close too early, and answers that never come: what lives stays
whole, and what does not leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.docker import doors
from aenv.errors import AEnvError, Conflict, StartFailed
from aenv.models import Sandbox, State
from tests.engines.docker.beside import dual, imported, run
from tests.engines.docker.lab import Harbour, call, eventually, of_image, over, probe

NOWHERE = "localhost/aenv-no-such-image:1"


async def running(harbour: Harbour) -> list[str]:
    """The containers of the test that run, by name."""
    filters = {"label": [f"aenv.engine={harbour.state}"], "status": ["running"]}
    found = await harbour.daemon.ask("GET", "/containers/json", query={"filters": filters})
    return sorted(name.lstrip("/") for row in found for name in row["Names"])


@asynccontextmanager
async def forgetful(harbour: Harbour, path: Path) -> AsyncIterator[str]:
    """The address of somebody before the daemon who loses one answer: that to who asks for the container of a sandbox,
    once it is made."""
    lost = False
    busy: set[asyncio.Task[Any]] = set()

    async def made() -> list[str]:
        return [name for name in await harbour.left() if name.startswith("/")]

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool) -> None:
        nonlocal lost
        while piece := await reader.read(65536):
            if not lost and asks and f"/containers/create?name=aenv-{harbour.state}".encode() in piece:
                lost = True
                writer.write(piece)
                await eventually("it to be made", made)
                break
            writer.write(piece)
            await writer.drain()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_them = await asyncio.open_unix_connection(harbour.daemon.base.removeprefix("unix:"))
        ways = (carry(reader, to_them, asks=True), carry(theirs, writer, asks=False))
        both = [asyncio.create_task(way) for way in ways]
        busy.update(both)
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        busy.difference_update(both)
        to_them.close()
        writer.close()

    server = await asyncio.start_unix_server(join, str(path))
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        for one in list(busy):
            one.cancel()
        await eventually("all to be closed", lambda: _none(busy))


async def _none(found: set[Any]) -> bool:
    return not found


# Several engines of one name


async def test_a_create_of_one_that_lives_starts_nothing(harbour, image):
    async with harbour.engine() as engine:
        await engine.create("one", dual(image))
    before = await running(harbour)
    assert len(before) == 2
    async with harbour.engine() as later:
        found = await later.create("one", of_image(NOWHERE))
        assert found.state is State.RUNNING
        assert await run(found, "echo hello") == "hello\n"
        assert await running(harbour) == before
        await later.delete("one")
        assert await harbour.left() == []


async def test_what_failed_here_and_lives_elsewhere_is_deleted(harbour, image):
    async with harbour.engine() as engine, harbour.engine() as other:
        with pytest.raises(AEnvError):
            await engine.create("one", of_image(NOWHERE))
        made = await other.create("one", dual(image))
        assert (await engine.get("one")).state is State.FAILED
        assert await run(made, "echo hello") == "hello\n"
        await engine.delete("one")
        assert await harbour.left() == []


@pytest.mark.parametrize("round", range(3))
async def test_two_engines_that_make_the_same_at_once(harbour, image, round):
    async with harbour.engine() as engine, harbour.engine() as other:
        await asyncio.gather(engine.find(), other.find())

        async def later() -> Sandbox:
            await asyncio.sleep(round * 0.03)
            return await other.create("one", dual(image))

        made = await asyncio.gather(engine.create("one", dual(image)), later())
        assert [found.state for found in made] == [State.RUNNING] * 2
        assert made[0].created_at == made[1].created_at
        for one in (engine, other):
            found = await one.get("one")
            assert (found.state, await run(found, "echo hello")) == (State.RUNNING, "hello\n")
        await other.delete("one")
        assert await harbour.left() == []


async def test_one_that_is_paused_is_waited_for(harbour):
    async with harbour.engine() as engine:
        await engine.create("one", probe())
    container = f"/containers/aenv-{harbour.state}-one"
    await harbour.daemon.ask("POST", f"{container}/pause")
    async with harbour.engine() as later:
        try:
            assert (await later.get("one")).state is State.CREATING
        finally:
            await harbour.daemon.ask("POST", f"{container}/unpause")
        made = await later.create("one", probe())
        assert await call(made, "echo", text="x") == "x"
        await later.delete("one")


async def test_an_engine_that_closes_while_one_starts(harbour):
    engine = harbour.engine()
    starting = asyncio.create_task(engine.create("one", probe()))
    await eventually("its container", lambda: "one" in engine._live and engine._live["one"].made)
    await engine.close()
    with pytest.raises(StartFailed, match="removed while it started: its engine was closed"):
        await starting
    assert await harbour.left() == []


async def test_an_engine_that_closes_while_a_start_fails(harbour, monkeypatch):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def refuse(*_: object) -> str:
        begun.set()
        await go_on.wait()
        raise StartFailed("no volume is to be had")

    monkeypatch.setattr(doors, "make_volume", refuse)
    engine = harbour.engine()
    starting = asyncio.create_task(engine.create("one", probe()))
    await begun.wait()
    closing = asyncio.create_task(engine.close())
    while engine._live["one"].ending is None:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the start is cancelled by now
    go_on.set()
    await closing
    with pytest.raises(StartFailed, match="removed while it started: its engine was closed"):
        await starting
    assert await harbour.left() == []


async def test_what_is_deleted_takes_no_memory(harbour):
    async with harbour.engine() as engine:
        for ends_first in (False, True):
            await engine.create("one", probe())
            if ends_first:
                await harbour.daemon.ask("POST", f"/containers/aenv-{harbour.state}-one/kill")
                await over(engine, "one")
            known = weakref.ref(engine._live["one"])
            await engine.delete("one")

            async def forgotten() -> bool:
                gc.collect()
                return known() is None  # noqa: B023

            await eventually("it to be forgotten", forgotten)


# Answers and names


async def test_an_answer_that_is_lost(harbour, home):
    async with forgetful(harbour, home / "daemon.sock") as address:
        harbour.address = address
        async with harbour.engine() as engine:
            with pytest.raises(AEnvError):
                await engine.create("one", probe())
            assert (await engine.get("one")).state is State.FAILED
            await engine.delete("one")
            assert await harbour.left() == []


async def test_a_door_that_cannot_be_made_leaves_nothing(harbour, image):
    async with harbour.engine() as engine:
        await engine.find()
        assert engine._host is not None
        name = engine._host.door_volume("one")
        await harbour.daemon.ask("POST", "/volumes/create", body={"Name": name, "Labels": {"mine": "yes"}})
        try:
            with pytest.raises(Conflict, match=f"the name {name} is taken"):
                await engine.create("one", dual(image))
            assert await harbour.left() == []
            await engine.delete("one")
            assert (await harbour.daemon.ask("GET", f"/volumes/{name}"))["Labels"] == {"mine": "yes"}
        finally:
            await harbour.daemon.ask("DELETE", f"/volumes/{name}")


async def test_a_container_of_that_name_is_somebody_elses_and_stays(harbour):
    name = f"aenv-{harbour.state}-one"
    body = {"Image": harbour.base_image}
    made = await harbour.daemon.ask("POST", "/containers/create", query={"name": name}, body=body)
    try:
        async with harbour.engine() as engine:
            await engine.delete("one")
        await harbour.daemon.ask("GET", f"/containers/{made['Id']}/json")
    finally:
        await harbour.daemon.ask("DELETE", f"/containers/{made['Id']}", query={"force": "1"})


async def test_labels_of_an_image_say_nothing_of_its_container(harbour, daemon, busybox, program):
    labels = "LABEL aenv.disk=x aenv.agentless=1 aenv.uses=x"
    async with imported(daemon, busybox, labels) as labelled, harbour.engine() as engine:
        made = await engine.create("one", dual(labelled))
        assert await run(made, "echo hello") == "hello\n"
        beside = engine._live["one"].second
        assert beside is not None
        assert not beside.agentless
        await engine.delete("one")
