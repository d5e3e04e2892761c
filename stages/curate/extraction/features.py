"""What the model sees of each block: its text, its place in the tree and on the page, its neighbours, its containers."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from puna.stages.curate.extraction.scan import (
    ARIA_HIDDEN, BIT, CHARS, CHILDREN, COMMAS, DEPTH, DIGITS, ELEMENT, END, FIRST, FLAGS, FORMS, GAP, HASHES, HIDDEN, IMAGES, INLINE, LAST,
    LINKED_CHARS, LINKED_WORDS, LINKS, MARKER, OFFSET, PARENT, PRE, PRIME, START, STOP, STOPS, TAG, TOKENS, UPPER, WORDS, Scan,
)  # fmt: skip
from puna.stages.curate.extraction.tags import IS_BLOCK, IS_HEADING, NUMBER

SEEN_FLAGS = (
    "nav", "header", "footer", "aside", "form", "main", "article", "section", "table", "ul", "ol", "li", "dl", "figure", "button",
    "dialog", "details", "blockquote", "select", "noscript", "template", "a", "td", "th", "label", "code", "p", "textarea",
)  # fmt: skip
FLAG_BITS = np.array([*(BIT[name] for name in SEEN_FLAGS), HIDDEN, ARIA_HIDDEN], np.int64)
LEVELS = 6  # containers above a block that are described
NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
T_BODY, T_H1, T_MAIN, T_ARTICLE, T_P, T_LI = (NUMBER[name] for name in "body h1 main article p li".split())
BIT_LI = BIT["li"]
BUCKETS = 1 << 14  # of words in classes and of words in texts


def names() -> list[str]:
    """Names of the features, in order."""
    own = "words chars linked links stops commas digits upper inline images pre forms last length marker gap tag depth".split()
    found = [*own, *(f"in_{name}" for name in (*SEEN_FLAGS, "hidden", "aria_hidden"))]
    found += "path_score path_lowest score0 score1 score2 score3 text_sum text_mean".split()
    found += "index place words_before words_after h1_blocks h1_words head_blocks head_level head_text head_linked title same_title".split()
    for k in NEIGHBOURS:
        found += [f"{name}{k:+d}" for name in "words linked stops text path same".split()]
    for k in (5, 15):
        found += [f"{name}±{k}" for name in "words linked stops text".split()]
    for k in range(1, LEVELS + 1):
        found += [f"{name}^{k}" for name in "words linked blocks mean stops share".split()]
    found += "group_blocks group_words group_linked group_stops group_share group_text group_first sign_blocks sign_words".split()
    found += "focus_in focus_up focus_share focus_linked lca_share lca_linked copies copy".split()
    found += "page_blocks page_words page_linked page_stops page_p page_li page_h1 page_heads page_images page_forms page_focus page_main".split()
    return found


@njit(cache=True)
def element_scores(page: Scan, weights: NDArray[np.float32], own: NDArray[np.float32], path: NDArray[np.float32]) -> None:
    """Per element: the sum of its class words' weights, and of those of its ancestors and itself."""
    elements, tokens = page.elements, page.tokens
    count = len(elements)
    mask = np.uint64(BUCKETS - 1)
    for e in range(count):
        stop = elements[e + 1, TOKENS] if e + 1 < count else len(tokens)
        total = weights[np.int64((np.uint64(elements[e, TAG] * 2654435761 + 12345)) & mask)]
        for t in range(elements[e, TOKENS], stop):
            total += weights[np.int64((tokens[t] ^ (tokens[t] >> np.uint64(29))) & mask)]
        own[e] = total
        path[e] = total + (path[elements[e, PARENT]] if e else np.float32(0))


@njit(cache=True)
def text_scores(page: Scan, weights: NDArray[np.float32], total: NDArray[np.float32]) -> None:
    """Per block: the sum of its words' weights."""
    start = 0
    mask = np.uint64(BUCKETS - 1)
    for b in range(len(page.blocks)):
        for t in range(start, page.blocks[b, HASHES]):
            h = page.hashes[t]
            total[b] += weights[np.int64((h ^ (h >> np.uint64(29))) & mask)]
        start = page.blocks[b, HASHES]


