"""Compiled signals of lines: the rules of C4 and FineWeb, n-grams seen earlier, legal phrases and notices.

C4's rules (Raffel et al. 2020, arXiv 1910.10683) and FineWeb's (2406.17557) are as in datatrove, sentences as in spaCy's sentencizer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import BREAK, DECIMAL, PUNCTUATION, SPACE, TERMINAL
from puna.kernels.text.hash_table import bits_of, clear_slots, mix, perhaps, place, slot_of, table_of
from puna.kernels.text.words import BASE, DOT, HAS_LETTER, IS_SYMBOL, split_ranges, words_listed
from puna.stages.curate.signals.definitions.notices import MIN_LEGAL_PHRASES, MIN_SPOKEN_PHRASES, NOTICE_WORDS, SPEAKERS
from puna.stages.curate.signals.definitions.views import entries
from puna.stages.curate.signals.gopher import I32, U8, U16, U32, U64, strip

NEWLINE, RETURN, CURLY, OPEN, CLOSE, BLANK = 0x0A, 0x0D, 0x7B, 0x5B, 0x5D, 0x20
MAX_WORD_CHARACTERS = 1000
MIN_LINE_WORDS = 3
SHORT_LINE_CHARACTERS = 30
LOREM_IPSUM, JAVASCRIPT, POLICY = 1, 2, 4
NO_BREAKS = np.zeros(0, np.int8)
PHRASES = {
    "lorem ipsum": LOREM_IPSUM, "javascript": JAVASCRIPT, "terms of use": POLICY, "privacy policy": POLICY, "cookie policy": POLICY,
    "uses cookies": POLICY, "use of cookies": POLICY, "use cookies": POLICY,
}  # fmt: skip


def packed_phrases(phrases: tuple[str, ...]) -> U32:
    """Return the code points of all phrases as one array, with a 0 after each phrase."""
    return np.array([ord(c) for phrase in phrases for c in phrase + "\0"], np.uint32)


MARKS = packed_phrases(("edit", "citation needed"))
PHRASE_CODES = packed_phrases(tuple(PHRASES))
PHRASE_KINDS = np.array(list(PHRASES.values()), np.int64)
PHRASE_STARTS = np.cumsum([0, *(len(phrase) + 1 for phrase in PHRASES)])[:-1]
# Wu-Manber search (1994): a window is as long as the shortest phrase; its last two letters determine the step to the next window.
WINDOW = min(map(len, PHRASES))
ASCII = 128
STEPS = np.full(ASCII * ASCII, WINDOW - 1, np.uint8)
for _phrase in PHRASES:
    for _last in range(1, WINDOW):
        _pair = ord(_phrase[_last - 1]) * ASCII + ord(_phrase[_last])
        STEPS[_pair] = min(STEPS[_pair], WINDOW - 1 - _last)


@njit(cache=True, borrows=True)
def starts_with(codes: U32, lower: U32, at: int, stop: int, phrase: U32, first: int) -> int:
    """Return the length of the 0-terminated `phrase[first:]` if codes[at:stop] starts with it, ignoring case, else 0."""
    k = 0
    while phrase[first + k] != 0:
        if at + k >= stop or lower[codes[at + k]] != phrase[first + k]:
            return 0
        k += 1
    return k


@njit(cache=True, borrows=True)
def phrase_kinds(codes: U32, lower: U32, a: int, b: int) -> int:
    """Return a bit mask of the kinds of C4's phrases that codes[a:b] contains."""
    result, at, last = 0, a + WINDOW - 1, np.uint32(ASCII - 1)  # `last` occurs in no phrase
    while at < b:
        step = int(STEPS[min(lower[codes[at - 1]], last) * ASCII + min(lower[codes[at]], last)])
        if step == 0:
            for number in range(len(PHRASE_STARTS)):
                if starts_with(codes, lower, at - WINDOW + 1, b, PHRASE_CODES, PHRASE_STARTS[number]):
                    result |= PHRASE_KINDS[number]
        at += step if step else 1
    return result


@njit(cache=True, borrows=True)
def _citation_end(codes: U32, flags: U16, lower: U32, at: int, stop: int) -> int:
    """Return the end of the citation mark (`[12]`, `[]`, `[edit]`, `[citation needed]`) that starts at `at`, or `at` if there is none."""
    k = at + 1
    while k < stop and flags[codes[k]] & DECIMAL:
        k += 1
    if k < stop and codes[k] == CLOSE:
        return k + 1
    first = 0
    while first < len(MARKS):
        k, m = at + 1, first
        while MARKS[m] != 0 and k < stop and codes[k] == MARKS[m]:
            k += 1
            m += 1
        if MARKS[m] == 0 and k < stop and codes[k] == CLOSE:
            return k + 1
        while MARKS[m] != 0:
            m += 1
        first = m + 1
    return at


