"""Processes of the engine that are killed or stopped at every step: the right error, nobody else is harmed, nothing is
left, and the next sandbox starts."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import msgspec
import pytest

from aenv.client.local import Embedded
from aenv.engines.conformance import projects
from aenv.errors import AEnvError, SandboxLost, StartFailed
from aenv.models import State
from tests.engines.process import lab
from tests.engines.process.lab import call, eventually, over, probe, works

SETUP = "@register_setup\ndef prepare() -> None:\n    wait('here')\n"
HEALTH = "@register_health\ndef healthy() -> bool:\n    wait('here')\n    return True\n"
TEARDOWN = "@register_teardown\ndef clear() -> None:\n    wait('here')\n"


KILLED = "(it was (killed|ended by SIGKILL)|the process it came from ended)"


def inside(isolation):
    """The processes whose end is the end of one instance."""
    return ("instance",) if isolation == "none" else ("instance", "first")


def around(isolation):
    """The processes whose end is the end of a zygote."""
    return ("zygote",) if isolation == "none" else ("stub", "zygote")


# The spawner's own start


async def _starting_spawner(pen):
    return await eventually(
        "a spawner", lambda: next((p for p in pen.processes() if "process.spawner" in p.command), None)
    )


async def test_a_spawner_that_is_killed_before_it_says_hello(engine, pen):
    creating = asyncio.create_task(engine.create("a", probe()))
    (await _starting_spawner(pen)).kill()
    with pytest.raises(SandboxLost, match="spawner is gone"):
        await creating
    await works(engine)


# A zygote's start


async def test_a_zygote_that_is_killed_while_it_imports(engine, family, study, isolation):
    door = study.door("here")
    spec = study.spec("wait('here')", preload=True)
    other = await engine.create("other", probe())
    for role in around(isolation):
        before = {process.pid for process in (*family.stubs(), *family.zygotes())}
        creating = asyncio.create_task(engine.create(role, spec))
        await door.reached()
        process = family.stubs if role == "stub" else family.zygotes
        (found,) = [found for found in process() if found.pid not in before]
        found.kill()
        with pytest.raises(StartFailed, match="ended|killed"):
            await creating
        door.open()
        assert (await engine.get(role)).state is State.FAILED
        assert await call(other, "echo", text="x") == "x"
    door.remove()
    await works(engine, spec)


async def test_a_zygote_that_dies_by_itself_says_why(engine, study):
    spec = study.spec("print('no licence was found', flush=True)\nos._exit(7)", preload=True)
    with pytest.raises(StartFailed, match="no licence was found"):
        await engine.create("a", spec)
    await works(engine)


async def test_a_spawner_that_is_killed_while_a_zygote_imports(engine, family, study, leftovers):
    door = study.door("here")
    spec = study.spec("wait('here')", preload=True)
    creating = asyncio.create_task(engine.create("a", spec))
    await door.reached()
    family.spawner.kill()
    with pytest.raises(SandboxLost, match="spawner is gone"):
        await creating
    door.open()
    door.remove()
    await leftovers.none("processes")
    await works(engine, spec)


# From the fork to the seal

FORK = "os.register_at_fork(after_in_child=lambda: wait('here'))\n"


async def test_a_fork_that_is_killed_before_it_is_sealed(engine, family, study, isolation):
    door = study.door("here")
    spec = study.spec(FORK, preload=True)
    for role in inside(isolation) + (around(isolation) if isolation != "none" else ()):
        creating = asyncio.create_task(engine.create(role, spec))
        await door.reached()
        family.get(role).kill()
        with pytest.raises(StartFailed, match=f"did not start: {KILLED}"):
            await creating
        door.open()
    await eventually("the forks to be gone", lambda: not family.instances() and not family.firsts())
    door.remove()
    await works(engine, spec)


HASTY = """
import asyncio, sys
import msgspec
from aenv.engines.process import engine as module
from aenv.engines.process.engine import ProcessEngine
from aenv.models import SandboxSpec

