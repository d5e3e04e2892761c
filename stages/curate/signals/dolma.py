"""Gopher's and C4's numbers as dolma 1.2 measures them (Soldaini et al. 2024, arXiv 2402.00159; taggers gopher_v2, c4_v2).

Words are what lies between white space. Lines lie between runs of newlines for Gopher's numbers, between newlines for C4's.
On a text without blank lines, as all of the Dolma corpus were, the tagger gopher_v1 gives what gopher_v2 does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import ALPHABETIC, SPACE
from puna.kernels.text.hash_table import cleared, mix, place
from puna.kernels.text.words import DOT, DOUBLE_QUOTE, HYPHEN
from puna.stages.curate.signals.gopher import ELLIPSIS, HASH_SIGN, NEWLINE, stripped
from puna.stages.curate.signals.line_rules import CURLY, JAVASCRIPT, LOREM_IPSUM, MIN_LINE_WORDS, phrase_kinds, white_space_words

STAR, QUESTION, EXCLAMATION = 0x2A, 0x3F, 0x21


@njit(cache=True, borrows=True)
def split_white_space(
    codes: NDArray[np.uint32],
    flags: NDArray[np.uint16],
    hashes: NDArray[np.uint64],
    powers: NDArray[np.uint64],
    start: NDArray[np.int32],
    stop: NDArray[np.int32],
    hash_of: NDArray[np.uint64],
    power_of: NDArray[np.uint64],
) -> tuple[int, int, int]:
    """Fill range, hash and power of all words (see `words.Words`); how many, how many have a letter, how many `#` or `…`."""
    count, lettered, symbols, at, total = 0, 0, 0, 0, len(codes)
    while at < total:
        if flags[codes[at]] & SPACE:
            at += 1
            continue
        first, some, symbol = at, 0, False
        while at < total:
            code = codes[at]
            here = flags[code]
            if here & SPACE:
                break
            some |= here
            symbol = symbol or code in (HASH_SIGN, ELLIPSIS)
            at += 1
        lettered += some & ALPHABETIC != 0
        symbols += symbol
        start[count], stop[count], power_of[count] = first, at, powers[at - first]
        hash_of[count] = hashes[at] - hashes[first] * powers[at - first]
        count += 1
    return count, lettered, symbols


@njit(cache=True, borrows=True)
def median_length(start: NDArray[np.int32], stop: NDArray[np.int32], counts: NDArray[np.int32]) -> float:
    """Median length of the words, 0 without words. `counts`: room for one number more than the longest has characters."""
    words, longest = len(start), 0
    for word in range(words):
        longest = max(longest, stop[word] - start[word])
    counts[: longest + 1] = 0
    for word in range(words):
        counts[stop[word] - start[word]] += 1
    seen, low, length = 0, 0, 0
    while words:
        seen += counts[length]
        if 2 * seen > words - 1 and low == 0:
            low = length
        if 2 * seen > words:
            break
        length += 1
    return (low + length) / 2


@njit(cache=True, borrows=True)
def occurrences(hashes: NDArray[np.uint64], stop_keys: NDArray[np.uint64], stop_languages: NDArray[np.uint64]) -> int:
    """How many words are stop words of English, each as often as it occurs."""
    count = 0
    for value in hashes:
        key = mix(value)
        where = place(stop_keys, key)
        count += stop_keys[where] == key and stop_languages[where] & np.uint64(1) != 0
    return count


@njit(cache=True, borrows=True)
def line_numbers(
    codes: NDArray[np.uint32], hashes: NDArray[np.uint64], powers: NDArray[np.uint64], keys: NDArray[np.uint64], counts: NDArray[np.int32]
) -> tuple[float, float, float, int]:
    """Shares of the lines between runs of newlines that begin with `*` or `-`, that end with `…`, and that occur more
    than once; and the characters of the last.

    A newline at either end of the text leaves an empty line there. `keys`: an empty table; `counts`: as long as it.
    """
    lines, bullets, ellipses, repeated, characters, start, total = 0, 0, 0, 0, 0, 0, len(codes)
    while start <= total:
        end = start
        while end < total and codes[end] != NEWLINE:
            end += 1
        lines += 1
        if end > start:
            bullets += codes[start] == STAR or codes[start] == HYPHEN
            ellipses += codes[end - 1] == ELLIPSIS
        key = mix(hashes[end] - hashes[start] * powers[end - start])
        where = place(keys, key)
        if keys[where] == 0:
            keys[where], counts[where] = key, 0
        counts[where] += 1
        if counts[where] > 1:
            times = 2 if counts[where] == 2 else 1  # the first one counts too, once it is repeated
            repeated += times
            characters += times * (end - start)
        if end == total:
            break
        while end < total and codes[end] == NEWLINE:
            end += 1
        start = end
    return bullets / lines, ellipses / lines, repeated / lines, characters


@njit(cache=True)
def repeated_gram_share(
    spaced: NDArray[np.uint64],
    length: NDArray[np.int64],
    powers: NDArray[np.uint64],
    n: int,
    space: NDArray[np.uint64],
    counts: NDArray[np.int32],
) -> float:
    """Characters of all occurrences of n-grams that occur more than once, of those of all n-grams; 0 for fewer than n words.

    `spaced`, `length`: see `gopher.chain`; `space`, `counts`: room for a table.
    """
    grams = len(spaced) - n
    if grams < 1:
        return 0.0
    keys = cleared(space, grams)
    repeated, total = 0, 0
    for i in range(grams):
        size = length[i + n] - length[i]
        key = mix(spaced[i + n] - spaced[i] * powers[size + n])
        where = place(keys, key)
        if keys[where] == 0:
            keys[where], counts[where] = key, 0
        counts[where] += 1
        if counts[where] > 1:
            repeated += 2 * size if counts[where] == 2 else size
        total += size
    return repeated / total


@njit(cache=True, borrows=True)
def c4_lines(codes: NDArray[np.uint32], flags: NDArray[np.uint16], lower: NDArray[np.uint32], one: Any) -> None:
    """Write to a document's record how many lines, blank ones too, end in none of `.`, `?`, `!`, `"`; have fewer than three words; have a
    curly bracket; have "lorem ipsum"; have "javascript".
    """
    open_, few, curlies, lorem, javascript, start, total = 0, 0, 0, 0, 0, 0, len(codes)
    while start <= total:
        end, curly = start, False
        while end < total and codes[end] != NEWLINE:
            curly = curly or codes[end] == CURLY
            end += 1
        first, last = stripped(codes, flags, start, end)
        final = codes[last - 1] if last > first else NEWLINE
        open_ += final not in (DOT, QUESTION, EXCLAMATION, DOUBLE_QUOTE)
        few += white_space_words(codes, flags, first, last)[0] < MIN_LINE_WORDS
        curlies += curly
        kinds = phrase_kinds(codes, lower, first, last)
        lorem += kinds & LOREM_IPSUM != 0
        javascript += kinds & JAVASCRIPT != 0
        start = end + 1
    one.unpunctuated_lines, one.few_word_lines, one.curly_bracket_lines = open_, few, curlies
    one.lorem_ipsum_lines, one.javascript_lines = lorem, javascript
