"""Every kind of store, and callers of every kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from aenv.auth.callers import Caller, Scope
from aenv.auth.tokens import Tokens
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


@pytest.fixture
async def sqlite(tmp_path) -> AsyncIterator[Store]:
    """One store, where its kind makes no difference."""
    async with await open_store(f"sqlite:{tmp_path / 'one.db'}") as opened:
        yield opened


@pytest.fixture
def tokens(store: Store) -> Tokens:
    return Tokens(store)


@pytest.fixture
def admin() -> Caller:
    return Caller("root", frozenset(Scope))


@pytest.fixture
def alice() -> Caller:
    return Caller("alice", frozenset({Scope.READ, Scope.RUN}))
