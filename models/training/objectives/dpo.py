"""Preference optimization of pairs: DPO (Rafailov et al. 2023) as Llama 3 runs it (section 4.1.4), and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from puna.models.training.losses import LOSSES, PairLogprobs
from puna.models.training.objectives.base import (
    Metrics,
    Model,
    Objective,
    Targets,
    Totals,
    divide,
    sum_segments,
    target_logprobs,
)


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

    def __post_init__(self) -> None:
        if self.reference is not None and self.reference.shape != self.targets.lengths.shape:
            raise ValueError(f"{self.targets.answers} answers but {len(self.reference)} reference log-probs")

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> DpoBatch:
        reference = None if self.reference is None else self.reference.to(device)
        return DpoBatch(self.targets.to(device), self.chosen.to(device), self.rejected.to(device), reference)


class Dpo(Objective[DpoBatch]):
    """A preference loss of pairs, by name, with format tokens masked and a negative log-likelihood term on the chosen answers.

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
        loss: str = "sigmoid",
        parameters: Mapping[str, float] | None = None,
    ) -> None:
        if beta <= 0 or nll_weight < 0:
            raise ValueError(f"beta must be positive and nll_weight not negative: {beta}, {nll_weight}")
        if nll_normalization not in ("sequence", "tokens"):
            raise ValueError(f"nll_normalization is 'sequence' or 'tokens', not {nll_normalization!r}")
        self.beta, self.nll_weight, self.nll_normalization = beta, nll_weight, nll_normalization
        self.preference = LOSSES[loss]
        self.own = self.preference.own(parameters or {})

    def totals(self, batch: DpoBatch) -> dict[str, float]:
        tokens = batch.targets.lengths[batch.chosen].sum()
        return {"pairs": float(len(batch.chosen)), "chosen_tokens": float(tokens)}

    def loss(self, model: Model, batch: DpoBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        targets, count = batch.targets, totals["pairs"]
        logprobs = target_logprobs(model, targets)
        pairs = self._pairs(targets.sum_by_answer(logprobs), batch)
        result = self.preference.function(pairs, self.beta, **self.own)
        nll = answer_nll(logprobs, targets, batch.chosen, count, totals["chosen_tokens"], self.nll_normalization)
        loss = divide(result.losses.sum(), count) + self.nll_weight * nll
        with torch.no_grad():
            margin = result.chosen_reward - result.rejected_reward
            values = {
                "accuracy": (margin > 0).float() + 0.5 * (margin == 0).float(),
                "margin": margin,
                "chosen_reward": result.chosen_reward,
                "rejected_reward": result.rejected_reward,
                "chosen_logprob": pairs.chosen,
                "rejected_logprob": pairs.rejected,
            }
            metrics = {name: divide(value.sum(), count).detach() for name, value in values.items()}
            metrics["nll"] = nll.detach()
        return loss, metrics

    def _pairs(self, answers: Tensor, batch: DpoBatch) -> PairLogprobs:
        """Return the log-probabilities of each pair, of answers [A] float."""
        reference = batch.reference
        if reference is None:
            if self.preference.needs_reference:
                raise ValueError("the batch has no reference log-probs: compute them with reference_logprobs")
            reference = torch.zeros_like(answers, requires_grad=False)
        tokens = batch.targets.sum_by_answer(torch.ones_like(batch.targets.tokens, dtype=torch.float32)).clamp(min=1)
        return PairLogprobs(
            chosen=answers[batch.chosen],
            rejected=answers[batch.rejected],
            reference_chosen=reference[batch.chosen],
            reference_rejected=reference[batch.rejected],
            chosen_tokens=tokens[batch.chosen],
            rejected_tokens=tokens[batch.rejected],
        )


def answer_nll(
    logprobs: Tensor, targets: Targets, chosen: Tensor, answers: float, tokens: float, normalization: Literal["sequence", "tokens"]
) -> Tensor:
    """Return the negative log-likelihood of whole answers, masked tokens included: a scalar in nats.

    logprobs [N] float; chosen [M] int64, indices of answers. ``sequence``: each answer's mean, over the step's `answers`;
    ``tokens``: the sum over the step's `tokens`.
    """
    sums = sum_segments(logprobs, targets.lengths)[chosen]
    if normalization == "tokens":
        return divide(-sums.sum(), tokens)
    return divide(-(sums / targets.lengths[chosen].clamp(min=1)).sum(), answers)


@torch.no_grad()
def reference_logprobs(model: Model, targets: Targets) -> Tensor:
    """Return [A] float32 on the CPU, each answer's summed unmasked log-probability, without a gradient."""
    moved = targets.to(next(model.parameters()).device)
    return moved.sum_by_answer(target_logprobs(model, moved)).float().cpu()
