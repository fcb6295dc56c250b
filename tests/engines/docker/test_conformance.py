"""The conformance list on real daemons: Docker, and Podman."""

from __future__ import annotations

from functools import partial

from aenv.engines import conformance, load_engine


async def test_the_engine_keeps_every_promise(daemon, base_image, home):
    make = partial(load_engine, "docker", address=daemon, state="conformance", base_image=base_image)
    async with make() as engine:
        results = await conformance.run(engine, another=make, limit=300, at_once=2)
        assert {result.name: result.detail for result in results if result.status == "fail"} == {}
        skipped = {result.name: result.detail for result in results if result.status == "skip"}
        apart = {*engine.cannot, "second"}  # which has a file of its own
        due = {check.name for check in conformance.CHECKS if {check.name, check.needs} & apart}
        assert set(skipped) == due
        assert await engine.find() == []


async def test_without_a_state_too(daemon, base_image, home):
    names = ["create", "create-together", "create-cancelled", "crash", "logs", "delete", "warm", "nothing-is-left"]
    async with load_engine("docker", address=daemon, base_image=base_image) as engine:
        results = await conformance.run(engine, only=names, limit=300, at_once=2)
        assert {result.name: result.detail for result in results if result.status != "pass"} == {}
