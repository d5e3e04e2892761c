"""Features of a block: its text, its place in the tree and on the page, its neighbours, its containers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import BIT, Scan, group_sums, groups, ratio
from puna.models.extraction.tags import IS_HEADING, NUMBER, OFFSET, PRIME

SEEN_FLAGS = (
    "nav header footer aside form main article section table ul ol li dl figure button dialog details blockquote select noscript template "
    "a td th label code p textarea hidden aria_hidden"
)
BITS = BIT | {"hidden": L.HIDDEN, "aria_hidden": L.ARIA_HIDDEN}
FLAG_BITS = np.array([BITS[name] for name in SEEN_FLAGS.split()], np.int64)
OWN = "words chars linked links stops commas digits upper inline images pre forms last length marker gap tag depth"
PLACE = ("path_score path_lowest score0 score1 score2 score3 text_sum text_mean index place words_before words_after h1_blocks h1_words "
    "head_blocks head_level head_text head_linked title same_title")  # fmt: skip
GROUP = ("group_blocks group_words group_linked group_stops group_share group_text group_first sign_blocks sign_words "
    "focus_in focus_up focus_share focus_linked lca_share lca_linked copies copy")  # fmt: skip
PAGE = "page_blocks page_words page_linked page_stops page_p page_li page_h1 page_heads page_images page_forms page_focus page_main"
LEVELS = 6  # number of containers above a block that have features
NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
T_BODY, T_H1, T_MAIN, T_ARTICLE, T_P = (NUMBER[name] for name in ["body", "h1", "main", "article", "p"])
BIT_LI = BIT["li"]
BUCKETS = 1 << 14  # hash buckets of words in classes, and of words in texts


def names() -> list[str]:
    result = [*OWN.split(), *(f"in_{name}" for name in SEEN_FLAGS.split()), *PLACE.split()]
    for k in NEIGHBOURS:
        result += [f"{name}{k:+d}" for name in ["words", "linked", "stops", "text", "path", "same"]]
    for k in (5, 15):
        result += [f"{name}±{k}" for name in ["words", "linked", "stops", "text"]]
    for k in range(1, LEVELS + 1):
        result += [f"{name}^{k}" for name in ["words", "linked", "blocks", "mean", "stops", "share"]]
    return [*result, *GROUP.split(), *PAGE.split()]


@njit(cache=True, borrows=True)
def element_scores(page: Scan, weights: NDArray[np.float32], own: NDArray[np.float32], path: NDArray[np.float32]) -> None:
    """Write to `own` the sum of weights of each element's tag and words (class, id, role); to `path`, sums of `own` from the root down."""
    elements, tokens = page.elements, page.tokens
    count = len(elements)
    mask = np.uint64(BUCKETS - 1)
    for e in range(count):
        stop = elements[e + 1, L.TOKENS] if e + 1 < count else len(tokens)
        total = weights[np.int64((np.uint64(elements[e, L.TAG] * 2654435761 + 12345)) & mask)]
        for t in range(elements[e, L.TOKENS], stop):
            total += weights[np.int64((tokens[t] ^ (tokens[t] >> np.uint64(29))) & mask)]
        own[e] = total
        path[e] = total + (path[elements[e, L.PARENT]] if e else np.float32(0))


@njit(cache=True, borrows=True)
def text_scores(page: Scan, weights: NDArray[np.float32], total: NDArray[np.float32]) -> None:
    """Add the weights of each block's words to `total` [blocks]."""
    start = 0
    mask = np.uint64(BUCKETS - 1)
    for b in range(len(page.blocks)):
        for t in range(start, page.blocks[b, L.HASHES]):
            h = page.hashes[t]
            total[b] += weights[np.int64((h ^ (h >> np.uint64(29))) & mask)]
        start = page.blocks[b, L.HASHES]


@njit(cache=True)
def text_keys(page: Scan) -> NDArray[np.uint64]:
    """Return a hash [blocks] of each block's sequence of words."""
    keys = np.empty(len(page.blocks), np.uint64)
    start = 0
    for b in range(len(keys)):
        state = OFFSET
        for t in range(start, page.blocks[b, L.HASHES]):
            state = (state ^ page.hashes[t]) * PRIME
        start = page.blocks[b, L.HASHES]
        keys[b] = state
    return keys


