"""The life of a sandbox in the process engine: its time, its health, its end, and what is known of it afterwards."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from aenv import Environment
from aenv.client.local import Embedded
from aenv.engines.conformance import projects
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.process.output import KEPT
from aenv.errors import Conflict, Invalid, NetworkError, NotFound, OutOfMemory, SandboxLost, StartFailed
from aenv.models import State
from tests.engines.process import lab
from tests.engines.process.lab import call, eventually, line, over, probe, works

TEARDOWN = "@register_teardown\ndef clear() -> None:\n    tell('ear', 'torn down')\n"


# Its time


async def test_it_ends_when_its_time_is_over(engine):
    sandbox = await engine.create("a", probe(ttl=1.0))
    assert sandbox.expires_at == sandbox.created_at + 1.0
    ended = await over(engine, "a")
    assert (ended.state, ended.reason) == (State.TERMINATED, "its time to live of 1 s is over")
    assert ended.expires_at == sandbox.expires_at <= time.time()
    assert ended.url == ""
    await eventually("its address to be silent", lambda: _silent(sandbox))


async def _silent(sandbox):
    try:
        await call(sandbox, "echo", text="x")
    except NetworkError:
        return True
    return False


async def test_a_lasting_one_has_no_end(engine):
    await engine.create("a", probe(ttl=0.5, idle=0.5, lasting=True))
    assert (await engine.update("a", ttl=0.1)).expires_at is None
    await engine.create("b", probe(ttl=1.0))
    await over(engine, "b")
    assert (await engine.get("a")).state is State.RUNNING


async def test_its_time_can_be_changed(engine):
    await works(engine)  # so that the next start takes less than its time
    sandbox = await engine.create("a", probe(ttl=2.0))
    before = time.time()
    longer = await engine.update("a", ttl=600.0)
    assert before + 600 <= longer.expires_at <= time.time() + 600
    assert (longer.id, longer.created_at) == ("a", sandbox.created_at)
    await eventually("its first time to pass", lambda: time.time() > sandbox.expires_at + 0.2)
    assert await call(sandbox, "echo", text="x") == "x"
    assert (await engine.get("a")).expires_at == longer.expires_at
    shorter = await engine.update("a", ttl=0.25)
    assert shorter.expires_at < longer.expires_at
    ended = await over(engine, "a")
    assert (ended.state, ended.reason) == (State.TERMINATED, "its time to live of 0.25 s is over")
    with pytest.raises(SandboxLost, match="its time to live"):
        await engine.update("a", ttl=10.0)
    with pytest.raises(NotFound):
        await engine.update("nobody", ttl=10.0)


async def test_one_without_a_time_lives_until_it_is_deleted(engine):
    import msgspec

    sandbox = await engine.create("a", msgspec.structs.replace(probe(), ttl=None))
    assert sandbox.expires_at is None
    assert (await engine.get("a")).state is State.RUNNING


async def test_one_that_nobody_calls_ends_itself(engine):
    await engine.create("a", probe(idle=0.3))
    ended = await over(engine, "a")
    assert ended.state is State.TERMINATED
    assert "no call for 0.3 s" in ended.reason


# Its health


async def test_one_that_never_gets_healthy_does_not_start(engine, study):
    body = "@register_health\ndef health() -> dict[str, str]:\n    return {'status': 'no water'}\n"
    with pytest.raises(StartFailed, match="(?s)not ready within 4 s.*no water"):
        await engine.create("a", study.spec(body, preload=True, startup_timeout=4.0))
    failed = await engine.get("a")
    assert failed.state is State.FAILED
    assert "no water" in failed.reason


async def test_one_that_gets_healthy_later_starts_then(engine, study):
    body = "@register_health\ndef health() -> bool:\n    return os.path.exists(DATA + '/healthy')\n"
    creating = asyncio.create_task(engine.create("a", study.spec(body, preload=True)))

    async def known():
        with_it = await engine.find()
        return with_it and with_it[0].state is State.CREATING

    await eventually("it to be on its way", known)
    (study.data / "healthy").touch()
    sandbox = await creating
    assert sandbox.state is State.RUNNING
    assert await call(sandbox, "echo", text="x") == "x"


# Its end


async def test_teardown_runs_when_it_is_deleted(engine, study):
    ear = study.ear("ear")
    await engine.create("a", study.spec(TEARDOWN, preload=True))
    await engine.delete("a")
    assert ear.heard() == "torn down"


async def test_teardown_runs_when_its_time_is_over_and_when_the_engine_closes(engine, study):
    ear = study.ear("ear")
    await engine.create("a", study.spec(TEARDOWN, preload=True, ttl=0.5))
    await over(engine, "a")
    await eventually("its teardown", lambda: ear.heard() == "torn down")
    await engine.create("b", study.spec(TEARDOWN, preload=True))
    await engine.close()
    assert ear.heard() == "torn down"


async def test_teardown_that_hangs_is_ended(engine, study, family):
    door = study.door("here")
    await engine.create("a", study.spec("@register_teardown\ndef clear() -> None:\n    wait('here')\n", preload=True))
    deleting = asyncio.create_task(engine.delete("a"))
    await door.reached()
    async with asyncio.timeout(lab.PATIENCE):
        await deleting
    assert not family.instances()
    door.open()


async def test_a_delete_that_is_asked_for_twice(engine, study):
    await engine.create("a", study.spec(TEARDOWN.replace("tell('ear', 'torn down')", "wait('here')"), preload=True))
    door = study.door("here")
    first, second = (asyncio.create_task(engine.delete("a")) for _ in range(2))
    await door.reached()
    door.open()
    await asyncio.gather(first, second)
    await engine.delete("a")
    with pytest.raises(NotFound):
        await engine.get("a")


async def test_an_id_that_lives_is_given_again_and_one_that_ended_is_not(engine):
    first = await engine.create("a", probe(labels={"k": "1"}))
    assert await engine.create("a", probe(labels={"k": "2"})) == first
    with pytest.raises(NetworkError):
        await call(first, "crash", code=3)
    await over(engine, "a")
    with pytest.raises(Conflict, match="exit code 3"):
        await engine.create("a", probe())
    await engine.delete("a")
    assert (await engine.create("a", probe())).boot != first.boot


# Why it ended


BROKEN = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "import nowhere": "No module named 'nowhere'",
    "def broken(:": "SyntaxError",
    "raise SystemExit(4)": "SystemExit: 4",
}


@pytest.mark.parametrize("preload", [True, False])
async def test_an_import_that_fails_shows_its_traceback(engine, study, preload):
    for number, (body, reason) in enumerate(BROKEN.items()):
        with pytest.raises(StartFailed) as caught:
            await engine.create(f"a{number}", study.spec(body, preload=preload))
        failed = await engine.get(f"a{number}")
        assert failed.state is State.FAILED
        for text in (str(caught.value), failed.reason):
            assert reason in text
            assert "custom_env" in text
    await works(engine)


@pytest.mark.parametrize(
    ("body", "reason"),
    [("os._exit(5)", "it ended with exit code 5"), ("os.kill(os.getpid(), 11)", "it was ended by SIGSEGV")],
)
async def test_an_import_that_ends_the_process_says_how(engine, study, body, reason):
    spec = study.spec("print('on the way', flush=True)\n" + body, preload=False)
    with pytest.raises(StartFailed, match=f"(?s){reason}.*on the way"):
        await engine.create("a", spec)
    assert (await engine.get("a")).reason.startswith(reason)


async def test_a_setup_that_fails_says_how(engine, study):
    for body, reason in (("raise RuntimeError('no licence')", "no licence"), ("os._exit(6)", "exit code 6")):
        spec = study.spec(f"@register_setup\ndef prepare() -> None:\n    {body}\n", preload=True)
        with pytest.raises(StartFailed, match=reason):
            await engine.create(reason.replace(" ", "-"), spec)


async def test_what_ended_by_itself_says_how_with_its_last_words(engine, study):
    body = (
        "@register_tool\ndef leave(code: int) -> None:\n    print('farewell', flush=True)\n    os._exit(code)\n"
        "@register_tool\ndef shot(number: int) -> None:\n    os.kill(os.getpid(), number)\n"
    )
    spec = study.spec(body, preload=True)
    ends = {
        "well": ("leave", {"code": 0}, State.TERMINATED, "it ended with exit code 0; the last it printed:\n"),
        "badly": ("leave", {"code": 3}, State.FAILED, "it ended with exit code 3; the last it printed:\n"),
        "shot": ("shot", {"number": 6}, State.FAILED, "it was ended by SIGABRT"),
    }
    for id, (tool, arguments, state, reason) in ends.items():
        sandbox = await engine.create(id, spec)
        with pytest.raises(NetworkError):
            await call(sandbox, tool, **arguments)
        ended = await over(engine, id)
        assert ended.state is state
        assert ended.reason.startswith(reason)
        assert tool != "leave" or "farewell" in ended.reason
    assert {found.id: found.state for found in await engine.find()} == {
        id: state for id, (_, _, state, _) in ends.items()
    }


@pytest.fixture
async def embedded(jailed, monkeypatch, leftovers):
    monkeypatch.chdir(projects.PROBE)
    monkeypatch.setenv("AENV_ISOLATION", jailed)
    found = Embedded()
    yield found
    await found._engine().close()


async def test_an_environment_tells_why_its_sandbox_is_gone(embedded):
    async with Environment(projects.NAME, provision=embedded) as env:
        await env.call_tool("say", {"text": "farewell"})
        with pytest.raises(SandboxLost, match="(?s)exit code 3.*farewell to stdout"):
            await env.call_tool("crash", {"code": 3})
        with pytest.raises(SandboxLost, match="exit code 3"):
            await env.call_tool("echo", {"text": "x"})
        assert "farewell to stdout" in [text async for text in env.logs()]
    async with Environment(projects.NAME, provision=embedded, resources={"memory": "128Mi"}) as env:
        with pytest.raises(OutOfMemory, match="out of memory: it may use 128 MiB"):
            await env.call_tool("eat", {"megabytes": 512})
    async with Environment(projects.NAME, provision=embedded, ttl="1s") as env:
        id = env.instance_id
        await eventually("its end", lambda: _ended(embedded, id))
        with pytest.raises(SandboxLost, match="its time to live of 1 s is over"):
            await env.call_tool("echo", {"text": "x"})


async def _ended(embedded, id):
    return await embedded.reason(id, 0.0)


# What it printed


async def test_its_output_is_kept_within_bounds_and_after_its_end(engine):
    sandbox = await engine.create("a", probe())
    await call(sandbox, "say", text="hello")
    await eventually("its words", lambda: _printed(engine, "hello to stderr"))
    assert (await engine.output("a", 0)).start == 0
    await call(sandbox, "flood", megabytes=2)
    await eventually("the end of the flood", lambda: _printed(engine, "after the flood"))
    found = await engine.output("a", 0)
    assert found.start + len(found.data) > 2 * 1024 * 1024
    assert 0 < len(found.data) <= KEPT
    later = await engine.output("a", found.start + len(found.data) - 16)
    assert later.data == b"after the flood\n"
    with pytest.raises(NetworkError):
        await call(sandbox, "crash", code=3)
    await over(engine, "a")
    assert (await engine.output("a", 0)).data.endswith(b"after the flood\n")
    await engine.delete("a")
    with pytest.raises(NotFound):
        await engine.output("a", 0)


async def _printed(engine, text):
    return text.encode() in (await engine.output("a", 0)).data


async def test_output_is_followed_to_the_end(engine):
    sandbox = await engine.create("a", probe(ttl=600.0))

    async def follow():
        return [text async for text in engine.logs("a", follow=True)]

    following = asyncio.create_task(follow())
    await call(sandbox, "say", text="one")
    await eventually("its words", lambda: _printed(engine, "one to stderr"))
    await call(sandbox, "say", text="two")
    with pytest.raises(NetworkError):
        await call(sandbox, "crash")
    async with asyncio.timeout(lab.PATIENCE):
        assert {"one to stdout", "two to stdout", "two to stderr"} <= set(await following)


# Engines with a name: sandboxes that outlive them


@pytest.fixture
async def named(isolation, leftovers):
    """Makes engines of one name; everything is ended afterwards."""
    made = []

    def make():
        made.append(ProcessEngine(isolation=isolation, state="site"))
        return made[-1]

    yield make
    await make().end()
    for engine in made:
        await engine.close()


async def test_sandboxes_of_a_named_engine_outlive_it(named, family):
    async with named() as first:
        made = await first.create("a", probe(labels={"k": "1"}, owner="ada"))
        await first.create("b", probe(labels={"k": "2"}, owner="ada"))
        assert await call(made, "count") == 1
    assert len(family.instances()) == 2
    async with named() as second:
        assert await second.find({"k": "1"}) == [made]
        assert {found.id for found in await second.find()} == {"a", "b"}
        assert await call(made, "count") == 2
        assert (await second.exec("a", ["echo", "hello"])).stdout == "hello\n"
        await second.delete("a")
        assert [found.id for found in await second.find()] == ["b"]
    third = named()
    await third.end()
    assert await third.find() == []
    await eventually("their end", lambda: not family.instances())


async def test_a_named_engine_is_the_same_in_another_process(named, home, isolation, leftovers):
    script = """
