"""Other rewards for episodes that are over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv import Environment
from aenv.errors import AuthorError, EpisodeError, Invalid, SandboxLost
from aenv.rl import Episode, Failed, Reward, Task, Trajectory, Turn
from aenv.rl.files import line_of, parse
from aenv.rl.playing import UNSCORED
from aenv.rl.rescoring import rescore
from aenv.rl.trajectory import Lineage
from tests.rl import test_replaying
from tests.rl.made import trajectory as made
from tests.rl.test_replaying import changed, recorded

here = test_replaying.here


def calls(trajectory: Trajectory) -> float:
    assert trajectory.outcome == UNSCORED  # so that no reward is worked out of another
    return float(len(trajectory.calls))


def of_turn(turn: Turn) -> dict[str, Any]:
    return {"score": len(turn.calls) / 2, "note": "half"}


async def test_functions_need_no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    old = made(turns=made().turns * 3)
    new = await rescore(old, [Reward(function=calls, weight=2.0), Reward(function=of_turn, every_turn=True)])
    assert new.reward == 2 * 3 + 3 * 0.5
    assert new.components == {"calls": 3.0, "of_turn": 1.5}
    assert [turn.rewards["of_turn"].details for turn in new.turns] == [{"score": 0.5, "note": "half"}] * 3
    assert new.id != old.id
    assert new.lineage == Lineage(parent=old.id, relation="rescored")
    assert new.provenance.local_rewards == ["calls", "of_turn"]
    assert (new.task, new.calls) == (old.task, old.calls)
    assert old.outcome == made().outcome
    assert not any(turn.rewards for turn in old.turns)
    assert parse(line_of(new)) == new


async def test_rewards_of_the_environment_are_taken_in_a_replay() -> None:
    old = await recorded(task=Task(reward={"bonus": 2}), rewards=calls)
    assert old.components == {"calls": 4.0}
    new = await rescore(old, [Reward(name="total", weight=0.5), Reward(name="taken"), calls])
    assert new.components == {"total": 8.0, "taken": 1.0, "calls": 4.0}
    assert new.reward == 4.0 + 1.0 + 4.0
    assert new.provenance.local_rewards == ["calls"]
    again = await rescore(new, [Reward(name="plain", every_turn=True), Reward(function=of_turn, every_turn=True)])
    assert [turn.rewards["plain"].score for turn in again.turns] == [3, 5, 8, 8]
    assert again.components == {"plain": 24.0, "of_turn": 2.0}
    assert again.lineage == Lineage(parent=new.id, relation="rescored")


async def test_an_episode_that_failed_in_its_reward_can_be_rescored() -> None:
    old = await recorded()
    failed = Failed(kind=AuthorError.code, phase="reward", reason="reward total() raised ZeroDivisionError")
    new = await rescore(msgspec.structs.replace(old, outcome=failed), ["total"])
    assert new.reward == 6


@pytest.mark.parametrize("phase", ["create", "reset", "agent", "model", "tool"])
async def test_one_that_failed_before_cannot(phase: Any) -> None:
    with pytest.raises(Invalid, match="nothing to score: network during"):
        await rescore(made(outcome=Failed(kind="network", phase=phase, reason="gone")), calls)


async def test_an_episode_that_is_not_reproduced_is_not_rescored() -> None:
    old = await recorded()
    with pytest.raises(EpisodeError, match=r"not the same when it is replayed: step 1, turn 1, .* at structured"):
        await rescore(changed(old, 1, structured={}), "total")


async def test_a_reward_that_changes_the_episode_is_found_out() -> None:
    """It draws, so what the next call draws is another number."""
    with pytest.raises(EpisodeError, match="step 1, turn 1, observation sums/add at structured.drawn"):
        await rescore(await recorded(), Reward(name="total", every_turn=True))


async def test_a_replay_that_fails_raises_its_failure() -> None:
    old = await recorded()
    with pytest.raises(SandboxLost, match="failed when it was replayed, during tool"):
        await rescore(old, "total", Environment("sums", environment_variables={"DIES": "2"}))


async def test_a_reward_that_is_not_there_or_raises_is_no_number() -> None:
    def broken(_: Trajectory) -> float:
        raise ZeroDivisionError("on purpose")

    old = await recorded()
    with pytest.raises(AuthorError, match="on purpose"):
        await rescore(old, broken)
    with pytest.raises(Exception, match="there is no reward 'totale'"):
        await rescore(old, "totale")


async def test_an_episode_without_calls() -> None:
    async def idle(env: Episode, task: Task) -> None:
        return None

    assert (await rescore(await recorded(idle), ["total", "taken"])).components == {"total": 0.0, "taken": 1.0}


async def test_an_episode_that_was_cut_short_is_not_rescored() -> None:
    """The reward of a turn failed, and the agent had not come to its end."""
    cut = made(outcome=Failed(kind="author_failed", phase="reward", reason="no number", turn=0), ended=None)
    with pytest.raises(Invalid, match="nothing to score"):
        await rescore(cut, [lambda trajectory: 1.0])
