"""Sums over rows with equal keys, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

PROBES = 32  # places looked at for a key before all are sorted


@njit(cache=True)
def numbered(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], int]:
    """Return a number for the key of each entry, equal where keys are; and how many there are."""
    n, size, count = len(keys), 2, 0
    while size < 2 * n:
        size *= 2
    places, own, numbers = np.full(size, -1, np.int64), np.empty(n, np.uint64), np.empty(n, np.int64)
    for k in range(n):
        at, probes = np.int64((keys[k] ^ (keys[k] >> np.uint64(32))) & np.uint64(size - 1)), 0
        while places[at] >= 0 and own[places[at]] != keys[k]:
            at, probes = (at + 1) & (size - 1), probes + 1
            if probes == PROBES:  # too many keys fall on one place
                return _numbered_by_order(keys)  # type: ignore[no-any-return]
        if places[at] < 0:
            places[at], own[count] = count, keys[k]
            count += 1
        numbers[k] = places[at]
    return numbers, count


@njit(cache=True)
def _numbered_by_order(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], int]:
    """Return `numbered` in n log n steps whatever the keys are."""
    order, numbers, count = np.argsort(keys), np.empty(len(keys), np.int64), 0
    for k in range(len(order)):
        count += k == 0 or keys[order[k]] != keys[order[k - 1]]
        numbers[order[k]] = count - 1
    return numbers, count


@njit(cache=True)
def groups(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of entries with the key of each, and of those before it."""
    numbers, count = numbered(keys)
    sizes, before = np.zeros(count, np.int64), np.empty(len(keys), np.int64)
    for k in range(len(keys)):
        before[k] = sizes[numbers[k]]
        sizes[numbers[k]] += 1
    return sizes[numbers], before


@njit(cache=True)
def group_sums(keys: NDArray[np.uint64], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return sums of the rows of `values` [n, k] over the entries with the key of each, in their order."""
    numbers, count = numbered(keys)
    sums, out = np.zeros((count, values.shape[1]), np.float32), np.empty(values.shape, np.float32)
    for k in range(len(keys)):
        for column in range(values.shape[1]):
            sums[numbers[k], column] += values[k, column]
    for k in range(len(keys)):
        out[k] = sums[numbers[k]]
    return out


@njit(cache=True)
def ratio(a: float, b: float) -> float:
    """Return a / b, 0 where b is 0."""
    return a / b if b > 0 else 0.0
