"""Names of elements as small numbers, and what each means for the text around it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Elements whose content stands on lines of its own. The others run on in the line.
BLOCK = (
    "address article aside blockquote body button caption center col colgroup dd details dialog dir div dl dt fieldset figcaption figure "
    "footer form frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li main menu nav noscript ol optgroup option p pre search "
    "section select summary table tbody td template textarea tfoot th thead tr ul video audio object iframe canvas map"
)
INLINE = (
    "a abbr acronym b bdi bdo big br cite code data del dfn em font i img input ins kbd label mark math meter nobr output picture "
    "progress q rp rt ruby s samp script small source span strike strong style sub sup svg time title tt u var wbr link meta embed "
    "param track area base basefont bgsound frame keygen xmp plaintext noembed noframes"
)
NAMES = ("", *BLOCK.split(), *INLINE.split())  # 0: any other element, which runs on in the line
NUMBER = {name: number for number, name in enumerate(NAMES)}
VOID = "area base basefont bgsound br col embed frame hr img input keygen link meta param source track wbr"
# The parser keeps the content of these as it is, without entities and elements.
RAW = "script style xmp iframe noembed noframes plaintext"
# Blank lines stand around these.
SPACED = "p pre blockquote table ul ol dl h1 h2 h3 h4 h5 h6 figure article section header footer aside nav main form details hr"
HEADINGS = "h1 h2 h3 h4 h5 h6"


def flags(names: str) -> NDArray[np.bool_]:
    """Return a mask of the elements, by number, that are among `names`."""
    result = np.zeros(len(NAMES), np.bool_)
    result[[NUMBER[name] for name in names.split()]] = True
    return result


IS_BLOCK, IS_VOID, IS_RAW, IS_SPACED, IS_HEADING = map(flags, (BLOCK, VOID, RAW, SPACED, HEADINGS))


def fnv(data: bytes) -> int:
    """Return the FNV-1a hash of bytes, 64 bits."""
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def _table(names: tuple[str, ...]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Open addressing: hashes of names and their numbers."""
    keys, values = np.zeros(1024, np.uint64), np.zeros(1024, np.int64)
    for number, name in enumerate(names):
        if name:
            at = fnv(name.encode()) & 1023
            while keys[at]:
                at = (at + 1) & 1023
            keys[at], values[at] = fnv(name.encode()), number
    return keys, values


TAG_KEYS, TAG_VALUES = _table(NAMES)
