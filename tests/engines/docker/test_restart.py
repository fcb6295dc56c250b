"""A daemon that is gone for a while, with containers that run."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from aenv import http
from aenv.engines.docker import engine as engine_module
from aenv.errors import NetworkError
from aenv.models import State, Volume
from tests.engines.docker.lab import call, eventually, over, own_daemon, probe


async def test_what_runs_ends_with_the_daemon_and_is_told(dockerd, home):
    async with own_daemon(dockerd) as (ground, harbour), harbour.engine() as engine:
        made = await engine.create("one", probe())
        assert await call(made, "echo", text="x") == "x"
        ground.kill("docker")
        with pytest.raises(NetworkError):
            await engine.find()
        assert (await engine.get("one")).id == "one"
        ground.dockerd()
        ended = await over(engine, "one")
        assert ended.state is State.FAILED, ended.reason
        assert "the daemon was gone" in ended.reason
        again = await engine.create("two", probe())
        assert await call(again, "echo", text="y") == "y"
        await engine.delete("one")
        await engine.delete("two")
        assert await harbour.left() == []


async def test_a_daemon_that_is_stopped_ends_what_runs_and_nothing_is_held(dockerd, home, monkeypatch):
    """It ends all containers before it ends itself, and tells of that."""
    monkeypatch.setattr(engine_module, "_RETRY", 0.5)
    data = Volume(owner="ada", name="data", mount="/home/admin/data", size=8 * 1024**2)
    async with own_daemon(dockerd) as (ground, harbour), harbour.engine() as engine:
        ids = ["one"]
        await engine.create("one", probe())
        if "volumes" not in engine.cannot:
            ids.append("two")
            await engine.create("two", probe(volumes=[data]))
        ground.run("kill", "-TERM", (ground.folder / "docker" / "started").read_text().strip())
        for id in ids:
            ended = await over(engine, id)
            assert (ended.state, "the daemon" in ended.reason) == (State.FAILED, True), ended.reason
        await eventually("the daemon to end", lambda: not (ground.folder / "docker" / "docker.pid").exists())
        ground.dockerd()
        for id in ids[1:]:
            await harbour.gone(label=f"aenv.id={id}")
            assert (await engine.get(id)).state is State.FAILED
            again = await engine.create("again", probe(volumes=[data]))
            assert await call(again, "echo", text="x") == "x"
        for id in (*ids, "again"):
            await engine.delete(id)
        assert await harbour.left() == []


async def test_what_the_daemon_lets_live_is_found_well(dockerd, home):
    options = ("--live-restore",)
    async with own_daemon(dockerd, *options) as (ground, harbour), harbour.engine() as engine:
        made = await engine.create("one", probe())
        before = engine._host._outlook.pid
        ground.kill("docker")
        assert await call(made, "echo", text="alone") == "alone"
        with pytest.raises(NetworkError):
            await engine.create("two", probe())
        ground.dockerd(*options)
        assert [found.id for found in await engine.find() if found.state is State.RUNNING] == ["one"]
        assert await call(made, "echo", text="again") == "again"
        assert (await engine.exec("one", ["true"])).returncode == 0

        async def answers() -> bool:
            with suppress(NetworkError):
                return bool(await call(made, "echo", text="anew") == "anew")
            return False

        await eventually("the new daemon to be seen", lambda: engine._host._outlook.pid != before)
        await http.close()
        await eventually("it to be reached anew", answers)
        async with harbour.engine() as another:
            await http.close()
            assert await call(await another.get("one"), "echo", text="found") == "found"
        assert os.path.islink((await engine.create("three", probe())).url.removeprefix("unix:"))
        for id in ("one", "two", "three"):
            await engine.delete(id)
        # Docker may count a mount of the door too many, until it is started again.
        assert [name for name in await harbour.left() if name.startswith("/")] == []
        ground.kill("docker")
        ground.dockerd(*options)
        await engine.delete("one")
        assert await harbour.left() == []
