"""MinHash (Broder 1997): shingle hashes, signatures, LSH bands and exact comparison of shingle sets.

Signatures equal `datasketch.MinHash`'s for the same hash values, number of permutations, seed and scheme, so an
index built with one serves the other:

    affine32  the hash is mixed once (MurmurHash3's finalizer), then a * h + b mod 2^32 with odd a; uint32
    affine64  the same over 64 bits; uint64
    legacy    (a * h + b mod 2^64) mod (2^61 - 1), low 32 bits; uint64

Shapes: D documents, W words, S shingles (of all documents one after another), P permutations, B bands.
`offsets_D1[d] : offsets_D1[d + 1]` are the rows of document d in a flat array.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

Scheme = Literal["affine32", "affine64", "legacy"]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

MERSENNE = (1 << 61) - 1


def permutations(number: int, seed: int, scheme: Scheme = "affine32") -> tuple[NDArray[Any], NDArray[Any]]:
    """Parameters a_P and b_P of `number` permutations, as datasketch draws them from `seed`."""
    generator = np.random.RandomState(seed)
    if scheme == "legacy":
        pairs = [(generator.randint(1, MERSENNE, dtype=np.uint64), generator.randint(0, MERSENNE, dtype=np.uint64)) for _ in range(number)]
        both = np.array(pairs, dtype=np.uint64).reshape(number, 2)
        return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])
    kind, width = _width(scheme)
    a = generator.randint(0, 1 << (width - 1), number, dtype=kind) * kind(2) + kind(1)
    b = generator.randint(0, 1 << width, number, dtype=kind)
    return a, b


def _width(scheme: Scheme) -> tuple[Any, int]:
    return (np.uint32, 32) if scheme == "affine32" else (np.uint64, 64)


# --- signatures ------------------------------------------------------------------------------------------


def signatures_reference(hashes_S: U64, offsets_D1: I64, a_P: NDArray[Any], b_P: NDArray[Any], scheme: Scheme) -> NDArray[Any]:
    """Signatures [D, P] in plain numpy: the minimum of each permuted hash over a document's shingles.

    A document without shingles gets the largest value everywhere. `hashes_S` are 32-bit values except for affine64.
    """
    kind = np.uint32 if scheme == "affine32" else np.uint64
    top = np.uint64(0xFFFFFFFF if scheme != "affine64" else 0xFFFFFFFFFFFFFFFF)
    out = np.full((len(offsets_D1) - 1, len(a_P)), kind(top), dtype=kind)
    for d in range(len(out)):
        h_S = hashes_S[offsets_D1[d] : offsets_D1[d + 1]].astype(kind)
        if not len(h_S):
            continue
        if scheme == "legacy":
            permuted_SP = ((h_S[:, None] * a_P + b_P) % np.uint64(MERSENNE)) & np.uint64(0xFFFFFFFF)
        else:
            permuted_SP = _fmix(h_S, scheme)[:, None] * a_P + b_P
        out[d] = permuted_SP.min(axis=0)
    return out


def _fmix(h: NDArray[Any], scheme: Scheme) -> NDArray[Any]:
    if scheme == "affine32":
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


def signatures(hashes_S: U64, offsets_D1: I64, number: int = 112, seed: int = 1, scheme: Scheme = "affine32") -> NDArray[Any]:
    """Signatures [D, P]: uint32 for affine32, uint64 otherwise. See `signatures_reference`."""
    a_P, b_P = permutations(number, seed, scheme)
    hashes_S = np.ascontiguousarray(hashes_S)
    if scheme == "affine32":
        return _affine32(_fmix(hashes_S.astype(np.uint32), scheme), offsets_D1, a_P, b_P)
    if scheme == "affine64":
        return _affine64(_fmix(hashes_S.astype(np.uint64), scheme), offsets_D1, a_P, b_P)
    return _legacy(hashes_S.astype(np.uint64), offsets_D1, a_P, b_P)


@njit(cache=True, nogil=True)
def _affine32(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    out = np.full((len(offsets_D1) - 1, len(a_P)), np.uint32(0xFFFFFFFF), dtype=np.uint32)
    for d in range(len(out)):
        row = out[d]
        for s in range(offsets_D1[d], offsets_D1[d + 1]):
            h = h_S[s]
            for p in range(len(a_P)):
                # numba widens uint32 products to 64 bits; cutting them back keeps the loop in 32-bit lanes
                row[p] = min(row[p], np.uint32(a_P[p] * h + b_P[p]))
    return out


@njit(cache=True, nogil=True)
def _affine64(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    out = np.full((len(offsets_D1) - 1, len(a_P)), np.uint64(0xFFFFFFFFFFFFFFFF), dtype=np.uint64)
    for d in range(len(out)):
        row = out[d]
        for s in range(offsets_D1[d], offsets_D1[d + 1]):
            h = h_S[s]
            for p in range(len(a_P)):
                row[p] = min(row[p], a_P[p] * h + b_P[p])
    return out


@njit(cache=True, nogil=True)
def _legacy(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    prime = np.uint64(2305843009213693951)
    low = np.uint64(0xFFFFFFFF)
    out = np.full((len(offsets_D1) - 1, len(a_P)), low, dtype=np.uint64)
    for d in range(len(out)):
        row = out[d]
        for s in range(offsets_D1[d], offsets_D1[d + 1]):
            h = h_S[s]
            for p in range(len(a_P)):
                x = a_P[p] * h + b_P[p]
                x = (x & prime) + (x >> np.uint64(61))  # x mod a Mersenne prime, up to one subtraction
                if x >= prime:
                    x -= prime
                row[p] = min(row[p], x & low)
    return out


# --- shingles --------------------------------------------------------------------------------------------


def shingle_hashes(data: NDArray[np.uint8], offsets_D1: I64, words: int) -> tuple[U64, I64, I64]:
    """64-bit hashes (XXH64, seed 0) of every run of `words` words of each document.

    `data`: UTF-8 bytes of all documents, words parted by single spaces, no other white space. A document of fewer
    words has one shingle, all of it; one without words has none. Returns hashes_S, their offsets_D1, and words_D.
    """
    return _shingle_hashes(np.ascontiguousarray(data), np.ascontiguousarray(offsets_D1), words)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True, inline="always")
def _rotate(x: Any, r: Any) -> Any:
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


@njit(cache=True, nogil=True, inline="always")
def _load(data: Any, at: Any, size: Any) -> Any:
    value = np.uint64(0)
    for k in range(size):
        value |= np.uint64(data[at + k]) << np.uint64(8 * k)
    return value


@njit(cache=True, nogil=True)
def _xxh64(data: Any, start: Any, stop: Any) -> Any:
    p1, p2, p3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
    p4, p5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
    at = start
    if stop - start >= 32:
        v1, v2, v3, v4 = p1 + p2, p2, np.uint64(0), np.uint64(0) - p1
        while at + 32 <= stop:
            v1 = _rotate(v1 + _load(data, at, 8) * p2, 31) * p1
            v2 = _rotate(v2 + _load(data, at + 8, 8) * p2, 31) * p1
            v3 = _rotate(v3 + _load(data, at + 16, 8) * p2, 31) * p1
            v4 = _rotate(v4 + _load(data, at + 24, 8) * p2, 31) * p1
            at += 32
        h = _rotate(v1, 1) + _rotate(v2, 7) + _rotate(v3, 12) + _rotate(v4, 18)
        for v in (v1, v2, v3, v4):
            h = (h ^ (_rotate(v * p2, 31) * p1)) * p1 + p4
    else:
        h = p5
    h += np.uint64(stop - start)
    while at + 8 <= stop:
        h = _rotate(h ^ (_rotate(_load(data, at, 8) * p2, 31) * p1), 27) * p1 + p4
        at += 8
    if at + 4 <= stop:
        h = _rotate(h ^ (_load(data, at, 4) * p1), 23) * p2 + p3
        at += 4
    while at < stop:
        h = _rotate(h ^ (np.uint64(data[at]) * p5), 11) * p1
        at += 1
    h = (h ^ (h >> np.uint64(33))) * p2
    h = (h ^ (h >> np.uint64(29))) * p3
    return h ^ (h >> np.uint64(32))


@njit(cache=True, nogil=True)
def _shingle_hashes(data: Any, offsets_D1: Any, n: Any) -> Any:
    space = np.uint8(32)
    documents = len(offsets_D1) - 1
    words_D = np.zeros(documents, dtype=np.int64)
    out_D1 = np.zeros(documents + 1, dtype=np.int64)
    longest = 0
    for d in range(documents):
        start, stop = offsets_D1[d], offsets_D1[d + 1]
        if stop > start:
            words = 1
            for i in range(start, stop):
                words += data[i] == space
            words_D[d] = words
            longest = max(longest, words)
        out_D1[d + 1] = out_D1[d] + (0 if words_D[d] == 0 else max(1, words_D[d] - n + 1))
    hashes = np.empty(out_D1[documents], dtype=np.uint64)
    begins = np.empty(longest + 1, dtype=np.int64)
    for d in range(documents):
        start, stop = offsets_D1[d], offsets_D1[d + 1]
        words = words_D[d]
        if words == 0:
            continue
        begins[0] = start
        found = 1
        for i in range(start, stop):
            if data[i] == space:
                begins[found] = i + 1
                found += 1
        begins[words] = stop + 1
        width = min(n, words)
        for w in range(words - width + 1):
            hashes[out_D1[d] + w] = _xxh64(data, begins[w], begins[w + width] - 1)
    return hashes, out_D1, words_D


def slice_hashes(data: NDArray[np.uint8], offsets_N1: I64) -> U64:
    """XXH64 (seed 0) of each slice `data[offsets_N1[i] : offsets_N1[i + 1]]`, [N]."""
    return _slice_hashes(np.ascontiguousarray(data), np.ascontiguousarray(offsets_N1))  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _slice_hashes(data: Any, offsets_N1: Any) -> Any:
    out = np.empty(len(offsets_N1) - 1, dtype=np.uint64)
    for i in range(len(out)):
        out[i] = _xxh64(data, offsets_N1[i], offsets_N1[i + 1])
    return out


def widened(hashes_S: U64, words: int) -> U64:
    """Hashes of the shingles of twice `words` words, from those of `words` words in text order; [S - words]."""
    if len(hashes_S) <= words:
        return hashes_S
    first, second = hashes_S[:-words], hashes_S[words:]
    mixed = (first * np.uint64(0x9E3779B185EBCA87)) ^ (second * np.uint64(0xC2B2AE3D27D4EB4F))
    return _fmix(mixed, "affine64")


# --- candidates and their comparison ---------------------------------------------------------------------


def band_keys(signatures_DP: NDArray[Any], bands: int, rows: int) -> U64:
    """One 64-bit key per document and band of `rows` signature values, [D, B]; equal rows have equal keys."""
    used = np.ascontiguousarray(signatures_DP[:, : bands * rows])
    data = used.view(np.uint8).reshape(-1)
    step = rows * used.dtype.itemsize
    offsets = np.arange(0, len(data) + 1, step, dtype=np.int64) if len(data) else np.zeros(1, dtype=np.int64)
    return slice_hashes(data, offsets).reshape(len(used), bands)


def components(keys_DB: U64) -> I64:
    """Connected components of documents that share a band's key: for each document the smallest row of its component, [D]."""
    parent = np.arange(len(keys_DB), dtype=np.int64)
    for b in range(keys_DB.shape[1]):
        order = np.argsort(keys_DB[:, b], kind="stable")
        _union_equal(np.ascontiguousarray(keys_DB[:, b]), order, parent)
    _flatten(parent)
    return parent


