"""The second container where there is no agent for its machine: the engine stands in for it, by the daemon's exec."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import textwrap
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from aenv import agent
from aenv.agent import recipe
from aenv.engines import conformance, load_engine
from aenv.engines.conformance.bench import running_here
from aenv.engines.docker import doors
from aenv.engines.docker import second as module
from aenv.errors import AEnvError, StartFailed, Unsupported
from aenv.models import State
from tests import daemons
from tests.engines.docker.beside import dual, imported, inspected, kill, run, tar, with_links
from tests.engines.docker.lab import Harbour, call, killed, over, python
from tests.platform.support import Platform, new_home, variant

TOOLS = ("mkdir", "mv", "chmod", "rm", "env")


@pytest.fixture(autouse=True)
def no_agent(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no agent for any other, and no compiler."""
    monkeypatch.setattr(recipe, "file_name", lambda architecture: f"aenv-agent-none-{architecture}")
    monkeypatch.setattr(recipe, "compiler", lambda architecture: None)
    with pytest.raises(Unsupported, match="no compiler"):
        agent.binary()


@pytest.fixture
async def image(daemon: str, busybox: bytes) -> AsyncIterator[str]:
    async with imported(daemon, with_links(busybox, *TOOLS), "ENV COLOUR=red") as name:
        yield name


async def test_it_keeps_every_promise(daemon: str, base_image: str, home: Path, image: str) -> None:
    names = [check.name for check in conformance.CHECKS if check.needs == "second"]
    make = partial(load_engine, "docker", address=daemon, state=f"t{secrets.token_hex(5)}", base_image=base_image)
    async with make() as engine:
        results = await conformance.run(engine, only=names, another=make, limit=300, at_once=2, second=image)
        assert {result.name: result.detail for result in results if result.status != "pass"} == {}
        assert await engine.find() == []


async def test_nothing_of_the_engine_is_in_it(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        text = await run(made, "cat /proc/mounts; env; cat /proc/self/status")
        assert " /aenv" not in text
        assert "AENV" not in text
        assert "COLOUR=red" in text
        assert re.search(r"NoNewPrivs:\s1\n", text)
        assert re.search(r"CapEff:\s0*4eb\n", text)
        code, printed = await harbour.run(engine, "one", *python("open('/aenv/link/new', 'w')"))
        assert code == 1
        assert re.search("Read-only|Permission", printed)
        code, printed = await harbour.run(engine, "one", *python("import os; print(os.listdir('/aenv/link'))"))
        assert printed == "['second.sock']\n"
        await engine.delete("one")
        assert await harbour.left() == []


async def test_each_has_its_own(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        one, two = await engine.create("one", dual(image)), await engine.create("two", dual(image))
        await call(one, "second_write", path="/mine", text="one")
        await call(two, "second_write", path="/mine", text="two")
        assert [await run(made, "cat /mine") for made in (one, two)] == ["one", "two"]
        await engine.delete("one")
        assert await run(two, "cat /mine") == "two"
        with pytest.raises(AEnvError):
            await run(one, "cat /mine")


async def test_found_again(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        await run(made, "echo kept > /kept")
    async with harbour.engine() as engine:
        made = await engine.get("one")
        assert made.state is State.RUNNING
        assert await run(made, "cat /kept") == "kept\n"
        await engine.delete("one")
        assert await harbour.left() == []


async def test_without_a_state_too(harbour: Harbour, image: str) -> None:
    mark = f"82{secrets.randbelow(10**9):09}"
    async with harbour.engine(state="") as engine:
        made = await engine.create("one", dual(image))
        await run(made, f"sleep {mark} >/dev/null 2>&1 &")
        assert running_here(mark)
        name = engine._engine
    assert not running_here(mark)
    assert await harbour.left(f"aenv.engine={name}") == []


async def test_it_ends_with_a_process_that_is_killed(harbour: Harbour, image: str, home: Path) -> None:
    first = "from aenv.agent import recipe; recipe.compiler = lambda architecture: None; "
    first += "recipe.file_name = lambda architecture: 'aenv-agent-none'"
    name = await killed(harbour, home, f"dual({image!r})", first)
    await harbour.stopped(module.name(name, "one"))
    async with harbour.engine() as engine:
        await engine.find()
        await harbour.gone(label=f"aenv.engine={name}")


async def test_one_that_dies_fails_the_sandbox(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        await engine.create("one", dual(image))
        await kill(harbour, (await inspected(harbour, "one"))["Id"])
        ended = await over(engine, "one")
        assert ended.state is State.FAILED
        assert "the second container" in ended.reason
        await engine.delete("one")
        assert await harbour.left() == []


async def test_an_image_without_a_shell(harbour: Harbour) -> None:
    async with imported(harbour.address, tar({"file": b""})) as image, harbour.engine() as engine:
        with pytest.raises(StartFailed, match="the second container.*(/bin/sh|no such file)"):
            await engine.create("one", dual(image))
        await engine.delete("one")
        assert await harbour.left() == []


async def test_an_engine_that_sees_no_volumes(harbour: Harbour, image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "outlook", lambda daemon, about: None)
    async with harbour.engine() as engine:
        with pytest.raises(Unsupported, match="no agent for the second container.*root on the daemon's machine"):
            await engine.create("one", dual(image))
        await engine.delete("one")
        assert await harbour.left() == []


def dual_project(folder: Path) -> Path:
    """A project whose tool runs commands in the second container."""
    project = variant(folder, "dual", podTemplate="DualContainer")
    (project / "src" / "custom_env.py").write_text(
        textwrap.dedent(
            """
            from aenv import Context, register_tool


            @register_tool
            async def shell(ctx: Context, line: str) -> str:
                return (await ctx.second.exec(line)).stdout
            """
        )
    )
    return project


async def test_on_a_platform(dockerd: str, busybox: bytes, tmp_path: Path) -> None:
    base_image = os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(dockerd)
    variables = {"AENV_DOCKER_HOST": dockerd, "AENV_BASE_IMAGE": base_image, "PATH": str(tmp_path)}

    def use(served: Platform, image: str) -> None:
        served.start()
        made = served.create(served.push(dual_project(tmp_path)), datasource=image)
        shell = partial(served.call, made["id"], "POST", "/tools/shell")
        assert shell({"line": "echo kept > /kept; cat /kept"}).data == "kept\n"
        assert "no agent for the second container" in served.text
        served.end()
        served.start()
        assert shell({"line": "cat /kept"}).data == "kept\n"
        served.ask("DELETE", f"/env-instance/{made['id']}").data  # noqa: B018

    async with imported(dockerd, busybox) as image:
        with new_home() as home:
            served = Platform(home, "--engine", "docker", variables=variables)
            try:
                await asyncio.to_thread(use, served, image)
            finally:
                await asyncio.to_thread(served.end)
                found = Harbour(dockerd, base_image)
                found.state = next((home / "docker").glob("platform-*")).name
                left = await found.left()
                await found.clear()
            assert left == []
