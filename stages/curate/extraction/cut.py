"""Where to cut between what a page is about and the rest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit


@njit(cache=True)
def best_cut(p: NDArray[np.float32], words: NDArray[np.float64]) -> tuple[NDArray[np.int64], int, float]:
    """Blocks by falling probability, how many of them to keep for the highest expected F1 of words, and that F1.

    For a kept set the expectation is taken as 2 * (expected right words) / (kept words + expected content words).
    """
    order = np.argsort(-p, kind="mergesort")
    content = 0.0
    for b in range(len(p)):
        content += p[b] * words[b]
    right = kept = highest = 0.0
    count = 0
    for k in range(len(order)):
        right += p[order[k]] * words[order[k]]
        kept += words[order[k]]
        f1 = 2 * right / (kept + content)
        if f1 >= highest:
            highest, count = f1, k + 1
    return order, count, highest
