"""XXH64 (seed 0) of slices of a byte array, for compiled code and as a function of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)
ONE, TWO, THREE, FOUR, EIGHT = (np.uint64(n) for n in (1, 2, 3, 4, 8))


def slice_hashes(data: NDArray[np.uint8], offsets_N1: I64) -> U64:
    """Return XXH64 of each slice `data[offsets_N1[i] : offsets_N1[i + 1]]`, [N]."""
    return _slice_hashes(np.ascontiguousarray(data), np.ascontiguousarray(offsets_N1))  # type: ignore[no-any-return]


@njit(cache=True, nogil=True, inline="always")
def _rotate(x: Any, r: Any) -> Any:
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


# Positions are unsigned: numba wraps signed ones around at 0, which keeps the loads below from becoming one each.
@njit(cache=True, nogil=True, inline="always")
def _load32(data: Any, at: Any) -> Any:
    return (
        np.uint64(data[at])
        | (np.uint64(data[at + ONE]) << np.uint64(8))
        | (np.uint64(data[at + TWO]) << np.uint64(16))
        | (np.uint64(data[at + THREE]) << np.uint64(24))
    )


@njit(cache=True, nogil=True, inline="always")
def load64(data: Any, at: Any) -> Any:
    return _load32(data, at) | (_load32(data, at + FOUR) << np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def _round(lane: Any, value: Any) -> Any:
    return _rotate(lane + value * P2, 31) * P1


@njit(cache=True, nogil=True)
def xxh64(data: Any, start: Any, stop: Any) -> Any:
    """Return XXH64 of `data[start:stop]`; both bounds uint64."""
    at = start
    if stop - start >= np.uint64(32):
        a, b, c, d = P1 + P2, P2, np.uint64(0), np.uint64(0) - P1
        while at + np.uint64(32) <= stop:
            a = _round(a, load64(data, at))
            b = _round(b, load64(data, at + EIGHT))
            c = _round(c, load64(data, at + np.uint64(16)))
            d = _round(d, load64(data, at + np.uint64(24)))
            at += np.uint64(32)
        h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        h = (h ^ _round(np.uint64(0), a)) * P1 + P4
        h = (h ^ _round(np.uint64(0), b)) * P1 + P4
        h = (h ^ _round(np.uint64(0), c)) * P1 + P4
        h = (h ^ _round(np.uint64(0), d)) * P1 + P4
    else:
        h = P5
    h += stop - start
    while at + EIGHT <= stop:
        h = _rotate(h ^ _round(np.uint64(0), load64(data, at)), 27) * P1 + P4
        at += EIGHT
    if at + FOUR <= stop:
        h = _rotate(h ^ (_load32(data, at) * P1), 23) * P2 + P3
        at += FOUR
    while at < stop:
        h = _rotate(h ^ (np.uint64(data[at]) * P5), 11) * P1
        at += ONE
    h = (h ^ (h >> np.uint64(33))) * P2
    h = (h ^ (h >> np.uint64(29))) * P3
    return h ^ (h >> np.uint64(32))


@njit(cache=True, nogil=True)
def _slice_hashes(data: Any, offsets_N1: Any) -> Any:
    out = np.empty(len(offsets_N1) - 1, dtype=np.uint64)
    for i in range(len(out)):
        out[i] = xxh64(data, np.uint64(offsets_N1[i]), np.uint64(offsets_N1[i + 1]))
    return out
