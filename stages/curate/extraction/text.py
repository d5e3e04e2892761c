"""Blocks that are kept, as text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.extraction import layout as L
from puna.stages.curate.extraction.layout import Scan

CELL_BYTES = 200  # longer cells are of tables made for layout: they stand on lines of their own


def text_of(page: Scan, keep: NDArray[np.bool_]) -> str:
    """The kept blocks, with blank lines between paragraphs, tabs between cells, and numbers or bullets before list items."""
    joined: NDArray[np.uint8] = _join(page, keep)
    return joined.tobytes().decode("utf-8", "replace")


@njit(cache=True)
def _join(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.uint8]:
    blocks = page.blocks
    out = np.empty(len(page.text) + 16 * len(blocks) + 16, np.uint8)
    at = 0
    before = -1  # bytes of the kept block before
    gap = L.TAB
    for b in range(len(blocks)):
        here = blocks[b, L.GAP]
        if here == L.BLANK or gap == L.BLANK:
            gap = L.BLANK
        elif here == L.LINE:
            gap = L.LINE
        if not keep[b]:
            continue
        size = blocks[b, L.STOP] - blocks[b, L.START]
        if before >= 0:
            if gap == L.TAB and before <= CELL_BYTES and size <= CELL_BYTES:
                out[at] = 9
                at += 1
            else:
                out[at] = 10
                out[at + 1] = 10
                at += 2 if gap == L.BLANK else 1
        at = _mark(out, at, blocks[b, L.MARKER])
        for k in range(blocks[b, L.START], blocks[b, L.STOP]):
            out[at] = page.text[k]
            at += 1
        before, gap = size, L.TAB
    return out[:at]


@njit(cache=True)
def _mark(out: NDArray[np.uint8], at: int, marker: int) -> int:
    """Write the bullet (-1) or the number of a list item; returns where it ends."""
    if marker < 0:
        for byte in b"\xe2\x80\xa2 ":
            out[at] = byte
            at += 1
    elif marker > 0:
        digits = 1
        while marker >= 10**digits:
            digits += 1
        for k in range(digits):
            out[at + digits - 1 - k] = 48 + marker // 10**k % 10
        at += digits
        out[at], out[at + 1] = 46, 32
        at += 2
    return at
