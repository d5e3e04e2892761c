"""Tables of the properties of Unicode characters by code point, and UTF-8 coding, for compiled code."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

SPACE = 1  # str.isspace
ALPHABETIC = 2  # str.isalpha
DECIMAL = 4  # str.isdecimal
WORD = 8  # part of a word: letters, marks and numbers
SYMBOL = 16  # categories P, S and Cc: a word of these alone is not counted
TERMINAL = 32  # ends a sentence (Unicode property Sentence_Terminal)
BREAK = 64  # ends a line for str.splitlines
SINGLE = 128  # letter of a script written without spaces
UPPER = 256  # str.isupper
PUNCTUATION = 512  # category P
ALPHANUMERIC = 1024  # str.isalnum
CASED = 2048  # `Tables.lower` is another character
JOINER = 4096  # part of a word if inside it, else ignored: joiners, soft hyphens, direction marks
SEPARATOR = 8192  # separates words without being white space: the zero width space, the Tibetan mark between syllables

POINTS = 0x110000
ASSIGNED = ((0, 0x40000), (0xE0000, 0xE1000))  # ranges of code points; all others are unassigned or for private use
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# Han, kana and their extensions; Thai, Lao, Khmer and Burmese.
SINGLE_RANGES = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9D), (0x20000, 0x3FFFF),
)  # fmt: skip


CAPITAL_SIGMA, DOTTED_I = 0x3A3, 0x130  # the sigma's lower case depends on its neighbours; the dotted I's is two characters
JOINERS, SEPARATORS = "\u00ad\u200c\u200d\u200e\u200f\u2060\ufeff", "\u200b\u0f0b\u0f0c"


class Tables(NamedTuple):
    """Tables by code point. `flags` uint16[0x110000]: bits SPACE to SEPARATOR; `lower` uint32[0x110000]: lower case (İ: itself)."""

    flags: NDArray[np.uint16]
    lower: NDArray[np.uint32]


@lru_cache(maxsize=1)
def tables() -> Tables:
    """Return the tables, which are built once per process in about a tenth of a second."""
    import regex

    # All other code points are unassigned or for private use: no `str.is…` is true of them.
    points = np.concatenate([np.arange(low, high) for low, high in ASSIGNED])
    every = "".join(map(chr, points.tolist()))
    category = np.frombuffer("".join(map(unicodedata.category, every)).encode(), "S2")
    flags = np.zeros(POINTS, np.uint16)
    # Most code points are letters without case (Lo), whose flags follow from the category, or unassigned (Cn), without flags.
    flags[points[category == b"Lo"]] = ALPHABETIC | ALPHANUMERIC | WORD
    rest = (category != b"Lo") & (category != b"Cn")
    points, category = points[rest], category[rest]
    characters, first = [chr(point) for point in points.tolist()], category.astype("S1")

    def mark(bit: int, where: NDArray[np.bool_]) -> None:
        flags[points[where]] |= np.uint16(bit)

    def ask(question: Callable[[str], bool]) -> NDArray[np.bool_]:
        return np.fromiter(map(question, characters), np.bool_, len(characters))

    alphanumeric = ask(str.isalnum)
    mark(SPACE, ask(str.isspace))
    mark(ALPHABETIC, ask(str.isalpha))
    mark(DECIMAL, ask(str.isdecimal))
    mark(UPPER, ask(str.isupper))
    mark(ALPHANUMERIC, alphanumeric)
    mark(WORD, alphanumeric | (first == b"M"))
    mark(SYMBOL, (first == b"P") | (first == b"S") | (category == b"Cc"))
    mark(PUNCTUATION, first == b"P")
    for c in LINE_BREAKS:
        flags[ord(c)] |= np.uint16(BREAK)
    for bit, results in ((JOINER, JOINERS), (SEPARATOR, SEPARATORS)):
        flags[[ord(c) for c in results]] |= np.uint16(bit)
    for low, high in SINGLE_RANGES:
        flags[low : high + 1] |= np.where(flags[low : high + 1] & ALPHABETIC, np.uint16(SINGLE), np.uint16(0))
    # Surrogates are left out: they are not characters, and the regular expression engine rejects them.
    for c in regex.findall(r"\p{Sentence_Terminal}", every[:0xD800] + every[0xE000:]):
        flags[ord(c)] |= np.uint16(TERMINAL)
    lower = np.arange(POINTS, dtype=np.uint32)
    for c in characters:
        folded = c.lower()
        if folded != c and len(folded) == 1:
            lower[ord(c)] = ord(folded)
            flags[ord(c)] |= np.uint16(CASED)
    return Tables(flags, lower)


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def letters_and_capitals(text: str) -> tuple[int, int]:
    """Return the number of letters (including numerals that are not decimal digits, such as ²), and the number of capitals among them."""
    letters, capitals = _letters_and_capitals(code_points(text), tables().flags)
    return int(letters), int(capitals)


@njit(cache=True)
def _letters_and_capitals(codes: NDArray[np.uint32], flags: NDArray[np.uint16]) -> tuple[int, int]:
    letters = capitals = 0
    for code in codes:
        letter = flags[code] & (ALPHANUMERIC | DECIMAL) == ALPHANUMERIC
        letters += letter
        capitals += letter and flags[code] & UPPER != 0
    return letters, capitals


@njit(cache=True, borrows=True)
def cut(data: NDArray[np.uint8], first: int, last: int, characters: int) -> int:
    """Return the index in `data` after the first `characters` characters of the valid UTF-8 data[first:last]; at most `last`."""
    at, missing = first, characters
    while missing > 0 and at < last:
        stop, missing = min(at + missing, last), 0
        for byte in range(at, stop):
            missing += data[byte] & 0xC0 == 0x80
        at = stop
    while at < last and data[at] & 0xC0 == 0x80:
        at += 1
    return at


@njit(cache=True, borrows=True)
def encode(codes: NDArray[np.uint32], data: NDArray[np.uint8], at: int) -> int:
    """Write code points as UTF-8 from data[at] on; return the index after the last written byte."""
    for k in range(len(codes)):
        code = codes[k]
        if code < 0x80:
            data[at] = code
            at += 1
        elif code < 0x800:
            data[at], data[at + 1] = 0xC0 | code >> 6, 0x80 | code & 0x3F
            at += 2
        elif code < 0x10000:
            data[at], data[at + 1], data[at + 2] = 0xE0 | code >> 12, 0x80 | code >> 6 & 0x3F, 0x80 | code & 0x3F
            at += 3
        else:
            data[at], data[at + 1] = 0xF0 | code >> 18, 0x80 | code >> 12 & 0x3F
            data[at + 2], data[at + 3] = 0x80 | code >> 6 & 0x3F, 0x80 | code & 0x3F
            at += 4
    return at


@njit(cache=True, borrows=True)
def lower_codes(codes: NDArray[np.uint32], lower: NDArray[np.uint32]) -> bool:
    """Lower-case code points one by one, in place; return False if `str.lower` may differ (a capital sigma or dotted capital I)."""
    alone = True
    for at in range(len(codes)):
        alone = alone and codes[at] != CAPITAL_SIGMA and codes[at] != DOTTED_I
        codes[at] = lower[codes[at]]
    return alone


@njit(cache=True, nogil=True, inline="always")
def code_point(data: Any, i: Any) -> Any:
    """Return the code point of the non-ASCII character at data[i], in UTF-8, and the character's number of bytes."""
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    b, second = np.uint64(data[i]), np.uint64(data[i + one]) & np.uint64(0x3F)
    if b < np.uint64(0xE0):
        return ((b & np.uint64(0x1F)) << np.uint64(6)) | second, two
    third = np.uint64(data[i + two]) & np.uint64(0x3F)
    if b < np.uint64(0xF0):
        return ((b & np.uint64(0x0F)) << np.uint64(12)) | (second << np.uint64(6)) | third, three
    fourth = np.uint64(data[i + three]) & np.uint64(0x3F)
    return ((b & np.uint64(0x07)) << np.uint64(18)) | (second << np.uint64(12)) | (third << np.uint64(6)) | fourth, np.uint64(4)


@njit(cache=True, borrows=True)
def decode(data: NDArray[np.uint8], first: int, last: int, codes: NDArray[np.uint32]) -> int:
    """Write the code points of the valid UTF-8 in data[first:last] to `codes`; return their number."""
    at, stop, size = np.uint64(first), np.uint64(last), 0
    while at < stop:
        code, length = np.uint64(data[at]), np.uint64(1)
        if code >= 0x80:
            code, length = code_point(data, at)
        codes[size] = code
        at, size = at + length, size + 1
    return size


@njit(cache=True, borrows=True)
def longest(offsets: NDArray[np.int64]) -> int:
    """Return the length of the longest of n slices of a flat array, from their offsets [n + 1]; 0 without slices."""
    result = 0
    for n in range(len(offsets) - 1):
        result = max(result, offsets[n + 1] - offsets[n])
    return result
