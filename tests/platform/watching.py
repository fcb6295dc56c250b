"""What lives on a platform, as it is written down and as the engine sees it."""

from __future__ import annotations

import asyncio

import pytest

from aenv.engines.process.engine import ProcessEngine
from tests.platform.support import Platform


def sandboxes(served: Platform) -> set[str]:
    """What lives, as the engine sees it."""
    (place,) = served.home.glob("run/platform*")

    async def find() -> set[str]:
        async with ProcessEngine(state=place.name) as engine:
            return {found.id for found in await engine.find() if not found.state.over}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(served.home))
        return asyncio.run(find())


def living(served: Platform, **labels: str) -> set[str]:
    """What lives, as it is written down."""
    query = "".join(f"&label={name}%3D{value}" for name, value in labels.items())
    found = served.ask("GET", f"/env-instance/list?limit=1000{query}").data
    return {one["id"] for one in found if one["status"] not in ("Failed", "Terminated")}


def status(served: Platform, id: str) -> str:
    return str(served.ask("GET", f"/env-instance/{id}").data["status"])
