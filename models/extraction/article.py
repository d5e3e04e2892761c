"""Further features of a block for the network: distance from the body, repeated units, images, words shared with the article.

The decision trees do not get these features, which mislead them on pages that list products or entries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.features import focus
from puna.models.extraction.layout import Scan, groups, ratio
from puna.models.extraction.tags import PRIME

ABOVE = 5  # ancestors of a block whose similar siblings are counted
LONG = 20  # minimum unlinked words of a paragraph
SLOTS = 1 << 14  # hash slots that count the article's words
CAPTION = L.BIT["figcaption"]


def names() -> list[str]:
    results = ["caption", "from_focus", "after_focus_start", "before_focus_end", "from_most_prose"]
    results += [f"branch_{name}" for name in ("words", "linked", "stops", "blocks", "alike", "tag", "prose", "images")]
    results += [f"alike^{k}" for k in range(ABOVE)]
    results += [f"unit_{name}" for name in ("alike", "words", "linked", "images", "blocks")]
    results += ["images-1", "images±2", "paragraph-", "paragraph+", "words_since_paragraph", "words_to_paragraph"]
    results += ["same_parent-", "same_parent+", "in_main", "from_main", "main_share"]
    return [*results, "words_said", "rare_words_said", "first"]


class Measures(NamedTuple):
    """Measures of a page, from which the features of its blocks are computed."""

    sums: NDArray[np.int64]  # [blocks + 1, 5] running sums of words, linked words, sentence ends, words of sentences, images
    paragraph: NDArray[np.bool_]  # [blocks] prose without many links
    around: NDArray[np.int64]  # [blocks, 2] the last paragraph before a block, the first after it; -1 where there is none
    alike: NDArray[np.int64]  # [elements] children of the parent with the element's tag and classes, itself included
    branch: NDArray[np.int64]  # [elements] outermost element around each (or itself) that does not hold the focus; -1 if it holds the focus
    counts: NDArray[np.int32]  # [SLOTS] occurrences of words in paragraphs, by hash slot
    main: int  # the element with most words in paragraphs of its own
    main_first: int  # first and last paragraph of `main`; -1 if it has none
    main_last: int
    main_share: float  # share of the page's words in paragraphs of `main`


FEATURES = len(names())


@njit(cache=True)
def article_features(page: Scan) -> NDArray[np.float32]:
    """Return the features [blocks, FEATURES], in the order of `names`."""
    out = np.zeros((len(page.blocks), FEATURES), np.float32)
    m = _measures(page)
    most = focus(page, m.sums[:, 3].astype(np.float64), 0.5)
    more = focus(page, m.sums[:, 3].astype(np.float64), 0.75)
    _branches(page, most, m.branch)
    own = np.zeros(SLOTS, np.int32)
    for b in range(len(out)):
        row = out[b]
        k = _standing(page, b, most, more, m, row)
        k = _branch(page, b, m, row, k)
        k = _units(page, b, m, row, k)
        k = _paragraphs(page, b, m, row, k)
        _words(page, b, m, own, row, k)
    return out


@njit(cache=True)
def _measures(page: Scan) -> Measures:
    blocks, elements = page.blocks, page.elements
    n = len(blocks)
    sums, paragraph = np.zeros((n + 1, 5), np.int64), np.zeros(n, np.bool_)
    around, counts = np.full((n, 2), -1, np.int64), np.zeros(SLOTS, np.int32)
    prose = np.zeros(len(elements), np.int64)  # words of an element's own paragraphs
    start = 0
    for b in range(n):
        words, linked, stops = blocks[b, L.WORDS], blocks[b, L.LINKED_WORDS], blocks[b, L.STOPS]
        sums[b + 1, 0], sums[b + 1, 1], sums[b + 1, 2] = sums[b, 0] + words, sums[b, 1] + linked, sums[b, 2] + stops
        sums[b + 1, 3], sums[b + 1, 4] = sums[b, 3] + (words - linked) * (stops > 0 and words > 8), sums[b, 4] + blocks[b, L.IMAGES]
        paragraph[b] = words - linked >= LONG and stops > 0 and linked <= 0.3 * words
        if paragraph[b]:
            prose[max(0, elements[blocks[b, L.ELEMENT], L.PARENT])] += words
            for t in range(start, blocks[b, L.HASHES]):
                counts[_slot(page.hashes[t])] += 1
        start = blocks[b, L.HASHES]
    main = int(np.argmax(prose))
    first = last = before = after = -1
    for b in range(n):
        around[b, 0] = before
        if paragraph[b]:
            before = b
            if max(0, elements[blocks[b, L.ELEMENT], L.PARENT]) == main:
                first, last = b if first < 0 else first, b
    for b in range(n - 1, -1, -1):
        around[b, 1] = after
        if paragraph[b]:
            after = b
    share = ratio(prose[main], sums[n, 0])
    return Measures(sums, paragraph, around, groups(kin(page))[0], np.empty(len(elements), np.int64), counts, main, first, last, share)


@njit(cache=True)
def kin(page: Scan) -> NDArray[np.uint64]:
    """Return a key per element [elements], equal for children of one parent that have the same tag and classes."""
    keys = np.empty(len(page.elements), np.uint64)
    for e in range(len(keys)):
        keys[e] = (np.uint64(page.elements[e, L.PARENT] + 1) * PRIME) ^ page.signs[e, 0]
    return keys


@njit(cache=True, borrows=True)
def _branches(page: Scan, holder: int, branch: NDArray[np.int64]) -> None:
    """Fill in `branch` (see `Measures`) for the focus `holder`; in `elements`, parents come before their children."""
    elements = page.elements
    branch[:] = 0
    while holder >= 0:
        branch[holder] = -1
        holder = elements[holder, L.PARENT]
    for e in range(len(elements)):
        if branch[e] == 0:
            above = branch[elements[e, L.PARENT]]
            branch[e] = e if above < 0 else above


@njit(cache=True)
def _slot(word: np.uint64) -> int:
    return int((word ^ (word >> np.uint64(29))) & np.uint64(SLOTS - 1))


@njit(cache=True, borrows=True)
def _from(words: NDArray[np.int64], b: int, first: int, end: int) -> int:
    """Return a block's distance in words (plus 1) from the blocks [first, end): negative before these, positive after them, 0 inside."""
    if b < first:
        return int(words[b + 1] - words[first] - 1)
    return int(words[b] - words[end] + 1) if b >= end else 0


