"""Volumes of the process engine: whose files they are, what they hold, who has them, and what becomes of them."""

from __future__ import annotations

import asyncio
import os

import pytest

from aenv.engines import conformance
from aenv.engines.plain import PlainEngine
from aenv.engines.process import loops, powers, volumes
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import Conflict, Invalid, StartFailed, Unsupported
from aenv.models import State, Volume
from tests.engines.process import lab
from tests.engines.process.lab import call, eventually, over, probe

MIB = 1024 * 1024
MOUNT = "/home/admin/data"


@pytest.fixture(autouse=True)
def able():
    if why := powers.probe().no_volumes:
        pytest.skip(why)


def data(name="data", mount=MOUNT, size=2 * MIB, owner="ada"):
    return Volume(owner=owner, name=name, mount=mount, size=size)


def having(*wanted, **fields):
    return probe(volumes=list(wanted or [data()]), **fields)


async def shell(engine, id, line):
    done = await engine.exec(id, ["sh", "-c", line])
    return done.stdout + done.stderr


async def test_the_list_that_every_engine_must_pass(jail):
    """As far as it is about volumes; ``aenv doctor --engine process`` goes through all of it."""
    names = [check.name for check in conformance.CHECKS if check.needs == "volumes"]
    results = await conformance.run(jail, only=names)
    assert {result.name: (result.status, result.detail) for result in results if result.status != "pass"} == {}


# What it is


async def test_it_outlives_its_sandbox_and_the_engine(jailed, home, leftovers):
    async with ProcessEngine(isolation=jailed) as engine:
        sandbox = await engine.create("a", having())
        await call(sandbox, "write", path=f"{MOUNT}/note.txt", text="kept")
    async with ProcessEngine(isolation=jailed) as engine:  # whose users of this machine are others
        sandbox = await engine.create("b", having())
        assert await call(sandbox, "read", path=f"{MOUNT}/note.txt") == "kept"
        assert await shell(engine, "b", f"stat -c '%u %g' {MOUNT} {MOUNT}/note.txt") == "1000 1000\n1000 1000\n"
        await call(sandbox, "write", path=f"{MOUNT}/note.txt", text="changed")
        assert await call(sandbox, "read", path=f"{MOUNT}/note.txt") == "changed"
    assert (home / "volumes").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (home / "volumes").iterdir()] == ["ada"]


async def test_how_it_is_mounted(jail):
    await jail.create("a", having())
    assert await shell(jail, "a", f"ls -A {MOUNT}") == ""
    row = await shell(jail, "a", f"grep ' {MOUNT} ' /proc/mounts")
    assert {"rw", "nosuid", "nodev"} <= set(row.split()[3].split(","))
    assert "not permitted" in await shell(jail, "a", f"mknod {MOUNT}/null c 1 3")


async def test_several_also_below_what_a_sandbox_may_write(jail):
    own = ["/project/keep/deep", "/home/sandbox/.cache", "/srv/one", MOUNT]
    wanted = [data(name, mount) for name, mount in zip("dcba", own, strict=True)]
    sandbox = await jail.create("a", having(*wanted))
    for mount in own:
        await call(sandbox, "write", path=f"{mount}/f", text=mount)
    await jail.delete("a")
    sandbox = await jail.create("b", having(*reversed(wanted)))
    for mount in own:
        assert await call(sandbox, "read", path=f"{mount}/f") == mount
    assert sorted(await jail.volumes("ada")) == ["a", "b", "c", "d"]


async def test_the_import_sees_it(jailed_study, home, jailed):
    body = f"SEEN = os.listdir({MOUNT!r})\n@register_tool\ndef seen() -> list[str]:\n    return SEEN\n"
    async with ProcessEngine(isolation=jailed) as engine:
        given = jailed_study.spec(body, volumes=[data()])
        sandbox = await engine.create("a", given)
        assert await call(sandbox, "seen") == []
        await shell(engine, "a", f"touch {MOUNT}/here")
        await engine.delete("a")
        assert await call(await engine.create("b", given), "seen") == ["here"]


async def test_it_grows_and_does_not_shrink(jail):
    await jail.create("a", having())
    await shell(jail, "a", f"echo kept > {MOUNT}/f")
    await jail.delete("a")
    for size in (24 * MIB, 3 * MIB):
        await jail.create(f"b{size}", having(data(size=size)))
        done = await jail.exec(f"b{size}", ["dd", "if=/dev/zero", f"of={MOUNT}/big", "bs=1M", "count=20"])
        assert done.returncode == 0, done.stderr
        assert await shell(jail, f"b{size}", f"cat {MOUNT}/f; rm {MOUNT}/big") == "kept\n"
        await jail.delete(f"b{size}")


