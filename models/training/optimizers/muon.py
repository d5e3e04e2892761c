"""Muon (Jordan et al. 2024): momentum made orthogonal, for the matrices inside the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial a x + b x^3 + c x^5 that takes singular values in (0, 1] close to 1, by repetition."""


def orthogonalise(x_MN: Tensor, iterations: int = 5) -> Tensor:
    """About U V^T of each matrix's singular value decomposition [..., M, N]; singular values end in 0.7 .. 1.2.

    Newton-Schulz iteration, in bf16 on a GPU and in the input's dtype elsewhere.
    """
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


class Muon(torch.optim.Optimizer):
    """w <- (1 - lr decay) w - lr 0.2 sqrt(max(M, N)) orthogonalise(g + momentum m), m <- momentum m + g.

    The factor gives each update the size of a typical AdamW update (Liu et al. 2025), so that learning rate and
    weight decay mean the same in both. Parameters are matrices [M, N] or stacks of them [E, M, N].
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, factor: Tensor | None = None) -> None:  # type: ignore[override]
        """One update of all parameters with a gradient, each gradient multiplied by the scalar `factor`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                gradient = parameter.grad if factor is None else parameter.grad * factor
                momentum = state["momentum"].mul_(group["momentum"]).add_(gradient)
                update = orthogonalise(gradient.add(momentum, alpha=group["momentum"]))
                size = 0.2 * math.sqrt(max(parameter.shape[-2:]))
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * size)


def inner_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon is made for: matrices of the layers, not embeddings, heads or routers."""
    skipped = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    outer = ("lm_head.weight", "score.weight", "mlp.gate.weight")
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and id(parameter) not in skipped and not name.endswith(outer)
    }
