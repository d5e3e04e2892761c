"""Sums over rows with equal keys, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit


@njit(cache=True)
def groups(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many entries have the key of each, and how many of them stand before it."""
    n = len(keys)
    order = np.argsort(keys, kind="mergesort")
    size, before = np.empty(n, np.int64), np.empty(n, np.int64)
    at = 0
    while at < n:
        stop = at
        while stop < n and keys[order[stop]] == keys[order[at]]:
            before[order[stop]] = stop - at
            stop += 1
        for k in range(at, stop):
            size[order[k]] = stop - at
        at = stop
    return size, before


@njit(cache=True)
def group_sums(keys: NDArray[np.uint64], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of the rows of `values` [n, k] over the entries with the key of each."""
    n = len(keys)
    order = np.argsort(keys, kind="mergesort")
    out = np.zeros(values.shape, np.float32)
    at = 0
    while at < n:
        stop = at
        total = np.zeros(values.shape[1], np.float32)
        while stop < n and keys[order[stop]] == keys[order[at]]:
            total += values[order[stop]]
            stop += 1
        for k in range(at, stop):
            out[order[k]] = total
        at = stop
    return out


@njit(cache=True)
def ratio(a: float, b: float) -> float:
    """a / b, 0 where there is nothing to divide by."""
    return a / b if b > 0 else 0.0