@njit(cache=True, borrows=True)
def _standing(page: Scan, b: int, most: int, more: int, m: Measures, row: NDArray[np.float32]) -> int:
    """Write if a block is a caption, and its distances (words) from the elements at 1/2 and 3/4 of the prose; return the next column."""
    elements, words = page.elements, m.sums[:, 0]
    row[0] = (elements[page.blocks[b, L.ELEMENT], L.FLAGS] & CAPTION) != 0
    first, end = elements[most, L.FIRST], elements[most, L.END]
    row[1], row[2], row[3] = _from(words, b, first, end), words[b] - words[first], words[end] - words[b + 1]
    row[4] = _from(words, b, elements[more, L.FIRST], elements[more, L.END])
    return 5


@njit(cache=True, borrows=True)
def _branch(page: Scan, b: int, m: Measures, row: NDArray[np.float32], k: int) -> int:
    """Write features of the outermost element that contains the block but not the focus; return the next column."""
    elements, sums, branch = page.elements, m.sums, m.branch[page.blocks[b, L.ELEMENT]]
    row[k + 3] = -1
    if branch >= 0:
        a, z = elements[branch, L.FIRST], elements[branch, L.END]
        words = sums[z, 0] - sums[a, 0]
        row[k], row[k + 1], row[k + 2] = words, ratio(sums[z, 1] - sums[a, 1], words), ratio(sums[z, 2] - sums[a, 2], words)
        row[k + 3], row[k + 4], row[k + 5] = z - a, m.alike[branch], elements[branch, L.TAG]
        row[k + 6], row[k + 7] = ratio(sums[z, 3] - sums[a, 3], words), sums[z, 4] - sums[a, 4]
    return k + 8


