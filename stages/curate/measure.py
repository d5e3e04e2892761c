"""Every heuristic number of a document, from one splitting into words."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from puna.stages.curate.characters import code_points, tables
from puna.stages.curate.divergence import count_bins
from puna.stages.curate.gopher import (
    DUPLICATE_N,
    TOP_N,
    duplicate_gram_characters,
    duplicate_pieces,
    line_numbers,
    strip,
    top_gram_characters,
    word_numbers,
)
from puna.stages.curate.line_rules import c4_numbers, fineweb_numbers, length_numbers, ngram_coverage
from puna.stages.curate.words import IS_SYMBOL, Words, exact_hashes, folded_hashes, split_codes

DATA = Path(__file__).parent / "data"


class StopWords(NamedTuple):
    """`hashes` uint64[n], sorted; `languages` uint64[n]: bit i set when the word is language i's (0: English)."""

    hashes: NDArray[np.uint64]
    languages: NDArray[np.uint64]


@lru_cache(maxsize=1)
def stop_words() -> StopWords:
    """The stop words of every language."""
    lines = [line.split() for line in _lines("stop_words.txt")]
    bits: dict[int, int] = {}
    for language, (_, *vocabulary) in enumerate(lines):
        for value in exact_hashes(vocabulary).tolist():
            bits[value] = bits.get(value, 0) | 1 << language
    hashes = np.array(sorted(bits), np.uint64)
    return StopWords(hashes, np.array([bits[h] for h in hashes.tolist()], np.uint64))


@lru_cache(maxsize=1)
def dirty_words() -> NDArray[np.uint64]:
    """Folded hashes of the adult vocabulary, sorted."""
    return np.unique(folded_hashes([word for line in _lines("dirty_words.txt") for word in line.split()]))


def _lines(name: str) -> list[str]:
    text = (DATA / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@njit(cache=True)
def _find(hashes: NDArray[np.uint64], value: np.uint64) -> int:
    """Index of `value` in a sorted array, or -1."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low if low < len(hashes) and hashes[low] == value else -1


@njit(cache=True)
def _stop_word_counts(words: NDArray[np.uint64], hashes: NDArray[np.uint64], languages: NDArray[np.uint64]) -> tuple[int, int]:
    """Distinct stop words found: those of English, and those of the language with most."""
    seen = np.zeros(len(hashes), np.bool_)
    for word in words:
        at = _find(hashes, word)
        if at >= 0:
            seen[at] = True
    counts = np.zeros(64, np.int64)
    for at in range(len(hashes)):
        if seen[at]:
            for bit in range(64):
                counts[bit] += (languages[at] >> np.uint64(bit)) & np.uint64(1)
    return counts[0], counts.max()


@njit(cache=True)
def _count_members(words: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> int:
    count = 0
    for word in words:
        count += _find(hashes, word) >= 0
    return count


class Measurement(NamedTuple):
    """`numbers`: signal name → value. `bins`, `counts`: its words for the divergence. `line_words`,
    `line_covered` int32[lines]: words of each line and those inside n-grams seen earlier."""

    numbers: dict[str, Any]
    bins: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    line_words: NDArray[np.int32]
    line_covered: NDArray[np.int32]


def measure(text: str, coverage_n: int) -> Measurement:
    """All numbers of one document but the divergence, which needs the whole corpus."""
    codes = code_points(text)
    words = split_codes(codes)
    plain = words.folded[words.flags & IS_SYMBOL == 0]
    line_words, line_covered = ngram_coverage(codes, words.start, words.folded, words.flags, coverage_n)
    bins, counts = count_bins(plain)
    dirty = _count_members(plain, dirty_words())
    numbers: dict[str, Any] = {
        "characters": len(codes),
        **_gopher_quality(codes, words),
        **_gopher_repetition(codes, words),
        **_lines_of(codes, words),
        "ngram_coverage": int(line_covered.sum()) / max(len(plain), 1),
        "dirty_words": dirty,
        "dirty_word_ratio": dirty / max(len(plain), 1),
    }
    if numbers["mean_word_length"] is None:
        # C4 counts words between white space: a line of a script without spaces has one, and none would be kept.
        numbers |= {"c4_sentences": None, "c4_open_sentences": None}
    return Measurement(numbers, bins, counts, line_words, line_covered)


def _gopher_quality(codes: NDArray[np.uint32], words: Words) -> dict[str, Any]:
    flags, _ = tables()
    count, mean, hashes, ellipses, letters = word_numbers(codes, flags, words.start, words.stop, words.flags)
    bullets, ends = line_numbers(codes, flags)
    english, best = _stop_word_counts(words.hash, *stop_words())
    return {
        "words": count,
        "mean_word_length": None if mean != mean else mean,
        "hash_ratio": hashes,
        "ellipsis_ratio": ellipses,
        "bullet_line_fraction": bullets,
        "ellipsis_line_fraction": ends,
        "alphabetic_word_fraction": letters,
        "stop_words": best,
        "english_stop_words": english,
    }


def _gopher_repetition(codes: NDArray[np.uint32], words: Words) -> dict[str, float]:
    flags, _ = tables()
    size = max(len(codes), 1)
    lines, repeated, characters = duplicate_pieces(codes, flags, 1, False)
    paragraphs, repeated_p, characters_p = duplicate_pieces(strip(codes, flags), flags, 2, False)
    found = {
        "duplicate_line_fraction": repeated / lines,
        "duplicate_paragraph_fraction": repeated_p / paragraphs,
        "duplicate_line_character_fraction": characters / size,
        "duplicate_paragraph_character_fraction": characters_p / size,
    }
    arrays = (words.start, words.stop, words.hash, words.power)
    for n in TOP_N:
        found[f"top_{n}gram_character_fraction"] = top_gram_characters(*arrays, n) / size
    for n in DUPLICATE_N:
        found[f"duplicate_{n}gram_character_fraction"] = duplicate_gram_characters(*arrays, n) / size
    return found


def _lines_of(codes: NDArray[np.uint32], words: Words) -> dict[str, Any]:
    flags, _ = tables()
    strict, lenient = c4_numbers(codes, words.start, words.stop)
    terminated, short, newlines, inked = fineweb_numbers(codes, flags, len(words.start))
    mean, longest, alphanumeric = length_numbers(codes, flags)
    names = ("sentences", "lorem_ipsum_lines", "curly_bracket_lines")
    return {
        **{f"c4_{name}": int(value) for name, value in zip(names, strict, strict=True)},
        **{f"c4_open_{name}": int(value) for name, value in zip(names, lenient, strict=True)},
        "terminated_line_fraction": terminated,
        "short_line_fraction": short,
        "newline_ratio": newlines,
        "repeated_line_character_fraction": duplicate_pieces(codes, flags, 1, True)[2] / max(inked, 1),
        "mean_line_length": mean,
        "max_line_length": longest,
        "alphanumeric_fraction": alphanumeric,
    }
