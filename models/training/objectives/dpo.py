"""Preference optimization: DPO (Rafailov et al. 2023) in Llama 3's form (section 4.1.4) and related losses, and KTO of single answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from puna.models.training.losses import LOSSES, PairLogprobs
from puna.models.training.objectives.base import (
    Ask,
    Batch,
    BatchT,
    Metrics,
    Model,
    Objective,
    Targets,
    Totals,
    divide,
    sum_segments,
    target_logprobs,
)  # fmt: skip

TIE = 1e-6  # nats; smaller margins are rounding, as between a policy and an equal reference


@dataclass(frozen=True)
class DpoBatch(Batch):
    """Preference pairs over the answers of a forest. Shapes that do not fit raise ValueError.

    targets    each prompt once, with its answers as branches; the mask is False at tokens that the preference term leaves out: with the
               setting `mask_format`, those of the chat template (headers, stop tokens)
    chosen     [M] int64, rejected [M] int64: indices of answers
    reference  [A] float32: summed unmasked log-probabilities under the reference (`reference_logprobs`); None until they are computed"""

    chosen: Tensor
    rejected: Tensor
    reference: Tensor | None = None

    def __post_init__(self) -> None:
        if self.reference is not None and self.reference.shape != self.targets.lengths.shape:
            raise ValueError(f"{self.targets.answers} answers but {len(self.reference)} reference log-probs")


class PreferenceObjective(Objective[BatchT]):
    """A preference loss by name, with a negative log-likelihood (NLL) term on the better answers. Invalid values raise ValueError.

    `nll_normalization`: ``sequence``, the mean over the better answers of each answer's mean per token (Pang et al. 2024); ``tokens``, the
    mean over all tokens of the step's better answers (TRL's ``sft`` loss type). `parameters`: the preference loss's own parameters."""

    def __init__(
        self, beta: float = 0.1, nll_weight: float = 0.2, nll_normalization: Literal["sequence", "tokens"] = "sequence",
        loss: str = "sigmoid", parameters: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        if beta <= 0 or nll_weight < 0:
            raise ValueError(f"beta must be positive and nll_weight not negative: {beta}, {nll_weight}")
        if nll_normalization not in ("sequence", "tokens"):
            raise ValueError(f"nll_normalization is 'sequence' or 'tokens', not {nll_normalization!r}")
        self.beta, self.nll_weight, self.nll_normalization = beta, nll_weight, nll_normalization
        self.preference = LOSSES[loss]
        self.own = self.preference.own(parameters or {})


class Dpo(PreferenceObjective[DpoBatch]):
    """A preference loss of pairs, with an NLL term on the chosen answers.

    The NLL term covers every token of the chosen answer, the stop token included. The preference term leaves out masked tokens. If the
    stop token is masked, only the NLL term trains the model to end its answers.

    Metrics: ``accuracy``, ``margin`` (of the implicit rewards), ``chosen_reward``, ``rejected_reward``,
    ``chosen_logprob``, ``rejected_logprob``, ``nll``."""

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
                "accuracy": (margin >= TIE).float() + 0.5 * (margin.abs() < TIE).float(), "margin": margin,
                "chosen_reward": result.chosen_reward, "rejected_reward": result.rejected_reward,
                "chosen_logprob": pairs.chosen, "rejected_logprob": pairs.rejected,
            }  # fmt: skip
            metrics = {name: divide(value.sum(), count).detach() for name, value in values.items()}
            metrics["nll"] = nll.detach()
        return loss, metrics

    def _pairs(self, answers: Tensor, batch: DpoBatch) -> PairLogprobs:
        """Return the pairs' log-probabilities and token counts. `answers` [A]: each answer's summed log-probability under the policy."""
        reference = batch.reference
        if reference is None:
            if self.preference.needs_reference:
                raise ValueError("the batch has no reference log-probs: compute them with reference_logprobs")
            reference = torch.zeros_like(answers, requires_grad=False)
        tokens = batch.targets.sum_by_answer(torch.ones_like(batch.targets.tokens, dtype=torch.float32)).clamp(min=1)
        return PairLogprobs(*(values[side] for values in (answers, reference, tokens) for side in (batch.chosen, batch.rejected)))


