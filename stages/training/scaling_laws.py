"""Scaling laws fitted to small runs: a loss surface over parameters and tokens, IsoFLOP parabolas, and accuracy from likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from puna.stages.training.intervals import Z95, student

Floats = npt.NDArray[np.float64]
HUBER = 1e-3  # residual of the log loss above which a point's weight decreases (Hoffmann et al. 2022, appendix D.3)
BUDGET = 1.5  # minimum ratio of two budgets in FLOPs; points whose FLOPs differ less may count as one budget
JOINTS = (1.0, 0.1)
"""Values of `joint` to try: 1 if parameters and tokens limit the loss independently, 0.1 if only the scarcer one does (Kaplan: .095)."""
FEWEST, SHAPES = 6, 3
"""Minimum numbers of points and of shapes for fitting a surface's five parameters. Additional seeds of a point do not count."""


@dataclass(frozen=True)
class Surfaces:
    """M laws L(N, D) = E + ((A / N^alpha)^(1/joint) + (B / D^beta)^(1/joint))^joint, in nats per token; each field is [M].

    With `joint` 1, this is the law of Hoffmann et al. 2022, in which tokens help any model equally. Near 0, tokens help less if there are
    few parameters, as in the law of Kaplan et al. 2020."""

    floor: Floats
    parameter_scale: Floats
    parameter_exponent: Floats
    token_scale: Floats
    token_exponent: Floats
    joint: Floats

    def __call__(self, parameters: npt.ArrayLike, tokens: npt.ArrayLike) -> Floats:
        """Return the losses [M, n] at parameters [n] and tokens [n]."""
        n, d = (np.log(np.asarray(values, dtype=np.float64))[None, :] for values in (parameters, tokens))
        a, b = (np.log(np.maximum(scale, 1e-300))[:, None] for scale in (self.parameter_scale, self.token_scale))
        alpha, beta, joint = (exponent[:, None] for exponent in (self.parameter_exponent, self.token_exponent, self.joint))
        return np.asarray(self.floor[:, None] + np.exp(joint * np.logaddexp((a - alpha * n) / joint, (b - beta * d) / joint)))


