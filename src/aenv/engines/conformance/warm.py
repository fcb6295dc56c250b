"""Checks of sandboxes that wait to be told which instance they are."""

from __future__ import annotations

from aenv.engines.conformance.bench import Bench, Box, refusal, require
from aenv.engines.conformance.table import check
from aenv.errors import Conflict
from aenv.models import State

TOLD = {"environment_variables": {"PROBE_VALUE": "told"}, "arguments": ["--side", "a b"], "seed": 7}


async def warm(bench: Bench) -> None:
    """A warm sandbox is RUNNING while it waits, and answers nothing but that it is warm; told what it is, it has its
    own variables, arguments and seed, and is told so once."""
    box = await bench.start(warm=True)
    await _waits(bench, box)
    await box.post("/specialise", TOLD)
    found = await box.tool("instance")
    require(found["id"] == box.id, f"its id is {found['id']!r}")
    require(found["variables"].get("PROBE_VALUE") == "told", f"its variables are {found['variables']}")
    require(found["variables"].get("PROBE_BOTH") is not None, "it has not the project's own variables")
    require((found["arguments"], found["seed"]) == (["--side", "a b"], 7), f"it was told {found}")
    require(await box.tool("environ", name="PROBE_VALUE") == "told", "the process has not the variable")
    require(await box.tool("argv") == ["--side", "a b"], "the process has not the arguments")
    require(await box.status("GET", "/health") == 200, "it is specialised, and not healthy")
    await refusal(box.post("/specialise", TOLD), Conflict)


async def warm_before_the_import(bench: Bench) -> None:
    """What a project reads when it is imported is the instance's own, also in a sandbox that was warm."""
    box = await bench.start("at-import", warm=True)
    await _waits(bench, box)
    await box.post("/specialise", TOLD)
    seen = await box.tool("seen")
    require((seen["value"], seen["arguments"]) == ("told", ["--side", "a b"]), f"the import saw {seen}")


async def warm_is_deleted(bench: Bench) -> None:
    """A warm sandbox that nobody needs is deleted as any other."""
    box = await bench.start(warm=True)
    await bench.engine.delete(box.id)
    require(not await box.answers(), "it answers after its end")


async def _waits(bench: Bench, box: Box) -> None:
    state = (await bench.engine.get(box.id)).state
    require(state is State.RUNNING, f"its state is {state}")
    status = await box.status("GET", "/health")
    require(status == 200, f"it waits, and /health answers {status}")
    await refusal(box.post("/tools/echo", {"text": "hello"}), Conflict)


CHECKS = (check(warm), check(warm_before_the_import), check(warm_is_deleted))
