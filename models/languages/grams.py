"""Naive Bayes on character n-grams: the log-probability of a text in each of several hundred languages.

N-grams of one to four letters within words, hashed; log-probabilities in steps of 1/16. Only languages of the text's script are scored, on
the first 600 letters, because more letters do not help. `tests/benchmarks/train_language_grams.py` makes `grams.npz`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import tables
from puna.models.languages.scripts import CODES, is_letter

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
    """The classifier: `labels` str[n], a language each, grouped by script; `ranges` int64[scripts, 2]: first and end of a script's labels;
    `costs` uint8[2^BITS, n]: minus an n-gram's log-probability, in steps of 1/16."""

    labels: tuple[str, ...]
    ranges: NDArray[np.int64]
    costs: NDArray[np.uint8]


@lru_cache(maxsize=1)
def grams() -> Grams:
    with np.load(FILE, allow_pickle=False) as archive:
        labels, scripts = archive["labels"].tolist(), archive["scripts"].tolist()
        costs = np.repeat(archive["unseen"][None], 1 << BITS, axis=0)
        gaps, values = archive["gaps"], archive["values"]  # each access to the file unpacks an array
        start = np.cumsum(np.r_[0, archive["lengths"]])
        for column in range(len(labels)):
            rows = slice(start[column], start[column + 1])
            costs[np.cumsum(gaps[rows], dtype=np.int64), column] = values[rows]
    ranges = np.zeros((len(CODES), 2), np.int64)
    for number, code in enumerate(CODES):
        if code in scripts:
            ranges[number] = scripts.index(code), len(scripts) - scripts[::-1].index(code)
    return Grams(tuple(labels), ranges, costs)


@njit(cache=True)
def room(limit: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return uninitialized arrays for up to `limit` letters of a text, and for the hash buckets (bins) of the letters' n-grams."""
    return np.empty(2 * limit + 2, np.uint32), np.empty((2 * limit + 2) * LONGEST, np.int64)


@njit(cache=True, borrows=True)
def bins(codes: Any, first: int, last: int, flags: Any, lower: Any, limit: int, letters: Any, out: Any) -> Any:
    """Write to `out` the hash buckets of the n-grams of the first `limit` letters of codes[first:last], in lower case; return their number.
    A word has a blank before and after it. letters, out: see `room`."""
    letters[0] = BLANK
    size, inked, at = 1, 0, first
    while at < last and inked < limit:
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
    count = 0
    for begin in range(size):
        value = np.uint64(0)
        for end in range(begin, min(begin + LONGEST, size)):
            value = (value + np.uint64(letters[end]) + np.uint64(1)) * MULTIPLIER
            value ^= value >> np.uint64(29)
            if end > begin or letters[begin] != BLANK:
                out[count] = np.int64((value * FINISH) >> np.uint64(64 - BITS))
                count += 1
            if end > begin and letters[end] == BLANK:
                break
    return count


@njit(cache=True)
def _total_costs(codes: Any, bounds: Any, texts: Any, ranges: Any, flags: Any, lower: Any, costs: Any) -> Any:
    """Return the n-grams' summed costs for the labels in each text's range, int64[texts, labels], and each text's number of n-grams."""
    total, counts = np.zeros((len(texts), costs.shape[1]), np.int64), np.empty(len(texts), np.int64)
    (letters, results), block = room(LIMIT), np.empty(costs.shape[1], np.uint16)
    for n in range(len(texts)):
        counts[n] = bins(codes, bounds[texts[n]], bounds[texts[n] + 1], flags, lower, LIMIT, letters, results)
        _add_costs(results[: counts[n]], costs, ranges[n, 0], ranges[n, 1], block[: ranges[n, 1] - ranges[n, 0]], total[n])
    return total, counts


@njit(cache=True)
def _add_costs(places: Any, costs: Any, first: int, last: int, block: Any, total: Any) -> None:
    for begin in range(0, len(places), BLOCK):
        # Sums of 256 costs fit into 16 bits, and a register holds four times as many of them as of 64 bits. A pass adds four rows.
        block[:] = 0
        rows = places[begin : begin + BLOCK]
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
            total[first + column] += block[column]


def advantages(
    codes: NDArray[np.uint32], bounds: NDArray[np.int64], texts: NDArray[np.int64], scripts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return float64[texts, labels]: a text's log-probability under a label of its script, minus the best label's; -inf for other labels.
    The difference is divided by sqrt(number of n-grams), because naive Bayes overstates the evidence of long texts. `texts`: indices
    n of codes[bounds[n]:bounds[n + 1]]; `scripts`: indices into `CODES`."""
    model = grams()
    ranges = model.ranges[scripts]
    total, counts = _total_costs(codes, bounds, texts, ranges, *tables(), model.costs)
    label = np.arange(total.shape[1])
    other = (label < ranges[:, :1]) | (label >= ranges[:, 1:])
    least = np.where(other, np.iinfo(np.int64).max, total).min(axis=1, keepdims=True)
    results = (least - total) / (STEPS * np.sqrt(np.maximum(counts, 1)))[:, None]
    return np.where(other, -np.inf, results)