@njit(cache=True)
def _copies(page: Scan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often each block's words stand on the page, and how often before it."""
    blocks = page.blocks
    n = len(blocks)
    keys = np.empty(n, np.uint64)
    start = 0
    for b in range(n):
        state = OFFSET
        for t in range(start, blocks[b, HASHES]):
            state = (state ^ page.hashes[t]) * PRIME
        start = blocks[b, HASHES]
        keys[b] = state
    return _groups(keys)


@njit(cache=True)
def _groups(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many entries have the key of each, and how many of them stand before it."""
    n = len(keys)
    order = np.argsort(keys, kind="mergesort")
    size, before = np.empty(n, np.int64), np.empty(n, np.int64)
    at = 0
    while at < n:
        stop = at
        while stop < n and keys[order[stop]] == keys[order[at]]:
            before[order[stop]] = stop - at
            stop += 1
        for k in range(at, stop):
            size[order[k]] = stop - at
        at = stop
    return size, before


@njit(cache=True)
def _group_sums(keys: NDArray[np.uint64], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of the rows of `values` [n, k] over the entries with the key of each."""
    n = len(keys)
    order = np.argsort(keys, kind="mergesort")
    out = np.zeros(values.shape, np.float32)
    at = 0
    while at < n:
        stop = at
        total = np.zeros(values.shape[1], np.float32)
        while stop < n and keys[order[stop]] == keys[order[at]]:
            total += values[order[stop]]
            stop += 1
        for k in range(at, stop):
            out[order[k]] = total
        at = stop
    return out


@njit(cache=True)
def _title_words(page: Scan) -> NDArray[np.uint64]:
    """Hashes of the title's words, sorted."""
    found = np.empty(len(page.title) // 2 + 1, np.uint64)
    count = 0
    word, inside = OFFSET, False
    for at in range(len(page.title) + 1):
        c = np.int64(page.title[at]) if at < len(page.title) else 32
        if 97 <= (c | 32) <= 122 or c >= 128 or 48 <= c <= 57:
            word = (word ^ np.uint64(48 if 48 <= c <= 57 else (c | 32 if c < 128 else c))) * PRIME
            inside = True
        elif inside:
            found[count] = word
            count += 1
            word, inside = OFFSET, False
    return np.sort(found[:count])


@njit(cache=True)
def _focus(page: Scan, mass: NDArray[np.float64]) -> int:
    """The deepest element that holds more than half of the text with sentences."""
    elements = page.elements
    best = 0
    total = mass[-1]
    for e in range(1, len(elements)):
        if elements[e, END] > elements[e, FIRST] and mass[elements[e, END]] - mass[elements[e, FIRST]] > 0.5 * total:
            best = e
    return best


@njit(cache=True)
def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


@njit(cache=True)
def block_features(page: Scan, own: NDArray[np.float32], path: NDArray[np.float32], text: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Features [blocks, count], see `names`."""
    blocks, elements = page.blocks, page.elements
    n = len(blocks)
    out = np.zeros((n, count), np.float32)
    sums = np.zeros((n + 1, 4), np.float64)  # words, linked words, stops, text score
    mass = np.zeros(n + 1, np.float64)
    values = np.empty((n, 5), np.float32)
    keys, signs = np.empty(n, np.uint64), np.empty(n, np.uint64)
    in_p = in_li = heads = h1s = images = forms = 0
    for b in range(n):
        e = blocks[b, ELEMENT]
        w, lw, st = blocks[b, WORDS], blocks[b, LINKED_WORDS], blocks[b, STOPS]
        sums[b + 1, 0], sums[b + 1, 1], sums[b + 1, 2], sums[b + 1, 3] = sums[b, 0] + w, sums[b, 1] + lw, sums[b, 2] + st, sums[b, 3] + text[b]
        mass[b + 1] = mass[b] + (w - lw) * (st > 0 and w > 8)
        values[b, 0], values[b, 1], values[b, 2], values[b, 3], values[b, 4] = 1, w, lw, st, text[b]
        keys[b], signs[b] = page.signs[e, 1], page.signs[e, 0]
        tag = elements[e, TAG]
        in_p += w * (tag == T_P)
        in_li += w * (elements[e, FLAGS] & BIT_LI > 0)
        heads += IS_HEADING[tag]
        h1s += tag == T_H1
        images += blocks[b, IMAGES]
        forms += blocks[b, FORMS]
    group, sign = _group_sums(keys, values), _group_sums(signs, values)
    _, first = _groups(keys)
    size, before = _copies(page)
    title = _title_words(page)
    focus = _focus(page, mass)
    inside = np.zeros(len(elements), np.bool_)
    e = focus
    while e >= 0:
        inside[e] = True
        e = elements[e, PARENT]
    has_main = 0
    for e in range(len(elements)):
        if elements[e, TAG] == T_MAIN or elements[e, TAG] == T_ARTICLE:
            has_main += 1
    words = sums[n, 0]
    focus_words = sums[elements[focus, END], 0] - sums[elements[focus, FIRST], 0]
    focus_linked = sums[elements[focus, END], 1] - sums[elements[focus, FIRST], 1]
    head = h1 = -1
    for b in range(n):
        row = out[b]
        e = blocks[b, ELEMENT]
        w = blocks[b, WORDS]
        k = _own(page, b, row)
        for bit in FLAG_BITS:
            row[k] = (elements[e, FLAGS] & bit) != 0
            k += 1
        row[k] = path[e]
        lowest = np.float32(0)
        up, level = e, 0
        while up > 0:
            lowest = min(lowest, own[up])
            if level < 4:
                row[k + 2 + level] = own[up]
            level += 1
            up = elements[up, PARENT]
        row[k + 1] = lowest
        row[k + 6], row[k + 7] = text[b], _ratio(text[b], w)
        k += 8
        tag = elements[e, TAG]
        row[k], row[k + 1], row[k + 2], row[k + 3] = b, b / n, sums[b, 0], words - sums[b + 1, 0]
        row[k + 4], row[k + 5] = (b - h1, sums[b, 0] - sums[h1, 0]) if h1 >= 0 else (-1, -1)
        if head >= 0:
            row[k + 6], row[k + 7] = b - head, elements[blocks[head, ELEMENT], TAG]
            row[k + 8], row[k + 9] = text[head], _ratio(blocks[head, LINKED_WORDS], blocks[head, WORDS])
        else:
            row[k + 6], row[k + 7] = -1, -1
        if IS_HEADING[tag]:
            head = b
            if tag == T_H1 and h1 < 0:
                h1 = b
        start = blocks[b - 1, HASHES] if b else 0
        hits = 0
        for t in range(start, blocks[b, HASHES]):
            at = np.searchsorted(title, page.hashes[t])
            hits += at < len(title) and title[at] == page.hashes[t]
        row[k + 10] = _ratio(hits, blocks[b, HASHES] - start)
        row[k + 11] = _ratio(hits, len(title))
        k += 12
        for d in NEIGHBOURS:
            o = b + d
            if 0 <= o < n:
                f = blocks[o, ELEMENT]
                row[k], row[k + 1], row[k + 2] = blocks[o, WORDS], _ratio(blocks[o, LINKED_WORDS], blocks[o, WORDS]), blocks[o, STOPS]
                row[k + 3], row[k + 4], row[k + 5] = text[o], path[f] - path[e], keys[o] == keys[b]
            else:
                row[k] = -1
            k += 6
        for d in (5, 15):
            lo, hi = max(0, b - d), min(n, b + d + 1)
            dw = sums[hi, 0] - sums[lo, 0]
            row[k], row[k + 1] = dw, _ratio(sums[hi, 1] - sums[lo, 1], dw)
            row[k + 2], row[k + 3] = _ratio(sums[hi, 2] - sums[lo, 2], dw), sums[hi, 3] - sums[lo, 3]
            k += 4
        up = e
        for _ in range(LEVELS):
            if up > 0 and elements[up, TAG] != T_BODY:
                up = elements[up, PARENT]
                while up > 0 and not IS_BLOCK[elements[up, TAG]]:
                    up = elements[up, PARENT]
            lo, hi = elements[up, FIRST], elements[up, END]
            dw = sums[hi, 0] - sums[lo, 0]
            row[k], row[k + 1], row[k + 2] = dw, _ratio(sums[hi, 1] - sums[lo, 1], dw), hi - lo
            row[k + 3], row[k + 4], row[k + 5] = _ratio(dw, hi - lo), _ratio(sums[hi, 2] - sums[lo, 2], dw), _ratio(dw, words)
            k += 6
        row[k], row[k + 1], row[k + 2] = group[b, 0], group[b, 1], _ratio(group[b, 2], group[b, 1])
        row[k + 3], row[k + 4], row[k + 5], row[k + 6] = _ratio(group[b, 3], group[b, 1]), _ratio(group[b, 1], words), _ratio(group[b, 4], group[b, 0]), first[b]
        row[k + 7], row[k + 8] = sign[b, 0], sign[b, 1]
        k += 9
        lca, steps = e, 0
        while lca > 0 and not inside[lca]:
            lca, steps = elements[lca, PARENT], steps + 1
        row[k] = lca == focus
        row[k + 1] = elements[focus, DEPTH] - elements[lca, DEPTH]
        row[k + 2], row[k + 3] = _ratio(focus_words, words), _ratio(focus_linked, focus_words)
        dw = sums[elements[lca, END], 0] - sums[elements[lca, FIRST], 0]
        row[k + 4], row[k + 5] = _ratio(dw, words), _ratio(sums[elements[lca, END], 1] - sums[elements[lca, FIRST], 1], dw)
        row[k + 6], row[k + 7] = size[b], before[b]
        k += 8
        row[k], row[k + 1], row[k + 2], row[k + 3] = n, words, _ratio(sums[n, 1], words), _ratio(sums[n, 2], words)
        row[k + 4], row[k + 5], row[k + 6], row[k + 7] = _ratio(in_p, words), _ratio(in_li, words), h1s, heads
        row[k + 8], row[k + 9], row[k + 10], row[k + 11] = images, forms, mass[n], has_main
    return out


@njit(cache=True)
def _own(page: Scan, b: int, row: NDArray[np.float32]) -> int:
    """The features of the block's own text; returns their number."""
    block = page.blocks[b]
    w, c = block[WORDS], block[CHARS]
    row[0], row[1], row[2], row[3], row[4], row[5] = w, c, _ratio(block[LINKED_CHARS], c), block[LINKS], block[STOPS], block[COMMAS]
    row[6], row[7], row[8], row[9], row[10], row[11] = _ratio(block[DIGITS], c), _ratio(block[UPPER], c), block[INLINE], block[IMAGES], block[PRE], block[FORMS]
    last = block[LAST]
    row[12] = 1 if last == 46 or last == 33 or last == 63 else 2 if last == 58 else 4 if last >= 65 else 3
    row[13], row[14], row[15] = _ratio(c, w), min(2, max(-1, block[MARKER])), block[GAP]
    row[16], row[17] = page.elements[block[ELEMENT], TAG], page.elements[block[ELEMENT], DEPTH]
    return 18
