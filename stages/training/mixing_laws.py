"""Loss as a function of the data mixture: two surrogates, weighted by their errors on mixtures left out of their fit.

For a given floor, the logarithm of the loss above the floor is linear in the slopes. So the fit searches over the floor and solves a linear
least-squares problem for the slopes (variable projection, Golub and Pereyra 1973); it needs no starting point and cannot diverge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MixingLaw:
    """The law of one category's loss: L(r) = floor + exp(slopes @ r), where r are the shares of all categories.

    This is a data mixing law (Ye et al. 2024, arXiv 2403.16952), written there as c + k exp(t @ r). Since shares add up to one, k can be
    included in the slopes: log k is added to each t."""

    floor: float
    slopes: Floats

    def __call__(self, shares: Floats) -> Floats:
        """Return losses [n] at mixtures [n, M] (or one loss at [M])."""
        return np.asarray(self.floor + np.exp(shares @ self.slopes), dtype=np.float64)


FLOORS = np.linspace(0.0, 0.98, 50)


def fit_mixing_law(shares: npt.ArrayLike, loss: npt.ArrayLike) -> MixingLaw:
    """Return the law fitted to losses [n] at mixtures [n, M]. Raise ValueError for fewer than M + 1 mixtures or a loss of 0 or less.

    A squared error of the logarithm is weighted by the square of the loss above the floor, which turns it into an error of the loss."""
    r, y = np.asarray(shares, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if r.ndim != 2 or len(r) != len(y) or len(r) < r.shape[1] + 1:
        raise ValueError(f"a mixing law over {r.shape[-1]} categories needs at least {r.shape[-1] + 1} mixtures, not {len(y)}")
    if y.min() <= 0:
        raise ValueError("a mixing law needs positive losses")
    best, fit = np.inf, MixingLaw(0.0, np.zeros(r.shape[1]))
    for share in FLOORS:
        floor = float(share * y.min())
        rest = y - floor
        slopes = np.linalg.lstsq(r * rest[:, None], np.log(rest) * rest, rcond=None)[0]
        law = MixingLaw(floor, slopes.astype(np.float64))
        error = float(((law(r) - y) ** 2).sum())
        # A higher floor must be better by more than rounding error: if all losses are equal, the floor stays 0.
        if error < best - 1e-12 * float(y @ y):
            best, fit = error, law
    return fit


def best_mixture(value: Callable[[Floats], Floats], least: npt.ArrayLike, most: npt.ArrayLike, starts: Floats) -> Floats:
    """Return the shares between `least` and `most` [M] with the lowest value found; `value` maps mixtures [n, M] to [n], in nats.

    Projected gradient descent with an adaptive step starts from the three best of `starts` [S, M], since a Gaussian process may have
    several minima. Raise ValueError if no mixture lies within the bounds."""
    low, high = np.asarray(least, dtype=np.float64), np.asarray(most, dtype=np.float64)
    if low.sum() > 1 + 1e-9 or high.sum() < 1 - 1e-9 or (low > high).any():
        raise ValueError(f"no mixture lies within the bounds: least adds up to {low.sum():.3f}, most to {high.sum():.3f}")
    within = np.array([project(start, low, high) for start in starts])
    ends = [_descend(value, start, low, high) for start in within[np.argsort(value(within))[:3]]]
    return ends[int(np.argmin(value(np.array(ends))))]


def _descend(value: Callable[[Floats], Floats], shares: Floats, low: Floats, high: Floats) -> Floats:
    shift = 1e-6 * np.eye(len(shares))
    step, current = 1.0, float(value(shares[None])[0])
    for _ in range(2000):
        below = np.minimum(shares, 1e-6)  # a share of 0 has no lower neighbour
        slope = (value(shares + shift) - value(shares - np.diag(below))) / (1e-6 + below)
        moved = project(shares - step * slope, low, high)
        reached = float(value(moved[None])[0])
        if reached < current:
            if current - reached < 1e-12:
                break
            shares, current, step = moved, reached, step * 1.5
        else:
            step *= 0.5
            if step < 1e-10:
                break
    return shares


def project(point: Floats, low: Floats, high: Floats) -> Floats:
    """Return the point of {low <= r <= high, sum r = 1} nearest to `point`: `point` plus a constant (by bisection), clipped."""
    below, above = float((low - point).min()), float((high - point).max())
    for _ in range(100):
        middle = (below + above) / 2
        if np.clip(point + middle, low, high).sum() < 1:
            below = middle
        else:
            above = middle
    shares = np.clip(point + above, low, high)
    return np.asarray(shares / shares.sum(), dtype=np.float64)


def simplex_design(categories: int, points: int, least: float, generator: np.random.Generator) -> Floats:
    """Return mixtures [points, M] that cover the simplex with every share at least `least`.

    The first M + 1 are the corners, each of which favours one category, and the uniform mixture. Each further mixture is the random
    candidate farthest from the mixtures chosen so far (a maximin design). Raise ValueError if M shares of `least` leave no room."""
    if not 0 <= least * categories < 1:
        raise ValueError(f"{categories} categories cannot all have a share of at least {least}")
    room = 1 - least * categories
    mixtures = [*(least + room * np.eye(categories)), np.full(categories, 1.0 / categories)]
    candidates = least + room * generator.dirichlet(np.ones(categories), 2000)
    while len(mixtures) < points:
        distances = np.min([((candidates - mixture) ** 2).sum(1) for mixture in mixtures], axis=0)
        mixtures.append(candidates[int(distances.argmax())])
    return np.asarray(mixtures[:points], dtype=np.float64)


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian process over the square roots of the shares, which lie on a sphere: its mean, kernel length, data points and weights.

    The kernel is variance * exp(-|x - y|^2 / (2 length^2)), plus noise."""

    mean: float
    length: float
    points: Floats
    weights: Floats

    def __call__(self, shares: Floats) -> Floats:
        """Return losses [n] at mixtures [n, M] (or one loss at [M])."""
        kernel = _kernel(np.sqrt(np.atleast_2d(shares)), self.points, self.length)
        return np.asarray(self.mean + kernel @ self.weights).reshape(shares.shape[:-1])


