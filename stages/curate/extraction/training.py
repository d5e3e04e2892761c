"""Trains the extractor's model: `python -m puna.stages.curate.extraction.training PAGES TRUTH OUT`.

PAGES holds `ID.html`; TRUTH is JSON lines (zstd or not) with file_id, url, `_internal.page_type.primary` and
`ground_truth.main_content`, as the development part of WCXB has. OUT is the weights file. Needs `lightgbm`.

Pages are split by domain: what a model feeds to the next is always made by models that did not see the page, and the
printed F1 is of such pages. The weights written are of models that saw all.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numba import njit
from numpy.typing import NDArray

from puna.stages.curate.extraction import context
from puna.stages.curate.extraction.decode import decode
from puna.stages.curate.extraction.features import BUCKETS
from puna.stages.curate.extraction.labels import HALF, WORD, label
from puna.stages.curate.extraction.model import CONTEXT, FEATURES, PAGE_TYPES, TYPE_BUCKETS, block_rows, page_words
from puna.stages.curate.extraction.scan import ELEMENT, HASHES, PARENT, START, STOP, TAG, TOKENS, WORDS, Scan, scan
from puna.stages.curate.extraction.text import text_of
from puna.stages.curate.extraction.trees import Trees, logits
from puna.storage import PunaError

FOLDS = 4
ROWS_PER_PAGE = 200  # blocks of a page that training sees; the others' weight goes to these
SHARED: dict[str, Any] = {
    "objective": "binary", "min_data_in_leaf": 50, "bagging_fraction": 0.7, "bagging_freq": 1, "max_bin": 63, "lambda_l2": 5, "verbose": -1,
    "num_threads": 1, "seed": 1, "deterministic": True, "force_row_wise": True,
}  # fmt: skip
FIRST = SHARED | {"num_leaves": 31, "learning_rate": 0.1, "feature_fraction": 0.25, "rounds": 180}
SECOND = SHARED | {"num_leaves": 15, "learning_rate": 0.1, "feature_fraction": 0.3, "rounds": 120}


class Page(NamedTuple):
    """A labelled page: `shares` [blocks] of words that are content, `lengths` [blocks] in words."""

    scan: Scan
    truth: str
    kind: int
    fold: int
    shares: NDArray[np.float32]
    lengths: NDArray[np.int64]


# --- pages -----------------------------------------------------------------------------------------------


def read(folder: Path, truth: Path) -> list[Page]:
    """The labelled pages that have blocks."""
    from resiliparse.parse.html import HTMLTree

    pages = []
    for row in _rows(truth):
        file = folder / f"{row.get('file_id', '')}.html"
        if "file_id" not in row or not file.is_file():
            continue
        page = scan(HTMLTree.parse(decode(file.read_bytes(), None, html=True)).document.html.encode("utf-8", "replace"))
        if not len(page.blocks):
            continue
        text = page.text.tobytes()
        wanted = row["ground_truth"].get("main_content") or ""
        shares, lengths = label([text[b[START] : b[STOP]].decode("utf-8", "replace") for b in page.blocks], wanted)
        host = urlsplit(row.get("url") or "").hostname or row["file_id"]
        domain = ".".join(host.split(".")[-2:])
        fold = hashlib.sha256(domain.encode()).digest()[0] % FOLDS
        pages.append(Page(page, wanted, PAGE_TYPES.index(row["_internal"]["page_type"]["primary"]), fold, shares, lengths))
    if len({page.fold for page in pages}) < FOLDS:
        raise PunaError(f"{truth}: too few labelled pages with a file in {folder} ({len(pages)})")
    return pages


def _rows(truth: Path) -> list[dict[str, Any]]:
    data = truth.read_bytes()
    if truth.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    return [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]


def word_f1(text: str, truth: str) -> float:
    """F1 of bags of words, letters in either case; 1 where both are empty."""
    found, wanted = (Counter(re.findall(r"\w+", t.lower())) for t in (text, truth))
    if not found or not wanted:
        return float(not found and not wanted)
    return 2 * sum((found & wanted).values()) / (found.total() + wanted.total())


# --- linear models ---------------------------------------------------------------------------------------


class Bags(NamedTuple):
    """Rows of bucket numbers, one after the other."""

    starts: NDArray[np.int64]
    buckets: NDArray[np.int64]


def bags(rows: list[NDArray[np.int64]]) -> Bags:
    """Rows as one array."""
    return Bags(np.append(0, np.cumsum([len(row) for row in rows])), np.concatenate(rows))


def _bucket(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    return ((words ^ (words >> np.uint64(29))) & np.uint64(BUCKETS - 1)).astype(np.int64)


def class_bags(page: Scan) -> list[NDArray[np.int64]]:
    """Buckets of the tags and class words of each block's elements, up to the root."""
    elements, tokens = page.elements, _bucket(page.tokens)
    stops = np.append(elements[1:, TOKENS], len(tokens))
    paths: dict[int, NDArray[np.int64]] = {-1: np.zeros(0, np.int64)}
    for e in range(len(elements)):
        tag = (int(elements[e, TAG]) * 2654435761 + 12345) & (BUCKETS - 1)
        own = np.append(tokens[elements[e, TOKENS] : stops[e]], tag)
        paths[e] = np.concatenate([paths[int(elements[e, PARENT])], own])
    return [paths[int(e)] for e in page.blocks[:, ELEMENT]]


