"""Axes of plots: positions of values, and ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from puna.flows.html.markup import short

# Words for quantities that grow by factors: their axis is logarithmic if the values span at least one decade.
GROWING = ("flop", "operations", "parameters", "compute", "log")
POINTS = 240
COUNTED = 6  # an axis of whole numbers with a smaller range has ticks only at whole numbers
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Point = tuple[float | str, float]


@dataclass(frozen=True)
class Axis:
    """A mapping of values to the span `start` to `stop` of the view box. `names`: words as values. `whole`: ticks only at whole numbers."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    names: tuple[str, ...] = ()
    whole: bool = False

    @classmethod
    def of_numbers(cls, values: Sequence[float], start: float, stop: float, label: str = "", *, zero: bool = False) -> Axis:
        """Return an axis that covers all values, widened to round numbers, or logarithmic (see `GROWING`). `zero`: include 0."""
        low, high = min(values), max(values)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0) or (0.0 if low < 0 else 1.0)
        log = low > 0 and high >= 10 * low and any(word in label.lower() for word in GROWING)
        if log:
            return cls(10 ** (math.log10(low) - 0.05), 10 ** (math.log10(high) + 0.05), start, stop, True)
        if low == high:
            low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
        step = _step(high - low)
        return cls(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, stop)

    @classmethod
    def tight(cls, values: Sequence[float], start: float, stop: float, label: str = "") -> Axis:
        """Return an axis from the smallest to the largest value; wider if it is logarithmic or all values are equal."""
        wide = cls.of_numbers(values, start, stop, label)
        if wide.log or min(values) == max(values):
            return wide
        few = max(values) - min(values) < COUNTED and all(v == int(v) for v in values)
        return cls(min(values), max(values), start, stop, whole=few)

    def at(self, value: float | str) -> float:
        number = float(self.names.index(value)) if isinstance(value, str) else float(value)
        low, high = self.low, self.high
        if self.log:
            number, low, high = math.log10(number), math.log10(low), math.log10(high)
        return self.start + (number - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        if self.names:
            return [(self.at(name), name) for name in self.names]
        if self.log:
            return [(self.at(v), _power(v)) for v in _decades(self.low, self.high)]
        step = _step(self.high - self.low, count)
        if self.whole:
            step = max(1.0, math.ceil(step))
        first = math.ceil(self.low / step - 1e-9)
        values = [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(self.at(v), _format(v, step)) for v in values]


def _step(span: float, count: int = 5) -> float:
    """Return the smallest step of 1, 2, 2.5 or 5 times a power of ten that gives at most `count` steps."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if raw <= m * power * 1.0001)


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = math.log10(high / low) < 2.5
    values = [m * 10.0**p for p in powers for m in ((1, 2, 5) if fine else (1,))]
    inside = [v for v in values if low <= v <= high]
    return inside[:: math.ceil(len(inside) / 6)] if inside else inside


def _power(value: float) -> str:
    """Return the label of a tick on a logarithmic axis: 500, 2·10⁶, 10¹²."""
    if 1e-2 <= value < 1e5:
        return short(value)
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = round(value / 10.0**exponent)
    raised = f"10{str(exponent).translate(RAISED)}"
    return raised if factor == 1 else f"{factor}·{raised}"


def _format(value: float, step: float) -> str:
    if abs(value) < step / 1000:
        return "0"
    if abs(value) >= 10_000:
        return short(value)
    if step < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    decimals = max(0, math.ceil(-math.log10(step) - 1e-9))
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1
    return f"{value:,.{decimals}f}"


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most about `POINTS` points that keep the shape: the lowest and highest of each interval, the first and the last."""
    if len(points) <= POINTS:
        return list(points)
    stretch = -(-2 * len(points) // POINTS)
    indices: dict[int, None] = {0: None}
    for start in range(0, len(points), stretch):
        span = range(start, min(start + stretch, len(points)))
        ends = min(span, key=lambda i: points[i][1]), max(span, key=lambda i: points[i][1])
        indices.update(dict.fromkeys(sorted(ends)))
    indices[len(points) - 1] = None
    return [points[i] for i in sorted(indices)]


def is_curve(points: Sequence[Point]) -> bool:
    """True if the points sample a function: many, and evenly spaced in x or log x."""
    places = [float(x) for x, _ in points if not isinstance(x, str)]
    if len(places) < 20 or len(places) < len(points):
        return False
    for values in (places, [math.log(v) for v in places] if min(places) > 0 else []):
        steps = [b - a for a, b in itertools.pairwise(values)]
        if steps and min(steps) > 0 and max(steps) - min(steps) < 1e-3 * max(steps):
            return True
    return False
