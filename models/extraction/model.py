"""The extractor's model: which blocks of a page are its content.

Two linear models score the words of classes and of texts, one guesses the type of the page from its head, and boosted
trees judge each block by these, by its text, its containers, its neighbours and the blocks of its kind; where the page is
likely an article, trees that learned from articles and see more of a block (`article`) have a say. The page keeps the
blocks that give the highest expected F1 of words.

The weights are made by `training.py` from labelled pages; NOTICE beside them tells of the labels.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.alike import agreed, once
from puna.models.extraction.article import article_features
from puna.models.extraction.comments import without_comments
from puna.models.extraction.cut import best_cut
from puna.models.extraction.features import block_features, element_scores, names, text_scores
from puna.models.extraction.layout import Pages, Scan, page_of
from puna.models.extraction.tags import NUMBER
from puna.models.extraction.teasers import without_teasers
from puna.models.extraction.trees import Splits, Trees, logits, splits
from puna.models.extraction.units import without_units
from puna.models.extraction.unseen import without_unseen
from puna.models.extraction.whole import made_whole, with_headline

WEIGHTS = Path(__file__).parent / "extractor.safetensors"
PAGE_TYPES = ("article", "forum", "product", "collection", "listing", "documentation", "service")
ARTICLE = PAGE_TYPES.index("article")
TYPE_BUCKETS = 1 << 12
CERTAIN = np.log(2)  # twice as probable as not
LIKELY = np.float32(0.5)  # the trees for articles have as much of a say as the chance to be one is above this
BODY_SALT = np.uint64(0x9E3779B97F4A7C15)
FEATURES = len(names())
SEEN = FEATURES + len(PAGE_TYPES)
T_HTML, T_BODY = NUMBER["html"], NUMBER["body"]


class Model(NamedTuple):
    """Weights of the linear models, by bucket of the hashed word, and the trees."""

    class_weights: NDArray[np.float32]  # [features.BUCKETS]
    text_weights: NDArray[np.float32]  # [features.BUCKETS]
    type_weights: NDArray[np.float32]  # [TYPE_BUCKETS, page types]
    type_bias: NDArray[np.float32]  # [page types]
    trees: Splits
    articles: Splits  # see `article.names` after what `trees` see


@lru_cache(maxsize=1)
def load() -> Model:
    """Return the weights that come with the code."""
    from safetensors.numpy import load_file

    found = load_file(WEIGHTS)
    linear = {name: found[name].astype(np.float32) for name in Model._fields if name in found}
    trees, articles = (splits(Trees(**{field: found[f"{name}.{field}"] for field in Trees._fields})) for name in ("trees", "articles"))
    return Model(**linear, trees=trees, articles=articles)


@njit(cache=True)
def page_words(page: Scan) -> NDArray[np.int64]:
    """Return buckets of the words about the page, sorted: types and address from its head, classes of its body."""
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
def page_types(page: Scan, weights: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return Logits of the page's type [page types]."""
    total = np.zeros(len(bias), np.float32)
    for word in page_words(page):
        total += weights[word]
    return bias + total


@njit(cache=True)
def block_rows(
    page: Scan, class_weights: NDArray[np.float32], text_weights: NDArray[np.float32], types: NDArray[np.float32], rows: NDArray[np.float32]
) -> None:
    """Fill in what the trees see; `rows` [blocks, SEEN] are zeros."""
    own, path = np.empty(len(page.elements), np.float32), np.empty(len(page.elements), np.float32)
    text = np.zeros(len(page.blocks), np.float32)
    element_scores(page, class_weights, own, path)
    text_scores(page, text_weights, text)
    block_features(page, own, path, text, rows)
    for b in range(len(rows)):
        rows[b, FEATURES:] = types


