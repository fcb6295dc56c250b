"""The conformance list: an honest engine passes it, and each broken promise is found by the right check."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from aenv.engines import conformance
from aenv.engines import plain as plain_module
from aenv.engines.base import Engine, Used
from aenv.engines.conformance import projects
from aenv.engines.failing import FailingEngine, PaperEngine, SlowEngine
from aenv.engines.plain import PlainEngine
from aenv.errors import Invalid, NetworkError, NotFound
from aenv.models import EnvRef, ExecResult, SandboxSpec, State
from tests.docs.doc_pages import ROOT, blocks

LEFT_OUT = {
    *("exec-in-nothing", "files-of-nothing"),
    *(check.name for check in conformance.CHECKS if check.needs == "second"),
}
"""What needs a power that the plain engine does not have."""
GUIDE = ROOT / "docs" / "guides" / "write-an-engine.md"


async def failures(engine, *names, **options):
    """The checks that an engine fails, of those that are named, and what is said about each."""
    async with engine:
        results = await conformance.run(engine, only=names, **options)
    return {result.name: result.detail for result in results if result.status == "fail"}


# The list itself


def test_every_check_has_a_name_and_a_promise():
    names = [check.name for check in conformance.CHECKS]
    assert len(names) == len(set(names)) >= 40
    for check in conformance.CHECKS:
        assert check.promise[0].isupper(), check.name
        assert check.promise.endswith("."), check.name
    assert names[-1] == "nothing-is-left"


async def test_an_honest_engine_passes(plain):
    told = []
    results = await conformance.run(plain, on_result=told.append, another=PlainEngine, limit=180)
    assert {result.name: result.detail for result in results if result.status == "fail"} == {}
    assert [result.name for result in results] == [check.name for check in conformance.CHECKS]
    assert sorted(told) == sorted(results)
    skipped = {result.name: result.detail for result in results if result.status == "skip"}
    due = {check.name for check in conformance.CHECKS if {check.name, check.needs} & set(plain.cannot)}
    assert set(skipped) == due | LEFT_OUT
    assert skipped["tmp-apart"] == plain.cannot["tmp-apart"]
    assert skipped["out-of-memory"] == plain.cannot["limits"]
    assert await plain.find() == []


async def test_nothing_is_left_of_nothing(plain):
    (result,) = await conformance.run(plain, only=["nothing-is-left"])
    assert result.status == "pass"


async def test_what_needs_another_engine_is_skipped_without_one(plain):
    (result,) = await conformance.run(plain, only=["close-twice"])
    assert (result.status, result.detail) == ("skip", "no way to make another engine of its kind was given")


async def test_a_check_that_is_not_there(plain):
    with pytest.raises(NotFound, match="there is no check 'creat'") as caught:
        await conformance.run(plain, only=["creat"])
    assert caught.value.hint == "did you mean 'create'?"


class Bare(Engine):
    """The four verbs of another engine, and no power."""

    name = "bare"

    def __init__(self):
        self._inner = PlainEngine()
        self.create, self.get, self.find = self._inner.create, self._inner.get, self._inner.find
        self.delete, self.close = self._inner.delete, self._inner.close

    create = get = find = delete = None


async def test_powers_that_an_engine_lacks_are_skipped():
    async with Bare() as engine:
        results = await conformance.run(engine, only=["create", "logs", "update-extends", "exec-answers"])
    found = {result.name: (result.status, result.detail) for result in results}
    assert found["create"][0] == found["exec-answers"][0] == "pass"
    assert found["logs"] == ("skip", "the bare engine cannot keep what a sandbox prints")
    assert found["update-extends"] == ("skip", "the bare engine cannot change a sandbox")


async def test_what_takes_too_long_fails_and_says_what_it_waited_for():
    found = await failures(SlowEngine(create=3600), "create-again", limit=0.3)
    assert found == {"create-again": "it took longer than 0.3 s, waiting for a sandbox to be RUNNING"}


async def test_a_clean_up_that_fails_is_a_failure():
    engine = FailingEngine(delete=NetworkError("no route"))
    assert await failures(engine, "get-unknown") == {}
    found = await failures(engine, "provision-that-never-starts", limit=1)
    assert found  # paper is RUNNING at once, and cannot be deleted
    assert "no route" in found["provision-that-never-starts"]


async def test_the_sandboxes_of_others_are_left_alone(plain, tmp_path):
    class FindsAll(PlainEngine):
        async def find(self, labels=None):
            return await super().find()

    projects.write(tmp_path / "projects")
    theirs = SandboxSpec(env=EnvRef("theirs"), project=str(tmp_path / "projects" / "probe"), labels={"colour": "red"})
    async with FindsAll() as engine:
        await engine.create("theirs", theirs)
        results = await conformance.run(engine, only=["find-by-one-label", "delete"])
        assert results[0].status == "fail"
        assert (await engine.wait("theirs", 30)).state is State.RUNNING
        assert [sandbox.id for sandbox in await engine.find()] == ["theirs"]


async def test_a_run_that_is_cancelled_leaves_nothing(plain):
    running = asyncio.create_task(conformance.run(plain, only=["create-again", "find-all"]))
    async with asyncio.timeout(30):
        while len(await plain.find()) < 2:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await plain.find() == []


# Engines that break a promise


class Remakes(PlainEngine):
    """An id that is alive is made anew."""

    async def create(self, id, spec):
        await self.delete(id)
        return await super().create(id, spec)


class LastSpecWins(PlainEngine):
    async def create(self, id, spec):
        if id in self._boxes:
            self._boxes[id].spec = spec
        return await super().create(id, spec)


class Loses(PlainEngine):
    """Ends at its close what it has lost sight of."""

    def __init__(self):
        super().__init__()
        self.lost = []

    def lose(self, id):
        if box := self._boxes.get(id):
            self.lost.append(box)
            self._forget(box)

    async def close(self):
        for box in self.lost:
            box.life.cancel()
        await asyncio.gather(*(box.life for box in self.lost), return_exceptions=True)
        await super().close()


class Races(Loses):
    """Looks, thinks, and then makes what is there meanwhile."""

    async def create(self, id, spec):
        known = id in self._boxes
        await asyncio.sleep(0.05)
        if known:
            return await self.get(id)
        self.lose(id)
        return await super().create(id, spec)


class ForgetsTheFailed(PlainEngine):
    async def get(self, id):
        found = await super().get(id)
        if found.state is State.FAILED:
            raise NotFound(f"there is no sandbox {id!r}")
        return found


class Silent(PlainEngine):
    """Gives no reasons."""

    async def get(self, id):
        return msgspec.structs.replace(await super().get(id), reason="")


class Blocks(PlainEngine):
    """Create returns what is RUNNING, and forgets what it made when it is cancelled."""

    async def create(self, id, spec):
        made = await super().create(id, spec)
        return made if made.state is State.RUNNING else await self.wait(id, 30)


class PortIsEnough(PlainEngine):
    async def _become_ready(self, box):
        await box.listening.wait()
        box.state = State.RUNNING


class Anonymous(PlainEngine):
    async def get(self, id):
        return msgspec.structs.replace(await super().get(id), owner=None, env="")


class RaisesWhatever(PlainEngine):
    async def get(self, id):
        return self._boxes[id].sandbox


class FindsAll(PlainEngine):
    async def find(self, labels=None):
        return await super().find()


class FindsAny(PlainEngine):
    """Any of the labels will do."""

    async def find(self, labels=None):
        wanted = (labels or {}).items()
        return [found for found in await super().find() if not wanted or wanted & found.labels.items()]


class Forgets(Loses):
    """Delete only forgets."""

    async def delete(self, id):
        self.lose(id)


class DeletesLater(PlainEngine):
    async def delete(self, id):
        self.later = asyncio.create_task(super().delete(id))
        await asyncio.sleep(0)

    async def close(self):
        await super().close()
        while self._boxes:
            await asyncio.sleep(0.01)


class DeletesOnce(PlainEngine):
    async def delete(self, id):
        self._box(id)
        await super().delete(id)


class Deaf(PlainEngine):
    """Tells a sandbox nothing of what its owner asked for."""

    async def create(self, id, spec):
        heard = msgspec.structs.replace(spec, environment_variables={}, arguments=[], seed=None, datasource="")
        return await super().create(id, heard)


class Open(PlainEngine):
    async def create(self, id, spec):
        return await super().create(id, msgspec.structs.replace(spec, owner_token_sha256=None))


class Blabs(PlainEngine):
    """Takes secrets for variables like others."""

    async def create(self, id, spec):
        return await super().create(id, msgspec.structs.replace(spec, secrets=[]))


class InPlace(PlainEngine):
    """Every sandbox works in the project's own directory."""

    async def _copy(self, box):
        box.work = Path(box.spec.project)


