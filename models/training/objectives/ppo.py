"""Proximal policy optimisation (Schulman et al. 2017) on answers, as pure functions and two objectives.

Everything is flat: N answer tokens, answer by answer, no padding. Advantages and returns come from `kernels.advantages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from puna.models.training.objectives.base import Batch, Metrics, Model, Objective, Targets, Totals, divide


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return [N] values shifted and scaled to mean 0 and variance 1 over the mask; 0 outside of it.

    The variance is the sample's, over one less than the values, as in TRL's `masked_whiten`; with fewer than two, all are 0.
    """
    weight = mask.to(values.dtype)
    count = weight.sum()
    mean = (values * weight).sum() / count.clamp(min=1)
    centred = (values - mean) * weight
    return centred * torch.rsqrt((centred * centred).sum() / (count - 1).clamp(min=1) + epsilon)


def group_advantages(rewards: Tensor, baseline: Literal["grpo", "rloo"], epsilon: float = 1e-6) -> Tensor:
    """Return the advantages of answers by the others to their prompt: rewards [P, n] -> [P, n].

    ``grpo``: ``(r - mean) / (deviation + epsilon)`` with the sample's deviation (Shao et al. 2024, section 4.1.2); ``rloo``: r less
    the mean of the other n - 1, which is ``(r - mean) n / (n - 1)`` (Kool et al. 2019; Ahmadian et al. 2024). Equal rewards give 0.
    """
    count = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)
    if baseline == "rloo":
        return centred * (count / (count - 1))
    return centred / (rewards.std(1, keepdim=True) + epsilon)


def ppo_policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float,
    total: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Return the clipped surrogate, a mean over the step's answer tokens.

    logprobs, old, advantages [N] float, mask [N] bool, total: counted tokens of the whole step ->
    scalar ``-sum(min(ratio * a, clamp(ratio, 1 - clip, 1 + clip) * a)[mask]) / total`` with
    ``ratio = exp(logprobs - old)``. With `clip_high` that is the range above 1 (DAPO, Yu et al. 2025); with `dual_clip` a negative
    advantage counts at most so many times, however large the ratio (Ye et al. 2020).
    """
    # Masked targets get ratio 1 before exp: where() alone would still pass inf * 0 = NaN backwards.
    ratio = torch.where(mask, logprobs - old, logprobs.new_zeros(())).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + (clip_high or clip)) * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return divide(-torch.where(mask, surrogate, surrogate.new_zeros(())).sum(), total)


def ppo_value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, total: float) -> Tensor:
    """Return half the squared error to the returns, the step away from the old values clipped.

    values, old, returns [N] float, mask [N] bool, total: counted tokens of the whole step -> scalar
    ``0.5 * sum(max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2)[mask]) / total``.
    """
    near = old + (values - old).clamp(-clip, clip)
    worst = torch.maximum((values - returns).square(), (near - returns).square())
    return divide(0.5 * torch.where(mask, worst, worst.new_zeros(())).sum(), total)


@dataclass(frozen=True)
class PpoBatch(Batch):
    """Sampled answers with the constants of their rollout; all [N] float32, in the order of the targets.

    `left_out`: answer tokens of the update that are in no batch since they teach nothing; the mean is over them, too.
    """

    logprobs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor
    left_out: int = 0

    def __post_init__(self) -> None:
        for name in ("logprobs", "advantages", "values", "returns"):
            if getattr(self, name).shape != self.targets.tokens.shape:
                raise ValueError(f"{name} has {len(getattr(self, name))} values for {len(self.targets.tokens)} targets")


class Ppo(Objective[PpoBatch]):
    """The policy's objective: clipped surrogate, less `entropy_weight` times the mean entropy.

    `temperature` is the one the answers were sampled at: old and new log-probs are of the same
    distribution. Metrics, means over the tokens of the batches: ``clip_fraction`` (tokens whose ratio left the clip range),
    ``approximate_kl`` (mean of ``ratio - 1 - log ratio``, to the policy that sampled), ``entropy``.
    """

    def __init__(
        self,
        clip: float = 0.2,
        entropy_weight: float = 0.0,
        temperature: float = 1.0,
        clip_high: float | None = None,
        dual_clip: float | None = None,
    ) -> None:
        if not 0 < clip < 1 or entropy_weight < 0 or temperature <= 0:
            raise ValueError(f"0 < clip < 1, entropy_weight >= 0, temperature > 0: {clip}, {entropy_weight}, {temperature}")
        self.clip, self.clip_high, self.dual_clip = clip, clip_high or clip, dual_clip
        self.entropy_weight, self.temperature = entropy_weight, temperature

    def totals(self, batch: PpoBatch) -> dict[str, float]:
        tokens = float(batch.targets.mask.sum())
        return {"tokens": tokens + batch.left_out, "read": tokens}

    def loss(self, model: Model, batch: PpoBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        targets, tokens, read = batch.targets, totals["tokens"], totals["read"]
        logprobs, entropy = model.token_logprobs(targets.forest, targets.positions, targets.tokens, temperature=self.temperature)
        clips = (self.clip_high, self.dual_clip)
        loss = ppo_policy_loss(logprobs, batch.logprobs, batch.advantages, targets.mask, self.clip, tokens, *clips)
        mean_entropy = divide(torch.where(targets.mask, entropy, entropy.new_zeros(())).sum(), read)
        if self.entropy_weight:
            loss = loss - self.entropy_weight * mean_entropy
        with torch.no_grad():
            log_ratio = torch.where(targets.mask, logprobs - batch.logprobs, logprobs.new_zeros(()))
            ratio = log_ratio.exp()
            clipped = ((ratio < 1.0 - self.clip) | (ratio > 1.0 + self.clip_high)).float()
            kl = ratio - 1.0 - log_ratio
        metrics = {
            "clip_fraction": divide(clipped.sum(), read),
            "approximate_kl": divide(kl.sum(), read),
            "entropy": mean_entropy.detach(),
        }
        return loss, metrics


class Value(Objective[PpoBatch]):
    """The critic's objective: clipped value loss of a model with a scalar head.

    A state's value is read at the position that predicts its next token, so it depends on the answer before that token only. Metric:
    ``value_error``, the unclipped mean squared error.
    """

    def __init__(self, clip: float = 0.2) -> None:
        if clip <= 0:
            raise ValueError(f"clip must be positive: {clip}")
        self.clip = clip

    def totals(self, batch: PpoBatch) -> dict[str, float]:
        return {"tokens": float(batch.targets.mask.sum())}

    def loss(self, model: Model, batch: PpoBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        values = token_values(model, batch.targets)
        mask, tokens = batch.targets.mask, totals["tokens"]
        loss = ppo_value_loss(values, batch.values, batch.returns, mask, self.clip, tokens)
        with torch.no_grad():
            error = torch.where(mask, (values - batch.returns).square(), values.new_zeros(()))
        return loss, {"value_error": divide(error.sum(), tokens)}


def token_values(model: Model, targets: Targets) -> Tensor:
    """Return [N] float, the scalar head where each target is predicted."""
    values: Tensor = model.scalar(model.hidden(targets.forest)[targets.positions])
    return values.float()
