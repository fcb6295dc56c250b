"""What the tests of services share: a server with doors for sandboxes, and little patience."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.services.ground import DoorEngine, House, house
from tests.store.servers import Server


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes none; the order of things is the same."""
    short = {"HEARD": 0.1, "SOONER": 0.1, "SESSIONS": 0.1, "HEALTH": 0.1, "LOOK": 0.1, "SOON": 0.02}
    for name, seconds in short.items():
        monkeypatch.setattr(f"aenv.api.services.keeper.{name}", seconds)
    monkeypatch.setattr("aenv.api.services.moves.FIRST", 0.05)
    monkeypatch.setattr("aenv.api.services.keeping.BEAT", 0.1)


@pytest.fixture
async def engine() -> AsyncIterator[DoorEngine]:
    made = DoorEngine()
    yield made
    await made.close()


@pytest.fixture
async def here(tmp_path: Path, home: Path, engine: DoorEngine) -> AsyncIterator[House]:
    async with house(f"sqlite:{tmp_path / 'store.db'}", engine, home) as found:
        yield found


@pytest.fixture
def redis_url(redis: Server) -> str:
    redis.empty()
    return redis.url