class Immortal(PlainEngine):
    def _let_live(self, box, ttl):
        super()._let_live(box, ttl)
        box.alarm.cancel()


class DiesEarly(PlainEngine):
    def _let_live(self, box, ttl):
        super()._let_live(box, ttl / 4)
        box.expires_at += ttl * 3 / 4


class Quiet(PlainEngine):
    """Keeps no output of what has ended."""

    async def output(self, id, start):
        found = await super().output(id, start)
        return found._replace(data=b"") if self._boxes[id].state.over else found


class DoesNotExtend(PlainEngine):
    async def update(self, id, *, ttl):
        return msgspec.structs.replace(await self.get(id), expires_at=(await self.get(id)).expires_at + ttl)


class EndsAll(PlainEngine):
    """Every sandbox has an end."""

    async def create(self, id, spec):
        return await super().create(id, msgspec.structs.replace(spec, lasting=False))


class Guesses(PlainEngine):
    """Says what it likes of what a sandbox uses."""

    async def used(self, id):
        self._box(id)
        return Used(1.0, 2**20)


BROKEN = [
    (Remakes, {"create-again"}, {}),
    (LastSpecWins, {"create-again-with-another-spec"}, {}),
    (Races, {"create-together"}, {}),
    (ForgetsTheFailed, {"crash"}, {}),
    (Silent, {"crash", "bad-import", "bad-setup"}, {}),
    (Blocks, {"create-cancelled"}, {}),
    (PortIsEnough, {"running-is-healthy"}, {}),
    (Anonymous, {"get-shows-what-was-asked-for"}, {}),
    (RaisesWhatever, {"get-unknown"}, {}),
    (FindsAll, {"find-by-one-label", "find-by-several-labels"}, {}),
    (FindsAny, {"find-by-several-labels"}, {}),
    (Forgets, {"delete", "provision"}, {}),
    (DeletesLater, {"delete"}, {}),
    (DeletesOnce, {"delete-unknown", "delete-twice"}, {}),
    (Deaf, {"variables", "variables-of-the-project", "arguments", "seed", "datasource"}, {}),
    (Open, {"needs-a-token", "agents-have-tools-only", "tokens-apart"}, {}),
    (Blabs, {"secrets-are-hidden"}, {}),
    (InPlace, {"work-directory", "files-apart"}, {}),
    (Immortal, {"ttl"}, {"limit": 4}),
    (DiesEarly, {"ttl"}, {}),
    (Quiet, {"logs-of-the-dead"}, {}),
    (DoesNotExtend, {"update-extends"}, {}),
    (EndsAll, {"lasting"}, {}),
    (Guesses, {"used"}, {}),
]
"""An engine, what it must fail, and how the checks are run."""


