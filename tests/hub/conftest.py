"""A hub on every kind of store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.hub.service import Hub
from aenv.store import Store, open_store
from aenv.store.blobs import Blobs, open_blobs
from tests.hub.lab import Stage
from tests.store.servers import Server, redis_server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


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
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with await open_blobs(f"file:{tmp_path / 'blobs'}") as opened:
        yield opened


@pytest.fixture
async def engine() -> AsyncIterator[Stage]:
    async with Stage() as stage:
        yield stage


@pytest.fixture
async def hub(store: Store, blobs: Blobs, engine: Stage) -> AsyncIterator[Hub]:
    async with Hub(store, blobs, engine, builtins=False) as opened:
        yield opened