@njit(cache=True, borrows=True)
def without_citations(codes: U32, flags: U16, lower: U32, a: int, b: int, line: U32) -> int:
    """Copy codes[a:b] without citation marks to `line`; return the length of the copy."""
    size, at = 0, a
    while at < b:
        if codes[at] == OPEN:
            end = _citation_end(codes, flags, lower, at, b)
            if end > at:
                at = end
                continue
        line[size] = codes[at]
        size += 1
        at += 1
    return size


@njit(cache=True, borrows=True)
def sentences(codes: U32, flags: U16, start: I32, stop: I32, first: int, last: int, a: int, b: int) -> int:
    """Return the number of sentences in the line codes[a:b], whose words have the indices first to last - 1.

    After a terminator, the first word that is not punctuation starts a sentence. White space other than a single blank counts as a word."""
    if a == b:
        return 0
    count, ended, position = 1, False, a
    for word in range(first, last):
        gap = start[word] - position
        if ended and (gap > 1 or (gap == 1 and codes[position] != BLANK)):
            count += 1
            ended = False
        position = stop[word]
        if position == start[word] + 1 and flags[codes[start[word]]] & TERMINAL:
            ended = True
        elif ended:
            at = start[word]
            while at < position and flags[codes[at]] & PUNCTUATION:
                at += 1
            if at < position:
                count += 1
                ended = False
    rest = b - position
    return count + (ended and (rest > 1 or (rest == 1 and codes[position] != BLANK)))


@njit(cache=True)
def c4_numbers(codes: U32, flags: U16, lower: U32, start: I32, stop: I32, line: U32, one: Any) -> None:
    """Write C4's signals to a document's record: sentences in kept lines, lines with "lorem ipsum", and lines with "{" before the first
    line with "lorem ipsum". Write them twice: for lines that end in `.`, `?`, `!`, `"` or `'` but not in an ellipsis, and for all lines.

    Only lines with at least three words, none longer than 1000 characters, count. A line with "javascript" is not kept, and its "{" does
    not count. A line with "{" is kept, since C4 drops the page for it, not the line. `line`: scratch array, as long as the longest line."""
    at, total, word = 0, len(codes), 0
    results, lorem, curlies, open_found, open_lorem, open_curlies = 0, 0, 0, 0, 0, 0
    while at < total:
        end, opens, curly, run, count, longest = at, False, False, 0, 0, 0
        while end < total and not flags[codes[end]] & BREAK:
            opens |= codes[end] == OPEN
            curly |= codes[end] == CURLY
            run = 0 if flags[codes[end]] & SPACE else run + 1
            count += run == 1  # words separated by white space
            longest = max(longest, run)
            end += 1
        first_word = word
        while word < len(start) and start[word] < end:
            word += 1
        a, b = strip(codes, flags, at, end)
        at = end + 1
        if end + 1 < total and codes[end] == RETURN and codes[end + 1] == NEWLINE:
            at = end + 2
        if longest > MAX_WORD_CHARACTERS or count < MIN_LINE_WORDS:
            continue
        size = without_citations(codes, flags, lower, a, b, line) if opens else b - a
        has_citations = size < b - a
        text = line[:size] if has_citations else codes[a:b]
        ends = _ends_sentence(text)
        kinds = phrase_kinds(text, lower, 0, size)
        if kinds & LOREM_IPSUM:
            lorem += ends
            open_lorem += 1
            continue
        if kinds & JAVASCRIPT:
            continue
        if curly:
            curlies += ends and lorem == 0
            open_curlies += open_lorem == 0
        if not kinds & POLICY:
            here = _sentences_anew(text, flags) if has_citations else sentences(codes, flags, start, stop, first_word, word, a, b)
            results += here if ends else 0
            open_found += here
    one.c4_sentences, one.c4_lorem_ipsum_lines, one.c4_curly_bracket_lines = results, lorem, curlies
    one.c4_open_sentences, one.c4_open_lorem_ipsum_lines, one.c4_open_curly_bracket_lines = open_found, open_lorem, open_curlies


@njit(cache=True, borrows=True)
def _ends_sentence(text: U32) -> bool:
    """True if a line ends in `.`, `?`, `!`, `"` or `'`, but not in an ellipsis."""
    size = len(text)
    if size == 0:
        return False
    last = text[size - 1]
    if last == DOT:
        return not (size >= 3 and text[size - 2] == DOT and text[size - 3] == DOT)
    return bool(last == 0x3F or last == 0x21 or last == 0x22 or last == 0x27)


@njit(cache=True)
def _sentences_anew(text: U32, flags: U16) -> int:
    start, stop = np.empty(len(text) + 1, np.int32), np.empty(len(text) + 1, np.int32)
    # In scripts without spaces, word boundaries do not change the number of sentences.
    count = split_ranges(text, flags, NO_BREAKS, start, stop)
    return int(sentences(text, flags, start, stop, 0, count, 0, len(text)))


