"""What the tests of the API service share."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.store import Store, open_store
from tests.api.ground import short_home
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
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = short_home()
    monkeypatch.setenv("AENV_HOME", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that stop do not wait for what a test leaves unfinished."""
    monkeypatch.setattr("aenv.api.instances.GRACE", 0.1)
