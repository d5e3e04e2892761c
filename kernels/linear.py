"""Matrix product with a weight in the layout of `nn.Linear`: y = x w^T.

In fp32 on CPU, oneDNN's product is 5-15 % faster than the BLAS behind `torch.matmul` for the forward
and the gradient of x when the product is large; when it is small (decoding), its fixed cost of about
12 us shows. For the gradient of w, whose inner dimension is the row count, BLAS is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from puna.kernels.exact import exact
from puna.kernels.lazy import has_numba, numba_jit
from puna.kernels.loops import run_rows

if has_numba():
    from puna.kernels.vectors import carray, fill, fma, load, pointer, spread, store

LANES = 16
ONEDNN_OUTPUTS = 1 << 15  # elements of the product from which oneDNN is faster


def linear_reference(x: Tensor, w_ND: Tensor) -> Tensor:
    """x w^T over the last axis of x."""
    return x @ w_ND.T


@cache
def _onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _by_onednn(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, w_ND, None, "none", [], "")
    return y_TN


def _by_blas(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    return x_TD @ w_ND.T


@numba_jit
def row_products(M: Any, C: Any, a: Any, a_row: Any, b: Any, b_row: Any, out: Any, out_row: Any, more: Any) -> None:
    """out[m, 0:16] = sum over c of a[m, c] b[c, 0:16], or with `more` added to what is there: by address and stride in bytes.

    One chain of fused products for each row, in the order of c; four rows take turns.
    """
    for m in range(0, M - 3, 4):
        a0, to = a + m * a_row, out + m * out_row
        a1, a2, a3 = a0 + a_row, a0 + 2 * a_row, a0 + 3 * a_row
        if more:
            s0, s1, s2, s3 = load(to), load(to + out_row), load(to + 2 * out_row), load(to + 3 * out_row)
        else:
            s0 = fill(np.float32(0))
            s1, s2, s3 = s0, s0, s0
        for c in range(C):
            x = load(b + c * b_row)
            s0 = fma(spread(a0 + 4 * c), x, s0)
            s1 = fma(spread(a1 + 4 * c), x, s1)
            s2 = fma(spread(a2 + 4 * c), x, s2)
            s3 = fma(spread(a3 + 4 * c), x, s3)
        store(to, s0)
        store(to + out_row, s1)
        store(to + 2 * out_row, s2)
        store(to + 3 * out_row, s3)
    for m in range(M // 4 * 4, M - 1, 2):
        a0, to = a + m * a_row, out + m * out_row
        a1 = a0 + a_row
        if more:
            s0, s1 = load(to), load(to + out_row)
        else:
            s0 = fill(np.float32(0))
            s1 = s0
        for c in range(C):
            x = load(b + c * b_row)
            s0 = fma(spread(a0 + 4 * c), x, s0)
            s1 = fma(spread(a1 + 4 * c), x, s1)
        store(to, s0)
        store(to + out_row, s1)
    for m in range(M // 2 * 2, M):
        a0, to = a + m * a_row, out + m * out_row
        s0 = load(to) if more else fill(np.float32(0))
        for c in range(C):
            s0 = fma(spread(a0 + 4 * c), load(b + c * b_row), s0)
        store(to, s0)


@numba_jit
def _linear_loop(part: Any, start: Any, stop: Any, T: Any, N: Any, D: Any, x: Any, w: Any, y: Any) -> None:
    """Columns 16 start .. 16 stop - 1 of x w^T; y's rows have a multiple of 16 numbers. By address."""
    w_ND, turned = carray(pointer(w), (N, D)), np.zeros((D, LANES), np.float32)
    for block in range(start, stop):
        first = block * LANES
        for i in range(LANES):
            for d in range(D):
                turned[d, i] = w_ND[first + i, d] if first + i < N else np.float32(0)
        row = 4 * LANES * ((N + LANES - 1) // LANES)
        row_products(T, D, x, 4 * D, turned.ctypes.data, 4 * LANES, y + 4 * first, row, False)


def _by_loop(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    (T, D), N, x = x_TD.shape, len(w_ND), x_TD.contiguous()
    blocks = -(-N // LANES)
    y = torch.empty(T, blocks * LANES)
    run_rows(_linear_loop, blocks, T * D * LANES, T, N, D, x.data_ptr(), w_ND.data_ptr(), y.data_ptr())
    return y[:, :N].contiguous()


Routine = Callable[[Tensor, Tensor], Tensor]
TRIED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 64, 100, 257)  # from each of them on a routine may be exact
FILLED_ROWS = 64  # rows that a small product may be filled up to


@cache
def exact_routine(N: int, D: int, threads: int) -> tuple[str, int]:
    """The routine whose every row has the same bits for any number of rows, and the number from which on that is so.

    Found by trial on this machine, for a weight of this shape and that many threads: a library picks its kernel by
    shape. Where neither library has one that is exact from FILLED_ROWS rows on, it is the loop, exact as it is written and
    several times slower.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(600, D, generator=generator), torch.randn(N, D, generator=generator)
    best = (FILLED_ROWS + 1, "loop")
    for name, routine in ROUTINES.items():
        if name == "loop" or (name == "oneDNN" and not _onednn()):
            continue
        whole, least = routine(x, w), TRIED_ROWS[0]
        for rows, following in pairwise((*TRIED_ROWS, len(x))):
            for start in (0, 37):
                if not torch.equal(routine(x[start : start + rows].clone(), w), whole[start : start + rows]):
                    least = following
        best = min(best, (least, name))
    return best[1], best[0] if best[1] != "loop" else 1


def _exact_product(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    name, rows = exact_routine(*w_ND.shape, torch.get_num_threads())
    if (T := len(x_TD)) < rows:
        x_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, rows - T))
    return ROUTINES[name](x_TD, w_ND)[:T]


ROUTINES: dict[str, Routine] = {"oneDNN": _by_onednn, "BLAS": _by_blas, "loop": _by_loop}


def product(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    """[T, D] times [N, D] transposed, without autograd, by the fastest routine of this machine; in exact passes by an exact one."""
    if exact() and w_ND.is_contiguous():
        return _exact_product(x_TD, w_ND)
    large = x_TD.shape[0] * w_ND.shape[0] >= ONEDNN_OUTPUTS
    if large and x_TD.dtype == torch.float32 and x_TD.device.type == "cpu" and _onednn():
        return _by_onednn(x_TD, w_ND)
    return _by_blas(x_TD, w_ND)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, w_ND):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_TD, w_ND)
        return product(x_TD, w_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TN):  # type: ignore[no-untyped-def]
        x_TD, w_ND = ctx.saved_tensors
        dx = product(grad_TN, w_ND.T) if ctx.needs_input_grad[0] else None
        dw = grad_TN.T @ x_TD if ctx.needs_input_grad[1] else None
        return dx, dw


def linear(x: Tensor, w_ND: Tensor) -> Tensor:
    """x w^T over the last axis of x: [..., D] and [N, D] to [..., N]; in autocast's dtype where that is on."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return torch.nn.functional.linear(x, w_ND)
    if not torch.is_grad_enabled() and x.ndim == 2:
        return product(x, w_ND)
    x_TD = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y_TN: Tensor = _Linear.apply(x_TD, w_ND)  # type: ignore[no-untyped-call]
    else:
        y_TN = product(x_TD, w_ND)
    return y_TN.view(*x.shape[:-1], w_ND.shape[0])
