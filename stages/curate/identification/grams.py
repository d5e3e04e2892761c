"""Naive Bayes on character n-grams: how probable a text is in each of some hundred languages.

The classifier was counted from the Universal Declaration of Human Rights alone (`training` says how), one short text a
language; what it lacks in words it has in languages. N-grams of one to four letters within words, hashed; log-probabilities in
steps of 1/16. Only languages of the text's script are looked at, and only the first 600 letters: more tell no more.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.identification.scripts import CODES, is_letter
from puna.stages.curate.text.characters import tables

FILE = Path(__file__).with_name("grams.npz")
BITS = 15
LONGEST = 4
LIMIT = 600
STEPS = 16
BLOCK = 256
BLANK = 0x20
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FINISH = np.uint64(0xBF58476D1CE4E5B9)


class Grams(NamedTuple):
    """The classifier: `labels` str[n], a language each, those of a script next to each other; `ranges` int64[scripts, 2];
    `costs` uint8[2^BITS, n]: minus the log-probability of an n-gram in steps."""

    labels: tuple[str, ...]
    ranges: NDArray[np.int64]
    costs: NDArray[np.uint8]


@lru_cache(maxsize=1)
def grams() -> Grams:
    """The classifier that comes with Puna."""
    with np.load(FILE, allow_pickle=False) as stored:
        labels, scripts = stored["labels"].tolist(), stored["scripts"].tolist()
        costs = np.repeat(stored["unseen"][None], 1 << BITS, axis=0)
        gaps, values = stored["gaps"], stored["values"]  # each look into the file unpacks it
        start = np.cumsum(np.r_[0, stored["lengths"]])
        for column in range(len(labels)):
            rows = slice(start[column], start[column + 1])
            costs[np.cumsum(gaps[rows], dtype=np.int64), column] = values[rows]
    ranges = np.zeros((len(CODES), 2), np.int64)
    for number, code in enumerate(CODES):
        if code in scripts:
            ranges[number] = scripts.index(code), len(scripts) - scripts[::-1].index(code)
    return Grams(tuple(labels), ranges, costs)


@njit(cache=True)
def bins(codes: NDArray[np.uint32], flags: NDArray[np.uint16], lower: NDArray[np.uint32], limit: int) -> NDArray[np.int64]:
    """Bins of the n-grams of the first `limit` letters, in lower case; a word has a blank before and after it."""
    letters = np.empty(2 * min(limit, len(codes)) + 2, np.uint32)
    letters[0] = BLANK
    size, inked, at = 1, 0, 0
    while at < len(codes) and inked < limit:
        code = codes[at]
        if is_letter(flags[code]):
            letters[size] = lower[code]
            size += 1
            inked += 1
        elif letters[size - 1] != BLANK:
            letters[size] = BLANK
            size += 1
        at += 1
    if letters[size - 1] != BLANK:
        letters[size] = BLANK
        size += 1
    out = np.empty(size * LONGEST, np.int64)
    count = 0
    for first in range(size):
        value = np.uint64(0)
        for last in range(first, min(first + LONGEST, size)):
            value = (value + np.uint64(letters[last]) + np.uint64(1)) * MULTIPLIER
            value ^= value >> np.uint64(29)
            if last > first or letters[first] != BLANK:
                out[count] = np.int64((value * FINISH) >> np.uint64(64 - BITS))
                count += 1
            if last > first and letters[last] == BLANK:
                break
    return out[:count]


@njit(cache=True)
def total_costs(found: NDArray[np.int64], costs: NDArray[np.uint8], first: int, last: int) -> NDArray[np.int64]:
    """Sum of the n-grams' costs for the labels first..last."""
    total, block = np.zeros(last - first, np.int64), np.zeros(last - first, np.uint16)
    for begin in range(0, len(found), BLOCK):
        # 256 costs fit into 16 bits, of which a register holds four times as many as of 64; four rows are added in one pass over the sums.
        block[:] = 0
        rows = found[begin : begin + BLOCK]
        fours = len(rows) // 4 * 4
        for at in range(0, fours, 4):
            a, b = costs[rows[at], first:last], costs[rows[at + 1], first:last]
            c, d = costs[rows[at + 2], first:last], costs[rows[at + 3], first:last]
            for column in range(last - first):
                block[column] += np.uint16(a[column]) + np.uint16(b[column]) + np.uint16(c[column]) + np.uint16(d[column])
        for one in rows[fours:]:
            row = costs[one, first:last]
            for column in range(last - first):
                block[column] += row[column]
        for column in range(last - first):
            total[column] += block[column]
    return total


def advantages(codes: NDArray[np.uint32], script: int) -> tuple[int, NDArray[np.float64]]:
    """The first label of a script and, of it and those after it, the log-probability of the text over the root of the number of
    its n-grams, the best one's being 0: independence overstates evidence, the more the longer the text."""
    model = grams()
    first, last = model.ranges[script].tolist()
    if first == last:
        return 0, np.zeros(0)
    flags, lower = tables()
    found = bins(codes, flags, lower, LIMIT)
    total = total_costs(found, model.costs, first, last)
    return first, (total.min() - total) / (STEPS * np.sqrt(max(len(found), 1)))
