"""Text below an article that is about others: teasers, lists of what else to read, other articles' beginnings.

The article's body is the deepest element that holds most of its prose. What is kept after the end of that element stays only
where the trees have little doubt about it, or where it has the tags and classes of the body's paragraphs: an article may be
cut into sections. Before the body stand the lead and the first picture, which are looked at no further.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.groups import group_sums
from puna.models.extraction.layout import Scan

PROSE = 0.7  # of the kept prose stands in the body
LONG = 20  # words of a block that is prose without a sentence's end; scripts have stops of their own
ENOUGH = 100  # kept words of a body that can do without what is below it
SURE = 0.75  # from this chance on a block below the body stays
OWN = 0.1  # of the body's prose stands under a path that is the body's own


@njit(cache=True)
def without_teasers(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] of an article without the doubtful blocks below its body; `p` [blocks]: the chance of each to be content."""
    blocks, elements, n = page.blocks, page.elements, len(page.blocks)
    prose, kept = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)  # running sums of words
    for b in range(n):
        words = blocks[b, L.WORDS] * keep[b]
        kept[b + 1] = kept[b] + words
        sentence = blocks[b, L.STOPS] > 0 or words > LONG
        prose[b + 1] = prose[b] + (words - blocks[b, L.LINKED_WORDS] * keep[b]) * sentence
    first, end = 0, n
    for e in range(len(elements)):
        a, z = elements[e, L.FIRST], elements[e, L.END]
        if z > a and prose[z] > prose[a] and prose[z] - prose[a] >= PROSE * prose[n]:
            first, end = a, z
    out = keep.copy()
    if kept[end] - kept[first] >= ENOUGH:
        paths, inside = np.empty(n, np.uint64), np.zeros((n, 1), np.float32)
        for b in range(n):
            paths[b] = page.signs[blocks[b, L.ELEMENT], 1]
            if first <= b < end:
                inside[b, 0] = prose[b + 1] - prose[b]
        same = group_sums(paths, inside)
        for b in range(end, n):
            out[b] = keep[b] and (p[b] >= SURE or same[b, 0] >= OWN * (prose[end] - prose[first]))
    return out
