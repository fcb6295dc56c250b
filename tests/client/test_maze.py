"""The search of examples/03-maze, which forks, and episodes from the start, with as many doors to open."""

from __future__ import annotations

import importlib.util
import shutil
from types import ModuleType

from tests.rl.bench import benches
from tests.support import ROOT

MAZE = ROOT / "examples" / "03-maze"


def _search() -> ModuleType:
    spec = importlib.util.spec_from_file_location("maze_search", MAZE / "search.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_a_search_that_forks_finds_what_episodes_from_the_start_do_not() -> None:
    module = _search()
    async with benches() as bench:
        shutil.copytree(MAZE, bench.home / "envs" / "maze" / "1.0.0")
        for seed in range(1, 6):
            async with bench.env("maze", seed=seed) as env:
                reward, opened = await module.search(env, seed)
                assert reward == 1.0
                assert await module.from_the_start(env, seed, opened) == (0.0, opened)
        await bench.empty()
