"""Intervals compared with published values, other formulas and simulated coverage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from puna.stages.training import intervals


@given(trials=st.integers(1, 400), share=st.floats(0, 1))
def test_wilson_is_scipys(trials: int, share: float) -> None:
    successes = round(share * trials)
    other = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert intervals.wilson(successes, trials) == pytest.approx((successes / trials, other.low, other.high), abs=1e-12)


def test_wilson_by_hand() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611.
    assert intervals.wilson(81, 263)[1:] == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert intervals.wilson(0, 20)[1:] == pytest.approx((0.0, 0.1611), abs=5e-5)
    for wrong in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="wilson needs"):
            intervals.wilson(*wrong)


def test_ratio_of_sums_and_not_mean_of_ratios() -> None:
    assert intervals.ratio([10.0, 100.0], [10.0, 50.0]).value == pytest.approx(110 / 60)
    # Equal ratios: the error is 0, whatever the sizes.
    same = intervals.ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert same == pytest.approx((2.0, 2.0, 2.0))
    assert intervals.ratio([3.0], [2.0]) == (1.5, 1.5, 1.5)
    with pytest.raises(ValueError, match="positive sum"):
        intervals.ratio([], [])


def test_ratio_interval_against_the_bootstrap() -> None:
    generator = np.random.default_rng(0)
    bytes_ = generator.lognormal(7, 1, 300)
    bits = bytes_ * generator.normal(2.3, 0.4, 300)
    found = intervals.ratio(bits.tolist(), bytes_.tolist())
    draws = generator.integers(0, 300, (4000, 300))
    low, high = np.quantile(bits[draws].sum(1) / bytes_[draws].sum(1), [0.025, 0.975])
    assert found.high - found.low == pytest.approx(high - low, rel=0.1)


def test_students_t_is_scipys() -> None:
    for freedom in [*range(1, 60), 100, 1000, 10**6]:
        assert intervals.student(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=1e-7)
    with pytest.raises(ValueError, match="at least one degree"):
        intervals.student(0)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_interval_of_few_values_holds_the_mean_as_often_as_it_says(n: int) -> None:
    draws = np.random.default_rng(n).normal(5.0, 2.0, (4000, n))
    held = [low <= 5.0 <= high for _, low, high in (intervals.mean(row.tolist()) for row in draws)]
    # Four standard errors of a share of 0.95 in 4000 draws. With the normal quantile it is 0.70 for two values, 0.81 for three.
    assert np.mean(held) == pytest.approx(0.95, abs=0.014)


def test_mean_by_hand() -> None:
    # Standard deviation 1 (n - 1), 3 values: 4.3027 / sqrt(3).
    assert intervals.mean([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
