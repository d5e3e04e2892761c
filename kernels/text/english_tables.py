"""Tables of `english_words`: character classes and exceptions of spaCy's tokeniser, symbols of datatrove's filters."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.text.characters import POINTS, SENTENCE_END, SYMBOL, TERMINAL, tables
from puna.kernels.text.hash_table import mix, place, size_for
from puna.kernels.text.words import BASE

DATA = Path(__file__).parent / "data" / "english_words.json"

ALPHA, LOWER, UPPER, PREFIX, SUFFIX, ICON, QUOTE, BEFORE_DOT, CURRENCY, DIGIT, PLAIN = (1 << k for k in range(11))
CLASSES = {
    "alpha": ALPHA, "lower": LOWER, "upper": UPPER, "prefix": PREFIX, "suffix": SUFFIX, "icon": ICON, "quote": QUOTE,
    "before_dot": BEFORE_DOT, "currency": CURRENCY,
}  # fmt: skip
# Characters without a class of their own that nevertheless split: a run without any of these is one word.
SPLITTERS = ".+-*^,:<>=/–—~…$'’@"

MAY_BE_SPECIAL, MAY_BE_FIRST, FILTER_BITS = 1, 2, 14


class EnglishTables(NamedTuple):
    """`classes` uint16[0x110000]. `filter` uint8[2^14]: at the first bits of a word's mixed hash, MAY_BE_SPECIAL where it
    may be an exception and MAY_BE_FIRST where it may begin a sequence that spells one. `units`, `special_keys`,
    `first_keys`: open-addressing tables of word hashes, mixed.

    Exception number `special_at[place]` has pieces of lengths `pieces[special_range[n] : special_range[n + 1]]`.
    Sequences of tokens that spell an exception: those that begin with the token at `first_keys[place]` are numbers
    `first_range[place, 0] .. first_range[place, 1]`; sequence s is of the token hashes
    `sequence[sequence_range[s] : sequence_range[s + 1]]` and spells exception `sequence_special[s]`.
    """

    classes: NDArray[np.uint16]
    filter: NDArray[np.uint8]
    units: NDArray[np.uint64]
    unit_length: int
    special_keys: NDArray[np.uint64]
    special_at: NDArray[np.int32]
    special_range: NDArray[np.int32]
    special_length: int
    pieces: NDArray[np.int32]
    first_keys: NDArray[np.uint64]
    first_range: NDArray[np.int32]
    sequence: NDArray[np.uint64]
    sequence_range: NDArray[np.int32]
    sequence_special: NDArray[np.int32]
    longest_sequence: int


def ranges(text: str) -> list[tuple[int, int]]:
    """`41-5a b5` as [(0x41, 0x5A), (0xB5, 0xB5)]."""
    pairs = [part.split("-") for part in text.split()]
    return [(int(pair[0], 16), int(pair[-1], 16)) for pair in pairs]


@lru_cache(maxsize=1)
def data() -> dict[str, Any]:
    """The file of character classes, units and exceptions."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def character_classes() -> NDArray[np.uint16]:
    """The bits above for every code point, uint16[0x110000]."""
    found = data()["classes"]
    classes = np.zeros(POINTS, np.uint16)
    for name, bit in CLASSES.items():
        for low, high in ranges(found[name]):
            classes[low : high + 1] |= np.uint16(bit)
    classes[ord("0") : ord("9") + 1] |= np.uint16(DIGIT)
    plain = classes & np.uint16(PREFIX | SUFFIX | ICON | QUOTE | CURRENCY | DIGIT) == 0
    plain[[ord(c) for c in SPLITTERS]] = False
    classes[plain] |= np.uint16(PLAIN)
    return classes


def hash_of(word: str) -> int:
    """Polynomial hash of a word, as `words.Words.hash`."""
    value = 0
    for c in word:
        value = (value * int(BASE) + ord(c) + 1) % 2**64
    return value


def table_with_values(keys: list[int]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """An open-addressing table of mixed hashes, and at the same places the number of each key."""
    table = np.zeros(2 * size_for(len(keys)), np.uint64)
    held = np.zeros(len(table), np.int32)
    for n, key in enumerate(keys):
        mixed = np.uint64(mix(np.uint64(key)))
        where = place(table, mixed)
        table[where] = mixed
        held[where] = n
    return table, held


def bare_tables() -> EnglishTables:
    """Tables without any class or exception."""
    none, number = np.zeros(8, np.uint64), np.zeros(8, np.int32)
    return EnglishTables(
        np.zeros(POINTS, np.uint16), np.zeros(1 << FILTER_BITS, np.uint8), none, 0, none, number, number[:1], 0, number[:0],
        none, np.zeros((8, 2), np.int32), none[:0], number[:1], number[:0], 0,
    )  # fmt: skip


@lru_cache(maxsize=1)
def datatrove_flags() -> NDArray[np.uint16]:
    """`characters.tables().flags` with datatrove's symbols and line ends and spaCy's sentence ends, uint16[0x110000]."""
    flags = tables().flags & ~np.uint16(SYMBOL | TERMINAL | SENTENCE_END)
    for name, bit in (("symbol", SYMBOL), ("terminal", TERMINAL), ("sentence_end", SENTENCE_END)):
        for low, high in ranges(data()["classes"][name]):
            flags[low : high + 1] |= np.uint16(bit)
    return flags
