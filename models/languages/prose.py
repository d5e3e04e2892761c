"""Extraction of prose lines (mostly letters and spaces) for the language classifiers, in one pass over a batch's bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import ALPHANUMERIC, BREAK, DECIMAL, SPACE, UPPER, code_point, tables
from puna.kernels.text.code_lines import CODE_MARKS, CODE_SIGNS, looks_like_code, may_be_code

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
PROSE = 0.75
LEAST = 4  # minimum characters of a line
WINDOWS = 4
IS_LETTER, IS_CAPITAL, IS_SPACE, IS_ALPHANUMERIC, IS_BREAK, IS_SIGN, IS_BULLET = 1, 2, 4, 8, 16, 32, 64
BULLETS = "•–-* "
BLANK = ord(" ")
NOTHING_IN = "{}([\\"  # no line of prose ends with one of these
NOT_LAST = np.array([chr(byte) in NOTHING_IN for byte in range(256)])


class Prose(NamedTuple):
    """The prose of texts: data[bounds[n]:bounds[n + 1]] is text n in UTF-8, its lines joined by blanks. `letters`: number of a text's
    letters and of digits such as ²; `capitals`: number of its capital letters."""

    data: memoryview
    bounds: I64
    letters: I64
    capitals: I64

    def of(self, text: int) -> str:
        """Return the prose lines of the text with the index `text`, joined by blanks."""
        return str(self.data[self.bounds[text] : self.bounds[text + 1]], "utf-8", "surrogatepass")


def prose(data: U8, offsets: I64, wanted: NDArray[np.bool_], limit: int) -> Prose:
    """Return the prose lines of each wanted text data[offsets[n]:offsets[n + 1]]. Of a text over `limit` characters, `WINDOWS` windows of
    `limit` characters in all are read. A line is prose if it is mostly letters and spaces after its leading white space and bullets,
    and is not code. It has at least `LEAST` characters, several words or characters outside ASCII, and ends with none of `NOTHING_IN`."""
    room = int(offsets[-1] - offsets[0]) // (LEAST + 1) + WINDOWS * len(wanted) + 1
    begins, ends, letters, capitals = (np.empty(room, np.int64) for _ in range(4))
    unsure, bounds = np.empty(room, np.bool_), np.zeros(len(offsets), np.int64)
    _lines(data, offsets, wanted, limit, kinds(), begins, ends, letters, capitals, unsure, bounds)
    count = bounds[-1]
    begins, ends, keep = begins[:count], ends[:count], ~unsure[:count]
    verdicts: dict[bytes, bool] = {}
    for line in np.flatnonzero(~keep).tolist():  # such lines repeat: check each once
        text = data[begins[line] : ends[line]].tobytes()
        if text not in verdicts:
            verdicts[text] = looks_like_code(text.decode("utf-8", "surrogatepass").lstrip(BULLETS))
        keep[line] = not verdicts[text]
    sizes = np.zeros((3, len(offsets)), np.int64)
    out = np.empty(int((ends - begins)[keep].sum() + np.count_nonzero(keep)), np.uint8)
    _join_lines(data, bounds, begins, ends, letters, capitals, keep, out, sizes)
    return Prose(out.data, sizes[0], sizes[1, :-1], sizes[2, :-1])


@lru_cache(maxsize=1)
def kinds() -> U8:
    """Return the `IS_…` flags of every code point, uint8[0x110000]."""
    flags = tables().flags
    result = np.zeros(len(flags), np.uint8)
    for kind, flag in ((IS_SPACE, SPACE), (IS_ALPHANUMERIC, ALPHANUMERIC), (IS_BREAK, BREAK)):
        result[flags & flag != 0] |= kind
    letter = flags & (ALPHANUMERIC | DECIMAL) == ALPHANUMERIC
    result[letter] |= IS_LETTER
    result[letter & (flags & UPPER != 0)] |= IS_CAPITAL
    result[list(CODE_SIGNS)] |= IS_SIGN
    result[[ord(bullet) for bullet in BULLETS]] |= IS_BULLET
    return result


@njit(cache=True, borrows=True)
def _lines(
    data: U8, offsets: I64, wanted: Any, limit: int, kinds: U8,
    begins: I64, ends: I64, letters: I64, capitals: I64, unsure: Any, bounds: I64,
) -> None:  # fmt: skip
    """Write the spans and counts of the prose lines. `unsure` marks possible code; `bounds`: where each text's lines begin and end."""
    count = 0
    for d in range(len(wanted)):
        first, last = offsets[d], offsets[d + 1]
        size, windows = 0, 1
        if wanted[d] and last - first > limit:
            for at in range(first, last):
                size += data[at] & 0xC0 != 0x80
            windows = WINDOWS if size > limit else 1
        start, position = first, 0
        for window in range(windows if wanted[d] else 0):
            stop = last
            if windows > 1:
                begin = window * (size - limit // WINDOWS) // (WINDOWS - 1)
                start, position = _after(data, start, last, begin - position), begin
                stop = _after(data, start, last, limit // WINDOWS)
            at = start
            while at < stop:
                at, begins[count], ends[count], letters[count], capitals[count], unsure[count] = _line(data, at, stop, kinds)
                count += ends[count] > begins[count]
        bounds[d + 1] = count


@njit(cache=True, borrows=True)
def _after(data: U8, at: int, last: int, characters: int) -> int:
    """Return the byte offset `characters` characters after `at`, at most `last`."""
    while at < last:
        characters -= data[at] & 0xC0 != 0x80
        if characters < 0:
            break
        at += 1
    return at


@njit(cache=True, borrows=True)
def _line(data: U8, at: int, last: int, kinds: U8) -> tuple[int, int, int, int, int, bool]:
    """Return (start of the next line, start and end of this line's prose, letters, capitals, may be code). Without prose, start = end."""
    begin = start = stop = at
    size = length = spaces = inner_spaces = letters = capitals = signs = 0
    blank = several = equals = alphanumeric = False
    bullets = line_start = False
    code: Any
    while at < last:
        here = at
        code = np.uint64(data[at])
        at += 1
        if code >= 0x80:
            code, width = code_point(data, np.uint64(here))
            at = int(here + np.int64(width))
        kind = kinds[code]
        if kind & IS_BREAK:
            break
        if not line_start:
            if not bullets and not kind & IS_SPACE:
                bullets, begin = True, here
            if (kind & IS_BULLET) if bullets else (kind & IS_SPACE):
                continue
            line_start, start, stop = True, here, here
        size += 1
        if kind & IS_SPACE:
            spaces += 1
            blank |= code == BLANK
            continue
        stop, length, inner_spaces, several = at, size, spaces, blank
        letters += kind & IS_LETTER
        capitals += kind & IS_CAPITAL != 0
        signs += kind & IS_SIGN != 0
        alphanumeric |= kind & IS_ALPHANUMERIC != 0
        equals |= code == ord("=")
    if length < LEAST or not alphanumeric or (not several and stop - start == length) or NOT_LAST[data[stop - 1]]:
        return at, begin, begin, 0, 0, False
    if length - letters - inner_spaces > (1 - PROSE) * length or signs > max(2.0, CODE_MARKS * length):
        return at, begin, begin, 0, 0, False
    return at, begin, stop, letters, capitals, equals or may_be_code(data, start, stop)


@njit(cache=True, borrows=True)
def _join_lines(data: U8, bounds: I64, begins: I64, ends: I64, letters: I64, capitals: I64, keep: Any, out: U8, totals: I64) -> None:
    """Write the lines that `keep` marks, joined by blanks; write to `totals` the texts' bounds, letter counts and capital counts."""
    size = 0
    for d in range(len(bounds) - 1):
        line_start = size
        for line in range(bounds[d], bounds[d + 1]):
            if keep[line]:
                if size > line_start:
                    out[size] = BLANK
                    size += 1
                for at in range(begins[line], ends[line]):
                    out[size] = data[at]
                    size += 1
                totals[1, d] += letters[line]
                totals[2, d] += capitals[line]
        totals[0, d + 1] = size
