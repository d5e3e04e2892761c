"""The extractor's model: which blocks of a page are its content.

Two linear models score the words of classes and of texts, one guesses the type of the page from its head, and two sets
of boosted trees judge each block: the first by itself, its containers and its neighbours, the second also by what the
first thought of those. The page keeps the blocks that give the highest expected F1 of words.

The weights are made by `training.py` from labelled pages; NOTICE beside them tells of the labels.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.stages.curate.extraction import context, features
from puna.stages.curate.extraction.scan import TAG, TOKENS, WORDS, Scan
from puna.stages.curate.extraction.tags import NUMBER
from puna.stages.curate.extraction.trees import Trees, logits

WEIGHTS = Path(__file__).parent / "extractor.safetensors"
PAGE_TYPES = ("article", "forum", "product", "collection", "listing", "documentation", "service")
TYPE_BUCKETS = 1 << 12
BODY_SALT = np.uint64(0x9E3779B97F4A7C15)
FEATURES, CONTEXT = len(features.names()), len(context.names())


class Model(NamedTuple):
    """Weights of the linear models, by bucket of the hashed word, and the trees."""

    class_weights: NDArray[np.float32]  # [features.BUCKETS]
    text_weights: NDArray[np.float32]  # [features.BUCKETS]
    type_weights: NDArray[np.float32]  # [TYPE_BUCKETS, page types]
    type_bias: NDArray[np.float32]  # [page types]
    first: Trees
    second: Trees


@lru_cache(maxsize=1)
def load() -> Model:
    """The weights that come with the code."""
    from safetensors.numpy import load_file

    found = load_file(WEIGHTS)
    trees = [Trees(*(found[f"{name}.{field}"] for field in Trees._fields)) for name in ("first", "second")]
    return Model(*(found[name].astype(np.float32) for name in Model._fields[:4]), *trees)


def page_words(page: Scan) -> NDArray[np.int64]:
    """Buckets of the words about the page: types and address from its head, classes of its body."""
    found = [page.page]
    for tag in ("html", "body"):
        rows = np.flatnonzero(page.elements[:, TAG] == NUMBER[tag])[:1]
        for row in rows:
            stop = page.elements[row + 1, TOKENS] if row + 1 < len(page.elements) else len(page.tokens)
            found.append(page.tokens[page.elements[row, TOKENS] : stop] ^ BODY_SALT)
    words = np.concatenate(found)
    return np.unique((words ^ (words >> np.uint64(29))) & np.uint64(TYPE_BUCKETS - 1)).astype(np.int64)


def block_rows(page: Scan, class_weights: NDArray[np.float32], text_weights: NDArray[np.float32], types: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the first trees see [blocks, FEATURES + page types]."""
    own, path = np.zeros((2, len(page.elements)), np.float32)
    text = np.zeros(len(page.blocks), np.float32)
    features.element_scores(page, class_weights, own, path)
    features.text_scores(page, text_weights, text)
    rows = np.empty((len(page.blocks), FEATURES + len(PAGE_TYPES)), np.float32)
    rows[:, :FEATURES] = features.block_features(page, own, path, text, FEATURES)
    rows[:, FEATURES:] = types
    return rows


def judge(page: Scan, model: Model) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Chance of each block to be content [blocks], and logits of the page's type [page types]."""
    types = model.type_bias + model.type_weights[page_words(page)].sum(0)
    rows = block_rows(page, model.class_weights, model.text_weights, types)
    seen = context.context_features(page, logits(model.first, rows), CONTEXT)
    z = logits(model.second, np.concatenate([seen, rows], axis=1))
    return 1 / (1 + np.exp(-z)), types


def content(page: Scan, model: Model) -> NDArray[np.bool_]:
    """Which blocks to keep [blocks]."""
    keep = np.zeros(len(page.blocks), np.bool_)
    if len(keep):
        p, _ = judge(page, model)
        order, count, _ = context.best_cut(p, page.blocks[:, WORDS] + 0.01)
        keep[order[:count]] = True
    return keep
