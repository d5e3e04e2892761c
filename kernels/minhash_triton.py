"""MinHash signatures on a GPU, bit by bit those of `minhash.py`: one program per document and block of permutations.

The curation's workers import `minhash.py` alone, so that they need no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from puna.kernels.cpu.lazy import triton_jit
from puna.kernels.minhash import I64, U32, U64, permutations
from puna.kernels.operators import INTERPRETED

if TYPE_CHECKING:
    import triton.language as tl

PERMUTATIONS, SHINGLES = 64, 64  # permutations and shingles that a program works on at once


@triton_jit
def _affine32_kernel(hashes, offsets, a, b, out, number, P: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the minimum over a document's shingles of a mix(h) + b mod 2^32."""
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


def usable() -> bool:
    """True if these kernels can run here: on a CUDA device, or by Triton's interpreter."""
    return find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())


def signatures_on(device: torch.device | str, hashes_S: U64, offsets_D1: I64, number: int = 112, seed: int = 1) -> U32:
    """Return `minhash.signatures` [D, P] as an array, computed on `device` (the CPU for Triton's interpreter)."""
    device = "cpu" if INTERPRETED else device
    hashes, offsets = (torch.from_numpy(np.ascontiguousarray(x).view(np.int64)).to(device) for x in (hashes_S, offsets_D1))
    return signatures_tensor(hashes, offsets, *permutation_tensors(number, seed, device)).cpu().numpy().view(np.uint32)


def permutation_tensors(number: int, seed: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return a and b of `minhash.permutations` as signed integers with the same bits, for torch."""
    a, b = (torch.from_numpy(x.view(np.int32).copy()).to(device) for x in permutations(number, seed))
    return a, b


def signatures_tensor(hashes_S: Tensor, offsets_D1: Tensor, a_P: Tensor, b_P: Tensor) -> Tensor:
    """Return signatures [D, P] int32 (bits of unsigned numbers) from int64 hashes and offsets on one device."""
    documents, number = len(offsets_D1) - 1, len(a_P)
    out = torch.empty(documents, number, dtype=a_P.dtype, device=hashes_S.device)
    if documents:
        grid = (documents, -(-number // PERMUTATIONS))
        _affine32_kernel[grid](hashes_S, offsets_D1, a_P, b_P, out, number, P=PERMUTATIONS, S=SHINGLES, num_warps=4)
    return out
