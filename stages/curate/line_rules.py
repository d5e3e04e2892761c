"""Numbers about the lines of a document: C4's and FineWeb's, line lengths, n-grams seen earlier.

C4 (Raffel et al. 2020, arXiv 1910.10683) and FineWeb (arXiv 2406.17557) as datatrove defines them; sentences
are counted as spaCy's sentencizer does, over the words of `puna.stages.curate.words`.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from puna.stages.curate.characters import (
    ALPHANUMERIC,
    BREAK,
    DECIMAL,
    PUNCTUATION,
    SPACE,
    TERMINAL,
    tables,
)
from puna.stages.curate.hash_table import place, size_for
from puna.stages.curate.words import DOT, HAS_LETTER, IS_SYMBOL, mix

NEWLINE, RETURN, CURLY, OPEN, CLOSE = 0x0A, 0x0D, 0x7B, 0x5B, 0x5D
MAX_WORD_CHARACTERS = 1000
MIN_LINE_WORDS = 3
SHORT_LINE_CHARACTERS = 30
LOREM_IPSUM = "lorem ipsum"
JAVASCRIPT = "javascript"
POLICY_PHRASES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def _codes(phrases: tuple[str, ...]) -> NDArray[np.uint32]:
    """Phrases as one array, each ended by a 0."""
    return np.array([ord(c) for phrase in phrases for c in phrase + "\0"], np.uint32)


MARKS = _codes(("edit", "citation needed"))
LOREM_CODES = _codes((LOREM_IPSUM,))
JAVASCRIPT_CODES = _codes((JAVASCRIPT,))
POLICY_CODES = _codes(POLICY_PHRASES)
ENDINGS = np.array([ord(c) for c in ".?!\"'"], np.uint32)


@njit(cache=True)
def _contains(line: NDArray[np.uint32], phrases: NDArray[np.uint32]) -> bool:
    """Whether `line` contains one of the phrases, each ended by a 0."""
    first = 0
    while first < len(phrases):
        last = first
        while phrases[last] != 0:
            last += 1
        size = last - first
        for at in range(len(line) - size + 1):
            if line[at] == phrases[first]:
                k = 1
                while k < size and line[at + k] == phrases[first + k]:
                    k += 1
                if k == size:
                    return True
        first = last + 1
    return False


@njit(cache=True)
def _citation_end(codes: NDArray[np.uint32], flags: NDArray[np.uint16], at: int, stop: int, marks: NDArray[np.uint32]) -> int:
    """End of the citation mark (`[12]`, `[]`, `[edit]`, `[citation needed]`) that starts at `at`, or `at`."""
    k = at + 1
    while k < stop and flags[codes[k]] & DECIMAL:
        k += 1
    if k < stop and codes[k] == CLOSE:
        return k + 1
    first = 0
    while first < len(marks):
        k, m = at + 1, first
        while marks[m] != 0 and k < stop and codes[k] == marks[m]:
            k += 1
            m += 1
        if marks[m] == 0 and k < stop and codes[k] == CLOSE:
            return k + 1
        while marks[m] != 0:
            m += 1
        first = m + 1
    return at


@njit(cache=True)
def _white_space_words(codes: NDArray[np.uint32], flags: NDArray[np.uint16], start: int, stop: int) -> tuple[int, int]:
    """Number of words between white space, and the longest one's length."""
    count, longest, run = 0, 0, 0
    for at in range(start, stop):
        if flags[codes[at]] & SPACE:
            run = 0
        else:
            run += 1
            if run == 1:
                count += 1
            longest = max(longest, run)
    return count, longest


@njit(cache=True)
def _sentences(
    codes: NDArray[np.uint32],
    flags: NDArray[np.uint16],
    start: NDArray[np.int32],
    stop: NDArray[np.int32],
    first: int,
    last: int,
    end: int,
    marks: NDArray[np.uint32],
) -> int:
    """Sentences among the words first..last of a line that ends at character `end`, citation marks left out."""
    count, ended, skip = 0, False, 0
    for word in range(first, last):
        if start[word] < skip:
            continue
        # "fact.[1]" is one word here and "fact" and "." without its citation mark.
        mark = start[word]
        after = mark
        while mark < stop[word] and after <= mark:
            if codes[mark] == OPEN:
                after = _citation_end(codes, flags, mark, end, marks)
            if after <= mark:
                mark += 1
                after = mark
        if after > mark:
            skip = after
            if mark == start[word]:
                continue
        count = max(count, 1)
        code = codes[start[word]]
        if flags[code] & TERMINAL and mark == start[word] + 1:
            ended = True
        elif ended and not flags[code] & PUNCTUATION:
            count += 1
            ended = False
        if mark < stop[word] and flags[codes[mark - 1]] & TERMINAL:
            ended = True
    return count


