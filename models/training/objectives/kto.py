"""KTO (Ethayarajh et al. 2024): answers that are called good or bad one by one, not in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from puna.models.training.losses import LOSSES
from puna.models.training.objectives.base import Metrics, Model, Objective, Targets, Totals, divide, target_logprobs
from puna.models.training.objectives.dpo import answer_nll


@dataclass(frozen=True)
class KtoBatch:
    """Labelled answers, and answers to other prompts by which the distance to the reference is estimated.

    targets              prompts once, answers as branches; its mask leaves tokens out of the preference term
    desirable            [A] bool, True for a good answer
    reference            [A] float32: summed unmasked log-probabilities under the reference
    mismatched           the same prompts, each with answers to other prompts as branches; B answers
    mismatched_reference [B] float32: theirs
    """

    targets: Targets
    desirable: Tensor
    reference: Tensor
    mismatched: Targets
    mismatched_reference: Tensor

    def __post_init__(self) -> None:
        if not self.desirable.shape == self.reference.shape == self.targets.lengths.shape:
            raise ValueError(f"{self.targets.answers} answers but {len(self.desirable)} labels, {len(self.reference)} reference log-probs")
        if self.mismatched_reference.shape != self.mismatched.lengths.shape:
            raise ValueError(f"{self.mismatched.answers} mismatched answers but {len(self.mismatched_reference)} reference log-probs")

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> KtoBatch:
        return replace(
            self,
            targets=self.targets.to(device),
            desirable=self.desirable.to(device),
            reference=self.reference.to(device),
            mismatched=self.mismatched.to(device),
            mismatched_reference=self.mismatched_reference.to(device),
        )


class Kto(Objective[KtoBatch]):
    """A loss of single answers, by name: the mean over a step's answers, at the step's distance to the reference.

    Metrics: ``kl``, ``chosen_reward``, ``rejected_reward``, ``margin`` (of their means), ``nll``.
    """

    def __init__(
        self,
        beta: float = 0.1,
        nll_weight: float = 0.0,
        nll_normalization: Literal["sequence", "tokens"] = "sequence",
        loss: str = "kto",
        parameters: Mapping[str, float] | None = None,
    ) -> None:
        if beta <= 0 or nll_weight < 0:
            raise ValueError(f"beta must be positive, nll_weight not negative: {beta}, {nll_weight}")
        self.beta, self.nll_weight, self.nll_normalization = beta, nll_weight, nll_normalization
        self.preference = LOSSES[loss]
        self.own = self.preference.own(parameters or {})

    def totals(self, batch: KtoBatch) -> dict[str, float]:
        good = batch.desirable
        return {
            "answers": float(len(good)),
            "chosen": float(good.sum()),
            "rejected": float((~good).sum()),
            "chosen_tokens": float(batch.targets.lengths[good].sum()),
            "mismatched": float(batch.mismatched.answers),
        }

    @torch.no_grad()
    def measure(self, model: Model, batch: KtoBatch) -> dict[str, float]:
        """Return the sum of the mismatched answers' log-ratios, which the step's estimate is the mean of."""
        logprobs = batch.mismatched.sum_by_answer(target_logprobs(model, batch.mismatched))
        return {"mismatched_ratio": float((logprobs - batch.mismatched_reference).sum())}

    def loss(self, model: Model, batch: KtoBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        logprobs = target_logprobs(model, batch.targets)
        ratios = batch.targets.sum_by_answer(logprobs) - batch.reference
        kl = max(0.0, totals["mismatched_ratio"] / max(totals["mismatched"], 1.0))
        good = batch.desirable
        losses = self.preference.function(ratios, good, kl, self.beta, **self.own)
        nll = answer_nll(logprobs, batch.targets, good.nonzero()[:, 0], totals["chosen"], totals["chosen_tokens"], self.nll_normalization)
        with torch.no_grad():
            rewards = self.beta * ratios
            chosen, rejected = divide(rewards[good].sum(), totals["chosen"]), divide(rewards[~good].sum(), totals["rejected"])
            share = len(good) / totals["answers"]
            metrics = {
                "kl": kl * share * torch.ones_like(chosen),
                "chosen_reward": chosen,
                "rejected_reward": rejected,
                "margin": chosen - rejected,
                "nll": nll.detach(),
            }
        return divide(losses.sum(), totals["answers"]) + self.nll_weight * nll, metrics
