"""AdamW of `puna.kernels.adamw` over groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from puna.kernels.adamw import adamw_


class AdamW(torch.optim.Optimizer):
    """AdamW with the moments of torch.optim.AdamW, by its names: `step` (on CPU), `exp_avg`, `exp_avg_sq`.

    Groups may have a learning rate `lr` and a `weight_decay` of their own.
    """

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, factor: Tensor | None = None) -> None:  # type: ignore[override]
        """One update of all parameters with a gradient, each gradient multiplied by the scalar `factor`."""
        for group in self.param_groups:
            settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            for step, tensors in self._by_step(group["params"]).items():
                adamw_(*zip(*tensors, strict=True), step=step, factor=factor, **settings)

    def _by_step(self, parameters: list[Tensor]) -> dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
        """Parameters with a gradient, their gradients and moments, by how often they will have been updated."""
        found: dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            four = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            found.setdefault(int(state["step"]), []).append(four)
        return found