module._SPAWNER = (
    "from aenv.engines.process import sandboxes, spawner; sandboxes.SEAL = 0.5; spawner.main({}, {!r}, {!r})"
)

async def main():
    spec = msgspec.json.decode(sys.argv[1], type=SandboxSpec)
    async with ProcessEngine(isolation=sys.argv[2]) as engine:
        try:
            await engine.create("a", spec)
        except Exception as exc:
            print(type(exc).__name__, str(exc).replace("\\n", " "))
        print((await engine.get("a")).state)
        await engine.delete("a")
        print("deleted")

asyncio.run(main())
"""


async def test_a_fork_that_takes_too_long_to_seal_itself_is_a_start_that_failed(study, isolation, home, leftovers):
    """As when it takes longer than to start at all; the spawner's own patience is shortened here."""
    door = study.door("here")
    spec = study.spec(FORK, preload=True)
    with lab.owner(HASTY, home, msgspec.json.encode(spec).decode(), isolation) as process:
        await door.reached()
        assert (await lab.line(process)).startswith("StartFailed a did not start")
        assert await lab.line(process) == "Failed"
        assert await lab.line(process) == "deleted"
        door.open()
        process.wait(lab.PATIENCE)
    await leftovers.none()


# From the seal to the first call


async def test_what_stops_while_it_gets_ready_is_given_up(engine, family, study, isolation):
    door = study.door("here")
    spec = study.spec("wait('here')", preload=False)
    sibling = asyncio.create_task(engine.create("sibling", spec))
    await door.reached()
    door.open()
    sandbox = await sibling
    before = _instances(family)
    for role in inside(isolation):
        impatient = msgspec.structs.replace(spec, startup_timeout=3.0)
        creating = asyncio.create_task(engine.create(role, impatient))
        await door.reached()
        found = family.instances() if role == "instance" else family.firsts()
        (mine,) = [process for process in found if process.pid not in before]
        mine.kill(signal.SIGSTOP)
        with pytest.raises(StartFailed, match="it was not ready within 3 s"):
            await creating
        door.open()
        await eventually("it to be gone", lambda: _instances(family) == before)
    assert await call(sandbox, "echo", text="x") == "x"


def _instances(family):
    return {process.pid for process in (*family.instances(), *family.firsts())}


# Running


async def test_an_instance_that_is_killed_harms_no_other(engine, family, isolation):
    sibling = await engine.create("sibling", probe())
    for role in inside(isolation):
        sandbox = await engine.create(role, probe())
        runtime = await family.runtime(engine, role)
        assert await call(sandbox, "echo", text="x") == "x"
        if role == "first":
            space = os.readlink(f"/proc/{runtime.pid}/ns/pid")
            (runtime,) = [p for p in family.firsts() if os.readlink(f"/proc/{p.pid}/ns/pid_for_children") == space]
        runtime.kill()
        ended = await over(engine, role)
        assert ended.state is State.FAILED
        assert ended.reason.startswith("it was ended by SIGKILL")
        with pytest.raises(SandboxLost, match="SIGKILL"):
            await engine.exec(role, ["true"])
        assert await call(sibling, "echo", text="x") == "x"
        assert (await engine.get("sibling")).state is State.RUNNING
    await works(engine)


@pytest.mark.parametrize("role", ["zygote", "stub"])
async def test_a_zygote_that_is_killed_takes_its_own_instances_and_no_others(jail, family, jailed_study, role):
    other = await jail.create("other", jailed_study.spec())
    before = {process.pid for process in (*family.stubs(), *family.zygotes())}
    await jail.create("a", probe())
    await jail.create("b", probe())
    found = family.zygotes() if role == "zygote" else family.stubs()
    (mine,) = [process for process in found if process.pid not in before]
    mine.kill()
    for id in ("a", "b"):
        ended = await over(jail, id)
        assert ended.state is State.FAILED
        assert re.match(KILLED, ended.reason)
    assert await call(other, "echo", text="x") == "x"
    await works(jail)


