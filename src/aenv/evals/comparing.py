"""Two evaluations, task by task: what the second is better or worse at."""

from __future__ import annotations

from statistics import fmean

from msgspec import Struct

from aenv.errors import Invalid
from aenv.evals import statistics
from aenv.evals.results import Evaluation, TaskResult


class Pair(Struct, frozen=True, kw_only=True):
    """One task in both: its mean scores, and whether it passed."""

    id: str
    before: float
    after: float
    passed_before: bool
    passed_after: bool


class Comparison(Struct, frozen=True, kw_only=True):
    """What the second of two evaluations has more than the first, over tasks that both have a score for."""

    tasks: int
    before: float
    """Mean score of the first, over these tasks."""
    after: float
    difference: float
    interval: tuple[float, float]
    """In which the difference is, with a confidence of 95 %: from differences of the same task."""
    won: list[Pair]
    """Tasks that only the second passes."""
    lost: list[Pair]
    """Tasks that only the first passes."""
    better: int
    """Tasks with a higher score in the second."""
    worse: int
    left_out: list[str]
    """Tasks that one of them has no score for."""
    changed: list[str]
    """Tasks of one id that do not say the same in both."""


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """The second against the first."""
    lowest = min(first.lowest, second.lowest)  # an agent's failure is worth the same in both
    before, after = _scored(first, lowest), _scored(second, lowest)
    common = [id for id in before if id in after]
    if not common:
        raise Invalid(
            "the two runs have no task in common that has a score in both", hint="name runs of the same tasks"
        )
    pairs = [
        Pair(
            id=id,
            before=fmean(before[id].valid),
            after=fmean(after[id].valid),
            passed_before=first.passes(before[id]),
            passed_after=second.passes(after[id]),
        )
        for id in common
    ]
    differences = [pair.after - pair.before for pair in pairs]
    every = dict.fromkeys(result.id for evaluation in (first, second) for result in evaluation.results)
    return Comparison(
        tasks=len(pairs),
        before=fmean(pair.before for pair in pairs),
        after=fmean(pair.after for pair in pairs),
        difference=fmean(differences),
        interval=statistics.paired(differences),
        won=[pair for pair in pairs if pair.passed_after and not pair.passed_before],
        lost=[pair for pair in pairs if pair.passed_before and not pair.passed_after],
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        left_out=[id for id in every if id not in before or id not in after],
        changed=[id for id in common if before[id].digest != after[id].digest],
    )


def _scored(evaluation: Evaluation, lowest: float) -> dict[str, TaskResult]:
    return {result.id: result for result in evaluation.results_from(lowest) if result.valid}
