"""The example: a rule of thumb is better than chance, in instances that step at the same time."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from aenv.client.sync import wait
from tests.rl.bench import Bench
from tests.support import ROOT

pytestmark = pytest.mark.xdist_group("gymnasium")
EXAMPLE = ROOT / "examples" / "04-cartpole"


def test_a_rule_of_thumb_is_better_than_chance(bench: Bench) -> None:
    spec = importlib.util.spec_from_file_location("cartpole_play", EXAMPLE / "play.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = bench.home / "envs" / "cartpole" / "1.0.0"
    shutil.copytree(EXAMPLE, root)
    (root / "requirements.txt").unlink()  # what the tests run by has Gymnasium
    chance, rule = module.play(bench.env("cartpole"), 8)
    assert chance < 40
    assert rule > 300
    assert wait(bench.alive()) == []
