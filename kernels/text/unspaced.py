"""Word boundaries in scripts that are written without spaces: Han and kana, Thai, Lao, Khmer, Burmese.

The six letters around a place decide if a word begins there: their uni-, bi- and trigrams have weights by position, whose sum plus a bias
must be positive. This is the model of BudouX (Google 2021) and of Sassano's boosting of word boundaries (2014). The weights come from the
word boundaries of ICU's dictionaries (`tests/benchmarks/word_breaks.py` measures the agreement). All letters of other scripts count
as one letter, all digits as one digit. Features end at white space and punctuation, so a line alone has the same words as in its text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import ALPHABETIC, DECIMAL, SINGLE, WORD

FILE = Path(__file__).parent / "data" / "word_breaks.npz"
BITS = 18
AROUND = 3
BLANK, LETTER, DIGIT = np.uint64(0x20), np.uint64(0x61), np.uint64(0x30)
# First place and length of each feature among the six letters; the boundary is before place 3.
FEATURES = np.array([(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (2, 2), (3, 2), (0, 3), (1, 3), (2, 3), (3, 3)], np.int64)
ROOM = len(FEATURES)
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FINISH = np.uint64(0xBF58476D1CE4E5B9)


@lru_cache(maxsize=1)
def weights() -> NDArray[np.int8]:
    """Return the weights of the features' hash buckets, int8[2^BITS]; the first weight is the bias."""
    with np.load(FILE, allow_pickle=False) as stored:
        result: NDArray[np.int8] = np.zeros(1 << BITS, np.int8)
        result[np.cumsum(stored["gaps"], dtype=np.int64)] = stored["values"]
    return result


@njit(cache=True, inline="always")
def _kind(code: np.uint32, flags: np.uint16) -> np.uint64:
    """Return the kind of a character: itself for letters of scripts without spaces, all marks, and ² or ½; else LETTER, DIGIT or BLANK."""
    if flags & SINGLE or (flags & WORD and not flags & (ALPHABETIC | DECIMAL)):
        return np.uint64(code)
    if flags & ALPHABETIC:
        return LETTER
    return DIGIT if flags & WORD else BLANK


@njit(cache=True)
def features(codes: NDArray[np.uint32], flags: NDArray[np.uint16], at: int, out: NDArray[np.int64]) -> None:
    """Write the hash buckets of the features around the boundary before letter `at` to `out`, int64[ROOM]."""
    around = np.full(2 * AROUND, BLANK)
    for step in range(AROUND):
        back = at - 1 - step
        if back < 0 or (step > 0 and around[AROUND - step] == BLANK):
            break
        around[AROUND - 1 - step] = _kind(codes[back], flags[codes[back]])
    for step in range(AROUND):
        here = at + step
        if here >= len(codes) or (step > 0 and around[AROUND + step - 1] == BLANK):
            break
        around[AROUND + step] = _kind(codes[here], flags[codes[here]])
    for number in range(len(FEATURES)):
        value = np.uint64(number + 1)
        for place in range(FEATURES[number, 0], FEATURES[number, 0] + FEATURES[number, 1]):
            value = (value + around[place]) * MULTIPLIER
            value ^= value >> np.uint64(29)
        # The first bucket holds the bias.
        out[number] = 1 + np.int64((value * FINISH) >> np.uint64(64 - BITS)) % ((1 << BITS) - 1)


@njit(cache=True)
def begins_word(codes: NDArray[np.uint32], flags: NDArray[np.uint16], breaks: NDArray[np.int8], at: int, room: NDArray[np.int64]) -> bool:
    """True if a word begins with letter `at`; `at` and the letter before it must be of scripts without spaces. `breaks`: `weights()`;
    if empty, every letter is a word. `room` int64[ROOM]: scratch memory."""
    if not len(breaks):
        return True
    features(codes, flags, at, room)
    total = np.int64(breaks[0])
    for bin in room:
        total += breaks[bin]
    return bool(total > 0)
