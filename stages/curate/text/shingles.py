"""The normal form in which near-duplicate detection compares texts."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from puna.stages.curate.text.normal_words import SPACE, Table, Words

LIMIT = 0x40000  # no letters beyond
# Scripts written without spaces: each character is a word of its own.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_OPEN = {"Cn", "Co", "Cs"}  # unassigned, private, surrogate


def character(c: str) -> str:
    """What stands for one character in a normal text: letters and digits in lower case, marks, or spaces."""
    return "".join(map(_part, unicodedata.normalize("NFD", c.casefold())))


def _part(c: str) -> str:
    if "\u0300" <= c < "\u0370":  # Latin accents
        return ""
    if not (c.isalnum() or unicodedata.category(c).startswith("M")):
        return " "
    return f" {c} " if UNSPACED.match(c) else c


def normalized(text: str) -> str:
    """Lower-case words without punctuation and Latin accents, parted by single spaces; numbers stay as they are.

    Each character is mapped alone. Numbers tell apart what templates make alike (statistics, product pages), so they are
    not mapped to one digit.
    """
    return " ".join("".join(map(character, text)).split())


@lru_cache(maxsize=1)
def table() -> Table:
    """`character` of every character, for the kernel; made once per process in a sixth of a second."""
    return Table.of([_form(chr(point)) for point in range(LIMIT)])


def _form(c: str) -> bytes:
    """`character` as bytes; most are decided by their category: what Unicode leaves open, and ideographs."""
    category = unicodedata.category(c)
    if category in _OPEN:
        return b" "
    if category == "Lo" and c >= "\u3400" and not unicodedata.decomposition(c) and not "\uac00" <= c <= "\ud7a3":
        return _part(c).encode()  # such letters have neither case nor parts
    return character(c).encode()


def words_of(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Words:
    """The words of texts that are normal already, given as bytes one after another: what lies between single spaces."""
    begin = np.zeros(len(data) + 1, bool)
    begin[np.flatnonzero(data == SPACE) + 1] = True
    begin[offsets[:-1][np.diff(offsets) > 0]] = True
    begins = np.flatnonzero(begin)
    bounds = np.searchsorted(begins, offsets)
    begins -= np.repeat(offsets[:-1], np.diff(bounds))
    return Words(data, offsets, begins.astype(np.int32), bounds)


def packed(texts: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The UTF-8 bytes of all texts one after another, and where each begins (and the last ends)."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets
