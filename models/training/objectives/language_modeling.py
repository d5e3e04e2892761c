"""Next-token prediction on whole documents, and on answers only (supervised fine-tuning)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from puna.models.training.objectives.base import Metrics, Model, Objective, Targets, Totals, divide


def language_modeling_loss(logprobs: Tensor, mask: Tensor, total: float) -> Tensor:
    """Cross-entropy in nats per counted token.

    logprobs [N] float, mask [N] bool, total: counted tokens of the whole step -> scalar,
    ``-sum(logprobs[mask]) / total``; 0 where nothing counts.
    """
    return divide(-torch.where(mask, logprobs, logprobs.new_zeros(())).sum(), total)


def token_loss(model: Model, targets: Targets, total: float) -> Tensor:
    """`language_modeling_loss` of a model on targets, by its fused output layer and loss."""
    weights = targets.mask.float() / total if total else torch.zeros_like(targets.mask, dtype=torch.float32)
    loss: Tensor = model.cross_entropy(targets.forest, targets.positions, targets.tokens, weights)
    return loss


class LanguageModeling(Objective[Targets]):
    """Mean cross-entropy over the step's target tokens. Metric: ``bits_per_token``."""

    def totals(self, batch: Targets) -> dict[str, float]:
        return {"tokens": float(batch.mask.sum())}

    def loss(self, model: Model, batch: Targets, totals: Totals) -> tuple[Tensor, Metrics]:
        loss = token_loss(model, batch, totals["tokens"])
        return loss, {"bits_per_token": loss.detach() / math.log(2.0)}
