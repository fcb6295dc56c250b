"""Hostile code reads nothing of the owner's or of another instance, and writes nothing outside its own copy."""

from __future__ import annotations

import pytest

from tests.engines.hostile.ground import attacks, start
from tests.engines.hostile.loot import INSTANCE, PLACES, Loot

everywhere = pytest.mark.parametrize("place", PLACES)
in_instances = pytest.mark.parametrize("place", INSTANCE)


@everywhere
@pytest.mark.parametrize("what", ["secret files", "private files", "hunt", "left the root"])
def test_the_owners_files_cannot_be_read(loot: Loot, place: str, what: str) -> None:
    assert not loot.got(place, what)


@everywhere
def test_the_owners_environment_cannot_be_read(loot: Loot, place: str) -> None:
    assert loot.got(place, "environments") == []


@everywhere
def test_no_socket_is_to_be_seen(loot: Loot, place: str) -> None:
    assert loot.got(place, "named sockets") == []


@everywhere
@pytest.mark.parametrize("whose", ["owner's secret", "neighbour's variable", "token"])
def test_memory_holds_no_secret_of_others(loot: Loot, place: str, whose: str) -> None:
    assert loot.got(place, f"{whose} in memory") == 0


@in_instances
def test_a_search_of_the_memory_finds_what_is_there(loot: Loot, place: str) -> None:
    assert loot.got(place, "own variable in memory") > 0


def test_a_zygote_never_has_the_variables_of_its_instances(loot: Loot) -> None:
    assert loot.got("zygote", "own variable in memory") == 0


def test_a_later_instance_has_nothing_of_an_earlier_one_of_its_zygote(loot: Loot) -> None:
    assert loot.got("later", "own variable in memory") == 0
    assert loot.got("later", "token in memory") == 0


@everywhere
def test_nothing_is_shared_with_another_instance(loot: Loot, place: str) -> None:
    assert {"shm", "msg", "sem", "mq", "/dev/shm", "/tmp", "/project"} <= set(loot.got("neighbour", "finds"))
    assert loot.got(place, "left by a neighbour") == []


@everywhere
@pytest.mark.parametrize("what", ["made outside", "made at home", "opened to write", "opened secrets to write"])
def test_nothing_outside_can_be_written(loot: Loot, place: str, what: str) -> None:
    assert loot.got(place, what) == []


@in_instances
def test_an_instance_can_write_what_is_its_own(loot: Loot, place: str) -> None:
    assert set(loot.got(place, "made inside")) == {"/tmp", "/project", "/project/src", "/dev/shm", "/home/sandbox"}


def test_a_zygote_cannot_write_the_project_that_others_will_see(loot: Loot) -> None:
    assert loot.got("zygote", "made inside") == ["/tmp"]


@everywhere
def test_there_are_no_devices_but_the_harmless_ones(loot: Loot, place: str) -> None:
    harmless = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/pts/ptmx"}
    assert set(loot.got(place, "devices")) <= harmless
    assert loot.got(place, "made devices") == []


def test_the_attacks_on_files_work_where_there_is_no_isolation(loot: Loot) -> None:
    found = loot.got("open", "secret files")
    assert {str(loot.home / ".ssh" / "id_ed25519"), f"/root/.{loot.marker}"} <= set(found)
    assert all(loot.secret in text for text in found.values())
    assert loot.got("open", "environments")
    assert loot.got("open", "made at home")
    assert loot.got("open", "opened secrets to write")
    assert loot.got("open", "made devices")
    assert loot.got("open", "owner's secret in memory") > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_what_one_instance_writes_is_seen_by_no_other_and_not_in_the_authors_project(engine, tmp_path):
    project = attacks(tmp_path / "project")
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    first = await start(engine, project)
    for path in ("/project/config.json", "/project/src/custom_env.py", "/project/new.txt", "/tmp/new.txt"):
        assert (await first.tool("attack", name="plant", arguments={"path": path, "text": "planted"}))["got"]
    assert await engine.download(first.id, "/project/src/custom_env.py") == b"planted"
    second = await start(engine, project)
    for path in ("/project/new.txt", "/tmp/new.txt"):
        assert "FileNotFoundError" in (await second.tool("attack", name="show", arguments={"path": path}))["refused"]
    shown = await second.tool("attack", name="show", arguments={"path": "/project/src/custom_env.py"})
    assert shown["got"].encode() == (project / "src" / "custom_env.py").read_bytes()
    await engine.delete(first.id)
    third = await start(engine, project)
    looked = await third.tool("attack", name="find_files", arguments={"paths": ["/project/new.txt", "/tmp/new.txt"]})
    assert looked["got"] == []
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before
    for box in (second, third):
        await engine.delete(box.id)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_an_import_writes_is_seen_by_no_other(engine, tmp_path):
    files = ("/project/new", "/tmp/new")
    plan = {"looked": {"attack": "find_files", "with": {"paths": files}}}
    plan |= {path: {"attack": "plant", "with": {"path": path, "text": "planted"}} for path in files}
    project = attacks(tmp_path / "project", plan)
    before = sorted(path.relative_to(project) for path in project.rglob("*"))
    for _ in range(2):
        box = await start(engine, project)
        seen = await box.tool("at_import")
        assert seen["looked"]["got"] == []
        assert seen["/project/new"]["got"]
        assert seen["/tmp/new"]["got"]
    assert sorted(path.relative_to(project) for path in project.rglob("*")) == before