@njit(cache=True, nogil=True)
def _find(parent: Any, i: Any) -> Any:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@njit(cache=True, nogil=True)
def _union_equal(keys_D: Any, order_D: Any, parent_D: Any) -> None:
    for k in range(1, len(order_D)):
        i, j = order_D[k - 1], order_D[k]
        if keys_D[i] == keys_D[j]:
            i, j = _find(parent_D, i), _find(parent_D, j)
            # the smaller row becomes the root, so the result does not depend on the order of unions
            if i < j:
                parent_D[j] = i
            elif j < i:
                parent_D[i] = j


@njit(cache=True, nogil=True)
def _flatten(parent_D: Any) -> None:
    for i in range(len(parent_D)):
        parent_D[i] = _find(parent_D, i)


def common(left_S: U64, right_S: U64) -> int:
    """Number of values in both of two sorted arrays without repetitions."""
    return int(_common(left_S, right_S))


@njit(cache=True, nogil=True)
def _common(left: Any, right: Any) -> Any:
    i = j = found = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            found += 1
            i += 1
            j += 1
        elif left[i] < right[j]:
            i += 1
        else:
            j += 1
    return found


def longest_absent_run(sequence_S: U64, known_K: U64) -> int:
    """Length of the longest run of values of `sequence_S` that are not in the sorted array `known_K`."""
    return int(_longest_absent_run(sequence_S, known_K))


@njit(cache=True, nogil=True)
def _longest_absent_run(sequence: Any, known: Any) -> Any:
    longest = run = 0
    for value in sequence:
        at = np.searchsorted(known, value)
        if at < len(known) and known[at] == value:
            run = 0
        else:
            run += 1
            longest = max(longest, run)
    return longest
