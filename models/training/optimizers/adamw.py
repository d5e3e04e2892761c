"""The optimizer AdamW, computed by `puna.kernels.adamw`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from puna.models.training.optimizers.base import Optimizer, Updated

if TYPE_CHECKING:
    from torch import Tensor


class AdamW(Optimizer):
    """The optimizer AdamW, with the state of torch.optim.AdamW and its names: `step` (on the CPU), `exp_avg`, `exp_avg_sq`."""

    name = "adamw"
    description = "AdamW for all weights"
    state_bytes = 8

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        import torch

        return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def update(self, weights: Sequence[Updated], rate: float, weight_decay: float, factor: Tensor | None) -> None:
        """Update the weights; weights with equal step counts share one call of the kernel."""
        from puna.kernels.adamw import adamw_

        by_step: dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
        for weight, gradient, state in weights:
            state["step"].add_(1)
            by_step.setdefault(int(state["step"]), []).append((weight, gradient, state["exp_avg"], state["exp_avg_sq"]))
        betas, eps = (self.settings.beta1, self.settings.beta2), self.settings.epsilon
        for step, tensors in by_step.items():
            adamw_(*zip(*tensors, strict=True), step=step, factor=factor, lr=rate, betas=betas, eps=eps, weight_decay=weight_decay)
