"""95 % confidence intervals for evaluation results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Z95 = 1.959963984540054  # the standard normal distribution's 97.5 % quantile


@lru_cache(maxsize=4096)
def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with `freedom` degrees of freedom (1 or more, else ValueError).

    Up to 100 degrees, it is found by bisection on the exact distribution (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4); above, by the
    expansion around the normal distribution's quantile (26.7.5), which is accurate to 9 digits there."""
    if freedom < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, not {freedom}")
    if freedom > 100:
        z = Z95
        terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
        return z + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def within(angle: float, freedom: int) -> float:
    """Return P(|t| < sqrt(freedom) tan(angle)) for Student's t with `freedom` degrees of freedom."""
    cosine = math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd and freedom > 1 else 0.0 if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


class Interval(NamedTuple):
    """A value with the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def evaluation_row(task: str, metric: str, value: Interval | float, n: int) -> dict[str, Any]:
    """Return a row of the evaluation table. `n`: number of measurements; a plain number has no interval."""
    number, low, high = value if isinstance(value, Interval) else (float(value), None, None)
    return {"task": task, "metric": metric, "value": number, "low": low, "high": high, "n": n}


def wilson(successes: int, trials: int) -> Interval:
    """Return a share of successes with Wilson's score interval (Wilson 1927). Raise ValueError without trials.

    The interval stays inside 0 to 1. At shares of 0 and 1, it has a width, unlike the normal interval."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"wilson needs 0 <= successes <= trials and a trial, not {successes} of {trials}")
    share, squared = successes / trials, Z95 * Z95
    centre = (share + squared / (2 * trials)) / (1 + squared / trials)
    half = Z95 / (1 + squared / trials) * math.sqrt(share * (1 - share) / trials + squared / (4 * trials**2))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(share, low, high)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return sum(numerators) / sum(denominators) over sampled units, for example bits over bytes of documents.

    The interval follows from the linearised ratio estimator (Cochran 1977, section 6.4): from the deviations numerator - ratio x
    denominator and Student's t with n - 1 degrees of freedom. For a single unit, low and high are its ratio. Raise ValueError unless the
    denominators add up to more than 0."""
    total, n = math.fsum(denominators), len(denominators)
    if n != len(numerators) or total <= 0:
        raise ValueError(f"ratio needs as many numerators as denominators, and a positive sum; got {len(numerators)} and {n}")
    value = math.fsum(numerators) / total
    if n == 1:
        return Interval(value, value, value)
    squares = math.fsum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    half = student(n - 1) * math.sqrt(n / (n - 1) * squares) / total
    return Interval(value, value - half, value + half)


def mean(values: Sequence[float]) -> Interval:
    """Return the mean of `values` (at least one) with the interval of Student's t (1908); see `ratio`."""
    return ratio(values, [1.0] * len(values))


def paired_difference(one: Mapping[str, float], other: Mapping[str, float]) -> Interval:
    """Return the mean difference one - other over the common items, with Student's interval. Raise ValueError if there are none."""
    both = sorted(set(one) & set(other))
    if not both:
        raise ValueError("paired_difference needs items that are in both mappings")
    return mean([one[item] - other[item] for item in both])
