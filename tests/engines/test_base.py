"""What is built on an engine's four verbs, and how an engine is found by its name."""

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from aenv.client.environment import Environment
from aenv.engines import load_engine
from aenv.engines.base import Engine, Output, new_id
from aenv.engines.conformance import projects
from aenv.engines.failing import FailingEngine, NeverReadyEngine, PaperEngine, SlowEngine
from aenv.errors import AEnvError, Invalid, NetworkError, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import EnvRef, SandboxSpec, Second, State
from aenv.runtime.tokens import digest

SPEC = SandboxSpec(env=EnvRef("lab", "1.0.0"), labels={"a": "1"})


def test_ids_are_readable_unguessable_and_fit_to_be_host_names():
    ids = {new_id(name) for name in ("Mini.Terminal_2", "x" * 63, "a-_.") for _ in range(50)}
    assert len(ids) == 150
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", id) for id in ids)
    assert sum(id.startswith("mini-terminal-2-") for id in ids) == 50


# wait


async def test_waiting_for_what_is_ready_and_for_what_soon_will_be():
    for engine in (PaperEngine(), SlowEngine(ready=0.1)):
        await engine.create("one", SPEC)
        assert (await engine.wait("one", 30)).state is State.RUNNING


async def test_waiting_ends_with_the_reason():
    engine = NeverReadyEngine("no room")
    await engine.create("one", SPEC)
    with pytest.raises(StartFailed, match=r"one is still creating after 0.05 s: no room"):
        await engine.wait("one", 0.05)
    engine.sandboxes["one"] = msgspec.structs.replace(
        engine.sandboxes["one"], state=State.FAILED, reason="its import failed"
    )
    with pytest.raises(StartFailed, match="one did not start: its import failed"):
        await engine.wait("one", 30)


async def test_time_without_room_does_not_count():
    engine = NeverReadyEngine("no room")
    await engine.create("one", SPEC)
    creating = engine.sandboxes["one"]
    engine.sandboxes["one"] = msgspec.structs.replace(creating, state=State.PENDING)
    waiting = asyncio.create_task(engine.wait("one", 0.05))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    engine.sandboxes["one"] = creating
    with pytest.raises(StartFailed, match=r"one is still creating after 0.05 s: no room"):
        await waiting


async def test_what_is_deleted_while_somebody_waits_is_gone():
    engine = NeverReadyEngine()
    await engine.create("one", SPEC)
    waiting = asyncio.create_task(engine.wait("one", 30))
    await asyncio.sleep(0)
    await engine.delete("one")
    with pytest.raises(StartFailed, match="one is gone"):
        await waiting


async def test_an_engine_that_does_not_answer_is_not_waited_for():
    engine = SlowEngine(get=30)
    await engine.create("one", SPEC)
    with pytest.raises(StartFailed, match="one is silent after 0.05 s"):
        await engine.wait("one", 0.05)


async def test_what_the_engine_raises_reaches_who_waits():
    with pytest.raises(NetworkError, match="no route"):
        await FailingEngine(get=NetworkError("no route")).wait("one", 30)


# provision


class Recording(PaperEngine):
    """Remembers the specs it was given."""

    def __init__(self):
        super().__init__()
        self.specs = {}

    async def create(self, id, spec):
        self.specs[id] = spec
        return await super().create(id, spec)


async def test_a_sandbox_is_there_for_the_length_of_a_block():
    engine = Recording()
    async with engine.provision(SPEC) as first, engine.provision(SPEC) as second:
        assert set(engine.sandboxes) == {first.id, second.id}
        for sandbox in (first, second):
            assert engine.specs[sandbox.id].owner_token_sha256 == digest(sandbox.token)
            assert engine.sandboxes[sandbox.id].token is None
        assert first.token != second.token
    assert engine.deleted == [second.id, first.id]


async def test_a_block_that_raises_raises_that_and_has_no_sandbox_left():
    for error in (ZeroDivisionError, TimeoutError, NotFound):
        engine = PaperEngine()
        with pytest.raises(error, match="mine"):
            async with engine.provision(SPEC):
                raise error("mine")
        assert engine.sandboxes == {}


@pytest.mark.parametrize("engine", [SlowEngine(create=3600), SlowEngine(ready=3600), NeverReadyEngine("no room")])
async def test_a_start_that_takes_too_long_fails_and_leaves_nothing(engine):
    with pytest.raises(StartFailed) as caught:
        async with engine.provision(msgspec.structs.replace(SPEC, startup_timeout=0.05)):
            pytest.fail("it started")
    assert "no room" in str(caught.value) or not isinstance(engine, NeverReadyEngine)
    assert await engine.find() == []


async def test_a_start_that_needs_two_steps():
    async with SlowEngine(ready=0.05).provision(SPEC) as sandbox:
        assert (sandbox.state, bool(sandbox.token)) == (State.RUNNING, True)


