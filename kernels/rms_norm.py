"""RMSNorm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight over the last axis.

With r = 1 / sqrt(mean(x^2) + eps), n = x r and g = dy * weight, the backward is
dx = r (g - n mean(g n)) and dweight = sum over rows of dy n.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The definition, in the inputs' dtype."""
    return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), with the last axis kept."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """Few passes over memory; statistics in the inputs' dtype (fp32 or fp64)."""

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        r = _reciprocal_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight, r = ctx.saved_tensors
        n = x * r
        dyn = dy * n
        dweight = dyn.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        slope = torch.matmul(dyn, weight).div_(x.shape[-1]).unsqueeze(-1)
        dx = torch.mul(dy, weight, out=dyn).sub_(n.mul_(slope)).mul_(r)
        return dx, dweight, None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, with x's shape and dtype; low precision is normalised in fp32."""
    if x_TD.dtype not in (torch.float32, torch.float64):
        return (
            rms_norm(x_TD.float(), torch.ones_like(weight_D, dtype=torch.float32), eps).to(x_TD.dtype)
            * weight_D
        )
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x_TD, weight_D, eps)
    return (x_TD * _reciprocal_rms(x_TD, eps)).mul_(weight_D)
