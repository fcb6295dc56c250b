"""What an evaluation came to: every task with its scores, and the numbers over all of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf, isfinite, nextafter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from aenv.errors import NotFound
from aenv.evals import statistics
from aenv.evals.statistics import Estimate
from aenv.rl.files import read
from aenv.rl.groups import Tally
from aenv.rl.runs import ABOUT, Asked, about_run
from aenv.rl.trajectory import Scored, Trajectory


class _Sample(NamedTuple):
    """What is held of an episode until all are read: nothing of what was said and done."""

    place: int
    id: str
    score: float | None
    by_agent: bool
    """Whether it has no score since the agent failed."""
    failure: str | None
    turns: int
    seconds: float
    digest: str


class TaskResult(Struct, frozen=True, kw_only=True):
    """One task, by sample."""

    id: str
    scores: list[float | None]
    """None for a sample that the platform failed in; 0, or the lowest that there is, for one that the agent did."""
    episodes: list[str]
    """The ids of the trajectories."""
    failures: dict[str, int]
    """How many failed, by kind."""
    turns: int
    seconds: float
    digest: str
    """sha256 over what the task says."""

    @property
    def valid(self) -> list[float]:
        """The scores there are."""
        return [score for score in self.scores if score is not None]


def _result(id: str, samples: list[_Sample], failed: float) -> TaskResult:
    return TaskResult(
        id=id,
        scores=[failed if found.by_agent else found.score for found in samples],
        episodes=[found.id for found in samples],
        failures=dict(Counter(found.failure for found in samples if found.failure is not None)),
        turns=sum(found.turns for found in samples),
        seconds=round(sum(found.seconds for found in samples), 3),
        digest=samples[0].digest,
    )


class Evaluation:
    """Scores of an agent on tasks of an environment. What the platform failed in has none, and counts in no rate; what
    the agent failed in was not passed, and counts as 0, or as the lowest score that there is where that is lower."""

    def __init__(
        self,
        asked: Asked,
        trajectories: Iterable[Trajectory],
        *,
        threshold: float = statistics.PASSED,
        ks: Sequence[int] = (),
        order: Sequence[str] = (),
    ) -> None:
        """``ks`` are those of pass@k and pass^k; ``order`` is that of the tasks, by id."""
        self.asked = asked
        self.threshold = threshold
        self.ks = tuple(ks)
        self.tally = Tally()
        self.env = asked.env
        self.failed = self.agent_failed = 0
        """Episodes that failed: by the platform, and by the agent."""
        self.not_judged = 0
        """Episodes whose reward says, as ``not_judged``, that a part of what counts was not judged."""
        self._parts: dict[str, list[float]] = {}
        places = {id: place for place, id in enumerate(order)}
        found: dict[str, list[_Sample]] = {}
        for trajectory in trajectories:
            found.setdefault(trajectory.group or trajectory.task.id, []).append(self._noted(trajectory))
        ids = sorted(found, key=lambda name: (places.get(name, len(places)), natural(name)))
        self._samples = {id: sorted(found[id]) for id in ids}
        scores = (one.score for samples in self._samples.values() for one in samples if one.score is not None)
        self.lowest = min(0.0, min(scores, default=0.0))
        """What an episode counts as that the agent failed in: to break down is no better than to do badly."""
        self.results = self.results_from(self.lowest)

    @classmethod
    def read(cls, folder: Path, **how: Any) -> Evaluation:
        """The evaluation that is kept in the folder of a run."""
        about = about_run(folder)
        if about is None:
            raise NotFound(f"{folder} holds no run: it has no {ABOUT}", hint="'aenv eval --out' writes one")
        return cls(about.asked, read(folder), **how)

    def results_from(self, lowest: float) -> list[TaskResult]:
        """The tasks, where what the agent failed in counts as that; or as less, where that would pass."""
        failed = lowest if lowest < self.threshold else nextafter(self.threshold, -inf)
        return [_result(id, samples, failed) for id, samples in self._samples.items()]

    def _noted(self, of: Trajectory) -> _Sample:
        self.tally.add(of)
        score, by_agent = None, False
        if isinstance(of.outcome, Scored):
            score = of.outcome.score
            for component in of.outcome.components.values():
                self._look_into(component.details)
        elif by_agent := of.outcome.by_agent:
            self.agent_failed += 1
        else:
            self.failed += 1
        self.env = of.provenance.env or self.env
        return _Sample(
            of.sample,
            of.id,
            score,
            by_agent,
            of.failure.kind if of.failure is not None else None,
            len(of.turns),
            of.seconds.get("total", 0.0),
            of.provenance.task_digest or of.task.digest(),
        )

    def _look_into(self, details: Any) -> None:
        """What a reward tells beside the score, where that is a number."""
        if not isinstance(details, dict):
            return
        self.not_judged += bool(details.get("not_judged"))
        for name, value in details.items():
            if name != "score" and isinstance(value, (bool, int, float)) and isfinite(value):
                self._parts.setdefault(name, []).append(float(value))

    @property
    def parts(self) -> dict[str, float]:
        """By name, the mean of every number that rewards tell beside the score, over episodes that have it."""
        return {name: fmean(values) for name, values in self._parts.items()}

    @property
    def scores(self) -> list[list[float | None]]:
        """By task, then by sample."""
        return [result.scores for result in self.results]

    @property
    def counted(self) -> int:
        """Episodes that count in rates."""
        return self.tally.episodes - self.failed

    @property
    def passed(self) -> int:
        """Episodes that passed."""
        return sum(map(self.passed_of, self.results))

    def passed_of(self, result: TaskResult) -> int:
        """How many samples of a task passed."""
        return sum(map(self.is_pass, result.valid))

    def is_pass(self, score: float) -> bool:
        """Whether an episode with that score passed."""
        return statistics.passed(score, self.threshold)

    def passes(self, result: TaskResult) -> bool:
        """Whether more than half of a task's samples passed, of those that count."""
        return self.passed_of(result) * 2 > len(result.valid)

    @property
    def score(self) -> Estimate | None:
        """The mean score over tasks."""
        return statistics.mean_score(self.scores)

    @property
    def pass_rate(self) -> Estimate | None:
        """The share of samples that passed, over tasks."""
        return statistics.pass_rate(self.scores, self.threshold)

    def pass_at(self, k: int) -> Estimate | None:
        """pass@k."""
        return statistics.pass_at(self.scores, k, self.threshold)

    def pass_all(self, k: int) -> Estimate | None:
        """pass^k."""
        return statistics.pass_all(self.scores, k, self.threshold)

    def shown(self) -> dict[str, Any]:
        """For programs: what ``aenv eval -o json`` prints."""
        score = self.score
        tally = self.tally.shown()
        return {
            "env": self.env,
            "agent": self.asked.agent,
            "tasks": len(self.results),
            "episodes": tally["episodes"],
            "passed": self.passed,
            "failed": self.failed,
            "agent_failed": self.agent_failed,
            "score": None if score is None else score.value,
            "interval": None if score is None else [score.low, score.high],
            "pass_rate": msgspec.to_builtins(self.pass_rate),
            "pass@k": {str(k): msgspec.to_builtins(self.pass_at(k)) for k in self.ks},
            "pass^k": {str(k): msgspec.to_builtins(self.pass_all(k)) for k in self.ks},
            "parts": self.parts,
            "not_judged": self.not_judged,
            "threshold": self.threshold,
            "n": self.asked.n,
            "seed": self.asked.seed,
            "taskset": {"digest": self.asked.tasks, **self.asked.settings.get("taskset", {})},
            **{name: tally[name] for name in _TALLIED},
            "results": [
                {"id": one.id, "passed": self.passed_of(one), "scores": one.scores, "episodes": one.episodes}
                for one in self.results
            ],
        }


_TALLIED = ("failures", "retried", "components", "ended", "turns", "calls", "tool_errors", "tokens", "seconds")


def natural(id: str) -> list[tuple[int, int, str]]:
    """A key to sort ids by as people do: 2 before 10."""
    parts = re.split(r"(\d+)", id)
    return [(0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts]
