"""GaLore (Zhao et al., arXiv 2403.03507): Adam's moments of gradients projected on their strongest directions, for less memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from puna.kernels.adamw import adamw_


class GaLore(torch.optim.Optimizer):
    """AdamW in a space of `rank` directions of each matrix's shorter side, which its gradient chooses anew every `every` steps.

    With the left singular vectors P [M, r] of a gradient G [M, N], M <= N (of its transpose otherwise): w <- (1 - lr decay) w -
    lr scale P adam(P^T G). The moments go on when P changes. State: `step`, `projection` P, and of r x N the moments `exp_avg` and
    `exp_avg_sq`: M r + 2 r N numbers where AdamW keeps 2 M N. Parameters are matrices or stacks of them [E, M, N], M and N above the rank.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, rank: int, every: int = 200, scale: float = 0.25
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.rank, self.every, self.galore_scale = rank, every, scale

    @torch.no_grad()
    def step(self, factor: Tensor | None = None) -> None:  # type: ignore[override]
        """One update of all parameters with a gradient, each gradient multiplied by the scalar `factor`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                tall = parameter.shape[-2] > parameter.shape[-1]
                gradient = parameter.grad.mT if tall else parameter.grad
                update = self._update(self.state[parameter], gradient, factor, group["betas"], group["eps"])
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(update.mT if tall else update, alpha=group["lr"] * self.galore_scale)

    def _update(
        self, state: dict[str, Tensor], gradient_MN: Tensor, factor: Tensor | None, betas: tuple[float, float], eps: float
    ) -> Tensor:
        """AdamW's step of size 1 in the small space, out of it again: [.., M, N]."""
        done = int(state["step"]) if state else 0
        if done % self.every == 0:
            state["projection"] = directions(gradient_MN, self.rank)
        small = (state["projection"].mT @ gradient_MN).contiguous()
        if "step" not in state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(small), torch.zeros_like(small)
        state["step"] += 1
        update, moments = torch.zeros_like(small), (state["exp_avg"], state["exp_avg_sq"])
        adamw_(
            [update], [small], [moments[0]], [moments[1]], lr=1.0, betas=betas, eps=eps, weight_decay=0.0, step=done + 1, factor=factor
        )
        return state["projection"] @ update


def directions(gradient_MN: Tensor, rank: int) -> Tensor:
    """[.., M, rank] of the gradient's dtype: its strongest left singular vectors."""
    left: Tensor = torch.linalg.svd(gradient_MN, full_matrices=False)[0]
    return left[..., :rank].contiguous()
