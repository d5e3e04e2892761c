"""Which words of a list a text has, by one compiled pass over its characters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.text.characters import tables
from puna.stages.curate.text.hash_table import mix, place, table_of
from puna.stages.curate.text.unspaced import weights
from puna.stages.curate.text.words import folded_hash, split_ranges


class Listed(NamedTuple):
    """A list of words: `keys` uint64, a table (`hash_table`) of their folded hashes; `numbers` int32 at the same places: which word it
    is; `size`: how many there are."""

    keys: NDArray[np.uint64]
    numbers: NDArray[np.int32]
    size: int


def listed(folded: NDArray[np.uint64]) -> Listed:
    """The list of the words with these different hashes, see `words.folded_hashes`."""
    keys = table_of(folded.tolist())
    numbers = np.zeros(len(keys), np.int32)
    for number, value in enumerate(folded):
        numbers[place(keys, np.uint64(mix(value)))] = number
    return Listed(keys, numbers, len(folded))


def words_held(codes: NDArray[np.uint32], words: Listed) -> NDArray[np.bool_]:
    """Which of the words a text, given as code points, has in any case, bool[size]."""
    flags, lower = tables()
    found: NDArray[np.bool_] = _words_held(codes, flags, lower, weights(), words)
    return found


@njit(cache=True)
def _words_held(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], lower: NDArray[np.uint32], breaks: NDArray[np.int8], words: Listed
) -> NDArray[np.bool_]:
    start, stop = np.empty(len(codes), np.int32), np.empty(len(codes), np.int32)
    found = np.zeros(words.size, np.bool_)
    for word in range(split_ranges(codes, flags, breaks, start, stop)):
        key = mix(folded_hash(codes, flags, lower, start[word], stop[word]))
        where = place(words.keys, key)
        if words.keys[where] == key:
            found[words.numbers[where]] = True
    return found
