"""Gradient-boosted trees as arrays, evaluated by compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray


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
    """Sums of the trees' leaves [rows]."""
    out = np.zeros(len(rows), np.float32)
    for root in trees.roots:
        for r in range(len(rows)):
            node = root
            while node >= 0:
                node = trees.left[node] if rows[r, trees.feature[node]] <= trees.threshold[node] else trees.right[node]
            out[r] += trees.leaf[~node]
    return out
