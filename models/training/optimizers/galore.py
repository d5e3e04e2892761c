"""GaLore (Zhao et al., arXiv 2403.03507): AdamW on low-rank projections of the gradients, which saves memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from puna.models.training.optimizers.base import Group, Optimizer, Updated

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.training.settings import OptimizerSettings

Rank = Annotated[int, Field(ge=1, description="Rank of the projected gradients; AdamW updates matrices with a side of at most this")]
Every = Annotated[int, Field(ge=1, description="Steps between two computations of the projection")]
Scale = Annotated[float, Field(gt=0, le=10, description="Factor of the learning rate, relative to the other weights")]


class GaLore(Optimizer):
    """AdamW on gradients projected to `rank` directions of a matrix's shorter side. The directions are renewed every `every` steps.

    With the top r left singular vectors P [M, r] of a gradient G [M, N], M <= N (else of its transpose): w <- (1 - lr decay) w -
    lr scale P adam(P^T G). The moments stay when P changes. State: `step`, `projection` P, and the moments [r, N] `exp_avg` and
    `exp_avg_sq`: M r + 2 r N numbers where AdamW keeps 2 M N. Weights: matrices [M, N] or stacks [E, M, N], with M and N above r."""

    name = "galore"
    description = "GaLore, AdamW on projected gradients, for the matrices inside the layers"
    state_bytes = 0
    whole_matrices = True

    def __init__(
        self, groups: Sequence[Group], settings: OptimizerSettings, *, rank: Rank = 128, every: Every = 200, scale: Scale = 0.25
    ) -> None:
        self.rank, self.every, self.scale = rank, every, scale
        super().__init__(groups, settings)

    @classmethod
    def takes(cls, weight: Tensor, **own: float) -> bool:
        return min(weight.shape[-2:]) > own["rank"]

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        import torch

        *stack, short, long = *weight.shape[:-2], *sorted(weight.shape[-2:])
        moments = weight.new_zeros(*stack, self.rank, long), weight.new_zeros(*stack, self.rank, long)
        projection = weight.new_zeros(*stack, short, self.rank)
        return {"step": torch.zeros(()), "projection": projection, "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def update(self, weights: Sequence[Updated], rate: float, weight_decay: float, factor: Tensor | None) -> None:
        for weight, gradient, state in weights:
            tall = weight.shape[-2] > weight.shape[-1]
            update = self._projected_step(state, gradient.mT if tall else gradient, factor)
            weight.mul_(1.0 - rate * weight_decay)
            weight.add_(update.mT if tall else update, alpha=rate * self.scale)

    def _projected_step(self, state: Mapping[str, Tensor], gradient_MN: Tensor, factor: Tensor | None) -> Tensor:
        """Return AdamW's update for the projected gradient at learning rate 1, projected back to [..., M, N]; change `state` in place."""
        from puna.kernels.adamw import adamw_

        if int(state["step"]) % self.every == 0:
            state["projection"].copy_(directions(gradient_MN, self.rank))
        state["step"].add_(1)
        small = (state["projection"].mT @ gradient_MN).contiguous()
        update = small.new_zeros(small.shape)
        adamw_(
            [update], [small], [state["exp_avg"]], [state["exp_avg_sq"]], lr=1.0, betas=(self.settings.beta1, self.settings.beta2),
            eps=self.settings.epsilon, weight_decay=0.0, step=int(state["step"]), factor=factor,
        )
        return state["projection"] @ update


def directions(gradient_MN: Tensor, rank: int) -> Tensor:
    """Return the top `rank` left singular vectors of a gradient, [..., M, rank] in its dtype."""
    import torch

    left: Tensor = torch.linalg.svd(gradient_MN, full_matrices=False)[0]
    return left[..., :rank].contiguous()
