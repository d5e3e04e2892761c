"""Tables of HTML elements (their numbers, and their effect on the text around them), and searches in the bytes of HTML."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.bytes import LANES, equal, lowest
from puna.kernels.cpu.numba_cache import njit

# Elements whose content begins and ends a line. The content of all others stays within the line.
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
# The parser keeps the content of these elements verbatim, without entities and elements.
RAW = "script style xmp iframe noembed noframes plaintext"
# Blank lines separate these elements from the rest.
SPACED = "p pre blockquote table ul ol dl h1 h2 h3 h4 h5 h6 figure article section header footer aside nav main form details hr"
OFFSET, PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # constants of the FNV-1a hash
HEADINGS = "h1 h2 h3 h4 h5 h6"


def flags(names: str) -> NDArray[np.bool_]:
    """Return a mask of the elements, by number, that are among `names`."""
    result = np.zeros(len(NAMES), np.bool_)
    result[[NUMBER[name] for name in names.split()]] = True
    return result


IS_BLOCK, IS_VOID, IS_RAW, IS_SPACED, IS_HEADING = map(flags, (BLOCK, VOID, RAW, SPACED, HEADINGS))


def fnv(name: str, kind: int = 0) -> int:
    """Return the 64-bit FNV-1a hash of a name, which also depends on `kind`."""
    state = int(OFFSET) ^ kind
    for byte in name.encode():
        state = (state ^ byte) * int(PRIME) & 0xFFFFFFFFFFFFFFFF
    return state


def _table(names: tuple[str, ...]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return a hash table with open addressing: hashes of names, and their numbers."""
    keys, values = np.zeros(1024, np.uint64), np.zeros(1024, np.int64)
    for number, name in enumerate(names):
        if name:
            at = fnv(name) & 1023
            while keys[at]:
                at = (at + 1) & 1023
            keys[at], values[at] = fnv(name), number
    return keys, values


TAG_KEYS, TAG_VALUES = _table(NAMES)


@njit(cache=True, borrows=True)
def find(html: NDArray[np.uint8], at: int, byte: int, stop: int = -1) -> int:
    """Return the index of the first `byte` in html[at:stop]; if there is none, the larger of `at` and `stop` (by default the end)."""
    stop = len(html) if stop < 0 else stop
    address = html.ctypes.data
    while at + LANES <= stop:
        there = equal(address + at, byte)
        if there:
            return at + lowest(there)  # type: ignore[no-any-return]
        at += LANES
    while at < stop and html[at] != byte:
        at += 1
    return at


@njit(cache=True, borrows=True)
def begins(html: NDArray[np.uint8], at: int, stop: int, words: bytes) -> bool:
    here = 0
    while here < len(words) and at + here < stop and html[at + here] == words[here]:
        here += 1
    return here == len(words)


@njit(cache=True, borrows=True)
def has(html: NDArray[np.uint8], start: int, stop: int, words: bytes) -> bool:
    """True if html[start:stop] contains the lower-case bytes `words`, ignoring ASCII case."""
    for at in range(start, stop - len(words) + 1):
        here = 0
        while here < len(words) and (
            html[at + here] == words[here] or (65 <= html[at + here] <= 90 and html[at + here] + 32 == words[here])
        ):
            here += 1
        if here == len(words):
            return True
    return False


@njit(cache=True, borrows=True)
def is_space(byte: int) -> bool:
    """True if a byte is white space between the parts of a tag; other control characters belong to names."""
    return byte == 32 or byte == 10 or byte == 9 or byte == 13 or byte == 12


@njit(cache=True, borrows=True)
def tag_name(html: NDArray[np.uint8], at: int) -> tuple[int, np.uint64, int]:
    """Return the index in `NAMES` (0: not listed) and the hash of the element name at `at`, ignoring ASCII case, and the name's end."""
    state = OFFSET
    while at < len(html) and not is_space(html[at]) and html[at] != 62 and html[at] != 47:
        c = html[at]
        state = (state ^ np.uint64(c | 32 if 65 <= c <= 90 else c)) * PRIME
        at += 1
    slot = np.int64(state & np.uint64(len(TAG_KEYS) - 1))
    while TAG_KEYS[slot] != 0 and TAG_KEYS[slot] != state:
        slot = (slot + 1) & (len(TAG_KEYS) - 1)
    return (TAG_VALUES[slot] if TAG_KEYS[slot] != 0 else 0), state, at
