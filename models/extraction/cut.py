"""Cut between the topic of a page and the rest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

LEVELS = 128  # cuts that are tried, and states of the page that they are tried against
TOGETHER = 0.6  # weight of the view that a page's blocks are content or not all together


@njit(cache=True)
def best_cut(p: NDArray[np.float32], words: NDArray[np.float64]) -> tuple[float, float]:
    """Return the probability from which on blocks are kept, a multiple of 1 / LEVELS, for the highest expected F1 of words, and that F1.

    The expectation is a mean of two. Were blocks independent, it is near 2 * (expected right words) / (kept words +
    expected content words). But a page's cards are all content or all not: so also with content being the blocks above
    a level that is drawn evenly, the F1 of which with a cut is 2 * min / sum of the words above the two.
    """
    above, right = np.zeros(LEVELS + 1), np.zeros(LEVELS + 1)  # words, expected right words of blocks from a level on
    for b in range(len(p)):
        level = min(LEVELS - 1, int(p[b] * LEVELS))
        above[level] += words[b]
        right[level] += p[b] * words[b]
    for level in range(LEVELS - 1, -1, -1):
        above[level] += above[level + 1]
        right[level] += right[level + 1]
    highest, cut = 0.0, 0
    for level in range(LEVELS - 1, -1, -1):
        if above[level] == above[level + 1]:
            continue
        together = 0.0
        for drawn in range(LEVELS):
            if above[drawn] > 0:
                together += 2 * min(above[level], above[drawn]) / (above[level] + above[drawn])
        f1 = TOGETHER * together / LEVELS + (1 - TOGETHER) * 2 * right[level] / (above[level] + right[0])
        if f1 >= highest:
            highest, cut = f1, level
    return cut / LEVELS, highest