@njit(cache=True)
def _title_words(page: Scan) -> NDArray[np.uint64]:
    results = np.empty(len(page.title) // 2 + 1, np.uint64)
    count = 0
    word, inside = OFFSET, False
    for at in range(len(page.title) + 1):
        c = np.int64(page.title[at]) if at < len(page.title) else 32
        if 97 <= (c | 32) <= 122 or c >= 128 or 48 <= c <= 57:
            word = (word ^ np.uint64(48 if 48 <= c <= 57 else (c | 32 if c < 128 else c))) * PRIME
            inside = True
        elif inside:
            results[count] = word
            count += 1
            word, inside = OFFSET, False
    return np.sort(results[:count])


@njit(cache=True, borrows=True)
def focus(page: Scan, mass: NDArray[np.float64], share: float) -> int:
    """Return the deepest element with more than `share` of the prose, or the root. `mass` [blocks + 1]: running sum of words of prose."""
    elements = page.elements
    best = 0
    total = mass[-1]
    for e in range(1, len(elements)):
        if elements[e, L.END] > elements[e, L.FIRST] and mass[elements[e, L.END]] - mass[elements[e, L.FIRST]] > share * total:
            best = e
    return best


class Totals(NamedTuple):
    """Totals of a page, from which the features of its blocks are computed."""

    sums: NDArray[np.float64]  # [blocks + 1, 4] running sums of words, linked words, sentence ends, text scores
    group: NDArray[np.float32]  # [blocks, 5] sums over blocks with the same path: number, words, linked words, sentence ends, text scores
    sign: NDArray[np.float32]  # [blocks, 5] the same sums over blocks whose element has the same tag and classes
    paths: NDArray[np.uint64]  # [blocks] hash of the path
    first: NDArray[np.int64]  # [blocks] number of earlier blocks of the same path
    copies: NDArray[np.int64]  # [blocks] number of blocks of the same words
    before: NDArray[np.int64]  # [blocks] number of earlier blocks of the same words
    title: NDArray[np.uint64]  # sorted hashes of the title's words
    title_bits: np.uint64  # a bit set for each word of the title, numbered by the hash's last six bits
    inside: NDArray[np.bool_]  # [elements] the focus and its ancestors
    page: NDArray[np.float32]  # [12] features of the page


@njit(cache=True)
def block_features(
    page: Scan, own: NDArray[np.float32], path: NDArray[np.float32], text: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Write the features, in the order of `names`, to the first columns of `out` [blocks, ...], which must be all zeros. `own`, `path`
    [elements] and `text` [blocks]: the linear models' scores."""
    n = len(page.blocks)
    totals, focal = _totals(page, text)
    head = h1 = -1
    for b in range(n):
        row = out[b]
        k = _own(page, b, row)
        k = _element(page, b, own, path, text, row, k)
        k = _position(page, b, h1, head, totals, text, row, k)
        tag = page.elements[page.blocks[b, L.ELEMENT], L.TAG]
        if IS_HEADING[tag]:
            head = b
            if tag == T_H1 and h1 < 0:
                h1 = b
        k = _neighbours(page, b, totals, path, text, row, k)
        k = _containers(page, b, totals, row, k)
        k = _place(page, b, focal, totals, row, k)
        row[k : k + len(totals.page)] = totals.page


@njit(cache=True)
def _totals(page: Scan, text: NDArray[np.float32]) -> tuple[Totals, int]:
    """Return the page's totals and its focus: the deepest element with more than half of the prose."""
    blocks, elements = page.blocks, page.elements
    n = len(blocks)
    sums, mass = np.zeros((n + 1, 4), np.float64), np.zeros(n + 1, np.float64)
    values = np.empty((n, 5), np.float32)
    paths, signs = np.empty(n, np.uint64), np.empty(n, np.uint64)
    about = np.zeros(12, np.float32)
    for b in range(n):
        e = blocks[b, L.ELEMENT]
        words, linked, stops = blocks[b, L.WORDS], blocks[b, L.LINKED_WORDS], blocks[b, L.STOPS]
        sums[b + 1, 0], sums[b + 1, 1] = sums[b, 0] + words, sums[b, 1] + linked
        sums[b + 1, 2], sums[b + 1, 3] = sums[b, 2] + stops, sums[b, 3] + text[b]
        mass[b + 1] = mass[b] + (words - linked) * (stops > 0 and words > 8)
        values[b, 0], values[b, 1], values[b, 2], values[b, 3], values[b, 4] = 1, words, linked, stops, text[b]
        paths[b], signs[b] = page.signs[e, 1], page.signs[e, 0]
        tag = elements[e, L.TAG]
        about[4] += words * (tag == T_P)
        about[5] += words * (elements[e, L.FLAGS] & BIT_LI > 0)
        about[6] += tag == T_H1
        about[7] += IS_HEADING[tag]
        about[8] += blocks[b, L.IMAGES]
        about[9] += blocks[b, L.FORMS]
    total = sums[n, 0]
    about[0], about[1], about[2], about[3] = n, total, ratio(sums[n, 1], total), ratio(sums[n, 2], total)
    about[4], about[5], about[10] = ratio(about[4], total), ratio(about[5], total), mass[n]
    for e in range(len(elements)):
        about[11] += elements[e, L.TAG] == T_MAIN or elements[e, L.TAG] == T_ARTICLE
    focal = e = focus(page, mass, 0.5)
    inside = np.zeros(len(elements), np.bool_)
    while e >= 0:
        inside[e] = True
        e = elements[e, L.PARENT]
    copies, before = groups(text_keys(page))
    group, sign = group_sums(paths, values), group_sums(signs, values)
    title, bits = _title_words(page), np.uint64(0)
    for word in title:
        bits |= np.uint64(1) << (word & np.uint64(63))
    return Totals(sums, group, sign, paths, groups(paths)[1], copies, before, title, bits, inside, about), focal


@njit(cache=True, borrows=True)
def _own(page: Scan, b: int, row: NDArray[np.float32]) -> int:
    block = page.blocks[b]
    w, c = block[L.WORDS], block[L.CHARS]
    row[0], row[1], row[2], row[3], row[4], row[5] = w, c, ratio(block[L.LINKED_CHARS], c), block[L.LINKS], block[L.STOPS], block[L.COMMAS]
    row[6], row[7], row[8], row[9] = ratio(block[L.DIGITS], c), ratio(block[L.UPPER], c), block[L.INLINE], block[L.IMAGES]
    row[10], row[11] = block[L.PRE], block[L.FORMS]
    last = block[L.LAST]
    row[12] = 1 if last == 46 or last == 33 or last == 63 else 2 if last == 58 else 4 if last >= 65 else 3
    row[13], row[14], row[15] = ratio(c, w), min(2, max(-1, block[L.MARKER])), block[L.GAP]
    row[16], row[17] = page.elements[block[L.ELEMENT], L.TAG], page.elements[block[L.ELEMENT], L.DEPTH]
    return 18


@njit(cache=True, borrows=True)
def _element(
    page: Scan, b: int, own: NDArray[np.float32], path: NDArray[np.float32], text: NDArray[np.float32], row: NDArray[np.float32], k: int
) -> int:
    """Write which kinds of elements contain the block, and the linear models' scores; return the next column."""
    elements = page.elements
    e = page.blocks[b, L.ELEMENT]
    for bit in FLAG_BITS:
        row[k] = (elements[e, L.FLAGS] & bit) != 0
        k += 1
    row[k] = path[e]
    lowest = np.float32(0)
    up, level = e, 0
    while up > 0:
        lowest = min(lowest, own[up])
        if level < 4:
            row[k + 2 + level] = own[up]
        level += 1
        up = elements[up, L.PARENT]
    row[k + 1], row[k + 6], row[k + 7] = lowest, text[b], ratio(text[b], page.blocks[b, L.WORDS])
    return k + 8


@njit(cache=True, borrows=True)
def _position(page: Scan, b: int, h1: int, head: int, totals: Totals, text: NDArray[np.float32], row: NDArray[np.float32], k: int) -> int:
    """Write the distances to the page's ends and to headings before, and the share of title words; return the next column."""
    blocks, sums = page.blocks, totals.sums
    n = len(blocks)
    row[k], row[k + 1], row[k + 2], row[k + 3] = b, b / n, sums[b, 0], sums[n, 0] - sums[b + 1, 0]
    row[k + 4], row[k + 5] = (b - h1, sums[b, 0] - sums[h1, 0]) if h1 >= 0 else (-1, -1)
    row[k + 6], row[k + 7] = -1, -1
    if head >= 0:
        row[k + 6], row[k + 7] = b - head, page.elements[blocks[head, L.ELEMENT], L.TAG]
        row[k + 8], row[k + 9] = text[head], ratio(blocks[head, L.LINKED_WORDS], blocks[head, L.WORDS])
    start = blocks[b - 1, L.HASHES] if b else 0
    hits = 0
    for t in range(start, blocks[b, L.HASHES]):
        if totals.title_bits >> (page.hashes[t] & np.uint64(63)) & np.uint64(1):  # few words pass this test
            at = np.searchsorted(totals.title, page.hashes[t])
            hits += at < len(totals.title) and totals.title[at] == page.hashes[t]
    row[k + 10], row[k + 11] = ratio(hits, blocks[b, L.HASHES] - start), ratio(hits, len(totals.title))
    return k + 12


@njit(cache=True, borrows=True)
def _neighbours(
    page: Scan, b: int, totals: Totals, path: NDArray[np.float32], text: NDArray[np.float32], row: NDArray[np.float32], k: int
) -> int:
    blocks, sums = page.blocks, totals.sums
    n, e = len(blocks), page.blocks[b, L.ELEMENT]
    for d in NEIGHBOURS:
        o = b + d
        if 0 <= o < n:
            f = blocks[o, L.ELEMENT]
            row[k], row[k + 1], row[k + 2] = blocks[o, L.WORDS], ratio(blocks[o, L.LINKED_WORDS], blocks[o, L.WORDS]), blocks[o, L.STOPS]
            row[k + 3], row[k + 4], row[k + 5] = text[o], path[f] - path[e], totals.paths[o] == totals.paths[b]
        else:
            row[k] = -1
        k += 6
    for d in (5, 15):
        lo, hi = max(0, b - d), min(n, b + d + 1)
        words = sums[hi, 0] - sums[lo, 0]
        row[k], row[k + 1] = words, ratio(sums[hi, 1] - sums[lo, 1], words)
        row[k + 2], row[k + 3] = ratio(sums[hi, 2] - sums[lo, 2], words), sums[hi, 3] - sums[lo, 3]
        k += 4
    return k


@njit(cache=True, borrows=True)
def above(page: Scan, element: int) -> int:
    """Return the innermost block element around an element; the root itself for the root."""
    return int(page.elements[page.elements[element, L.PARENT], L.HOLDER]) if element > 0 else element


@njit(cache=True, borrows=True)
def _containers(page: Scan, b: int, totals: Totals, row: NDArray[np.float32], k: int) -> int:
    elements, sums = page.elements, totals.sums
    total = sums[len(page.blocks), 0]
    up = page.blocks[b, L.ELEMENT]
    for _ in range(LEVELS):
        if elements[up, L.TAG] != T_BODY:
            up = above(page, up)
        lo, hi = elements[up, L.FIRST], elements[up, L.END]
        words = sums[hi, 0] - sums[lo, 0]
        row[k], row[k + 1], row[k + 2] = words, ratio(sums[hi, 1] - sums[lo, 1], words), hi - lo
        row[k + 3], row[k + 4], row[k + 5] = ratio(words, hi - lo), ratio(sums[hi, 2] - sums[lo, 2], words), ratio(words, total)
        k += 6
    return k


@njit(cache=True, borrows=True)
def _place(page: Scan, b: int, focal: int, totals: Totals, row: NDArray[np.float32], k: int) -> int:
    """Write features of the blocks with the same path or sign, of the page's focus, and of copies; return the next column."""
    elements, sums, group = page.elements, totals.sums, totals.group[b]
    total = sums[len(page.blocks), 0]
    row[k], row[k + 1], row[k + 2], row[k + 3] = group[0], group[1], ratio(group[2], group[1]), ratio(group[3], group[1])
    row[k + 4], row[k + 5], row[k + 6] = ratio(group[1], total), ratio(group[4], group[0]), totals.first[b]
    row[k + 7], row[k + 8] = totals.sign[b, 0], totals.sign[b, 1]
    common = page.blocks[b, L.ELEMENT]
    while common > 0 and not totals.inside[common]:
        common = elements[common, L.PARENT]
    words = sums[elements[focal, L.END], 0] - sums[elements[focal, L.FIRST], 0]
    linked = sums[elements[focal, L.END], 1] - sums[elements[focal, L.FIRST], 1]
    row[k + 9], row[k + 10] = common == focal, elements[focal, L.DEPTH] - elements[common, L.DEPTH]
    row[k + 11], row[k + 12] = ratio(words, total), ratio(linked, words)
    words = sums[elements[common, L.END], 0] - sums[elements[common, L.FIRST], 0]
    linked = sums[elements[common, L.END], 1] - sums[elements[common, L.FIRST], 1]
    row[k + 13], row[k + 14] = ratio(words, total), ratio(linked, words)
    row[k + 15], row[k + 16] = totals.copies[b], totals.before[b]
    return k + 17
