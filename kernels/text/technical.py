"""Counts of code lines, formula marks, calculations and reasoning words in a text.

Only clear lines of code count here; `puna.kernels.text.code_lines` explains the other definition, by which a doubtful line is code."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from string import ascii_letters, digits, whitespace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import cut, decode, longest
from puna.kernels.text.strings import buffers
from puna.kernels.text.word_counts import Listed, kinds_held, list_words
from puna.kernels.text.words import words_listed

SEEDS = Path(__file__).parent / "data" / "reasoning.txt"
NEWLINE, BACKSLASH = 10, 92
MARKS = "{}[]()=<>;_\\*&|#+@^~`"  # characters that are frequent in code and rare in prose
ENDS = "{}"
OPEN, CLOSE, BULLET = 0x28, 0x29, 0x2022
# Operators and relations, letters of formulas, superscript and subscript digits.
FORMULA_RANGES = ((0x2070, 0x209C), (0x2200, 0x22FF), (0x27C0, 0x27EF), (0x2980, 0x2AFF), (0x1D400, 0x1D7FF))
FORMULA = "\u00b1\u00b2\u00b3\u00b9\u00d7\u00f7\u2102\u210d\u2115\u2119\u211a\u211d\u2124\u2202\u2207"
EQUALS, UNDERSCORE = 0x3D, 0x5F
BEFORE_RESULT = " <$(+-\u00a3\u20ac\u00a5\u20b9"  # characters between the sign = of a calculation and its result
BEFORE_RESULT_CODES = tuple(map(ord, BEFORE_RESULT))
SMALL = 128


class Technical(NamedTuple):
    """Counts in a text: non-blank `lines`, `code_lines` among them, formula marks (`formulas`), `calculations` such as 12 * 3 = 36, and
    distinct words of deduction."""

    lines: int
    code_lines: int
    formulas: int
    calculations: int
    reasoning_words: int


IS_MARK, IS_END, IS_LETTER, IS_SPACE, IS_DIGIT = 1, 2, 4, 8, 16
SETS = ((IS_MARK, MARKS), (IS_END, ENDS), (IS_LETTER, ascii_letters), (IS_SPACE, whitespace), (IS_DIGIT, digits))
IS = np.array([sum(bit for bit, characters in SETS if chr(code) in characters) for code in range(SMALL)] + [0], np.uint8)
"""Bits (see above) of each ASCII character; the last entry, 0, is for all other characters."""
FORMULA_CODES = np.array(sorted(map(ord, FORMULA)), np.uint32)
FORMULA_BOUNDS = np.array(FORMULA_RANGES, np.uint32)


@lru_cache(maxsize=1)
def reasoning_words() -> Listed:
    """Return the words of deduction (such as "therefore") of all languages in `SEEDS`."""
    lines = [line for line in SEEDS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return list_words(np.unique(np.concatenate([words_listed(line.partition(":")[2].split()).folded for line in lines])))


def measure(texts: pa.Array | pa.ChunkedArray, characters: int) -> list[Technical]:
    """Return the counts in the first `characters` characters of each text."""
    words = reasoning_words()
    kinds = kinds_held(texts, characters, words, np.zeros(words.size, np.int64), 1)
    return [Technical(*row) for row in np.hstack([_count(*buffers(texts), characters), kinds]).tolist()]


@njit(cache=True)
def _count(data: NDArray[np.uint8], offsets: NDArray[np.int64], characters: int) -> NDArray[np.int64]:
    """Return the first four fields of each text's `Technical`, int64[texts, 4]."""
    texts = len(offsets) - 1
    codes, result = np.empty(min(longest(offsets), characters), np.uint32), np.zeros((texts, 4), np.int64)
    for n in range(texts):
        many = decode(data, offsets[n], cut(data, offsets[n], offsets[n + 1], characters), codes)
        result[n, 0], result[n, 1], result[n, 3] = code_lines(codes[:many])
        result[n, 2] = formula_marks(codes[:many])
    return result


@njit(cache=True, borrows=True)
def code_lines(codes: NDArray[np.uint32]) -> tuple[int, int, int]:
    """Return the number of non-blank lines, the number of code lines among them, and the number of calculations.

    A code line ends in a brace, or has at least two marks (brackets, operators and the like; its first pair of parentheses counts once)
    that are at least an eighth of its visible characters. In both cases at most a third of its visible characters are digits, and it has an
    ASCII letter or nothing but marks. It does not begin with a bullet and has no calculation. So tables of numbers, items of lists and
    worked arithmetic are not code."""
    lines = code = found = visible = marks = digits = letters = last = opened = closed = item = calculations = 0
    for at in range(len(codes) + 1):
        if at == len(codes) or codes[at] == NEWLINE:
            if visible:
                lines += 1
                dense = marks - min(opened, closed, 1) >= 2 and 8 * marks >= visible
                if item + calculations == 0 and (dense or last & IS_END) and 3 * digits <= visible and (letters > 0 or marks == visible):
                    code += 1
            found += calculations
            visible = marks = digits = letters = last = opened = closed = item = calculations = 0
            continue
        # No branch on `kind`: it would be mispredicted at the end of each word.
        kind = IS[min(codes[at], np.uint32(SMALL))]
        item |= visible == 0 and codes[at] == BULLET
        opened += codes[at] == OPEN
        closed += codes[at] == CLOSE
        visible += kind & IS_SPACE == 0
        marks += kind & IS_MARK != 0
        digits += kind & IS_DIGIT != 0
        letters += kind & IS_LETTER != 0
        last = last if kind & IS_SPACE else kind
        if codes[at] == EQUALS and is_calculation(codes, at):
            calculations += 1
    return lines, code, found


@njit(cache=True, borrows=True)
def is_calculation(codes: NDArray[np.uint32], at: int) -> bool:
    """True if the sign = at `at` stands between two numbers, of which the first does not end a name, as in "48 / 2 = $24"."""
    first = at - 1
    while first >= 0 and codes[first] == 0x20:
        first -= 1
    first -= first >= 0 and codes[first] == 0x25  # a percent sign
    if first < 0 or not 0x30 <= codes[first] <= 0x39:
        return False
    while first >= 0 and (0x30 <= codes[first] <= 0x39 or codes[first] == 0x2E or codes[first] == 0x2C):  # digits, points and commas
        first -= 1
    if first >= 0 and (codes[first] == UNDERSCORE or (codes[first] < SMALL and IS[codes[first]] & IS_LETTER)):
        return False
    result = at + 1
    while result < len(codes) and codes[result] in BEFORE_RESULT_CODES:
        result += 1
    result += result < len(codes) and codes[result] == 0x2E
    return result < len(codes) and 0x30 <= codes[result] <= 0x39


@njit(cache=True, borrows=True)
def formula_marks(codes: NDArray[np.uint32]) -> int:
    """Return the number of TeX commands (a backslash and a letter) plus the number of formula characters."""
    result = 0
    for at in range(len(codes)):
        code = codes[at]
        if code < SMALL:
            if code == BACKSLASH and at + 1 < len(codes) and codes[at + 1] < SMALL and IS[codes[at + 1]] & IS_LETTER:
                result += 1
            continue
        for one in FORMULA_CODES:
            result += code == one
        for bounds in FORMULA_BOUNDS:
            result += bounds[0] <= code <= bounds[1]
    return result
