"""Blocks that are alike: those of one path are judged together, those of one text are taken once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.features import text_keys
from puna.models.extraction.groups import group_sums, numbered
from puna.models.extraction.layout import Scan

PULL = np.float32(0.35)  # of the way to the mean of the blocks with the same path
COPIED_WORDS = 5  # shorter texts may stand on a page again and again


@njit(cache=True)
def agreed(page: Scan, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return Logits [blocks], each drawn towards the mean of the blocks with the same tags and classes up to the root.

    Titles of cards, messages of a thread, cells of a column are content all or none; words weigh by their root.
    """
    blocks = page.blocks
    n = len(blocks)
    paths, sums = np.empty(n, np.uint64), np.empty((n, 2), np.float32)
    for b in range(n):
        paths[b] = page.signs[blocks[b, L.ELEMENT], 1]
        sums[b, 1] = np.sqrt(blocks[b, L.WORDS]) + 0.01
        sums[b, 0] = scores[b] * sums[b, 1]
    sums = group_sums(paths, sums)
    out = np.empty(n, np.float32)
    for b in range(n):
        out[b] = scores[b] + PULL * (sums[b, 0] / sums[b, 1] - scores[b])
    return out


@njit(cache=True)
def once(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] without what repeats the words of a block kept before in another place: copies for narrow screens,
    quotations.

    Under the same path it is no copy: messages of a thread, entries of a reference may say the same.
    """
    keys = text_keys(page)
    out = keep.copy()
    numbers, count = numbered(keys)
    first = np.full(count, -1, np.int64)  # kept block of these words
    for b in range(len(keys)):
        if keep[b] and first[numbers[b]] < 0:
            first[numbers[b]] = b
        elif keep[b] and page.blocks[b, L.WORDS] >= COPIED_WORDS and page.blocks[b, L.PRE] == 0:
            before = page.blocks[first[numbers[b]], L.ELEMENT]
            out[b] = page.signs[page.blocks[b, L.ELEMENT], 1] == page.signs[before, 1]
    return out
