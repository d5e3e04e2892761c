"""Characters that went through a wrong encoding before the page was written: "cafÃ©" is "café".

UTF-8 that somebody read as an encoding of one byte a character, and kept, is found and undone by ftfy (Speer 2019), a line at a
time. It is asked only about lines that have two neighbours such as that mistake makes, which nearly all lines of sound text lack.
"""

from __future__ import annotations

import functools
import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

C1 = re.compile("[\x80-\x9f]")
MEANT = {code: bytes([code]).decode("cp1252", "ignore") for code in range(0x80, 0xA0)}
"""What Windows-1252 has in the places of C1 controls."""
FIRST, LATER, CONTROL = 1, 2, 4  # roles of a character, see `_roles`; LATER is FIRST << 1
ACCENTED = re.compile("[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]")
MEANT_A_SPACE = re.compile("Ã(?=[ \u00a0])")  # "à" whose second byte became a space; some languages write "Ã" at a word's end


def repaired(text: str) -> str:
    """Return the text with its doubly encoded lines decoded once more, and what Windows-1252 has in the places of C1 controls."""
    if text.isascii():
        return text
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16)
    suspicious, control = _looked_at(units, roles())
    if len(suspicious):
        text = _decoded_again(text, suspicious.tolist())
    return text.translate(MEANT) if control or (len(suspicious) and C1.search(text)) else text


def _decoded_again(text: str, suspicious: list[int]) -> str:
    """Return the text with its suspicious lines repaired, by number, where one of them is bad beyond doubt."""
    from ftfy.badness import is_bad

    lines = text.split("\n")
    if not any(is_bad(MEANT_A_SPACE.sub("", lines[place])) for place in suspicious):
        return text
    for place in suspicious:
        lines[place] = _undone(lines[place])
    return "\n".join(lines)


def _undone(line: str) -> str:
    """Return the line decoded once more; as it is where that leaves more letters with accents alone than it undoes: they would be
    undone, too.

    "STAÐ“" ends a quotation in Icelandic capitals, and is how the Cyrillic "Г" looks when it is misread.
    """
    from ftfy import fix_encoding

    fixed = fix_encoding(line)
    sound = Counter(ACCENTED.findall(line)) & Counter(ACCENTED.findall(fixed))
    return fixed if len(line) - len(fixed) >= sound.total() else line


@functools.cache
def roles() -> NDArray[np.uint8]:
    """Return the roles of each UTF-16 unit: `FIRST`, it can be the first byte of a character in UTF-8 in some encoding of one byte a
    character; `LATER`, a later byte; `CONTROL`, it is a C1 control."""
    import ftfy.bad_codecs  # noqa: F401 - it names the encodings with no gaps
    from ftfy.chardata import CHARMAP_ENCODINGS

    found = np.zeros(1 << 16, np.uint8)
    for role, numbers in ((FIRST, range(0xC2, 0xF5)), (LATER, range(0x80, 0xC0))):
        for name in CHARMAP_ENCODINGS:
            found[[ord(character) for character in bytes(numbers).decode(name, "ignore")]] |= role
    found[0x80:0xA0] |= CONTROL
    return found


@njit(cache=True)
def _looked_at(units: NDArray[np.uint16], roles: NDArray[np.uint8]) -> tuple[NDArray[np.int64], bool]:
    """Return numbers of the lines with a unit that is `FIRST` before one that is `LATER`; whether there is a `CONTROL`."""
    lines = 1
    for unit in units:
        lines += unit == 10
    found, count, line = np.empty(lines, np.int64), 0, 0
    control = before = np.int64(0)
    for unit in units:
        role = np.int64(roles[unit] if unit >= 0x80 else 0)
        if before << 1 & role and (count == 0 or found[count - 1] != line):
            found[count] = line
            count += 1
        control |= role & CONTROL
        before = role & FIRST
        line += unit == 10
    return found[:count], bool(control)
