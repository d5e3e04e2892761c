"""Removal of asides from an article's page: teasers of other articles, and readers' comments.

Teasers: the article's body is the deepest element that holds most of the kept prose. A block after the body's end stays only if the model
is nearly certain of it, or if it has the tags and classes of the body's paragraphs: an article may consist of several sections.

Comments: containers named as comments by class or id are removed with their content, if enough of the article precedes them. In forums,
questions and reviews comments are the content: only pages that are certainly articles are examined."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import Scan, deepest, group_sums, running
from puna.models.extraction.tags import fnv

PROSE = 0.7  # minimum share of the kept prose in the body
LONG = 20  # words above which a block is prose even without a full stop: some scripts have other stops
BODY_WORDS = 100  # minimum kept words of a body that may lose the blocks below it
SURE = 0.75  # minimum probability of content at which a block below the body stays
OWN = 0.1  # minimum share of the body's prose in blocks of one path (tags and classes) at which that path is the body's own


@njit(cache=True)
def without_teasers(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] of an article without doubtful blocks below a body of `BODY_WORDS`; `p` [blocks]: content probability."""
    blocks, n = page.blocks, len(page.blocks)
    words = blocks[:, L.WORDS] * keep
    kept_words = running(words)
    prose = running((words - blocks[:, L.LINKED_WORDS] * keep) * ((blocks[:, L.STOPS] > 0) | (words > LONG)))
    first, end = deepest(page, prose, PROSE)
    out = keep.copy()
    if kept_words[end] - kept_words[first] >= BODY_WORDS:
        paths, inside = np.empty(n, np.uint64), np.zeros((n, 1), np.float32)
        for b in range(n):
            paths[b] = page.signs[blocks[b, L.ELEMENT], 1]
            if first <= b < end:
                inside[b, 0] = prose[b + 1] - prose[b]
        same = group_sums(paths, inside)
        for b in range(end, n):
            out[b] = keep[b] and (p[b] >= SURE or same[b, 0] >= OWN * (prose[end] - prose[first]))
    return out


ABOVE = 100  # minimum words kept above the comments
BELOW = 0.25  # maximum words kept below the first comments, besides comments, as a share of the words above
CONTAINER_WORDS = 3  # maximum words of the container's class and id: a heading about comments has more
MOST_AFTER = 6  # the same limit if the first of these words is a comment name
COMMENT_NAMES = ("comment", "comments", "commentlist", "comentarios", "kommentare", "commentaires", "disqus")
CLASS, ID = 0, 1  # kinds of words, as `attributes` hashes them
SAYS_COMMENTS = np.array([fnv(name, kind) for name in COMMENT_NAMES for kind in (CLASS, ID)], np.uint64)


@njit(cache=True)
def without_comments(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] without comments below an article's first `ABOVE` words; unchanged if much other text follows the comments."""
    elements, kept_words = page.elements, running(page.blocks[:, L.WORDS] * keep)
    out, above = keep.copy(), -1
    for e in range(len(elements)):
        first, end = elements[e, L.FIRST], elements[e, L.END]
        if end <= first or kept_words[first] < ABOVE or kept_words[end] == kept_words[first]:
            continue
        last = elements[e + 1, L.TOKENS] if e + 1 < len(elements) else len(page.tokens)
        own = page.tokens[elements[e, L.TOKENS] : last]
        if len(own) > MOST_AFTER:
            continue
        for token in own if len(own) <= CONTAINER_WORDS else own[:1]:
            if (token == SAYS_COMMENTS).any():
                out[first:end] = False
                above = kept_words[first] if above < 0 else above
                break
    left = (page.blocks[:, L.WORDS] * out).sum()
    return out if above >= 0 and left - above <= BELOW * above else keep