@njit(cache=True, borrows=True)
def fineweb_numbers(codes: U32, flags: U16) -> tuple[int, float, float]:
    """Return the number of non-blank lines, and the shares of these that end a sentence and that have at most 30 characters."""
    lines, terminated, short = 0, 0, 0
    start, at, total = 0, 0, len(codes)
    while at <= total:
        while at < total and codes[at] != NEWLINE:
            at += 1
        inked = start
        while inked < at and flags[codes[inked]] & SPACE:
            inked += 1
        if inked < at:
            lines += 1
            terminated += flags[codes[at - 1]] & TERMINAL != 0
            short += at - start <= SHORT_LINE_CHARACTERS
        start = at + 1
        at = start
    return lines, terminated / max(lines, 1), short / max(lines, 1)


class PlainWords(NamedTuple):
    """The non-symbol words of a text: `folded` uint64 (see `words.Words`), `line` int32: each word's line number (split at newlines),
    `lettered` bool: whether the word has a letter."""

    folded: U64
    line: I32
    lettered: NDArray[np.bool_]


@njit(cache=True, borrows=True)
def plain_words(codes: U32, start: I32, folded: U64, word_flags: U8, plain: PlainWords) -> int:
    """Write a text's non-symbol words to `plain`; return their number."""
    count, line, at = 0, 0, 0
    for word in range(len(start)):
        while at < start[word]:
            line += codes[at] == NEWLINE
            at += 1
        if not word_flags[word] & IS_SYMBOL:
            plain.folded[count], plain.line[count] = folded[word], line
            plain.lettered[count] = word_flags[word] & HAS_LETTER != 0
            count += 1
    return count


@njit(cache=True, borrows=True)
def ngram_coverage(plain: PlainWords, count: int, n: int, keys: U64, slots: I32, words: I32, covered: I32) -> None:
    """Write the number of non-symbol words in each line to `words`, and of its words inside n-grams seen earlier to `covered`.

    N-grams of the `count` words, in lower case and with all numbers treated as equal, run across lines. An n-gram with letters in fewer
    than half of its words does not count. `keys`, `slots`: scratch arrays for hashes and a hash table."""
    words[:] = 0
    covered[:] = 0
    leaving, value, lettered, done = np.uint64(1), np.uint64(0), 0, 0
    for _ in range(n):
        leaving *= BASE
    bits = clear_slots(slots, count)
    for last in range(count):
        words[plain.line[last]] += 1
        value = value * BASE + plain.folded[last]
        lettered += plain.lettered[last]
        i = last - n + 1
        if i > 0:
            value -= plain.folded[i - 1] * leaving
            lettered -= plain.lettered[i - 1]
        if i < 0 or 2 * lettered < n:
            continue
        keys[i] = value
        where = slot_of(slots, bits, keys, value)
        if slots[where] != 0:
            for k in range(max(i, done), i + n):
                covered[plain.line[k]] += 1
            done = i + n
        else:
            slots[where] = i + 1


LEGAL, SPOKEN, NOTICE = 1, 2, 3


class Phrases(NamedTuple):
    """Tables of phrases: `begins`, a bitmap (`bits_of`) of the first words' folded hashes; `keys`, hashes of whole phrases, and `kinds`
    uint8, their kinds; `longest`, the number of words in the longest phrase."""

    begins: U64
    keys: U64
    kinds: U8
    longest: int


@lru_cache(maxsize=1)
def listed_phrases() -> Phrases:
    """Return the tables of the phrases in `notices.txt`, built once per process."""
    results: dict[int, int] = {}
    begins = set()
    for kind, *words in entries("notices.txt"):
        value = 0
        for folded in words_listed(words).folded.tolist():
            value = (value * int(BASE) + folded) % 2**64
        results[value] = NOTICE if kind == "notice" else LEGAL if SPEAKERS.isdisjoint(words) else SPOKEN
        begins.add(words_listed(words[:1]).folded[0])
    keys = table_of(results)
    kinds = np.zeros(len(keys), np.uint8)
    for value, number in results.items():
        kinds[place(keys, np.uint64(mix(np.uint64(value))))] = number
    return Phrases(bits_of(map(int, begins)), keys, kinds, max(len(entry) - 1 for entry in entries("notices.txt")))


@njit(cache=True)
def notice_numbers(words: U64, of_line: I32, listed: Phrases) -> tuple[float, float]:
    """Return `legal_phrase_ratio` and `notice_ratio` from the non-symbol words and their lines. Phrases may run across lines."""
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
    total, first = 0, 0
    while first < count:
        last, some = first, False
        while last < count and of_line[last] == of_line[first]:
            some = some or noticed[last]
            last += 1
        total += last - first if some else 0
        first = last
    enough = different >= MIN_LEGAL_PHRASES and spoken >= MIN_SPOKEN_PHRASES
    return (legal / max(count, 1) if enough else 0.0), min(total, NOTICE_WORDS) / max(count, 1)
