"""Gradient-boosted trees as arrays, evaluated by compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit


class Trees(NamedTuple):
    """Binary trees one after the other: node i sends a row left where row[feature[i]] <= threshold[i].

    A child >= 0 is a node, below 0 the leaf ~child. `roots` [trees]: the first node (or leaf) of each tree.
    """

    roots: NDArray[np.int32]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    leaf: NDArray[np.float32]


@njit(cache=True)
def logits(trees: Trees, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of the trees' leaves [rows].

    Four rows go down a tree side by side: one waits for memory while another steps, which takes 0.6 of the time.
    """
    roots, feature, threshold, leaf = trees.roots, trees.feature, trees.threshold, trees.leaf
    child = np.stack((trees.left, trees.right), 1)
    out = np.zeros(len(rows), np.float32)
    whole = len(rows) // 4 * 4
    for root in roots:
        for r in range(0, whole, 4):
            a = b = c = d = root
            while a >= 0 or b >= 0 or c >= 0 or d >= 0:
                if a >= 0:
                    a = child[a, np.int64(rows[r, feature[a]] > threshold[a])]
                if b >= 0:
                    b = child[b, np.int64(rows[r + 1, feature[b]] > threshold[b])]
                if c >= 0:
                    c = child[c, np.int64(rows[r + 2, feature[c]] > threshold[c])]
                if d >= 0:
                    d = child[d, np.int64(rows[r + 3, feature[d]] > threshold[d])]
            out[r] += leaf[~a]
            out[r + 1] += leaf[~b]
            out[r + 2] += leaf[~c]
            out[r + 3] += leaf[~d]
        for r in range(whole, len(rows)):
            a = root
            while a >= 0:
                a = child[a, np.int64(rows[r, feature[a]] > threshold[a])]
            out[r] += leaf[~a]
    return out
