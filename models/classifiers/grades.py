"""Puna's own quality models: the grade that a judge would give a document as training data of a language model.

Linear models of a document's size, and of features in its first READ bytes: words, numbers, punctuation, lines by length and ending.
A feature is hashed to a bucket; its value is the square root of its count per word, which is capped at MOST. One model is for English. The
other was trained on the same English documents, but knows no word (see `form_of`), so it also judges FORM_LANGUAGES.
`tests/benchmarks/train_grades.py` learns the weights from grades of 0 (worst) to 5 (best); NOTICE names the grades' source."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.strings import buffers

WEIGHTS = Path(__file__).with_name("grades.safetensors")
GOOD = 3  # minimum grade of a good text
LANGUAGE = "en"  # language of the graded documents
FORM_LANGUAGES = re.findall("[a-z]+", """
af am ar az ba be bem bg bn bo bs ca ckb cs cy da de dv dz ee el es et eu fa ff fi fj fo fr ga gl gu ha he hi hmn hr hu hy id ig is it
ja ka kk km kn ko ku ky lb lo lt lv mg mi mk ml mn mr ms mt my nd ne nl nn no nso ny om pa pl ps pt ro ru rw sd shi si sk sl sm sn so sq
sr ss sv sw ta te tg th ti tk tl tn to tr tt ty ug uk ur uz ve vi wo xh yo yue zh zu""")  # fmt: skip
"""Languages of NTREX-128 besides English: the model without words recognizes their translated news as good text. Other languages are
untested."""
UNSPACED = r"\p{Han}{1,2}|[\p{Hiragana}\p{Katakana}ー]{1,2}|[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]{1,5}"  # about a word each
FORMS = {
    "[。．！？।॥؟۔։።။។]": ". ", "[，、،၊；؛]": ", ", "：": ": ", "[“”„«»「」『』]": '"', "[་፡]": " ",
    UNSPACED: " x ", r"[\p{L}\p{M}’']*[\p{L}\p{M}]": "x", r"\p{Nd}": "0",
}  # fmt: skip
"""Regular expression → replacement, in order: marks of all scripts as those of English, words as `x`, digits as 0."""
READ = 20_000  # bytes read of a document
BUCKETS = 1 << 15
SIZES = np.array([20, 50, 100, 200, 400, 800, 1600, 3200], np.float64)  # words; each size exceeded adds its weight to the grade
MOST = 0.1  # upper bound on a share: no graded document consists mostly of one token
SHARE, SIZE = 10.0, 2.0  # scales of a share's root and of an exceeded size, so that the penalty shrinks all weights alike
BASE, MIXED, ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(1)
CAPITAL, CAPITALS, DIGITS, LINE_WORDS, LINE = 0x110000, 0x110001, 0x110100, 0x110200, 0x110300  # tokens that are not characters
LETTER_A, LETTER_Z, UPPER_A, UPPER_Z, ZERO, NINE = 0x61, 0x7A, 0x41, 0x5A, 0x30, 0x39
NEWLINE, SPACE, APOSTROPHE, CLOSED, COLON = 0x0A, 0x20, 0x27, 0x29, 0x3A
FINAL = np.frombuffer(b'.!?"', np.uint8)
FINAL_STOP, FINAL_QUOTE, CLOSING_QUOTE, ELLIPSIS = 0x2E, 0x22, 0x201D, 0x2026
LINES = np.array([1, 3, 9, 19, 49], np.int64)  # maximum words of a line in each length class but the longest


class Model(NamedTuple):
    """Weights [BUCKETS + sizes] and bias of the grade; `slope`, `middle`: the logistic function from grade to probability of GOOD; `form`:
    True if the model reads texts without words."""

    weights: NDArray[np.float32]
    bias: float
    slope: float
    middle: float
    form: bool = False


@lru_cache(maxsize=2)
def load(form: bool = False) -> Model:
    """Return the English model, or with `form` the model without words, whose weights lie beside this module."""
    from safetensors.numpy import load_file

    results, prefix = load_file(WEIGHTS), "form_" if form else ""
    bias, slope, middle = results[f"{prefix}scale"].tolist()
    return Model(results[f"{prefix}weights"].astype(np.float32), bias, slope, middle, form)


def form_of(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the first READ characters of each text without its words, by FORMS."""
    results = pc.utf8_slice_codeunits(texts, 0, READ)
    for pattern, replacement in FORMS.items():
        results = pc.replace_substring_regex(results, pattern, replacement)
    return results


def good_chances(texts: pa.ChunkedArray, model: Model) -> NDArray[np.float64]:
    """Return the model's probability that a judge grades each text GOOD or more, float64[n]."""
    chances: NDArray[np.float64] = 1 / (1 + np.exp(-model.slope * (grades_of(texts, model) - model.middle)))
    return chances


def grades_of(texts: pa.ChunkedArray, model: Model) -> NDArray[np.float64]:
    """Return the grade of each text, float64[n], from about 0 to about 5."""
    result: NDArray[np.float64] = _grade(*buffers(form_of(texts) if model.form else texts), model.weights, model.bias)
    return result


