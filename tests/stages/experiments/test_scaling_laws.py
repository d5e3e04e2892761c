"""Scaling laws fitted to data from known laws, compared with these laws and with other optimizers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from puna.stages.training import scaling_laws
from puna.stages.training.intervals import student
from puna.stages.training.scaling_laws import Points, Power, Surfaces

# Hoffmann et al. 2022, table A3: E, A, alpha, B, beta.
CHINCHILLA = Surfaces(*(np.array([value]) for value in (1.69, 406.4, 0.34, 410.7, 0.28, 1.0)))
SIZES = np.repeat([2e7, 4e7, 8e7, 1.6e8], 4)
TOKENS = SIZES * np.tile([10.0, 20.0, 40.0, 80.0], 4)


def points(losses: np.ndarray) -> Points:
    return Points(SIZES, TOKENS, 6 * SIZES * TOKENS, losses)


def test_surface_is_recovered() -> None:
    losses = CHINCHILLA(SIZES, TOKENS)
    fit = scaling_laws.fit_surfaces(SIZES, TOKENS, losses)
    assert fit.floor[0] == pytest.approx(1.69, abs=0.02)
    assert fit.parameter_exponent[0] == pytest.approx(0.34, abs=0.01) and fit.token_exponent[0] == pytest.approx(0.28, abs=0.01)
    assert float(fit([1e9], [2e10])[0, 0]) == pytest.approx(1.69 + 406.4 / 1e9**0.34 + 410.7 / 2e10**0.28, rel=1e-3)
    with pytest.raises(ValueError, match="at least 6 points, not 5"):
        scaling_laws.fit_surfaces(SIZES[:5], TOKENS[:5], losses[:, :5])


def kaplan(n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Return equation 1.5 of Kaplan et al. 2020 with a token exponent of .1: its joint exponent is the same, its irreducible loss 0."""
    return np.asarray(((8.8e13 / n) ** (0.076 / 0.1) + 5.4e13 / d) ** 0.1)


def test_the_law_of_the_scarcer_is_told_from_the_law_of_both() -> None:
    fit = scaling_laws.fit_surfaces(SIZES, TOKENS, kaplan(SIZES, TOKENS)[None])
    assert fit.joint[0] == 0.1 and scaling_laws.fit_surfaces(SIZES, TOKENS, CHINCHILLA(SIZES, TOKENS)).joint[0] == 1
    further = np.array([1e9]), np.array([2e10])
    assert float(fit(*further)[0, 0]) == pytest.approx(float(kaplan(*further)[0]), rel=1e-3)
    both = scaling_laws.fit_surfaces(SIZES, TOKENS, kaplan(SIZES, TOKENS)[None], joints=(1.0,))
    assert float(both(*further)[0, 0]) > float(kaplan(*further)[0]) * 1.005


@pytest.mark.parametrize("joint", [1.0, 0.1])
def test_surface_fits_no_worse_than_scipy(joint: float) -> None:
    """The same sum of Huber losses, started from the true parameters."""
    clean = CHINCHILLA(SIZES, TOKENS)[0] if joint == 1 else kaplan(SIZES, TOKENS)
    losses = clean * np.exp(np.random.default_rng(3).normal(0, 0.004, len(SIZES)))

    def cost(theta: np.ndarray) -> float:
        e, a, b, alpha, beta = theta
        terms = np.exp((a - alpha * np.log(SIZES)) / joint) + np.exp((b - beta * np.log(TOKENS)) / joint)
        size = np.abs(np.log(np.exp(e) + terms**joint) - np.log(losses)) / scaling_laws.HUBER
        return float(np.where(size < 1, size**2 / 2, size - 0.5).sum())

    truth = {1.0: (1.69, 406.4, 410.7, 0.34, 0.28), 0.1: (0.01, 8.8e13**0.076, 5.4e13**0.1, 0.076, 0.1)}[joint]
    other = minimize(cost, np.array([*np.log(truth[:3]), *truth[3:]]), method="Nelder-Mead", options={"maxiter": 4000})
    fit = scaling_laws.fit_surfaces(SIZES, TOKENS, losses[None], joints=(joint,))
    own = [np.log(fit.floor[0]), np.log(fit.parameter_scale[0]), np.log(fit.token_scale[0]), fit.parameter_exponent[0], fit.token_exponent[0]]
    assert cost(np.array(own)) <= other.fun * 1.003


def test_forecast_holds_every_interval_of_its_union() -> None:
    losses = CHINCHILLA(SIZES, TOKENS)[0] * np.exp(np.random.default_rng(1).normal(0, 0.003, len(SIZES)))
    fit = scaling_laws.forecaster(points(losses), 100, np.random.default_rng(0))
    n, d = 4e8, 1.6e10
    value, low, high = fit.at(n, d, 6 * n * d)
    assert value == pytest.approx(float(CHINCHILLA([n], [d])[0, 0]), rel=0.02)
    _, inner, outer = fit.statistical(n, d)
    assert fit.dropped is not None and low <= inner <= value <= outer <= high
    assert low <= float(fit.dropped([n], [d])[0, 0]) <= high
    # The highest budget is forecast from the lower ones, and the error grows with the logarithm of the distance.
    test = fit.backtests[-1]
    assert test.below < test.flops <= fit.points.flops.max()
    distance = np.log(6 * n * d / fit.points.flops.max()) / np.log(test.flops / test.below)
    error = abs(np.log(test.predicted / test.measured)) * distance
    assert low <= value * np.exp(-error) * (1 + 1e-9) and value * np.exp(error) <= high * (1 + 1e-9)
    again = scaling_laws.forecaster(points(losses), 100, np.random.default_rng(0)).at(n, d, 6 * n * d)
    assert again == (value, low, high)


