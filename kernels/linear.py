"""Matrix product with a weight in the layout of `nn.Linear`: y = x w^T.

In fp32 on CPU, oneDNN's product is 5-15 % faster than the BLAS behind `torch.matmul` for the forward
and the gradient of x when the product is large; when it is small (decoding), its fixed cost of about
12 us shows. For the gradient of w, whose inner dimension is the row count, BLAS is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from puna.kernels.exact import exact

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


Routine = Callable[[Tensor, Tensor], Tensor]
TRIED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 64, 100, 257)  # from each of them on a routine may be exact
FILLED_ROWS = 64  # rows that a small product may be filled up to


@cache
def exact_routine(N: int, D: int, threads: int) -> tuple[str, int]:
    """The routine whose every row has the same bits for any number of rows, and the number from which on that is so.

    Found by trial on this machine, for a weight of this shape and that many threads: a library picks its kernel by
    shape. ValueError where no routine is exact from at most FILLED_ROWS rows on.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(600, D, generator=generator), torch.randn(N, D, generator=generator)
    best: tuple[int, str] | None = None
    for name, routine in ROUTINES.items():
        if name == "oneDNN" and not _onednn():
            continue
        whole, least = routine(x, w), TRIED_ROWS[0]
        for rows, following in pairwise((*TRIED_ROWS, len(x))):
            for start in (0, 37):
                if not torch.equal(routine(x[start : start + rows].clone(), w), whole[start : start + rows]):
                    least = following
        if least <= FILLED_ROWS and (best is None or least < best[0]):
            best = (least, name)
    if best is None:
        raise ValueError(
            f"no matrix product of this machine gives rows the same bits in any company (weight [{N}, {D}], {threads} threads);"
            " exact passes cannot be had here: try one thread (OMP_NUM_THREADS=1)"
        )
    return best[1], best[0]


def _exact_product(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    name, rows = exact_routine(*w_ND.shape, torch.get_num_threads())
    if (T := len(x_TD)) < rows:
        x_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, rows - T))
    return ROUTINES[name](x_TD, w_ND)[:T]


ROUTINES: dict[str, Routine] = {"oneDNN": _by_onednn, "BLAS": _by_blas}


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
    x_TD = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y_TN: Tensor = _Linear.apply(x_TD, w_ND)  # type: ignore[no-untyped-call]
    else:
        y_TN = product(x_TD, w_ND)
    return y_TN.view(*x.shape[:-1], w_ND.shape[0])
