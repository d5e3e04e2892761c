"""The extractor's model, which predicts the blocks of a page that are its content.

Two linear models score the words of class attributes and of texts; a third predicts the type of the page from its head. Boosted trees judge
a block by these scores, and by its text, containers, neighbours and the blocks of the same kind. A network (`network`), which also gets the
features of `article`, judges the block by the blocks around it. The block's logit is the mean of both. The page keeps the blocks that give
the highest expected F1 of words.

`tests/benchmarks/train_extraction.py` trains the weights on labelled pages; NOTICE beside the weights describes the labels."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.article import FEATURES as ARTICLE_FEATURES
from puna.models.extraction.article import article_features
from puna.models.extraction.asides import without_comments, without_teasers
from puna.models.extraction.features import block_features, element_scores, names, text_keys, text_scores
from puna.models.extraction.invisible_text import without_unseen
from puna.models.extraction.layout import Pages, Scan, deepest, group_sums, numbers_of, page_of, running
from puna.models.extraction.network import Network, network_logits
from puna.models.extraction.tags import IS_HEADING, NAMES, NUMBER
from puna.models.extraction.trees import Splits, Trees, logits, splits
from puna.models.extraction.write import CELL_BYTES, T_TABLE, T_TD, T_TH

PULL = np.float32(0.35)  # share of the way by which a logit moves to the mean of the blocks with the same path
COPIED_WORDS = 5  # minimum words of a copy: shorter texts may occur on a page again and again


@njit(cache=True)
def agree(page: Scan, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the logits `scores` [blocks], moved towards the mean of blocks with the same tags and classes up to the root. Titles of cards,
    messages of a thread or cells of a column are all content or all not. A block's weight in the mean is the
    square root of its number of words."""
    blocks = page.blocks
    n = len(blocks)
    paths, sums = np.empty(n, np.uint64), np.empty((n, 2), np.float32)
    for b in range(n):
        paths[b] = page.signs[blocks[b, L.ELEMENT], 1]
        sums[b, 1] = np.sqrt(blocks[b, L.WORDS]) + 0.01
        sums[b, 0] = scores[b] * sums[b, 1]
    sums = group_sums(paths, sums)
    out = np.empty(n, np.float32)
    for b in range(n):
        out[b] = scores[b] + PULL * (sums[b, 0] / sums[b, 1] - scores[b])
    return out


