"""Hostile code that takes all it can get takes no more than its share, and nobody else notices."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from aenv.errors import AEnvError, StartFailed
from aenv.models import State
from tests.engines.hostile.ground import PATIENCE, SMALL, Outside, soon, start
from tests.support import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
FLOODS = Path(__file__).parent / "projects" / "floods"
MOST = 512
"""Processes and threads of an instance."""
ROOMY = {**SMALL, "memory": "1Gi"}
anywhere = pytest.mark.parametrize("place", ["tool", "import"])


def floods(folder: Path, way: str = "") -> Path:
    """The project of floods, which begins one at its import when it is named."""
    shutil.copytree(FLOODS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if way:
        (folder / "flood.txt").write_text(way)
    return folder


def limit_was_hit(leaf: Path) -> bool:
    return int((leaf / "pids.events").read_text().split()[1]) > 0


def number_in(leaf: Path) -> int:
    return int((leaf / "pids.current").read_text())


@pytest.fixture
def outside(neighbour, home: Path) -> Outside:
    return Outside(home)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, which floods nothing of itself."""
    return floods(tmp_path_factory.mktemp("calm") / "project")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(engine, calm):
    """A sandbox that wants nothing but to be left alone."""
    return await start(engine, calm)


async def drown(engine, calm: Path, folder: Path, way: str, place: str, resources: dict[str, str]):
    """Let a flood begin, from a tool or at import; the sandbox, and what the flood says."""
    project = floods(folder / "project", way) if place == "import" else calm
    box = await soon(start(engine, project, resources=resources), "a start")
    return box, await box.tool("at_import") if place == "import" else await box.tool("flood", way=way)


@anywhere
async def test_a_fork_bomb_ends_at_the_limit_and_with_its_sandbox(engine, neighbour, calm, outside, tmp_path, place):
    before = outside.leaves()
    project = floods(tmp_path / "project", "forks") if place == "import" else calm
    box = await soon(start(engine, project, resources=ROOMY), "a start")
    if place == "tool":
        assert await box.tool("flood", way="forks") == "forked"
    (leaf,) = outside.leaves() - before
    await eventually("the limit to be hit", lambda: limit_was_hit(leaf))
    assert number_in(leaf) <= MOST
    assert await soon(neighbour.tool("fine"), "the neighbour's answer") == "fine"
    another = await soon(start(engine, calm), "another start")
    pids = [int(pid) for pid in (leaf / "cgroup.procs").read_text().split()]
    await soon(engine.delete(box.id), "the deletion")
    assert not leaf.exists()
    assert not [pid for pid in pids if _lives_in(pid, leaf)]
    await engine.delete(another.id)


def _lives_in(pid: int, leaf: Path) -> bool:
    with suppress(OSError):
        return leaf.name in Path(f"/proc/{pid}/cgroup").read_text()
    return False


async def test_a_fork_bomb_of_an_import_before_the_fork_ends_at_a_limit_too(engine, neighbour, outside, tmp_path):
    project = floods(tmp_path / "project", "sleepers")
    with suppress(AEnvError):
        box = await soon(start(engine, project, preload=True, resources=SMALL), "a start")
        assert await box.tool("at_import") <= MOST
        await soon(engine.delete(box.id), "the deletion")
    assert await neighbour.tool("fine") == "fine"


@anywhere
async def test_threads_count_too(engine, neighbour, calm, tmp_path, place):
    box, number = await drown(engine, calm, tmp_path, "threads", place, ROOMY)
    assert number <= MOST
    assert await box.tool("fine") == "fine"
    await engine.delete(box.id)


async def test_a_tool_that_floods_memory_ends_its_sandbox_and_no_other(engine, neighbour, calm):
    box = await start(engine, calm, resources=SMALL)
    with pytest.raises(AEnvError):
        await soon(box.tool("flood", way="memory"), "the flood")

    async def over():
        found = await engine.get(box.id)
        return found if found.state.over else None

    ended = await eventually("the end", over)
    assert ended.state is State.FAILED
    assert ended.reason.startswith("out of memory")
    assert "128 MiB" in ended.reason
    assert await neighbour.tool("fine") == "fine"
    await engine.delete(box.id)


