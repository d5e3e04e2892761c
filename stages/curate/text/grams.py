"""Word n-grams as hashes, and finding those of an index in a text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.text.characters import code_points
from puna.stages.curate.text.hash_table import contains, mix
from puna.stages.curate.text.words import BASE, IS_SYMBOL, split_codes


class Hashed(NamedTuple):
    """The words of a text without case and punctuation: `words` uint64[n], their hashes; `start`, `stop` int32[n], their ranges in
    `lowered`, the text in lower case."""

    words: NDArray[np.uint64]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    lowered: str


def word_hashes(text: str) -> Hashed:
    """The words of a text without case and punctuation."""
    lowered = text.lower()
    words = split_codes(code_points(lowered))
    kept = words.flags & IS_SYMBOL == 0
    return Hashed(words.hash[kept], words.start[kept], words.stop[kept], lowered)


@njit(cache=True)
def gram_hashes(words: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Hash of each n-gram of words, uint64[max(len(words) - n + 1, 0)]."""
    out = np.empty(max(len(words) - n + 1, 0), np.uint64)
    mixed = np.empty(len(words), np.uint64)
    value, leaving = np.uint64(0), np.uint64(1)
    for _ in range(n):
        leaving *= BASE
    # Polynomial in the words: the next one is added to the last n, and the first of these is taken off.
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
    """Places of the n-grams that a table (`hash_table.table_of`) holds; a place too many is as likely as two equal hashes."""
    out, size = np.empty(len(grams), np.int64), 0
    for at in range(len(grams)):
        if contains(table, grams[at]):
            out[size] = at
            size += 1
    return out[:size]