def answer_nll(
    logprobs: Tensor, targets: Targets, chosen: Tensor, answers: float, tokens: float, normalization: Literal["sequence", "tokens"]
) -> Tensor:
    """Return the negative log-likelihood of the chosen answers, masked tokens included: a scalar in nats.

    logprobs [N] float; chosen [M] int64, indices of answers. ``sequence``: the sum of the answers' means per token, divided by `answers`,
    the step's number of chosen answers; ``tokens``: the sum over all their tokens, divided by `tokens`, the step's number of these."""
    sums = sum_segments(logprobs, targets.lengths)[chosen]
    if normalization == "tokens":
        return divide(-sums.sum(), tokens)
    return divide(-(sums / targets.lengths[chosen].clamp(min=1)).sum(), answers)


@torch.no_grad()
def reference_logprobs(model: Model, targets: Targets) -> Tensor:
    """Return [A] float32 on the CPU, without a gradient: each answer's log-probability under `model`, summed over unmasked targets."""
    moved = targets.to(next(weight.device for weight in model.parameters() if not weight.is_meta))
    return moved.sum_by_answer(target_logprobs(model, moved)).float().cpu()


@dataclass(frozen=True)
class KtoBatch(Batch):
    """Labelled answers, and mismatched ones (to other prompts) for the KL divergence from the reference. Wrong shapes raise ValueError.

    targets              each prompt once, with its answers as branches; tokens whose mask is False do not enter the preference term
    desirable            [A] bool, True for a good answer
    reference            [A] float32: summed unmasked log-probabilities under the reference
    mismatched           the same prompts, each with answers to other prompts as branches; B answers
    mismatched_reference [B] float32: summed unmasked log-probabilities of the mismatched answers under the reference"""

    desirable: Tensor
    reference: Tensor
    mismatched: Targets
    mismatched_reference: Tensor

    def __post_init__(self) -> None:
        if not self.desirable.shape == self.reference.shape == self.targets.lengths.shape:
            raise ValueError(f"{self.targets.answers} answers but {len(self.desirable)} labels, {len(self.reference)} reference log-probs")
        if self.mismatched_reference.shape != self.mismatched.lengths.shape:
            raise ValueError(f"{self.mismatched.answers} mismatched answers but {len(self.mismatched_reference)} reference log-probs")


class Kto(PreferenceObjective[KtoBatch]):
    """A loss of labelled answers, averaged over a step's answers, with the step's estimate of the KL divergence. Metrics: ``kl``,
    ``chosen_reward`` and ``rejected_reward`` (means over good and bad answers), ``margin`` (their difference), ``nll``."""

    def totals(self, batch: KtoBatch) -> dict[str, float]:
        good = batch.desirable
        return {
            "answers": float(len(good)), "chosen": float(good.sum()), "rejected": float((~good).sum()),
            "chosen_tokens": float(batch.targets.lengths[good].sum()), "mismatched": float(batch.mismatched.answers),
        }  # fmt: skip

    @torch.no_grad()
    def measure(self, ask: Ask, batch: KtoBatch) -> dict[str, float]:
        """Return the sum of the mismatched answers' log-ratios; the step's KL estimate is their mean, or 0 if the mean is negative."""
        targets = batch.mismatched
        logprobs = targets.sum_by_answer(ask(target_logprobs, targets).to(targets.mask.device))
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
            kls = kl * share * torch.ones_like(chosen)
            metrics = {"kl": kls, "chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected, "nll": nll.detach()}
        return divide(losses.sum(), totals["answers"]) + self.nll_weight * nll, metrics