import asyncio, os, sys
from aenv.engines.process.engine import ProcessEngine
from tests.engines.process.lab import call, probe

async def main():
    engine = ProcessEngine(isolation=sys.argv[1], state="site")
    print(len(await engine.find()))
    await engine.create(sys.argv[2], probe(labels={"from": "there"}))
    print("made")
    await asyncio.Event().wait()

asyncio.run(main())
"""
    for number, id in enumerate(("a", "b")):
        with lab.owner(script, home, isolation, id, cwd=lab.ROOT) as process:
            assert await line(process) == str(number)
            assert await line(process) == "made"
            process.kill()
            process.wait()
    engine = named()
    found = await engine.find({"from": "there"})
    assert {sandbox.id for sandbox in found} == {"a", "b"}
    for sandbox in found:
        assert await call(sandbox, "echo", text="x") == "x"
    await engine.delete("a")
    await works(engine)


async def test_engines_that_open_one_name_at_once(named, family):
    engines = [named() for _ in range(4)]
    assert await asyncio.gather(*(engine.find() for engine in engines)) == [[]] * 4
    assert len(family.spawners()) == 1
    sandbox = await engines[0].create("a", probe())
    assert [await engine.find() for engine in engines] == [[sandbox]] * 4


async def test_a_name_can_be_taken_again_right_after_its_end(named, family):
    for number in range(4):
        first, second = named(), named()
        sandbox = await first.create("a", probe())
        await (first if number % 2 else second).end()
        with pytest.raises(NetworkError):
            await call(sandbox, "echo", text="x")
        await works(named())
        await first.close()
        await second.close()
    assert len(family.spawners()) == 1


async def test_who_started_a_named_engine_can_end_it(named, family, leftovers):
    engine = named()
    await engine.create("a", probe())
    async with asyncio.timeout(lab.PATIENCE):
        await engine.end()
    assert family.spawners() == []
    await leftovers.none()


async def test_a_named_engine_whose_spawner_was_killed_starts_clean(named, family, leftovers):
    engine = named()
    await engine.create("a", probe())
    family.spawner.kill()
    await lab.noticed(engine)
    another = named()
    assert await another.find() == []
    await works(another)
    assert await engine.find() == []
    assert len(family.spawners()) == 1


async def test_time_goes_on_while_no_engine_is_there(named):
    async with named() as first:
        await first.create("a", probe(ttl=0.7))
    async with named() as second:
        ended = await over(second, "a")
        assert ended.reason == "its time to live of 0.7 s is over"


async def test_other_engines_leave_a_named_one_alone(named, isolation, family):
    async with named() as first:
        sandbox = await first.create("a", probe())
    async with ProcessEngine(isolation=isolation) as other:
        await works(other)
        assert await other.find() == []
    assert await call(sandbox, "echo", text="x") == "x"


@pytest.mark.parametrize("name", ["..", "../up", "a/b", ".lock", "x" * 300], ids=["up", "out", "in", "dot", "long"])
async def test_a_name_that_is_no_file_name_is_refused(home, leftovers, name):
    with pytest.raises(Invalid, match="is not a name"):
        ProcessEngine(isolation="none", state=name)
    assert [path for path in home.iterdir() if path.name != "run"] == []


async def test_the_spawner_of_a_named_engine_is_buried_by_who_started_it(named, leftovers):
    first, second = named(), named()
    await first.find()
    await second.find()
    await second.end()
    await first.close()
    await leftovers.none("zombies", patience=5)


async def test_ending_what_never_began(named):
    await named().end()
    assert os.listdir(os.environ["AENV_HOME"]) in ([], ["run"])


SICK = """
@register_health
def healthy() -> bool:
    return not os.path.exists('sick')

@register_tool
def fall_ill() -> None:
    open('sick', 'w').close()

@register_tool
def recover() -> None:
    os.unlink('sick')
"""


async def test_an_unhealthy_sandbox_runs_on_and_says_so(engine, study):
    spec = study.spec(SICK, preload=True, environment_variables={"AENV_HEALTH_INTERVAL": "0.1"})
    sandbox = await engine.create("a", spec)

    async def reason(expected):
        found = await engine.get("a")
        assert found.state is State.RUNNING
        return found.reason == expected

    await call(sandbox, "fall_ill")
    await eventually("the news", lambda: reason("unhealthy: the health check answered False"))
    await call(sandbox, "recover")
    await eventually("the good news", lambda: reason(""))


async def test_why_an_environment_is_not_preloaded_is_told_once(jail, jailed_study, caplog):
    spec = jailed_study.spec("PID = os.getpid()\n", preload="auto")
    with caplog.at_level("INFO", "aenv.engine"):
        for number in range(2):
            await jail.create(f"a{number}", spec)
    (told,) = [record.message for record in caplog.records if "is imported in each sandbox" in record.message]
    assert "os.getpid" in told
