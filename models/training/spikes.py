"""Detection of loss spikes: limits on a step's loss and gradient norm, computed from the training log before the step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median

Limits = tuple[float, float]  # largest loss, largest gradient norm
NO_LIMITS: Limits = (sys.float_info.max, sys.float_info.max)  # any finite number


def spike_limits(log: Sequence[Mapping[str, float]], window: int, limit: float) -> Limits:
    """Return the loss and gradient norm above which the next step is a spike.

    A limit is the median over the last `window` steps that were not skipped, plus `limit` standard deviations. The deviation is estimated
    from the median absolute deviation, which an accepted spike hardly widens, and is at least 1 % of the median. Before there are `window`
    steps that were not skipped, or if `window` is 0, no finite value is a spike.
    """
    recent: list[Mapping[str, float]] = []
    for row in reversed(log if window else ()):
        if not row["skipped"]:
            recent.append(row)
        if len(recent) == window:
            break
    if not window or len(recent) < window:
        return NO_LIMITS
    return _bound([r["loss"] for r in recent], limit), _bound([r["gradient_norm"] for r in recent], limit)


def _bound(values: list[float], limit: float) -> float:
    middle = median(values)
    # For a normal distribution, this factor turns the median absolute deviation into the standard deviation.
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return middle + limit * max(deviation, 0.01 * abs(middle))
