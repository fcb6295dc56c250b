"""Checks of many sandboxes at once. They come late: what runs beside them is slow."""

from __future__ import annotations

from aenv.engines.conformance.bench import Bench, require, together
from aenv.engines.conformance.table import check

CROWD = 20


async def many_creates(bench: Bench) -> None:
    """Twenty creates at once give twenty sandboxes that know who they are."""

    async def one() -> bool:
        box = await bench.start()
        found = await box.tool("instance")
        return bool(found["id"] == box.id)

    right = sum(await together(one() for _ in range(CROWD)))
    require(right == CROWD, f"{right} of {CROWD} know their id")
    alive = len(await bench.alive())
    require(alive == CROWD, f"find() shows {alive} of {CROWD}")


async def many_deletes(bench: Bench) -> None:
    """Twenty deletes at once end twenty sandboxes."""
    boxes = await together(bench.start() for _ in range(CROWD))
    await together(bench.engine.delete(box.id) for box in boxes)
    answering = sum(await together(box.answers() for box in boxes))
    require(not answering, f"{answering} still answer")
    require(not await bench.alive(), "some are alive")


CHECKS = (
    check(many_creates),
    check(many_deletes),
)