def text_bags(page: Scan) -> list[NDArray[np.int64]]:
    """Buckets of each block's distinct words."""
    stops = page.blocks[:, HASHES]
    buckets = _bucket(page.hashes)
    return [np.unique(buckets[a:b]) for a, b in zip(np.append(0, stops[:-1]), stops, strict=True)]


@njit(cache=True)
def fit_logistic(data: Bags, chosen: NDArray[np.int64], y: NDArray[np.float32], w: NDArray[np.float32], size: int, epochs: int, l2: float) -> tuple[NDArray[np.float32], float]:  # fmt: skip
    """Weights [size] and bias of a logistic regression over the chosen bags, by AdaGrad (rate 0.05)."""
    weights, squares, bias = np.zeros(size, np.float32), np.full(size, np.float32(1e-3), np.float32), 0.0
    np.random.seed(0)
    for _ in range(epochs):
        for row in np.random.permutation(chosen):
            z = bias
            for k in range(data.starts[row], data.starts[row + 1]):
                z += weights[data.buckets[k]]
            slope = (1 / (1 + np.exp(-z)) - y[row]) * w[row]
            for k in range(data.starts[row], data.starts[row + 1]):
                bucket = data.buckets[k]
                step = slope + l2 * weights[bucket]
                squares[bucket] += step * step
                weights[bucket] -= 0.05 * step / np.sqrt(squares[bucket])
            bias -= 0.0025 * slope
    return weights, bias


class Linear(NamedTuple):
    """The linear models' weights, as in `Model`."""

    class_weights: NDArray[np.float32]
    text_weights: NDArray[np.float32]
    type_weights: NDArray[np.float32]
    type_bias: NDArray[np.float32]


class Corpus(NamedTuple):
    """All blocks of all pages: page, label, weight in training of each; bags of words of blocks and pages."""

    pages: list[Page]
    page: NDArray[np.int64]
    fold: NDArray[np.int64]
    label: NDArray[np.float32]
    weight: NDArray[np.float32]
    classes: Bags
    texts: Bags
    heads: Bags


def corpus(pages: list[Page]) -> Corpus:
    """The pages' blocks; every page weighs the same, its blocks by a root of their words."""
    counts = [len(page.shares) for page in pages]
    number = np.repeat(np.arange(len(pages)), counts)
    fold = np.repeat([page.fold for page in pages], counts)
    words = np.concatenate([page.scan.blocks[:, WORDS] for page in pages]) + 1.0
    weight = words**0.6
    weight /= np.bincount(number, weight)[number]
    share = np.minimum(1, ROWS_PER_PAGE / np.bincount(number))[number]
    weight = np.where(np.random.default_rng(0).random(len(number)) < share, weight / share, 0)
    weight *= np.count_nonzero(weight) / weight.sum()
    return Corpus(
        pages,
        number,
        fold,
        (np.concatenate([page.shares for page in pages]) > HALF).astype(np.float32),
        weight.astype(np.float32),
        bags([row for page in pages for row in class_bags(page.scan)]),
        bags([row for page in pages for row in text_bags(page.scan)]),
        bags([page_words(page.scan) for page in pages]),
    )


def fit_linear(data: Corpus, without: int | None) -> Linear:
    """The linear models of all pages, or of those outside a fold."""
    rows = np.flatnonzero((data.weight > 0) & (data.fold != (-1 if without is None else without)))
    heads = np.array([n for n, page in enumerate(data.pages) if page.fold != without])
    weight = np.minimum(data.weight, 10)
    classes, _ = fit_logistic(data.classes, rows, data.label, weight, BUCKETS, 4, 1e-3)
    texts, _ = fit_logistic(data.texts, rows, data.label, weight, BUCKETS, 4, 1e-3)
    kinds = np.array([page.kind for page in data.pages])
    ones = np.ones(len(kinds), np.float32)
    types = [fit_logistic(data.heads, heads, (kinds == k).astype(np.float32), ones, TYPE_BUCKETS, 10, 1e-2) for k in range(len(PAGE_TYPES))]
    return Linear(classes, texts, np.stack([w for w, _ in types], axis=1), np.array([b for _, b in types], np.float32))


def rows_of(page: Page, linear: Linear) -> NDArray[np.float32]:
    """What the first trees see of a page."""
    types = linear.type_bias + linear.type_weights[page_words(page.scan)].sum(0)
    return block_rows(page.scan, linear.class_weights, linear.text_weights, types)


