"""What must hold of an episode, wherever it is looked at: a failed one has no number, a scored one the right one."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from aenv.errors import EpisodeError
from aenv.rl import Failed, Group, Scored, Tally, Trajectory, files
from aenv.rl.exporting import FORMATS, export
from tests.rl import made


def numbers(value: Any) -> list[Any]:
    """Every number in a JSON value, but for ``turn``, which says where it failed."""
    if isinstance(value, dict):
        return [found for key, part in value.items() if key != "turn" for found in numbers(part)]
    if isinstance(value, list):
        return [found for part in value for found in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


def has_no_number(trajectory: Trajectory, kinds: Collection[str], phases: Collection[str]) -> Failed:
    """It failed so, and nothing that is made of it has a number."""
    failed = trajectory.outcome
    assert isinstance(failed, Failed), f"it was scored: {trajectory.outcome}"
    assert failed.kind in kinds, failed
    assert failed.phase in phases, failed
    assert failed.reason
    assert (trajectory.ok, trajectory.failure) == (False, failed)
    for read in ("reward", "components"):
        with pytest.raises(EpisodeError):
            getattr(trajectory, read)
    _of_groups(trajectory)
    for format in FORMATS:
        rows = export([trajectory], format)
        assert list(rows) == []
        assert rows.left_out == {"failed": 1}
    line = files.line_of(trajectory)
    assert files.parse(line) == trajectory
    assert line.count(b"\n") == 1
    outcome = json.loads(line)["outcome"]
    assert outcome["type"] == "failed"
    assert numbers(outcome) == []
    return failed


def _of_groups(trajectory: Trajectory) -> None:
    others = [
        made.trajectory(id=f"o{place}", outcome=Scored(score=float(place)), sample=100 + place) for place in (1, 3)
    ]
    group = Group("g", [trajectory, *others])
    assert group.rewards == [None, 1.0, 3.0]
    assert group.mask == [False, True, True]
    assert group.valid == 2
    assert group.advantages(scaled=False) == [None, -1.0, 1.0]
    assert group.failures == {trajectory.outcome.kind: 1}  # type: ignore[union-attr]
    assert Group("g", [trajectory, others[0]]).advantages() == [None, None]
    assert Group("g", [trajectory]).rewards == [None]
    tally = Tally([trajectory, *others])
    assert (tally.episodes, tally.scored, tally.failed, tally.mean) == (3, 2, 1, 2.0)
    alone = Tally([trajectory])
    assert (alone.mean, alone.deviation, alone.shown()["reward"]) == (None, None, None)


def is_scored(trajectory: Trajectory, score: float) -> None:
    """It has that score, also after it was written and read."""
    assert isinstance(trajectory.outcome, Scored), str(trajectory.outcome)
    assert trajectory.reward == score
    assert trajectory.failure is None
    assert files.parse(files.line_of(trajectory)) == trajectory
    assert Group("g", [trajectory]).rewards == [score]
    assert Tally([trajectory]).mean == score
