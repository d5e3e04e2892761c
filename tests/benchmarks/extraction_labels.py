"""Training labels: the blocks of a page that occur in its annotated text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

WORD = re.compile(r"\w+")
GRAM = 5  # words per n-gram that a block must share with the truth if the truth has the block elsewhere
MATCH, FIRST_MATCH = np.float32(2.0), np.float32(0.5)  # scores: matching words in a row count more than scattered ones
MAX_CELLS = 1_500_000_000
HALF = 0.5


def label(texts: Sequence[str], truth: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the share of each block's words that are content, and the block's number of words.

    The words of page and truth are aligned in order. A longer block that the alignment leaves out, because the truth has it elsewhere, is
    scored by its n-grams unless the same text was content before.
    """
    numbers: dict[str, int] = {}

    def numbered(text: str) -> list[int]:
        return [numbers.setdefault(word, len(numbers)) for word in WORD.findall(text.lower())]

    blocks = [numbered(text) for text in texts]
    wanted = numbered(truth)
    page = np.array([word for block in blocks for word in block], np.int32)
    wanted = wanted[: MAX_CELLS // max(1, len(page))]
    matched = _align(page, np.array(wanted, np.int32))
    grams = set(zip(*(wanted[k:] for k in range(GRAM)), strict=False))
    shares = np.zeros(len(texts), np.float32)
    lengths = np.array([len(block) for block in blocks], np.int64)
    ends = np.cumsum(lengths)
    contents = set()
    for number, block in enumerate(blocks):
        if block:
            shares[number] = matched[ends[number] - lengths[number] : ends[number]].mean()
            if shares[number] > HALF:
                contents.add(tuple(block))
    for number, block in enumerate(blocks):
        if len(block) > GRAM and shares[number] <= HALF and tuple(block) not in contents:
            results = [gram in grams for gram in zip(*(block[k:] for k in range(GRAM)), strict=False)]
            if sum(results) > 0.8 * len(results):
                shares[number] = sum(results) / len(results)
                contents.add(tuple(block))
    return shares, lengths


@njit(cache=True)
def _align(a: NDArray[np.int32], b: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return a mask of the entries of `a` that the best monotone alignment with `b` matches; Gotoh's recurrence with free gaps."""
    n, m = len(a), len(b)
    never = np.float32(-1e9)
    steps = np.zeros((n + 1, m + 1), np.uint8)  # 1: skip of a, 2: skip of b, 3: match; +4: the match continues a run
    best, run = np.zeros(m + 1, np.float32), np.full(m + 1, never, np.float32)
    for i in range(1, n + 1):
        corner, corner_run, left = best[0], never, np.float32(0)
        for j in range(1, m + 1):
            above, above_run = best[j], run[j]
            value, step, longer = above, 1, 0
            if left > value:
                value, step = left, 2
            here = never
            if a[i - 1] == b[j - 1]:
                here = corner + FIRST_MATCH
                if corner_run + MATCH >= here:
                    here, longer = corner_run + MATCH, 4
                if here > value:
                    value, step = here, 3
            best[j], run[j], steps[i, j] = value, here, longer | step
            left, corner, corner_run = value, above, above_run
    out = np.zeros(n, np.bool_)
    i, j, inside = n, m, False
    while i > 0 and j > 0:
        step = steps[i, j]
        if inside or step & 3 == 3:
            out[i - 1] = True
            inside = step & 4 != 0
            i, j = i - 1, j - 1
        elif step & 3 == 1:
            i -= 1
        else:
            j -= 1
    return out
