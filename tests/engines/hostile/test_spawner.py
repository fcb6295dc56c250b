"""Whatever hostile code says to the spawner hurts its own sandbox at most: no other, and not the spawner."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError
from aenv.models import Sandbox, State
from tests.engines.hostile.ground import Outside, own_home, soon, spec, start, strict_engine
from tests.support import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALKERS = Path(__file__).parent / "projects" / "talkers"
DEEDS = [
    "nested",
    "unreadable",
    "too_long",
    "big_number",
    "strange",
    "many_descriptors",
    "lingering",
    "last_wails",
    "hang_up",
    "exits",
]


def talkers(folder: Path, deed: str = "") -> Path:
    """The project that talks, which says something at its import when it is named."""
    shutil.copytree(TALKERS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if deed:
        (folder / "deed.txt").write_text(deed)
    return folder


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, which says nothing of itself."""
    return talkers(tmp_path_factory.mktemp("quiet") / "project")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(engine, quiet):
    """A sandbox of another owner."""
    return await start(engine, quiet, owner="ada")


@pytest.fixture
def outside(neighbour, home: Path) -> Outside:
    return Outside(home)


async def is_over(engine: ProcessEngine, id: str) -> Sandbox | None:
    found = await engine.get(id)
    return found if found.state.over else None


async def all_is_well(engine: ProcessEngine, neighbour, quiet: Path, outside: Outside, leaves: set[Path]) -> None:
    """The spawner answers, neighbours live, new ones start, and nothing of the hostile one is left."""
    assert await soon(neighbour.tool("fine"), "the neighbour's answer") == "fine"
    assert (await soon(engine.get(neighbour.id), "the spawner's answer")).state is State.RUNNING
    another = await soon(start(engine, quiet, owner="ada"), "another start")
    assert await another.tool("fine") == "fine"
    assert another.id in {sandbox.id for sandbox in await soon(engine.find(), "the list")}
    await soon(engine.delete(another.id), "another deletion")
    await eventually("its control groups to go", lambda: outside.leaves() == leaves)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("place", ["tool", "import", "zygote"])
async def test_what_is_said_to_the_spawner_hurts_nobody_else(engine, neighbour, quiet, outside, tmp_path, place, deed):
    leaves = outside.leaves()
    project = quiet if place == "tool" else talkers(tmp_path / "project", deed)
    id = f"talker-{place}-{deed.replace('_', '-')}"
    box = None
    with suppress(AEnvError):  # whether it starts is its own affair
        box = await soon(start(engine, project, id=id, owner="eve", preload=place == "zygote"), "the start")
    if place == "tool":
        with suppress(AEnvError):
            await soon(box.tool("talk", deed=deed), "the call")
    found = await soon(engine.get(id), "the spawner's answer")
    assert found.state in (State.RUNNING, State.FAILED, State.TERMINATED)
    if place == "tool":
        with suppress(AEnvError):
            await soon(box.tool("end", code=3), "the end")
        await eventually("its end to be noticed", lambda: is_over(engine, id))
    await soon(engine.delete(id), "the deletion")
    await all_is_well(engine, neighbour, quiet, outside, leaves)


@pytest.mark.parametrize(
    ("place", "deed"),
    [("tool", "endless"), ("tool", "endless_descriptors"), ("import", "endless"), ("zygote", "endless")],
)
async def test_who_never_stops_talking_keeps_nobody_waiting(quiet, tmp_path, place, deed):
    with own_home() as home:
        async with strict_engine(home) as engine:
            neighbour = await start(engine, quiet, owner="ada")
            outside = Outside(home)
            leaves = outside.leaves()
            project = quiet if place == "tool" else talkers(tmp_path / "project", deed)
            with suppress(AEnvError):
                box = await soon(
                    start(engine, project, id="talker", owner="eve", preload=place == "zygote"), "the start"
                )
                if place == "tool":
                    await soon(box.tool("talk", deed=deed), "the call")
            await soon(engine.get("talker"), "the spawner's answer")
            another = await soon(start(engine, quiet, owner="ada"), "another start")
            assert await another.tool("fine") == "fine"
            await soon(engine.delete(another.id), "another deletion")
            await soon(engine.delete("talker"), "the deletion")
            await all_is_well(engine, neighbour, quiet, outside, leaves)


async def test_a_spawner_keeps_nothing_open_of_what_it_was_sent(engine, neighbour, quiet, outside):
    await engine.delete((await start(engine, quiet, owner="eve")).id)  # so that there is a zygote for it
    before = outside.descriptors()
    for deed in ("many_descriptors", "strange", "nested", "hang_up"):
        box = await soon(start(engine, quiet, owner="eve"), "the start")
        with suppress(AEnvError):
            await soon(box.tool("talk", deed=deed), "the call")
        await soon(engine.delete(box.id), "the deletion")
    await eventually("descriptors to be closed", lambda: outside.descriptors() <= before)


