"""Numbers with how sure they are: against definitions, simulations and values that are known elsewhere."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import Invalid
from aenv.evals import statistics
from aenv.evals.statistics import Scores, bootstrap, mean_score, pass_all, pass_at, pass_rate, passed, wilson

shares = st.floats(0, 1)
samples = st.lists(st.none() | st.sampled_from([0.0, 0.25, 1.0]), max_size=7)
tables = st.lists(samples, max_size=8)


def test_what_passes() -> None:
    assert [passed(score) for score in (0.0, 0.999, 1.0, 1.5)] == [False, False, True, True]
    assert passed(0.5, 0.5)


@pytest.mark.parametrize(
    ("successes", "of", "low", "high"),
    [
        (0, 10, 0.0, 0.27753),
        (5, 10, 0.23659, 0.76341),
        (10, 10, 0.72247, 1.0),
        (1, 1, 0.20655, 1.0),
        (81, 263, 0.255, 0.366),
    ],
)
def test_wilson_as_in_tables(successes: int, of: int, low: float, high: float) -> None:
    assert wilson(successes, of) == pytest.approx((low, high), abs=1e-3)


@given(of=st.integers(1, 2000), share=shares)
def test_wilson_holds_the_rate_and_stays_within_bounds(of: int, share: float) -> None:
    low, high = wilson(share * of, of)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    narrow = wilson(share * of, of, 0.5)
    assert low <= narrow[0] + 1e-12
    assert narrow[1] <= high + 1e-12
    assert high - low < 1


@given(successes=st.integers(0, 20), of=st.integers(20, 40))
def test_wilson_is_the_same_from_the_other_side(successes: int, of: int) -> None:
    low, high = wilson(successes, of)
    assert wilson(of - successes, of) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("successes", "of"), [(0, 0), (2, 1), (-1, 3)])
def test_no_rate(successes: int, of: int) -> None:
    with pytest.raises(Invalid, match="is no rate"):
        wilson(successes, of)


@settings(max_examples=20)
@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=20), seed=st.integers(0, 5))
def test_a_drawn_interval_holds_the_mean_and_can_be_repeated(values: list[float], seed: int) -> None:
    low, high = bootstrap(values, seed=seed)
    assert bootstrap(values, seed=seed) == (low, high)
    assert min(values) - 1e-9 <= low <= fmean(values) <= high <= max(values) + 1e-9


def test_a_drawn_interval_is_as_wide_as_theory_says() -> None:
    values = [place / 199 for place in range(200)]
    low, high = bootstrap(values)
    reach = 1.96 * math.sqrt(sum((value - 0.5) ** 2 for value in values) / 200 / 200)
    assert (high - low) / 2 == pytest.approx(reach, rel=0.1)
    with pytest.raises(Invalid):
        bootstrap([])


def by_definition(scores: Scores, k: int, kind: Callable[[list[bool]], bool]) -> float | None:
    """Over every choice of k samples that have a score."""
    valid = [[score for score in task if score is not None] for task in scores]
    of_tasks = [
        fmean([float(kind([score >= 1.0 for score in some])) for some in combinations(task, k)])
        for task in valid
        if len(task) >= k
    ]
    return fmean(of_tasks) if of_tasks else None


@given(scores=tables, k=st.integers(1, 5))
def test_pass_at_k_and_pass_all_k_are_means_over_every_choice(scores: Scores, k: int) -> None:
    for found, kind in ((pass_at(scores, k), any), (pass_all(scores, k), all)):
        expected = by_definition(scores, k, kind)
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert found.value == pytest.approx(expected)
            assert 0 <= found.low <= found.value + 1e-12
            assert found.value - 1e-12 <= found.high <= 1
            assert found.tasks + found.left_out == len(scores)


@given(scores=tables)
def test_a_failed_sample_is_as_if_it_had_not_been_played(scores: list[list[float | None]]) -> None:
    without = [[score for score in task if score is not None] for task in scores]
    assert mean_score(scores) == mean_score(without)
    for k in (1, 2):
        assert pass_at(scores, k) == pass_at(without, k)
        assert pass_all(scores, k) == pass_all(without, k)


@given(scores=st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3), min_size=1, max_size=8))
def test_more_samples_help_one_and_hurt_the_other(scores: Scores) -> None:
    at, together = ([measure(scores, k) for k in (1, 2, 3)] for measure in (pass_at, pass_all))
    assert sorted(one.value for one in at if one) == [one.value for one in at if one]
    assert sorted((one.value for one in together if one), reverse=True) == [one.value for one in together if one]
    assert at[0] == together[0] == pass_rate(scores)


def test_a_mean_score_is_over_tasks_and_a_rate_where_all_are_zeros_and_ones() -> None:
    assert mean_score([]) is None
    assert mean_score([[None], []]) is None
    uneven = mean_score([[1.0], [0.0, 0.0, 0.0], [None]])
    assert uneven is not None
    assert (uneven.value, uneven.tasks, uneven.left_out) == (0.5, 2, 1)
    assert (uneven.low, uneven.high) == wilson(1, 2)
    finer = mean_score([[0.2, 0.4], [0.9]])
    assert finer is not None
    assert finer.value == pytest.approx(0.6)
    assert (finer.low, finer.high) == wilson(fmean([0.2, 0.4]) + 0.9, 2)
    nearly = mean_score([[1.0]] * 9 + [[0.99]])
    assert nearly is not None
    assert nearly.low < 0.8
    wider = mean_score([[2.0], [-1.0]])
    assert wider is not None
    assert (wider.low, wider.high) == bootstrap([2.0, -1.0])


def test_a_wrong_k_is_named() -> None:
    with pytest.raises(Invalid, match="k is 0"):
        statistics.pass_at([[1.0]], 0)


def test_the_interval_of_differences_is_open_also_where_all_are_alike_and_narrows_with_more_tasks() -> None:
    widths = []
    for count in (10, 100, 1000):
        low, high = statistics.paired([0.0] * count)
        assert low == -high < 0
        widths.append(high - low)
        low, high = statistics.paired([1.0] * count)
        assert low < high == 1.0
    assert widths == sorted(widths, reverse=True)
    assert statistics.paired([0.0] * 99 + [1.0])[0] < 0 < 0.01 < statistics.paired([0.0] * 99 + [1.0])[1]


def test_the_interval_of_differences_holds_as_often_as_it_says() -> None:
    draws = random.Random(3)
    held = 0
    for _ in range(1000):
        low, high = statistics.paired([draws.choices((-1.0, 0.0, 1.0), (0.1, 0.6, 0.3))[0] for _ in range(40)])
        held += low <= 0.2 <= high
    assert held >= 930


def test_differences_of_scores_beyond_one_have_a_drawn_interval() -> None:
    values = [5.0, -3.0, 2.0, 8.0]
    assert statistics.paired(values) == statistics.bootstrap(values)
