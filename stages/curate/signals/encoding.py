"""Text that was read in the wrong encoding: UTF-8 taken for cp1252, so that "é" stands as "Ã©"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

# The characters that cp1252 has for the bytes 0x80 to 0xBF; those without one are often left as control characters.
CONTINUATIONS = np.zeros(0x2123, np.bool_)
CONTINUATIONS[0x80:0xC0] = True
CONTINUATIONS[[ord(c) for c in bytes(range(0x80, 0xA0)).decode("cp1252", "ignore")]] = True


@njit(cache=True, borrows=True)
def misread_characters(codes: NDArray[np.uint32]) -> int:
    """Return characters in sequences that are one character's UTF-8 bytes, each read as a character of cp1252."""
    found, at, total = 0, 0, len(codes)
    while at < total:
        code = codes[at]
        if code < 0xC2 or code > 0xF4:
            at += 1
            continue
        size = 2 if code < 0xE0 else (3 if code < 0xF0 else 4)
        end = at + 1
        while end < total and end < at + size and codes[end] < len(CONTINUATIONS) and CONTINUATIONS[codes[end]]:
            end += 1
        if end == at + size:
            found += size
            at = end
        else:
            at += 1
    return found
