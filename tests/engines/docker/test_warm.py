"""Containers that wait to be told which instance they are: what they have imported by then, and what they become."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv import http
from aenv.engines.docker import containers
from aenv.errors import Conflict, NotFound, from_wire
from aenv.models import EnvRef, Sandbox, SandboxSpec, Second, State, Volume
from tests.engines.docker.beside import inspected
from tests.engines.docker.lab import PATIENCE, TOKEN, call, eventually, of_image, over, probe, python

CLEAN = """
import os
import aenv

@aenv.register_tool
def value() -> str | None:
    return os.environ.get("VALUE")
"""
READS = """
import os
import aenv

VALUE = os.environ.get("VALUE")
os.mkdir("/tmp/made-once")

@aenv.register_tool
def value() -> str | None:
    return VALUE
"""
NEEDS = """
import os
import aenv

VALUE = os.environ["VALUE"]

@aenv.register_tool
def value() -> str | None:
    return VALUE
"""
SETS = """
import os
import aenv

os.environ.setdefault("MODE", "quick")

@aenv.register_tool
def value() -> str | None:
    return os.environ.get("MODE")
"""


@pytest.fixture
def write(tmp_path: Path):
    """Write a project whose one module is this."""

    def write(text: str, preload: bool | str = "auto") -> Path:
        root = tmp_path / f"project-{len(list(tmp_path.iterdir()))}"
        (root / "src").mkdir(parents=True)
        (root / "src" / "tools.py").write_text(text)
        config = {"name": "waits", "version": "1.0.0", "deployConfig": {"preload": preload}}
        (root / "config.json").write_text(json.dumps(config))
        return root

    return write


async def ask(made: Sandbox, method: str, path: str, body: Any = None) -> Any:
    headers = f"Content-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    content = b"" if body is None else msgspec.json.encode(body)
    answer = await http.request(method, made.url, path, headers=headers, body=content, retries=0)
    found = msgspec.json.decode(answer.body, type=dict[str, Any])
    if answer.status != 200:
        raise from_wire({**found, "message": found.get("error")})
    return found["data"]


async def waits(made: Sandbox) -> dict[str, Any]:
    """What one says that waits."""
    assert made.state is State.RUNNING
    found: dict[str, Any] = await ask(made, "GET", "/health")
    assert found["status"] == "warm"
    return found


async def become(made: Sandbox, **variables: str) -> None:
    await ask(made, "POST", "/specialise", {"environment_variables": variables})


async def test_what_may_be_imported_early_is(harbour, write):
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(write(CLEAN), warm=True))
        assert (await waits(made))["preloaded"]
        with pytest.raises(Conflict, match="is warm"):
            await call(made, "value")
        await become(made, VALUE="told")
        assert await call(made, "value") == "told"
        with pytest.raises(Conflict, match="specialised already"):
            await become(made, VALUE="again")


async def test_what_reads_a_variable_is_imported_when_it_has_its_own(harbour, write, caplog):
    caplog.set_level(logging.INFO, "aenv.engine")
    project = write(READS)
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(project, warm=True))
        assert not (await waits(made))["preloaded"]
        assert len(await harbour.left()) <= 2, "one container, and its door"
        (said,) = [record.getMessage() for record in caplog.records if "begins again" in record.getMessage()]
        assert "reads the variable VALUE at src/tools.py:5" in said
        await become(made, VALUE="told")
        assert await call(made, "value") == "told"
        again = await engine.create("two", probe(project, warm=True))
        assert not (await waits(again))["preloaded"]
        assert len([record for record in caplog.records if "begins again" in record.getMessage()]) == 1
        await become(again, VALUE="another")
        assert await call(again, "value") == "another"


async def test_what_cannot_be_imported_without_variables_is_imported_with_them(harbour, write):
    async with harbour.engine(state="") as engine:
        made = await engine.create("one", probe(write(NEEDS), warm=True))
        assert not (await waits(made))["preloaded"]
        await become(made, VALUE="told")
        assert await call(made, "value") == "told"


@pytest.mark.parametrize(("preload", "seen"), [(True, None), (False, "told")])
async def test_the_authors_word_counts(harbour, write, preload, seen):
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(write(READS, preload), warm=True))
        assert (await waits(made))["preloaded"] is preload
        await become(made, VALUE="told")
        assert await call(made, "value") == seen


async def test_a_variable_that_the_import_went_by_comes_too_late(harbour, write):
    project = write(SETS)
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(project, warm=True))
        found = await waits(made)
        assert found["preloaded"]
        assert "MODE" in found["late"]
        with pytest.raises(Conflict, match="MODE come too late"):
            await become(made, MODE="slow")
        await become(made, VALUE="told")
        assert await call(made, "value") == "quick"
        hidden = await engine.create("two", probe(project, warm=True, secrets=["MODE"]))
        assert not (await waits(hidden))["preloaded"], "a secret always comes later"
        await become(hidden, MODE="slow")
        assert await call(hidden, "value") == "slow"


async def test_an_image_of_its_own_too(harbour):
    lines = (
        "import os",
        "os.makedirs('/tmp/app')",
        f"open('/tmp/app/tools.py', 'w').write({READS!r})",
        "os.execvp('python3', ['python3', '-m', 'aenv.runtime', '/tmp/app'])",
    )
    async with harbour.image(*python(*lines)) as image, harbour.engine() as engine:
        made = await engine.create("one", of_image(image, warm=True))
        assert not (await waits(made))["preloaded"]
        await become(made, VALUE="told")
        assert await call(made, "value") == "told"


async def test_its_second_container_begins_again_with_it(harbour, write, image):
    async with harbour.engine() as engine:
        made = await engine.create("one", probe(write(READS), warm=True, second=Second(image=image)))
        assert not (await waits(made))["preloaded"]
        assert (await inspected(harbour, "one"))["State"]["Running"]
        await become(made, VALUE="told")
        assert await call(made, "value") == "told"
        await engine.delete("one")
        assert await harbour.left() == []


async def test_one_that_is_deleted_while_it_begins_again_is_gone(harbour, write, monkeypatch):
    from aenv.engines.docker.starting import Starting

    again = asyncio.Event()
    begin_again = Starting._begin_again

    async def told(self: Starting) -> None:
        again.set()
        await begin_again(self)

    monkeypatch.setattr(Starting, "_begin_again", told)
    async with harbour.engine() as engine:
        starting = asyncio.create_task(engine.create("one", probe(write(READS), warm=True)))
        await asyncio.wait_for(again.wait(), PATIENCE)
        await engine.delete("one")
        assert isinstance((await asyncio.gather(starting, return_exceptions=True))[0], Exception)
        assert await harbour.left() == []
        with pytest.raises(NotFound):
            await engine.get("one")


async def test_one_that_ended_while_it_waited_is_over(harbour, write):
    async with harbour.engine() as engine:
        await engine.create("one", probe(write(CLEAN), warm=True))
        await harbour.daemon.ask("POST", f"/containers/{containers.name(harbour.state, 'one')}/kill")
        assert (await over(engine, "one")).state is State.FAILED


async def test_another_engine_finds_one_that_waits(harbour, write):
    async with harbour.engine() as engine:
        await engine.create("one", probe(write(READS), warm=True))
    async with harbour.engine() as engine:
        made = await eventually("it to be found", lambda: _found(engine, "one"))
        assert not (await waits(made))["preloaded"]
        await become(made, VALUE="told")
        assert await call(made, "value") == "told"


async def _found(engine: Any, id: str) -> Sandbox | None:
    found: Sandbox = await engine.get(id)
    return found if found.state is State.RUNNING else None


def test_with_a_volume_it_is_imported_later():
    spec = SandboxSpec(env=EnvRef("waits", "1.0.0"), warm=True)
    held = [Volume(owner="o", name="n", size=1, mount="/home/data")]
    for given, volumes, wanted in (("auto", [], "auto"), ("auto", held, False), (True, held, True), (False, [], False)):
        assert containers.preload(msgspec.structs.replace(spec, preload=given, volumes=volumes)) == wanted
