"""Direct preference optimisation (Rafailov et al. 2023) as Llama 3 runs it (section 4.1.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from puna.models.training.objectives.base import (
    Metrics,
    Objective,
    Targets,
    Totals,
    divide,
    sum_segments,
    target_logprobs,
)


def dpo_loss(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Loss of each preference pair.

    chosen, rejected, reference_chosen, reference_rejected [M] float: summed log-probabilities of the
    answers under the policy and the reference. Returns (losses [M], logits [M]) with
    ``logits = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))`` and
    ``losses = -log sigmoid(logits)``.
    """
    logits = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -F.logsigmoid(logits), logits


@dataclass(frozen=True)
class DpoBatch:
    """Preference pairs over the answers of a forest.

    targets    prompts once, answers as branches; its mask is False at format tokens (headers,
               terminations), which leaves them out of the preference term of both answers
    chosen     [M] int64, rejected [M] int64: indices of answers
    reference  [A] float32: summed unmasked log-probabilities under the reference (`reference_logprobs`),
               computed once and kept; None until then
    """

    targets: Targets
    chosen: Tensor
    rejected: Tensor
    reference: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> DpoBatch:
        reference = None if self.reference is None else self.reference.to(device)
        return DpoBatch(self.targets.to(device), self.chosen.to(device), self.rejected.to(device), reference)

    def with_reference(self, reference: Tensor) -> DpoBatch:
        if reference.shape != self.targets.lengths.shape:
            raise ValueError(f"{self.targets.answers} answers but {len(reference)} reference log-probs")
        return replace(self, reference=reference)


class Dpo(Objective[DpoBatch]):
    """DPO with format tokens masked and a negative log-likelihood term on the chosen answers.

    The NLL term covers every token of the chosen answer, its termination included: it is what keeps the
    model ending its answers once the preference term no longer sees that token.
    ``nll_normalization="sequence"``: the mean over chosen answers of each answer's mean (Pang et al.
    2024); ``"tokens"``: the mean over all chosen tokens of the step (TRL's ``sft`` loss type).

    Metrics: ``accuracy``, ``margin`` (of the implicit rewards), ``chosen_reward``, ``rejected_reward``,
    ``chosen_logprob``, ``rejected_logprob``, ``nll``.
    """

    def __init__(
        self,
        beta: float = 0.1,
        nll_weight: float = 0.2,
        nll_normalization: Literal["sequence", "tokens"] = "sequence",
    ) -> None:
        if beta <= 0 or nll_weight < 0:
            raise ValueError(f"beta must be positive and nll_weight not negative: {beta}, {nll_weight}")
        if nll_normalization not in ("sequence", "tokens"):
            raise ValueError(f"nll_normalization is 'sequence' or 'tokens', not {nll_normalization!r}")
        self.beta = beta
        self.nll_weight = nll_weight
        self.nll_normalization = nll_normalization

    def totals(self, batch: DpoBatch) -> dict[str, float]:
        tokens = batch.targets.lengths[batch.chosen].sum()
        return {"pairs": float(len(batch.chosen)), "chosen_tokens": float(tokens)}

    def share(self, model: Any, batch: DpoBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        if batch.reference is None:
            raise ValueError("the batch has no reference log-probs: compute them with reference_logprobs")
        targets, pairs = batch.targets, totals["pairs"]
        # Log-probabilities, not `kernels.linear_preference_loss`: neither keeps logits, and that one gives no log-probs,
        # of which the NLL term (with the tokens that the mask hides) and six metrics are made. What it would save is one of
        # four products of the output layer where both answers of a pair fit one chunk of logits; with longer ones nothing.
        logprobs = target_logprobs(model, targets)
        answers = targets.sum_by_answer(logprobs)
        chosen, rejected = answers[batch.chosen], answers[batch.rejected]
        reference_chosen, reference_rejected = batch.reference[batch.chosen], batch.reference[batch.rejected]
        losses, logits = dpo_loss(chosen, rejected, reference_chosen, reference_rejected, self.beta)
        nll = self._nll(logprobs, batch, totals)
        loss = divide(losses.sum(), pairs) + self.nll_weight * nll
        with torch.no_grad():
            values = {
                "accuracy": (logits > 0).float() + 0.5 * (logits == 0).float(),
                "margin": logits,
                "chosen_reward": self.beta * (chosen - reference_chosen),
                "rejected_reward": self.beta * (rejected - reference_rejected),
                "chosen_logprob": chosen,
                "rejected_logprob": rejected,
            }
            metrics = {name: divide(value.sum(), pairs).detach() for name, value in values.items()}
            metrics["nll"] = nll.detach()
        return loss, metrics

    def _nll(self, logprobs: Tensor, batch: DpoBatch, totals: Totals) -> Tensor:
        sums = sum_segments(logprobs, batch.targets.lengths)[batch.chosen]
        if self.nll_normalization == "tokens":
            return divide(-sums.sum(), totals["chosen_tokens"])
        lengths = batch.targets.lengths[batch.chosen].clamp(min=1)
        return divide(-(sums / lengths).sum(), totals["pairs"])


@torch.no_grad()
def reference_logprobs(model: Any, targets: Targets) -> Tensor:
    """[A] float32 on the CPU: each answer's summed unmasked log-probability, without a gradient."""
    moved = targets.to(next(model.parameters()).device)
    return moved.sum_by_answer(target_logprobs(model, moved)).float().cpu()


def cache_reference(model: Any, batches: Iterable[DpoBatch]) -> list[DpoBatch]:
    """The batches with the reference's log-probs filled in: the reference runs once, not every epoch."""
    return [batch.with_reference(reference_logprobs(model, batch.targets)) for batch in batches]