async def test_a_full_one_is_an_ordinary_error_and_told(jail):
    sandbox = await jail.create("a", having())
    done = await jail.exec("a", ["dd", "if=/dev/zero", f"of={MOUNT}/big", "bs=64k"])
    assert "No space left on device" in done.stderr
    assert await call(sandbox, "echo", text="goes on") == "goes on"

    async def reason():
        return (await jail.get("a")).reason

    told = await eventually("it to be told", reason)
    assert told.startswith("its volume 'data' of 2 MiB is full")
    assert (await jail.get("a")).state is State.RUNNING
    await shell(jail, "a", f"rm {MOUNT}/big")

    async def well():
        return not await reason()

    await eventually("it to be told that there is room again", well)
    await call(sandbox, "write", path=f"{MOUNT}/small", text="fits")


# Who has it


async def test_one_sandbox_at_a_time(jail):
    first = await jail.create("first", having())
    with pytest.raises(Conflict, match="the volume 'data' is in use by the sandbox first") as caught:
        await jail.create("second", having())
    assert "one sandbox at a time" in caught.value.hint
    with pytest.raises(Conflict, match="in use by the sandbox first"):
        await jail.delete_volume("ada", "data")
    await jail.create("other", having(data(owner="bob")))
    assert await call(first, "echo", text="x") == "x"
    await jail.delete("first")
    await jail.create("third", having())


async def test_one_sandbox_at_a_time_among_programs(jailed, home, leftovers):
    async with ProcessEngine(isolation=jailed) as one, ProcessEngine(isolation=jailed) as other:
        await one.create("first", having())
        with pytest.raises(Conflict, match="in use by the sandbox first of process"):
            await other.create("second", having())
        with pytest.raises(Conflict, match="in use by the sandbox first of process"):
            await other.delete_volume("ada", "data")
        await one.delete("first")
        await other.create("third", having())


async def test_many_that_want_it_at_once(jail):
    """One gets it; whoever is told that another has it is told who."""
    made = await asyncio.gather(*(jail.create(f"s{number}", having()) for number in range(6)), return_exceptions=True)
    winners = [found for found in made if not isinstance(found, BaseException)]
    assert len(winners) == 1
    losers = [str(found) for found in made if isinstance(found, Conflict)]
    assert losers == [f"the volume 'data' is in use by the sandbox {winners[0].id}"] * 5


async def test_who_comes_when_a_sandbox_dies_waits_for_what_it_had(jail):
    for number in range(5):
        sandbox = await jail.create(f"s{number}", having())
        await shell(jail, f"s{number}", f"echo {number} > {MOUNT}/f")
        with pytest.raises(Exception, match="crash|gone|lost|answer|closed"):
            await call(sandbox, "crash")
        await over(jail, f"s{number}")
    sandbox = await jail.create("last", having())
    assert await call(sandbox, "read", path=f"{MOUNT}/f") == "4\n"


async def test_a_start_that_fails_gives_it_back(jail, jailed_study):
    with pytest.raises(StartFailed):
        await jail.create("a", jailed_study.spec("raise RuntimeError('no')\n", volumes=[data()]))
    await jail.create("b", having())


async def test_a_start_that_is_cancelled_gives_it_back(jail, jailed_study):
    door = jailed_study.door("door")
    starting = asyncio.create_task(jail.create("a", jailed_study.spec("wait('door')\n", volumes=[data()])))
    await door.reached()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await jail.create("b", having())


async def test_a_killed_spawner_leaves_no_device_and_loses_nothing(jailed, home, family, leftovers):
    engine = ProcessEngine(isolation=jailed)
    sandbox = await engine.create("a", having())
    await call(sandbox, "write", path=f"{MOUNT}/note.txt", text="kept")
    family.spawner.kill()
    await lab.noticed(engine)
    sandbox = await engine.create("b", having())  # at once, while the first may still be about to die
    assert await call(sandbox, "read", path=f"{MOUNT}/note.txt") == "kept"
    await engine.close()
    assert loops.users_of(home / "volumes" / "ada" / "data" / "image") == []


# What becomes of it


async def test_it_is_listed_and_deleted(jail, home):
    assert await jail.volumes("ada") == {}
    await jail.create("a", having(data(), data("odd name/../x", "/srv/x")))
    await shell(jail, "a", f"head -c {MIB} /dev/zero > {MOUNT}/f; sync")
    while_mounted = await jail.volumes("ada")
    assert sorted(while_mounted) == ["data", "odd name/../x"]
    assert MIB <= while_mounted["data"] < 1.2 * MIB
    await jail.delete("a")
    found = await jail.volumes("ada")
    assert MIB <= found["data"] < 1.2 * MIB
    assert found["odd name/../x"] < MIB / 10
    assert await jail.volumes("bob") == {}
    for name in (*found, "never there"):
        await jail.delete_volume("ada", name)
    assert await jail.volumes("ada") == {}
    assert list((home / "volumes").iterdir()) == []
    await jail.create("b", having())
    assert await shell(jail, "b", f"ls -A {MOUNT}") == ""


