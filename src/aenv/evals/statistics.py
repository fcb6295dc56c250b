"""Numbers with how sure they are. Pure: scores by task in, estimates out.

Scores come by task, one for each sample, and None for a sample that has none: that one counts nowhere. What is sure is
counted in tasks and not in samples, since samples of one task are alike; a task that has no score is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean

from msgspec import Struct

from aenv.errors import Invalid

CONFIDENCE = 0.95
ROUNDS = 2000
"""How often values are drawn anew for an interval."""
PASSED = 1.0
"""The least score of an episode that passed."""

Scores = Sequence[Sequence[float | None]]
"""By task, then by sample; None for what has no score."""
Interval = tuple[float, float]


class Estimate(Struct, frozen=True, kw_only=True):
    """A mean over tasks, and the interval in which it is with a confidence of 95 %."""

    value: float
    low: float
    high: float
    tasks: int
    """Over how many tasks."""
    left_out: int = 0
    """Tasks with too few samples that have a score."""


def passed(score: float, threshold: float = PASSED) -> bool:
    """Whether an episode with that score passed."""
    return score >= threshold


def wilson(successes: float, of: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval for a rate. It holds also where ``successes`` is a sum of values from 0 to 1, since no such
    values are spread wider than zeros and ones of the same mean; it is then wider than it must be."""
    if of < 1 or not 0 <= successes <= of:
        raise Invalid(f"{successes:g} of {of} is no rate", hint="give as many successes as trials, or fewer")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, scale = successes / of, 1 + z * z / of
    middle = (rate + z * z / (2 * of)) / scale
    reach = z / scale * sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    low = 0.0 if successes == 0 else max(0.0, middle - reach)
    return min(low, rate), max(rate, 1.0 if successes == of else min(1.0, middle + reach))


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """The interval of a mean, from means of values that are drawn anew; the same for the same values and seed."""
    if not values:
        raise Invalid("there are no values")
    drawn = random.Random(seed)  # noqa: S311 - it has to be repeatable
    means = sorted(fmean(drawn.choices(values, k=len(values))) for _ in range(ROUNDS))
    cut = round((1 - confidence) / 2 * (ROUNDS - 1))
    mean = fmean(values)
    return min(means[cut], mean), max(means[-1 - cut], mean)


def paired(differences: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The interval of a mean difference between two scores of the same task. Where every difference is from -1 to 1 it
    is Agresti and Min's, for which one more task is thought of that half won and half lost: it is open also where all
    differences are the same. Otherwise the interval is drawn."""
    if any(abs(difference) > 1.0 for difference in differences):
        return bootstrap(differences, confidence)
    z, count = NormalDist().inv_cdf((1 + confidence) / 2), len(differences) + 2
    total, squares = sum(differences), sum(difference * difference for difference in differences) + 1.0
    middle, reach = total / count, z * sqrt(max(squares - total * total / count, 0.0)) / count
    mean = fmean(differences)
    return min(max(middle - reach, -1.0), mean), max(min(middle + reach, 1.0), mean)


def mean_score(scores: Scores) -> Estimate | None:
    """The mean over tasks of the mean of each. Where every score is from 0 to 1 it has Wilson's interval, which is open
    also where all are the same; otherwise the interval is drawn. None where nothing has a score."""
    valid = _valid(scores)
    if any(not 0.0 <= score <= 1.0 for samples in valid for score in samples):
        return _estimate([fmean(samples) for samples in valid], len(scores), bootstrap)
    return _rate([fmean(samples) for samples in valid], len(scores))


def pass_rate(scores: Scores, threshold: float = PASSED) -> Estimate | None:
    """The mean over tasks of the share of samples that passed, with Wilson's interval over tasks."""
    return pass_at(scores, 1, threshold)


def pass_at(scores: Scores, k: int, threshold: float = PASSED) -> Estimate | None:
    """pass@k: how likely at least one of ``k`` samples of a task passes, without bias also from more than ``k``.
    Tasks with fewer scored samples are left out and counted; None where all are."""
    return _drawn(scores, k, threshold, lambda n, c: (comb(n, k) - comb(n - c, k)) / comb(n, k))


def pass_all(scores: Scores, k: int, threshold: float = PASSED) -> Estimate | None:
    """pass^k: how likely all of ``k`` samples of a task pass. Otherwise as ``pass_at``."""
    return _drawn(scores, k, threshold, lambda n, c: comb(c, k) / comb(n, k))


def _drawn(scores: Scores, k: int, threshold: float, chance: Callable[[int, int], float]) -> Estimate | None:
    if k < 1:
        raise Invalid(f"k is {k}", hint="give a number of samples from 1 on")
    enough = [samples for samples in _valid(scores) if len(samples) >= k]
    values = [chance(len(samples), sum(passed(score, threshold) for score in samples)) for samples in enough]
    return _rate(values, len(scores))


def _valid(scores: Scores) -> list[list[float]]:
    kept = [[score for score in samples if score is not None] for samples in scores]
    return [samples for samples in kept if samples]


def _rate(values: Sequence[float], of: int) -> Estimate | None:
    return _estimate(values, of, lambda found: wilson(min(sum(found), len(found)), len(found)))


def _estimate(values: Sequence[float], of: int, interval: Callable[[Sequence[float]], Interval]) -> Estimate | None:
    if not values:
        return None
    low, high = interval(values)
    return Estimate(value=fmean(values), low=low, high=high, tasks=len(values), left_out=of - len(values))