async def test_an_import_that_floods_memory_does_not_start(engine, neighbour, tmp_path):
    project = floods(tmp_path / "project", "memory")
    with pytest.raises(StartFailed, match="out of memory") as caught:
        await soon(start(engine, project, id="drowned", resources=SMALL), "the failure")
    assert "128 MiB" in caught.value.message
    ended = await engine.get("drowned")
    assert ended.state is State.FAILED
    assert ended.reason.startswith("out of memory")
    assert await neighbour.tool("fine") == "fine"


async def test_an_import_before_the_fork_has_no_more_memory_than_an_instance(engine, neighbour, tmp_path):
    project = floods(tmp_path / "project", "memory")
    with pytest.raises(StartFailed, match="out of memory"):
        await soon(start(engine, project, preload=True, resources=SMALL), "the failure")
    assert await neighbour.tool("fine") == "fine"


@anywhere
async def test_what_is_under_way_between_sockets_counts_too(engine, neighbour, calm, tmp_path, place):
    """It is memory of the kernel's, which not every control group counts by itself."""
    with suppress(AEnvError):  # to be ended for it is as good
        box, number = await drown(engine, calm, tmp_path, "sockets", place, SMALL)
        assert number <= 128
        await engine.delete(box.id)
    assert await neighbour.tool("fine") == "fine"


@anywhere
async def test_a_full_disk_is_an_error_inside_and_nothing_outside(engine, neighbour, calm, tmp_path, place):
    box, took = await drown(engine, calm, tmp_path, "disk", place, SMALL)
    assert {why for _, why in took.values()} == {"ENOSPC"}
    assert sum(size for size, _ in took.values()) <= 32 * 1024**2
    assert took["/project"][0] > 16 * 1024**2
    assert await box.tool("fine") == "fine"
    await engine.delete(box.id)


@anywhere
async def test_a_flood_of_files_ends_at_a_limit(engine, neighbour, calm, tmp_path, place):
    box, (number, why) = await drown(engine, calm, tmp_path, "inodes", place, ROOMY)
    assert why == "ENOSPC"
    assert 1000 < number <= 110_000
    assert await box.tool("fine") == "fine"
    await engine.delete(box.id)


@anywhere
async def test_a_flood_of_open_files_ends_at_a_limit(engine, neighbour, calm, tmp_path, place):
    box, (number, why) = await drown(engine, calm, tmp_path, "descriptors", place, SMALL)
    assert why == "EMFILE"
    assert number <= 4096
    assert await box.tool("fine") == "fine"
    await engine.delete(box.id)


@pytest.mark.parametrize("place", ["tool", "import", "zygote"])
async def test_a_flood_of_output_is_kept_in_bounds_and_delays_nobody(engine, neighbour, calm, outside, tmp_path, place):
    before = outside.memory()
    if place == "zygote":
        project = floods(tmp_path / "project", "log")
        box = await soon(start(engine, project, preload=True, resources=SMALL), "a start")
    else:
        box, _ = await drown(engine, calm, tmp_path, "log", place, SMALL)

        async def overflowed():
            return (await engine.output(box.id, 0)).start > 1024**2

        await eventually("a flood", overflowed)
        assert len((await engine.output(box.id, 0)).data) <= 256 * 1024
    for _ in range(20):
        assert await soon(neighbour.tool("fine"), "the neighbour's answer") == "fine"
        assert (await soon(engine.get(neighbour.id), "the spawner's answer")).state is State.RUNNING
    another = await soon(start(engine, calm), "another start")
    assert outside.memory() < before + 64
    await soon(engine.delete(box.id), "the deletion")
    await engine.delete(another.id)


async def test_deleting_in_the_middle_of_a_memory_flood_works(engine, neighbour, calm):
    box = await start(engine, calm, resources=SMALL)
    flooding = asyncio.create_task(box.tool("flood", way="forks"))
    await asyncio.wait((flooding,), timeout=PATIENCE)
    drowning = asyncio.create_task(box.tool("flood", way="memory"))
    await soon(engine.delete(box.id), "the deletion")
    with pytest.raises(AEnvError):
        await soon(drowning, "the call")
    assert await neighbour.tool("fine") == "fine"
