"""What the tests of engines share."""

from collections.abc import AsyncIterator

import pytest

from aenv.engines.plain import PlainEngine


@pytest.fixture
async def plain() -> AsyncIterator[PlainEngine]:
    """An engine on plain processes, which ends what a test leaves."""
    async with PlainEngine() as engine:
        yield engine
