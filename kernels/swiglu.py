"""SwiGLU (Shazeer 2020): silu(gate) * up, elementwise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The definition, in the inputs' dtype."""
    return gate / (1 + torch.exp(-gate)) * up


class _SwiGLU(torch.autograd.Function):
    """Keeps only its two inputs; silu(gate) is computed again in the backward."""

    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        d_up = F.silu(gate).mul_(grad)
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, d_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, with the inputs' shape and dtype."""
    return _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)