async def test_an_instance_that_is_stopped_is_deleted_like_any_other(engine, family, study):
    for id, spec in (("plain", probe()), ("teardown", study.spec(TEARDOWN, preload=True))):
        await engine.create(id, spec)
        (await family.runtime(engine, id)).kill(signal.SIGSTOP)
        async with asyncio.timeout(lab.PATIENCE):
            await engine.delete(id)
        assert await engine.find() == []
    await works(engine)


async def test_a_spawner_that_is_killed_takes_everything_with_it(engine, family, leftovers):
    for number in range(3):
        await engine.create(f"a{number}", probe())
    family.spawner.kill()
    await leftovers.none("processes")
    await lab.noticed(engine)
    assert await engine.find() == []
    await works(engine)


# A call in flight


@pytest.fixture
async def embedded(isolation, monkeypatch, leftovers):
    monkeypatch.chdir(projects.PROBE)
    monkeypatch.setenv("AENV_ISOLATION", isolation)
    found = Embedded()
    yield found
    await found._engine().close()


async def _begun(env):
    return (await env.call_tool("read", {"path": "begun"})).structured is not None or (
        await env.exec("test -e begun")
    ).returncode == 0


# A delete


async def test_a_delete_that_is_cancelled_goes_on(engine, family, study):
    door = study.door("here")
    await engine.create("a", study.spec(TEARDOWN, preload=True))
    deleting = asyncio.create_task(engine.delete("a"))
    await door.reached()
    deleting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    door.open()
    await eventually("its end", lambda: not family.instances())
    await engine.delete("a")
    assert await engine.find() == []


# Many at once


async def _outcome(work):
    try:
        await work
    except (StartFailed, SandboxLost) as exc:
        return exc
    return None


async def test_a_zygote_that_is_killed_in_a_burst_of_creates(engine, family, isolation):
    await works(engine)
    (zygote,) = family.zygotes()
    creating = [asyncio.create_task(_outcome(engine.create(f"a{number}", probe()))) for number in range(24)]
    await eventually("some of them", lambda: sum(task.done() for task in creating) >= 4)
    zygote.kill()
    outcomes = await asyncio.gather(*creating)
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, AEnvError):
            assert isinstance(outcome, StartFailed), outcome
            assert re.search(KILLED, str(outcome))
            assert (await engine.get(f"a{number}")).state is State.FAILED
    await works(engine)
    for number in range(24):
        await engine.delete(f"a{number}")
    assert await engine.find() == []
    await eventually("their processes to be gone", lambda: not family.instances() and not family.firsts())


async def test_a_spawner_that_is_killed_in_a_burst_of_creates(engine, family, leftovers):
    await works(engine)
    creating = [asyncio.create_task(_outcome(engine.create(f"a{number}", probe()))) for number in range(24)]
    await eventually("some of them", lambda: sum(task.done() for task in creating) >= 4)
    family.spawner.kill()
    outcomes = await asyncio.gather(*creating)
    assert any(isinstance(outcome, SandboxLost) for outcome in outcomes)
    assert all(outcome is None or isinstance(outcome, SandboxLost) for outcome in outcomes)
    await leftovers.none("processes")
    await works(engine)


async def test_what_failed_while_nobody_waited_is_tried_again(engine, family, study):
    door = study.door("here")
    spec = study.spec(
        "wait('here')\nif os.path.exists(f'{DATA}/broken'):\n    raise RuntimeError('broken')", preload=True
    )
    creating = asyncio.create_task(engine.create("a", spec))
    await door.reached()
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    (study.data / "broken").touch()
    door.open()
    await eventually("the zygote to be gone", lambda: not family.zygotes())
    (study.data / "broken").unlink()
    door.remove()
    await works(engine, spec)
