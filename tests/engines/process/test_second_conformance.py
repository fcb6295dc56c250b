"""The conformance list of second containers, on the process engine, which makes them of a directory."""

from __future__ import annotations

from functools import partial

import pytest

from aenv.engines import conformance
from aenv.engines.process.engine import ProcessEngine
from tests.engines.process.test_second import cached, duals  # noqa: F401

NAMES = [check.name for check in conformance.CHECKS if check.needs == "second"]


@pytest.mark.parametrize("kind", ["task", "root file system", "base image"])
async def test_second_sandboxes_keep_every_promise(home, jailed, duals, kind):  # noqa: F811
    places = {"task": duals.task, "root file system": duals.root_file_system, "base image": lambda: "aenv-base"}
    # An image that nobody has is refused by an engine that has no images before anybody looks for it.
    names = [name for name in NAMES if kind != "base image" or name != "second-is-needed"]
    make = partial(ProcessEngine, isolation=jailed, state="second")
    async with make() as engine:
        place = str(places[kind]())
        results = await conformance.run(engine, only=names, another=make, limit=300, at_once=2, second=place)
        assert {result.name: result.detail for result in results if result.status != "pass"} == {}
