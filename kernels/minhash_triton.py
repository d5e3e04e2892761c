"""MinHash signatures on a GPU, bit by bit those of `minhash.py`: one program per document and block of permutations.

Apart from `minhash.py`, which the curation's workers import, so that these need no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from puna.kernels.cpu.lazy import triton_jit
from puna.kernels.operators import INTERPRETED
from puna.kernels.permutations import I64, U64, Scheme, permutations

if TYPE_CHECKING:
    import triton.language as tl

PERMUTATIONS, SHINGLES = 64, 64  # permutations and shingles that a program works on at once


@triton_jit
def _affine32_kernel(hashes, offsets, a, b, out, number, P: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """min over a document's shingles of a mix(h) + b mod 2^32."""
    d = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * P + tl.arange(0, P)
    start = tl.load(offsets + d)
    stop = tl.load(offsets + d + 1)
    a_P = tl.load(a + p, p < number, 0).to(tl.uint32, bitcast=True)
    b_P = tl.load(b + p, p < number, 0).to(tl.uint32, bitcast=True)
    least = tl.full([S, P], 0xFFFFFFFF, tl.uint32)
    for first in range(start, stop, S):
        s = first + tl.arange(0, S)
        h = tl.load(hashes + s, s < stop, 0).to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        h = h ^ (h >> 16)
        value = h[:, None] * a_P[None, :] + b_P[None, :]
        least = tl.minimum(least, tl.where((s < stop)[:, None], value, 0xFFFFFFFF))
    tl.store(out + d * number + p, tl.min(least, 0).to(tl.int32, bitcast=True), p < number)


@triton_jit
def _wide_kernel(hashes, offsets, a, b, out, number, SCHEME: tl.constexpr, P: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The schemes of 64 bits: 0 affine64, 1 legacy, 2 mersenne."""
    d = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * P + tl.arange(0, P)
    start = tl.load(offsets + d)
    stop = tl.load(offsets + d + 1)
    a_P = tl.load(a + p, p < number, 0).to(tl.uint64, bitcast=True)
    b_P = tl.load(b + p, p < number, 0).to(tl.uint64, bitcast=True)
    prime = tl.full([1, 1], 0x1FFFFFFFFFFFFFFF, tl.uint64)
    top = tl.full([1, 1], 0xFFFFFFFF if SCHEME == 1 else 0xFFFFFFFFFFFFFFFF, tl.uint64)
    least = tl.full([S, P], 0xFFFFFFFF if SCHEME == 1 else 0xFFFFFFFFFFFFFFFF, tl.uint64)
    for first in range(start, stop, S):
        s = first + tl.arange(0, S)
        h = tl.load(hashes + s, s < stop, 0).to(tl.uint64, bitcast=True)
        if SCHEME == 0:
            h = (h ^ (h >> 33)) * tl.full([1], 0xFF51AFD7ED558CCD, tl.uint64)
            h = (h ^ (h >> 33)) * tl.full([1], 0xC4CEB9FE1A85EC53, tl.uint64)
            h = h ^ (h >> 33)
        if SCHEME == 1:
            h = h & 0xFFFFFFFF
        value = h[:, None] * a_P[None, :] + b_P[None, :]
        if SCHEME != 0:
            # Modulo 2^61 - 1: the high bits are added to the low ones, then at most one subtraction is left.
            value = (value & prime) + (value >> 61)
            value = tl.where(value >= prime, value - prime, value)
        if SCHEME == 1:
            value = value & top
        least = tl.minimum(least, tl.where((s < stop)[:, None], value, top))
    tl.store(out + d * number + p, tl.min(least, 0).to(tl.int64, bitcast=True), p < number)


def usable() -> bool:
    """True if these kernels can run here: on a CUDA device, or by Triton's interpreter."""
    return find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())


def signatures_on(
    device: torch.device | str, hashes_S: U64, offsets_D1: I64, number: int = 112, seed: int = 1, scheme: Scheme = "affine32"
) -> NDArray[Any]:
    """`minhash.signatures`, computed on `device`: arrays go there and signatures [D, P] come back. The interpreter's is the CPU."""
    device = "cpu" if INTERPRETED else device
    hashes, offsets = (torch.from_numpy(np.ascontiguousarray(x).view(np.int64)).to(device) for x in (hashes_S, offsets_D1))
    kind = np.uint32 if scheme == "affine32" else np.uint64
    return signatures_tensor(hashes, offsets, *permutation_tensors(number, seed, scheme, device), scheme).cpu().numpy().view(kind)


def permutation_tensors(number: int, seed: int, scheme: Scheme, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """a and b of `minhash.permutations`, their bits as signed integers, which is what torch computes with."""
    signed = np.int32 if scheme == "affine32" else np.int64
    a, b = (torch.from_numpy(x.view(signed).copy()).to(device) for x in permutations(number, seed, scheme))
    return a, b


def signatures_tensor(hashes_S: Tensor, offsets_D1: Tensor, a_P: Tensor, b_P: Tensor, scheme: Scheme) -> Tensor:
    """Signatures [D, P] of tensors on one device: int64 hashes and offsets; int32 for affine32, else int64, bits of unsigned."""
    documents, number = len(offsets_D1) - 1, len(a_P)
    out = torch.empty(documents, number, dtype=a_P.dtype, device=hashes_S.device)
    if documents:
        grid = (documents, -(-number // PERMUTATIONS))
        given = (hashes_S, offsets_D1, a_P, b_P, out, number)
        if scheme == "affine32":
            _affine32_kernel[grid](*given, P=PERMUTATIONS, S=SHINGLES, num_warps=4)
        else:
            which = {"affine64": 0, "legacy": 1, "mersenne": 2}[scheme]
            _wide_kernel[grid](*given, SCHEME=which, P=PERMUTATIONS, S=SHINGLES // 2, num_warps=4)
    return out
