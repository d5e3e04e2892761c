"""Normalization of texts for near-duplicate detection."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import JOINERS, SINGLE, decode, longest, tables
from puna.kernels.text.normal_words import SPACE, Table, Words, normal_words
from puna.kernels.text.unspaced import weights
from puna.kernels.text.words import split, split_ranges

LIMIT = 0x40000  # no letters from this code point on
FIRST_OF_THREE = np.uint8(0xE0)
_OPEN = {"Cn", "Co", "Cs"}  # unassigned, private, surrogate


def character(c: str) -> str:
    """Return what replaces a character in a normalized text: case-folded letters and digits, marks, a space, or nothing."""
    return "".join(map(_part, unicodedata.normalize("NFD", c.casefold())))


def _part(c: str) -> str:
    if "\u0300" <= c < "\u0370" or c in JOINERS:  # accents of Latin, Greek, Cyrillic, …
        return ""
    return c if c.isalnum() or unicodedata.category(c).startswith("M") else " "


def normalize(text: str) -> str:
    """Return case-folded words without punctuation or accents (U+0300 to U+036F), separated by single spaces; numbers stay as they are.

    Characters are mapped one by one; then scripts without spaces are split into words. Digits stay, because only numbers distinguish pages
    of one template (statistics, product pages)."""
    return " ".join(split("".join(map(character, text))))


def normal(data: NDArray[np.uint8], offsets_D1: NDArray[Any]) -> Words:
    """Return the normalized words (see `normalize`) of documents, given as concatenated UTF-8 bytes."""
    words = normal_words(data, offsets_D1, table())
    # No letter of a script without spaces has fewer than three bytes.
    places = np.flatnonzero(words.data >= FIRST_OF_THREE)
    if not len(places):
        return words
    long = np.zeros(len(words.offsets_D1) - 1, np.bool_)
    long[np.searchsorted(words.offsets_D1, places, side="right") - 1] = True
    return Words(*_split_words(words.data, words.offsets_D1, words.begins, words.words_D1, long, len(places), tables().flags, weights()))


@njit(cache=True, nogil=True)
def _split_words(data: Any, offsets_D1: Any, begins: Any, words_D1: Any, long: Any, room: int, flags: Any, breaks: Any) -> Any:
    """Return the fields of `Words` with scripts without spaces split into words. `long`: a mask of documents with characters of three bytes
    or more; `room`: the number of such characters. No text beyond a space decides a boundary, so only words with such letters are split."""
    documents, most = len(offsets_D1) - 1, longest(offsets_D1)
    out = np.empty(len(data) + 2 * room, np.uint8)
    out_begins = np.empty(len(begins) + 2 * room, np.int32)
    out_D1, out_words_D1 = np.zeros(documents + 1, np.int64), np.zeros(documents + 1, np.int64)
    codes, start, stop = np.empty(most, np.uint32), np.empty(most, np.int32), np.empty(most, np.int32)
    size, count, d = 0, 0, 0
    while d < documents:
        same = d  # documents d to same - 1 stay as they are and are copied together
        while same < documents and not long[same]:
            same += 1
        if same > d:
            bytes_moved, words_moved = size - offsets_D1[d], count - words_D1[d]
            out[size : bytes_moved + offsets_D1[same]] = data[offsets_D1[d] : offsets_D1[same]]
            out_begins[count : words_moved + words_D1[same]] = begins[words_D1[d] : words_D1[same]]
            out_D1[d + 1 : same + 1] = offsets_D1[d + 1 : same + 1] + bytes_moved
            out_words_D1[d + 1 : same + 1] = words_D1[d + 1 : same + 1] + words_moved
            size, count, d = out_D1[same], out_words_D1[same], same
            continue
        first, last, began = offsets_D1[d], offsets_D1[d + 1], size
        for word in range(words_D1[d], words_D1[d + 1]):
            at, end = first + begins[word], first + begins[word + 1] - 1 if word + 1 < words_D1[d + 1] else last
            parts, wide = 0, False
            for i in range(at, end):
                wide = wide or data[i] >= FIRST_OF_THREE
            if wide:
                characters = decode(data, at, end, codes)
                if (flags[codes[:characters]] & SINGLE).any():
                    parts = split_ranges(codes[:characters], flags, breaks, start, stop)
            place = 0
            for part in range(max(1, parts)):
                if size > began:
                    out[size] = SPACE
                    size += 1
                out_begins[count] = size - began
                count += 1
                if not parts:
                    for i in range(at, end):
                        out[size + i - at] = data[i]
                    size += end - at
                    continue
                while place < stop[part]:
                    inside = place >= start[part]
                    out[size] = data[at]
                    size, at = size + inside, at + 1
                    while at < end and data[at] & 0xC0 == 0x80:
                        out[size] = data[at]
                        size, at = size + inside, at + 1
                    place += 1
        d += 1
        out_D1[d], out_words_D1[d] = size, count
    return out[:size], out_D1, out_begins[:count], out_words_D1


@lru_cache(maxsize=1)
def table() -> Table:
    """Return the table of `character` for all code points, built once per process in a sixth of a second."""
    return Table.of([_form(chr(point)) for point in range(LIMIT)])


def _form(c: str) -> bytes:
    """Return `character(c)` in UTF-8. For most characters the category decides: unassigned ones become spaces, ideographs stay."""
    category = unicodedata.category(c)
    if category in _OPEN:
        return b" "
    if category == "Lo" and c >= "\u3400" and not unicodedata.decomposition(c) and not "\uac00" <= c <= "\ud7a3":
        return _part(c).encode()  # such letters have neither case nor parts
    return character(c).encode()


def words_of(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Words:
    """Return the words of texts that are already normalized: concatenated bytes, with words separated by single spaces."""
    begin = np.zeros(len(data) + 1, bool)
    begin[np.flatnonzero(data == SPACE) + 1] = True
    begin[offsets[:-1][np.diff(offsets) > 0]] = True
    begins = np.flatnonzero(begin)
    bounds = np.searchsorted(begins, offsets)
    begins -= np.repeat(offsets[:-1], np.diff(bounds))
    return Words(data, offsets, begins.astype(np.int32), bounds)