LENGTHS, NOISES = np.geomspace(0.1, 3.0, 12), np.geomspace(1e-4, 1.0, 9)


def _kernel(a: Floats, b: Floats, length: float) -> Floats:
    return np.asarray(np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * length**2)))


def fit_gaussian(shares: npt.ArrayLike, loss: npt.ArrayLike) -> Gaussian:
    """Return the process with the highest marginal likelihood of losses [n] at mixtures [n, M]. Length and noise are searched for on a
    grid; the best variance is computed."""
    x, y = np.sqrt(np.asarray(shares, dtype=np.float64)), np.asarray(loss, dtype=np.float64)
    mean, n = float(y.mean()), len(y)
    best, fit = np.inf, Gaussian(mean, 1.0, x, np.zeros(n))
    if np.ptp(y) == 0:
        return fit
    for length in LENGTHS:
        values, vectors = np.linalg.eigh(_kernel(x, x, float(length)))
        turned = vectors.T @ (y - mean)
        for noise in NOISES:
            scale = np.maximum(values, 0) + noise
            cost = n * np.log((turned**2 / scale).mean()) + np.log(scale).sum()
            if cost < best:
                best, fit = cost, Gaussian(mean, float(length), x, vectors @ (turned / scale))
    return fit


@dataclass(frozen=True)
class Surrogate:
    """The weighted mean of an exponential law and a Gaussian process. `share`: the process's weight; `left_out`: see `fit_surrogate`."""

    law: MixingLaw
    process: Gaussian
    share: float
    left_out: Floats

    def __call__(self, shares: Floats) -> Floats:
        """Return losses [n] at mixtures [n, M] (or one loss at [M])."""
        return np.asarray((1 - self.share) * self.law(shares) + self.share * self.process(shares), dtype=np.float64)


def fit_surrogate(shares: npt.ArrayLike, loss: npt.ArrayLike) -> Surrogate:
    """Return both laws fitted to n >= M + 2 losses at mixtures [n, M], weighted by the inverse of their mean squared leave-one-out errors.

    `left_out` [n] of the result: the weighted mean's prediction of each loss from all other mixtures, minus the measured loss."""
    r, y = np.asarray(shares, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    errors = np.empty((2, len(y)))
    for i in range(len(y)):
        others = np.arange(len(y)) != i
        errors[:, i] = [float(fit(r[others], y[others])(r[i])) - y[i] for fit in (fit_mixing_law, fit_gaussian)]
    squares = (errors**2).mean(1)
    share = float(squares[0] / squares.sum()) if squares.sum() > 0 else 0.0
    return Surrogate(fit_mixing_law(r, y), fit_gaussian(r, y), share, (1 - share) * errors[0] + share * errors[1])


def divergence(mixtures: Floats, natural: Floats) -> Floats:
    """Return the Kullback-Leibler divergence [n] of mixtures [n, M] from the mixture `natural` [M], in nats."""
    return np.asarray((mixtures * np.log(np.maximum(mixtures, 1e-12) / natural)).sum(-1))
