"""Normalized words of texts, and shingles: hashes of all word n-grams.

A `Table` holds the bytes that replace each code point; a space separates words. Normalizing UTF-8 costs a table look-up per byte of
ASCII and a copy per other character: a few hundred MB/s per core.

Shapes: D documents, W words, S shingles (of all documents one after another). In a flat array, document d has the elements
`offsets_D1[d] : offsets_D1[d + 1]`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import code_point
from puna.kernels.text.hashing import I64, P1, P2, U64, murmur_finish, xxh64

SPACE = np.uint8(32)


class Table(NamedTuple):
    """A table that maps code points to bytes. `ascii` uint8[128]: the byte for an ASCII character; 32 separates words. Code point c becomes
    `pool[where[c] : where[c + 1]]`; code points past the table use its last entry. `growth`: maximum output bytes per input byte."""

    ascii: NDArray[np.uint8]
    where: I64
    pool: NDArray[np.uint8]
    growth: int

    @classmethod
    def of(cls, forms: list[bytes]) -> Table:
        """Return the table that maps code point c to `forms[c]`, and code points past the end to a space. Raise ValueError unless each
        ASCII character maps to one byte."""
        if any(len(form) != 1 for form in forms[:128]):
            raise ValueError("an ASCII character must be replaced by one byte")
        forms = [*forms, b" "]
        lengths = np.fromiter(map(len, forms), np.int64, len(forms))
        bytes_in_utf8 = np.repeat([1, 2, 3, 4], np.diff([0, 0x80, 0x800, 0x10000, max(0x10000, len(forms))]))[: len(forms)]
        growth = max(1, *(-(-lengths // bytes_in_utf8)).tolist())
        where = np.append(0, np.cumsum(lengths))
        return cls(np.frombuffer(b"".join(forms[:128]), np.uint8), where, np.frombuffer(b"".join(forms), np.uint8), growth)


class Words(NamedTuple):
    """Normalized words of documents: `data` uint8, words separated by single spaces; `offsets_D1`, the documents' offsets in `data`;
    `begins` int32, the offset of each word in its document; `words_D1`, the documents' offsets in `begins`."""

    data: NDArray[np.uint8]
    offsets_D1: I64
    begins: NDArray[np.int32]
    words_D1: I64

    def texts(self) -> list[str]:
        """Return each document's normalized text."""
        whole = self.data.tobytes()
        return [whole[a:b].decode("utf-8", "surrogatepass") for a, b in zip(self.offsets_D1[:-1], self.offsets_D1[1:], strict=True)]


def normal_words(data: NDArray[np.uint8], offsets_D1: NDArray[Any], table: Table) -> Words:
    """Return the documents' normalized words. Document d is data[offsets_D1[d] : offsets_D1[d + 1]] in UTF-8; offsets may begin after 0."""
    offsets_D1 = np.ascontiguousarray(offsets_D1, dtype=np.int64)
    return Words(*_normal_words(np.ascontiguousarray(data), offsets_D1, *table))


@njit(cache=True, nogil=True)
def _normal_words(data: Any, offsets_D1: Any, ascii_table: Any, where: Any, pool: Any, growth: Any) -> Any:
    documents = len(offsets_D1) - 1
    wide = 0
    i: Any
    for i in range(offsets_D1[0], offsets_D1[documents]):
        wide += data[i] >> 7
    size = offsets_D1[documents] - offsets_D1[0] + wide * (growth - 1)
    out = np.empty(size + documents + 1, dtype=np.uint8)
    begins = np.empty(size // 2 + documents + 1, dtype=np.int32)
    out_D1 = np.zeros(documents + 1, dtype=np.int64)
    words_D1 = np.zeros(documents + 1, dtype=np.int64)
    # Unsigned positions save a check for negative values at every byte.
    zero, one = np.uint64(0), np.uint64(1)
    first, w, last = zero, zero, np.uint64(len(where) - 2)
    for d in range(documents):
        i = np.uint64(offsets_D1[d])
        stop = np.uint64(offsets_D1[d + 1])
        j: Any = zero  # bytes written of this document
        before: Any = one  # whether the last written byte is a space
        while i < stop:
            # No branch: every byte is written; a space after a space is then overwritten.
            while i < stop and data[i] < 128:
                v = ascii_table[data[i]]
                space = np.uint64(v == SPACE)
                out[first + j] = v
                begins[w] = j
                w += before & (space ^ one)
                j += one - (before & space)
                before = space
                i += one
            while i < stop and data[i] >= 128:
                c, length = code_point(data, i)
                i += length
                c = min(c, last)
                for k in range(where[c], where[c + 1]):
                    v = pool[k]
                    space = np.uint64(v == SPACE)
                    out[first + j] = v
                    begins[w] = j
                    w += before & (space ^ one)
                    j += one - (before & space)
                    before = space
        if j > zero and before:
            j -= one
        first += j
        out_D1[d + 1] = first
        words_D1[d + 1] = w
    return out[:first], out_D1, begins[:w], words_D1


def shingle_hashes(words: Words, width: int) -> tuple[U64, I64]:
    """Return hashes_S, XXH64 of every n-gram of `width` words (separated by single spaces) of the documents, and the documents' offsets_D1
    in hashes_S. A document of fewer words has one shingle, the whole text; a document without words has none."""
    return _shingle_hashes(words.data, words.offsets_D1, words.begins, words.words_D1, width)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _shingle_hashes(data: Any, offsets_D1: Any, begins: Any, words_D1: Any, width: Any) -> Any:
    documents = len(offsets_D1) - 1
    out_D1 = np.zeros(documents + 1, dtype=np.int64)
    for d in range(documents):
        words = words_D1[d + 1] - words_D1[d]
        least = 1 if words > 0 else 0
        out_D1[d + 1] = out_D1[d] + max(least, words - width + 1)
    hashes = np.empty(out_D1[documents], dtype=np.uint64)
    for d in range(documents):
        count, at, last, first = out_D1[d + 1] - out_D1[d], words_D1[d], words_D1[d + 1], offsets_D1[d]
        for s in range(count):
            stop = first + begins[at + s + width] - 1 if at + s + width < last else offsets_D1[d + 1]
            hashes[out_D1[d] + s] = xxh64(data, np.uint64(first + begins[at + s]), np.uint64(stop))
    return hashes, out_D1


@njit(cache=True, nogil=True)
def widen(hashes_S: Any, words: Any) -> Any:
    """Return hashes [S - words] of one text's shingles of 2 * `words` words, from those of `words` words in order; a copy if S <= words."""
    if len(hashes_S) <= words:
        return hashes_S.copy()
    out = np.empty(len(hashes_S) - words, dtype=np.uint64)
    for s in range(len(out)):
        out[s] = murmur_finish((hashes_S[s] * P1) ^ (hashes_S[s + words] * P2))
    return out
