"""Laws of the loss over the mixture of the data: two surrogates, weighed by how well each predicts mixtures that it was not fitted to.

The exponential law is linear in all but one number, so its fit is a search over that with a linear least-squares problem inside
(variable projection, Golub and Pereyra 1973): no starting point to choose and no iteration that can fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]



@dataclass(frozen=True)
class MixingLaw:
    """L(r) = floor + exp(slopes @ r) of one category's loss, r the shares of all categories.

    Data mixing laws (Ye et al. 2024, arXiv 2403.16952), where the law reads c + k exp(t @ r). Shares add up
    to one, so a constant added to all t is a factor on k: here k is inside the slopes.
    """

    floor: float
    slopes: Floats

    def __call__(self, shares: Floats) -> Floats:
        """Return losses [n] at mixtures [n, M] (or one loss at [M])."""
        return np.asarray(self.floor + np.exp(shares @ self.slopes), dtype=np.float64)


FLOORS = np.linspace(0.0, 0.98, 50)


def fit_mixing_law(shares: npt.ArrayLike, loss: npt.ArrayLike) -> MixingLaw:
    """Fit a law to losses [n] at mixtures [n, M]; it takes at least M + 1 mixtures.

    For a given floor the logarithm of the rest is linear in the shares; each point is weighed by the square
    of that rest, which makes an error in the logarithm one in the loss.
    """
    r, y = np.asarray(shares, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if r.ndim != 2 or len(r) != len(y) or len(r) < r.shape[1] + 1:
        raise ValueError(f"a mixing law over {r.shape[-1]} categories needs at least {r.shape[-1] + 1} mixtures, not {len(y)}")
    if y.min() <= 0:
        raise ValueError("a mixing law needs positive losses")
    best, found = np.inf, MixingLaw(0.0, np.zeros(r.shape[1]))
    for share in FLOORS:
        floor = float(share * y.min())
        rest = y - floor
        slopes = np.linalg.lstsq(r * rest[:, None], np.log(rest) * rest, rcond=None)[0]
        law = MixingLaw(floor, slopes.astype(np.float64))
        error = float(((law(r) - y) ** 2).sum())
        # A higher floor has to be better by more than rounding: losses that do not change keep it at 0.
        if error < best - 1e-12 * float(y @ y):
            best, found = error, law
    return found


def left_out_errors(shares: npt.ArrayLike, loss: npt.ArrayLike) -> Floats:
    """Return the leave-one-out errors [n]: the prediction of the law through all other mixtures less the measured loss."""
    r, y = np.asarray(shares, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    errors = np.empty(len(y))
    for i in range(len(y)):
        others = np.arange(len(y)) != i
        errors[i] = fit_mixing_law(r[others], y[others])(r[i]) - y[i]
    return errors


def best_mixture(laws: list[MixingLaw], target: npt.ArrayLike, least: npt.ArrayLike, most: npt.ArrayLike) -> Floats:
    """Return the shares in least..most that minimise sum_i target_i L_i(shares).

    Each law is convex in the shares, and so is their sum: projected gradient descent with a shrinking step
    finds the one minimum.
    """
    weights, low, high = (np.asarray(v, dtype=np.float64) for v in (target, least, most))
    if low.sum() > 1 + 1e-9 or high.sum() < 1 - 1e-9 or (low > high).any():
        raise ValueError(f"no mixture lies within the bounds: least adds up to {low.sum():.3f}, most to {high.sum():.3f}")

    def value(r: Floats) -> float:
        return float(sum(w * law(r) for w, law in zip(weights, laws, strict=True)))

    shares = project(np.full(len(laws), 1.0 / len(laws)), low, high)
    step, current = 1.0, value(shares)
    for _ in range(5000):
        slope: Any = sum(w * np.exp(shares @ law.slopes) * law.slopes for w, law in zip(weights, laws, strict=True))
        moved = project(shares - step * slope, low, high)
        reached = value(moved)
        if reached < current:
            if current - reached < 1e-14:
                break
            shares, current, step = moved, reached, step * 1.5
        else:
            step *= 0.5
            if step < 1e-12:
                break
    return shares


def project(point: Floats, low: Floats, high: Floats) -> Floats:
    """Return the nearest point of the simplex slice {low <= r <= high, sum r = 1}: a shift, by bisection."""
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

    First the M mixtures that lean to one category each and the even one, then, one after the other, the
    candidate farthest from all chosen so far (a maximin design).
    """
    if not 0 <= least * categories < 1:
        raise ValueError(f"{categories} categories cannot all have a share of at least {least}")
    room = 1 - least * categories
    chosen = [*(least + room * np.eye(categories)), np.full(categories, 1.0 / categories)]
    candidates = least + room * generator.dirichlet(np.ones(categories), 2000)
    while len(chosen) < points:
        distances = np.min([((candidates - mixture) ** 2).sum(1) for mixture in chosen], axis=0)
        chosen.append(candidates[int(distances.argmax())])
    return np.asarray(chosen[:points], dtype=np.float64)
