"""Nothing of hostile code is left when its sandbox is deleted, whatever it does to stay."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError
from tests.engines.hostile.ground import Outside, own_home, processes_with, soon, start
from tests.support import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
SURVIVORS = Path(__file__).parent / "projects" / "survivors"


def survivors(folder: Path, way: str = "", teardown: str = "") -> Path:
    """The project that wants to stay, which tries at its import when a way is named."""
    shutil.copytree(SURVIVORS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (("way.txt", way), ("hangs.txt", teardown)):
        if text:
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def marker() -> str:
    return f"aenv-survivor-{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, which tries nothing of itself."""
    return survivors(tmp_path_factory.mktemp("mortal") / "project")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(engine, mortal):
    return await start(engine, mortal)


@pytest.mark.parametrize("way", ["double_fork", "stopped", "adopted", "adopted_dead", "first_dies"])
@pytest.mark.parametrize("place", ["tool", "import", "zygote"])
async def test_nothing_survives_a_deletion(engine, neighbour, mortal, home, tmp_path, marker, place, way):
    leaves = Outside(home).leaves()
    project = mortal if place == "tool" else survivors(tmp_path / "project", f"{way} {marker}")
    id = f"survivor-{place}-{way.replace('_', '-')}"
    with suppress(AEnvError):  # whether it starts, and whether the call ends, is its own affair
        box = await soon(start(engine, project, id=id, preload=place == "zygote"), "the start")
        if place == "tool":
            await soon(box.tool("survive", way=way, marker=marker), "the call")
    await soon(engine.delete(id), "the deletion")
    assert processes_with(marker) == []
    assert Outside(home).leaves() == leaves
    assert await neighbour.tool("fine") == "fine"


async def test_a_survivor_lives_until_then(engine, mortal, marker):
    box = await start(engine, mortal)
    await box.tool("survive", way="double_fork", marker=marker)
    await eventually("the survivor", lambda: processes_with(marker))
    await soon(engine.delete(box.id), "the deletion")
    assert processes_with(marker) == []


async def test_a_survivor_ends_with_a_runtime_that_ends_itself(engine, mortal, marker):
    box = await start(engine, mortal)
    with suppress(AEnvError):
        await soon(box.tool("survive", way="first_dies", marker=marker), "the call")

    async def over():
        return (await engine.get(box.id)).state.over

    await eventually("the end", over)
    await eventually("the survivor to end", lambda: not processes_with(marker))
    await engine.delete(box.id)


async def test_a_survivor_ends_with_its_spawner(mortal, marker):
    with own_home() as home:
        engine = ProcessEngine(isolation="strict")
        box = await start(engine, mortal)
        await box.tool("survive", way="double_fork", marker=marker)
        await eventually("the survivor", lambda: processes_with(marker))
        os.kill(Outside(home).pid, 9)
        await eventually("the survivor to end", lambda: not processes_with(marker))
        await engine.close()


@pytest.mark.parametrize("how", ["pause", "busy"])
async def test_a_teardown_that_never_ends_delays_the_end_and_does_not_prevent_it(engine, tmp_path, marker, how):
    box = await start(engine, survivors(tmp_path / "project", teardown=how))
    await box.tool("survive", way="double_fork", marker=marker)
    await soon(engine.delete(box.id), "the deletion")
    assert processes_with(marker) == []
