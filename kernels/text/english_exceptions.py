"""Exceptions of English words: finding one, and putting together the words that spell one by chance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.english_tables import FILTER_BITS, MAY_BE_FIRST, MAY_BE_SPECIAL, EnglishTables
from puna.kernels.text.hash_table import mix, place


@njit(cache=True, inline="always")
def span(hashes: NDArray[np.uint64], power: NDArray[np.uint64], a: int, b: int) -> np.uint64:
    """Polynomial hash of the characters a..b."""
    return hashes[b] - hashes[a] * power[b - a]  # type: ignore[no-any-return]


@njit(cache=True, inline="always")
def may_be_special(english: EnglishTables, hashes: NDArray[np.uint64], power: NDArray[np.uint64], a: int, b: int) -> bool:
    """False where the characters a..b are certainly no exception."""
    if b - a > english.special_length:
        return False
    key = mix(span(hashes, power, a, b))
    return bool(english.filter[key >> np.uint64(64 - FILTER_BITS)] & MAY_BE_SPECIAL)


@njit(cache=True, inline="always")
def special_of(english: EnglishTables, hashes: NDArray[np.uint64], power: NDArray[np.uint64], a: int, b: int) -> int:
    """Number of the exception that the characters a..b are, or -1."""
    if not may_be_special(english, hashes, power, a, b):
        return -1
    key = mix(span(hashes, power, a, b))
    where = place(english.special_keys, key)
    return int(english.special_at[where]) if english.special_keys[where] == key else -1


@njit(cache=True)
def _spelled(
    codes: NDArray[np.uint32], english: EnglishTables, hashes: NDArray[np.uint64], power: NDArray[np.uint64],
    start: NDArray[np.int32], stop: NDArray[np.int32], count: int, first: NDArray[np.int32], which: NDArray[np.int32],
) -> int:  # fmt: skip
    """Find the sequences of words that spell an exception: first word and number of the sequence; returns how many.

    At most `len(first)` are written; the number returned may be greater.
    """
    found = 0
    for word in range(count - 1):
        if stop[word] - start[word] > english.special_length:
            continue
        key = mix(span(hashes, power, start[word], stop[word]))
        if not english.filter[key >> np.uint64(64 - FILTER_BITS)] & MAY_BE_FIRST:
            continue
        where = place(english.first_keys, key)
        if english.first_keys[where] != key:
            continue
        for sequence in range(english.first_range[where, 0], english.first_range[where, 1]):
            low, high = english.sequence_range[sequence], english.sequence_range[sequence + 1]
            size = 1
            while low + size < high and word + size < count:
                at = word + size
                gap = start[at] - stop[at - 1]
                if gap > 1 or (gap == 1 and codes[stop[at - 1]] != 0x20):
                    break  # other white space is a word of its own
                if span(hashes, power, start[at], stop[at]) != english.sequence[low + size]:
                    break
                size += 1
            if low + size == high:
                if found < len(first):
                    first[found], which[found] = word, sequence
                found += 1
    return found


@njit(cache=True)
def rejoin(
    codes: NDArray[np.uint32], english: EnglishTables, hashes: NDArray[np.uint64], power: NDArray[np.uint64],
    start: NDArray[np.int32], stop: NDArray[np.int32], count: int,
) -> int:  # fmt: skip
    """Replace sequences of words that spell an exception by its pieces; returns how many words there are now."""
    first, which = np.empty(64, np.int32), np.empty(64, np.int32)
    found = _spelled(codes, english, hashes, power, start, stop, count, first, which)
    if found > 64:
        first, which = np.empty(found, np.int32), np.empty(found, np.int32)
        _spelled(codes, english, hashes, power, start, stop, count, first, which)
    if found == 0:
        return count
    # The longest first, then the leftmost; one that touches another already looked at with its ends is left out.
    taken = np.zeros(count, np.bool_)
    chosen = np.full(count, -1, np.int32)
    changes = False
    for length in range(english.longest_sequence, 1, -1):
        for k in range(found):
            a, sequence = first[k], which[k]
            if english.sequence_range[sequence + 1] - english.sequence_range[sequence] != length:
                continue
            free = not taken[a] and not taken[a + length - 1]
            joined = True
            for word in range(a, a + length):
                taken[word] = True
                joined = joined and (word == a or start[word] == stop[word - 1])
            if free and joined:
                chosen[a] = sequence
                changes = True
    if not changes:
        return count
    old_start, old_stop = start[:count].copy(), stop[:count].copy()
    word, size = 0, 0
    while word < count:
        sequence = chosen[word]
        if sequence < 0:
            start[size], stop[size] = old_start[word], old_stop[word]
            size += 1
            word += 1
            continue
        special, at = english.sequence_special[sequence], old_start[word]
        for piece in range(english.special_range[special], english.special_range[special + 1]):
            start[size], stop[size] = at, at + english.pieces[piece]
            at = stop[size]
            size += 1
        word += english.sequence_range[sequence + 1] - english.sequence_range[sequence]
    return size
