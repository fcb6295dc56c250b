"""Episodes counted together: what failed counts nowhere, and what was scored counts exactly."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.rl import Failed, Group, Scored, Tally, Trajectory, grouped
from tests.rl import made

FAILED = Failed(kind="network", phase="tool", reason="cut")
outcomes = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=12)


def of(rewards: list[float | None]) -> list[Trajectory]:
    return [
        made.trajectory(
            id=f"e{place}", sample=place, group="g", outcome=FAILED if reward is None else Scored(score=reward)
        )
        for place, reward in enumerate(rewards)
    ]


@given(rewards=outcomes)
def test_failed_ones_change_nothing_of_the_others(rewards: list[float | None]) -> None:
    group = Group("g", reversed(of(rewards)))
    scored = [reward for reward in rewards if reward is not None]
    alone = Group("g", of(list(scored)))
    assert group.rewards == rewards
    assert group.mask == [reward is not None for reward in rewards]
    assert group.valid == len(scored)
    for scaled in (True, False):
        found = group.advantages(scaled=scaled)
        assert [advantage is None for advantage in found] == [reward is None or len(scored) < 2 for reward in rewards]
        if len(scored) >= 2:
            assert [advantage for advantage in found if advantage is not None] == alone.advantages(scaled=scaled)
            assert all(math.isfinite(advantage) for advantage in found if advantage is not None)
    tally = Tally(of(rewards))
    assert (tally.episodes, tally.scored, tally.failed) == (len(rewards), len(scored), len(rewards) - len(scored))
    if scored:
        assert tally.mean == pytest.approx(fmean(scored), abs=1e-6)
        assert tally.deviation == pytest.approx(pstdev(scored), abs=1e-3)
        assert (tally.least, tally.most) == (min(scored), max(scored))
    else:
        assert tally.mean is tally.deviation is tally.shown()["reward"] is None


def test_the_deviation_of_large_rewards() -> None:
    rewards: list[float | None] = [1e9, 1e9 + 1, 1e9 + 2]
    assert Tally(of(rewards)).deviation == pytest.approx(math.sqrt(2 / 3))


def test_one_without_a_group_is_its_own() -> None:
    lone = [made.trajectory(id="x"), made.trajectory(id="y")]
    found = grouped([*of([1.0, None]), *lone])
    assert [(group.id, len(group)) for group in found] == [("g", 2), ("x", 1), ("y", 1)]
    assert found[0].failures == {"network": 1}
