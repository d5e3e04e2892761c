"""Training of the extractor's model: `python -m tests.benchmarks.train_extraction PAGES TRUTH [PAGES TRUTH ...] OUT`.

PAGES holds `ID.html`; TRUTH is JSON lines (optionally zstd) with file_id, url, `_internal.page_type.primary` and
`ground_truth.main_content`, as in WCXB's development part; if the content is null, the snippets `ground_truth.with` and
`ground_truth.without` label the blocks that contain them. OUT is the weights file. Needs `lightgbm` and PyTorch.

Pages are split by domain: scores that one model passes to the next always come from models that did not see the page, and the printed F1 is
on such pages. The written weights are those of models trained on all pages.
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
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.clean import decode
from puna.models.extraction.features import BUCKETS
from puna.models.extraction.layout import Scan, alone
from puna.models.extraction.model import (
    COLUMNS,
    FEATURES,
    PAGE_TYPES,
    SEEN,
    TYPE_BUCKETS,
    Linear,
    chances,
    features_and_types,
    kept_blocks,
    page_words,
)
from puna.models.extraction.network import Network
from puna.models.extraction.scan import scan, serialize
from puna.models.extraction.trees import Trees, splits
from puna.models.extraction.write import text_of
from tests.benchmarks.extraction_labels import label
from tests.benchmarks.train_network import fit_network

FOLDS = 4
ROWS_PER_PAGE = 300  # maximum blocks per page in training; the weight of left-out blocks is added to these
FURTHER = 0.5  # weight of pages of the second and later sets, whose definitions of content differ
EXACT = ("network.mean", "network.scale")  # kept in fp32; the network's other numbers are rounded to fp16
SNIPPETS = 0.5  # weight of a page labelled by snippets, relative to a fully labelled page
ROUNDS = 250
OPTIONS: dict[str, Any] = {
    "objective": "cross_entropy", "num_leaves": 31, "learning_rate": 0.08, "feature_fraction": 0.25, "bagging_fraction": 0.7,
    "bagging_freq": 1, "min_data_in_leaf": 50, "lambda_l2": 5, "max_bin": 63, "verbose": -1, "num_threads": 1, "seed": 1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip


class Page(NamedTuple):
    """A labelled page. `shares` [blocks]: share of words that are content; `known`: which of them are known; `weight`: in training.
    `truth`: None if snippets are the labels."""

    file: str
    scan: Scan
    truth: str | None
    kind: int
    fold: int
    shares: NDArray[np.float32]
    known: NDArray[np.bool_]
    weight: float


def read(folder: Path, labels: Path, weight: float = 1) -> list[Page]:
    """Return the labelled pages that have blocks. `weight`: their weight in training."""
    from resiliparse.parse.html import HTMLTree

    pages = []
    for row in _rows(labels):
        file = folder / f"{row.get('file_id', '')}.html"
        if "file_id" not in row or not file.is_file():
            continue
        page = scan(serialize(HTMLTree.parse(decode(file.read_bytes(), None, html=True))))
        if not len(page.blocks):
            continue
        page = Scan._make(array.copy() for array in page._replace(html=page.html[:0]))  # copies need less memory than the buffers that they come from
        truth = row["ground_truth"]
        wanted = truth.get("main_content", "")
        if wanted is None:
            shares, known = snippet_labels(page, truth.get("with") or [], truth.get("without") or [])
        else:
            text = page.text.tobytes()
            shares, _ = label([text[b[L.START] : b[L.STOP]].decode("utf-8", "replace") for b in page.blocks], wanted)
            known = np.ones(len(shares), np.bool_)
        host = urlsplit(row.get("url") or "").hostname or row["file_id"]
        domain = ".".join(host.split(".")[-2:])
        fold = hashlib.sha256(domain.encode()).digest()[0] % FOLDS
        kind = PAGE_TYPES.index(row["_internal"]["page_type"]["primary"])
        own = weight * (SNIPPETS if wanted is None else 1)
        pages.append(Page(row["file_id"], page, wanted, kind, fold, shares, known, own))
    if len({page.fold for page in pages}) < FOLDS:
        raise SystemExit(f"{labels}: too few labelled pages with a file in {folder} ({len(pages)})")
    return pages


def snippet_labels(page: Scan, wanted: list[str], unwanted: list[str]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return shares of content [blocks] and which are known: 1 in the only block with a wanted snippet, 0 in all with an unwanted one."""
    text, starts = page.text.tobytes(), page.blocks[:, L.START]

    def holding(snippet: str) -> set[int]:
        result: set[int] = set()
        words = snippet.strip().encode()
        at = text.find(words) if words else -1
        while at >= 0:
            first, last = np.searchsorted(starts, [at, at + len(words) - 1], side="right") - 1
            if first == last:
                result.add(int(first))
            at = text.find(words, at + 1)
        return result

    zeros = set().union(*(holding(snippet) for snippet in unwanted))
    ones = {block for blocks in map(holding, wanted) if len(blocks) == 1 for block in blocks}
    shares, known = np.zeros(len(page.blocks), np.float32), np.zeros(len(page.blocks), np.bool_)
    shares[list(ones)] = 1
    known[list(ones ^ zeros)] = True
    return shares, known