@njit(cache=True, borrows=True)
def _units(page: Scan, b: int, m: Measures, row: NDArray[np.float32], k: int) -> int:
    elements, sums = page.elements, m.sums
    n = len(page.blocks)
    up, unit, most = page.blocks[b, L.ELEMENT], -1, 0
    for level in range(2 * ABOVE):
        if up <= 0:
            break
        if level < ABOVE:
            row[k + level] = m.alike[up]
        if m.alike[up] > most and m.branch[up] >= 0:
            unit, most = up, m.alike[up]
        up = elements[up, L.PARENT]
    k += ABOVE
    row[k] = most
    if unit > 0:
        a, z = elements[unit, L.FIRST], elements[unit, L.END]
        words = sums[z, 0] - sums[a, 0]
        row[k + 1], row[k + 2] = words, ratio(sums[z, 1] - sums[a, 1], words)
        row[k + 3], row[k + 4] = sums[z, 4] - sums[a, 4], z - a
    row[k + 5] = sums[b + 1, 4] - sums[max(0, b - 1), 4]
    row[k + 6] = sums[min(n, b + 3), 4] - sums[max(0, b - 2), 4]
    return k + 7


@njit(cache=True, borrows=True)
def _paragraphs(page: Scan, b: int, m: Measures, row: NDArray[np.float32], k: int) -> int:
    blocks, elements, words = page.blocks, page.elements, m.sums[:, 0]
    parent = elements[blocks[b, L.ELEMENT], L.PARENT]
    before, after = m.around[b]
    row[k] = row[k + 1] = row[k + 2] = row[k + 3] = -1
    if before >= 0:
        row[k], row[k + 2] = b - before, words[b] - words[before + 1]
        row[k + 4] = elements[blocks[before, L.ELEMENT], L.PARENT] == parent
    if after >= 0:
        row[k + 1], row[k + 3] = after - b, words[after] - words[b + 1]
        row[k + 5] = elements[blocks[after, L.ELEMENT], L.PARENT] == parent
    row[k + 6] = max(0, parent) == m.main
    row[k + 7] = b - m.main_first if b < m.main_first else max(0, b - m.main_last)
    row[k + 8] = m.main_share
    return k + 9


@njit(cache=True, borrows=True)
def _words(page: Scan, b: int, m: Measures, own: NDArray[np.int32], row: NDArray[np.float32], k: int) -> None:
    """Write the share of the block's words that other paragraphs have, plain and weighted by rarity, and the kind of the block's first
    character. `own` [SLOTS] holds zeros before and after the call."""
    blocks = page.blocks
    start, stop = blocks[b - 1, L.HASHES] if b else 0, blocks[b, L.HASHES]
    for t in range(start, stop):
        own[_slot(page.hashes[t])] += m.paragraph[b]
    common, seldom, total = 0, 0.0, 0.0
    for t in range(start, stop):
        slot = _slot(page.hashes[t])
        others = m.counts[slot] - own[slot]
        weight = 1 / (1 + np.log(1.0 + others))
        common, seldom, total = common + (others > 0), seldom + weight * (others > 0), total + weight
    for t in range(start, stop):
        own[_slot(page.hashes[t])] = 0
    row[k], row[k + 1] = ratio(common, stop - start), ratio(seldom, total)
    first = page.text[blocks[b, L.START]]
    row[k + 2] = 1 if 97 <= first <= 122 else 2 if 65 <= first <= 90 else 3 if 48 <= first <= 57 else 4 if first >= 128 else 5