@njit(cache=True)
def once(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] without copies, as for narrow screens: blocks of `COPIED_WORDS` or more (not `pre`) with the words of an
    earlier kept block. Blocks with the same path or in the same data table are not copies: messages of a thread, entries of a reference or
    cells of a column may have equal words."""
    keys, tables = text_keys(page), data_tables(page)
    out = keep.copy()
    numbers, count = numbers_of(keys)
    first = np.full(count, -1, np.int64)  # kept block of these words
    for b in range(len(keys)):
        if keep[b] and first[numbers[b]] < 0:
            first[numbers[b]] = b
        elif keep[b] and page.blocks[b, L.WORDS] >= COPIED_WORDS and page.blocks[b, L.PRE] == 0:
            before, own = page.blocks[first[numbers[b]], L.ELEMENT], page.blocks[b, L.ELEMENT]
            out[b] = page.signs[own, 1] == page.signs[before, 1] or tables[own] == tables[before] > 0
    return out


LEVELS = 128  # number of cuts to try, and of states of the page to try them against
TOGETHER = 0.6  # weight of the second expectation in `best_cut`, in which blocks are content together


@njit(cache=True)
def best_cut(p: NDArray[np.float32], words: NDArray[np.float64]) -> tuple[float, float]:
    """Return the cut (minimum probability of kept blocks, a multiple of 1 / LEVELS) with the highest expected F1 of words, and this F1.

    This is a weighted mean of two expectations. If blocks are independent, F1 is near 2 * (expected content in kept words) / (kept words +
    expected content). But similar blocks, such as cards, are often all content or all not. So the second expectation draws a level
    uniformly and takes the blocks above it as content: F1 is 2 * min / sum of the words above the level and above the cut."""
    above, right = np.zeros(LEVELS + 1), np.zeros(LEVELS + 1)  # words and expected content words of the blocks at or above a level
    for b in range(len(p)):
        level = min(LEVELS - 1, int(p[b] * LEVELS))
        above[level] += words[b]
        right[level] += p[b] * words[b]
    for level in range(LEVELS - 1, -1, -1):
        above[level] += above[level + 1]
        right[level] += right[level + 1]
    highest, cut = 0.0, 0
    for level in range(LEVELS - 1, -1, -1):
        if above[level] == above[level + 1]:
            continue
        together = 0.0
        for other in range(LEVELS):
            if above[other] > 0:
                together += 2 * min(above[level], above[other]) / (above[level] + above[other])
        f1 = TOGETHER * together / LEVELS + (1 - TOGETHER) * 2 * right[level] / (above[level] + right[0])
        if f1 >= highest:
            highest, cut = f1, level
    return cut / LEVELS, highest


CONTENT_SHARE = 0.9  # minimum share of the kept words in the element taken as the content
T_H1, T_PRE, T_DL, T_FIGURE = (NUMBER[name] for name in ["h1", "pre", "dl", "figure"])
T_CAPTION, T_FIGCAPTION, T_THEAD = (NUMBER[name] for name in ["caption", "figcaption", "thead"])
# Share of an element's words that must be kept for the rest to stay; at these shares, F1 on unseen pages does not fall.
NEEDED = np.full(len(NAMES), np.inf)
NEEDED[T_PRE], NEEDED[T_DL], NEEDED[T_TABLE] = 0, 0.1, 0.5
DATA_NEEDED = 0.3  # the same for a data table whose rest has no more words than all that is kept of the page


@njit(cache=True)
def made_whole(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] with gaps in code, definition lists and tables filled (see `NEEDED`), and with headings of kept blocks."""
    elements, tables = page.elements, data_tables(page)
    words, kept_words = running(page.blocks[:, L.WORDS]), running(page.blocks[:, L.WORDS] * keep)
    first, end = deepest(page, kept_words, CONTENT_SHARE)
    out = keep.copy()
    done = first  # end of the last element that was filled: inner tables and lists are skipped
    for e in range(len(elements)):
        a, z = elements[e, L.FIRST], elements[e, L.END]
        needed = NEEDED[elements[e, L.TAG]]
        if a < done or z <= a or z > end or needed == np.inf:
            continue
        own, whole = kept_words[z] - kept_words[a], words[z] - words[a]
        needed = DATA_NEEDED if tables[e] == e and whole - own <= kept_words[-1] else needed
        if own >= needed * whole and (needed == 0 or own > 0):
            out[a:z] = True
            done = z
    _keep_heads(page, tables, out)
    _keep_headings(page, out)
    return out


@njit(cache=True)
def _keep_heads(page: Scan, tables: NDArray[np.int64], keep: NDArray[np.bool_]) -> None:
    """Keep the `thead` and `caption` of each data table with a kept block, and a `figcaption` beside it. `tables`: from `data_tables`."""
    elements, blocks = page.elements, page.blocks
    kept = running((keep & (tables[blocks[:, L.ELEMENT]] > 0)).astype(np.int64))
    done = 0  # end of the last element that was kept
    for e in range(1, len(elements)):
        tag, around = elements[e, L.TAG], elements[e, L.PARENT]
        if tag in (T_CAPTION, T_THEAD):
            around = tables[e]
        elif tag != T_FIGCAPTION or elements[around, L.TAG] != T_FIGURE:
            continue
        if around > 0 and elements[e, L.FIRST] >= done and kept[elements[around, L.END]] > kept[elements[around, L.FIRST]]:
            done = elements[e, L.END]
            keep[elements[e, L.FIRST] : done] = True


