"""Hashes and positions of all windows of k words in texts, to find exact repeated passages.

Marking windows of k words that occur twice finds the matches of a suffix array with a minimum length of k words, in bounded memory.
Two windows with one 64-bit hash are taken as equal. ASCII white space separates words; in scripts without spaces, words begin where
`unspaced` says. Punctuation stays with its word."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import ALPHABETIC, DECIMAL, JOINER, SINGLE, WORD, decode, tables
from puna.kernels.text.hashing import I64, U64, murmur_finish, xxh64
from puna.kernels.text.unspaced import ROOM, begins_word, weights

BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


def window_hashes(data: NDArray[np.uint8], offsets_D1: I64, width: int) -> tuple[U64, I64, I64, I64, I64]:
    """Return (hashes_N of all windows of `width` words, documents' offsets_D1 in hashes_N, words' starts in `data`, words' ends in `data`,
    documents' offsets_D1 in the words). Documents are concatenated UTF-8 bytes."""
    data, offsets_D1 = np.ascontiguousarray(data), np.ascontiguousarray(offsets_D1, dtype=np.int64)
    return _window_hashes(data, offsets_D1, width, tables().flags, weights())  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _ends(data: Any, first: Any, last: Any, flags: Any, breaks: Any, ends: Any) -> Any:
    """Write the ends of the words in data[first:last], a run without white space, to `ends`; return the number of words."""
    wide = False
    for at in range(first, last):
        wide = wide or data[at] >= 0xE0
    count = 0
    if wide:
        codes, features = np.empty(last - first, np.uint32), np.empty(ROOM, np.int64)
        characters = decode(data, first, last, codes)
        single = False  # whether the last letter is of a script without spaces
        at = first
        for place in range(characters):
            here = flags[codes[place]]
            if here & SINGLE:
                after = place > 0 and single and flags[codes[place - 1]] & (WORD | JOINER) != 0
                begins = place > 0 and (not after or begins_word(codes[:characters], flags, breaks, place, features))
            else:
                begins = single and here & (ALPHABETIC | DECIMAL) != 0
            if begins:
                ends[count] = at
                count += 1
            if here & (ALPHABETIC | DECIMAL):
                single = here & SINGLE != 0
            at += 1
            while at < last and data[at] & 0xC0 == 0x80:
                at += 1
    ends[count] = last
    return count + 1


@njit(cache=True, nogil=True)
def _window_hashes(data: Any, offsets_D1: Any, width: Any, flags: Any, breaks: Any) -> Any:
    documents = len(offsets_D1) - 1
    most = (offsets_D1[documents] - offsets_D1[0]) // 2 + documents + 1
    begins, ends = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    words = np.empty(most, dtype=np.uint64)
    hashes = np.empty(most, dtype=np.uint64)
    words_D1, hashes_D1 = np.zeros(documents + 1, dtype=np.int64), np.zeros(documents + 1, dtype=np.int64)
    last = np.uint64(1)
    for _ in range(width):
        last *= BASE
    w = n = 0
    for d in range(documents):
        i, stop, first = offsets_D1[d], offsets_D1[d + 1], w
        while i < stop:
            while i < stop and (data[i] == 32 or 9 <= data[i] <= 13):
                i += 1
            if i == stop:
                break
            begins[w] = i
            while i < stop and not (data[i] == 32 or 9 <= data[i] <= 13):
                i += 1
            for k in range(w, w + _ends(data, begins[w], i, flags, breaks, ends[w:])):
                if k > w:
                    begins[k] = ends[k - 1]
                words[k] = xxh64(data, np.uint64(begins[k]), np.uint64(ends[k]))
            w = k + 1
        value = np.uint64(0)
        for k in range(first, w):
            value = value * BASE + words[k]
            if k - first >= width:
                value -= words[k - width] * last
            if k - first >= width - 1:
                hashes[n] = murmur_finish(value)
                n += 1
        words_D1[d + 1], hashes_D1[d + 1] = w, n
    return hashes[:n], hashes_D1, begins[:w], ends[:w], words_D1
