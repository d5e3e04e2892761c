"""Laws of the mixture against those they were drawn from, other optimisers and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from puna.stages.training import mixing_laws


def test_mixing_law_is_recovered() -> None:
    generator = np.random.default_rng(1)
    shares = generator.dirichlet(np.ones(3), 12)
    truth = mixing_laws.MixingLaw(1.3, np.array([-0.5, 0.4, 0.6]))
    law = mixing_laws.fit_mixing_law(shares, truth(shares))
    fresh = generator.dirichlet(np.ones(3), 50)
    assert np.abs(law(fresh) - truth(fresh)).max() < 2e-3
    assert np.abs(mixing_laws.left_out_errors(shares, truth(shares))).max() < 2e-3


def test_mixing_law_of_a_loss_that_the_mixture_does_not_change() -> None:
    shares = mixing_laws.simplex_design(3, 8, 0.05, np.random.default_rng(0))
    law = mixing_laws.fit_mixing_law(shares, np.full(8, 2.5))
    assert law.floor == 0.0 and np.allclose(law(shares), 2.5)
    with pytest.raises(ValueError, match="at least 4 mixtures"):
        mixing_laws.fit_mixing_law(shares[:3], np.ones(3))
    with pytest.raises(ValueError, match="positive losses"):
        mixing_laws.fit_mixing_law(shares, np.zeros(8))


def test_left_out_error_shows_what_the_fit_hides() -> None:
    """A loss of pure noise is fitted closely by many numbers, and left-out points say so."""
    generator = np.random.default_rng(5)
    shares = generator.dirichlet(np.ones(4), 7)
    loss = 2.0 + generator.normal(0, 0.1, 7)
    inside = np.abs(mixing_laws.fit_mixing_law(shares, loss)(shares) - loss).mean()
    assert np.abs(mixing_laws.left_out_errors(shares, loss)).mean() > 2 * inside


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), bounded=st.booleans())
def test_best_mixture_is_the_minimum(seed: int, bounded: bool) -> None:
    """Against scipy's constrained optimiser, from the same convex objective."""
    generator = np.random.default_rng(seed)
    m = 4
    fitted = [mixing_laws.MixingLaw(1.0, generator.normal(0, 1, m) - 2.0 * np.eye(m)[i]) for i in range(m)]
    target = generator.dirichlet(np.ones(m))
    low, high = (np.full(m, 0.05), np.full(m, 0.6)) if bounded else (np.zeros(m), np.ones(m))
    shares = mixing_laws.best_mixture(fitted, target, low, high)
    assert shares.sum() == pytest.approx(1.0) and (shares >= low - 1e-9).all() and (shares <= high + 1e-9).all()

    def value(r: np.ndarray) -> float:
        return float(sum(w * law(r) for w, law in zip(target, fitted, strict=True)))

    other = minimize(value, np.full(m, 1 / m), bounds=list(zip(low, high, strict=True)), method="SLSQP",
                     constraints=[{"type": "eq", "fun": lambda r: r.sum() - 1}])  # fmt: skip
    assert value(shares) <= other.fun + 1e-6


def test_bounds_that_no_mixture_meets_are_refused() -> None:
    law = mixing_laws.MixingLaw(1.0, np.zeros(2))
    with pytest.raises(ValueError, match="no mixture lies within"):
        mixing_laws.best_mixture([law, law], [0.5, 0.5], [0.6, 0.6], [1, 1])


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-3, 3), min_size=2, max_size=6))
def test_projection_is_the_nearest_point(values: list[float]) -> None:
    point, m = np.array(values), len(values)
    low, high = np.full(m, 0.02), np.full(m, 0.9)
    near = mixing_laws.project(point, low, high)
    assert near.sum() == pytest.approx(1.0) and (near >= low - 1e-9).all() and (near <= high + 1e-9).all()
    generator = np.random.default_rng(0)
    for other in low + (1 - m * 0.02) * generator.dirichlet(np.ones(m), 200):
        if (other <= high).all():
            assert ((near - point) ** 2).sum() <= ((other - point) ** 2).sum() + 1e-7


def test_design_covers_the_simplex() -> None:
    design = mixing_laws.simplex_design(4, 12, 0.05, np.random.default_rng(2))
    assert design.shape == (12, 4) and np.allclose(design.sum(1), 1) and design.min() >= 0.05 - 1e-12
    assert len({tuple(row.round(6)) for row in design}) == 12
    assert np.allclose(design[:4].max(1), 0.85) and np.allclose(design[4], 0.25)
    assert np.array_equal(design, mixing_laws.simplex_design(4, 12, 0.05, np.random.default_rng(2)))
    with pytest.raises(ValueError, match="cannot all have"):
        mixing_laws.simplex_design(4, 12, 0.25, np.random.default_rng(2))