@pytest.mark.parametrize("late", [False, True], ids=["before it was made", "after it was made"])
async def test_a_create_that_fails_leaves_nothing(late):
    engine = FailingEngine(create=StartFailed("no image"), late=late)
    with pytest.raises(StartFailed, match="no image"):
        async with engine.provision(SPEC):
            pytest.fail("it started")
    assert len(engine.inner.deleted) == 1
    assert engine.inner.sandboxes == {}


class Watched(SlowEngine):
    """Says when a verb has begun; it takes a while then."""

    def __init__(self, **seconds):
        super().__init__(**seconds)
        self.begun = {name: asyncio.Event() for name in ("create", "block", "delete")}

    async def create(self, id, spec):
        self.begun["create"].set()
        return await super().create(id, spec)

    async def delete(self, id):
        self.begun["delete"].set()
        await super().delete(id)


@pytest.mark.parametrize("moment", ["create", "block", "delete"])
async def test_cancelled_at_any_moment_it_leaves_nothing(moment):
    engine = Watched(create=3600 if moment == "create" else 0, delete=0.1)

    async def use():
        async with engine.provision(SPEC):
            engine.begun["block"].set()
            if moment == "block":
                await asyncio.Event().wait()

    using = asyncio.create_task(use())
    await engine.begun[moment].wait()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert len(engine.inner.deleted) == 1
    assert engine.inner.sandboxes == {}


async def test_a_delete_that_fails_hides_nothing():
    engine = FailingEngine(delete=NetworkError("no route"))
    with pytest.raises(ZeroDivisionError) as caught:
        async with engine.provision(SPEC):
            raise ZeroDivisionError
    assert "could not be deleted: no route" in caught.value.__notes__[0]
    with pytest.raises(NetworkError, match="no route"):
        async with engine.provision(SPEC):
            pass


async def test_an_environment_over_an_engine(plain, tmp_path):
    projects.write(tmp_path / "projects")
    project = str(tmp_path / "projects" / "probe")

    def provision(spec):
        return plain.provision(msgspec.structs.replace(spec, project=project, labels={"mine": "yes"}))

    async with Environment("aenv-probe@1.0.0", provision=provision, seed=5) as env:
        assert (await env.call_tool("add", {"a": 1, "b": 2})).text == "3"
        assert await env.call_reward({"value": 0.5}) == 0.5
        (sandbox,) = await plain.find({"mine": "yes"})
        assert (await env.call_tool("instance")).structured["id"] == sandbox.id
        with pytest.raises(SandboxLost):
            await env.call_tool("crash")
    assert await plain.find() == []


# logs


class Printing(PaperEngine):
    """Has printed what it is told, and keeps the last ``kept`` bytes."""

    def __init__(self, text=b"", kept=1000):
        super().__init__()
        self.text = text
        self.kept = kept

    async def output(self, id, start):
        await self.get(id)
        start = max(start, len(self.text) - self.kept)
        return Output(start, self.text[start:])


@pytest.mark.parametrize(
    ("text", "tail", "lines"),
    [
        (b"", None, []),
        (b"a\nb\n", None, ["a", "b"]),
        (b"a\nb", None, ["a", "b"]),
        (b"\n\n", None, ["", ""]),
        (b"a\nb\nc\n", 2, ["b", "c"]),
        (b"a\nb\nc", 2, ["b", "c"]),
        (b"a\nb\nc", 1, ["c"]),
        (b"a\nb\nc", 0, []),
        (b"a\nb\n", 9, ["a", "b"]),
        (b"\xff\n", None, ["�"]),
    ],
)
async def test_lines_and_their_tail(text, tail, lines):
    engine = Printing(text)
    await engine.create("one", SPEC)
    assert [line async for line in engine.logs("one", tail)] == lines


class Following:
    """The lines that somebody who follows gets."""

    def __init__(self, engine, **options):
        self.lines = []
        self._task = asyncio.create_task(self._follow(engine.logs("one", follow=True, **options)))

    async def _follow(self, logs):
        async for line in logs:
            self.lines.append(line)

    async def until(self, *lines):
        async with asyncio.timeout(30):
            while self.lines != list(lines):
                assert not self._task.done(), self.lines
                await asyncio.sleep(0.01)

    async def ended(self):
        async with asyncio.timeout(30):
            await self._task
        return self.lines


@pytest.mark.parametrize("deleted", [False, True], ids=["failed", "deleted"])
async def test_following_gives_whole_lines_and_ends_with_the_sandbox(deleted):
    engine = Printing(b"old\nhalf a ")
    await engine.create("one", SPEC)
    following = Following(engine)
    await following.until("old")
    engine.text += b"line\nnew\nlast"
    await following.until("old", "half a line", "new")
    if deleted:
        await engine.delete("one")
    else:
        engine.sandboxes["one"] = msgspec.structs.replace(engine.sandboxes["one"], state=State.FAILED)
    assert await following.ended() == ["old", "half a line", "new", "last"]


