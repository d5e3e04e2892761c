"""MinHash signatures (Broder 1997) of documents given as flat arrays of shingle hashes.

Signatures equal those of the field's libraries for the same hashes, number of permutations and seed, so that an index
built with one serves the other:

    affine32   datasketch 2: the hash is mixed once (MurmurHash3's finalizer), then a * h + b mod 2^32 with odd a; uint32
    affine64   datasketch 2: the same over 64 bits; uint64
    legacy     datasketch 1: (a * h + b mod 2^64) mod (2^61 - 1), low 32 bits; uint64
    mersenne   datatrove: (a * h + b mod 2^64) mod (2^61 - 1) of 64-bit hashes; uint64

affine32 and legacy use the low 32 bits of each hash: with datasketch, pass a `hashfunc` that returns just these.

Shapes: D documents, S shingles (of all documents one after another), P permutations. `offsets_D1[d] : offsets_D1[d + 1]`
are the rows of document d in a flat array.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.permutations import I64, MERSENNE, U64, Scheme, permutations

__all__ = ["Device", "Scheme", "chosen_device", "permutations", "signatures", "signatures_reference"]

Device = Literal["cpu", "cuda"]

PRIME = np.uint64(MERSENNE)
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # there where NVIDIA's driver is loaded, on Linux and under Windows
TOP32 = np.uint32(0xFFFFFFFF)
TOP64 = np.uint64(0xFFFFFFFFFFFFFFFF)


def signatures_reference(hashes_S: U64, offsets_D1: I64, a_P: NDArray[Any], b_P: NDArray[Any], scheme: Scheme) -> NDArray[Any]:
    """Signatures [D, P] in plain numpy: the minimum of each permuted hash over a document's shingles.

    A document without shingles gets the largest value everywhere: 2^32 - 1 for affine32 and legacy, else 2^64 - 1.
    """
    narrow = scheme in ("affine32", "legacy")
    kind = np.uint32 if scheme == "affine32" else np.uint64
    out = np.full((len(offsets_D1) - 1, len(a_P)), TOP32 if narrow else TOP64, dtype=kind)
    for d in range(len(out)):
        h_S = hashes_S[offsets_D1[d] : offsets_D1[d + 1]].astype(np.uint64)
        if narrow:
            h_S &= np.uint64(TOP32)
        if not len(h_S):
            continue
        if scheme in ("affine32", "affine64"):
            permuted_SP = _fmix_reference(h_S.astype(kind))[:, None] * a_P + b_P
        else:
            permuted_SP = (h_S[:, None] * a_P + b_P) % PRIME
        if scheme == "legacy":
            permuted_SP &= np.uint64(TOP32)
        out[d] = permuted_SP.min(axis=0)
    return out


def _fmix_reference(h: NDArray[Any]) -> NDArray[Any]:
    kind = h.dtype.type
    half, first, third = (16, 0x85EBCA6B, 0xC2B2AE35) if kind is np.uint32 else (33, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
    h = (h ^ (h >> kind(half))) * kind(first)
    h = (h ^ (h >> kind(13 if kind is np.uint32 else 33))) * kind(third)
    mixed: NDArray[Any] = h ^ (h >> kind(half))
    return mixed


def signatures(
    hashes_S: U64, offsets_D1: I64, number: int = 112, seed: int = 1, scheme: Scheme = "affine32", device: Device = "cpu"
) -> NDArray[Any]:
    """Signatures [D, P]: uint32 for affine32, uint64 otherwise, every bit the same on all devices. See `signatures_reference`."""
    hashes_S, offsets_D1 = np.ascontiguousarray(hashes_S, dtype=np.uint64), np.ascontiguousarray(offsets_D1)
    if device == "cuda":
        from puna.kernels.minhash_triton import signatures_on

        return signatures_on(device, hashes_S, offsets_D1, number, seed, scheme)
    kernel = {"affine32": _affine32, "affine64": _affine64, "legacy": _legacy, "mersenne": _mersenne}[scheme]
    return kernel(hashes_S, offsets_D1, *permutations(number, seed, scheme))  # type: ignore[no-any-return]


def chosen_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device that is meant: for auto cuda where torch sees one. RuntimeError where cuda is wanted and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not any(Path(file).exists() for file in DRIVERS)):
        return "cpu"  # without torch, whose import takes longer than the signatures of many documents
    from puna.kernels.minhash_triton import usable

    if usable():
        return "cuda"
    if wanted == "cuda":
        raise RuntimeError("there is no CUDA device that torch and triton can use")
    return "cpu"


# --- CPU -------------------------------------------------------------------------------------------------
# The loop over permutations is the inner one, over a row of P values that stays in the first cache and is worked on in
# vectors; several shingles at a time share its loads and stores. Casts back to 32 bits undo numba's widening.


@njit(cache=True, nogil=True)
def _affine32(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    out = np.full((len(offsets_D1) - 1, len(a_P)), TOP32, dtype=np.uint32)
    mixed = np.empty(_longest(offsets_D1), dtype=np.uint32)
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


@njit(cache=True, nogil=True)
def _longest(offsets_D1: Any) -> Any:
    longest = 0
    for d in range(len(offsets_D1) - 1):
        longest = max(longest, offsets_D1[d + 1] - offsets_D1[d])
    return longest


@njit(cache=True, nogil=True)
def _affine64(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    out = np.full((len(offsets_D1) - 1, len(a_P)), TOP64, dtype=np.uint64)
    shift = np.uint64(33)
    for d in range(len(out)):
        row = out[d]
        for s in range(offsets_D1[d], offsets_D1[d + 1]):
            h = h_S[s]
            h = (h ^ (h >> shift)) * np.uint64(0xFF51AFD7ED558CCD)
            h = (h ^ (h >> shift)) * np.uint64(0xC4CEB9FE1A85EC53)
            h = h ^ (h >> shift)
            for p in range(len(a_P)):
                row[p] = min(row[p], a_P[p] * h + b_P[p])
    return out


@njit(cache=True, nogil=True, inline="always")
def _modulo(x: Any) -> Any:
    """x mod the prime 2^61 - 1: the high bits are added to the low ones, then at most one subtraction is left."""
    x = (x & PRIME) + (x >> np.uint64(61))
    return min(x, x - PRIME)  # a negative difference wraps around to a larger number


@njit(cache=True, nogil=True)
def _legacy(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    low = np.uint64(0xFFFFFFFF)
    out = np.full((len(offsets_D1) - 1, len(a_P)), low, dtype=np.uint64)
    for d in range(len(out)):
        row = out[d]
        for s in range(offsets_D1[d], offsets_D1[d + 1]):
            h = h_S[s] & low
            for p in range(len(a_P)):
                row[p] = min(row[p], _modulo(a_P[p] * h + b_P[p]) & low)
    return out


@njit(cache=True, nogil=True)
def _mersenne(h_S: Any, offsets_D1: Any, a_P: Any, b_P: Any) -> Any:
    out = np.full((len(offsets_D1) - 1, len(a_P)), TOP64, dtype=np.uint64)
    for d in range(len(out)):
        row = out[d]
        s, stop = offsets_D1[d], offsets_D1[d + 1]
        while s + 2 <= stop:
            h0, h1 = h_S[s], h_S[s + 1]
            for p in range(len(a_P)):
                a, b = a_P[p], b_P[p]
                row[p] = min(row[p], min(_modulo(a * h0 + b), _modulo(a * h1 + b)))
            s += 2
        while s < stop:
            for p in range(len(a_P)):
                row[p] = min(row[p], _modulo(a_P[p] * h_S[s] + b_P[p]))
            s += 1
    return out