@njit(cache=True)
def seen(
    pages: Pages,
    class_weights: NDArray[np.float32],
    text_weights: NDArray[np.float32],
    type_weights: NDArray[np.float32],
    type_bias: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the features of all blocks [blocks, SEEN], and logits of the pages' types [pages, page types]."""
    n, starts = len(pages.starts) - 1, pages.starts[:, L.BLOCK]
    rows, types = np.zeros((starts[n], SEEN), np.float32), np.zeros((n, len(type_bias)), np.float32)
    for p in range(n):
        if starts[p + 1] > starts[p]:
            page = page_of(pages, p)
            types[p] = page_types(page, type_weights, type_bias)
            block_rows(page, class_weights, text_weights, types[p], rows[starts[p] : starts[p + 1]])
    return rows, types


def article_chance(types: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return chance of pages to be articles [...], from logits of their types [..., page types]."""
    odds = np.exp(types - types.max(-1, keepdims=True))
    found: NDArray[np.float32] = odds[..., ARTICLE] / odds.sum(-1)
    return found


@njit(cache=True)
def _scores(pages: Pages, rows: NDArray[np.float32], says: NDArray[np.float32], trees: Splits, articles: Splits) -> NDArray[np.float32]:
    """Return Logits of the blocks to be content [blocks]; `says` [pages]: what the trees for articles have of a say."""
    starts = pages.starts[:, L.BLOCK]
    scores = logits(trees, rows)
    for p in range(len(says)):
        a, z = starts[p], starts[p + 1]
        if z > a:
            page = page_of(pages, p)
            if says[p] > 0:
                more = logits(articles, np.concatenate((rows[a:z], article_features(page)), axis=1))
                for b in range(a, z):
                    scores[b] += says[p] * (more[b - a] - scores[b])
            scores[a:z] = agreed(page, scores[a:z])
    return scores  # type: ignore[no-any-return]


def chances(pages: Pages, rows: NDArray[np.float32], types: NDArray[np.float32], trees: Splits, articles: Splits) -> NDArray[np.float32]:
    """Return chance of each block to be content [blocks], from what the trees see of it and the pages' types."""
    scores = _scores(pages, rows, article_chance(types) - LIKELY, trees, articles)
    found: NDArray[np.float32] = 1 / (1 + np.exp(-scores))
    return found


def judge(pages: Pages, model: Model) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return chance of each block to be content [blocks], and logits of the pages' types [pages, page types]."""
    rows, types = seen(pages, model.class_weights, model.text_weights, model.type_weights, model.type_bias)
    return chances(pages, rows, types, model.trees, model.articles), types


@njit(cache=True)
def chosen(page: Scan, p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask of the blocks to keep, given each block's chance to be content; code, lists and tables stay whole, copies go."""
    cut, _ = best_cut(p, page.blocks[:, L.WORDS] + 0.01)
    return once(page, made_whole(page, p >= cut))  # type: ignore[no-any-return]


def content(pages: Pages, model: Model, headline: bool = False) -> NDArray[np.bool_]:
    """Return a mask of the pages' content [blocks]; `headline`: with the main headings."""
    p, types = judge(pages, model)
    return kept(pages, p, types, headline)  # type: ignore[no-any-return]


@njit(cache=True)
def kept(pages: Pages, p: NDArray[np.float32], types: NDArray[np.float32], headline: bool) -> NDArray[np.bool_]:
    """Return a mask of the blocks to keep, given each block's chance to be content and logits of the pages' types."""
    starts = pages.starts[:, L.BLOCK]
    keep = np.zeros(len(p), np.bool_)
    for number in range(len(types)):
        a, z = starts[number], starts[number + 1]
        if z > a:
            page = page_of(pages, number)
            own = below_the_article(page, chosen(page, p[a:z]), p[a:z], types[number])
            keep[a:z] = without_unseen(page, with_headline(page, own) if headline else own)
    return keep


@njit(cache=True)
def below_the_article(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32], types: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] without cards and teasers of other articles on an article, and without comments on a certain one.

    `p` [blocks]: the chance of each to be content; `types` [page types]: logits of the page's type.
    """
    if types.argmax() != ARTICLE:
        return keep
    left = without_teasers(page, without_units(page, keep, p), p)
    return without_comments(page, left) if types.max() >= CERTAIN else left  # type: ignore[no-any-return]
