"""Gradient-boosted trees as arrays, evaluated by compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.bytes import lowest
from puna.kernels.cpu.numba_cache import njit
from puna.kernels.cpu.vectors import load, masked_above, peak

LANES = 32  # rows side by side, two vectors
MAX_LEAVES = 32  # maximum leaves of a tree, one bit each
EVERY = np.uint32(0xFFFFFFFF)


class Trees(NamedTuple):
    """Binary trees in shared arrays: node i sends a row to its left child if row[feature[i]] <= threshold[i]. A child >= 0 is a node; a
    child < 0 is the leaf ~child. `roots` [trees]: the root node (or only leaf) of each tree."""

    roots: NDArray[np.int32]
    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    leaf: NDArray[np.float32]


class Splits(NamedTuple):
    """Trees (`Trees`) with nodes sorted by feature and threshold; `starts` [features + 1]: first node of each feature; `tree`: each node's
    tree; `stays`: bits of the tree's leaves, from the left, that a row above the threshold may still reach; `leaf` [trees, 32]: values."""

    starts: NDArray[np.int64]
    threshold: NDArray[np.float32]
    tree: NDArray[np.int64]
    stays: NDArray[np.uint32]
    leaf: NDArray[np.float32]


def splits(trees: Trees) -> Splits:
    """Return the trees with their nodes sorted as `logits` needs them; raise ValueError if a tree has more than `MAX_LEAVES` leaves."""
    tree, stays = np.zeros(len(trees.feature), np.int64), np.zeros(len(trees.feature), np.uint32)
    leaf = np.zeros((len(trees.roots), MAX_LEAVES), np.float32)

    def leaves(node: int, number: int, first: int) -> int:
        """Fill in the subtree of a node, with leaves numbered from `first`; return the number after its last leaf."""
        if node < 0:
            if first == MAX_LEAVES:
                raise ValueError(f"tree {number} has more than {MAX_LEAVES} leaves; train it with fewer (num_leaves)")
            leaf[number, first] = trees.leaf[~node]
            return first + 1
        middle = leaves(int(trees.left[node]), number, first)
        tree[node], stays[node] = number, int(EVERY) & ~((1 << middle) - (1 << first))
        return leaves(int(trees.right[node]), number, middle)

    for number, root in enumerate(trees.roots.tolist()):
        leaves(root, number, 0)
    order = np.lexsort((trees.threshold, trees.feature))
    starts = np.searchsorted(trees.feature[order], np.arange(int(trees.feature.max(initial=-1)) + 2))
    return Splits(starts, trees.threshold[order], tree[order], stays[order], leaf)


@njit(cache=True)
def logits(trees: Splits, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for each row, the sum over the trees of the value of the row's leaf [rows].

    Rows do not descend the trees. A node whose threshold is below the row's value excludes the leaves of its left subtree; the leftmost
    leaf that remains is the row's (QuickScorer, Lucchese et al. 2015). LANES rows share each instruction, without branches."""
    starts, threshold, tree, stays, leaf = trees
    count, features = len(rows), len(starts) - 1
    out = np.zeros(count, np.float32)
    reach, values = np.empty((len(leaf), LANES), np.uint32), np.empty((features, LANES), np.float32)
    for first in range(0, count, LANES):
        lanes = min(LANES, count - first)
        for k in range(LANES):
            for f in range(features):
                values[f, k] = rows[first + k, f] if k < lanes else np.float32(-np.inf)
        reach.fill(EVERY)
        for f in range(features):
            place = values[f].ctypes.data
            low, high = load(place), load(place + 2 * LANES)
            highest = max(peak(low), peak(high))
            for node in range(starts[f], starts[f + 1]):
                if not highest > threshold[node]:
                    break
                at = reach.ctypes.data + 4 * LANES * tree[node]
                masked_above(at, low, threshold[node], stays[node])
                if lanes > LANES // 2:
                    masked_above(at + 2 * LANES, high, threshold[node], stays[node])
        for t in range(len(leaf)):
            for k in range(lanes):
                out[first + k] += leaf[t, lowest(np.int64(reach[t, k]))]
    return out
