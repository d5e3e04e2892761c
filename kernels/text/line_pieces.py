"""Operations on lines or paragraphs ("pieces") of UTF-8 texts: 64-bit hashes, search for frequent hashes, removal of pieces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.hash_table import size_for
from puna.kernels.text.hashing import EIGHT, ONE, load64, xxh64

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
NEWLINE = 0x0A
NEWLINES, LOWEST, HIGHEST = (np.uint64(byte * 0x0101010101010101) for byte in (NEWLINE, 0x01, 0x80))
"""Words of eight equal bytes: of newlines, of bytes with only the lowest bit set, of bytes with only the highest bit set."""


@njit(cache=True)
def _white(data: U8, at: int, stop: int) -> int:
    """Return the number of bytes of the white space character (str.isspace) that begins at `at`, or 0."""
    byte = data[at]
    if byte < 0x80:
        return 1 if byte == 0x20 or 0x09 <= byte <= 0x0D or 0x1C <= byte <= 0x1F else 0
    if byte == 0xC2:
        return 2 if data[at + 1] == 0x85 or data[at + 1] == 0xA0 else 0
    if at + 2 >= stop or not 0xE1 <= byte <= 0xE3:
        return 0
    middle, last = data[at + 1], data[at + 2]
    if byte == 0xE1:
        return 3 if middle == 0x9A and last == 0x80 else 0
    if byte == 0xE3:
        return 3 if middle == 0x80 and last == 0x80 else 0
    if middle == 0x81:
        return 3 if last == 0x9F else 0
    return 3 if middle == 0x80 and (last <= 0x8A or last == 0xA8 or last == 0xA9 or last == 0xAF) else 0


@njit(cache=True)
def _strip(data: U8, start: int, stop: int) -> tuple[int, int]:
    """Return the range of data[start:stop], valid UTF-8, without the white space at both ends."""
    first, last = np.uint64(start), np.uint64(stop)  # unsigned: see `hashing`
    while first < last:
        byte = data[first]
        if 0x20 < byte < 0x80:
            break
        size = 1 if byte == 0x20 else _white(data, np.int64(first), np.int64(last))
        if size == 0:
            break
        first += np.uint64(size)
    while first < last:
        byte = data[last - ONE]
        if 0x20 < byte < 0x80:
            break
        at = last - ONE
        while data[at] & 0xC0 == 0x80:
            at -= ONE
        if _white(data, np.int64(at), np.int64(last)) == 0:
            break
        last = at
    return int(np.int64(first)), int(np.int64(last))


@njit(cache=True)
def _line_end(data: U8, start: int, stop: int) -> int:
    """Return the index of the first newline in data[start:stop], or `stop`; eight bytes are compared together."""
    at, end = np.uint64(start), np.uint64(stop)
    while at + EIGHT <= end:
        others = load64(data, at) ^ NEWLINES
        results = (others - LOWEST) & ~others & HIGHEST  # the highest bit of the first byte that is 0, and perhaps of later bytes
        if results:
            return int(np.int64(at + ((((results - ONE) & LOWEST) * LOWEST) >> np.uint64(56)) - ONE))
        at += EIGHT
    while at < end and data[at] != NEWLINE:
        at += ONE
    return int(np.int64(at))


@njit(cache=True)
def _piece_end(data: U8, at: int, stop: int, newlines: int) -> int:
    """Return the end of the piece that begins at `at`: the start of the next `newlines` newlines in a row, or `stop`."""
    at = _line_end(data, at, stop)
    while newlines == 2 and at < stop and (at + 1 == stop or data[at + 1] != NEWLINE):
        at = _line_end(data, at + 1, stop)
    return at


@njit(cache=True)
def _hash(data: U8, start: int, stop: int) -> np.uint64:
    """Return the hash of the piece data[start:stop] without the white space at both ends; 0 only for a blank piece."""
    start, stop = _strip(data, start, stop)
    if start == stop:
        return np.uint64(0)
    value = xxh64(data, np.uint64(start), np.uint64(stop))
    return np.uint64(value) if value != 0 else np.uint64(1)


@njit(cache=True)
def piece_hashes(data: U8, offsets: I64, counted: NDArray[np.bool_], newlines: int) -> tuple[U64, I64, NDArray[np.int32]]:
    """Return (hashes, document indices, byte offsets in the document) of the non-blank pieces of `counted` (a mask) documents, in order.
    Document d is data[offsets[d] : offsets[d + 1]]. Pieces are separated by `newlines` newlines in a row (1 or 2)."""
    room = len(offsets) + _newlines(data, offsets[0], offsets[-1])
    hashes, documents, places = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int32)
    results = 0
    for d in range(len(offsets) - 1):
        if not counted[d]:
            continue
        at, stop = offsets[d], offsets[d + 1]
        while at <= stop:
            end = _piece_end(data, at, stop, newlines)
            value = _hash(data, at, end)
            if value != 0:
                hashes[results], documents[results], places[results] = value, d, at - offsets[d]
                results += 1
            at = end + newlines
    return hashes[:results], documents[:results], places[:results]


@njit(cache=True)
def _newlines(data: U8, start: int, stop: int) -> int:
    result = 0
    for byte in data[start:stop]:
        result += byte == NEWLINE
    return result


def frequent_of(hashes: U64, most: int) -> tuple[I64, I64, NDArray[np.bool_]]:
    """Return, per occurrence of hashes that occur more than `most` times: its index, the hash's count, whether it is the first."""
    ordered = np.sort(hashes)
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.int64)
    counts = np.diff(np.r_[starts, len(ordered)])
    often = np.flatnonzero(counts > most)
    at, place = _places(hashes, ordered[starts[often]], int(counts[often].sum()))
    first = np.zeros(len(at), np.bool_)
    first[np.unique(place, return_index=True)[1]] = True
    return at, counts[often][place], first


