"""The engine over HTTP, by a controller that is a real process over the process engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from aenv.engines import conformance, load_engine
from aenv.engines.process import powers
from tests.platform.support import Platform, platform


@pytest.fixture(scope="module")
def controller() -> Iterator[Platform]:
    with platform("controller", "--engine", "process", "--allow-datasource", "/") as found:
        yield found


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
