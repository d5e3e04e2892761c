"""Calibration in multiple choice: a model's confidence in its answers, compared with the share of right answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BINS = 10


class Bin(NamedTuple):
    """A bin of questions with similar confidence: mean confidence, share of right answers, and number of questions."""

    confidence: float
    accuracy: float
    n: int


def confidence(likelihoods: Sequence[float]) -> float:
    """Return the probability of the likeliest option, normalized over all options, from log-likelihoods in nats."""
    return 1 / sum(math.exp(value - max(likelihoods)) for value in likelihoods)


def bins(confidences: Sequence[float], right: Sequence[float]) -> list[Bin]:
    """Return the non-empty bins of equal width from 0 to 1, in order of confidence. `right`: 1 for a right answer, else 0."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for sure, value in zip(confidences, right, strict=True):
        groups.setdefault(min(BINS - 1, int(sure * BINS)), []).append((sure, value))
    buckets = [groups[number] for number in sorted(groups)]
    return [Bin(sum(sure for sure, _ in own) / len(own), sum(value for _, value in own) / len(own), len(own)) for own in buckets]


def calibration_error(confidences: Sequence[float], right: Sequence[float]) -> float | None:
    """Return the expected calibration error, 0 to 1 (Guo et al. 2017), over bins weighted by question count; None without questions."""
    return sum(one.n * abs(one.confidence - one.accuracy) for one in bins(confidences, right)) / len(right) if confidences else None