@njit(cache=True)
def _places(hashes: U64, known: U64, total: int) -> tuple[I64, I64]:
    """Return the indices of the `total` elements of `hashes` that are also in `known`, and each one's index in `known`."""
    at, place = np.empty(total, np.int64), np.empty(total, np.int64)
    if not total:
        return at, place
    table = np.zeros(size_for(len(known)), np.int64)  # indices in `known`, plus 1
    mask = len(table) - 1
    for k in range(len(known)):
        slot = np.int64(known[k]) & mask
        while table[slot]:
            slot = (slot + 1) & mask
        table[slot] = k + 1
    results = 0
    for i in range(len(hashes)):
        slot = np.int64(hashes[i]) & mask
        while table[slot] and known[table[slot] - 1] != hashes[i]:
            slot = (slot + 1) & mask
        if table[slot]:
            at[results], place[results] = i, table[slot] - 1
            results += 1
    return at, place


@njit(cache=True)
def bounds_of(data: U8, offsets: I64, documents: I64, places: NDArray[np.int32], newlines: int) -> tuple[I64, I64, NDArray[np.int32]]:
    """Return (starts, ends) in `data` of pieces, given in order by document and offset, and each one's index in its document."""
    begins, ends, numbers = np.empty(len(documents), np.int64), np.empty(len(documents), np.int64), np.empty(len(documents), np.int32)
    at, number = np.int64(0), 0
    for i in range(len(documents)):
        first, stop = offsets[documents[i]], offsets[documents[i] + 1]
        if i == 0 or documents[i] != documents[i - 1]:
            at, number = first, 0
        begin = first + places[i]
        if newlines == 1:
            number += _newlines(data, at, begin)
        else:
            while at < begin:
                at = _piece_end(data, at, stop, newlines) + newlines
                number += 1
        at = begin
        begins[i], ends[i], numbers[i] = begin, _piece_end(data, begin, stop, newlines), number
    return begins, ends, numbers


@njit(cache=True)
def _blank_before(data: U8, at: int, first: int) -> bool:
    """True if the line before the newline at `at - 1` is blank, or there is no such line, in a text that begins at `first`."""
    last = at - 1
    while last > first and data[last - 1] != NEWLINE:
        begin = last - 1
        while data[begin] & 0xC0 == 0x80:
            begin -= 1
        if _white(data, begin, last) == 0:
            return False
        last = begin
    return True


@njit(cache=True)
def with_blank_lines(data: U8, offsets: I64, documents: I64, starts: I64, stops: I64) -> I64:
    """Return `stops`, the ends of lines to remove. If no line or a blank line is left before a removed line, move the removed line's end
    past the blank lines that follow. So the removal does not make runs of blank lines longer."""
    out = stops.copy()
    blank = True  # whether no line, or a blank line, stays before this line
    for i in range(len(documents)):
        first, last = offsets[documents[i]], offsets[documents[i] + 1]
        if i == 0 or documents[i] != documents[i - 1] or starts[i] != out[i - 1] + 1:
            blank = _blank_before(data, starts[i], first)
        while blank and out[i] < last:
            end = out[i] + 1
            while end < last and data[end] != NEWLINE:
                size = _white(data, end, last)
                if size == 0:
                    break
                end += size
            if end < last and data[end] != NEWLINE:
                break
            out[i] = end
    return out


@njit(cache=True)
def without_pieces(data: U8, offsets: I64, newlines: int, documents: I64, starts: I64, stops: I64) -> tuple[U8, I64, NDArray[np.bool_]]:
    """Return the texts without the given pieces, which are in order: bytes, offsets, and a mask of documents that lost pieces and are now
    blank; such documents become empty. One separator is removed with each piece."""
    out = np.empty(offsets[-1] - offsets[0], np.uint8)
    bounds = np.zeros(len(offsets), np.int64)
    empty = np.zeros(len(offsets) - 1, np.bool_)
    size, piece = 0, 0
    for d in range(len(offsets) - 1):
        at, stop, begin = offsets[d], offsets[d + 1], size
        if piece == len(documents) or documents[piece] != d:
            out[size : size + stop - at] = data[at:stop]
            size += stop - at
        else:
            ended = False  # whether the document's last piece was removed
            while piece < len(documents) and documents[piece] == d:
                # The text before the piece is empty or ends in a separator.
                length = starts[piece] - at
                out[size : size + length] = data[at : at + length]
                size += length
                at = min(stops[piece] + newlines, stop)
                ended = stops[piece] >= stop
                piece += 1
            if ended:
                # The last piece is removed: remove the separator before it too, if there is one.
                size = max(size - newlines, begin)
            else:
                out[size : size + stop - at] = data[at:stop]
                size += stop - at
            first, last = _strip(out, begin, size)
            empty[d] = first == last
            if empty[d]:
                size = begin
        bounds[d + 1] = size
    return out[:size], bounds, empty


@njit(cache=True)
def gather(data: U8, starts: I64, stops: I64) -> tuple[U8, I64]:
    """Return the pieces data[starts[i] : stops[i]] one after another: bytes, and the pieces' offsets int64[n + 1]."""
    bounds = np.zeros(len(starts) + 1, np.int64)
    for i in range(len(starts)):
        bounds[i + 1] = bounds[i] + stops[i] - starts[i]
    out = np.empty(bounds[-1], np.uint8)
    for i in range(len(starts)):
        for at in range(stops[i] - starts[i]):  # pieces are short: a loop costs less than a call of memcpy
            out[bounds[i] + at] = data[starts[i] + at]
    return out, bounds
