"""TF-IDF vectors of texts, projected at random to few dimensions (feature hashing; Johnson-Lindenstrauss with signs).

Each word is a bucket of a hash table; its random signs come from its bucket's hash, so no matrix is stored and any worker
makes the same vectors. The cosine of two vectors estimates that of the TF-IDF vectors with an error of about
(1 - cosine^2) / sqrt(dimensions).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.hashing import I64, U64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def document_frequency(hashes_W: U64, words_D1: I64, buckets: int) -> I64:
    """Return the number of documents in which each bucket occurs, int64[buckets]; `buckets` is a power of two."""
    return _document_frequency(hashes_W, words_D1, buckets)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _document_frequency(hashes_W: Any, words_D1: Any, buckets: Any) -> Any:
    out, seen = np.zeros(buckets, dtype=np.int64), np.full(buckets, -1, dtype=np.int64)
    mask = np.uint64(buckets - 1)
    for d in range(len(words_D1) - 1):
        for w in range(words_D1[d], words_D1[d + 1]):
            b = np.int64(hashes_W[w] & mask)
            if seen[b] != d:
                seen[b] = d
                out[b] += 1
    return out


def project(hashes_W: U64, words_D1: I64, weights: NDArray[np.float64], dimensions: int) -> NDArray[np.float32]:
    """Return unit vectors [D, dimensions] of the documents' words; `weights` float64[buckets], the inverse document frequencies.

    A word's weight in a document is (1 + log of its count) times its bucket's. A document without weight has a zero vector.
    `dimensions` is a multiple of 64.
    """
    return _project(hashes_W, words_D1, weights, dimensions)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _project(hashes_W: Any, words_D1: Any, weights: Any, dimensions: Any) -> Any:
    documents = len(words_D1) - 1
    out = np.zeros((documents, dimensions), dtype=np.float32)
    count = np.zeros(len(weights), dtype=np.int64)
    mask = np.uint64(len(weights) - 1)
    vector = np.empty(dimensions)
    for d in range(documents):
        vector[:] = 0.0
        for w in range(words_D1[d], words_D1[d + 1]):
            count[np.int64(hashes_W[w] & mask)] += 1
        for w in range(words_D1[d], words_D1[d + 1]):
            b = np.int64(hashes_W[w] & mask)
            if count[b] == 0:
                continue  # added before
            weight = (1.0 + np.log(count[b])) * weights[b]
            count[b] = 0
            state = np.uint64(b)
            for k in range(0, dimensions, 64):
                state += GOLDEN
                bits = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                bits = bits ^ (bits >> np.uint64(31))
                for j in range(64):
                    vector[k + j] += weight * (1.0 - 2.0 * np.float64((bits >> np.uint64(j)) & np.uint64(1)))
        norm = np.sqrt((vector * vector).sum())
        if norm > 0:
            out[d] = (vector / norm).astype(np.float32)
    return out