@njit(cache=True)
def _c4(
    codes: NDArray[np.uint32],
    flags: NDArray[np.uint16],
    lower: NDArray[np.uint32],
    start: NDArray[np.int32],
    stop: NDArray[np.int32],
    endings: NDArray[np.uint32],
    marks: NDArray[np.uint32],
    lorem: NDArray[np.uint32],
    javascript: NDArray[np.uint32],
    policy: NDArray[np.uint32],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sentences, lorem ipsum lines, curly bracket lines), with and without the rule on terminal punctuation."""
    strict, lenient = np.zeros(3, np.int64), np.zeros(3, np.int64)
    line = np.empty(len(codes), np.uint32)
    at, total, word = 0, len(codes), 0
    while at < total:
        end = at
        while end < total and not flags[codes[end]] & BREAK:
            end += 1
        first_word = word
        while word < len(start) and start[word] < end:
            word += 1
        a, b = at, end
        at = end + 1
        if end + 1 < total and codes[end] == RETURN and codes[end + 1] == NEWLINE:
            at = end + 2
        while a < b and flags[codes[a]] & SPACE:
            a += 1
        while b > a and flags[codes[b - 1]] & SPACE:
            b -= 1
        count, longest = _white_space_words(codes, flags, a, b)
        if longest > MAX_WORD_CHARACTERS or count < MIN_LINE_WORDS:
            continue
        size, k, curly = 0, a, False
        while k < b:
            if codes[k] == OPEN:
                skip = _citation_end(codes, flags, k, b, marks)
                if skip > k:
                    k = skip
                    continue
            line[size] = lower[codes[k]]
            curly = curly or codes[k] == CURLY
            size += 1
            k += 1
        ends = False
        if size:
            for ending in endings:
                ends = ends or line[size - 1] == ending
            if size >= 3 and line[size - 1] == DOT and line[size - 2] == DOT and line[size - 3] == DOT:
                ends = False
        text = line[:size]
        if _contains(text, lorem):
            lenient[1] += 1
            strict[1] += ends
        elif _contains(text, javascript):
            continue
        elif curly:
            lenient[2] += 1
            strict[2] += ends
        elif not _contains(text, policy):
            found = _sentences(codes, flags, start, stop, first_word, word, end, marks)
            lenient[0] += found
            strict[0] += found if ends else 0
    return strict, lenient


def c4_numbers(codes: NDArray[np.uint32], start: NDArray[np.int32], stop: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """C4's numbers, int64[3] each: sentences in kept lines, lines with "lorem ipsum", lines with a curly bracket.

    The first with the rule that a line must end in `.`, `?`, `!`, `"` or `'` but not in an ellipsis, the second
    without it (FineWeb's use). A line counts for the last two when it passed the rules before: no word of more than
    1000 characters, the terminal punctuation, three words, no "javascript".
    """
    flags, lower = tables()
    strict, lenient = _c4(codes, flags, lower, start, stop, ENDINGS, MARKS, LOREM_CODES, JAVASCRIPT_CODES, POLICY_CODES)
    return strict, lenient


@njit(cache=True)
def fineweb_numbers(codes: NDArray[np.uint32], flags: NDArray[np.uint16], words: int) -> tuple[float, float, float, int]:
    """Of the non-blank lines the share that end a sentence and the share of at most 30 characters; newlines per
    word; characters other than newlines."""
    lines, terminated, short, newlines = 0, 0, 0, 0
    start = 0
    for at in range(len(codes) + 1):
        if at < len(codes) and codes[at] != NEWLINE:
            continue
        newlines += at < len(codes)
        blank = True
        for i in range(start, at):
            if not flags[codes[i]] & SPACE:
                blank = False
                break
        if not blank:
            lines += 1
            terminated += flags[codes[at - 1]] & TERMINAL != 0
            short += at - start <= SHORT_LINE_CHARACTERS
        start = at + 1
    return terminated / max(lines, 1), short / max(lines, 1), newlines / max(words, 1), len(codes) - newlines


@njit(cache=True)
def length_numbers(codes: NDArray[np.uint32], flags: NDArray[np.uint16]) -> tuple[float, int, float]:
    """Mean and greatest length of the lines (split at newlines), share of letters and digits among the characters."""
    lines, longest, start, alphanumeric = 0, 0, 0, 0
    for at in range(len(codes) + 1):
        if at < len(codes) and codes[at] != NEWLINE:
            alphanumeric += flags[codes[at]] & ALPHANUMERIC != 0
            continue
        lines += 1
        longest = max(longest, at - start)
        start = at + 1
    return (len(codes) - lines + 1) / lines, longest, alphanumeric / max(len(codes), 1)


@njit(cache=True)
def ngram_coverage(
    codes: NDArray[np.uint32],
    start: NDArray[np.int32],
    folded: NDArray[np.uint64],
    word_flags: NDArray[np.uint8],
    n: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per line (split at newlines): non-symbol words, and how many of them lie in an n-gram seen earlier.

    N-grams are of non-symbol words, in lower case and with every number alike, and run across lines. One with
    letters in fewer than half of its words does not count: tables of numbers are not repetition.
    """
    lines = 1
    for code in codes:
        lines += code == NEWLINE
    words, covered = np.zeros(lines, np.int32), np.zeros(lines, np.int32)
    kept = np.empty(len(start), np.int32)
    line_of = np.empty(len(start), np.int32)
    count, line, at = 0, 0, 0
    for word in range(len(start)):
        while at < start[word]:
            line += codes[at] == NEWLINE
            at += 1
        if not word_flags[word] & IS_SYMBOL:
            kept[count] = word
            line_of[count] = line
            words[line] += 1
            count += 1
    keys = np.zeros(size_for(max(count - n + 1, 0)), np.uint64)
    done = 0
    for i in range(count - n + 1):
        value, letters = np.uint64(0), 0
        for k in range(i, i + n):
            value = mix(value + folded[kept[k]])
            letters += word_flags[kept[k]] & HAS_LETTER != 0
        if 2 * letters < n:
            continue
        where = place(keys, value)
        if keys[where] == value:
            for k in range(max(i, done), i + n):
                covered[line_of[k]] += 1
            done = i + n
        keys[where] = value
    return words, covered
