"""What stands below an article and is about others: teasers, lists of what else to read, other articles' beginnings.

The article's body is the deepest element that holds most of its prose. What is kept after the end of that element stays only
where the trees have little doubt about it; before it stand the lead and the first picture, which are looked at no further.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.compiled import njit
from puna.stages.curate.extraction import layout as L
from puna.stages.curate.extraction.layout import Scan

PROSE = 0.7  # of the kept prose stands in the body
LONG = 20  # words of a block that is prose without a sentence's end; scripts have stops of their own
ENOUGH = 100  # kept words of a body that can do without what is below it
SURE = 0.75  # from this chance on a block below the body stays


@njit(cache=True)
def without_teasers(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """`keep` [blocks] of an article without the doubtful blocks below its body; `p` [blocks]: the chance of each to be content."""
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
        for b in range(end, n):
            out[b] = keep[b] and p[b] >= SURE
    return out
