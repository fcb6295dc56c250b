"""What tests of built-in benchmarks share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from aenv.engines.process.engine import ProcessEngine
from tests.rl.bench import Bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """An engine at the home of whoever runs the tests, where packages are kept; no setting leads elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AENV_SYSTEM_URL", "AENV_HUB_URL", "AENV_API_KEY", "AENV_ENGINE", "DUMMY_INSTANCE_IP"):
            patch.delenv(name, raising=False)
        async with ProcessEngine() as engine:
            yield Bench(engine, Path())
