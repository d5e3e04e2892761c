"""Reward model training: the Bradley-Terry loss over all ranked answers to a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from puna.kernels.linear_cross_entropy import linear_cross_entropy
from puna.models.training.objectives.base import Batch, Metrics, Model, Objective, Targets, Totals, divide, sum_segments
from puna.models.transformer import by_rows, softcap


def ranked_pairs(prompt: Tensor, rank: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all pairs of answers to one prompt in which one ranks before the other.

    prompt [A] int64, rank [A] int64 (0 is best, equal ranks make no pair) ->
    better [M] int64, worse [M] int64: indices of answers; weight [M] float32: 1 / (pairs of the prompt)."""
    same = prompt[:, None] == prompt[None, :]
    better, worse = (same & (rank[:, None] < rank[None, :])).nonzero(as_tuple=True)
    if not len(better):
        return better, worse, torch.zeros(0, device=prompt.device)
    count = torch.bincount(prompt[better])
    return better, worse, 1.0 / count[prompt[better]].float()


def reward_loss(better: Tensor, worse: Tensor, weight: Tensor, total: float) -> Tensor:
    """Return ``-sum(weight * log sigmoid(better - worse)) / total``, without a margin (Llama 3, section 4.1.2).

    better, worse [M] float: rewards of each pair's answers; weight [M] float; total: prompts of the step that have a pair -> scalar. With
    ``weight = 1 / pairs of the prompt`` all *prompts* count the same, whatever their answers (Ouyang et al. 2022, InstructGPT)."""
    return divide(-(weight * F.logsigmoid(better - worse)).sum(), total)


@dataclass(frozen=True)
class RewardBatch(Batch):
    """Ranked answers; rank [A] int64, 0 is best. The constructor raises ValueError unless each answer has a rank."""

    rank: Tensor

    def __post_init__(self) -> None:
        if self.rank.shape != self.targets.lengths.shape:
            raise ValueError(f"{self.targets.answers} answers but {len(self.rank)} ranks")


class Reward(Objective[RewardBatch]):
    """Bradley-Terry loss of a model with a scalar head; all answers to a prompt are in one forest.

    `nll_weight`: weight of a term by which the hidden states still predict each prompt's best answers. They do so through `head`, the
    policy's frozen language-model head [V, D] with its `softcap`. The term is the mean over the best answers of each answer's mean -log p
    (the SFT regularization of Yang et al. 2024, GRM). It preserves the policy's knowledge in the states that the reward head reads.

    Metrics: ``accuracy`` (pairs in the correct order; ties count one half), ``margin`` (mean difference of the rewards; in both, all
    prompts weigh the same), and with `nll_weight` ``nll`` (nats per token). A weight without `head` raises ValueError."""

    def __init__(self, nll_weight: float = 0.0, head: Tensor | None = None, softcap: float | None = None) -> None:
        if nll_weight < 0 or (nll_weight > 0 and head is None):
            raise ValueError(f"nll_weight must not be negative ({nll_weight}), and needs a language-model head")
        self.nll_weight = nll_weight
        self.head, self.softcap = head, softcap

    def totals(self, batch: RewardBatch) -> dict[str, float]:
        better, _, _ = ranked_pairs(batch.targets.prompt, batch.rank)
        return {"prompts": float(len(torch.unique(batch.targets.prompt[better]))), "best": float((batch.rank == 0).sum())}

    def loss(self, model: Model, batch: RewardBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        hidden = model.hidden(batch.targets.forest)
        rewards = _rewards(model, hidden, batch.targets)
        better, worse, weight = ranked_pairs(batch.targets.prompt, batch.rank)
        difference = rewards[better] - rewards[worse]
        loss = reward_loss(rewards[better], rewards[worse], weight, totals["prompts"])
        with torch.no_grad():
            right = (difference > 0).float() + 0.5 * (difference == 0).float()
            accuracy = divide((weight * right).sum(), totals["prompts"])
            margin = divide((weight * difference).sum(), totals["prompts"])
        metrics = {"accuracy": accuracy, "margin": margin}
        if self.nll_weight:
            nll = self._nll(hidden, batch, totals)
            loss = loss + self.nll_weight * nll
            metrics["nll"] = nll.detach()
        return loss, metrics

    def _nll(self, hidden: Tensor, batch: RewardBatch, totals: Totals) -> Tensor:
        targets, lengths = batch.targets, batch.targets.lengths
        weight = torch.where(batch.rank == 0, 1.0 / lengths.clamp(min=1), 0.0).repeat_interleave(lengths)
        indices = (weight > 0).nonzero().squeeze(1)
        assert self.head is not None
        head, rows, tokens = self.head.to(hidden), hidden[targets.positions[indices]], targets.tokens[indices]
        if self.softcap is None:
            loss = linear_cross_entropy(rows, head, tokens, weight[indices])
        else:
            logprobs = by_rows(lambda rows_CD: softcap(rows_CD @ head.T, self.softcap), rows, tokens)[0]
            loss = -(logprobs * weight[indices]).sum()
        return divide(loss, totals["best"])


def answer_rewards(model: Model, targets: Targets) -> Tensor:
    """Return [A] float: the scalar head's output at each answer's last token, or its mean over the answer (`reward_pooling`)."""
    return _rewards(model, model.hidden(targets.forest), targets)


def _rewards(model: Model, hidden: Tensor, targets: Targets) -> Tensor:
    if model.config.reward_pooling == "last":
        return model.scalar(hidden[targets.last]).float()
    return sum_segments(model.scalar(hidden[targets.rows]).float(), targets.lengths) / targets.lengths
