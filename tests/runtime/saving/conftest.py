"""What the tests of saving share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from aenv import Environment
from tests.engines.process.lab import isolation_or_skip
from tests.rl.bench import Bench, benches, write_env
from tests.runtime.saving.support import HEAD, PAIR, run, saved


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with benches(isolation_or_skip("strict")) as found:
        write_env(found.home, "box", HEAD + PAIR)
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def victim(bench: Bench) -> AsyncIterator[tuple[Environment, bytes]]:
    """A sandbox with a file, and what it says of where it is."""
    async with bench.env("box") as env:
        await run(env, "open('/project/mine', 'w').write('mine'); state['score'] = 4")
        yield env, await saved(env)
