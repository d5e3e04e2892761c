"""Proximal policy optimization (Schulman et al. 2017) on answers, as pure functions and two objectives.

Tensors are flat: N answer tokens, answer by answer, without padding. Advantages and returns come from `kernels.advantages`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from puna.models.training.objectives.base import Batch, Metrics, Model, Objective, Targets, Totals, divide
from puna.models.training.rl_settings import Baseline, Normalizer, Ratio, Surrogate


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return [N] values shifted and scaled to mean 0 and variance 1 where `mask` is True; 0 elsewhere.

    The sample variance (over count - 1) is used, as in TRL's `masked_whiten`; with fewer than two unmasked values, all results are 0."""
    weight = mask.to(values.dtype)
    count = weight.sum()
    mean = (values * weight).sum() / count.clamp(min=1)
    centred = (values - mean) * weight
    return centred * torch.rsqrt((centred * centred).sum() / (count - 1).clamp(min=1) + epsilon)


def group_advantages(rewards: Tensor, baseline: Baseline, epsilon: float = 1e-6) -> Tensor:
    """Return each answer's advantage over the n answers to the same prompt: rewards [P, n] -> [P, n].

    ``grpo``: ``(r - mean) / (sample deviation + epsilon)`` (Shao et al. 2024, section 4.1.2); ``mean``: ``r - mean``
    (Dr. GRPO, Liu et al. 2025); ``rloo``: r less the mean of the other n - 1, which is ``(r - mean) n / (n - 1)`` (Kool et al. 2019;
    Ahmadian et al. 2024). Equal rewards give 0. ``grpo`` and ``rloo`` need n >= 2."""
    count = rewards.shape[1]
    # The mean of equal rewards may differ from them by rounding; that of their differences is exactly 0.
    differences = rewards - rewards[:, :1]
    centred = differences - differences.mean(1, keepdim=True)
    if baseline == "grpo":
        return centred / (differences.std(1, keepdim=True) + epsilon)
    return centred * (count / (count - 1)) if baseline == "rloo" else centred


def step_advantages(steps: Sequence[Sequence[tuple[int, float]]], baseline: Baseline) -> Tensor:
    """Return the advantages [tokens] of a prompt's answers, answer by answer, from the rewards of the answers' steps.

    steps: for each answer, (number of tokens up to a step's end, the step's reward); the last step ends the answer. `group_advantages`
    turns the rewards of all steps into advantages; a token's advantage is the sum over its own and later steps (Shao et al., 4.1.3)."""
    flat = group_advantages(torch.tensor([[reward for some in steps for _, reward in some]]), baseline)[0]
    parts = zip(flat.split([len(some) for some in steps]), steps, strict=True)
    sums = [(part.flip(0).cumsum(0).flip(0), torch.tensor([0, *(end for end, _ in some)]).diff()) for part, some in parts]
    return torch.cat([later.repeat_interleave(sizes) for later, sizes in sums])


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None) -> Tensor:
    """Return [N] ``min(ratio * a, clamp(ratio, 1 - clip, 1 + clip) * a)`` with ``ratio = exp(log_ratio)``.

    log_ratio, advantages [N] float. `clip_high`: the clip range above 1; None or 0: `clip` (DAPO, Yu et al. 2025)."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + (clip_high or clip)) * advantages)


def cispo_surrogate(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return [N] ``min(ratio, 1 + clip) * a * logprobs``, whose first factor passes no gradient (CISPO, MiniMax 2025).

    All [N] float; ``ratio = exp(log_ratio)``. Tokens out of range keep their gradient. As in the authors' runs, there is no lower bound."""
    return log_ratio.exp().clamp(max=1.0 + clip).detach() * advantages * logprobs


def importance_weights(logprobs: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """Return [N] ``min(p / q, cap)`` of tokens that another engine sampled (truncated importance sampling, Yao et al. 2025).

    logprobs, sampled [N] float: log p under the trained policy, and log q under the engine that sampled the tokens."""
    return (logprobs - sampled).exp().clamp(max=cap)


def answer_tokens(targets: Targets) -> Tensor:
    """Return [N] float32: for each target, the number of unmasked targets of its answer, at least 1."""
    counts = targets.sum_by_answer(torch.ones_like(targets.tokens, dtype=torch.float32)).clamp(min=1)
    return counts.repeat_interleave(targets.lengths)


def sequence_log_ratio(log_ratio: Tensor, targets: Targets) -> Tensor:
    """Return [N]: for each target, the mean log-ratio of its answer's unmasked targets (GSPO, Zheng et al. 2025)."""
    return targets.sum_by_answer(log_ratio).repeat_interleave(targets.lengths) / answer_tokens(targets)


def ppo_value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, total: float) -> Tensor:
    """Return half the mean over unmasked targets of the squared error to the returns, or the clipped squared error if that is larger.

    values, old, returns [N] float, mask [N] bool, total: number of unmasked tokens of the whole step -> scalar
    ``0.5 * sum(max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2)[mask]) / total``."""
    near = old + (values - old).clamp(-clip, clip)
    worst = torch.maximum((values - returns).square(), (near - returns).square())
    return divide(0.5 * torch.where(mask, worst, worst.new_zeros(())).sum(), total)


