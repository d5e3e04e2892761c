"""Characters that went through a wrong encoding before the page was written: "cafÃ©" is "café".

UTF-8 that somebody read as an encoding of one byte a character, and kept, is found and undone by ftfy (Speer 2019), a line at a
time. It is asked only about lines that have two neighbours such as that mistake makes, which nearly all lines of sound text lack.
"""

from __future__ import annotations

import functools
import re

C1 = re.compile("[\x80-\x9f]")
MEANT_A_SPACE = re.compile("Ã(?=[ \u00a0])")  # "à" whose second byte became a space; some languages write "Ã" at a word's end


def repaired(text: str) -> str:
    """The text with its doubly encoded lines decoded once more, and what Windows-1252 has in the places of C1 controls."""
    if text.isascii():
        return text
    from ftfy import fix_encoding
    from ftfy.badness import is_bad
    from ftfy.fixes import fix_c1_controls

    lines = text.split("\n")
    suspicious = [place for place, line in enumerate(lines) if not line.isascii() and _suspicious().search(line)]
    if any(is_bad(MEANT_A_SPACE.sub("", lines[place])) for place in suspicious):
        for place in suspicious:
            lines[place] = fix_encoding(lines[place])
        text = "\n".join(lines)
    return C1.sub("", fix_c1_controls(text)) if C1.search(text) else text


@functools.cache
def _suspicious() -> re.Pattern[str]:
    """A character that the first byte of a UTF-8 character is in some encoding of one byte, and one that a later byte is."""
    import ftfy.bad_codecs  # noqa: F401 - it names the encodings with no gaps
    from ftfy.chardata import CHARMAP_ENCODINGS

    first, later = (
        re.escape("".join(sorted({char for name in CHARMAP_ENCODINGS for char in bytes(numbers).decode(name, "ignore")})))
        for numbers in (range(0xC2, 0xF5), range(0x80, 0xC0))
    )
    return re.compile(f"[{first}][{later}]")