def _rows(truth: Path) -> list[dict[str, Any]]:
    data = truth.read_bytes()
    if truth.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    return [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]


def page_digest(body: bytes) -> str:
    """Return 16 hex digits by which the weights identify the pages that they were trained on."""
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def word_f1(text: str, truth: str) -> float:
    """Return the F1 of bags of words, ignoring case; 1 if both are empty."""
    results, wanted = (Counter(re.findall(r"\w+", t.lower())) for t in (text, truth))
    if not results or not wanted:
        return float(not results and not wanted)
    return 2 * sum((results & wanted).values()) / (results.total() + wanted.total())


class Bags(NamedTuple):
    """Rows of bucket numbers, concatenated."""

    starts: NDArray[np.int64]
    buckets: NDArray[np.int32]


def bags(rows: list[NDArray[Any]]) -> Bags:
    """Return the rows concatenated."""
    return Bags(np.append(0, np.cumsum([len(row) for row in rows])), np.concatenate(rows).astype(np.int32))


def _bucket(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    return ((words ^ (words >> np.uint64(29))) & np.uint64(BUCKETS - 1)).astype(np.int64)


def class_bags(page: Scan) -> list[NDArray[np.int32]]:
    """Return, for each block, the buckets of the tags and class words of its elements up to the root."""
    elements, tokens = page.elements, _bucket(page.tokens)
    stops = np.append(elements[1:, L.TOKENS], len(tokens))
    paths: dict[int, NDArray[np.int32]] = {-1: np.zeros(0, np.int32)}
    for e in range(len(elements)):
        tag = (int(elements[e, L.TAG]) * 2654435761 + 12345) & (BUCKETS - 1)
        own = np.append(tokens[elements[e, L.TOKENS] : stops[e]], tag).astype(np.int32)
        paths[e] = np.concatenate([paths[int(elements[e, L.PARENT])], own])
    return [paths[int(e)] for e in page.blocks[:, L.ELEMENT]]


def text_bags(page: Scan) -> list[NDArray[np.int64]]:
    """Return, for each block, the buckets of its distinct words."""
    stops = page.blocks[:, L.HASHES]
    buckets = _bucket(page.hashes)
    return [np.unique(buckets[a:b]) for a, b in zip(np.append(0, stops[:-1]), stops, strict=True)]


@njit(cache=True)
def fit_logistic(
    data: Bags, chosen: NDArray[np.int64], y: NDArray[np.float32], w: NDArray[np.float32], size: int, epochs: int, l2: float
) -> tuple[NDArray[np.float32], float]:
    """Return the weights [size] and bias of a logistic regression over the chosen bags, trained with AdaGrad (rate 0.05)."""
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


class Corpus(NamedTuple):
    """All blocks of all pages: page, fold, label and training weight of each (0: label not known); bags of words of blocks and pages."""

    pages: list[Page]
    page: NDArray[np.int64]
    fold: NDArray[np.int64]
    label: NDArray[np.float32]
    weight: NDArray[np.float32]
    classes: Bags
    texts: Bags
    heads: Bags


def corpus(pages: list[Page]) -> Corpus:
    """Return the pages' blocks; a page's weight is divided over its known blocks in proportion to their words to the power 0.6."""
    counts = [len(page.shares) for page in pages]
    known = np.concatenate([page.known for page in pages])
    number = np.repeat(np.arange(len(pages)), counts)
    fold = np.repeat([page.fold for page in pages], counts)
    words = np.concatenate([page.scan.blocks[:, L.WORDS] for page in pages]) + 1.0
    weight = words**0.6 * known
    weight *= (np.array([page.weight for page in pages]) / np.maximum(np.bincount(number, weight), 1e-9))[number]
    share = np.minimum(1, ROWS_PER_PAGE / np.maximum(np.bincount(number, known), 1))[number]
    weight = np.where(np.random.default_rng(0).random(len(number)) < share, weight / share, 0)
    weight *= np.count_nonzero(weight) / weight.sum()
    return Corpus(
        pages,
        number,
        fold,
        np.concatenate([page.shares for page in pages]),
        weight.astype(np.float32),
        bags([row for page in pages for row in class_bags(page.scan)]),
        bags([row for page in pages for row in text_bags(page.scan)]),
        bags([page_words(page.scan) for page in pages]),
    )


def fit_linear(data: Corpus, *without: int) -> Linear:
    """Return the linear models trained on the pages outside some folds."""
    rows = np.flatnonzero((data.weight > 0) & ~np.isin(data.fold, without))
    heads = np.array([n for n, page in enumerate(data.pages) if page.fold not in without and page.truth is not None])
    weight = np.minimum(data.weight, 10)
    classes, _ = fit_logistic(data.classes, rows, data.label, weight, BUCKETS, 4, 1e-3)
    texts, _ = fit_logistic(data.texts, rows, data.label, weight, BUCKETS, 4, 1e-3)
    kinds = np.array([page.kind for page in data.pages])
    ones = np.ones(len(kinds), np.float32)
    types = [fit_logistic(data.heads, heads, (kinds == k).astype(np.float32), ones, TYPE_BUCKETS, 10, 1e-2) for k in range(len(PAGE_TYPES))]
    return Linear(classes, texts, np.stack([w for w, _ in types], axis=1), np.array([b for _, b in types], np.float32))


def fit_models(rows: NDArray[np.float32], data: Corpus, without: int | None) -> tuple[Trees, Network]:
    """Return the boosted trees and the network trained on all pages, or on the pages outside a fold."""
    inside = data.fold != (-1 if without is None else without)
    return _fitted(rows[:, :SEEN], data.label, data.weight * inside, OPTIONS, ROUNDS), fit_network(rows, data, without)


def _fitted(
    rows: NDArray[np.float32], label: NDArray[np.float32], weight: NDArray[np.float32], options: dict[str, Any], rounds: int
) -> Trees:
    import lightgbm

    used = weight > 0
    booster = lightgbm.train(options, lightgbm.Dataset(rows[used], label[used], weight=weight[used]), rounds)
    return as_arrays([tree["tree_structure"] for tree in booster.dump_model()["tree_info"]])


def as_arrays(structures: list[dict[str, Any]]) -> Trees:
    """Return LightGBM's trees as arrays."""
    nodes: list[tuple[int, float, int, int]] = []
    leaves: list[float] = []

    def add(node: dict[str, Any]) -> int:
        if "leaf_value" in node:
            leaves.append(node["leaf_value"])
            return ~(len(leaves) - 1)
        number = len(nodes)
        nodes.append((node["split_feature"], node["threshold"], 0, 0))
        nodes[number] = (*nodes[number][:2], add(node["left_child"]), add(node["right_child"]))
        return number

    roots = np.array([add(structure) for structure in structures], np.int32)
    columns = np.array(nodes, [("feature", np.int16), ("threshold", np.float32), ("left", np.int32), ("right", np.int32)])
    feature, threshold, left, right = (columns[name].copy() for name in ("feature", "threshold", "left", "right"))
    return Trees(roots, feature, threshold, left, right, np.array(leaves, np.float32))


def all_rows(data: Corpus, *without: int) -> NDArray[np.float32]:
    """Return the features of every block, each page scored by linear models trained neither on it nor on the folds `without`."""
    rows = np.empty((len(data.page), COLUMNS), np.float32)
    for fold in range(FOLDS):
        linear = fit_linear(data, fold, *without)
        for number, page in enumerate(data.pages):
            if page.fold == fold:
                rows[data.page == number] = features_and_types(alone(page.scan), linear)[0]
    return rows


def unseen_texts(data: Corpus, fold: int) -> dict[str, str]:
    """Return the texts of a fold's pages, by file. Neither the trees nor the linear models whose scores train them saw the fold."""
    rows = all_rows(data, fold)
    trees, network = fit_models(rows, data, fold)
    nodes = splits(trees)
    texts = {}
    for number, page in enumerate(data.pages):
        if page.fold == fold:
            pages, own = alone(page.scan), rows[data.page == number]
            types = np.ascontiguousarray(own[:1, FEATURES:SEEN])
            keep = kept_blocks(pages, chances(pages, own, nodes, network), types, False)
            texts[page.file] = text_of(page.scan, keep)
    return texts


def unseen_f1(data: Corpus) -> dict[str, float]:
    """Return the mean F1 of words over all pages and by type, each page by models that did not see its domain."""
    texts = {file: text for fold in range(FOLDS) for file, text in unseen_texts(data, fold).items()}
    scores: dict[str, list[float]] = {"all": []}
    for page in data.pages:
        for name in ("all", PAGE_TYPES[page.kind]) if page.truth is not None else ():
            scores.setdefault(name, []).append(word_f1(texts[page.file], page.truth or ""))
    return {name: round(float(np.mean(values)), 4) for name, values in scores.items()}


def weights(data: Corpus, rows: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Return the arrays of the weights file, from models trained on all pages."""
    result: dict[str, NDArray[Any]] = {name: values.astype(np.float16) for name, values in fit_linear(data)._asdict().items()}
    trees, network = fit_models(rows, data, None)
    for prefix, arrays in (("trees", trees), ("network", network)):
        result |= {f"{prefix}.{field}": values for field, values in arrays._asdict().items()}
    result |= {name: values.astype(np.float16) for name, values in result.items() if name.startswith("network.") and name not in EXACT}
    return result


def main(arguments: list[str]) -> None:
    """Train, write the weights, print the F1 of unseen pages."""
    from safetensors.numpy import save_file

    if len(arguments) < 3 or len(arguments) % 2 == 0:
        raise SystemExit("usage: python -m tests.benchmarks.train_extraction PAGES TRUTH [PAGES TRUTH ...] OUT")
    *sets, out = map(Path, arguments)
    weights_of = [1.0, *[FURTHER] * (len(sets) // 2 - 1)]
    read_sets = [(folder, read(folder, labels, weight)) for folder, labels, weight in zip(sets[::2], sets[1::2], weights_of, strict=True)]
    data = corpus([page for _, pages in read_sets for page in pages])
    rows = all_rows(data)
    digests = " ".join(page_digest((folder / f"{page.file}.html").read_bytes()) for folder, pages in read_sets for page in pages)
    save_file(weights(data, rows), out, metadata={"trained_on": digests})
    print(unseen_f1(data))


if __name__ == "__main__":
    main(sys.argv[1:])