def fit_surfaces(parameters: npt.ArrayLike, tokens: npt.ArrayLike, losses: Floats, joints: Sequence[float] = JOINTS) -> Surfaces:
    """Return M surfaces fitted to losses [M, n] at parameters [n] and tokens [n]; all have the value of `joints` that fits losses[0] best.

    The sum of Huber losses of the log errors (Hoffmann et al. 2022) is minimized by IRLS with Levenberg-Marquardt steps: first losses[0]
    from many starts, then all rows from its solution and two of these starts. Raise ValueError if there are fewer than six points."""
    n, d = (np.log(np.asarray(values, dtype=np.float64)) for values in (parameters, tokens))
    y = np.log(losses)
    if len(n) < FEWEST:
        raise ValueError(f"a surface needs at least {FEWEST} points, not {len(n)}")
    centre, middle = n.mean(), d.mean()
    fits = {}
    for joint in joints:
        starts = _starts(float(y.mean()), joint)
        solutions, costs = _descend(starts, joint, n - centre, d - middle, np.repeat(y[:1], len(starts), 0))
        fits[joint] = float(costs.min()), np.concatenate([solutions[[np.argmin(costs)]], starts[[0, len(starts) // 2]]])
    joint = min(joints, key=lambda joint: fits[joint][0])
    # losses[0] is fitted from every start. All rows, which differ little from it, start from its solution and two other points.
    best, lowest = np.zeros((len(y), 5)), np.full(len(y), np.inf)
    for start in fits[joint][1]:
        solutions, costs = _descend(np.repeat(start[None], len(y), 0), joint, n - centre, d - middle, y)
        better = costs < lowest
        best[better], lowest[better] = solutions[better], costs[better]
    e, a, b, alpha, beta = np.concatenate([best[:, :3], np.exp(best[:, 3:])], 1).T
    return Surfaces(np.exp(e), np.exp(a + alpha * centre), alpha, np.exp(b + beta * middle), beta, np.full(len(y), joint))


EXPONENTS = (0.05, 0.5)
"""Bounds of both exponents (published: .08 to .4). Without them, few points may fit steep powers over a high floor, which forecast
badly."""


def _starts(level: float, joint: float) -> Floats:
    """Return starting points of the fit [S, 5]: logarithms of E, A and B (relative to the points' mean size) and of the exponents."""
    shares = ((0.2, 0.4, 0.4), (0.5, 0.25, 0.25), (0.8, 0.1, 0.1), (0.4, 0.5, 0.1), (0.4, 0.1, 0.5))
    exponents = (0.12, 0.25, 0.45)
    # Two equal terms add up to 2^joint times one of them.
    scales = (1.0, 2 ** (1 - joint), 2 ** (1 - joint))
    rows = [
        [*(level + math.log(share * scale) for share, scale in zip(some, scales, strict=True)), math.log(a), math.log(b)]
        for some, a, b in product(shares, exponents, exponents)
    ]
    return np.array(rows)


def _descend(theta: Floats, joint: float, n: Floats, d: Floats, y: Floats, steps: int = 60) -> tuple[Floats, Floats]:
    """Return fitted rows [M, 5] and their costs [M], from starts [M, 5]."""
    theta, damping = theta.copy(), np.full(len(theta), 1e-2)
    residual, slopes = _model(theta, joint, n, d, y)
    cost = _huber(residual)
    for _ in range(steps):
        weight = 1 / np.maximum(np.abs(residual) / HUBER, 1.0)
        gradient = np.einsum("mnp,mn->mp", slopes, weight * residual)
        curvature = np.einsum("mnp,mn,mnq->mpq", slopes, weight, slopes)
        ridge = damping[:, None] * np.einsum("mpp->mp", curvature) + 1e-12
        step = np.linalg.solve(curvature + ridge[:, :, None] * np.eye(5), -gradient[:, :, None])[:, :, 0]
        moved = theta + np.clip(step, -1, 1)
        moved[:, 3:] = np.clip(moved[:, 3:], *np.log(EXPONENTS))
        other, others = _model(moved, joint, n, d, y)
        reached = _huber(other)
        better = reached < cost
        theta[better], residual[better], slopes[better], cost[better] = moved[better], other[better], others[better], reached[better]
        damping = np.where(better, damping * 0.3, damping * 5).clip(1e-9, 1e9)
    return theta, cost


def _model(theta: Floats, joint: float, n: Floats, d: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the errors of the log loss [M, n], and their derivatives [M, n, 5]."""
    alpha, beta = np.exp(theta[:, 3:4]), np.exp(theta[:, 4:5])
    by_parameters, by_tokens = theta[:, 1:2] - alpha * n, theta[:, 2:3] - beta * d
    both = joint * np.logaddexp(by_parameters / joint, by_tokens / joint)
    total = np.logaddexp(theta[:, :1], both)
    a, b = (np.exp(both - total + (term - both) / joint) for term in (by_parameters, by_tokens))
    return total - y, np.stack([np.exp(theta[:, :1] - total), a, b, -alpha * n * a, -beta * d * b], -1)


def _huber(residual: Floats) -> Floats:
    size = np.abs(residual) / HUBER
    return np.asarray(np.where(size < 1, size**2 / 2, size - 0.5).sum(1))


@dataclass(frozen=True)
class Points:
    """Measured points of a ladder; each field is [n]: parameters (output layer included), tokens, FLOPs, loss in nats per token, and the
    trunk's seed (None: the same seed for all)."""

    parameters: Floats
    tokens: Floats
    flops: Floats
    loss: Floats
    seeds: npt.NDArray[np.int64] | None = None

    def __getitem__(self, rows: npt.NDArray[np.bool_]) -> Points:
        seeds = None if self.seeds is None else self.seeds[rows]
        return Points(self.parameters[rows], self.tokens[rows], self.flops[rows], self.loss[rows], seeds)

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def budgets(self) -> npt.NDArray[np.int64]:
        """Return the number of each point's budget, [n]: 0 for the highest, and one less per factor of 1.5 in FLOPs."""
        return np.asarray(-np.floor(np.log(self.flops.max() / self.flops) / math.log(BUDGET) + 1e-9), dtype=np.int64)

    @property
    def enough(self) -> bool:
        """True if there are enough points to determine a surface: at least six different points, with three numbers of parameters."""
        # Rounded, because token counts differ slightly between a point's seeds.
        different = {(n, round(2 * math.log2(d / n))) for n, d in zip(self.parameters, self.tokens, strict=True)}
        return len(different) >= FEWEST and len({n for n, _ in different}) >= SHAPES

    @property
    def trunks(self) -> npt.NDArray[np.int64]:
        """Return the index of each point's trunk, [n]. A trunk is all runs of one shape and seed, which share a random error."""
        seeds = np.zeros(len(self)) if self.seeds is None else self.seeds
        return np.unique(np.stack([self.parameters, seeds]), axis=1, return_inverse=True)[1]

    def seed_noise(self) -> float:
        """Return the pooled standard deviation of log losses over a shape's seeds, widened by Student's t; 0 if no shape has two."""
        trunks, squares, free = self.trunks, 0.0, 0
        for size in np.unique(self.parameters):
            own = [self[trunks == trunk] for trunk in np.unique(trunks[self.parameters == size])]
            # Token counts that every seed reached, up to small differences.
            near = [np.abs(np.log(points.tokens[:, None] / own[0].tokens)) < 0.1 for points in own]
            shared = np.all([mask.any(0) for mask in near], axis=0)
            if len(own) > 1 and shared.any():
                means = [np.log(points.loss[mask[:, shared].any(1)]).mean() for points, mask in zip(own, near, strict=True)]
                squares, free = squares + float(np.var(means)) * len(own), free + len(own) - 1
        return math.sqrt(squares / free) * student(free) / Z95 if free else 0.0


@dataclass(frozen=True)
class Backtest:
    """A measured budget, forecast from lower points: its mean FLOPs, the highest FLOPs below it, the predicted and the measured loss."""

    flops: float
    below: float
    predicted: float
    measured: float

    @property
    def slope(self) -> float:
        """Return |log(predicted / measured)| per unit of log FLOPs between this budget and the nearest below (at least log `BUDGET`)."""
        # With a smaller distance, the slope would be mostly noise.
        return abs(math.log(self.predicted / self.measured)) / max(math.log(self.flops / self.below), math.log(BUDGET))


@dataclass(frozen=True)
class Forecaster:
    """The surface fitted to all points, and the bootstrap draws and backtests that give its error."""

    points: Points
    surface: Surfaces
    draws: Surfaces
    noise: Floats
    dropped: Surfaces | None
    backtests: tuple[Backtest, ...]

    def statistical(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Return a run's predicted loss and its 95 % interval from bootstrapped residuals and seeds, if the surface's form is right."""
        value = float(self.surface([parameters], [tokens])[0, 0])
        samples = self.draws([parameters], [tokens])[:, 0] * np.exp(self.noise)
        low, high = np.quantile(samples, [0.025, 0.975])
        return value, float(low), float(high)

    def at(self, parameters: float, tokens: float, flops: float) -> tuple[float, float, float]:
        """Return the forecast (loss, low, high) of a run.

        The interval covers the bootstrap's interval, the forecast without the lowest budget, and the largest error of the backtests, which
        grows in proportion to the distance in log FLOPs from the largest run."""
        value, low, high = self.statistical(parameters, tokens)
        ends = [low, high]
        if self.dropped is not None:
            ends.append(float(self.dropped([parameters], [tokens])[0, 0]))
        if self.backtests:
            distance = max(0.0, math.log(flops / self.points.flops.max()))
            error = max(test.slope for test in self.backtests) * distance
            ends += [value * math.exp(-error), value * math.exp(error)]
        return value, min(ends), max(ends)


def forecaster(points: Points, draws: int, generator: np.random.Generator) -> Forecaster:
    """Return the forecaster of `points`: surfaces of all points, `draws` bootstraps and all but the lowest budget, and the backtests."""
    n, d = points.parameters, points.tokens
    surface = fit_surfaces(n, d, points.loss[None])
    fitted = surface(n, d)[0]
    residuals = np.log(points.loss / fitted)
    # Residuals are widened for the five fitted parameters, and by Student's t.
    free = max(len(points) - 5, 1)
    residuals = (residuals - residuals.mean()) * math.sqrt(len(points) / free) * student(free) / Z95
    errors, chance = generator.choice(residuals, (draws, len(points))), generator.choice(residuals, draws)
    if noise := points.seed_noise():
        trunks = points.trunks
        errors = errors + generator.normal(0, noise, (draws, trunks.max() + 1))[:, trunks]
        chance = chance + generator.normal(0, noise, draws)
    bootstraps = fit_surfaces(n, d, fitted * np.exp(errors))
    budgets = points.budgets
    larger = points[budgets > budgets.min()]
    dropped = fit_surfaces(larger.parameters, larger.tokens, larger.loss[None]) if larger.enough else None
    backtests = tuple(_backtest(points, budgets, budget) for budget in np.unique(budgets) if points[budgets < budget].enough)
    return Forecaster(points, surface, bootstraps, chance, dropped, backtests)


def _backtest(points: Points, budgets: npt.NDArray[np.int64], budget: int) -> Backtest:
    below, own = points[budgets < budget], points[budgets == budget]
    predicted = fit_surfaces(below.parameters, below.tokens, below.loss[None])(own.parameters, own.tokens)[0]
    means = [math.exp(float(np.log(values).mean())) for values in (own.flops, predicted, own.loss)]
    return Backtest(means[0], float(below.flops.max()), means[1], means[2])


@dataclass(frozen=True)
class Power:
    """The power law factor * x ** exponent."""

    factor: float
    exponent: float

    def __call__(self, x: float) -> float:
        return float(self.factor * x**self.exponent)


def fit_power(x: npt.ArrayLike, y: npt.ArrayLike) -> Power:
    """Return the power law fitted to at least two points by a least-squares line through their logarithms."""
    exponent, level = np.polyfit(np.log(np.asarray(x, dtype=np.float64)), np.log(np.asarray(y, dtype=np.float64)), 1)
    return Power(math.exp(float(level)), float(exponent))


def rows_and_rate(sizes: npt.ArrayLike, rows: npt.ArrayLike, rates: npt.ArrayLike, size: float) -> tuple[int, float]:
    """Return rows per step and learning rate for a model with `size` parameters, by power laws through `rows` and `rates` at `sizes`. The
    ladder and the runs that it predicts share this rule."""
    many, rate = (fit_power(sizes, values)(size) for values in (rows, rates))
    return max(1, round(many)), rate


@dataclass(frozen=True)
class Parabola:
    """A parabola of the loss over the logarithm of the parameters at one budget: points [k], coefficients, and the minimum."""

    flops: float
    parameters: Floats
    losses: Floats
    coefficients: Floats

    @property
    def best(self) -> tuple[float, float] | None:
        """Return the parameter count and the loss at the minimum; None if the parabola has no minimum within the range of its points."""
        a, b, _ = self.coefficients
        if a <= 0:
            return None
        at = -b / (2 * a)
        inside = math.log(self.parameters.min()) <= at <= math.log(self.parameters.max())
        return (math.exp(at), float(np.polyval(self.coefficients, at))) if inside else None


def parabolas(points: Points) -> list[Parabola]:
    """Return IsoFLOP parabolas at budgets of points, a factor of 1.4 or more apart, that three or more shapes reach (Llama 3, 3.2.1).

    A shape's log loss is interpolated linearly in log FLOPs between its points, and constant for 9 % beyond its ends."""
    lines: list[Parabola] = []
    trunks = [points[points.parameters == size] for size in np.unique(points.parameters)]
    for level in np.sort(points.flops)[::-1]:
        if lines and level * 1.4 > lines[-1].flops:
            continue
        reach = [trunk for trunk in trunks if trunk.flops.min() / 1.09 <= level <= trunk.flops.max() * 1.09]
        if len(reach) >= 3:
            sizes = np.array([trunk.parameters[0] for trunk in reach])
            lines_of = [(np.log(trunk.flops), np.log(trunk.loss), np.argsort(trunk.flops)) for trunk in reach]
            losses = np.exp([np.interp(math.log(level), x[order], y[order]) for x, y, order in lines_of])
            lines.append(Parabola(float(level), sizes, losses, np.polyfit(np.log(sizes), losses, 2)))
    return lines[::-1]


@dataclass(frozen=True)
class Sigmoid:
    """A law of accuracy: chance + (1 - chance) / (1 + exp(slope * nll + level)), with nll in nats per token."""

    chance: float
    slope: float
    level: float

    def __call__(self, nll: npt.ArrayLike) -> Floats:
        x = np.asarray(nll, dtype=np.float64)
        return np.asarray(self.chance + (1 - self.chance) / (1 + np.exp(np.clip(self.slope * x + self.level, -500, 500))))


def fit_sigmoid(nll: npt.ArrayLike, accuracy: npt.ArrayLike, chance: float) -> Sigmoid:
    """Return the law of accuracy given the right option's `nll`: logistic regression of the share above chance, by IRLS."""
    x = np.asarray(nll, dtype=np.float64)
    share = np.clip((np.asarray(accuracy, dtype=np.float64) - chance) / (1 - chance), 1e-4, 1 - 1e-4)
    design = np.stack([x, np.ones_like(x)], 1)
    line = np.linalg.lstsq(design, np.log(1 / share - 1), rcond=None)[0]
    for _ in range(50):
        p = 1 / (1 + np.exp(np.clip(design @ line, -500, 500)))
        weight = np.maximum(p * (1 - p), 1e-9)
        line = np.linalg.lstsq(design * np.sqrt(weight)[:, None], (design @ line - (share - p) / weight) * np.sqrt(weight), rcond=None)[0]
    return Sigmoid(chance, float(line[0]), float(line[1]))
