"""XXH64 (seed 0) of slices of a byte array, for compiled code, and randomly projected TF-IDF vectors of hashed words.

A vector is projected at random to few dimensions (feature hashing; Johnson-Lindenstrauss with signs). A word's hash gives its bucket. The
bucket's number gives the random signs, so no matrix is stored and all workers compute the same vectors. The cosine of two projected
vectors estimates the cosine of the TF-IDF vectors with an error of about (1 - cosine^2) / sqrt(dimensions)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.hash_table import mix

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)
ONE, TWO, THREE, FOUR, EIGHT = (np.uint64(n) for n in (1, 2, 3, 4, 8))


@njit(cache=True, nogil=True, inline="always")
def _rotate(x: Any, r: Any) -> Any:
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


# Positions are unsigned: numba checks signed positions for negative values, and LLVM would then not merge the four loads below into one.
@njit(cache=True, nogil=True, inline="always")
def _load32(data: Any, at: Any) -> Any:
    return (
        np.uint64(data[at])
        | (np.uint64(data[at + ONE]) << np.uint64(8))
        | (np.uint64(data[at + TWO]) << np.uint64(16))
        | (np.uint64(data[at + THREE]) << np.uint64(24))
    )


@njit(cache=True, nogil=True, inline="always")
def load64(data: Any, at: Any) -> Any:
    return _load32(data, at) | (_load32(data, at + FOUR) << np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def _round(lane: Any, value: Any) -> Any:
    return _rotate(lane + value * P2, 31) * P1


@njit(cache=True, nogil=True)
def xxh64(data: Any, start: Any, stop: Any) -> Any:
    """Return XXH64 of `data[start:stop]`; `start` and `stop` are uint64."""
    at = start
    if stop - start >= np.uint64(32):
        a, b, c, d = P1 + P2, P2, np.uint64(0), np.uint64(0) - P1
        while at + np.uint64(32) <= stop:
            a = _round(a, load64(data, at))
            b = _round(b, load64(data, at + EIGHT))
            c = _round(c, load64(data, at + np.uint64(16)))
            d = _round(d, load64(data, at + np.uint64(24)))
            at += np.uint64(32)
        h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        h = (h ^ _round(np.uint64(0), a)) * P1 + P4
        h = (h ^ _round(np.uint64(0), b)) * P1 + P4
        h = (h ^ _round(np.uint64(0), c)) * P1 + P4
        h = (h ^ _round(np.uint64(0), d)) * P1 + P4
    else:
        h = P5
    h += stop - start
    while at + EIGHT <= stop:
        h = _rotate(h ^ _round(np.uint64(0), load64(data, at)), 27) * P1 + P4
        at += EIGHT
    if at + FOUR <= stop:
        h = _rotate(h ^ (_load32(data, at) * P1), 23) * P2 + P3
        at += FOUR
    while at < stop:
        h = _rotate(h ^ (np.uint64(data[at]) * P5), 11) * P1
        at += ONE
    h = (h ^ (h >> np.uint64(33))) * P2
    h = (h ^ (h >> np.uint64(29))) * P3
    return h ^ (h >> np.uint64(32))


@njit(cache=True, nogil=True)
def slice_hashes(data: NDArray[np.uint8], offsets_N1: I64) -> U64:
    """Return XXH64 of each slice `data[offsets_N1[i] : offsets_N1[i + 1]]`, [N]."""
    out = np.empty(len(offsets_N1) - 1, dtype=np.uint64)
    for i in range(len(out)):
        out[i] = xxh64(data, np.uint64(offsets_N1[i]), np.uint64(offsets_N1[i + 1]))
    return out


@njit(cache=True, nogil=True)
def murmur_finish(h: Any) -> Any:
    """Return a hash with its bits mixed over all 64 bits by MurmurHash3's finalizer."""
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def document_frequency(hashes_W: U64, words_D1: I64, buckets: int) -> I64:
    """Return, for each hash bucket, the number of documents with a word in the bucket, int64[buckets]; `buckets` is a power of two."""
    out, seen = np.zeros(buckets, dtype=np.int64), np.full(buckets, -1, dtype=np.int64)
    mask = np.uint64(buckets - 1)
    for d in range(len(words_D1) - 1):
        for w in range(words_D1[d], words_D1[d + 1]):
            b = np.int64(hashes_W[w] & mask)
            if seen[b] != d:
                seen[b] = d
                out[b] += 1
    return out


@njit(cache=True, nogil=True)
def project(hashes_W: U64, words_D1: I64, weights: NDArray[np.float64], dimensions: int) -> NDArray[np.float32]:
    """Return projected TF-IDF vectors of documents [D, dimensions], of length 1. `weights` float64[buckets]: inverse document frequencies.

    A bucket's weight in a document is (1 + log of the number of the document's words in the bucket) times the bucket's `weights`. A
    document without words, or with weights of 0 only, has a zero vector. `dimensions` is a multiple of 64."""
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
                continue  # this bucket was added before
            weight = (1.0 + np.log(count[b])) * weights[b]
            count[b] = 0
            state = np.uint64(b)
            for k in range(0, dimensions, 64):
                state += GOLDEN
                bits = mix(state)
                for j in range(64):
                    vector[k + j] += weight * (1.0 - 2.0 * np.float64((bits >> np.uint64(j)) & np.uint64(1)))
        norm = np.sqrt((vector * vector).sum())
        if norm > 0:
            out[d] = (vector / norm).astype(np.float32)
    return out
