"""Other rewards for an episode that is over: worked out on its trajectory, or taken in an instance that replayed it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from aenv.client.environment import Environment
from aenv.errors import Invalid
from aenv.rl import rewards as scoring
from aenv.rl.comparing import Difference
from aenv.rl.playing import UNSCORED
from aenv.rl.recording import Episode
from aenv.rl.replaying import Judge, Replay, raise_unless_same
from aenv.rl.rewards import Reward, Rewards, chosen
from aenv.rl.trajectory import Lineage, Scored, Trajectory


async def rescore(trajectory: Trajectory, rewards: Rewards, env: str | Environment | None = None) -> Trajectory:
    """The episode with those rewards instead of its own: a new trajectory, whose lineage names the old one.

    Functions are worked out on what is recorded. For rewards of the environment the episode is replayed, in ``env`` or
    in the environment that it was recorded in, and they are taken there; one that is not the same then is an
    ``EpisodeError``, and a replay that fails raises its failure. An episode that failed before its reward was taken
    cannot be rescored.
    """
    failed = trajectory.failure
    if failed is not None and (failed.phase != "reward" or trajectory.ended is None):
        hint = "only an episode whose agent came to its end can be rescored"
        raise Invalid(f"episode {trajectory.id} has nothing to score: {failed}", hint=hint)
    taken = chosen(rewards)
    turns = [msgspec.structs.replace(turn, rewards={}) for turn in trajectory.turns]
    local = [reward.key for reward in taken if reward.is_local]
    bare = msgspec.structs.replace(
        trajectory,
        id=secrets.token_hex(8),
        outcome=UNSCORED,
        turns=turns,
        provenance=msgspec.structs.replace(trajectory.provenance, local_rewards=local),
        lineage=Lineage(parent=trajectory.id, relation="rescored"),
    )
    if all(reward.function is not None for reward in taken):
        await _score_turns(bare, taken)
        scored = await scoring.score(bare, taken, None)
    else:
        scored = await _replayed(trajectory, bare, taken, env)
    return msgspec.structs.replace(bare, outcome=scored)


async def _score_turns(bare: Trajectory, taken: Sequence[Reward]) -> None:
    for turn in bare.turns:
        for reward in taken:
            if reward.every_turn:
                turn.rewards[reward.key] = await scoring.of_turn(reward, turn, None, bare.task.reward)


async def _replayed(
    trajectory: Trajectory, bare: Trajectory, taken: Sequence[Reward], env: str | Environment | None
) -> Scored:
    judge = _Scoring(bare, taken)
    raise_unless_same(await Replay(trajectory, env, judge).run())
    assert judge.scored is not None  # it is the same to its end, where it is scored
    return judge.scored


class _Scoring(Judge):
    """Takes new rewards while an episode is replayed, where a rollout would."""

    def __init__(self, bare: Trajectory, taken: Sequence[Reward]) -> None:
        self._bare = bare
        self._taken = taken
        self.scored: Scored | None = None

    async def after_turn(self, episode: Episode, turn: int) -> Difference | None:
        found = self._bare.turns[turn]
        for reward in self._taken:
            if reward.every_turn:
                found.rewards[reward.key] = await scoring.of_turn(reward, found, episode, self._bare.task.reward)
        return None

    async def at_end(self, episode: Episode) -> Difference | None:
        self.scored = await scoring.score(self._bare, self._taken, episode)
        return None
