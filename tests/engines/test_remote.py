"""The engine over HTTP, by a controller that is a real process over the process engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from aenv.controller.service import Controller
from aenv.engines import conformance, load_engine
from aenv.engines.contract import Held
from aenv.engines.failing import NeverReadyEngine
from aenv.engines.process import powers
from aenv.engines.remote import _sandbox
from aenv.models import EnvRef, SandboxSpec, State
from tests.platform.support import Platform, platform


@pytest.fixture(scope="module")
def controller() -> Iterator[Platform]:
    with platform("controller", "--engine", "process", "--allow-datasource", "/") as found:
        yield found


def test_a_start_that_a_stranger_calls_pending_is_a_start() -> None:
    assert _sandbox(Held(id="one", status="Pending")).state is State.CREATING
    assert _sandbox(Held(id="one", status="Running", ip="10.0.0.1")).state is State.RUNNING


async def test_a_controller_does_not_wait_longer_than_it_was_asked_to(tmp_path: Path) -> None:
    engine = NeverReadyEngine("no room")
    await engine.create("one", SandboxSpec(env=EnvRef("env")))
    engine.sandboxes["one"] = msgspec.structs.replace(engine.sandboxes["one"], state=State.PENDING)
    async with asyncio.timeout(30):
        held = await Controller(engine, tmp_path).get("one", 0.1)
    assert (held.status, held.reason) == ("Pending", "no room")


async def test_the_engine_keeps_every_promise(controller: Platform) -> None:
    make = partial(load_engine, f"http={controller.control}", key=controller.token)
    async with make() as engine:
        results = await conformance.run(engine, another=make, limit=300, at_once=2)
        assert {result.name: result.detail for result in results if result.status == "fail"} == {}
        skipped = {result.name: result.detail for result in results if result.status == "skip"}
        apart = {*engine.cannot, "second"}  # which has a test of its own
        due = {check.name for check in conformance.CHECKS if {check.name, check.needs} & apart}
        assert set(skipped) == due
        assert [found for found in await engine.find() if not found.state.over] == []


async def test_sandboxes_with_a_second_container_do_too(controller: Platform, tmp_path: Path) -> None:
    if powers.choose("auto").lacks:
        pytest.skip("second sandboxes need all of the isolation")
    (tmp_path / "task.txt").write_text("a task\n")
    make = partial(load_engine, f"http={controller.control}", key=controller.token)
    names = [check.name for check in conformance.CHECKS if check.needs == "second"]
    async with make() as engine:
        results = await conformance.run(engine, only=names, another=make, limit=300, at_once=2, second=str(tmp_path))
        assert {result.name: result.detail for result in results if result.status != "pass"} == {}
