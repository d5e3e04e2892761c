"""Searching in bytes, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.bytes import LANES, equal, lowest
from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction.layout import OFFSET, PRIME
from puna.models.extraction.tags import TAG_KEYS, TAG_VALUES


@njit(cache=True, borrows=True)
def find(html: NDArray[np.uint8], at: int, byte: int, stop: int = -1) -> int:
    """Return index of the first `byte` from `at` on, or `stop`, or the end."""
    stop = len(html) if stop < 0 else stop
    address = html.ctypes.data
    while at + LANES <= stop:
        there = equal(address + at, byte)
        if there:
            return at + lowest(there)  # type: ignore[no-any-return]
        at += LANES
    while at < stop and html[at] != byte:
        at += 1
    return at


@njit(cache=True, borrows=True)
def has(html: NDArray[np.uint8], start: int, stop: int, words: bytes) -> bool:
    """True if bytes occur in html[start:stop], letters in either case."""
    for at in range(start, stop - len(words) + 1):
        here = 0
        while here < len(words) and (
            html[at + here] == words[here] or (65 <= html[at + here] <= 90 and html[at + here] + 32 == words[here])
        ):
            here += 1
        if here == len(words):
            return True
    return False


@njit(cache=True, borrows=True)
def is_space(byte: int) -> bool:
    """True if a byte is white space between the parts of a tag; other control characters belong to names."""
    return byte == 32 or byte == 10 or byte == 9 or byte == 13 or byte == 12


@njit(cache=True, borrows=True)
def tag_name(html: NDArray[np.uint8], at: int) -> tuple[int, np.uint64, int]:
    """Number and hash of the element's name at `at`, letters in either case, and where it ends."""
    state = OFFSET
    while at < len(html) and not is_space(html[at]) and html[at] != 62 and html[at] != 47:
        c = html[at]
        state = (state ^ np.uint64(c | 32 if 65 <= c <= 90 else c)) * PRIME
        at += 1
    slot = np.int64(state & np.uint64(len(TAG_KEYS) - 1))
    while TAG_KEYS[slot] != 0 and TAG_KEYS[slot] != state:
        slot = (slot + 1) & (len(TAG_KEYS) - 1)
    return (TAG_VALUES[slot] if TAG_KEYS[slot] != 0 else 0), state, at