def test_the_noise_of_seeds_is_that_of_whole_trunks() -> None:
    """Two shapes, one with two seeds that differ by .02 in the logarithm and one with three: the variances .02^2 / 2 and .02^2 are pooled
    with 1 and 2 degrees of freedom."""
    n, d = np.repeat([1e8, 1e8, 2e8, 2e8, 2e8], 2), np.tile([1e9, 2e9], 5)
    d[9] = 8e9  # the last seed has only one point in common with the others
    seeds, shift = np.repeat([0, 1, 0, 2, 3], 2), np.repeat([0.01, -0.01, 0.02, -0.02, 0], 2)
    own = Points(n, d, 6 * n * d, CHINCHILLA(n, d)[0] * np.exp(shift), seeds)
    assert len(set(own.trunks.tolist())) == 5 and (own.trunks[::2] == own.trunks[1::2]).all()
    expected = np.sqrt((0.02**2 / 2 + 2 * 0.02**2) / 3) * student(3) / 1.959964
    assert own.seed_noise() == pytest.approx(expected, rel=1e-6)
    assert own[seeds == 0].seed_noise() == Points(n, d, 6 * n * d, own.loss).seed_noise() == 0
    # A law through all its points has no residuals: its interval comes only from the noise of seeds, including that of one more run.
    exact = Points(n, d, 6 * n * d, CHINCHILLA(n, d)[0], seeds)
    noisy, still = (scaling_laws.forecaster(some, 200, np.random.default_rng(0)).statistical(4e8, 4e9) for some in (own, exact))
    assert still[2] / still[1] - 1 < 1e-3 < 2 * expected < np.log(noisy[2] / noisy[1])


def test_further_seeds_are_no_further_points() -> None:
    """Two shapes with three points have three seeds each; a third shape determines the surface's third direction."""
    n, d = np.repeat([1e8, 2e8], 9), np.repeat([1e9, 2e9, 4e9, 2e9, 4e9, 8e9], 3) * np.tile([0.999, 1, 1.001], 6)
    two = Points(n, d, 6 * n * d, CHINCHILLA(n, d)[0], np.tile([0, 1, 2], 6))
    assert not two.enough and Points(SIZES[:9], TOKENS[:9], 6 * SIZES[:9] * TOKENS[:9], TOKENS[:9]).enough
    # One more budget, with a third shape: two shapes alone forecast nothing.
    n, d = np.append(n, 4e8), np.append(d, 1e11)
    fit = scaling_laws.forecaster(Points(n, d, 6 * n * d, CHINCHILLA(n, d)[0], np.append(two.seeds, 0)), 100, np.random.default_rng(0))
    assert fit.backtests == ()


def test_parabolas_have_their_minimum_at_the_best_size() -> None:
    # Every shape reaches every budget: an IsoFLOP design.
    budgets, sizes = np.array([1e19, 3e19]), np.array([1e8, 2e8, 4e8, 8e8])
    n = np.tile(sizes, 2)
    c = np.repeat(budgets, 4)
    found = scaling_laws.parabolas(Points(n, c / (6 * n), c, CHINCHILLA(n, c / (6 * n))[0]))
    assert [line.flops for line in found] == pytest.approx(budgets)
    for line in found:
        assert line.best is not None
        # The minimum of E + A / N^a + B / D^b on 6 N D = C: a A / N^a = b B / D^b.
        best = (0.34 * 406.4 / (0.28 * 410.7)) ** (1 / 0.62) * (line.flops / 6) ** (0.28 / 0.62)
        assert line.best[0] == pytest.approx(best, rel=0.2)


def test_published_growth_of_tokens() -> None:
    """Llama 3, section 3.2.1: the pair (.537, .299) gives 16.3 trillion tokens at 3.8e25 operations; (.53, .29) would give 10.5."""
    assert Power(0.299, 0.537)(3.8e25) == pytest.approx(16.3e12, rel=0.01)
    fit = scaling_laws.fit_power([1e18, 1e20, 1e22], [0.299 * c**0.537 for c in (1e18, 1e20, 1e22)])
    assert (fit.factor, fit.exponent) == pytest.approx((0.299, 0.537))


def test_one_rule_scales_rows_and_rate_with_the_size() -> None:
    """Between two tuned sizes and beyond them: a hundred times the parameters have four times the rows and half the rate."""
    tuned = ([1e4, 1e6], [2, 8], [0.02, 0.01])
    assert scaling_laws.rows_and_rate(*tuned, 1e5) == (4, pytest.approx(0.02 / 2**0.5))
    assert scaling_laws.rows_and_rate(*tuned, 1e8) == (32, pytest.approx(0.005))
    assert scaling_laws.rows_and_rate(*tuned, 1.0) == (1, pytest.approx(0.08))  # never less than a row


def test_accuracy_is_a_sigmoid_of_likelihood() -> None:
    nll = np.linspace(0.5, 3.0, 8)
    truth = scaling_laws.Sigmoid(0.25, 2.0, -3.0)
    assert truth(1.5) == pytest.approx(0.25 + 0.75 / 2)
    fit = scaling_laws.fit_sigmoid(nll, truth(nll), 0.25)
    assert (fit.slope, fit.level) == pytest.approx((2.0, -3.0), rel=1e-3)
