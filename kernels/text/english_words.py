"""Words of a text exactly as datatrove 0.10 sees them: spaCy 3.8's blank English tokeniser, compiled.

The tokeniser looks at one run of characters without white space at a time. It peels prefixes and suffixes
(punctuation, quotes, currencies, units after digits) until a listed exception or nothing more is found; what is left is
an exception, an address, or is cut at infixes (hyphens between letters, full stops before capitals, …). In the end,
neighbouring tokens that spell an exception ("ex" "." "g" …, ":" ")") become that exception's pieces.
`data/english_words.json` holds the character classes and exceptions; tests compare both with the live tokeniser.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import SPACE, code_points, tables
from puna.kernels.text.english_addresses import is_address
from puna.kernels.text.english_exceptions import may_be_special, rejoin, span, special_of
from puna.kernels.text.english_tables import (
    ALPHA,
    BEFORE_DOT,
    CURRENCY,
    DIGIT,
    FILTER_BITS,
    ICON,
    LOWER,
    MAY_BE_FIRST,
    MAY_BE_SPECIAL,
    PLAIN,
    PREFIX,
    QUOTE,
    SUFFIX,
    UPPER,
    EnglishTables,
    bare_tables,
    character_classes,
    data,
    hash_of,
    table_with_values,
)
from puna.kernels.text.hash_table import mix, place
from puna.kernels.text.words import powers, prefix_hashes

DOT, COMMA, PLUS, MINUS, STAR, CARET, COLON, LESS, EQUALS, MORE, SLASH, TILDE = (ord(c) for c in ".,+-*^:<=>/~")
DOLLAR, DEGREE, QUOTE_1, QUOTE_2, EN_DASH, EM_DASH, ELLIPSIS = (ord(c) for c in "$°'’–—…")
CAPITAL_A, CAPITAL_C, CAPITAL_S, CAPITAL_U, SMALL_S = (ord(c) for c in "ACSUs")


@lru_cache(maxsize=1)
def english_tables() -> EnglishTables:
    """The tables, made once per process."""
    found = data()
    units, _ = table_with_values([hash_of(unit) for unit in found["units"]])
    specials = [text.split(" ") for text in found["specials"]]
    words = ["".join(pieces) for pieces in specials]
    special_keys, special_at = table_with_values([hash_of(word) for word in words])
    lengths = [len(piece) for pieces in specials for piece in pieces]
    special_range = np.cumsum([0, *map(len, specials)]).astype(np.int32)
    bare = bare_tables()._replace(classes=character_classes(), units=units, unit_length=max(map(len, found["units"])))
    # What each exception would be cut into if it were none: where tokens spell it by chance, they are put together.
    spelled = sorted((tokens[0], n, tokens) for n, word in enumerate(words) if len(tokens := _tokens(word, bare)) > 1)
    firsts = sorted({first for first, _, _ in spelled})
    bounds = {first: [n for n, item in enumerate(spelled) if item[0] == first] for first in firsts}
    first_keys, first_at = table_with_values([hash_of(first) for first in firsts])
    first_range = np.zeros((len(first_keys), 2), np.int32)
    for where in np.flatnonzero(first_keys):
        members = bounds[firsts[first_at[where]]]
        first_range[where] = members[0], members[-1] + 1
    filter_ = np.zeros(len(bare.filter), np.uint8)
    for keys, bit in ((special_keys, MAY_BE_SPECIAL), (first_keys, MAY_BE_FIRST)):
        filter_[keys[keys != 0] >> np.uint64(64 - FILTER_BITS)] |= np.uint8(bit)
    return bare._replace(
        filter=filter_,
        special_keys=special_keys, special_at=special_at, special_range=special_range, special_length=max(map(len, words)),
        pieces=np.array(lengths, np.int32), first_keys=first_keys, first_range=first_range,
        sequence=np.array([hash_of(token) for _, _, tokens in spelled for token in tokens], np.uint64),
        sequence_range=np.cumsum([0, *(len(tokens) for _, _, tokens in spelled)]).astype(np.int32),
        sequence_special=np.array([n for _, n, _ in spelled], np.int32),
        longest_sequence=max(len(tokens) for _, _, tokens in spelled),
    )  # fmt: skip


def _tokens(text: str, english: EnglishTables) -> list[str]:
    codes = code_points(text)
    flags, _ = tables()
    start, stop = np.empty(len(codes) + 1, np.int32), np.empty(len(codes) + 1, np.int32)
    count = split_english(codes, flags, english, prefix_hashes(codes), powers(len(codes)), start, stop)
    return [text[a:b] for a, b in zip(start[:count].tolist(), stop[:count].tolist(), strict=True)]


def english_words(text: str) -> list[str]:
    """The words of `text` as strings, for people and tests."""
    return _tokens(text, english_tables())


@njit(cache=True, inline="always")
def _prefix(codes: NDArray[np.uint32], classes: NDArray[np.uint16], a: int, b: int) -> int:
    """Length of the prefix to split off a..b, 0 for none."""
    code = codes[a]
    if classes[code] & (PREFIX | CURRENCY):
        return 1
    if code == DOT:
        at = a
        while at < b and codes[at] == DOT:
            at += 1
        return at - a if at - a > 1 else 0
    if code == PLUS:
        return 1 if a + 1 == b or not classes[codes[a + 1]] & DIGIT else 0
    if code in (CAPITAL_C, CAPITAL_A) and a + 1 < b and codes[a + 1] == DOLLAR:
        return 2
    if code == CAPITAL_U and a + 2 < b and codes[a + 1] == CAPITAL_S and codes[a + 2] == DOLLAR:
        return 3
    return 0


@njit(cache=True, inline="always")
def _suffix(
    codes: NDArray[np.uint32], english: EnglishTables, hashes: NDArray[np.uint64], power: NDArray[np.uint64], a: int, b: int
) -> int:
    """Length of the suffix to split off a..b, 0 for none: the longest that fits."""
    if a >= b:
        return 0
    classes = english.classes
    code = codes[b - 1]
    here = classes[code]
    if code == DOT:
        at = b
        while at > a and codes[at - 1] == DOT:
            at -= 1
        if b - at > 1:
            return b - at
        if b - a > 1:
            before = classes[codes[b - 2]]
            if before & BEFORE_DOT:
                return 1
            if b - a > 2 and before & UPPER and classes[codes[b - 3]] & UPPER:
                return 1
            if b - a > 2 and codes[b - 3] == DEGREE and codes[b - 2] in (0x46, 0x66, 0x43, 0x63, 0x4B, 0x6B):
                return 1
        return 0
    if code == ELLIPSIS:
        return 2 if b - a > 1 and codes[b - 2] == ELLIPSIS else 1
    if code in (SMALL_S, CAPITAL_S) and b - a > 1 and codes[b - 2] in (QUOTE_1, QUOTE_2):
        return 2
    # After a digit: currencies, units, a plus sign. The suffix that begins earliest wins.
    for length in range(min(english.unit_length, b - a - 1), 0, -1):
        if not classes[codes[b - length - 1]] & DIGIT:
            continue
        if length == 1 and (here & CURRENCY or code == PLUS):
            return 1
        if code == DOLLAR:
            first = codes[b - length]
            if length == 2 and first in (CAPITAL_C, CAPITAL_A):
                return 2
            if length == 3 and first == CAPITAL_U and codes[b - 2] == CAPITAL_S:
                return 3
        key = mix(span(hashes, power, b - length, b))
        if english.units[place(english.units, key)] == key:
            return length
    return 1 if here & SUFFIX else 0


@njit(cache=True, inline="always")
def _infix(codes: NDArray[np.uint32], classes: NDArray[np.uint16], a: int, b: int, at: int) -> int:
    """Length of the infix at `at` in a..b, 0 for none."""
    code = codes[at]
    here = classes[code]
    if here & PLAIN:
        return 0
    if here & ICON:
        return 1
    before = classes[codes[at - 1]] if at > a else 0
    after = classes[codes[at + 1]] if at + 1 < b else 0
    if code == DOT:
        end = at
        while end < b and codes[end] == DOT:
            end += 1
        if end - at > 1:
            return end - at
        return 1 if before & (LOWER | QUOTE) and after & (UPPER | QUOTE) else 0
    if code == COMMA:
        return 1 if before & ALPHA and after & ALPHA else 0
    sign = code in (PLUS, MINUS, STAR, CARET)
    if sign and before & DIGIT and (after & DIGIT or (at + 1 < b and codes[at + 1] == MINUS)):
        return 1
    if code in (MINUS, EM_DASH):
        if not before & (ALPHA | DIGIT):
            return 0
        for length in range(1, 4 if code == MINUS else 3):
            if at + length >= b:
                return 0
            if classes[codes[at + length]] & ALPHA:
                return length
            if codes[at + length] != code:
                return 0
        return 0
    if code in (EN_DASH, TILDE, COLON, LESS, MORE, EQUALS, SLASH):
        return 1 if before & (ALPHA | DIGIT) and after & ALPHA else 0
    return 0


@njit(cache=True, inline="always")
def _middle(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], english: EnglishTables, a: int, b: int,
    special: int, start: NDArray[np.int32], stop: NDArray[np.int32], count: int,
) -> int:  # fmt: skip
    """Write the words of what is left between prefixes and suffixes; returns how many words there are now."""
    at = a
    if special >= 0:
        for piece in range(english.special_range[special], english.special_range[special + 1]):
            start[count], stop[count] = at, at + english.pieces[piece]
            at = stop[count]
            count += 1
        return count
    dotted = False
    for inside in range(a + 1, b - 1):
        dotted = dotted or codes[inside] == DOT
    if not dotted or not is_address(codes, flags, english.classes, a, b):
        from_ = a
        while at < b:
            length = _infix(codes, english.classes, a, b, at)
            # One at the very beginning stays with what follows.
            if length and at > a:
                if at > from_:
                    start[count], stop[count] = from_, at
                    count += 1
                start[count], stop[count] = at, at + length
                count += 1
                from_ = at + length
            at += max(length, 1)
        a = from_
    if a < b:
        start[count], stop[count] = a, b
        count += 1
    return count


@njit(cache=True, inline="always")
def _run(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], english: EnglishTables, hashes: NDArray[np.uint64], power: NDArray[np.uint64],
    a: int, b: int, start: NDArray[np.int32], stop: NDArray[np.int32], count: int,
) -> int:  # fmt: skip
    """Write the words of a..b, a run without white space; returns how many words there are now."""
    last, special = 0, -1
    # Suffixes come off from the right: their ends wait at the far end of the arrays.
    waiting = len(stop)
    while a < b and b - a != last:
        special = special_of(english, hashes, power, a, b)
        if special >= 0:
            break
        last = b - a
        prefix = _prefix(codes, english.classes, a, b)
        if prefix and prefix < b - a:
            special = special_of(english, hashes, power, a + prefix, b)
            if special >= 0:
                start[count], stop[count] = a, a + prefix
                count += 1
                a += prefix
                break
        suffix = _suffix(codes, english, hashes, power, a + prefix, b)
        if suffix and suffix < b - a:
            special = special_of(english, hashes, power, a, b - suffix)
            if special >= 0:
                waiting -= 1
                stop[waiting] = b
                b -= suffix
                break
        if prefix:
            start[count], stop[count] = a, a + prefix
            count += 1
            a += prefix
        if suffix and (not prefix or b - a >= suffix):
            waiting -= 1
            stop[waiting] = b
            b -= suffix
    if a < b:
        count = _middle(codes, flags, english, a, b, special, start, stop, count)
    while waiting < len(stop):
        start[count], stop[count] = b, stop[waiting]
        b = stop[waiting]
        count += 1
        waiting += 1
    return count


@njit(cache=True)
def split_english(
    codes: NDArray[np.uint32], flags: NDArray[np.uint16], english: EnglishTables, hashes: NDArray[np.uint64], power: NDArray[np.uint64],
    start: NDArray[np.int32], stop: NDArray[np.int32],
) -> int:  # fmt: skip
    """Fill the ranges of all words, white space left out; returns how many.

    `hashes`, `power`: as `prefix_hashes` and `powers` give them. `start`, `stop`: one element more than characters.
    """
    count, at, total = 0, 0, len(codes)
    while at < total:
        if flags[codes[at]] & SPACE:
            at += 1
            continue
        end, odd = at, -1  # the first character that may split
        while end < total and not flags[codes[end]] & SPACE:
            if odd < 0 and not english.classes[codes[end]] & PLAIN:
                odd = end
            end += 1
        # Most runs are letters alone, or letters and one sign at the end; neither is an exception most of the time.
        inner = end if odd < 0 else end - 1
        quick = not may_be_special(english, hashes, power, at, end)
        if odd >= 0:
            before = english.classes[codes[inner - 1]] if inner > at else 0
            splits = before & BEFORE_DOT if codes[inner] == DOT else english.classes[codes[inner]] & SUFFIX
            quick = quick and odd == inner and inner > at and splits != 0 and not may_be_special(english, hashes, power, at, inner)
        if quick:
            start[count], stop[count] = at, inner
            count += 1
            if odd >= 0:
                start[count], stop[count] = inner, end
                count += 1
        else:
            count = _run(codes, flags, english, hashes, power, at, end, start, stop, count)
        at = end
    if english.longest_sequence:
        count = rejoin(codes, english, hashes, power, start, stop, count)
    return count
