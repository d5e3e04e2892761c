"""Cards of other articles: units that repeat, each of a linked title and a few lines, beside the paragraphs of the article itself.

Lists of articles that are the content of a page are made of such units as well. So they go only where a body of paragraphs stands
outside of them, which the trees believe in no less, and not among its paragraphs: entries of a "best of" stay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.article import kin
from puna.models.extraction.groups import group_sums
from puna.models.extraction.layout import Scan

LIKE = 3  # children of one parent with the same tag and classes
MOST_WORDS = 120  # of a unit; a tenth of them may have more
TITLED = 0.6  # of the units hold a title: a block of three words or more that is a link
TITLE_WORDS, LINKED = 3, 0.9
PARAGRAPH, UNSTOPPED = 15, 30  # unlinked words of a body's paragraph, and of one without a sentence's end
PARAGRAPHS, ENOUGH = 5, 150  # paragraphs of a body that can do without the units, and their words


@njit(cache=True)
def without_units(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] of an article without the cards of others; `p` [blocks]: the chance of each block to be content."""
    n = len(page.blocks)
    blocks = _filled(page)
    keys = kin(page)[blocks]
    units, free = _units(page, blocks, keys)
    if free.all():
        return keep
    body, first, last = _body(page, keep & free, p)
    if body < 0:
        return keep
    words = np.zeros((n + 1, 2), np.float64)  # running sums of kept words, and of these by their chances
    for b in range(n):
        kept = page.blocks[b, L.WORDS] * keep[b]
        words[b + 1, 0], words[b + 1, 1] = words[b, 0] + kept, words[b, 1] + kept * p[b]
    values = np.zeros((len(blocks), 3), np.float32)  # kept words, the same by their chances, units among the body's paragraphs
    for k, e in enumerate(blocks):
        a, z = page.elements[e, L.FIRST], page.elements[e, L.END]
        values[k, 0], values[k, 1] = words[z, 0] - words[a, 0], words[z, 1] - words[a, 1]
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
    """Return the block elements that hold text, in order."""
    elements = page.elements
    found, count = np.empty(len(elements), np.int64), 0
    for e in range(1, len(elements)):
        if elements[e, L.HOLDER] == e and elements[e, L.END] > elements[e, L.FIRST]:
            found[count] = e
            count += 1
    return found[:count]


@njit(cache=True)
def _units(page: Scan, blocks: NDArray[np.int64], keys: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return a mask of the elements of `blocks` that are such units, by the `kin` of each; and one of the blocks of text outside them."""
    n = len(page.blocks)
    sums = np.zeros((n + 1, 2), np.int64)  # words, titles
    for b in range(n):
        words = page.blocks[b, L.WORDS]
        sums[b + 1, 0] = sums[b, 0] + words
        sums[b + 1, 1] = sums[b, 1] + (words >= TITLE_WORDS and page.blocks[b, L.LINKED_WORDS] >= LINKED * words)
    values = np.ones((len(blocks), 3), np.float32)  # units, those with a title, those that are too long
    for k, e in enumerate(blocks):
        a, z = page.elements[e, L.FIRST], page.elements[e, L.END]
        values[k, 1], values[k, 2] = sums[z, 1] > sums[a, 1], sums[z, 0] - sums[a, 0] > MOST_WORDS
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
def _body(page: Scan, kept: NDArray[np.bool_], p: NDArray[np.float32]) -> tuple[float, int, int]:
    """Mean chance of the paragraphs of the element with most of them, the first and the last; -1, where they are too few."""
    blocks, elements, n = page.blocks, page.elements, len(page.blocks)
    sums = np.zeros((len(elements), 3), np.float64)  # words of an element's own paragraphs, the same by their chances, paragraphs
    parents = np.full(n, -1, np.int64)
    for b in range(n):
        words = blocks[b, L.WORDS] - blocks[b, L.LINKED_WORDS]
        if kept[b] and words >= PARAGRAPH and (blocks[b, L.STOPS] > 0 or words > UNSTOPPED):
            parents[b] = parent = max(0, elements[blocks[b, L.ELEMENT], L.PARENT])
            sums[parent, 0], sums[parent, 1], sums[parent, 2] = sums[parent, 0] + words, sums[parent, 1] + words * p[b], sums[parent, 2] + 1
    main = int(np.argmax(sums[:, 0]))
    if sums[main, 0] < ENOUGH or sums[main, 2] < PARAGRAPHS:
        return -1.0, n, -1
    first, last = n, -1
    for b in range(n):
        if parents[b] == main:
            first, last = min(first, b), b
    return sums[main, 1] / sums[main, 0], first, last
