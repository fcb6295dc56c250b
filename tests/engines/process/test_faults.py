"""Processes of the engine that are killed or stopped at every step: the right error, nobody else is harmed, nothing is
left, and the next sandbox starts."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import signal

import msgspec
import pytest

from aenv import Environment
from aenv.client.local import Embedded
from aenv.engines.conformance import projects
from aenv.engines.process.engine import _request
from aenv.errors import AEnvError, SandboxError, SandboxLost, StartFailed
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


async def test_a_spawner_that_stops_before_it_says_hello_is_not_waited_for_longer_than_for_a_start(engine, pen):
    async def use():
        async with engine.provision(probe(startup_timeout=1.0)):
            pytest.fail("it started")

    using = asyncio.create_task(use())
    spawner = await _starting_spawner(pen)
    spawner.kill(signal.SIGSTOP)
    try:
        await asyncio.wait((using,), timeout=lab.PATIENCE)
        assert using.done(), "it waits for a spawner that is stopped"
    finally:
        spawner.kill()
        await asyncio.wait((using,))
    with pytest.raises(StartFailed, match="within 1 s"):
        await using
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


async def _importing(engine, family, study, door, role):
    """A start that imports, and its patience: as little as lets it come so far on this machine."""
    patience = 2.0
    while True:
        spec = study.spec("wait('here')", preload=True, startup_timeout=patience)
        creating = asyncio.create_task(engine.create(f"{role}-{patience:g}", spec))
        reaching = asyncio.create_task(door.reached())
        await asyncio.wait((creating, reaching), return_when=asyncio.FIRST_COMPLETED)
        if reaching.done():
            await reaching
            return creating, patience
        reaching.cancel()
        with pytest.raises(StartFailed, match=f"within {patience:g} s"):
            await creating
        await eventually("the zygote to be gone", lambda: not family.zygotes() and not family.stubs())
        patience *= 2
        assert patience <= lab.PATIENCE, "it does not come to its import"


async def test_a_zygote_that_stops_while_it_imports_is_given_up(engine, family, study, isolation):
    door = study.door("here")
    for role in around(isolation):
        creating, patience = await _importing(engine, family, study, door, role)
        family.get(role).kill(signal.SIGSTOP)
        with pytest.raises(StartFailed, match=f"within {patience:g} s"):
            await creating
        await eventually("the zygote to be gone", lambda: not family.zygotes() and not family.stubs())
        door.open()
    door.remove()
    await works(engine, study.spec("wait('here')", preload=True))


async def test_a_zygote_that_dies_by_itself_says_why(engine, study):
    spec = study.spec("print('no licence was found', flush=True)\nos._exit(7)", preload=True)
    with pytest.raises(StartFailed, match="no licence was found"):
        await engine.create("a", spec)
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
    with pytest.raises(StartFailed, match="broken"):
        await engine.create("b", spec)
    (study.data / "broken").unlink()
    door.remove()
    await works(engine, spec)


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
    for role in inside(isolation):
        creating = asyncio.create_task(engine.create(role, spec))
        await door.reached()
        family.get(role).kill()
        with pytest.raises(StartFailed, match=f"did not start: {KILLED}"):
            await creating
        door.open()
    await eventually("the forks to be gone", lambda: not family.instances() and not family.firsts())
    door.remove()
    await works(engine, spec)


async def _kill_at(door, family, role):
    """Kill it when a fork stands at the door, which goes with it."""
    await door.reached()
    process, fork = family.get(role), family.get("instance")
    process.kill()
    await eventually("the fork to be gone", lambda: not os.path.exists(f"/proc/{fork.pid}"))
    door.open()


async def test_a_zygote_that_is_killed_while_it_forks_has_a_successor(jail, family, jailed_study):
    door = jailed_study.door("here")
    spec = jailed_study.spec(FORK, preload=True)
    for role in around("auto"):
        creating = asyncio.create_task(jail.create(role, spec))
        await _kill_at(door, family, role)
        await door.reached()
        door.open()
        assert await call(await creating, "echo", text="x") == "x"
        await jail.delete(role)


async def test_a_zygote_that_is_killed_whenever_it_forks_is_not_tried_for_ever(jail, family, jailed_study):
    door = jailed_study.door("here")
    creating = asyncio.create_task(jail.create("a", jailed_study.spec(FORK, preload=True)))
    for _ in range(2):
        await _kill_at(door, family, "zygote")
    with pytest.raises(StartFailed, match="the process it came from ended"):
        await creating


async def test_a_fork_that_never_seals_itself_is_given_up_and_ended(engine, family, study):
    door = study.door("here")
    body = FORK
    spec = study.spec(body, preload=True, startup_timeout=5.0)
    creating = asyncio.create_task(engine.create("a", spec))
    await door.reached()
    with pytest.raises(StartFailed, match="within 5 s"):
        await creating
    assert (await engine.get("a")).state is State.FAILED
    await eventually("the fork to be gone", lambda: not family.instances() and not family.firsts(), patience=5)
    door.remove()
    await works(engine, spec)


HASTY = """
import asyncio, sys
import msgspec
from aenv.engines.process import engine as module
from aenv.engines.process.engine import ProcessEngine
from aenv.models import SandboxSpec

