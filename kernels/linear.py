"""Linear layer without bias: x w^T.

In fp32 on CPU and for contiguous w, a numba loop computes products of few rows without autograd (decoding) and, in exact passes (see
`kernels.exact`), of any number of rows. Up to 16 rows it takes half the time of oneDNN and BLAS, and at 64 rows the same time. In the loop,
a row's bits do not depend on the number of rows. For more rows, oneDNN is 5-15 % faster than the BLAS behind `torch.matmul`, in the forward
pass and for the gradient of x. For the gradient of w, whose inner dimension is the row count, BLAS is as fast."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit
from puna.kernels.cpu.loops import run_rows
from puna.kernels.exact import exact
from puna.kernels.operators import alone

if has_numba():
    from puna.kernels.cpu.vector_products import TILE, dots_column, dots_one, dots_row, dots_tile
    from puna.kernels.cpu.vectors import CACHE_LINE, prefetch_bytes

    ROWS, COLUMNS = TILE

NUMERICS = {"product": 1, "linear": 1}
FEW_ROWS = 64  # rows of x up to which the loop is as fast as any library
AHEAD = 16 << 10  # prefetch distance in bytes; prefetching doubles the speed if weights come from memory
KEPT = 256 << 10  # maximum bytes of a panel for prefetching the whole next panel: both stay in a core's cache
PANEL, BLOCK = 64, 128  # columns and rows of one block of a product; the block's operands stay in the caches
ONEDNN_OUTPUTS = 1 << 15  # number of output elements at and above which oneDNN is faster than BLAS


def linear_reference(x: Tensor, w_ND: Tensor) -> Tensor:
    """Return x w^T over the last axis of x."""
    return x @ w_ND.T


@cache
def _onednn() -> Any:
    """Return oneDNN's linear operator for dense fp32 tensors, or None. torch has it only under a private name; torch.matmul uses BLAS."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


@strict_jit
def products(T: int, N: int, D: int, x: Address, x_row: int, w: Address, y: Address, y_row: int) -> None:
    """Write y [T, N] = x [T, D] times w [N, D] transposed. Rows of x and y are x_row and y_row bytes apart; w is contiguous. While rows of
    x are multiplied by a panel of w (PANEL rows), later rows of w are prefetched."""
    w_row = 4 * D
    for top in range(0, T, BLOCK):
        end = min(top + BLOCK, T)
        whole = top + (end - top) // ROWS * ROWS
        turns = (whole - top) // ROWS + end - whole
        next_panel = min(PANEL, N) * w_row
        ahead = next_panel if turns > 1 and next_panel <= KEPT else AHEAD
        share = (COLUMNS * w_row // turns + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        for left in range(0, N, PANEL):
            right = min(left + PANEL, N)
            even = left + (right - left) // COLUMNS * COLUMNS
            coming = w + ahead
            for t in range(top, whole, ROWS):
                for n in range(left, even, COLUMNS):
                    prefetch_bytes(coming + n * w_row, share)
                    dots_tile(x + t * x_row, x_row, w + n * w_row, w_row, D, y + t * y_row + 4 * n, y_row)
                for n in range(even, right):
                    dots_column(x + t * x_row, x_row, w + n * w_row, w_row, D, y + t * y_row + 4 * n, y_row)
                coming += share
            for t in range(whole, end):
                for n in range(left, even, COLUMNS):
                    prefetch_bytes(coming + n * w_row, share)
                    dots_row(x + t * x_row, x_row, w + n * w_row, w_row, D, y + t * y_row + 4 * n, y_row)
                for n in range(even, right):
                    dots_one(x + t * x_row, x_row, w + n * w_row, w_row, D, y + t * y_row + 4 * n, y_row)
                coming += share


@strict_jit
def _linear_loop(part: int, start: int, stop: int, T: int, N: int, D: int, x: Address, w: Address, y: Address) -> None:
    """Compute panels `start` to `stop` - 1 of x w^T; a panel is PANEL columns."""
    first = start * PANEL
    products(T, min(stop * PANEL, N) - first, D, x, 4 * D, w + 4 * first * D, y + 4 * first, 4 * N)


def _by_loop(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    (T, D), N, x = x_TD.shape, len(w_ND), x_TD.contiguous()
    y = torch.empty(T, N)
    run_rows(_linear_loop, -(-N // PANEL), T * D * PANEL // 16, T, N, D, x.data_ptr(), w_ND.data_ptr(), y.data_ptr())
    return y


def uses_loop(x_TD: Tensor, w_ND: Tensor) -> bool:
    """True if the numba loop computes x w^T: fp32 on CPU, contiguous weights, numba, and either an exact pass or few rows and `alone`."""
    wanted = exact() or (len(x_TD) <= FEW_ROWS and alone(x_TD, w_ND))
    return wanted and x_TD.dtype == w_ND.dtype == torch.float32 and w_ND.is_cpu and w_ND.is_contiguous() and has_numba()


def product(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    """Return x w^T [T, N], without autograd: by the numba loop if `uses_loop`, else by oneDNN or torch.matmul, whichever is faster."""
    if uses_loop(x_TD, w_ND):
        return _by_loop(x_TD, w_ND)
    large = x_TD.shape[0] * w_ND.shape[0] >= ONEDNN_OUTPUTS
    if large and x_TD.dtype == torch.float32 and x_TD.device.type == "cpu" and (onednn := _onednn()) is not None:
        return onednn(x_TD, w_ND, None, "none", [], "")  # type: ignore[no-any-return]
    return x_TD @ w_ND.T


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
    """Return x w^T over the last axis of x: [..., D] and [N, D] to [..., N]; under autocast in autocast's dtype."""
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
