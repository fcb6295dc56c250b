"""Platforms for tests, on every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.platform.balancer import Replicas, replicas
from tests.platform.support import Platform, platform
from tests.store.servers import Server, redis_server

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class Ground:
    """A platform that is ready, with the store that it stands on."""

    def __init__(self, platform: Platform, redis: Server | None, *, losing: bool = False) -> None:
        self.platform = platform
        self.redis = redis
        self.losing = losing
        """Whether every test loses one of two servers."""


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One for the tests of a module, which leave each other's things alone.

    A module may ask for two servers on one Redis, too: ``replicas``, or ``losing`` one in each test.
    """
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield Ground(stack.enter_context(platform(AENV_GRACE="30")), None)
            return
        folder: Path = tmp_path_factory.mktemp("redis")
        redis = stack.enter_context(redis_server(folder, *DURABLE))
        found: Platform
        if request.param == "redis":
            found = stack.enter_context(platform("--store", redis.url, AENV_GRACE="30"))
        else:
            found = stack.enter_context(replicas(redis.url, AENV_GRACE="30"))
        yield Ground(found, redis, losing=request.param == "losing")


@pytest.fixture
def served(ground: Ground) -> Platform:
    """The platform, which runs whatever an earlier test did to it."""
    if not ground.platform.alive:
        ground.platform.start()
    if ground.losing and isinstance(ground.platform, Replicas):
        ground.platform.losing = 2
    return ground.platform
