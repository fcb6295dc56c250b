"""Spares: a process that is sealed before anybody asks for it, and is then the next sandbox like the last."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

from aenv.engines.process.engine import ProcessEngine
from tests.engines.process import lab
from tests.engines.process.lab import call, eventually, probe, works


@pytest.fixture
async def engine(isolation, leftovers, monkeypatch):
    monkeypatch.setenv("AENV_SPARE", "1")
    async with ProcessEngine(isolation=isolation) as made:
        yield made


async def spare(engine, family, live=()):
    """The process that belongs to none of the sandboxes of these ids."""
    taken = {(await family.runtime(engine, id)).pid for id in live}

    def look():
        found = [process for process in family.instances() if process.pid not in taken]
        return found[0] if len(found) == 1 and found[0].pid in _watched(family.spawner.pid) else None

    return await eventually("a spare", look)


def _watched(pid):
    """The processes whose end a process waits for in its event loop."""
    facts = {}
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):
            facts[file.name] = file.read_text()
    waited = {number for text in facts.values() for number in re.findall(r"^tfd:\s+(\d+)", text, re.MULTILINE)}
    return {int(found[1]) for number in waited if (found := re.search(r"^Pid:\s+(\d+)", facts.get(number, ""), re.M))}


async def _with_spare(engine, family):
    for _ in range(2):
        await works(engine)
    return await spare(engine, family)


async def test_who_asks_once_has_no_spare(engine, family):
    await works(engine)
    await eventually("it to be gone", lambda: not family.instances())


async def test_the_third_sandbox_is_the_spare_and_has_a_successor(engine, family):
    waiting = await _with_spare(engine, family)
    assert await engine.find() == []
    sandbox = await engine.create("a", probe())
    assert (await family.runtime(engine, "a")).pid == waiting.pid
    assert await call(sandbox, "echo", text="x") == "x"
    assert (await spare(engine, family, ["a"])).pid != waiting.pid


async def test_a_spare_becomes_what_its_sandbox_is_told_to_be(engine, family):
    await _with_spare(engine, family)
    one = await engine.create("one", probe(environment_variables={"PROBE_WHO": "one"}, arguments=["--fast"], seed=1))
    await spare(engine, family, ["one"])
    two = await engine.create("two", probe(environment_variables={"PROBE_WHO": "two"}))
    own = {"PROBE_PROJECT": "project", "PROBE_BOTH": "project"}
    assert [await call(sandbox, "instance") for sandbox in (one, two)] == [
        {"id": "one", "seed": 1, "datasource": "", "arguments": ["--fast"], "variables": own | {"PROBE_WHO": "one"}},
        {"id": "two", "seed": None, "datasource": "", "arguments": [], "variables": own | {"PROBE_WHO": "two"}},
    ]
    assert [await call(sandbox, "environ", name="PROBE_WHO") for sandbox in (one, two)] == ["one", "two"]
    assert await call(one, "randomness") != await call(two, "randomness")


async def test_a_spare_of_another_size_is_not_taken(engine, family):
    waiting = await _with_spare(engine, family)
    await engine.create("a", probe(resources={"memory": "300Mi"}))
    assert (await family.runtime(engine, "a")).pid != waiting.pid
    await eventually("the other to be gone", lambda: not os.path.exists(f"/proc/{waiting.pid}"))


async def test_a_spare_that_is_killed_is_nobodys_sandbox(engine, family):
    waiting = await _with_spare(engine, family)
    waiting.kill()
    await eventually("it to be gone", lambda: not os.path.exists(f"/proc/{waiting.pid}"))
    sandbox = await engine.create("a", probe())
    assert await call(sandbox, "echo", text="x") == "x"


@pytest.mark.parametrize("role", ["zygote", "spawner"])
async def test_a_spare_ends_with_what_made_it(engine, family, role):
    waiting = await _with_spare(engine, family)
    family.get(role).kill()
    await eventually("it to be gone", lambda: not os.path.exists(f"/proc/{waiting.pid}"))
    if role == "spawner":
        await lab.noticed(engine)
    await works(engine)


async def test_a_spare_does_not_see_the_sandbox_that_it_was_made_after(engine, family, isolation):
    if isolation == "none":
        pytest.skip("without isolation nothing is hidden")
    await engine.create("a", probe())
    await engine.create("b", probe())
    await engine.exec("b", ["sh", "-c", "echo secret > secret"])
    await spare(engine, family, ["a", "b"])
    await engine.create("c", probe())
    assert (await engine.exec("c", ["ls", "secret"])).returncode != 0
    shown = await engine.exec("c", ["sh", "-c", "echo /proc/[0-9]*"])
    assert len(shown.stdout.split()) <= 3


async def test_no_spares_when_none_are_wanted(isolation, leftovers, family):
    async with ProcessEngine(isolation=isolation) as engine:
        for _ in range(3):
            await works(engine)
        await eventually("them to be gone", lambda: not family.instances())
