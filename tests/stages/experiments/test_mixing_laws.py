"""Mixing laws fitted to data from known laws, compared with these laws, other optimizers and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
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
    # The law that the losses follow gets all the weight, the Gaussian process none.
    both = mixing_laws.fit_surrogate(shares, truth(shares))
    assert both.share < 0.01 and np.abs(both.left_out).max() < 2e-3


def test_mixing_law_of_a_loss_that_the_mixture_does_not_change() -> None:
    shares = mixing_laws.simplex_design(3, 8, 0.05, np.random.default_rng(0))
    law = mixing_laws.fit_mixing_law(shares, np.full(8, 2.5))
    assert law.floor == 0.0 and np.allclose(law(shares), 2.5)
    with pytest.raises(ValueError, match="at least 4 mixtures"):
        mixing_laws.fit_mixing_law(shares[:3], np.ones(3))
    with pytest.raises(ValueError, match="positive losses"):
        mixing_laws.fit_mixing_law(shares, np.zeros(8))


def test_left_out_error_shows_what_the_fit_hides() -> None:
    """With many parameters, a fit follows even a loss of pure noise; the error on left-out points reveals it."""
    generator = np.random.default_rng(5)
    shares = generator.dirichlet(np.ones(4), 7)
    loss = 2.0 + generator.normal(0, 0.1, 7)
    inside = np.abs(mixing_laws.fit_mixing_law(shares, loss)(shares) - loss).mean()
    assert np.abs(mixing_laws.fit_surrogate(shares, loss).left_out).mean() > 1.2 * inside


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), bounded=st.booleans())
@example(seed=1185, bounded=False)  # the best mixture lacks a category
def test_best_mixture_is_the_minimum(seed: int, bounded: bool) -> None:
    """Compared with scipy's constrained optimizer on the same convex objective."""
    generator = np.random.default_rng(seed)
    m = 4
    fitted = [mixing_laws.MixingLaw(1.0, generator.normal(0, 1, m) - 2.0 * np.eye(m)[i]) for i in range(m)]
    target = generator.dirichlet(np.ones(m))
    low, high = (np.full(m, 0.05), np.full(m, 0.6)) if bounded else (np.zeros(m), np.ones(m))

    def values(mixtures: np.ndarray) -> np.ndarray:
        return np.stack([law(mixtures) for law in fitted], 1) @ target

    shares = mixing_laws.best_mixture(values, low, high, np.array([np.full(m, 1 / m), target]))
    assert shares.sum() == pytest.approx(1.0) and (shares >= low - 1e-9).all() and (shares <= high + 1e-9).all()

    def value(r: np.ndarray) -> float:
        return float(sum(w * law(r) for w, law in zip(target, fitted, strict=True)))

    other = minimize(value, np.full(m, 1 / m), bounds=list(zip(low, high, strict=True)), method="SLSQP",
                     constraints=[{"type": "eq", "fun": lambda r: r.sum() - 1}])  # fmt: skip
    assert value(shares) <= other.fun + 1e-6


def test_process_sees_what_the_law_cannot() -> None:
    """A loss with its minimum inside the simplex is not a sum of a constant and an exponential."""
    generator = np.random.default_rng(0)
    shares = generator.dirichlet(np.ones(3), 30)

    def truth(r: np.ndarray) -> np.ndarray:
        return 2.0 + ((r - np.array([0.5, 0.3, 0.2])) ** 2).sum(-1)

    both = mixing_laws.fit_surrogate(shares, truth(shares))
    fresh = generator.dirichlet(np.ones(3), 50)
    assert both.share > 0.9
    assert np.abs(both(fresh) - truth(fresh)).mean() < 0.2 * np.abs(both.law(fresh) - truth(fresh)).mean()
    best = mixing_laws.best_mixture(both, np.zeros(3), np.ones(3), shares)
    assert best == pytest.approx([0.5, 0.3, 0.2], abs=0.05)


def test_process_is_that_of_a_plain_solve() -> None:
    """The posterior mean by its textbook formula, at the fitted length scale and some noise of the grid."""
    generator = np.random.default_rng(4)
    shares = generator.dirichlet(np.ones(3), 10)
    loss = 2.0 + shares[:, 0] + generator.normal(0, 0.05, 10)
    fit = mixing_laws.fit_gaussian(shares, loss)
    roots, new = np.sqrt(shares), np.sqrt(np.array([[0.2, 0.3, 0.5]]))

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * fit.length**2))

    means = [
        float((loss.mean() + kernel(new, roots) @ np.linalg.solve(kernel(roots, roots) + noise * np.eye(10), loss - loss.mean()))[0])
        for noise in mixing_laws.NOISES
    ]
    assert min(abs(mean - float(fit(np.array([0.2, 0.3, 0.5])))) for mean in means) < 1e-6


def test_divergence_by_hand() -> None:
    natural = np.array([0.5, 0.5])
    assert mixing_laws.divergence(np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]), natural) == pytest.approx(
        [0.0, np.log(2), 0.25 * np.log(0.5) + 0.75 * np.log(1.5)]
    )


def test_bounds_that_no_mixture_meets_are_refused() -> None:
    with pytest.raises(ValueError, match="no mixture lies within"):
        mixing_laws.best_mixture(lambda mixtures: mixtures[:, 0], [0.6, 0.6], [1, 1], np.array([[0.5, 0.5]]))


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
