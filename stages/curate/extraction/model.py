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

from puna.kernels.compiled import njit
from puna.stages.curate.extraction import features
from puna.stages.curate.extraction import layout as L
from puna.stages.curate.extraction.alike import agreed, once
from puna.stages.curate.extraction.article import article_features
from puna.stages.curate.extraction.comments import without_comments
from puna.stages.curate.extraction.cut import best_cut
from puna.stages.curate.extraction.layout import Scan
from puna.stages.curate.extraction.tags import NUMBER
from puna.stages.curate.extraction.teasers import without_teasers
from puna.stages.curate.extraction.trees import Splits, Trees, logits, splits
from puna.stages.curate.extraction.units import without_units
from puna.stages.curate.extraction.whole import made_whole

WEIGHTS = Path(__file__).parent / "extractor.safetensors"
PAGE_TYPES = ("article", "forum", "product", "collection", "listing", "documentation", "service")
TYPE_BUCKETS = 1 << 12
CERTAIN = np.log(2)  # twice as probable as not
LIKELY = np.float32(0.5)  # the trees for articles have as much of a say as the chance to be one is above this
BODY_SALT = np.uint64(0x9E3779B97F4A7C15)
FEATURES = len(features.names())
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
    """The weights that come with the code."""
    from safetensors.numpy import load_file

    found = load_file(WEIGHTS)
    linear = {name: found[name].astype(np.float32) for name in Model._fields if name in found}
    trees, articles = (splits(Trees(**{field: found[f"{name}.{field}"] for field in Trees._fields})) for name in ("trees", "articles"))
    return Model(**linear, trees=trees, articles=articles)


@njit(cache=True)
def page_words(page: Scan) -> NDArray[np.int64]:
    """Buckets of the words about the page, sorted: types and address from its head, classes of its body."""
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


def block_rows(
    page: Scan, class_weights: NDArray[np.float32], text_weights: NDArray[np.float32], types: NDArray[np.float32]
) -> NDArray[np.float32]:
    """What the trees see [blocks, FEATURES + page types]."""
    own, path = np.zeros((2, len(page.elements)), np.float32)
    text = np.zeros(len(page.blocks), np.float32)
    features.element_scores(page, class_weights, own, path)
    features.text_scores(page, text_weights, text)
    rows = np.empty((len(page.blocks), FEATURES + len(PAGE_TYPES)), np.float32)
    rows[:, :FEATURES] = features.block_features(page, own, path, text, FEATURES)
    rows[:, FEATURES:] = types
    return rows


def article_chance(types: NDArray[np.float32]) -> NDArray[np.float32]:
    """Chance of pages to be articles [...], from logits of their types [..., page types]."""
    odds = np.exp(types - types.max(-1, keepdims=True))
    found: NDArray[np.float32] = odds[..., PAGE_TYPES.index("article")] / odds.sum(-1)
    return found


def chances(page: Scan, rows: NDArray[np.float32], types: NDArray[np.float32], trees: Splits, articles: Splits) -> NDArray[np.float32]:
    """Chance of each block to be content [blocks], from what the trees see of it (`block_rows`) and the page's type."""
    scores = logits(trees, rows)
    say = article_chance(types) - LIKELY
    if say > 0:
        scores += say * (logits(articles, np.concatenate([rows, article_features(page)], axis=1)) - scores)
    found: NDArray[np.float32] = 1 / (1 + np.exp(-agreed(page, scores)))
    return found


def judge(page: Scan, model: Model) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Chance of each block to be content [blocks], and logits of the page's type [page types]."""
    types = model.type_bias + model.type_weights[page_words(page)].sum(0)
    rows = block_rows(page, model.class_weights, model.text_weights, types)
    return chances(page, rows, types, model.trees, model.articles), types


def chosen(page: Scan, p: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which blocks to keep [blocks], given each block's chance to be content; code, lists and tables stay whole, copies go."""
    cut, _ = best_cut(p, page.blocks[:, L.WORDS] + 0.01)
    keep: NDArray[np.bool_] = once(page, made_whole(page, p >= cut))
    return keep


def content(page: Scan, model: Model) -> NDArray[np.bool_]:
    """Which blocks are the page's content [blocks]."""
    p, types = judge(page, model)
    return below_the_article(page, chosen(page, p), p, types)


def below_the_article(page: Scan, keep: NDArray[np.bool_], p: NDArray[np.float32], types: NDArray[np.float32]) -> NDArray[np.bool_]:
    """`keep` [blocks] without cards and teasers of other articles on an article, and without comments where it is one beyond doubt.

    `p` [blocks]: the chance of each to be content; `types` [page types]: logits of the page's type.
    """
    if PAGE_TYPES[int(types.argmax())] != "article":
        return keep
    left: NDArray[np.bool_] = without_teasers(page, without_units(page, keep, p), p)
    return without_comments(page, left) if types.max() >= CERTAIN else left
