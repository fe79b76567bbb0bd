"""Intervals, corrections and numbers of seeds, against scipy's own tests, published values and simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from mixnorm_lab.reports.model import statistics
from mixnorm_lab.tables import Difference


@pytest.mark.parametrize(("n", "base_n"), [(2, 2), (3, 5), (8, 8), (2, 9)])
def test_the_interval_is_welchs(n, base_n):
    generator = np.random.default_rng(n + base_n)
    ours, base = generator.normal(1, 2, n), generator.normal(0, 0.5, base_n)
    found = statistics.difference(ours.tolist(), base.tolist())
    expected = stats.ttest_ind(ours, base, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)
    assert found.mean == pytest.approx(ours.mean() - base.mean())
    assert (found.n, found.base_n) == (n, base_n)


@pytest.mark.parametrize(("ours", "base"), [([1.0], [0.0, 0.1]), ([1.0, 1.1], [0.0]), ([1.0, 1.0], [0.5, 0.5])])
def test_too_few_seeds_or_none_that_differ_have_no_interval(ours, base):
    found = statistics.difference(ours, base)
    assert found.mean is not None
    assert (found.low, found.high, found.p) == (None, None, None)
    assert not found.sure


def test_a_run_without_the_number_leaves_no_mean():
    found = statistics.difference([1.0, None, 1.2], [0.0, 0.1])
    assert found.mean is None
    assert (found.n, found.of) == (2, 3)


def test_fewer_steps_are_of_geometric_means():
    found = statistics.fewer([100, 400], [200, 800])
    assert found.mean == pytest.approx(50)  # 200 instead of 400
    interval = stats.ttest_ind(np.log([100, 400]), np.log([200, 800]), equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(
        (100 - 100 * math.exp(interval.high), 100 - 100 * math.exp(interval.low))
    )
    assert statistics.fewer([400, 400], [100, 100]).mean == pytest.approx(-300)


def test_holms_correction_by_hand():
    """Of four, the smallest p must be below 0.05 / 4, the next below 0.05 / 3, and so on until one is not."""
    of = [Difference(1.0, 0.1, 2.0, p) for p in (0.016, 0.03, 0.012, 0.001)]
    assert [found.sure for found in statistics.holm(of)] == [True, True, True, True]
    of = [Difference(1.0, 0.1, 2.0, p) for p in (0.03, 0.026, 0.012, 0.001)]
    assert [found.sure for found in statistics.holm(of)] == [False, False, True, True]
    of = [Difference(1.0, 0.1, 2.0, p) for p in (0.013, 0.001, 0.01, 0.02)]
    assert [found.sure for found in statistics.holm([*of, Difference(1.0)])] == [True, True, True, True, False]


def test_chance_is_taken_for_a_difference_as_seldom_as_it_says():
    """Five comparisons that differ by nothing: in one table of twenty at most is one of them sure."""
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        tables = [
            statistics.difference(generator.normal(size=3).tolist(), generator.normal(size=5).tolist()) for _ in range(5)
        ]
        wrong += any(found.sure for found in statistics.holm(tables))
    assert wrong / 400 < 0.07


@pytest.mark.parametrize(("size", "seeds"), [(1.0, 17), (0.5, 64), (2.0, 6)])
def test_the_seeds_that_a_difference_takes_are_the_published_ones(size, seeds):
    """Of a difference of one deviation 17, of a half 64 (Cohen, 1988), two-sided 5% and four times out of five."""
    sample = np.array([-1.0, 1.0] * 500)
    assert statistics.seeds_needed(size, (sample / sample.std(ddof=1)).tolist()) == seeds


def test_few_seeds_are_taken_to_know_their_spread_badly():
    """Two seeds of each norm with a deviation of one, where 17 are needed: four times out of five no fewer are asked for."""
    generator = np.random.default_rng(1)
    enough = 0
    for _ in range(200):
        found = statistics.seeds_needed(1.0, generator.normal(size=2).tolist(), generator.normal(size=2).tolist())
        enough += found is None or found >= 17
    assert 0.72 < enough / 200 < 0.88


def test_nothing_to_judge_a_spread_by():
    assert statistics.seeds_needed(1.0, [0.5], [0.7]) is None
    assert statistics.seeds_needed(1.0, [0.5, 0.5], [0.7]) is None
    assert statistics.seeds_needed(0.0, [0.5, 0.6], [0.7]) is None
