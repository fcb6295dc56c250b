"""Episodes counted together: what a group is worth to learn from, and how a run goes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import fmean, pstdev
from typing import Any

from aenv.rl.trajectory import Trajectory

LEAST_VALID = 2
"""Scored episodes that a group must have for its rewards to be compared with each other."""


class Group:
    """The episodes of one task, whose rewards are compared with each other. What failed counts nowhere."""

    def __init__(self, id: str, trajectories: Iterable[Trajectory]) -> None:
        self.id = id
        self.trajectories = sorted(trajectories, key=lambda found: found.sample)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def scored(self) -> list[Trajectory]:
        """Those that have a reward."""
        return [found for found in self.trajectories if found.ok]

    @property
    def valid(self) -> int:
        """How many have a reward."""
        return len(self.scored)

    @property
    def mask(self) -> list[bool]:
        """By sample: whether it has a reward, and may be learned from."""
        return [found.ok for found in self.trajectories]

    @property
    def rewards(self) -> list[float | None]:
        """By sample; None for those that failed."""
        return [found.reward if found.ok else None for found in self.trajectories]

    @property
    def failures(self) -> dict[str, int]:
        """How many failed, by kind."""
        return dict(Counter(found.failure.kind for found in self.trajectories if found.failure is not None))

    def advantages(self, *, scaled: bool = True, epsilon: float = 1e-6) -> list[float | None]:
        """By sample, how much better it was than its group: the reward less the mean, over the deviation when
        ``scaled``. None for those that failed, and for all of a group with fewer than two that did not."""
        rewards = [found.reward for found in self.scored]
        if len(rewards) < LEAST_VALID:
            return [None] * len(self)
        mean, spread = fmean(rewards), pstdev(rewards) + epsilon if scaled else 1.0
        return [None if reward is None else (reward - mean) / spread for reward in self.rewards]


def grouped(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Trajectories by their group, in the order in which each group first occurs. One without a group is its own."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.group or trajectory.id, []).append(trajectory)
    return [Group(id, members) for id, members in found.items()]


class Tally:
    """A run, counted as it goes. It keeps numbers and no trajectories."""

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        self.episodes = self.scored = self.turns = self.calls = self.errors = self.retried = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.failures: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.components: dict[str, list[float]] = {}
        self.seconds: Counter[str] = Counter()
        self._sum = self._middle = self._spread = 0.0
        self.least, self.most = math.inf, -math.inf
        for trajectory in trajectories:
            self.add(trajectory)

    def add(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.turns += len(trajectory.turns)
        calls = trajectory.calls
        self.calls += len(calls)
        self.errors += sum(call.result is not None and call.result.is_error for call in calls)
        for spoken in filter(None, (turn.generation for turn in trajectory.turns)):
            self.prompt_tokens += spoken.prompt_tokens or 0
            self.completion_tokens += spoken.completion_tokens or 0
        self.retried += len(trajectory.retried)
        self.seconds.update(trajectory.seconds)
        failed = trajectory.failure
        if failed is not None:
            self.failures[failed.kind] += 1
            return
        reward = trajectory.reward
        self.scored += 1
        self.endings[trajectory.ended or "done"] += 1
        self._sum += reward
        apart = reward - self._middle  # by Welford: sums of squares would cancel each other where rewards are large
        self._middle += apart / self.scored
        self._spread += apart * (reward - self._middle)
        self.least, self.most = min(self.least, reward), max(self.most, reward)
        for name, score in trajectory.components.items():
            total = self.components.setdefault(name, [0.0, 0.0])
            total[0] += score
            total[1] += 1

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def mean(self) -> float | None:
        """Of the rewards there are; None when there is none."""
        return self._sum / self.scored if self.scored else None

    @property
    def deviation(self) -> float | None:
        if not self.scored:
            return None
        return math.sqrt(max(self._spread, 0.0) / self.scored)

    def shown(self) -> dict[str, Any]:
        """For a report."""
        return {
            "episodes": self.episodes,
            "scored": self.scored,
            "failed": self.failed,
            "failures": dict(sorted(self.failures.items())),
            "retried": self.retried,
            "reward": None
            if self.mean is None
            else {"mean": self.mean, "deviation": self.deviation, "least": self.least, "most": self.most},
            "components": {name: total / count for name, (total, count) in sorted(self.components.items())},
            "ended": dict(sorted(self.endings.items())),
            "turns": self.turns,
            "calls": self.calls,
            "tool_errors": self.errors,
            "tokens": {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
            "seconds": {name: round(total, 3) for name, total in sorted(self.seconds.items())},
        }
