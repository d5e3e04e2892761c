"""Shared parts of the output layer's operators, which compute logits in chunks of rows and sum gradients over the chunks.

Shapes: N rows, D model width, V vocabulary, C rows of one chunk. `linear.product` or BLAS computes the matrix products; between
them, one loop or kernel goes over a chunk's logits. Softmax and the sums over chunks, such as dW, are at least fp32: training diverges if
dW is accumulated in low precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from puna.kernels.operators import wide

NUMERICS = {"CHUNK_BYTES": 1, "CHUNK_BYTES_GPU": 1}
CHUNK_BYTES = 4 << 20  # one chunk's logits on CPU: about a core's share of the last-level cache
CHUNK_BYTES_GPU = 512 << 20  # on a GPU: enough rows for products at full speed
BLOCK = 4096  # logits that a Triton program holds at once
LOWEST = -3.0e38  # below every logit, and finite, so that differences are defined


def chunks(rows: int, w_VD: Tensor) -> Iterator[slice]:
    """Return slices that cut `rows` rows into chunks whose logits take at most the device's `CHUNK_BYTES`; a chunk has at least one row."""
    capacity = CHUNK_BYTES_GPU if w_VD.is_cuda else CHUNK_BYTES
    size = max(1, capacity // (w_VD.element_size() * len(w_VD)))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def accumulate(dw_VD: Tensor, d_CV: Tensor, x_CD: Tensor) -> None:
    """Add d^T x to dw in place, in dw's precision."""
    if dw_VD.dtype == x_CD.dtype:
        dw_VD.addmm_(d_CV.T, x_CD)
    elif x_CD.is_cuda:
        torch.ops.aten.addmm.dtype_out(dw_VD, d_CV.T, x_CD, dw_VD.dtype, out=dw_VD)
    else:
        dw_VD.addmm_(d_CV.T.to(dw_VD.dtype), x_CD.to(dw_VD.dtype))


def gradients(x_ND: Tensor, w_VD: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, Tensor]:
    """Return buffers for dX (uninitialized) and dW (zeros, at least fp32); a gradient that is not wanted has size 0."""
    dx_ND = torch.empty(x_ND.shape if want_x else 0, dtype=x_ND.dtype, device=x_ND.device)
    dw_VD = torch.zeros(w_VD.shape if want_w else 0, dtype=wide(w_VD.dtype), device=w_VD.device)
    return dx_ND, dw_VD


def fake_gradients(x_ND: Tensor, w_VD: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, Tensor]:
    """Return empty tensors with the shapes of `gradients` and the dtypes that the operator returns, for tracing."""
    return x_ND.new_empty(x_ND.shape if want_x else 0), w_VD.new_empty(w_VD.shape if want_w else 0)


def fake_rows(x_ND: Tensor, count: int) -> list[Tensor]:
    return [x_ND.new_empty(x_ND.shape[0], dtype=wide(x_ND.dtype)) for _ in range(count)]


def block_size(V: int) -> tuple[int, int]:
    """Return (logits that a program holds at once, number of warps) for rows of V logits."""
    block = min(BLOCK, max(16, 1 << (V - 1).bit_length()))
    return block, max(1, min(16, block // 256))