# --- trees -----------------------------------------------------------------------------------------------


def fit_trees(rows: NDArray[np.float32], data: Corpus, without: int | None, options: dict[str, Any]) -> Trees:
    """Boosted trees of all pages, or of those outside a fold."""
    import lightgbm

    options = dict(options)
    rounds = options.pop("rounds")
    chosen = (data.weight > 0) & (data.fold != (-1 if without is None else without))
    made = lightgbm.train(options, lightgbm.Dataset(rows[chosen], data.label[chosen], weight=data.weight[chosen]), rounds)
    return as_arrays([tree["tree_structure"] for tree in made.dump_model()["tree_info"]])


def as_arrays(structures: list[dict[str, Any]]) -> Trees:
    """LightGBM's trees as arrays."""
    roots: list[int] = []
    nodes: list[tuple[int, float]] = []
    children: list[list[int]] = []
    leaves: list[float] = []

    def add(node: dict[str, Any]) -> int:
        if "leaf_value" in node:
            leaves.append(node["leaf_value"])
            return ~(len(leaves) - 1)
        number = len(nodes)
        nodes.append((node["split_feature"], node["threshold"]))
        children.append([0, 0])
        children[number] = [add(node["left_child"]), add(node["right_child"])]
        return number

    roots = [add(structure) for structure in structures]
    sides = np.array(children, np.int32).reshape(-1, 2)
    return Trees(
        np.array(roots, np.int32),
        np.array([feature for feature, _ in nodes], np.int16),
        np.array([threshold for _, threshold in nodes], np.float32),
        sides[:, 0].copy(),
        sides[:, 1].copy(),
        np.array(leaves, np.float32),
    )


def train(pages: list[Page]) -> dict[str, NDArray[Any]]:
    """The weights file's arrays. Prints the F1 of pages that the models did not see."""
    data = corpus(pages)
    edges = np.append(0, np.cumsum([len(page.shares) for page in pages]))
    rows = np.empty((len(data.page), FEATURES + len(PAGE_TYPES)), np.float32)
    print(f"{len(pages)} pages, {len(rows)} blocks", flush=True)
    for fold in range(FOLDS):
        linear = fit_linear(data, fold)
        for n, page in enumerate(pages):
            if page.fold == fold:
                rows[edges[n] : edges[n + 1]] = rows_of(page, linear)
    z = _unseen(rows, data, FIRST)
    seen = np.concatenate([context.context_features(page.scan, z[a:b], CONTEXT) for page, a, b in zip(pages, edges, edges[1:], strict=False)])
    both = np.concatenate([seen, rows], axis=1)
    for name, values in (("first trees", z), ("both", _unseen(both, data, SECOND))):
        print(name, _report(pages, 1 / (1 + np.exp(-values)), edges), flush=True)
    found: dict[str, NDArray[Any]] = {name: values.astype(np.float16) for name, values in fit_linear(data, None)._asdict().items()}
    for name, trees in (("first", fit_trees(rows, data, None, FIRST)), ("second", fit_trees(both, data, None, SECOND))):
        found |= {f"{name}.{field}": values for field, values in trees._asdict().items()}
    return found


def _unseen(rows: NDArray[np.float32], data: Corpus, options: dict[str, Any]) -> NDArray[np.float32]:
    """Logits of every block by trees that did not see its page."""
    z = np.empty(len(rows), np.float32)
    for fold in range(FOLDS):
        z[data.fold == fold] = logits(fit_trees(rows, data, fold, options), rows[data.fold == fold])
        print(f"fold {fold}", flush=True)
    return z


def _report(pages: list[Page], p: NDArray[np.float32], edges: NDArray[np.int64]) -> dict[str, float]:
    """Mean F1 of words, over all pages and by type."""
    scores: dict[str, list[float]] = {"all": []}
    for page, a, b in zip(pages, edges, edges[1:], strict=False):
        order, count, _ = context.best_cut(p[a:b], page.scan.blocks[:, WORDS] + 0.01)
        keep = np.zeros(b - a, np.bool_)
        keep[order[:count]] = True
        score = word_f1(text_of(page.scan, keep), page.truth)
        for name in ("all", PAGE_TYPES[page.kind]):
            scores.setdefault(name, []).append(score)
    return {name: round(float(np.mean(values)), 4) for name, values in scores.items()}


def main(arguments: list[str]) -> None:
    """Train and write the weights."""
    from safetensors.numpy import save_file

    if len(arguments) != 3:
        raise PunaError("usage: python -m puna.stages.curate.extraction.training PAGES TRUTH OUT")
    folder, truth, out = map(Path, arguments)
    save_file(train(read(folder, truth)), out)


if __name__ == "__main__":
    main(sys.argv[1:])