module._SPAWNER = (
    "from aenv.engines.process import cells, spawner; cells.SEAL = 0.5; spawner.main({}, {!r}, {!r})"
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
        assert await lab.line(process) == "StartFailed it was not sealed within 0.5 s"
        assert await lab.line(process) == "Failed"
        assert await lab.line(process) == "deleted"
        door.open()
        process.wait(lab.PATIENCE)
    await leftovers.none()


@pytest.mark.parametrize("limit", ["RLIMIT_NPROC", "RLIMIT_NOFILE"])
async def test_a_fork_that_the_machine_refuses_harms_no_other(jail, family, limit):
    sandboxes = [await jail.create(f"a{number}", probe()) for number in range(2)]
    zygote = family.get("zygote").pid
    most = 1 if limit == "RLIMIT_NPROC" else len(os.listdir(f"/proc/{zygote}/fd")) + 3
    resource.prlimit(zygote, getattr(resource, limit), (most, most))
    with pytest.raises(StartFailed, match="it could not be forked: .*(unavailable|Too many)"):
        await jail.create("b", probe())
    assert [await call(sandbox, "echo", text="x") for sandbox in sandboxes] == ["x", "x"]


async def test_creates_that_are_deleted_half_way_harm_no_other(jail):
    """Their ends fall into the moments in which others are made."""
    sandboxes = [await jail.create(f"kept{number}", probe()) for number in range(3)]
    chance = random.Random(3)

    async def regret(worker):
        for number in range(25):
            id = f"x{worker}-{number}"
            creating = asyncio.create_task(_outcome(jail.create(id, probe())))
            await asyncio.sleep(chance.random() * 0.05)
            await jail.delete(id)
            await creating
            await jail.delete(id)

    async with asyncio.timeout(lab.PATIENCE * 2):
        await asyncio.gather(*map(regret, range(16)))
    assert [await call(sandbox, "echo", text="x") for sandbox in sandboxes] == ["x"] * 3


async def test_an_environment_that_stalls_delays_no_other(jail, jailed_study):
    door = jailed_study.door("here")
    spec = jailed_study.spec(FORK, preload=True)
    stalled = [asyncio.create_task(_outcome(jail.create(f"stalled{number}", spec))) for number in range(40)]
    await door.reached()
    await works(jail)
    assert not any(task.done() for task in stalled)
    for number in range(40):
        await jail.delete(f"stalled{number}")
    await asyncio.wait(stalled)


# From the seal to the first call


@pytest.mark.parametrize(
    ("body", "preload"),
    [("wait('here')", False), (SETUP, True), (HEALTH, True)],
    ids=["import", "setup", "health"],
)
async def test_what_is_killed_while_it_gets_ready(engine, family, study, isolation, body, preload):
    door = study.door("here")
    spec = study.spec(body, preload=preload)
    roles = inside(isolation) + (around(isolation) if isolation != "none" else ())
    for role in roles:
        creating = asyncio.create_task(engine.create(role, spec))
        await door.reached()
        family.get(role).kill()
        with pytest.raises(StartFailed, match=f"{role} did not start: {KILLED}"):
            await creating
        door.open()
        found = await engine.get(role)
        assert (found.state, found.url) == (State.FAILED, "")
    creating = asyncio.create_task(engine.create("last", spec))
    await door.reached()
    family.spawner.kill()
    with pytest.raises(SandboxLost, match="spawner is gone"):
        await creating
    door.remove()
    await works(engine, spec)


async def test_what_stops_while_it_gets_ready_is_given_up(engine, family, study, isolation):
    door = study.door("here")
    spec = study.spec("wait('here')", preload=False)
    sibling = asyncio.create_task(engine.create("sibling", spec))
    await door.reached()
    door.open()
    sandbox = await sibling
    before = _instances(family)
    for role in inside(isolation):
        impatient = msgspec.structs.replace(spec, startup_timeout=5.0)
        creating = asyncio.create_task(engine.create(role, impatient))
        await door.reached()
        found = family.instances() if role == "instance" else family.firsts()
        (mine,) = [process for process in found if process.pid not in before]
        mine.kill(signal.SIGSTOP)
        with pytest.raises(StartFailed, match="it was not ready within 5 s"):
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


async def test_a_plain_zygote_that_is_killed_leaves_its_instances_in_good_hands(home, family, leftovers):
    async with lab.ProcessEngine(isolation="none") as engine:
        sandbox = await engine.create("a", probe())
        runtime = await family.runtime(engine, "a")
        zygote = family.get("zygote")
        zygote.kill()
        await eventually("the zygote to be gone", lambda: not os.path.exists(f"/proc/{zygote.pid}"))
        assert await call(sandbox, "echo", text="x") == "x"
        await works(engine)
        runtime.kill()
        ended = await over(engine, "a")
        assert ended.state is State.FAILED
        assert re.match(KILLED, ended.reason)
        await eventually("its body to be buried", lambda: not os.path.exists(f"/proc/{runtime.pid}"), patience=5)


async def test_a_create_right_after_the_zygote_was_killed(engine, family):
    await works(engine)
    for _ in range(3):
        (zygote,) = family.zygotes()
        zygote.kill()
        await works(engine)


async def test_a_zygote_that_stops_delays_nobody_for_ever(engine, family):
    sandbox = await engine.create("a", probe())
    zygote = family.get("zygote")
    zygote.kill(signal.SIGSTOP)
    assert await call(sandbox, "echo", text="x") == "x"
    with pytest.raises(StartFailed, match="it was not ready within 1.5 s"):
        await engine.create("b", probe(startup_timeout=1.5))
    async with asyncio.timeout(lab.PATIENCE):
        await engine.delete("a")
    try:
        sandbox = await engine.create("c", probe(startup_timeout=60.0))
    finally:
        zygote.kill(signal.SIGCONT)
    assert await call(sandbox, "echo", text="x") == "x"


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


@pytest.mark.parametrize("role", ["instance", "first", "stub", "zygote", "spawner"])
async def test_a_call_in_flight_hears_of_the_end(embedded, family, isolation, role):
    if isolation == "none" and role not in ("instance", "spawner"):
        pytest.skip("without isolation there is no such process, or its end changes nothing")
    async with Environment(projects.NAME, provision=embedded) as env:
        calling = asyncio.create_task(env.call_tool("sleep", {"seconds": 600, "mark": "begun"}))
        await eventually("the call", lambda: _begun(env))
        family.get(role).kill()
        with pytest.raises(SandboxLost, match="the sandbox is gone") as caught:
            await calling
        assert role == "spawner" or re.search(KILLED, str(caught.value))
    async with Environment(projects.NAME, provision=embedded) as env:
        assert (await env.call_tool("echo", {"text": "x"})).text == "x"


async def _begun(env):
    return (await env.call_tool("read", {"path": "begun"})).structured is not None or (
        await env.exec("test -e begun")
    ).returncode == 0


# A delete


async def test_two_creates_while_the_last_of_that_id_is_deleted(engine):
    await engine.create("a", probe())
    deleting = asyncio.create_task(engine.delete("a"))
    one, two = await asyncio.gather(*(engine.create("a", probe()) for _ in range(2)), return_exceptions=True)
    await deleting
    await engine.delete("a")
    assert await engine.find() == []
    for found in (one, two):
        if not isinstance(found, BaseException):
            with pytest.raises(AEnvError):
                await call(found, "echo", text="x")


async def test_creates_while_the_engine_ends_leave_nothing(isolation, home, leftovers):
    one, two = (lab.ProcessEngine(isolation=isolation, state="both") for _ in range(2))
    await one.create("a", probe())
    await two.find()

    async def go_on(worker):
        for number in range(50):
            if isinstance(
                await _outcome(two._connection.ask("create", id=f"b{worker}-{number}", spec=spec)), SandboxLost
            ):
                return

    spec = await _request(probe(), isolation)
    going = [asyncio.create_task(go_on(worker)) for worker in range(8)]
    await eventually("some of them", lambda: len(os.listdir(home / "run" / "both" / "i")) > 4)
    await one.end()
    async with asyncio.timeout(lab.PATIENCE):
        await asyncio.gather(*going)
    await two.close()
    await leftovers.none()


@pytest.mark.parametrize("role", ["instance", "first", "stub", "zygote", "spawner"])
async def test_what_is_killed_while_it_is_deleted_is_deleted(engine, family, study, isolation, role):
    if isolation == "none" and role in ("first", "stub"):
        pytest.skip("without isolation there is no such process")
    door = study.door("here")
    await engine.create("a", study.spec(TEARDOWN, preload=True))
    deleting = asyncio.create_task(engine.delete("a"))
    await door.reached()
    family.get(role).kill()
    async with asyncio.timeout(lab.PATIENCE):
        await deleting
    door.open()
    assert await engine.find() == []
    door.remove()
    await works(engine)


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


async def test_anything_killed_at_any_moment(engine, family, pen, isolation):
    """Whatever is hit, each create has an answer, and the engine works afterwards."""
    chance = random.Random(7)
    for round in range(8):
        creating = [
            asyncio.create_task(_outcome(engine.create(f"a{round}-{number}", probe(owner=str(number % 2)))))
            for number in range(6)
        ]
        for _ in range(3):
            for _ in range(chance.randrange(200)):
                await asyncio.sleep(0)
            hit = [p for p in pen.processes() if "process.spawner" not in p.command and "process." in p.command]
            if hit:
                chance.choice(hit).kill()
        async with asyncio.timeout(lab.PATIENCE):
            outcomes = await asyncio.gather(*creating)
        assert all(outcome is None or isinstance(outcome, SandboxError) for outcome in outcomes)
        for number in range(6):
            async with asyncio.timeout(lab.PATIENCE):
                await engine.delete(f"a{round}-{number}")
    assert await engine.find() == []
    await works(engine)
    await eventually("their processes to be gone", lambda: not family.instances() and not family.firsts())
    await eventually("the dead to be buried", lambda: not _unburied(family.spawner.pid))


async def test_orphans_that_fall_to_the_spawner_are_buried(engine, family):
    """Without a namespace of its own, what a command leaves running ends as a child of the spawner."""
    await engine.create("a", probe())
    for _ in range(5):
        await engine.exec("a", ["sh", "-c", "(setsid sleep 0.01 &)"])
    await eventually("the dead to be buried", lambda: not _unburied(family.spawner.pid))
    assert await call(await engine.get("a"), "echo", text="x") == "x"


def _unburied(parent):
    everybody = lab.processes({int(name) for name in os.listdir("/proc") if name.isdigit()})
    return [process for process in everybody if process.parent == parent and process.zombie]
