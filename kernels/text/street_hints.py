"""Hints, from neighbouring words alone, that a number may belong to a street or post office box that `postal` finds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.postal import BOXES, ENGLISH_KINDS, FRENCH_KINDS, GERMANIC_ENDS, GERMANIC_STARTS, ROMANCE_KINDS, ROMANCE_SMALL

U8 = NDArray[np.uint8]
BACK, AHEAD = 12, 7  # maximum number of words of an address before and after its number: `Calle de la … de … 5`, `5 A N. … … … … Street`.
LONGEST = 160  # maximum number of bytes of a name, with attached signs
SPACE, COMMA, ORDINAL_END, DEGREE_END = ord(" "), ord(","), 0xBA, 0xB0  # the last two: last byte of º and of ° in UTF-8


def _table(*words: str) -> U8:
    """Return words as rows of bytes: a word's length, then its bytes in UTF-8, padded with zeros."""
    encoded = [word.encode() for word in words]
    result = np.zeros((len(words), 1 + max(map(len, encoded))), np.uint8)
    for row, word in zip(result, encoded, strict=True):
        row[: 1 + len(word)] = [len(word), *word]
    return result


ENDS = _table(*(first + end[1:] for end in GERMANIC_ENDS for first in (end[0], end[0].upper())), *BOXES)
STARTS = _table(*GERMANIC_STARTS)
BEFORE, BETWEEN = _table(*ROMANCE_KINDS), _table(*ROMANCE_SMALL)
ENGLISH, FRENCH, SMALL = _table(*ENGLISH_KINDS), _table(*FRENCH_KINDS), _table("of", "the", "bis", "ter")


@njit(cache=True, borrows=True)
def beside_a_street(data: U8, first: int, start: int, stop: int, last: int) -> bool:
    """True if words of addresses are before or after the number data[start:stop] in the text data[first:last]. True for every number of an
    address, False for most other numbers."""
    return bool(_before(data, first, start) or _behind(data, stop, last))


@njit(cache=True, borrows=True)
def _before(data: U8, first: int, start: int) -> bool:
    """True if the number follows a street's name (`Via Garibaldi 7`, `Am Alten Markt 3`), a word that ends in a word for a street, or a
    word for a post office box."""
    at = start
    if at > first and (data[at - 1] == ORDINAL_END or data[at - 1] == DEGREE_END):  # n.º5
        at += 1
    elif at == first or data[at - 1] != SPACE:
        return False
    elif _ends(data, first, at - 1, ENDS):
        return True
    for word in range(BACK):
        end = at - 1
        if end > first and data[end - 1] == COMMA:
            end -= 1
        at = end
        while at > first and end - at < LONGEST and _in_name(data[at - 1]):
            at -= 1
            if data[at] <= ord("Z") and _begins(data, at, end, BEFORE):
                return True
        if at in (end, first) or data[at - 1] != SPACE:
            return False
        if word < 2 and _ends(data, first, at - 1, STARTS):
            return True
        if not (_begins_name(data[at]) or data[at] == ord("n") or _begins(data, at, end, BETWEEN)):
            return False
    return False


@njit(cache=True, borrows=True)
def _behind(data: U8, stop: int, last: int) -> bool:
    """True if a word for a street follows the number, after names (`12 N. Main Street`) or without names (`12 bis, rue`)."""
    at = stop
    if at < last and _is_letter(data[at]):
        at += 1
    for word in range(AHEAD):
        if at < last and data[at] == COMMA:
            at += 1
        if at + 1 >= last or data[at] != SPACE:
            return False
        at += 1
        begin = at
        if _begins(data, begin, last, ENGLISH) or (word < 3 and _begins(data, begin, last, FRENCH)):
            return True
        while at < last and at - begin < LONGEST and _in_name(data[at]):
            at += 1
        ordinal = _is_digit(data[begin]) and _is_letter(data[at - 1])  # 5th Avenue
        if not (_begins_name(data[begin]) or ordinal or (word == 0 and at == begin + 1) or _begins(data, begin, at, SMALL)):
            return False
    return False


@njit(cache=True, borrows=True)
def _is_letter(byte: int) -> bool:
    return ord("a") <= byte | 32 <= ord("z")


@njit(cache=True, borrows=True)
def _in_name(byte: int) -> bool:
    """True if a byte may be part of a street's name: a letter, a digit, or a sign (also the slash of `C/`)."""
    return _is_letter(byte) or byte >= 0x80 or ord("-") <= byte <= ord("9") or byte == ord("_") or byte == ord("'")


@njit(cache=True, borrows=True)
def _is_digit(byte: int) -> bool:
    return ord("0") <= byte <= ord("9")


@njit(cache=True, borrows=True)
def _begins_name(byte: int) -> bool:
    return ord("A") <= byte <= ord("Z") or byte >= 0x80


@njit(cache=True, borrows=True)
def _begins(data: U8, at: int, last: int, words: U8) -> bool:
    for w in range(len(words)):
        size = np.int64(words[w, 0])
        if size <= last - at and data[at] == words[w, 1]:
            same = 1
            while same < size and data[at + same] == words[w, same + 1]:
                same += 1
            if same == size:
                return True
    return False


@njit(cache=True, borrows=True)
def _ends(data: U8, first: int, stop: int, words: U8) -> bool:
    for w in range(len(words)):
        size = np.int64(words[w, 0])
        if size <= stop - first and data[stop - 1] == words[w, size]:
            same = 1
            while same < size and data[stop - 1 - same] == words[w, size - same]:
                same += 1
            if same == size:
                return True
    return False
