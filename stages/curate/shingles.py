"""The normal form in which near-duplicate detection compares texts."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.shingles import Table

LIMIT = 0x40000  # no letters beyond
# Scripts written without spaces: each character is a word of its own.
UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3040, 0x30FF),
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip


def character(c: str) -> str:
    """What stands for one character in a normal text: letters and digits in lower case, marks, or spaces."""
    return "".join(map(_part, unicodedata.normalize("NFD", c.casefold())))


def _part(c: str) -> str:
    if "\u0300" <= c < "\u0370":  # Latin accents
        return ""
    if not (c.isalnum() or unicodedata.category(c).startswith("M")):
        return " "
    return f" {c} " if any(low <= ord(c) <= high for low, high in UNSPACED) else c


def normalized(text: str) -> str:
    """Lower-case words without punctuation and Latin accents, parted by single spaces; numbers stay as they are.

    Each character is mapped alone. Numbers tell apart what templates make alike (statistics, product pages), so they are
    not mapped to one digit.
    """
    return " ".join("".join(map(character, text)).split())


@lru_cache(maxsize=1)
def table() -> Table:
    """`character` of every character, for the kernel; made once per process in a third of a second."""
    return Table.of([character(chr(point)).encode("utf-8", "surrogatepass") for point in range(LIMIT)])


@lru_cache(maxsize=1)
def unchanged() -> Table:
    """A table that leaves normal texts as they are."""
    return Table.of([chr(point).encode("utf-8", "surrogatepass") for point in range(LIMIT)])


def bytes_of(texts: pa.ChunkedArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The UTF-8 bytes of a column of texts one after another, and where each begins (and the last ends)."""
    column = texts.cast(pa.large_string()).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # no chunks
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = column.buffers()
    where = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8), where


def packed(texts: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The UTF-8 bytes of all texts one after another, and where each begins (and the last ends)."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets
