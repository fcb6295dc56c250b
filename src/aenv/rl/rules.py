"""The rules of an episode: its rewards, its limits, and what is tried again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from aenv.errors import Invalid, NetworkError, RateLimited, SandboxLost, StartFailed
from aenv.rl.rewards import Reward, Rewards, chosen
from aenv.rl.trajectory import Failed

RETRIED = {kind.code: 2 for kind in (StartFailed, SandboxLost, NetworkError, RateLimited)}
"""How often an episode is begun again, by the kind of its failure. What the policy may have brought about, as out of
memory or a call that took too long, is not: to try again until it goes well would teach that it always does."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What holds for an episode. Limits are in seconds; None is no limit."""

    rewards: Rewards = None
    max_turns: int | None = None
    """Turns after which the agent is stopped. What it has done until then is scored."""
    turn_timeout: float | None = None
    """The longest time without anything new: for the model to answer, and for a tool."""
    episode_timeout: float | None = None
    """The longest time for all that the agent does. Starting the instance and scoring it do not count."""
    score_late: bool = False
    """Whether an episode whose time is over is scored as it then is; otherwise it has failed."""
    reset: bool = True
    """Whether the environment's reset is called first, where it has one."""
    fast_forward: bool = False
    """Whether an episode whose sandbox is lost goes on in another. Where the environment says that it is deterministic,
    all is done again that was done to the first, and at the first difference the episode has failed. Where it can be
    saved or is forkable, it goes on from a checkpoint, which is taken after each call."""
    retries: int | Mapping[str, int] = field(default_factory=lambda: dict(RETRIED))
    """How often an episode is begun again in a new instance, by the kind of its failure; a number is for all kinds of
    ``RETRIED``."""
    once: bool = False
    """Whether an episode that is under way is never begun again: for those that somebody else drives, who would not
    notice, or whose model is asked through a server that keeps what was said. What fails before that still is."""

    def __post_init__(self) -> None:
        for name in ("turn_timeout", "episode_timeout"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise Invalid(f"{name} is {limit!r}", hint="give seconds over 0, or None for no limit")
        if self.max_turns is not None and self.max_turns < 1:
            raise Invalid(f"max_turns is {self.max_turns}", hint="give a number from 1 on, or None for no limit")
        _ = self.taken

    @cached_property
    def taken(self) -> tuple[Reward, ...]:
        """The rewards that are taken."""
        return chosen(self.rewards)

    def may_retry(self, failed: Failed, before: Sequence[Failed]) -> bool:
        """Whether an episode that failed so is begun again, after those attempts at it that failed before."""
        if self.once and failed.phase not in ("create", "reset"):
            return False
        allowed = dict.fromkeys(RETRIED, self.retries) if isinstance(self.retries, int) else self.retries
        return sum(other.kind == failed.kind for other in before) < allowed.get(failed.kind, 0)
