"""Rotary position embedding (Su et al. 2021), in the half-split layout of Llama checkpoints.

Shapes: T tokens, N heads, K head width. Pair i of a head is (x[i], x[i + K/2]); position p turns it by
p * theta^(-2 i / K).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, K/2] of each position's angles; computed in fp64, returned in `dtype`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_reference(x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair of every head by the token's angles."""
    first, second = x_TNK.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def _rotate(x_TNK: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    half = x_TNK.shape[-1] // 2
    c, s = cos[:, None], sin[:, None]
    out = torch.empty_like(x_TNK)
    torch.mul(x_TNK[..., :half], c, out=out[..., :half]).addcmul_(x_TNK[..., half:], s, value=-direction)
    torch.mul(x_TNK[..., half:], c, out=out[..., half:]).addcmul_(x_TNK[..., :half], s, value=direction)
    return out


class _Rope(torch.autograd.Function):
    """A rotation's transpose is the rotation back, so the backward needs only the tables."""

    @staticmethod
    def forward(ctx, x_TNK, cos, sin):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _rotate(x_TNK, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _rotate(grad, *ctx.saved_tensors, -1.0), None, None


def rope(x_TNK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, N, K] by the tables [T, K/2] of `rope_table`."""
    return _Rope.apply(x_TNK, cos, sin) if torch.is_grad_enabled() else _rotate(x_TNK, cos, sin, 1.0)
