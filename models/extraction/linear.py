"""Logistic regression over bags of hashed words: the training of the extractor's linear models."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.features import BUCKETS
from puna.models.extraction.layout import Scan


class Bags(NamedTuple):
    """Rows of bucket numbers, one after the other."""

    starts: NDArray[np.int64]
    buckets: NDArray[np.int32]


def bags(rows: list[NDArray[Any]]) -> Bags:
    """Return rows as one array."""
    return Bags(np.append(0, np.cumsum([len(row) for row in rows])), np.concatenate(rows).astype(np.int32))


def _bucket(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    return ((words ^ (words >> np.uint64(29))) & np.uint64(BUCKETS - 1)).astype(np.int64)


def class_bags(page: Scan) -> list[NDArray[np.int32]]:
    """Return buckets of the tags and class words of each block's elements, up to the root."""
    elements, tokens = page.elements, _bucket(page.tokens)
    stops = np.append(elements[1:, L.TOKENS], len(tokens))
    paths: dict[int, NDArray[np.int32]] = {-1: np.zeros(0, np.int32)}
    for e in range(len(elements)):
        tag = (int(elements[e, L.TAG]) * 2654435761 + 12345) & (BUCKETS - 1)
        own = np.append(tokens[elements[e, L.TOKENS] : stops[e]], tag).astype(np.int32)
        paths[e] = np.concatenate([paths[int(elements[e, L.PARENT])], own])
    return [paths[int(e)] for e in page.blocks[:, L.ELEMENT]]


def text_bags(page: Scan) -> list[NDArray[np.int64]]:
    """Return buckets of each block's distinct words."""
    stops = page.blocks[:, L.HASHES]
    buckets = _bucket(page.hashes)
    return [np.unique(buckets[a:b]) for a, b in zip(np.append(0, stops[:-1]), stops, strict=True)]


@njit(cache=True)
def fit_logistic(
    data: Bags, chosen: NDArray[np.int64], y: NDArray[np.float32], w: NDArray[np.float32], size: int, epochs: int, l2: float
) -> tuple[NDArray[np.float32], float]:
    """Return weights [size] and bias of a logistic regression over the chosen bags, by AdaGrad (rate 0.05)."""
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