@pytest.mark.parametrize("deed", ["wrong_failure", "long_failure"])
@pytest.mark.parametrize("preload", [False, True])
async def test_a_failure_is_told_in_words_and_not_too_many(engine, neighbour, tmp_path, deed, preload):
    id = f"failing-{deed.replace('_', '-')}-{preload}"
    with pytest.raises(AEnvError) as caught:
        await soon(start(engine, talkers(tmp_path / "project", deed), id=id, owner="eve", preload=preload), "the end")
    assert isinstance(caught.value.message, str)
    assert len(caught.value.message) < 70_000
    found = await engine.get(id)
    assert found.state is State.FAILED
    assert isinstance(found.reason, str)
    assert len(found.reason) < 70_000
    assert await neighbour.tool("fine") == "fine"


async def test_many_words_of_many_failures_do_not_cut_the_spawner_off(engine, neighbour, outside, tmp_path):
    project = talkers(tmp_path / "project", "long_failure")
    before = outside.memory()
    for number in range(3):
        with pytest.raises(AEnvError):
            await soon(engine.create(f"wordy-{number}", spec(project, owner="eve")), "the end")
    kept = sum(len(sandbox.reason) + len(sandbox.boot) for sandbox in await engine.find())
    assert kept < 500_000
    assert outside.memory() < before + 64


async def test_a_name_for_its_life_is_no_place_for_a_book(engine, neighbour, tmp_path):
    box = await soon(start(engine, talkers(tmp_path / "project", "long_boot"), owner="eve"), "the start")
    assert len((await engine.get(box.id)).boot) < 1000
    await soon(engine.delete(box.id), "the deletion")


@pytest.mark.parametrize("deed", ["wrong_facts", "strange"])
async def test_facts_of_the_wrong_kind_are_a_failure_and_cleared_away(
    engine, neighbour, quiet, outside, tmp_path, deed
):
    leaves = outside.leaves()
    project, id = talkers(tmp_path / "project", deed), f"facts-{deed.replace('_', '-')}"
    with suppress(AEnvError):
        await soon(start(engine, project, id=id, owner="eve", preload=True), "the start")
    found = await soon(engine.get(id), "the spawner's answer")
    assert found.state in (State.RUNNING, State.FAILED)
    if found.state is State.FAILED:
        assert "spawner failed" not in found.reason
        assert outside.leaves() == leaves
    await soon(engine.delete(id), "the deletion")
    await all_is_well(engine, neighbour, quiet, outside, leaves)


async def test_exits_that_are_made_up_change_nobody_elses_reason(engine, neighbour, quiet, tmp_path):
    with suppress(AEnvError):  # it may be refused for it
        await start(engine, talkers(tmp_path / "liar", "exits"), owner="eve", preload=True, id="liar")
    honest = await start(engine, quiet, owner="ada")
    with suppress(AEnvError):
        await honest.tool("end", code=7)
    ended = await eventually("the end", lambda: is_over(engine, honest.id))
    assert ended.state is State.FAILED
    assert "exit code 7" in ended.reason
    await engine.delete("liar")


async def test_what_was_sent_is_closed_once(engine, neighbour, quiet, outside, tmp_path):
    """A second time, the numbers of those descriptors would be somebody else's."""
    leaves = outside.leaves("z")
    with suppress(AEnvError):
        project = talkers(tmp_path / "project", "many_descriptors")
        await soon(start(engine, project, id="sender", owner="eve", preload=True), "a start")
    hostile = outside.leaves("z") - leaves
    others = [await soon(start(engine, quiet, owner="ada"), "a start") for _ in range(8)]
    for leaf in hostile:  # its zygote ends, and all that came from it is closed
        for pid in (leaf / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        await eventually("the zygote to be cleared away", lambda leaf=leaf: not leaf.exists())
    for other in (*others, neighbour):
        assert await soon(other.tool("fine"), "an answer") == "fine"
        assert (await engine.get(other.id)).state is State.RUNNING
    for other in others:
        await soon(engine.delete(other.id), "the deletion")
    await soon(engine.delete("sender"), "the deletion")


async def test_patterns_of_a_zygote_do_not_keep_the_spawner_busy(quiet, tmp_path):
    with own_home() as home:
        async with strict_engine(home, isolation="auto") as engine:
            neighbour = await start(engine, quiet, owner="ada")
            project = talkers(tmp_path / "project", "many_patterns")
            starting = asyncio.create_task(start(engine, project, owner="eve", preload="auto"))
            await asyncio.wait((starting,), timeout=5)
            assert (await soon(engine.get(neighbour.id), "the spawner's answer", 15)).state is State.RUNNING
            with suppress(AEnvError):
                await soon(starting, "the start")
