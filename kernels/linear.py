"""Matrix product with a weight in the layout of `nn.Linear`: y = x w^T.

In fp32 on CPU, oneDNN's product is 5-15 % faster than the BLAS behind `torch.matmul` for the forward
and the gradient of x when the product is large; when it is small (decoding), its fixed cost of about
12 us shows. For the gradient of w, whose inner dimension is the row count, BLAS is as fast.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ONEDNN_OUTPUTS = 1 << 15  # elements of the product from which oneDNN is faster


def linear_reference(x: Tensor, w_ND: Tensor) -> Tensor:
    """x w^T over the last axis of x."""
    return x @ w_ND.T


@cache
def _onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x_TD: Tensor, w_ND: Tensor) -> Tensor:
    """[T, D] times [N, D] transposed, without autograd, by the fastest routine of this machine."""
    large = x_TD.shape[0] * w_ND.shape[0] >= ONEDNN_OUTPUTS
    if large and x_TD.dtype == torch.float32 and x_TD.device.type == "cpu" and _onednn():
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, w_ND, None, "none", [], "")
        return y_TN
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
    """x w^T over the last axis of x: [..., D] and [N, D] to [..., N]; in autocast's dtype where that is on."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return torch.nn.functional.linear(x, w_ND)
    x_TD = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y_TN: Tensor = _Linear.apply(x_TD, w_ND)  # type: ignore[no-untyped-call]
    else:
        y_TN = product(x_TD, w_ND)
    return y_TN.view(*x.shape[:-1], w_ND.shape[0])
