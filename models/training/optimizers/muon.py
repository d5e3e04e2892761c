"""Muon (Jordan et al. 2024): orthogonalized momentum, for the matrices inside the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from puna.models.training.optimizers.base import Group, Optimizer, Updated

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.training.settings import OptimizerSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a x + b x^3 + c x^5, whose iteration takes singular values in (0, 1] close to 1
Momentum = Annotated[float, Field(ge=0, lt=1, description="Share of the momentum that a step keeps")]


def orthogonalize(x_MN: Tensor, iterations: int = 5) -> Tensor:
    """Return approximately U V^T of each matrix's singular value decomposition, [..., M, N].

    Singular values above 0.002 of the Frobenius norm end in 0.68 .. 1.21. Newton-Schulz iteration: in bf16 on a GPU, else in x's dtype."""
    a, b, c = COEFFICIENTS
    x = x_MN.bfloat16() if x_MN.is_cuda else x_MN
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm: Tensor = x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(x_MN.dtype)


class Muon(Optimizer):
    """Muon: m <- momentum m + g, then w <- (1 - lr decay) w - lr 0.2 sqrt(max(M, N)) orthogonalize(g + momentum m).

    The factor 0.2 sqrt(max(M, N)) gives each update the size of a typical AdamW update (Liu et al. 2025), so that AdamW's learning rate
    and weight decay suit Muon, too. Weights are matrices [M, N] or stacks of matrices [E, M, N]."""

    name = "muon"
    description = "Muon for the matrices inside the layers"
    state_bytes = 4
    whole_matrices = True

    def __init__(self, groups: Sequence[Group], settings: OptimizerSettings, *, momentum: Momentum = 0.95) -> None:
        self.momentum = momentum
        super().__init__(groups, settings)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {"momentum": weight.new_zeros(weight.shape)}

    def update(self, weights: Sequence[Updated], rate: float, weight_decay: float, factor: Tensor | None) -> None:
        for weight, raw, state in weights:
            gradient = raw if factor is None else raw * factor
            momentum = state["momentum"].mul_(self.momentum).add_(gradient)
            update = orthogonalize(gradient.add(momentum, alpha=self.momentum))
            size = 0.2 * math.sqrt(max(weight.shape[-2:]))
            weight.mul_(1.0 - rate * weight_decay).add_(update, alpha=-rate * size)
