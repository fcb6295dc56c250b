"""Every kind of store, for the tests of what all of them do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from aenv.store import Store, open_store
from tests.store.servers import Server, redis_server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """Where an empty store is."""
    if request.param == "sqlite":
        return f"sqlite:{request.getfixturevalue('tmp_path') / 'store.db'}"
    server: Server = request.getfixturevalue("redis")
    server.empty()
    return server.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with await open_store(url) as opened:
        yield opened
