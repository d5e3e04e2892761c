"""Readers' comments below an article: what others say about it, not what it says.

Containers that name themselves so, in a class or an id, go with all that is in them where enough of the article stands above
them. In forums, questions and reviews such words are the content: only pages that are told to be articles are looked at.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import Scan

ABOVE = 100  # words that are kept above the comments
BELOW = 0.25  # of these, at most, are kept below the first of them besides comments
MOST_WORDS = 3  # of the container's class and id: a heading about comments has longer ones
MOST_AFTER = 6  # where the first of these words is the name
NAMES = ("comment", "comments", "commentlist", "comentarios", "kommentare", "commentaires", "disqus")
CLASS, ID = 0, 1  # as `attributes` tells their words apart


def hashed(name: str, kind: int) -> int:
    """Return the hash that `attributes` gives a word of a class or an id."""
    value = int(L.OFFSET) ^ kind
    for byte in name.encode():
        value = (value ^ byte) * int(L.PRIME) % 2**64
    return value


SAYS_COMMENTS = np.array([hashed(name, kind) for name in NAMES for kind in (CLASS, ID)], np.uint64)


@njit(cache=True)
def without_comments(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] of an article without the comments below it; unchanged where much is kept after them."""
    elements, n = page.elements, len(page.blocks)
    kept = np.zeros(n + 1, np.int64)
    for b in range(n):
        kept[b + 1] = kept[b] + page.blocks[b, L.WORDS] * keep[b]
    out, above = keep.copy(), -1
    for e in range(len(elements)):
        first, end = elements[e, L.FIRST], elements[e, L.END]
        if end <= first or kept[first] < ABOVE or kept[end] == kept[first]:
            continue
        last = elements[e + 1, L.TOKENS] if e + 1 < len(elements) else len(page.tokens)
        own = page.tokens[elements[e, L.TOKENS] : last]
        if len(own) > MOST_AFTER:
            continue
        for token in own if len(own) <= MOST_WORDS else own[:1]:
            if (token == SAYS_COMMENTS).any():
                out[first:end] = False
                above = kept[first] if above < 0 else above
                break
    left = 0
    for b in range(n):
        left += page.blocks[b, L.WORDS] * out[b]
    return out if above >= 0 and left - above <= BELOW * above else keep
