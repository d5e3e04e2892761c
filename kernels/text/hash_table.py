"""Open-addressing tables of 64-bit hashes, for compiled code. Two texts with one hash are taken as equal: with five million hashes
in a table, the chance that a document of a million n-grams has a false match is 3 in 10 million."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

MIX = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
ONE = np.uint64(1)


@njit(cache=True, borrows=True)
def mix(value: np.uint64) -> np.uint64:
    """Return a hash with its bits mixed over all 64 bits; never 0, which marks a free place in a hash table."""
    value = (value ^ (value >> np.uint64(30))) * MIX
    value = (value ^ (value >> np.uint64(27))) * MIX_2
    value = value ^ (value >> np.uint64(31))
    return value if value != 0 else ONE


@njit(cache=True, borrows=True)
def size_for(entries: int) -> int:
    """Return the smallest power of two, at least 8, that makes a table of `entries` keys at most half full."""
    size = 8
    while size < 2 * entries:
        size *= 2
    return size


@njit(cache=True, borrows=True)
def place(keys: NDArray[np.uint64], key: np.uint64) -> int:
    """Return the index of `key` (not 0) in a table, or of the free place (holding 0) where `key` belongs."""
    mask = len(keys) - 1
    at = np.int64(key & np.uint64(mask))
    while keys[at] != 0 and keys[at] != key:
        at = (at + 1) & mask
    return int(at)


@njit(cache=True)
def clear_keys(space: NDArray[np.uint64], entries: int) -> NDArray[np.uint64]:
    """Return an empty table for `entries` keys: a view of the beginning of `space`, which holds at least `size_for(entries)` keys."""
    keys = space[: size_for(entries)]
    keys[:] = 0
    return keys


@njit(cache=True, borrows=True)
def clear_slots(slots: NDArray[np.int32], entries: int) -> int:
    """Clear the first 2^bits of `slots`, enough for a table of `entries` keys; return `bits`, for `slot_of`."""
    bits, size = 3, 8
    while size < 4 * entries:
        bits, size = bits + 1, 2 * size
    slots[:size] = 0
    return bits


@njit(cache=True, borrows=True)
def slot_of(slots: NDArray[np.int32], bits: int, keys: NDArray[np.uint64], key: np.uint64) -> int:
    """Return the index of the slot (of 2^bits) that holds 1 + the index of `key` in `keys`, or of the free slot where `key` belongs. At
    most a quarter of the slots is used, so most lookups read one slot; a table of the keys themselves would be twice as large."""
    mask = (1 << bits) - 1
    at = np.int64((key * MIX) >> np.uint64(64 - bits))
    while slots[at] != 0 and keys[slots[at] - 1] != key:
        at = (at + 1) & mask
    return int(at)


@njit(cache=True, borrows=True)
def contains(keys: NDArray[np.uint64], hash_: np.uint64) -> bool:
    """True if a table made by `table_of` holds the hash."""
    key = mix(hash_)
    return bool(keys[place(keys, key)] == key)


@njit(cache=True, borrows=True)
def perhaps(bits: NDArray[np.uint64], hash_: np.uint64) -> bool:
    """True if a mixed hash may be in the set whose bitmap `bits_of` returned; false positives are rare if the set is small."""
    return bool(bits[hash_ >> np.uint64(54)] >> ((hash_ >> np.uint64(48)) & np.uint64(63)) & ONE)


def bits_of(hashes: Iterable[int]) -> NDArray[np.uint64]:
    """Return a bitmap (8 KiB, for a core's cache) of the 16-bit prefixes of `hashes`, which are mixed (see `mix`)."""
    bits = np.zeros(1 << 10, np.uint64)
    for value in hashes:
        bits[value >> 54] |= ONE << np.uint64(value >> 48 & 63)
    return bits


def table_of(hashes: Iterable[int]) -> NDArray[np.uint64]:
    """Return a table of `hashes` for `contains`, at most a quarter full."""
    results = [np.uint64(mix(np.uint64(h))) for h in hashes]
    keys = np.zeros(2 * size_for(len(results)), np.uint64)
    for key in results:
        keys[place(keys, key)] = key
    return keys
