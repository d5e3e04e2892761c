"""Blocks that stay whole: code, and lists of definitions and tables of which enough is content.

Judging block by block leaves holes: one example in five, one method of a class. Inside the element that holds the page's
content, blocks of code are always kept; a table stays whole once half of its words are kept, a list of definitions once
a tenth is: documentation of interfaces says the same of many methods, which looks like boilerplate.
A heading stays with the block below it. The main heading is another matter: the model has learned to leave it to the title.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import Scan
from puna.models.extraction.tags import IS_HEADING, NAMES, NUMBER

CONTENT = 0.9  # of the kept words stand in the element that is taken for the content
T_H1, T_PRE, T_DL, T_TABLE = (NUMBER[name] for name in ["h1", "pre", "dl", "table"])
# Share of an element's words that must be kept for the rest to stay; at these, F1 on unseen pages does not fall.
NEEDED = np.full(len(NAMES), np.inf)
NEEDED[T_PRE], NEEDED[T_DL], NEEDED[T_TABLE] = 0, 0.1, 0.5


@njit(cache=True)
def made_whole(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] with the holes in code, lists of definitions and tables filled, and the headings of kept blocks."""
    elements, n = page.elements, len(page.blocks)
    words, kept = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)  # running sums
    for b in range(n):
        words[b + 1] = words[b] + page.blocks[b, L.WORDS]
        kept[b + 1] = kept[b] + page.blocks[b, L.WORDS] * keep[b]
    first, end = _content(page, kept)
    out = keep.copy()
    done = first  # what an outer table or list has settled
    for e in range(len(elements)):
        a, z = elements[e, L.FIRST], elements[e, L.END]
        needed = NEEDED[elements[e, L.TAG]]
        if a < done or z <= a or z > end or needed == np.inf:
            continue
        if kept[z] - kept[a] >= needed * (words[z] - words[a]) and (needed == 0 or kept[z] > kept[a]):
            out[a:z] = True
            done = z
    _headed(page, out)
    return out


@njit(cache=True)
def _headed(page: Scan, keep: NDArray[np.bool_]) -> None:
    """Keep headings below the first kept block with the block that they head."""
    top = 0
    while top < len(keep) and not keep[top]:
        top += 1
    for b in range(len(keep) - 2, top, -1):
        if keep[b + 1] and IS_HEADING[page.elements[page.blocks[b, L.ELEMENT], L.TAG]]:
            keep[b] = True


@njit(cache=True)
def with_headline(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] and the page's main heading, its only `h1`, where it stands above the end of the text."""
    found = end = -1
    for b in range(len(keep)):
        if page.elements[page.blocks[b, L.ELEMENT], L.TAG] == T_H1:
            found = b if found < 0 else len(keep)
        if keep[b]:
            end = b
    out = keep.copy()
    if 0 <= found < end:
        out[found] = True
    return out


@njit(cache=True)
def _content(page: Scan, kept: NDArray[np.int64]) -> tuple[int, int]:
    """Return first block and end of the deepest element that holds nearly all kept words; none where nothing is kept."""
    elements = page.elements
    first, end = 0, 0
    for e in range(len(elements)):
        a, z = elements[e, L.FIRST], elements[e, L.END]
        if z > a and kept[z] > kept[a] and kept[z] - kept[a] >= CONTENT * kept[-1]:
            first, end = a, z
    return first, end
