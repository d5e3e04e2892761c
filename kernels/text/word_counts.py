"""Counts of listed words in texts, from one compiled pass over the characters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import cut, decode, longest, tables
from puna.kernels.text.hash_table import bits_of, mix, perhaps, place, table_of
from puna.kernels.text.strings import buffers
from puna.kernels.text.unspaced import weights
from puna.kernels.text.words import folded_hash, split_ranges


class Listed(NamedTuple):
    """A list of words for fast lookup. `bits`, `keys` uint64: the words' folded hashes as a bitmap (`bits_of`) and as a table (`table_of`);
    `numbers` int32: for each place in `keys`, the index of the word there; `size`: the number of words."""

    bits: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    numbers: NDArray[np.int32]
    size: int


def list_words(folded: NDArray[np.uint64]) -> Listed:
    """Return the list of words with these distinct hashes (`words.Words.folded`)."""
    keys = table_of(folded.tolist())
    numbers = np.zeros(len(keys), np.int32)
    for number, value in enumerate(folded):
        numbers[place(keys, np.uint64(mix(value)))] = number
    return Listed(bits_of(folded.tolist()), keys, numbers, len(folded))


def kinds_held(
    texts: pa.Array | pa.ChunkedArray, characters: int, words: Listed, kinds: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Return int64[texts, count]: distinct listed words per kind in a text's first `characters` characters. `kinds`: each word's kind."""
    data, offsets = buffers(texts)
    result: NDArray[np.int64] = _kinds_held(data, offsets, characters, *tables(), weights(), words, kinds, count)
    return result


@njit(cache=True)
def _kinds_held(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], characters: int, flags: NDArray[np.uint16], lower: NDArray[np.uint32],
    breaks: NDArray[np.int8], words: Listed, kinds: NDArray[np.int64], count: int,
) -> NDArray[np.int64]:  # fmt: skip
    texts, room = len(offsets) - 1, min(longest(offsets), characters)
    codes, start, stop = np.empty(room, np.uint32), np.empty(room, np.int32), np.empty(room, np.int32)
    result, seen = np.zeros((texts, count), np.int64), np.full(words.size, -1, np.int64)  # the last text in which a word was seen
    for n in range(texts):
        many = decode(data, offsets[n], cut(data, offsets[n], offsets[n + 1], characters), codes)
        for word in range(split_ranges(codes[:many], flags, breaks, start, stop)):
            folded = folded_hash(codes, flags, lower, start[word], stop[word])
            if not perhaps(words.bits, folded):
                continue
            key = mix(folded)
            where = place(words.keys, key)
            number = words.numbers[where]
            if words.keys[where] == key and seen[number] != n:
                seen[number] = n
                result[n, kinds[number]] += 1
    return result
