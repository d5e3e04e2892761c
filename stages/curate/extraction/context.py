"""The second look at a page: what the first model thought of a block's neighbours, containers and kind."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from puna.stages.curate.extraction.features import _group_sums, _ratio
from puna.stages.curate.extraction.scan import ELEMENT, END, FIRST, PARENT, TAG, WORDS, Scan
from puna.stages.curate.extraction.tags import IS_BLOCK, IS_HEADING

NEAR = (-4, -3, -2, -1, 1, 2, 3, 4)
LEVELS = 6


def names() -> list[str]:
    """Names of the features, in order."""
    found = ["z", *(f"z{k:+d}" for k in NEAR), "z±3", "z±10", "z±30", "z_head", "z_before", "z_after"]
    found += ["group_z", "group_p", "sign_z", "sign_p", *(f"p^{k}" for k in range(1, LEVELS + 1)), *(f"best^{k}" for k in range(1, LEVELS + 1))]
    return found + "rank expected page_p best bar margin sure".split()


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


@njit(cache=True)
def context_features(page: Scan, z: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Features [blocks, count], see `names`; z [blocks]: the first model's logits."""
    blocks, elements = page.blocks, page.elements
    n = len(blocks)
    out = np.zeros((n, count), np.float32)
    p = (1 / (1 + np.exp(-z))).astype(np.float32)
    words = blocks[:, WORDS] + 0.01
    values = np.empty((n, 4), np.float32)
    sums = np.zeros((n + 1, 4), np.float64)  # logits, words, expected words, sure words
    keys, signs = np.empty(n, np.uint64), np.empty(n, np.uint64)
    for b in range(n):
        values[b, 0], values[b, 1], values[b, 2], values[b, 3] = 1, z[b], words[b], p[b] * words[b]
        sums[b + 1, 0], sums[b + 1, 1], sums[b + 1, 2] = sums[b, 0] + z[b], sums[b, 1] + words[b], sums[b, 2] + p[b] * words[b]
        sums[b + 1, 3] = sums[b, 3] + words[b] * (p[b] > 0.5)
        keys[b], signs[b] = page.signs[blocks[b, ELEMENT], 1], page.signs[blocks[b, ELEMENT], 0]
    group, sign = _group_sums(keys, values), _group_sums(signs, values)
    order, kept, expected = best_cut(p, words)
    rank = np.empty(n, np.float64)
    total = 0.0
    for k in range(n):
        total += words[order[k]]
        rank[order[k]] = total / sums[n, 1]
    bar = p[order[kept - 1]] if n else np.float32(0)
    top = np.zeros(len(elements), np.float32)  # the highest probability inside an element
    for b in range(n):
        up = blocks[b, ELEMENT]
        while up >= 0 and top[up] < p[b]:
            top[up] = p[b]
            up = elements[up, PARENT]
    head = np.float32(-9)
    for b in range(n):
        row = out[b]
        e = blocks[b, ELEMENT]
        row[0] = z[b]
        k = 1
        for d in NEAR:
            row[k] = z[b + d] if 0 <= b + d < n else -9
            k += 1
        for d in (3, 10, 30):
            lo, hi = max(0, b - d), min(n, b + d + 1)
            row[k] = (sums[hi, 0] - sums[lo, 0]) / (hi - lo)
            k += 1
        row[k] = head
        if IS_HEADING[elements[e, TAG]]:
            head = z[b]
        row[k + 1], row[k + 2] = _ratio(sums[b, 2], sums[n, 2]), _ratio(sums[n, 2] - sums[b + 1, 2], sums[n, 2])
        k += 3
        row[k], row[k + 1] = group[b, 1] / group[b, 0], group[b, 3] / group[b, 2]
        row[k + 2], row[k + 3] = sign[b, 1] / sign[b, 0], sign[b, 3] / sign[b, 2]
        k += 4
        up = e
        for level in range(LEVELS):
            if up > 0:
                up = elements[up, PARENT]
                while up > 0 and not IS_BLOCK[elements[up, TAG]]:
                    up = elements[up, PARENT]
            lo, hi = elements[up, FIRST], elements[up, END]
            row[k + level] = _ratio(sums[hi, 2] - sums[lo, 2], sums[hi, 1] - sums[lo, 1])
            row[k + LEVELS + level] = top[up]
        k += 2 * LEVELS
        row[k], row[k + 1], row[k + 2], row[k + 3] = rank[b], expected, sums[n, 2] / sums[n, 1], p[order[0]]
        row[k + 4], row[k + 5], row[k + 6] = bar, p[b] - bar, sums[n, 3] / sums[n, 1]
    return out