@njit(cache=True, borrows=True)
def _count(token: np.uint64, by: int, counts: NDArray[np.int32], met: NDArray[np.int32], number: int) -> int:
    """Add `by` to the count of a token's bucket, and list a new bucket in `met`; return the number of buckets in `met`."""
    state = token * BASE
    state = (state ^ (state >> np.uint64(32))) * MIXED
    bucket = np.int64(state >> np.uint64(40)) & (BUCKETS - 1)
    if counts[bucket] == 0:
        met[number] = bucket
        number += 1
    counts[bucket] += by
    return number


@njit(cache=True, borrows=True)
def _count_line(words: int, last: int, counts: NDArray[np.int32], met: NDArray[np.int32], number: int) -> int:
    """Add 1 and 1 + `words` to the two buckets of a line's class (its length and ending); return the number of buckets in `met`."""
    length, ending = 0, 2 if last == COLON else 0
    while length < len(LINES) and words > LINES[length]:
        length += 1
    for c in FINAL:
        ending = 1 if c == last else ending
    number = _count(np.uint64(LINE + 3 * length + ending), 1, counts, met, number)
    number = _count(np.uint64(LINE_WORDS + 3 * length + ending), 1 + words, counts, met, number)
    return number


@njit(cache=True, borrows=True)
def wide_mark(data: NDArray[np.uint8], at: int, stop: int) -> bool:
    """True if a quote, dash or similar mark (U+2000 to U+207F, three bytes) begins at `at`."""
    return data[at] == 0xE2 and at + 2 < stop and data[at + 1] >> 1 == 0x40


@njit(cache=True, borrows=True)
def word(data: NDArray[np.uint8], at: int, stop: int) -> tuple[np.uint64, int, int]:
    """Return the hash of the lower-cased word at `at`, its end and its number of capitals. An apostrophe before a-z belongs to the word."""
    token, capitals = np.uint64(0), 0
    while at < stop:
        c, width = int(np.int64(data[at])), 1
        if wide_mark(data, at, stop) and data[at + 1] == 0x80 and data[at + 2] == 0x99:
            c, width = APOSTROPHE, 3
        if UPPER_A <= c <= UPPER_Z:
            c, capitals = c + LETTER_A - UPPER_A, capitals + 1
        elif c == APOSTROPHE:
            if at + width >= stop or not LETTER_A <= data[at + width] <= LETTER_Z:
                break
        elif not LETTER_A <= c <= LETTER_Z and (c < 0x80 or wide_mark(data, at, stop)):
            break
        token, at = token * BASE + np.uint64(c) + ONE, at + width
    return token, at, capitals


@njit(cache=True, borrows=True)
def tokens(data: NDArray[np.uint8], at: int, stop: int, counts: NDArray[np.int32], met: NDArray[np.int32]) -> tuple[int, int]:
    """Add the features of data[at:stop] to `counts` by bucket; return the number of words and of the buckets listed in `met`. Words are
    numbers and runs of letters; bytes from 0x80 on are letters, except wide punctuation. A number's feature is its digit count, up to 5."""
    number = words = in_line = last = 0
    while at < stop:
        c, begin = int(np.int64(data[at])), at
        if c <= SPACE:
            if c == NEWLINE and last:
                number = _count_line(in_line, last, counts, met, number)
                in_line = last = 0
            at += 1
            continue
        if ZERO <= c <= NINE:
            while at < stop and ZERO <= data[at] <= NINE:
                at += 1
            token = np.uint64(DIGITS + min(at - begin, 5))
        elif wide_mark(data, at, stop):
            token, at = np.uint64(0x2000 + ((data[at + 1] & 1) << 6) + (data[at + 2] & 0x3F)), at + 3
        elif c < 0x80 and not (LETTER_A <= c | 0x20 <= LETTER_Z):
            token, at = np.uint64(c), at + 1
        else:
            token, at, capitals = word(data, at, stop)
            if capitals:
                number = _count(np.uint64(CAPITALS if 1 < capitals == at - begin else CAPITAL), 1, counts, met, number)
            c = LETTER_A
        if c == LETTER_A or ZERO <= c <= NINE:
            words, in_line = words + 1, in_line + 1
        if c not in (APOSTROPHE, CLOSED):  # of `(see above.)` the full stop ends the line
            last = FINAL_QUOTE if token == CLOSING_QUOTE else FINAL_STOP if token == ELLIPSIS else c
        number = _count(token, 1, counts, met, number)
    if last:
        number = _count_line(in_line, last, counts, met, number)
    return words, number


@njit(cache=True)
def _grade(data: NDArray[np.uint8], offsets: NDArray[np.int64], weights: NDArray[np.float32], bias: float) -> NDArray[np.float64]:
    counts, met = np.zeros(BUCKETS, np.int32), np.empty(BUCKETS, np.int32)
    out = np.empty(len(offsets) - 1)
    for d in range(len(out)):
        size = offsets[d + 1] - offsets[d]
        words, number = tokens(data, offsets[d], offsets[d] + min(size, READ), counts, met)
        total = 0.0
        for k in range(number):
            total += weights[met[k]] * np.sqrt(min(float(counts[met[k]]), MOST * max(words, 1)))
            counts[met[k]] = 0
        total *= SHARE / np.sqrt(max(words, 1))
        for k in range(len(SIZES)):
            if words * max(1.0, size / READ) > SIZES[k]:
                total += weights[BUCKETS + k] * SIZE
        out[d] = total + bias
    return out