async def test_hostile_content_harms_nobody(jail, home, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    hostile = (
        f"cd {MOUNT}; ln -s {precious} link; ln -s / root; ln -s ../../.. up; touch \"$(printf 'a\\nb')\" -- -rf;"
        "mkfifo pipe; i=0; while [ $i -lt 200 ]; do mkdir d && cd d; i=$((i+1)); done; chmod 0 ../d"
    )
    await jail.create("a", having())
    await shell(jail, "a", hostile)
    await jail.delete("a")
    assert await jail.volumes("ada")
    await jail.delete_volume("ada", "data")
    assert (precious / "file").read_text() == "precious"
    assert list((home / "volumes").iterdir()) == []


async def test_an_image_that_was_half_made_is_made_anew(jail, home):
    place = home / "volumes" / "ada" / "data"
    place.mkdir(parents=True)
    (place / "image.new").write_bytes(b"half")
    sandbox = await jail.create("a", having())
    await call(sandbox, "write", path=f"{MOUNT}/f", text="x")


async def test_an_image_that_is_none_is_told(jail, home):
    place = home / "volumes" / "ada" / "data"
    place.mkdir(parents=True)
    (place / "image").write_bytes(bytes(4 * MIB))
    (place / "volume.json").write_text('{"size": 2097152, "free": 1}')
    with pytest.raises(StartFailed, match="the volume 'data' cannot be had"):
        await jail.create("a", having())
    await jail.delete_volume("ada", "data")
    await jail.create("b", having())


async def test_what_is_not_known_of_it_any_more_costs_nothing(jail, home):
    await jail.create("a", having(data(size=16 * MIB)))
    await shell(jail, "a", f"head -c {8 * MIB} /dev/urandom > {MOUNT}/f; md5sum {MOUNT}/f > {MOUNT}/sum")
    await jail.delete("a")
    (home / "volumes" / "ada" / "data" / "volume.json").unlink()
    await jail.create("b", having(data(size=2 * MIB)))
    assert "OK" in await shell(jail, "b", f"md5sum -c {MOUNT}/sum")
    await jail.delete("b")
    (home / "volumes" / "ada" / "data" / "image").write_bytes(b"short")
    assert await jail.volumes("ada") == {}


# What cannot be


@pytest.mark.parametrize(
    "mount",
    ["data", "", "/", "/etc", "/etc/x", "/proc/x", "/home", "/project", "/usr/local/x", "/a/../etc", "//x", "/x\0y"],
)
def test_places_where_none_can_be(mount):
    with pytest.raises(Invalid, match="the volume 'data' cannot be at"):
        volumes.check([("ada", "data", mount, MIB)])


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ([("ada", "data", "/d", 5)], "too small"),
        ([("ada", "data", "/d", 2**60)], "too large"),
        ([("", "data", "/d", MIB)], "cannot be the name or the owner"),
        ([("ada", "\ud800", "/d", MIB)], "cannot be the name or the owner"),
        ([("ada", "x" * 300, "/d", MIB)], "cannot be the name or the owner"),
        ([("ada", "a", "/d", MIB), ("ada", "a", "/e", MIB)], "asked for twice"),
        ([("ada", "a", "/d", MIB), ("ada", "b", "/d/", MIB)], "would hide"),
        ([("ada", "a", "/d", MIB), ("ada", "b", "/d/e", MIB)], "would hide"),
        ([("ada", str(number), f"/{number}", MIB) for number in range(9)], "8 volumes at most"),
    ],
)
def test_volumes_that_cannot_be(wanted, why):
    with pytest.raises(Invalid, match=why):
        volumes.check(wanted)


async def test_without_isolation_there_are_none(home):
    async with ProcessEngine(isolation="none") as engine:
        assert "volumes" in engine.cannot
        for refused in (engine.create("a", having()), engine.volumes("ada"), engine.delete_volume("ada", "data")):
            with pytest.raises(Unsupported, match="nothing can be mounted in a sandbox") as caught:
                await refused
            assert caught.value.hint
        await lab.works(engine)
    assert not os.path.exists(home / "volumes")


async def test_the_plain_engine_has_none():
    async with PlainEngine() as engine:
        with pytest.raises(Unsupported, match="the plain engine cannot keep volumes"):
            await engine.create("a", having())
        with pytest.raises(Unsupported):
            await engine.volumes("ada")
