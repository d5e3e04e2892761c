"""An open-addressing table over 64-bit hashes, for compiled code. Two texts with one hash are taken as equal:
with 64 bits a document of a million n-grams meets a false one with a chance of 3 in 10 million.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True)
def size_for(entries: int) -> int:
    """A power of two that keeps the table at most half full."""
    size = 8
    while size < 2 * entries:
        size *= 2
    return size


@njit(cache=True)
def place(keys: NDArray[np.uint64], key: np.uint64) -> int:
    """Where `key` (not 0) is, or would go, in a table whose free places hold 0."""
    mask = len(keys) - 1
    at = np.int64(key & np.uint64(mask))
    while keys[at] != 0 and keys[at] != key:
        at = (at + 1) & mask
    return int(at)
