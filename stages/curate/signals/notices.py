"""Listed phrases in a text, compiled: how much of it is terms and policies, and how much stands in place of a page."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.hash_table import bits_of, mix, perhaps, place, table_of
from puna.kernels.text.words import BASE, folded_hashes
from puna.stages.curate.signals.definitions.notices import MIN_LEGAL_PHRASES, MIN_SPOKEN_PHRASES, NOTICE_WORDS, SPEAKERS
from puna.stages.curate.signals.definitions.views import entries

LEGAL, SPOKEN, NOTICE = 1, 2, 3


class Phrases(NamedTuple):
    """`begins`: the first words' folded hashes as `bits_of`; `keys`: a table of hashes of the phrases' words together; `kinds` uint8 at
    the same places; `longest`: words of the longest."""

    begins: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    kinds: NDArray[np.uint8]
    longest: int


@lru_cache(maxsize=1)
def listed_phrases() -> Phrases:
    """Return the phrases of `notices.txt`."""
    results: dict[int, int] = {}
    begins = set()
    for kind, *words in entries("notices.txt"):
        value = 0
        for folded in folded_hashes(words).tolist():
            value = (value * int(BASE) + folded) % 2**64
        results[value] = NOTICE if kind == "notice" else LEGAL if SPEAKERS.isdisjoint(words) else SPOKEN
        begins.add(folded_hashes(words[:1])[0])
    keys = table_of(results)
    kinds = np.zeros(len(keys), np.uint8)
    for value, number in results.items():
        kinds[place(keys, np.uint64(mix(np.uint64(value))))] = number
    return Phrases(bits_of(map(int, begins)), keys, kinds, max(len(entry) - 1 for entry in entries("notices.txt")))


@njit(cache=True)
def notice_numbers(words: NDArray[np.uint64], of_line: NDArray[np.int32], listed: Phrases) -> tuple[float, float]:
    """Return `legal_phrase_ratio` and `notice_ratio` of a text whose non-symbol words and their lines are given: phrases run across
    signs and lines."""
    count = len(words)
    seen = np.zeros(len(listed.keys), np.bool_)
    different, spoken, legal, legal_to, noticed_to = 0, 0, 0, 0, 0
    noticed = np.zeros(count, np.bool_)
    for i in range(count):
        if not perhaps(listed.begins, words[i]):
            continue
        value = np.uint64(0)
        for k in range(i, min(i + listed.longest, count)):
            value = value * BASE + words[k]
            key = mix(value)
            where = place(listed.keys, key)
            if listed.keys[where] != key:
                continue
            if listed.kinds[where] != NOTICE:
                different += not seen[where]
                spoken += not seen[where] and listed.kinds[where] == SPOKEN
                seen[where] = True
                legal += max(k + 1 - max(legal_to, i), 0)
                legal_to = max(legal_to, k + 1)
            else:
                noticed[max(noticed_to, i) : k + 1] = True
                noticed_to = max(noticed_to, k + 1)
    said, first = 0, 0
    while first < count:
        last, some = first, False
        while last < count and of_line[last] == of_line[first]:
            some = some or noticed[last]
            last += 1
        said += last - first if some else 0
        first = last
    enough = different >= MIN_LEGAL_PHRASES and spoken >= MIN_SPOKEN_PHRASES
    return (legal / max(count, 1) if enough else 0.0), min(said, NOTICE_WORDS) / max(count, 1)
