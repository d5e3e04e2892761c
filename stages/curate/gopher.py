"""Gopher's numbers about a document (Rae et al. 2021, arXiv 2112.11446, appendix A.1), as datatrove defines them.

Two differences, both small on real pages: words are those of `puna.stages.curate.words`, and a symbol is any
character of Unicode's punctuation, symbol and control categories instead of a list of 280.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from puna.stages.curate.characters import BREAK, SINGLE, SPACE
from puna.stages.curate.hash_table import place, size_for
from puna.stages.curate.words import BASE, DOT, HAS_LETTER, HYPHEN, IS_SYMBOL, ONE, mix

HASH_SIGN, ELLIPSIS, BULLET, NEWLINE = 0x23, 0x2026, 0x2022, 0x0A
GAP = np.uint64(0x20) + ONE  # the space between the words of an n-gram

TOP_N = (2, 3, 4)
DUPLICATE_N = (5, 6, 7, 8, 9, 10)


@njit(cache=True)
def word_numbers(
    codes: NDArray[np.uint32],
    flags: NDArray[np.uint16],
    start: NDArray[np.int32],
    stop: NDArray[np.int32],
    word_flags: NDArray[np.uint8],
) -> tuple[int, float, float, float, float]:
    """Non-symbol words, their mean length, `#` per word, ellipses per word, share of words with a letter.

    The mean length is NaN where most words are of a script written without spaces: a word is one character there.
    Ratios of a text without words are 0.
    """
    count, characters, letters, single = 0, 0, 0, 0
    for word in range(len(start)):
        if not word_flags[word] & IS_SYMBOL:
            count += 1
            characters += stop[word] - start[word]
            if flags[codes[start[word]]] & SINGLE:
                single += 1
        if word_flags[word] & HAS_LETTER:
            letters += 1
    hashes, ellipses, run = 0, 0, 0
    for code in codes:
        if code == HASH_SIGN:
            hashes += 1
        elif code == ELLIPSIS:
            ellipses += 1
        run = run + 1 if code == DOT else 0
        if run == 3:
            ellipses += 1
            run = 0
    words = max(len(start), 1)
    mean = np.nan if 2 * single > count else characters / max(count, 1)
    return count, mean, hashes / words, ellipses / words, letters / words


@njit(cache=True)
def line_numbers(codes: NDArray[np.uint32], flags: NDArray[np.uint16]) -> tuple[float, float]:
    """Share of lines (as str.splitlines cuts them) that start with a bullet, and that end with an ellipsis."""
    lines, bullets, ellipses = 0, 0, 0
    at, total = 0, len(codes)
    while at < total:
        end = at
        while end < total and not flags[codes[end]] & BREAK:
            end += 1
        lines += 1
        first, last = at, end
        while first < end and flags[codes[first]] & SPACE:
            first += 1
        while last > at and flags[codes[last - 1]] & SPACE:
            last -= 1
        if first < end and (codes[first] == BULLET or codes[first] == HYPHEN):
            bullets += 1
        if (last > at and codes[last - 1] == ELLIPSIS) or (
            last >= at + 3 and codes[last - 1] == DOT and codes[last - 2] == DOT and codes[last - 3] == DOT
        ):
            ellipses += 1
        at = end + 1
        if end + 1 < total and codes[end] == 0x0D and codes[end + 1] == NEWLINE:
            at = end + 2
    return bullets / max(lines, 1), ellipses / max(lines, 1)


@njit(cache=True)
def duplicate_pieces(codes: NDArray[np.uint32], flags: NDArray[np.uint16], newlines: int, skip_blank: bool) -> tuple[int, int, int]:
    """Pieces between runs of at least `newlines` newlines: how many, how many were seen before, their characters.

    `skip_blank` leaves out pieces of white space alone.
    """
    total = len(codes)
    breaks = 0
    for code in codes:
        if code == NEWLINE:
            breaks += 1
    keys = np.zeros(size_for(breaks + 2), np.uint64)
    pieces, duplicates, characters = 0, 0, 0
    start, at = 0, 0
    while at <= total:
        run = 0
        while at + run < total and codes[at + run] == NEWLINE:
            run += 1
        if at < total and run < newlines:
            at += max(run, 1)
            continue
        value, blank = np.uint64(0), True
        for i in range(start, at):
            value = value * BASE + np.uint64(codes[i]) + ONE
            blank = blank and flags[codes[i]] & SPACE != 0
        if not (skip_blank and blank):
            pieces += 1
            key = mix(value)
            where = place(keys, key)
            if keys[where] == key:
                duplicates += 1
                characters += at - start
            keys[where] = key
        if at == total:
            break
        at += run
        start = at
    return pieces, duplicates, characters


@njit(cache=True)
def strip(codes: NDArray[np.uint32], flags: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """The text without white space at its ends."""
    first, last = 0, len(codes)
    while first < last and flags[codes[first]] & SPACE:
        first += 1
    while last > first and flags[codes[last - 1]] & SPACE:
        last -= 1
    return codes[first:last]


@njit(cache=True)
def top_gram_characters(
    start: NDArray[np.int32], stop: NDArray[np.int32], hashes: NDArray[np.uint64], powers: NDArray[np.uint64], n: int
) -> int:
    """Characters (spaces between words included) of the most frequent n-gram, times its count.

    Of equally frequent n-grams the first counts. 0 for a text of fewer than n words.
    """
    grams = len(hashes) - n + 1
    if grams < 1:
        return 0
    keys = np.zeros(size_for(grams), np.uint64)
    counts = np.zeros(len(keys), np.int32)
    firsts = np.empty(len(keys), np.int32)
    best, best_first = 0, 0
    for i in range(grams):
        value = hashes[i]
        for word in range(i + 1, i + n):
            value = (value * BASE + GAP) * powers[word] + hashes[word]
        key = mix(value)
        where = place(keys, key)
        if keys[where] == 0:
            keys[where] = key
            firsts[where] = i
        counts[where] += 1
        if counts[where] > best or (counts[where] == best and firsts[where] < best_first):
            best = counts[where]
            best_first = firsts[where]
    length = n - 1
    for word in range(best_first, best_first + n):
        length += stop[word] - start[word]
    return length * best


@njit(cache=True)
def duplicate_gram_characters(
    start: NDArray[np.int32], stop: NDArray[np.int32], hashes: NDArray[np.uint64], powers: NDArray[np.uint64], n: int
) -> int:
    """Characters of n-grams (joined without spaces) that were seen before; a hit goes on after the n-gram."""
    words = len(hashes)
    keys = np.zeros(size_for(max(words - n + 1, 0)), np.uint64)
    characters, i = 0, 0
    while i < words - n + 1:
        value = hashes[i]
        for word in range(i + 1, i + n):
            value = value * powers[word] + hashes[word]
        key = mix(value)
        where = place(keys, key)
        if keys[where] == key:
            for word in range(i, i + n):
                characters += stop[word] - start[word]
            i += n
        else:
            keys[where] = key
            i += 1
    return characters
