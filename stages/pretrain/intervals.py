"""95 % intervals of the numbers an evaluation reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % point."""


class Interval(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """A share of successes with Wilson's score interval (Wilson 1927).

    It stays inside 0 to 1 and is honest at both ends, where the normal interval has no width at all.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"wilson needs 0 <= successes <= trials and a trial, not {successes} of {trials}")
    share, squared = successes / trials, Z95 * Z95
    centre = (share + squared / (2 * trials)) / (1 + squared / trials)
    half = Z95 / (1 + squared / trials) * math.sqrt(share * (1 - share) / trials + squared / (4 * trials**2))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(share, low, high)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """sum(numerators) / sum(denominators) over sampled units, for example bits over bytes of documents.

    The interval is the linearised one of a ratio estimator (Cochran 1977, section 6.4): the deviations
    numerator - ratio * denominator carry the error. A single unit has no interval: low and high are its value.
    """
    total, n = math.fsum(denominators), len(denominators)
    if n != len(numerators) or total <= 0:
        raise ValueError(f"ratio needs as many numerators as denominators, of a positive sum; got {len(numerators)} and {n}")
    value = math.fsum(numerators) / total
    if n == 1:
        return Interval(value, value, value)
    squares = math.fsum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    half = Z95 * math.sqrt(n / (n - 1) * squares) / total
    return Interval(value, value - half, value + half)


def mean(values: Sequence[float]) -> Interval:
    """A mean with its normal interval."""
    return ratio(values, [1.0] * len(values))
