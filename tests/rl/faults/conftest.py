"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.engines.process.lab import isolation_or_skip
from tests.rl.bench import Bench, benches


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """An engine that the tests of a module share; each leaves it empty."""
    async with benches(isolation_or_skip("auto")) as found:
        yield found
