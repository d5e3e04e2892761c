"""Words exactly as datatrove 0.10's MinHash takes them: its simplified text, cut by spaCy's English tokeniser.

Simplified: lower case, every number one zero, punctuation and control characters as spaces, no non-spacing marks. All but
the numbers is a table over single characters. The tokeniser looks at one run without spaces at a time; nearly all runs are
letters that it leaves whole, and each other run is asked for once per process.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.english_tables import data as english_data
from puna.kernels.text.english_words import english_words
from puna.kernels.text.hash_table import place, size_for
from puna.kernels.text.hashing import I64, U64, slice_hashes, xxh64
from puna.kernels.text.normal_words import Table, Words, code_point, normal_words

LIMIT = 0x40000
CONTROLS = {*range(9), 11, 12, *range(13, 32), *range(127, 160)}
SIGNS = {
    0xAB, 0xB4, 0xBB, 0x2013, 0x2014, 0x2019, 0x201C, 0x201D, 0x201E, 0x2026, 0x2236, 0x2501, 0x25BA, 0x3001, 0x3002, 0x3008, 0x3009,
    0x300A, 0x300B, 0x300C, 0x300D, 0x3010, 0x3011, 0xFF01, 0xFF05, 0xFF08, 0xFF09, 0xFF0C, 0xFF0E, 0xFF11, 0xFF1A, 0xFF1B, 0xFF1F, 0xFF5E,
}  # fmt: skip
DECIMAL_MARKS = ".,\u060c\u066b\u2396\u2397\u2398"
CAPITAL_SIGMA = b"\xce\xa3"
WHOLE, UNKNOWN = -1, -2
MEMO_RUNS = 1 << 21


def datatrove_words(data: NDArray[np.uint8], offsets_D1: NDArray[np.int64]) -> Words:
    """The words of documents given as UTF-8 bytes one after another."""
    data, offsets_D1 = _numbers(*_sigma_lowered(data, offsets_D1), *_number_tables())
    return _memo().cut(normal_words(data, offsets_D1, _table()))


def simplified(character: str) -> str:
    """What stands for one character; numbers apart."""
    out = []
    for c in character.lower():
        if c.isspace() or ord(c) in SIGNS or ord(c) in CONTROLS or (c.isascii() and not c.isalnum()):
            out.append(" ")
        else:
            out += [part for part in unicodedata.normalize("NFD", c) if unicodedata.category(part) != "Mn"]
    return "".join(out)


@lru_cache(maxsize=1)
def _table() -> Table:
    return Table.of([simplified(chr(point)).encode("utf-8", "surrogatepass") for point in range(LIMIT)])


def _sigma_lowered(data: NDArray[np.uint8], offsets_D1: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The lower case of a capital sigma depends on its neighbours: texts with one are put into lower case here."""
    whole = data.tobytes()
    if CAPITAL_SIGMA not in whole:
        return data, offsets_D1
    texts = [whole[a:b] for a, b in pairwise(offsets_D1.tolist())]
    texts = [text.decode().lower().encode() if CAPITAL_SIGMA in text else text for text in texts]
    return np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)]).astype(np.int64)


# --- numbers ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _number_tables() -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which code points are decimal digits, and which decimal marks."""
    import regex

    digit, mark = np.zeros(LIMIT + 1, np.bool_), np.zeros(LIMIT + 1, np.bool_)
    # The same engine as datatrove's: its Unicode tables are newer than the interpreter's.
    for c in regex.findall(r"\p{Nd}", "".join(map(chr, [*range(0xD800), *range(0xE000, LIMIT)]))):
        digit[ord(c)] = True
    for c in DECIMAL_MARKS:
        mark[ord(c)] = True
    return digit, mark


