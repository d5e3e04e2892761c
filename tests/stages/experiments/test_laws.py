"""Fits against laws they were drawn from, other optimisers and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import curve_fit, minimize

from puna.stages.training import scaling_laws


def test_power_law_is_recovered() -> None:
    compute = np.geomspace(1e12, 1e15, 6)
    law = scaling_laws.fit_power_law(compute, 1.7 + 400.0 * compute**-0.2)
    for x in (1e12, 1e15, 1e18):
        assert float(law(x)) == pytest.approx(1.7 + 400.0 * x**-0.2, rel=2e-3)
    assert law.floor == pytest.approx(1.7, abs=0.05)


def test_power_law_fits_no_worse_than_scipy() -> None:
    generator = np.random.default_rng(0)
    x = np.geomspace(1.0, 300.0, 8)
    for _ in range(5):
        y = 2.0 + 3.0 * x**-0.4 + generator.normal(0, 0.02, 8)
        law = scaling_laws.fit_power_law(x, y)
        ours = float(((law(x) - y) ** 2).sum())
        best, _ = curve_fit(lambda v, e, a, b: e + a * v**-b, x, y, p0=[2, 3, 0.4], bounds=([0, 0, 0.01], [10, 50, 2]))
        theirs = float(((best[0] + best[1] * x ** -best[2] - y) ** 2).sum())
        assert ours <= theirs * 1.001


def test_power_law_never_rises_or_goes_below_zero() -> None:
    x = np.geomspace(1.0, 100.0, 5)
    rising = scaling_laws.fit_power_law(x, np.array([1.0, 1.1, 1.2, 1.3, 1.4]))
    assert rising.scale == 0.0 and rising.floor == pytest.approx(1.2)
    straight = scaling_laws.fit_power_law(x, 5.0 * x**-0.5)
    assert straight.floor >= 0.0 and float(straight(1e6)) == pytest.approx(5e-3, rel=0.05)
    with pytest.raises(ValueError, match="at least 3 points"):
        scaling_laws.fit_power_law([1.0, 2.0], [1.0, 1.0])


def test_interval_covers_the_truth() -> None:
    """Drawn again and again, the interval must hold a further run about 19 times in 20: few points, so 0.8 at least."""
    x, target = np.geomspace(1.0, 30.0, 6), 300.0
    held = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        y = 2.0 + 2.0 * x**-0.3 + generator.normal(0, 0.01, len(x))
        value, low, high = scaling_laws.predict(x, y, target, 100, generator)
        assert low <= high and np.isfinite(value)
        held += low <= 2.0 + 2.0 * target**-0.3 + generator.normal(0, 0.01) <= high
    assert held >= 32, held


def test_interval_is_seeded() -> None:
    x = np.geomspace(1.0, 30.0, 6)
    y = 2.0 + x**-0.3 + 0.01 * np.cos(np.arange(6))
    first = scaling_laws.predict(x, y, 100.0, 50, np.random.default_rng(3))
    assert first == scaling_laws.predict(x, y, 100.0, 50, np.random.default_rng(3))


def test_mixing_law_is_recovered() -> None:
    generator = np.random.default_rng(1)
    shares = generator.dirichlet(np.ones(3), 12)
    truth = scaling_laws.MixingLaw(1.3, np.array([-0.5, 0.4, 0.6]))
    law = scaling_laws.fit_mixing_law(shares, truth(shares))
    fresh = generator.dirichlet(np.ones(3), 50)
    assert np.abs(law(fresh) - truth(fresh)).max() < 2e-3
    assert np.abs(scaling_laws.left_out_errors(shares, truth(shares))).max() < 2e-3


def test_mixing_law_of_a_loss_that_the_mixture_does_not_change() -> None:
    shares = scaling_laws.simplex_design(3, 8, 0.05, np.random.default_rng(0))
    law = scaling_laws.fit_mixing_law(shares, np.full(8, 2.5))
    assert law.floor == 0.0 and np.allclose(law(shares), 2.5)
    with pytest.raises(ValueError, match="at least 4 mixtures"):
        scaling_laws.fit_mixing_law(shares[:3], np.ones(3))
    with pytest.raises(ValueError, match="positive losses"):
        scaling_laws.fit_mixing_law(shares, np.zeros(8))


def test_left_out_error_shows_what_the_fit_hides() -> None:
    """A loss of pure noise is fitted closely by many numbers, and left-out points say so."""
    generator = np.random.default_rng(5)
    shares = generator.dirichlet(np.ones(4), 7)
    loss = 2.0 + generator.normal(0, 0.1, 7)
    inside = np.abs(scaling_laws.fit_mixing_law(shares, loss)(shares) - loss).mean()
    assert np.abs(scaling_laws.left_out_errors(shares, loss)).mean() > 2 * inside


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), bounded=st.booleans())
def test_best_mixture_is_the_minimum(seed: int, bounded: bool) -> None:
    """Against scipy's constrained optimiser, from the same convex objective."""
    generator = np.random.default_rng(seed)
    m = 4
    fitted = [scaling_laws.MixingLaw(1.0, generator.normal(0, 1, m) - 2.0 * np.eye(m)[i]) for i in range(m)]
    target = generator.dirichlet(np.ones(m))
    low, high = (np.full(m, 0.05), np.full(m, 0.6)) if bounded else (np.zeros(m), np.ones(m))
    shares = scaling_laws.best_mixture(fitted, target, low, high)
    assert shares.sum() == pytest.approx(1.0) and (shares >= low - 1e-9).all() and (shares <= high + 1e-9).all()

    def value(r: np.ndarray) -> float:
        return float(sum(w * law(r) for w, law in zip(target, fitted, strict=True)))

    other = minimize(value, np.full(m, 1 / m), bounds=list(zip(low, high, strict=True)), method="SLSQP",
                     constraints=[{"type": "eq", "fun": lambda r: r.sum() - 1}])  # fmt: skip
    assert value(shares) <= other.fun + 1e-6


def test_bounds_that_no_mixture_meets_are_refused() -> None:
    law = scaling_laws.MixingLaw(1.0, np.zeros(2))
    with pytest.raises(ValueError, match="no mixture lies within"):
        scaling_laws.best_mixture([law, law], [0.5, 0.5], [0.6, 0.6], [1, 1])


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-3, 3), min_size=2, max_size=6))
def test_projection_is_the_nearest_point(values: list[float]) -> None:
    point, m = np.array(values), len(values)
    low, high = np.full(m, 0.02), np.full(m, 0.9)
    near = scaling_laws.project(point, low, high)
    assert near.sum() == pytest.approx(1.0) and (near >= low - 1e-9).all() and (near <= high + 1e-9).all()
    generator = np.random.default_rng(0)
    for other in low + (1 - m * 0.02) * generator.dirichlet(np.ones(m), 200):
        if (other <= high).all():
            assert ((near - point) ** 2).sum() <= ((other - point) ** 2).sum() + 1e-7


def test_design_covers_the_simplex() -> None:
    design = scaling_laws.simplex_design(4, 12, 0.05, np.random.default_rng(2))
    assert design.shape == (12, 4) and np.allclose(design.sum(1), 1) and design.min() >= 0.05 - 1e-12
    assert len({tuple(row.round(6)) for row in design}) == 12
    assert np.allclose(design[:4].max(1), 0.85) and np.allclose(design[4], 0.25)
    assert np.array_equal(design, scaling_laws.simplex_design(4, 12, 0.05, np.random.default_rng(2)))
    with pytest.raises(ValueError, match="cannot all have"):
        scaling_laws.simplex_design(4, 12, 0.25, np.random.default_rng(2))
