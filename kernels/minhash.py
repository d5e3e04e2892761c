"""MinHash signatures (Broder 1997) of documents given as flat arrays of shingle hashes.

Signatures equal those of datasketch 2 (`affine32`) for the same hashes, number of permutations and seed, so one index can
hold both. A hash h is mixed once (MurmurHash3's finalizer), then permuted by a * h + b mod 2^32 with odd a. Only the low 32 bits of a hash
are used: pass datasketch a `hashfunc` that returns only these bits.

Shapes: D documents, S shingles (of all documents one after another), P permutations. In a flat array, document d has the elements
`offsets_D1[d] : offsets_D1[d + 1]`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import longest

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

TOP32 = np.uint32(0xFFFFFFFF)


def permutations(number: int, seed: int) -> tuple[U32, U32]:
    """Return the parameters a_P (odd) and b_P of `number` permutations, as datasketch 2 draws them."""
    generator = np.random.RandomState(seed)
    a = generator.randint(0, 1 << 31, number, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return a, generator.randint(0, 1 << 32, number, dtype=np.uint32)


def signatures_reference(hashes_S: U64, offsets_D1: I64, a_P: U32, b_P: U32) -> U32:
    """Return signatures [D, P]: the minimum of a document's hashes under each permutation; without hashes, the row is 2^32 - 1."""
    out = np.full((len(offsets_D1) - 1, len(a_P)), TOP32, dtype=np.uint32)
    for d in range(len(out)):
        h_S = (hashes_S[offsets_D1[d] : offsets_D1[d + 1]] & np.uint64(TOP32)).astype(np.uint32)
        if len(h_S):
            h_S = (h_S ^ (h_S >> np.uint32(16))) * np.uint32(0x85EBCA6B)
            h_S = (h_S ^ (h_S >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            out[d] = ((h_S ^ (h_S >> np.uint32(16)))[:, None] * a_P + b_P).min(axis=0)
    return out


def signatures(hashes_S: U64, offsets_D1: I64, number: int = 112, seed: int = 1) -> U32:
    """Return signatures [D, P] for P = `number` permutations drawn with `seed`. See `signatures_reference`."""
    hashes_S, offsets_D1 = np.ascontiguousarray(hashes_S, dtype=np.uint64), np.ascontiguousarray(offsets_D1)
    return _signatures(hashes_S, offsets_D1, *permutations(number, seed))  # type: ignore[no-any-return]


# The inner loop over permutations updates a row of P values, which stays in the L1 cache, and is vectorized. Four shingles
# at a time share the row's loads and stores. Casts back to 32 bits undo numba's widening.


@njit(cache=True, nogil=True)
def _signatures(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    out = np.full((len(offsets_D1) - 1, len(a_P)), TOP32, dtype=np.uint32)
    mixed = np.empty(longest(offsets_D1), dtype=np.uint32)
    for d in range(len(out)):
        row = out[d]
        count = offsets_D1[d + 1] - offsets_D1[d]
        for s in range(count):
            h = np.uint32(h_S[offsets_D1[d] + s])
            h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
            mixed[s] = h ^ (h >> np.uint32(16))
        s = 0
        while s + 4 <= count:
            h0, h1, h2, h3 = mixed[s], mixed[s + 1], mixed[s + 2], mixed[s + 3]
            for p in range(len(a_P)):
                a, b = a_P[p], b_P[p]
                left = min(np.uint32(a * h0 + b), np.uint32(a * h1 + b))
                right = min(np.uint32(a * h2 + b), np.uint32(a * h3 + b))
                row[p] = min(row[p], min(left, right))
            s += 4
        while s < count:
            h = mixed[s]
            for p in range(len(a_P)):
                row[p] = min(row[p], np.uint32(a_P[p] * h + b_P[p]))
            s += 1
    return out