@dataclass(frozen=True)
class PpoBatch(Batch):
    """Sampled answers with the constants of their rollout; all tensors are [N] float32, in the targets' order. Others raise ValueError.

    `importance`: factors on the policy's loss, by token; None: 1. `left_out`: number of the update's answer tokens that are in no batch,
    because they have no gradient; `answers_left_out`: number of answers that these tokens form. The normalizers count both."""

    logprobs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor
    importance: Tensor | None = None
    left_out: int = 0
    answers_left_out: int = 0

    def __post_init__(self) -> None:
        for name in ("logprobs", "advantages", "values", "returns"):
            if getattr(self, name).shape != self.targets.tokens.shape:
                raise ValueError(f"{name} has {len(getattr(self, name))} values for {len(self.targets.tokens)} targets")


class Ppo(Objective[PpoBatch]):
    """The policy's loss: the negative surrogate of the reward, less `entropy_weight` times the mean entropy.

    `temperature`: the sampling temperature, so that old and new log-probs are comparable. `surrogate`, `ratio`, `normalizer`: see
    `GrpoSettings`; `max_tokens`: limit of an answer, for the constant normalizer. Metrics are means over the batches' unmasked tokens:
    ``clip_fraction`` (tokens whose ratio left the clip range), ``approximate_kl`` (of ``ratio - 1 - log ratio``, an estimate of the KL
    divergence from the sampling policy), ``entropy``. The constructor raises ValueError for values out of range."""

    def __init__(
        self, clip: float = 0.2, entropy_weight: float = 0.0, temperature: float = 1.0, clip_high: float | None = None,
        surrogate: Surrogate = "clipped", ratio: Ratio = "token", normalizer: Normalizer = "tokens", max_tokens: int = 1,
    ) -> None:  # fmt: skip
        if not 0 < clip < 1 or entropy_weight < 0 or temperature <= 0:
            raise ValueError(f"0 < clip < 1, entropy_weight >= 0, temperature > 0: {clip}, {entropy_weight}, {temperature}")
        self.clip, self.clip_high = clip, clip_high or clip
        self.entropy_weight, self.temperature = entropy_weight, temperature
        self.low = 0.0 if surrogate == "cispo" else 1.0 - clip
        self.surrogate, self.ratio, self.normalizer, self.max_tokens = surrogate, ratio, normalizer, max_tokens

    def totals(self, batch: PpoBatch) -> dict[str, float]:
        tokens, answers = float(batch.targets.mask.sum()), float(batch.targets.answers + batch.answers_left_out)
        counts = {"tokens": tokens + batch.left_out, "answers": answers, "constant": answers * self.max_tokens}
        return {"normalizer": counts[self.normalizer], "read": tokens}

    def loss(self, model: Model, batch: PpoBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        targets, read = batch.targets, totals["read"]
        logprobs, entropy = model.token_logprobs(targets.forest, targets.positions, targets.tokens, temperature=self.temperature)
        zero = logprobs.new_zeros(())
        # Masked targets get log-ratio 0 before exp: a bare where() would still pass inf * 0 = NaN backwards.
        log_ratio = torch.where(targets.mask, logprobs - batch.logprobs, zero)
        weight = sequence_log_ratio(log_ratio, targets) if self.ratio == "sequence" else log_ratio
        if self.surrogate == "cispo":
            gain = cispo_surrogate(logprobs, weight, batch.advantages, self.clip_high)
        else:
            gain = clipped_surrogate(weight, batch.advantages, self.clip, self.clip_high)
        gain = torch.where(targets.mask, gain if batch.importance is None else gain * batch.importance, zero)
        if self.normalizer == "answers":
            gain = gain / answer_tokens(targets)
        loss = divide(-gain.sum(), totals["normalizer"])
        mean_entropy = divide(torch.where(targets.mask, entropy, zero).sum(), read)
        if self.entropy_weight:
            loss = loss - self.entropy_weight * mean_entropy
        with torch.no_grad():
            ratio = weight.exp()
            clipped = (((ratio < self.low) | (ratio > 1.0 + self.clip_high)) & targets.mask).float()
            kl = log_ratio.exp() - 1.0 - log_ratio
        metrics = {"clip_fraction": divide(clipped.sum(), read), "approximate_kl": divide(kl.sum(), read), "entropy": mean_entropy.detach()}
        return loss, metrics


class Value(Objective[PpoBatch]):
    """The critic's objective: clipped value loss of a model with a scalar head. A token's value is read at the position that predicts the
    token, so the value depends only on the tokens before it. Metric: ``value_error``, the unclipped mean squared error."""

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
    """Return [N] float: the scalar head's output at the position that predicts each target."""
    values: Tensor = model.scalar(model.hidden(targets.forest)[targets.positions])
    return values.float()
