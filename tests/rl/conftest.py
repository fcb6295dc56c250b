"""What the tests of rollouts share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.rl.bench import Bench, benches


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_bench() -> AsyncIterator[Bench]:
    """An engine that the tests of a module share."""
    async with benches() as found:
        yield found
