"""Asides of an article's page: teasers, cards of other articles, readers' comments.

Teasers: the article's body is the deepest element that holds most of its prose. A block after the end of that element stays only where
the trees have little doubt about it, or where it has the tags and classes of the body's paragraphs: an article may be cut into sections.

Cards: units that repeat, each of a linked title and a few lines. Lists of articles that are the content of a page are made of such units as
well. So cards go only where a body of paragraphs stands outside them with at least their mean chance, and none stands among its paragraphs:
entries of a "best of" stay.

Comments: containers that name themselves so, in a class or an id, go with their content where enough of the article stands above them.
In forums, questions and reviews such words are the content: only certain articles are examined.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.article import kin
from puna.models.extraction.layout import Scan, deepest, group_sums, running
from puna.models.extraction.tags import fnv

PROSE = 0.7  # of the kept prose stands in the body
LONG = 20  # words of a block that is prose without a sentence's end; scripts have stops of their own
BODY_WORDS = 100  # kept words of a body that can do without what is below it
SURE = 0.75  # from this chance on a block below the body stays
OWN = 0.1  # of the body's prose stands under a path that is the body's own


@njit(cache=True)
def without_teasers(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] of an article without the doubtful blocks below its body; `p` [blocks]: the chance of each to be content."""
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


LIKE = 3  # children of one parent with the same tag and classes
UNIT_WORDS = 120  # of a unit; a tenth of them may have more
TITLED = 0.6  # of the units hold a title: a block of three words or more that is a link
TITLE_WORDS, LINKED = 3, 0.9
PARAGRAPH, UNSTOPPED = 15, 30  # unlinked words of a body's paragraph, and of one without a sentence's end
PARAGRAPHS, PARAGRAPH_WORDS = 5, 150  # paragraphs of a body that can do without the units, and their words


@njit(cache=True)
def without_units(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] of an article without the cards of other articles; `p` [blocks]: the chance of each block to be content."""
    blocks = _filled(page)
    keys = kin(page)[blocks]
    units, free = _units(page, blocks, keys)
    if free.all():
        return keep
    body, first, last = _body(page, keep & free, p)
    if body < 0:
        return keep
    words = page.blocks[:, L.WORDS] * keep
    kept_words, expected = running(words), running(words * p)
    values = np.zeros((len(blocks), 3), np.float32)  # kept words, the same by their chances, units among the body's paragraphs
    for k, e in enumerate(blocks):
        a, z = page.elements[e, L.FIRST], page.elements[e, L.END]
        values[k, 0], values[k, 1] = kept_words[z] - kept_words[a], expected[z] - expected[a]
        values[k, 2] = a <= last and z > first
    values = group_sums(keys, values)
    out, done = keep.copy(), 0
    for k, e in enumerate(blocks):
        a, z = page.elements[e, L.FIRST], page.elements[e, L.END]
        if units[k] and z > done and values[k, 2] == 0 and values[k, 1] <= body * values[k, 0]:
            out[a:z], done = False, z
    return out


@njit(cache=True)
def _filled(page: Scan) -> NDArray[np.int64]:
    elements = page.elements
    results, count = np.empty(len(elements), np.int64), 0
    for e in range(1, len(elements)):
        if elements[e, L.HOLDER] == e and elements[e, L.END] > elements[e, L.FIRST]:
            results[count] = e
            count += 1
    return results[:count]


@njit(cache=True)
def _units(page: Scan, blocks: NDArray[np.int64], keys: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return a mask of the elements `blocks` that are card units, by their `kin` keys, and a mask of the text blocks outside units."""
    n = len(page.blocks)
    sums = np.zeros((n + 1, 2), np.int64)  # words, titles
    for b in range(n):
        words = page.blocks[b, L.WORDS]
        sums[b + 1, 0] = sums[b, 0] + words
        sums[b + 1, 1] = sums[b, 1] + (words >= TITLE_WORDS and page.blocks[b, L.LINKED_WORDS] >= LINKED * words)
    values = np.ones((len(blocks), 3), np.float32)  # units, those with a title, those that are too long
    for k, e in enumerate(blocks):
        a, z = page.elements[e, L.FIRST], page.elements[e, L.END]
        values[k, 1], values[k, 2] = sums[z, 1] > sums[a, 1], sums[z, 0] - sums[a, 0] > UNIT_WORDS
    values = group_sums(keys, values)
    units, free, done = np.zeros(len(blocks), np.bool_), np.ones(n, np.bool_), 0
    for k, e in enumerate(blocks):
        z = page.elements[e, L.END]
        like, titled, long = values[k]
        units[k] = like >= LIKE and titled >= TITLED * like and long <= 0.1 * like
        if units[k] and z > done:
            free[page.elements[e, L.FIRST] : z], done = False, z
    return units, free


@njit(cache=True)
def _body(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32]) -> tuple[float, int, int]:
    """Return the mean chance of the main element's paragraphs, the first and the last of them; -1 where they are too few."""
    blocks, elements, n = page.blocks, page.elements, len(page.blocks)
    sums = np.zeros((len(elements), 3), np.float64)  # words of an element's own paragraphs, the same by their chances, paragraphs
    parents = np.full(n, -1, np.int64)
    for b in range(n):
        words = blocks[b, L.WORDS] - blocks[b, L.LINKED_WORDS]
        if keep[b] and words >= PARAGRAPH and (blocks[b, L.STOPS] > 0 or words > UNSTOPPED):
            parents[b] = parent = max(0, elements[blocks[b, L.ELEMENT], L.PARENT])
            sums[parent, 0], sums[parent, 1], sums[parent, 2] = sums[parent, 0] + words, sums[parent, 1] + words * p[b], sums[parent, 2] + 1
    main = int(np.argmax(sums[:, 0]))
    if sums[main, 0] < PARAGRAPH_WORDS or sums[main, 2] < PARAGRAPHS:
        return -1.0, n, -1
    first, last = n, -1
    for b in range(n):
        if parents[b] == main:
            first, last = min(first, b), b
    return sums[main, 1] / sums[main, 0], first, last


ABOVE = 100  # words that are kept above the comments
BELOW = 0.25  # of these, at most, are kept below the first of them besides comments
CONTAINER_WORDS = 3  # of the container's class and id: a heading about comments has longer ones
MOST_AFTER = 6  # where the first of these words is the name
COMMENT_NAMES = ("comment", "comments", "commentlist", "comentarios", "kommentare", "commentaires", "disqus")
CLASS, ID = 0, 1  # kinds of words, as `attributes` hashes them
SAYS_COMMENTS = np.array([fnv(name, kind) for name in COMMENT_NAMES for kind in (CLASS, ID)], np.uint64)


@njit(cache=True)
def without_comments(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] of an article without the comments below it; unchanged where much is kept after them."""
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
