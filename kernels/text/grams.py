"""Word n-grams as hashes, and the search for an index's n-grams in a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import SYMBOL, code_points, decode, longest, lower_codes, tables
from puna.kernels.text.hash_table import ONE, contains, mix, table_of
from puna.kernels.text.strings import buffers
from puna.kernels.text.unspaced import weights
from puna.kernels.text.words import BASE, IS_SYMBOL, split_codes, split_ranges


class Hashed(NamedTuple):
    """The words of a text in lower case, except words that consist only of punctuation and symbols. `words` uint64[n]: their hashes;
    `start`, `stop` int32[n]: their ranges in `lowered`, the text in lower case."""

    words: NDArray[np.uint64]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    lowered: str


def word_hashes(text: str) -> Hashed:
    """Return the hashed words of a text in lower case, except words that consist only of punctuation and symbols."""
    lowered = text.lower()
    words = split_codes(code_points(lowered))
    kept = words.flags & IS_SYMBOL == 0
    return Hashed(words.hash[kept], words.start[kept], words.stop[kept], lowered)


@njit(cache=True)
def gram_hashes(words: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Return the hash of each n-gram of words, uint64[max(len(words) - n + 1, 0)]."""
    out = np.empty(max(len(words) - n + 1, 0), np.uint64)
    mixed = np.empty(len(words), np.uint64)
    value, leaving = np.uint64(0), np.uint64(1)
    for _ in range(n):
        leaving *= BASE
    # A rolling polynomial hash: add the next word, subtract the word n places before it.
    for k in range(len(words)):
        mixed[k] = mix(words[k])
        value = value * BASE + mixed[k]
        if k >= n:
            value -= mixed[k - n] * leaving
        if k >= n - 1:
            out[k - n + 1] = mix(value + np.uint64(n))
    return out


@njit(cache=True)
def places_held(grams: NDArray[np.uint64], table: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the indices of the n-grams that a table (`hash_table.table_of`) holds, correct unless two n-grams have one hash."""
    out, size = np.empty(len(grams), np.int64), 0
    for at in range(len(grams)):
        if contains(table, grams[at]):
            out[size] = at
            size += 1
    return out[:size]


class Sieve(NamedTuple):
    """A filter for texts that may contain given n-grams of several lengths. `keys`: a hash table of all n-grams; `lengths`, `steps`
    int64[k]: of a text's n-grams of lengths[i] words, every steps[i]-th is looked up."""

    keys: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    steps: NDArray[np.int64]


def sieve(grams: Iterable[tuple[int, int, NDArray[np.uint64]]]) -> Sieve:
    """Return the sieve for sets of n-grams, given as (length in words, step, hashes); empty sets are left out."""
    some = [(length, step, hashes) for length, step, hashes in grams if len(hashes)]
    keys = table_of({value for _, _, hashes in some for value in hashes.tolist()})
    return Sieve(keys, np.array([length for length, _, _ in some], np.int64), np.array([step for _, step, _ in some], np.int64))


def may_hold(texts: pa.Array | pa.ChunkedArray, grams: Sieve) -> NDArray[np.bool_]:
    """Return a mask of the texts that may have an n-gram of the sieve among those looked up: no false negatives, few false positives."""
    result: NDArray[np.bool_] = _may_hold(*buffers(texts), *tables(), weights(), grams)
    return result


@njit(cache=True)
def _may_hold(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], flags: NDArray[np.uint16], lower: NDArray[np.uint32], breaks: NDArray[np.int8],
    grams: Sieve,
) -> NDArray[np.bool_]:  # fmt: skip
    texts, room = len(offsets) - 1, longest(offsets)
    codes, start, stop = np.empty(room, np.uint32), np.empty(room, np.int32), np.empty(room, np.int32)
    words, result = np.empty(room, np.uint64), np.empty(texts, np.bool_)
    for n in range(texts):
        many = decode(data, offsets[n], offsets[n + 1], codes)
        alone = lower_codes(codes[:many], lower)
        count = _mix_words(codes, flags, start, stop, split_ranges(codes[:many], flags, breaks, start, stop), words)
        result[n] = not alone or _any_held(words, count, grams)
    return result


@njit(cache=True, borrows=True)
def _mix_words(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], start: NDArray[np.int32], stop: NDArray[np.int32], count: int,
    words: NDArray[np.uint64],
) -> int:  # fmt: skip
    """Write the mixed hashes of the first `count` words, except words of symbols only, to `words`; return the number written."""
    kept = 0
    for word in range(count):
        value, every = np.uint64(0), np.uint16(SYMBOL)
        for at in range(start[word], stop[word]):
            value = value * BASE + np.uint64(codes[at]) + ONE
            every &= flags[codes[at]]
        if not every:
            words[kept] = mix(value)
            kept += 1
    return kept


@njit(cache=True, borrows=True)
def _any_held(words: NDArray[np.uint64], count: int, grams: Sieve) -> bool:
    """True if the sieve holds an n-gram, sampled by `steps`, of the first `count` of `words` (mixed hashes of words)."""
    for k in range(len(grams.lengths)):
        n, step = grams.lengths[k], grams.steps[k]
        value, leaving, due = np.uint64(0), ONE, n - 1
        for _ in range(n):
            leaving *= BASE
        for word in range(count):
            value = value * BASE + words[word]
            if word >= n:
                value -= words[word - n] * leaving
            if word == due:
                due += step
                if contains(grams.keys, mix(value + np.uint64(n))):
                    return True
    return False