@njit(cache=True, nogil=True)
def _numbers(data: NDArray[np.uint8], offsets_D1: NDArray[np.int64], digit: NDArray[np.bool_], mark: NDArray[np.bool_]) -> Any:
    """The texts with each number, decimals included, as one zero."""
    out = np.empty(offsets_D1[-1] - offsets_D1[0], np.uint8)
    out_D1 = np.zeros(len(offsets_D1), np.int64)
    j = 0
    for d in range(len(offsets_D1) - 1):
        i, stop = offsets_D1[d], offsets_D1[d + 1]
        while i < stop:
            b = data[i]
            if b < 128 and not digit[b]:
                out[j] = b
                i += 1
                j += 1
                continue
            end = _digits(data, i, stop, digit)
            if end == i:
                _, size = _character(data, i)
                out[j : j + size] = data[i : i + size]
                i += size
                j += size
                continue
            if end < stop:
                c, size = _character(data, end)
                if mark[min(c, len(mark) - 1)]:
                    after = _digits(data, end + size, stop, digit)
                    end = after if after > end + size else end
            out[j] = 48
            j += 1
            i = end
        out_D1[d + 1] = j
    return out[:j], out_D1


@njit(cache=True, nogil=True)
def _digits(data: NDArray[np.uint8], i: Any, stop: Any, digit: NDArray[np.bool_]) -> Any:
    """End of the run of digits that begins at `i`."""
    while i < stop:
        c, size = _character(data, i)
        if not digit[min(c, len(digit) - 1)]:
            break
        i += size
    return i


@njit(cache=True, nogil=True)
def _character(data: NDArray[np.uint8], i: Any) -> Any:
    if data[i] < 128:
        return np.int64(data[i]), 1
    c, size = code_point(data, np.uint64(i))
    return np.int64(c), np.int64(size)


# --- runs that the tokeniser cuts ------------------------------------------------------------------------


class Known(NamedTuple):
    """Open-addressing tables of runs by hash: WHOLE, or a number of pieces' lengths. Exceptions of letters alone have a table
    of their own, which stays in the cache; `longest` is the length of the longest one, bytes."""

    exceptions: U64
    exception_values: NDArray[np.int32]
    longest: int
    keys: U64
    values: NDArray[np.int32]


class _Memo:
    """What the tokeniser does to runs without spaces."""

    def __init__(self) -> None:
        self.count = 0
        self.lengths: list[list[int]] = []
        specials = [text.split(" ") for text in english_data()["specials"]]
        runs = [run for run in map("".join, specials) if run.isascii() and run.isalpha() and run.islower()]
        small, large = size_for(len(runs)), size_for(MEMO_RUNS)
        tables = [np.zeros(small, np.uint64), np.zeros(small, np.int32), np.zeros(large, np.uint64), np.zeros(large, np.int32)]
        self.known = Known(tables[0], tables[1], max(map(len, runs)), tables[2], tables[3])
        self.learn(runs, self.known.exceptions, self.known.exception_values)

    def learn(self, runs: list[str], keys: U64, values: NDArray[np.int32]) -> None:
        """Ask the tokeniser for some runs, and put what it says into a table."""
        pieces = iter(english_words(" ".join(runs)))
        encoded = [run.encode() for run in runs]
        hashes = slice_hashes(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)]).astype(np.int64))
        found = []
        for run in runs:
            lengths: list[int] = []
            left = len(run)
            while left:
                piece = next(pieces)
                lengths.append(len(piece.encode()))
                left -= len(piece)
            found.append(WHOLE if len(lengths) == 1 else len(self.lengths))
            if len(lengths) > 1:
                self.lengths.append(lengths)
        _insert(keys, values, hashes, np.array(found, np.int32))
        self.count += len(runs)

    def cut(self, words: Words) -> Words:
        """The words after the tokeniser has cut them."""
        hashes, found = _look_up(words.data, words.offsets_D1, words.begins, words.words_D1, self.known)
        unknown = np.flatnonzero(found == UNKNOWN)
        if len(unknown):
            _, first = np.unique(hashes[unknown], return_index=True)
            self.learn([_run(words, int(at)) for at in unknown[np.sort(first)]], self.known.keys, self.known.values)
            _fill(hashes, found, self.known)
        if not (found >= 0).any():
            return words
        ends = np.cumsum([0, *map(len, self.lengths)]).astype(np.int64)
        flat = np.array([length for lengths in self.lengths for length in lengths], np.int64)
        return Words(*_cut(words.data, words.offsets_D1, words.begins, words.words_D1, found, ends, flat))