async def test_what_was_dropped_in_between_does_not_join_two_lines():
    engine = Printing(b"begun ", kept=12)
    await engine.create("one", SPEC)
    following = Following(engine, tail=0)
    await asyncio.sleep(0)
    engine.text += b"x" * 100 + b"the end\n"
    await following.until("begun ", "xxxxthe end")
    await engine.delete("one")
    await following.ended()


@pytest.mark.parametrize(
    ("name", "second"),
    [("plain", Second(image="ubuntu")), ("plain", Second(directory="/tmp")), ("process", Second(image="ubuntu"))],
)
async def test_an_engine_without_second_containers_refuses_them(name, second):
    async with load_engine(name) as engine:
        with pytest.raises(Unsupported, match=f"the {name} engine cannot make a second container") as caught:
            await engine.create("one", msgspec.structs.replace(SPEC, second=second))
        assert "docker" in (caught.value.hint or "")
        assert await engine.find() == []


async def test_an_engine_without_output_has_no_logs():
    with pytest.raises(Unsupported, match="the paper engine cannot keep what a sandbox prints"):
        await anext(PaperEngine().logs("one"))


async def test_powers_that_an_engine_does_not_have_are_named():
    engine = NeverReadyEngine()
    for power in (
        engine.output("one", 0),
        engine.exec("one", ["true"]),
        engine.upload("one", "file", b""),
        engine.download("one", "file"),
        engine.expose("one", 80),
    ):
        with pytest.raises(Unsupported, match="the never-ready engine cannot "):
            await power


# Engines that misbehave


async def test_a_failing_engine_fails_so_often_and_then_no_more():
    engine = FailingEngine(create=StartFailed("not yet"), delete=NetworkError("no route"), times=1)
    for verb, error in (
        (lambda: engine.create("one", SPEC), StartFailed),
        (lambda: engine.delete("one"), NetworkError),
    ):
        with pytest.raises(error):
            await verb()
        await verb()
    with pytest.raises(StartFailed, match="on purpose"):
        await FailingEngine().create("one", SPEC)
    with pytest.raises(NetworkError):
        await FailingEngine(find=NetworkError("no route")).find()


async def test_they_pass_on_what_they_do_not_spoil():
    inner = Printing(b"line\n")
    async with SlowEngine(FailingEngine(inner, get=NetworkError("no route"), times=1), find=0.01) as engine:
        made = await engine.create("one", SPEC)
        with pytest.raises(NetworkError):
            await engine.get("one")
        assert await engine.get("one") == made
        assert await engine.find({"a": "1"}) == [made]
        assert await engine.find({"a": "2"}) == []
        assert [line async for line in engine.logs("one")] == ["line"]
        assert (await engine.update("one", ttl=60)).expires_at is not None
        await engine.delete("one")
    assert inner.sandboxes == {}


# load_engine


def test_an_engine_of_ours_and_one_by_its_place():
    assert load_engine("process").name == "process"
    engine = load_engine("aenv.engines.failing:SlowEngine", create=1.5)
    assert isinstance(engine, SlowEngine)


def test_an_installed_engine(tmp_path, monkeypatch):
    (tmp_path / "their_engine.py").write_text(
        "from aenv.engines.failing import PaperEngine\nclass Theirs(PaperEngine):\n    name = 'theirs'\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[aenv.engines]\ntheirs = their_engine:Theirs [extra]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_engine("theirs").name == "theirs"
    with pytest.raises(NotFound) as caught:
        load_engine("their")
    assert caught.value.hint == "did you mean 'theirs'?"


def test_an_engine_that_nobody_knows():
    with pytest.raises(NotFound, match="there is no engine 'proces'") as caught:
        load_engine("proces")
    assert caught.value.hint == "did you mean 'process'?"
    with pytest.raises(NotFound) as caught:
        load_engine("zzz")
    assert "process" in caught.value.hint


@pytest.mark.parametrize(
    "place",
    [
        "no_such_module:Engine",
        "aenv.engines.base:NoSuchClass",
        "aenv.engines.base:",
        ":Engine",
        ".base:Engine",
        "broken_engine:Engine",
        "aenv.models:Sandbox",
        "aenv.engines.base:new_id",
        "aenv.engines.base:Engine",
    ],
)
def test_a_place_without_an_engine(place, tmp_path, monkeypatch):
    Path(tmp_path, "broken_engine.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Invalid) as caught:
        load_engine(place)
    assert place in str(caught.value)
    assert caught.value.hint


async def test_leaving_an_engine_closes_it():
    class Closing(PaperEngine):
        closed = False

        async def close(self):
            await asyncio.sleep(0)
            self.closed = True

    async with Closing() as engine:
        assert isinstance(engine, Engine)
        assert not engine.closed
    assert engine.closed
    with pytest.raises(AEnvError, match="mine"):
        async with Closing() as engine:
            raise AEnvError("mine")
    assert engine.closed