@njit(cache=True)
def data_tables(page: Scan) -> NDArray[np.int64]:
    """Return the data table that each element [elements] belongs to, 0 for none. A data table holds no table and no long cell; two of its
    rows have two cells with text."""
    elements, blocks, n = page.elements, page.blocks, len(page.elements)
    tables, cells, rows, layout = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    for e in range(1, n):
        tag, parent, a, z = elements[e, L.TAG], elements[e, L.PARENT], elements[e, L.FIRST], elements[e, L.END]
        tables[e] = e if tag == T_TABLE else tables[parent]
        if tag == T_TABLE:
            layout[tables[parent]] = True
        elif tag in (T_TD, T_TH) and z > a:
            cells[parent] += 1
            rows[tables[e]] += cells[parent] == 2
            layout[tables[e]] |= blocks[z - 1, L.STOP] - blocks[a, L.START] > CELL_BYTES
    for e in range(n):
        if layout[tables[e]] or rows[tables[e]] < 2:
            tables[e] = 0
    return tables


@njit(cache=True)
def _keep_headings(page: Scan, keep: NDArray[np.bool_]) -> None:
    """Keep a heading below the first kept block if the next block is kept."""
    top = 0
    while top < len(keep) and not keep[top]:
        top += 1
    for b in range(len(keep) - 2, top, -1):
        if keep[b + 1] and IS_HEADING[page.elements[page.blocks[b, L.ELEMENT], L.TAG]]:
            keep[b] = True


@njit(cache=True)
def with_headline(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] with the page's main heading added: its only `h1`, if it stands above the last kept block."""
    results = end = -1
    for b in range(len(keep)):
        if page.elements[page.blocks[b, L.ELEMENT], L.TAG] == T_H1:
            results = b if results < 0 else len(keep)
        if keep[b]:
            end = b
    out = keep.copy()
    if 0 <= results < end:
        out[results] = True
    return out


WEIGHTS = Path(__file__).parent / "extractor.safetensors"
PAGE_TYPES = ("article", "forum", "product", "collection", "listing", "documentation", "service")
ARTICLE = PAGE_TYPES.index("article")
TYPE_BUCKETS = 1 << 12
CERTAIN = np.log(2)  # twice as probable as not
BODY_SALT = np.uint64(0x9E3779B97F4A7C15)
FEATURES = len(names())
SEEN = FEATURES + len(PAGE_TYPES)  # columns that the trees read
COLUMNS = SEEN + ARTICLE_FEATURES  # columns that the network reads
T_HTML, T_BODY = NUMBER["html"], NUMBER["body"]


class Linear(NamedTuple):
    """Weights of the linear models, by bucket of the hashed word."""

    class_weights: NDArray[np.float32]  # [features.BUCKETS]
    text_weights: NDArray[np.float32]  # [features.BUCKETS]
    type_weights: NDArray[np.float32]  # [TYPE_BUCKETS, page types]
    type_bias: NDArray[np.float32]  # [page types]


class Model(NamedTuple):
    """The linear models, the trees, and the network, which also gets the features of `article`."""

    linear: Linear
    trees: Splits
    network: Network


@lru_cache(maxsize=1)
def load() -> Model:
    from safetensors.numpy import load_file

    results = load_file(WEIGHTS)
    linear = Linear(*(results[name].astype(np.float32) for name in Linear._fields))
    network = Network(*(results[f"network.{name}"].astype(np.float32) for name in Network._fields))
    return Model(linear, splits(Trees(**{field: results[f"trees.{field}"] for field in Trees._fields})), network)


@njit(cache=True)
def page_words(page: Scan) -> NDArray[np.int64]:
    """Return the sorted hash buckets of the words that predict the page's type: from its head, and from its `html` and `body` tags."""
    words = np.empty(len(page.page) + 2 * L.MAX_TOKENS, np.uint64)
    words[: len(page.page)] = page.page
    count, html, body = len(page.page), False, False
    for e in range(len(page.elements)):
        tag = page.elements[e, L.TAG]
        if (tag == T_HTML and not html) or (tag == T_BODY and not body):
            html, body = html or tag == T_HTML, body or tag == T_BODY
            stop = page.elements[e + 1, L.TOKENS] if e + 1 < len(page.elements) else len(page.tokens)
            for t in range(page.elements[e, L.TOKENS], stop):
                words[count] = page.tokens[t] ^ BODY_SALT
                count += 1
        if html and body:
            break
    for w in range(count):
        words[w] = (words[w] ^ (words[w] >> np.uint64(29))) & np.uint64(TYPE_BUCKETS - 1)
    return np.unique(words[:count]).astype(np.int64)


