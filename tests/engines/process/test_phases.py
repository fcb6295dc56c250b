"""Where the time of a start goes, while it is under way and afterwards; and what a sandbox uses once it runs."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from aenv.engines.plain import PlainEngine
from aenv.engines.stages import Stages
from aenv.errors import NotFound, SandboxLost, StartFailed
from aenv.models import State
from tests.engines.process.lab import Study, call, eventually, probe

BODY = {
    "import": "wait('door')\n",
    "setup": "@register_setup\ndef begin() -> None:\n    wait('door')\n",
    "health": "@register_health\ndef well() -> bool:\n    wait('door')\n    return True\n",
}


def test_phases_follow_each_other():
    stages = Stages({"install": 2.0})
    stages.begin("one")
    stages.begin("two")
    stages.end()
    stages.begin("one")
    stages.end()
    assert list(stages.seconds) == ["install", "one", "two"]
    assert stages.seconds["install"] == 2.0
    assert stages.seconds == stages.seconds


def test_who_waits_for_another_start_shares_its_phases_from_then_on():
    other, late = Stages(), Stages()
    other.begin("early")
    other.begin("zygote")
    with late.following(other):
        other.begin("import")
        under_way = late.seconds
        other.end()
    late.begin("fork")
    late.end()
    assert list(under_way) == ["zygote", "import"]
    assert list(late.seconds) == ["zygote", "import", "fork"]
    assert late.seconds["import"] >= under_way["import"]


async def test_a_first_start_and_a_second(engine):
    first = (await engine.create("a", probe())).phases
    assert {"zygote", "import", "serve"} <= set(first)
    second = (await engine.create("b", probe())).phases
    assert {"fork", "seal", "serve"} <= set(second) <= {"fork", "seal", "serve", "install"}
    assert (await engine.get("b")).phases == second
    assert all(taken > 0 for taken in (*first.values(), *second.values()))


@pytest.mark.parametrize("phase", BODY)
async def test_a_start_that_is_under_way_says_where_it_stands(engine, study, phase):
    """In the sandbox itself, which imports anew what must not be shared."""
    door = study.door("door")
    given = study.spec(BODY[phase], preload=False)
    starting = asyncio.create_task(engine.create("a", given))
    await door.reached()

    async def stands():
        found = await engine.get("a")
        return found if phase in found.phases else None

    found = await eventually(f"it to be at {phase}", stands)
    assert found.state is State.CREATING
    assert list(found.phases)[-1] == phase
    door.remove()
    phases = (await starting).phases
    assert phases[phase] >= found.phases[phase]


async def test_an_import_in_the_warm_parent_is_told_as_well(engine, study):
    door = study.door("door")
    starting = asyncio.create_task(engine.create("a", study.spec(BODY["import"], preload=True)))
    await door.reached()

    async def stands():
        return list((await engine.get("a")).phases)[-1:] == ["import"]

    await eventually("it to be at the import", stands)
    door.remove()
    assert {"zygote", "import"} <= set((await starting).phases)


async def test_a_start_that_takes_too_long_names_where(engine, study):
    study.door("door")
    body = "@register_setup\ndef begin() -> None:\n    'QUICK' in os.environ or wait('door')\n"
    given = study.spec(body)
    quick = msgspec.structs.replace(given, environment_variables={"QUICK": "1"})
    await engine.create("a", quick)  # so that the next start is at its setup soon
    with pytest.raises(StartFailed, match=r"did not start within 5 s; the time went to: .*s setup"):
        async with engine.provision(msgspec.structs.replace(given, startup_timeout=5.0)):
            pytest.fail("it started")


async def test_the_plain_engine_tells_as_well(tmp_path):
    study = Study(tmp_path, "none")
    door = study.door("door")
    async with PlainEngine() as plain:
        given = study.spec(BODY["setup"])
        await plain.create("a", given)
        await door.reached()
        assert list((await plain.get("a")).phases) == ["spawn", "import"]
        door.remove()
        assert set((await plain.wait("a", 60)).phases) == {"spawn", "import", "health"}
    study.close()


# What it uses


async def test_what_a_sandbox_uses(engine):
    sandbox = await engine.create("a", probe())
    before = await engine.used("a")
    assert before.cpu < 30
    assert 0 < before.memory < 2**30
    await call(sandbox, "keep", megabytes=64)
    await engine.exec("a", ["python3", "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    after = await engine.used("a")
    assert after.cpu >= before.cpu + 0.25
    assert after.memory > before.memory + 48 * 2**20
    with pytest.raises(NotFound):
        await engine.used("b")


async def test_what_has_ended_uses_nothing_any_more(engine):
    sandbox = await engine.create("a", probe())
    with pytest.raises(Exception, match="."):
        await call(sandbox, "crash")

    async def over():
        return (await engine.get("a")).state.over

    await eventually("its end", over)
    with pytest.raises(SandboxLost):
        await engine.used("a")
