"""Blocks that are kept, as text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import Pages, Scan, alone, page_of

CELL_BYTES = 200  # longer cells are of tables made for layout: they stand on lines of their own


def text_of(page: Scan, keep: NDArray[np.bool_]) -> str:
    """Return the kept blocks, with blank lines between paragraphs, tabs between cells, and numbers or bullets before list items."""
    return texts_of(alone(page), keep)[0].tobytes().decode("utf-8", "replace")  # type: ignore[no-any-return]


@njit(cache=True)
def texts_of(pages: Pages, keep: NDArray[np.bool_]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the pages' texts one after the other, and where each begins and the last ends [pages + 1]; `keep` [blocks of all pages]."""
    n, starts = len(pages.starts) - 1, pages.starts[:, L.BLOCK]
    out, ends = np.empty(len(pages.text) + 16 * len(keep) + 16, np.uint8), np.zeros(n + 1, np.int64)
    for number in range(n):
        ends[number + 1] = _join(page_of(pages, number), keep[starts[number] : starts[number + 1]], out, ends[number])
    return out[: ends[n]], ends


@njit(cache=True, borrows=True)
def _join(page: Scan, keep: NDArray[np.bool_], out: NDArray[np.uint8], at: int) -> int:
    """Write a page's text at a place; returns where it ends."""
    blocks = page.blocks
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
    return at


@njit(cache=True, borrows=True)
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
