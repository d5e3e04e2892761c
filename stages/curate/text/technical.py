"""How much of a text is code and how much of it reasons, measured on the text alone.

Its lines of code are the certain ones, counted in array operations over a whole page; `puna.stages.curate.text.code_lines` says
why there is another notion, which in doubt takes a line for code.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SEEDS = Path(__file__).parents[1] / "data" / "reasoning.txt"
NEWLINE, BACKSLASH = 10, 92
MARKS = "{}[]()=<>;_\\*&|#+@$^~`"  # what code has many of and prose has few
ENDS = "{}"
# Operators and relations, letters of formulas, raised and lowered digits.
FORMULA_RANGES = ((0x2070, 0x209C), (0x2200, 0x22FF), (0x27C0, 0x27EF), (0x2980, 0x2AFF), (0x1D400, 0x1D7FF))
FORMULA = "\u00b1\u00b2\u00b3\u00b9\u00d7\u00f7\u2102\u210d\u2115\u2119\u211a\u211d\u2124\u2202\u2207"
SMALL = 128


class Technical(NamedTuple):
    """`code_lines` of `lines` read as code; `formulas`: marks of formulas; `reasoning_words`: different words of deduction."""

    lines: int
    code_lines: int
    formulas: int
    reasoning_words: int


def _ascii(characters: str) -> NDArray[np.bool_]:
    """Table of which ASCII characters are among `characters`, bool[129]; the last entry is for all others."""
    table = np.zeros(SMALL + 1, np.bool_)
    table[[ord(c) for c in characters]] = True
    return table


IS_MARK, IS_END = _ascii(MARKS), _ascii(ENDS)
IS_LETTER = _ascii("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
IS_SPACE, IS_DIGIT = _ascii(" \t\n\r\v\f"), _ascii("0123456789")


@lru_cache(maxsize=1)
def reasoning_hashes() -> NDArray[np.uint64]:
    """Hashes of the words of deduction of all languages, uint64[n], sorted."""
    from puna.stages.curate.text.words import folded_hashes

    lines = [line for line in SEEDS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return np.unique(np.concatenate([folded_hashes(line.partition(":")[2].split()) for line in lines]))


def measured(text: str) -> Technical:
    """Code and reasoning in `text`."""
    from puna.stages.curate.text.characters import code_points
    from puna.stages.curate.text.words import split_codes

    codes = code_points(text)
    if not len(codes):
        return Technical(0, 0, 0, 0)
    lines, code = code_lines(codes)
    words = np.intersect1d(split_codes(codes).folded, reasoning_hashes())
    return Technical(lines, code, formula_marks(codes), len(words))


def code_lines(codes: NDArray[np.uint32]) -> tuple[int, int]:
    """Lines that are not blank, and those of them that read as code.

    Such a line ends in a brace, or has at least two brackets, operators and the like, and these are an eighth of what it
    shows; at most a third of it is digits, and it has a letter or nothing but marks: tables of numbers are no code.
    """
    small = np.minimum(codes, SMALL)
    starts = np.flatnonzero(np.append(True, codes[:-1] == NEWLINE))

    def count(table: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.add.reduceat(table[small].astype(np.int64), starts)

    shown = np.diff(np.append(starts, len(codes))) - count(IS_SPACE)
    marks, digits, letters = count(IS_MARK), count(IS_DIGIT), count(IS_LETTER)
    # The last character shown of each line: the running maximum of places that are not white space.
    last = np.maximum.reduceat(np.where(IS_SPACE[small], -1, np.arange(len(codes))), starts)
    ends = (last >= 0) & IS_END[small[np.maximum(last, 0)]]
    dense = (marks >= 2) & (8 * marks >= shown)
    is_code = (shown > 0) & (dense | ends) & (3 * digits <= shown) & ((letters > 0) | (marks == shown))
    return int((shown > 0).sum()), int(is_code.sum())


def formula_marks(codes: NDArray[np.uint32]) -> int:
    """Commands of TeX (a backslash and a letter) and characters that only formulas have."""
    slashes = np.flatnonzero(codes[:-1] == BACKSLASH)
    found = int(IS_LETTER[np.minimum(codes[slashes + 1], SMALL)].sum())
    if len(high := codes[codes >= SMALL]):
        found += int(np.isin(high, [ord(c) for c in FORMULA]).sum())
        found += sum(int(((high >= low) & (high <= top)).sum()) for low, top in FORMULA_RANGES)
    return found