@pytest.mark.parametrize(("engine", "broken", "options"), [pytest.param(*row, id=row[0].__name__) for row in BROKEN])
async def test_a_broken_promise_is_found(engine, broken, options):
    assert set(await failures(engine(), *broken, **options)) == broken


async def test_an_engine_may_block_in_create_when_it_cleans_up():
    class Careful(Blocks):
        async def create(self, id, spec):
            try:
                return await super().create(id, spec)
            except asyncio.CancelledError:
                await self.delete(id)
                raise

    assert await failures(Careful(), "create", "create-cancelled", "create-together", "delete-during-create") == {}


async def test_an_error_that_is_none_of_ours_is_named():
    found = await failures(RaisesWhatever(), "get-unknown")
    assert "KeyError" in found["get-unknown"]
    assert "which is no AEnvError" in found["get-unknown"]


async def test_a_process_that_outlives_its_sandbox_is_found(monkeypatch):
    belonging_to = plain_module._belonging_to
    ended = []

    def none_of(id):
        ended.append(id)
        return ()

    monkeypatch.setattr(plain_module, "_belonging_to", none_of)
    try:
        assert set(await failures(PlainEngine(), "orphans")) == {"orphans"}
    finally:
        left = [pid for id in ended for pid in belonging_to(id)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert len(left) == 1


@pytest.mark.parametrize(
    ("name", "value", "broken"),
    [("MOST_OUTPUT", 1 << 30, "logs-of-a-flood"), ("_READY", plain_module.re.compile(rb"(never)"), "create")],
)
async def test_settings_that_break_a_promise(monkeypatch, name, value, broken):
    monkeypatch.setattr(plain_module, name, value)
    assert set(await failures(PlainEngine(), broken, limit=3)) == {broken}


async def test_output_that_nobody_flushes_is_missed(monkeypatch):
    variables = plain_module._variables
    monkeypatch.setattr(plain_module, "_variables", lambda box: variables(box) | {"PYTHONUNBUFFERED": ""})
    found = await failures(PlainEngine(), "logs", limit=3)
    assert "to stdout' in the logs" in found["logs"]


# Powers beyond the plain engine's


class Handy(PlainEngine):
    """Commands and files on a way of its own."""

    name = "handy"

    async def exec(self, id, command, *, timeout=60.0):
        box = self._box(id)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=box.work,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as exc:
            raise Invalid(f"{command[0]} cannot be run: {exc.strerror}") from exc
        timed_out, output = False, (b"", b"")
        try:
            async with asyncio.timeout(timeout):
                output = await process.communicate()
        except TimeoutError:
            timed_out = True
            process.kill()
            await process.wait()
        stdout, stderr = (part.decode() for part in output)
        return ExecResult(returncode=process.returncode, stdout=stdout, stderr=stderr, timed_out=timed_out)

    async def upload(self, id, path, content):
        (self._box(id).work / path).write_bytes(content)

    async def download(self, id, path):
        try:
            return (self._box(id).work / path).read_bytes()
        except FileNotFoundError as exc:
            raise NotFound(f"there is no file {path!r}") from exc


COMMANDS = ("exec-answers", "exec-of-no-command", "exec-takes-too-long", "exec-in-nothing")
FILES = ("files-go-both-ways", "files-that-are-missing", "files-of-nothing")


async def test_commands_and_files_through_the_engine():
    async with Handy() as engine:
        results = await conformance.run(engine, only=[*COMMANDS, *FILES])
    assert {result.name: result.status for result in results} == dict.fromkeys([*COMMANDS, *FILES], "pass")


class Elsewhere(Handy):
    """Its commands and files are not those of the sandbox."""

    async def exec(self, id, command, *, timeout=60.0):
        self._box(id).work = Path("/")
        done = await super().exec(id, command)
        return done if command[0] != sys.executable else msgspec.structs.replace(done, returncode=0)

    async def download(self, id, path):
        with suppress(NotFound):
            return await super().download(id, path)
        return b""

    async def upload(self, id, path, content):
        await super().upload(id, path, content.replace(b"\n", b"\r\n"))


async def test_commands_and_files_through_the_engine_that_are_wrong():
    assert set(await failures(Elsewhere(), "files-go-both-ways", "files-that-are-missing")) == {
        "files-go-both-ways",
        "files-that-are-missing",
    }
    assert set(await failures(Elsewhere(), "exec-answers")) == {"exec-answers"}


# The guide


def test_the_guide_shows_the_engine_as_it_is():
    whole = Path(plain_module.__file__).read_text(encoding="utf-8")
    pieces = [block.text for block in blocks(GUIDE) if block.comment.startswith("not run: a piece of")]
    assert len(pieces) >= 4
    for piece in pieces:
        assert piece.rstrip() in whole, f"{GUIDE.name} shows\n{piece}"


async def test_paper_is_not_enough():
    found = await failures(PaperEngine(), "create", "get-unknown", "delete-unknown")
    assert set(found) == {"create"}
