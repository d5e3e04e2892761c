"""Next-token losses: of whole documents, of answers (supervised finetuning), and against a teacher (distillation)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from puna.models.training.objectives.base import Metrics, Model, Objective, Targets, Totals, divide

POSITIONS = 512  # maximum number of positions whose distributions over the vocabulary are in memory at one time


def token_loss(model: Model, targets: Targets, total: float) -> Tensor:
    """Return the unmasked targets' summed cross-entropy in nats, divided by `total`, the step's unmasked targets; 0 if `total` is 0."""
    weights = targets.mask.float() / total if total else torch.zeros_like(targets.mask, dtype=torch.float32)
    loss: Tensor = model.cross_entropy(targets.forest, targets.positions, targets.tokens, weights)
    return loss


class LanguageModeling(Objective[Targets]):
    """Mean cross-entropy over the step's target tokens. Metric: ``bits_per_token``.

    With `z_loss`, the term `z_loss` times the mean squared log-normalizer of the logits is added, to keep the log-normalizer near 0 (PaLM,
    Chowdhery et al. 2022, section 5; OLMo: 1e-5); the metric ``z_loss`` is this term."""

    def __init__(self, z_loss: float = 0.0) -> None:
        self.z_loss = z_loss

    def totals(self, batch: Targets) -> dict[str, float]:
        return {"tokens": float(batch.mask.sum())}

    def loss(self, model: Model, batch: Targets, totals: Totals) -> tuple[Tensor, Metrics]:
        if not self.z_loss:
            loss = token_loss(model, batch, totals["tokens"])
            return loss, {"bits_per_token": loss.detach() / math.log(2.0)}
        logprobs, normalizers = model.normalizers(batch.forest, batch.positions[batch.mask], batch.tokens[batch.mask])
        loss, term = divide(-logprobs.sum(), totals["tokens"]), self.z_loss * divide(normalizers.square().sum(), totals["tokens"])
        return loss + term, {"bits_per_token": loss.detach() / math.log(2.0), "z_loss": term.detach()}


class Sft(Objective[Targets]):
    """Mean cross-entropy over the step's answer tokens. All tokens weigh the same, not all answers: TRL's convention.

    Batches come from `Targets.from_answers`, in which no prompt token is a target. Metric: ``answer_nll``, the mean over answers of the
    negative log-likelihood summed over an answer's unmasked tokens, in nats."""

    def totals(self, batch: Targets) -> dict[str, float]:
        return {"tokens": float(batch.mask.sum()), "answers": float(batch.answers)}

    def loss(self, model: Model, batch: Targets, totals: Totals) -> tuple[Tensor, Metrics]:
        loss = token_loss(model, batch, totals["tokens"])
        return loss, {"answer_nll": divide(loss.detach() * totals["tokens"], totals["answers"])}


def divergence(student_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of next-token distributions, given as log-probabilities [N, V] -> [N] nats.

    It is ``beta KL(teacher || M) + (1 - beta) KL(student || M)`` with ``M = beta teacher + (1 - beta) student``. Beta 0 gives the forward
    ``KL(teacher || student)``, beta 1 the reverse ``KL(student || teacher)`` (GKD, Agarwal et al., arXiv 2306.13649, equation 1)."""
    if beta == 0:
        return _kl(teacher_NV, student_NV)
    if beta == 1:
        return _kl(student_NV, teacher_NV)
    mixture_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log1p(-beta))
    return beta * _kl(teacher_NV, mixture_NV) + (1 - beta) * _kl(student_NV, mixture_NV)


def _kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    return (p_NV.exp() * (p_NV - q_NV)).sum(-1)


class Distill(Objective[Targets]):
    """Mean `divergence` with `beta` over the step's answer tokens between the model and a frozen teacher, both at `temperature`.

    No gradient passes through the sampling of the answers (Agarwal et al., section 3). All tokens of the step weigh the same. Logits that
    only one of the two models has, because its vocabulary is padded further, are left out."""

    def __init__(self, teacher: Model, beta: float = 1.0, temperature: float = 1.0) -> None:
        self.teacher, self.beta, self.temperature = teacher, beta, temperature

    def totals(self, batch: Targets) -> dict[str, float]:
        return {"tokens": float(batch.mask.sum())}

    def loss(self, model: Model, batch: Targets, totals: Totals) -> tuple[Tensor, Metrics]:
        positions = batch.positions[batch.mask]
        with torch.no_grad():
            guide_ND = self.teacher.hidden(batch.forest)[positions]
        hidden_ND = model.hidden(batch.forest)[positions]

        def nats(own_ND: Tensor, other_ND: Tensor) -> Tensor:
            own_NV = model.logits(own_ND)
            with torch.no_grad():
                other_NV = self.teacher.logits(other_ND)
            shared = min(own_NV.shape[-1], other_NV.shape[-1])
            student_NV, teacher_NV = ((one_NV[:, :shared].float() / self.temperature).log_softmax(-1) for one_NV in (own_NV, other_NV))
            return divergence(student_NV, teacher_NV, self.beta).sum()

        parts = zip(hidden_ND.split(POSITIONS), guide_ND.split(POSITIONS), strict=True)
        sums = [checkpoint(nats, own_ND, other_ND, use_reentrant=False) for own_ND, other_ND in parts]
        return divide(torch.stack(sums).sum(), totals["tokens"]), {}
