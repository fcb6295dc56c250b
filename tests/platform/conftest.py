"""Platforms for tests, on every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.platform.support import Platform, platform
from tests.store.servers import Server, redis_server


class Ground:
    """A platform that is ready, with the store that it stands on."""

    def __init__(self, platform: Platform, redis: Server | None) -> None:
        self.platform = platform
        self.redis = redis


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One for the tests of a module, which leave each other's things alone."""
    with ExitStack() as stack:
        redis, options = None, []
        if request.param == "redis":
            folder: Path = tmp_path_factory.mktemp("redis")
            redis = stack.enter_context(redis_server(folder, "--appendonly", "yes", "--appendfsync", "always"))
            options = ["--store", redis.url]
        yield Ground(stack.enter_context(platform(*options, AENV_GRACE="30")), redis)


@pytest.fixture
def served(ground: Ground) -> Platform:
    """The platform, which runs whatever an earlier test did to it."""
    if not ground.platform.alive:
        ground.platform.start()
    return ground.platform
