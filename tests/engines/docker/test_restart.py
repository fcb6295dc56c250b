"""A daemon that is gone for a while, with containers that run."""

from __future__ import annotations

import pytest

from aenv.errors import NetworkError
from aenv.models import State
from tests.engines.docker.lab import call, over, own_daemon, probe


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
        assert ended.state is State.FAILED
        assert "the daemon was gone" in ended.reason
        again = await engine.create("two", probe())
        assert await call(again, "echo", text="y") == "y"
        await engine.delete("one")
        await engine.delete("two")
        assert await harbour.left() == []


async def test_what_the_daemon_lets_live_is_found_well(dockerd, home):
    options = ("--live-restore",)
    async with own_daemon(dockerd, *options) as (ground, harbour), harbour.engine() as engine:
        made = await engine.create("one", probe())
        ground.kill("docker")
        assert await call(made, "echo", text="alone") == "alone"
        with pytest.raises(NetworkError):
            await engine.create("two", probe())
        assert (await engine.get("two")).state is State.FAILED
        ground.dockerd(*options)
        assert [found.id for found in await engine.find() if found.state is State.RUNNING] == ["one"]
        assert await call(made, "echo", text="again") == "again"
        assert (await engine.exec("one", ["true"])).returncode == 0
        for id in ("one", "two"):
            await engine.delete(id)
        # Docker may count a mount of the door too many, until it is started again.
        assert [name for name in await harbour.left() if name.startswith("/")] == []
        ground.kill("docker")
        ground.dockerd(*options)
        await engine.delete("one")
        assert await harbour.left() == []