@lru_cache(maxsize=1)
def _first_memo() -> list[_Memo]:
    return [_Memo()]


def _memo() -> _Memo:
    """This process's memo; a new one where it has grown too large."""
    held = _first_memo()
    if held[0].count > MEMO_RUNS:
        held[0] = _Memo()
    return held[0]


def _run(words: Words, at: int) -> str:
    """Word number `at` as text."""
    document = int(np.searchsorted(words.words_D1, at, side="right")) - 1
    start = int(words.offsets_D1[document])
    last = at + 1 == words.words_D1[document + 1]
    end = int(words.offsets_D1[document + 1]) if last else start + int(words.begins[at + 1]) - 1
    return words.data[start + int(words.begins[at]) : end].tobytes().decode()


@njit(cache=True, nogil=True)
def _insert(keys: U64, values: NDArray[np.int32], hashes: U64, given: NDArray[np.int32]) -> None:
    for n in range(len(hashes)):
        where = place(keys, hashes[n])
        keys[where] = hashes[n]
        values[where] = given[n]


@njit(cache=True, nogil=True)
def _look_up(data: Any, offsets_D1: I64, begins: Any, words_D1: I64, known: Known) -> Any:
    """Hash of each word that is not whole for sure, and its value; letters a to z that are no exception are whole."""
    hashes = np.zeros(len(begins), np.uint64)
    found = np.full(len(begins), WHOLE, np.int32)
    for d in range(len(offsets_D1) - 1):
        for w in range(words_D1[d], words_D1[d + 1]):
            start = offsets_D1[d] + begins[w]
            stop = offsets_D1[d] + begins[w + 1] - 1 if w + 1 < words_D1[d + 1] else offsets_D1[d + 1]
            letters = True
            for i in range(start, stop):
                letters &= 97 <= data[i] <= 122
            if letters and stop - start > known.longest:
                continue
            key = xxh64(data, np.uint64(start), np.uint64(stop))
            if letters:
                where = place(known.exceptions, key)
                if known.exceptions[where] == key:
                    found[w] = known.exception_values[where]
                continue
            hashes[w] = key
            where = place(known.keys, key)
            found[w] = known.values[where] if known.keys[where] == key else UNKNOWN
    return hashes, found


@njit(cache=True, nogil=True)
def _fill(hashes: U64, found: NDArray[np.int32], known: Known) -> None:
    """The values of words that were unknown before."""
    for w in range(len(found)):
        if found[w] == UNKNOWN:
            found[w] = known.values[place(known.keys, hashes[w])]


@njit(cache=True, nogil=True)
def _cut(data: Any, offsets_D1: I64, begins: Any, words_D1: I64, found: NDArray[np.int32], ends: I64, lengths: I64) -> Any:
    """The words with those cut that have a number in `found`."""
    more = 0
    for w in range(len(found)):
        if found[w] >= 0:
            more += ends[found[w] + 1] - ends[found[w]] - 1
    out = np.empty(len(data) + more, np.uint8)
    out_begins = np.empty(len(begins) + more, np.int32)
    out_D1, out_words_D1 = np.zeros(len(offsets_D1), np.int64), np.zeros(len(offsets_D1), np.int64)
    j = v = 0
    for d in range(len(offsets_D1) - 1):
        first = j
        for w in range(words_D1[d], words_D1[d + 1]):
            i = offsets_D1[d] + begins[w]
            stop = offsets_D1[d] + begins[w + 1] - 1 if w + 1 < words_D1[d + 1] else offsets_D1[d + 1]
            low, high = (ends[found[w]], ends[found[w] + 1]) if found[w] >= 0 else (0, 1)
            for piece in range(low, high):
                size = lengths[piece] if found[w] >= 0 else stop - i
                if j > first:
                    out[j] = 32
                    j += 1
                out_begins[v] = j - first
                v += 1
                out[j : j + size] = data[i : i + size]
                i += size
                j += size
        out_D1[d + 1] = j
        out_words_D1[d + 1] = v
    return out, out_D1, out_begins, out_words_D1
