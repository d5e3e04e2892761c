"""Separation of lines of code from lines of prose, in manuals and other pages that mix them.

This is one of two definitions of a line of code. Here a line is judged alone, and a doubtful line counts as code: a prompt, a call, a
keyword or a parameter's name is enough. The purpose is to protect code: `line_dedup` keeps repeated lines of code, and `language` reads
prose only from the other lines. `technical` instead counts code as evidence about a page: there a line needs many brackets or operators,
in any programming language, or a brace at its end. So menus, headings, prices and lists of names do not count as code."""

from __future__ import annotations

import re
from string import ascii_letters, digits

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

# First words of a line, before a blank; first words of a line that ends in a colon or a brace; whole lines; SQL keywords before a blank.
STATEMENTS = (
    "def", "class", "import", "return", "raise", "yield", "elif", "assert", "await", "async", "lambda", "public", "private", "static",
    "void", "const", "var", "let", "fn", "func", "struct", "enum", "#include",
)  # fmt: skip
BLOCKS = ("if", "for", "while", "with", "except", "try", "else", "switch")
WHOLE = ("pass", "break", "continue", "else:", "try:", "finally:")
QUERIES = ("SELECT", "INSERT INTO", "UPDATE", "DELETE FROM", "CREATE", "DROP", "ALTER", "FROM", "WHERE", "JOIN", "VALUES")
CODE_START = re.compile(
    rf">>>|\.\.\. |[$%#@] ?\w|//|/\*|</?\w|(?:{'|'.join(STATEMENTS)}) |from \S+ import |(?:{'|'.join(BLOCKS)})\b.*[:{{]$|"
    rf"(?:{'|'.join(WHOLE)})$|(?:{'|'.join(QUERIES)}) "
)
CODE_ASSIGNMENT = re.compile(r"[\w.]+(?:\[.*\])?(?:: ?[\w.\[\], |]+)? ?[-+*/|&]?= ?\S")
CODE_CALL = re.compile(r"[\w.]+\(.*\)[,:;]?$")
# "name (string, required)" introduces a parameter in reference manuals.
CODE_PARAMETER = re.compile(
    r"[A-Za-z_]\w*(?:\.\w+)* \((?:str|string|int|integer|long|float|double|number|bool|boolean|bytes|blob|list|tuple|dict|map|array|object|"
    r"structure|datetime|date|timestamp|callable|any)(?:, ?(?:required|optional))?\)$"
)
CODE_SIGNS = b"(){}[]<>=;_\"'`|&*/+\\@#%^~$"
CODE_MARKS = 0.15
STATEMENT_WORDS = 3
STARTS = frozenset(">.$%#@/<")
WORDS = tuple(sorted({*STATEMENTS, "from", *BLOCKS, *WHOLE, *QUERIES}))
# One word per row: its length, then its bytes.
FIRST_WORDS = np.array([[len(word), *word.encode().ljust(max(map(len, WORDS)), b"\0")] for word in WORDS], np.uint8)
BEGINS, BEGINS_WORD, IN_WORD = 1, 2, 4  # roles of a byte: it begins code; begins one of WORDS; is part of a word
IN_CODE = np.zeros(256, np.uint8)
IN_CODE[[ord(sign) for sign in STARTS]] |= BEGINS
IN_CODE[FIRST_WORDS[:, 1]] |= BEGINS_WORD
IN_CODE[[ord(character) for character in f"{ascii_letters}{digits}_"]] |= IN_WORD


def looks_like_code(line: str) -> bool:
    """True if a non-empty, stripped line is more likely code than prose, or has no letters or digits; False if it begins with • or –."""
    if line.startswith(("•", "–")):
        return False
    if CODE_START.match(line) or line[-1] in "{}([\\" or not any(map(str.isalnum, line)):
        return True
    # A plain search comes first: most lines then need no pattern.
    if ("=" in line and CODE_ASSIGNMENT.match(line)) or (")" in line and (CODE_CALL.match(line) or CODE_PARAMETER.match(line))):
        return True
    if line[-1] == ";" and line.count(" ") < STATEMENT_WORDS:  # items of lists in prose also end in a semicolon
        return True
    encoded = line.encode("utf-8", "surrogatepass")
    return len(encoded) - len(encoded.translate(None, CODE_SIGNS)) > max(2, CODE_MARKS * len(line))


@njit(cache=True, borrows=True)
def may_be_code(data: NDArray[np.uint8], start: int, stop: int) -> bool:
    """True if `looks_like_code` may accept the line data[start:stop] for a reason other than its `CODE_SIGNS`; False for most prose.
    The caller has checked that the line has letters or digits, has no `=`, and does not end in `{`, `}`, `(`, `[` or a backslash."""
    if IN_CODE[data[start]] & BEGINS:
        return True
    last, before = data[stop - 1], data[max(start, stop - 2)]
    if last == ord(";") or last == ord(")") or (before == ord(")") and (last == ord(",") or last == ord(":"))):
        return True
    if not IN_CODE[data[start]] & BEGINS_WORD:
        return False
    for w in range(len(FIRST_WORDS)):
        size = np.int64(FIRST_WORDS[w, 0])
        same = 0
        while same < size and start + same < stop and data[start + same] == FIRST_WORDS[w, same + 1]:
            same += 1
        if same == size and (start + size == stop or not IN_CODE[data[start + size]] & IN_WORD):
            return True
    return False
