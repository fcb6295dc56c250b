"""A NumPy that nobody has imported when a sandbox is saved draws the same in another one as it would have."""

from __future__ import annotations

import pytest

from tests.rl.bench import Bench
from tests.runtime.saving.support import PAIR, run, written

pytestmark = pytest.mark.asyncio(loop_scope="module")

ABSENT = "import sys; out = 'numpy' not in sys.modules"
DRAW = "import numpy; out = [float(numpy.random.rand()), float(numpy.random.normal())]"
LOADS_IT = PAIR.replace("state.clear()", "import numpy; numpy.random.rand()")


@pytest.mark.parametrize("body", [PAIR, LOADS_IT], ids=["", "loading draws of it"])
@pytest.mark.parametrize("seeds", [(7,), (-(2**70),), (7, None), ()], ids=str)
async def test_it_goes_by_the_seed_of_the_last_reset_that_had_one(
    bench: Bench, seeds: tuple[int | None, ...], body: str
) -> None:
    async with bench.env(written(bench, body), seed=1) as env:
        for seed in seeds:
            await env.reset(seed=seed)
        assert await run(env, ABSENT)
        async with await env.fork(2, same_random=True) as siblings:
            assert {one.forked.how for one in siblings if one.forked} == {"saved"}
            drawn = [await run(one, DRAW) for one in (env, *siblings)]
            assert drawn[1:] == drawn[:1] * 2
        async with await env.fork(1) as (sibling,):
            assert await run(sibling, DRAW) != await run(env, DRAW)
    await bench.empty()