@njit(cache=True)
def features_and_types(pages: Pages, linear: Linear) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the features of all blocks [blocks, COLUMNS], and logits of the pages' types [pages, page types] (0 without blocks)."""
    n, starts = len(pages.starts) - 1, pages.starts[:, L.BLOCK]
    rows, types = np.zeros((starts[n], COLUMNS), np.float32), np.zeros((n, len(linear.type_bias)), np.float32)
    for p in range(n):
        if starts[p + 1] > starts[p]:
            page, own = page_of(pages, p), rows[starts[p] : starts[p + 1]]
            for word in page_words(page):
                types[p] += linear.type_weights[word]
            types[p] += linear.type_bias
            scores, path = np.empty(len(page.elements), np.float32), np.empty(len(page.elements), np.float32)
            text = np.zeros(len(page.blocks), np.float32)
            element_scores(page, linear.class_weights, scores, path)
            text_scores(page, linear.text_weights, text)
            block_features(page, scores, path, text, own)
            own[:, FEATURES:SEEN], own[:, SEEN:] = types[p], article_features(page)
    return rows, types


@njit(cache=True)
def _scores(pages: Pages, rows: NDArray[np.float32], trees: Splits, network: Network) -> NDArray[np.float32]:
    """Return each block's logit of being content [blocks]."""
    starts = pages.starts[:, L.BLOCK]
    scores = logits(trees, rows)
    for p in range(len(starts) - 1):
        a, z = starts[p], starts[p + 1]
        if z > a:
            scores[a:z] = agree(page_of(pages, p), (scores[a:z] + network_logits(network, rows[a:z])) / np.float32(2))
    return scores  # type: ignore[no-any-return]


def chances(pages: Pages, rows: NDArray[np.float32], trees: Splits, network: Network) -> NDArray[np.float32]:
    """Return each block's probability of being content [blocks], from the features `rows` [blocks, COLUMNS]."""
    result: NDArray[np.float32] = 1 / (1 + np.exp(-_scores(pages, rows, trees, network)))
    return result


def judge(pages: Pages, model: Model) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return each block's probability of being content [blocks], and the logits of the pages' types [pages, page types]."""
    rows, types = features_and_types(pages, model.linear)
    return chances(pages, rows, model.trees, model.network), types


@njit(cache=True)
def choose_blocks(page: Scan, p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask of the blocks to keep, given probabilities `p` of content; complete code, lists and tables, and drop copies."""
    cut, _ = best_cut(p, page.blocks[:, L.WORDS] + 0.01)
    return once(page, made_whole(page, p >= cut))  # type: ignore[no-any-return]


def content(pages: Pages, model: Model, headline: bool = False) -> NDArray[np.bool_]:
    """Return a mask of the pages' content [blocks]; cut shortcodes off kept blocks in `pages`. `headline`: also keep main headings."""
    p, types = judge(pages, model)
    return kept_blocks(pages, p, types, headline)  # type: ignore[no-any-return]


@njit(cache=True)
def kept_blocks(pages: Pages, p: NDArray[np.float32], types: NDArray[np.float32], headline: bool) -> NDArray[np.bool_]:
    """Return the mask of `content` (and change `pages` as it does), given probabilities `p` of content and logits of the pages' types."""
    starts = pages.starts[:, L.BLOCK]
    keep = np.zeros(len(p), np.bool_)
    for number in range(len(types)):
        a, z = starts[number], starts[number + 1]
        if z > a:
            page = page_of(pages, number)
            own = below_the_article(page, choose_blocks(page, p[a:z]), p[a:z], types[number])
            keep[a:z] = without_unseen(page, with_headline(page, own) if headline else own)
    return keep


@njit(cache=True)
def below_the_article(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32], types: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] without teasers of other articles if the page's likeliest type is article; if its logit reaches `CERTAIN`,
    also without comments. `p` [blocks]: probability that a block is content; `types` [page types]: logits of the page's type."""
    if types.argmax() != ARTICLE:
        return keep
    left = without_teasers(page, keep, p)
    return without_comments(page, left) if types.max() >= CERTAIN else left  # type: ignore[no-any-return]
