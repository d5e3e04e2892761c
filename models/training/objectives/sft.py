"""Supervised fine-tuning: cross-entropy on answers, the prompt masked (Llama 3, section 4.1.3)."""

from __future__ import annotations

from torch import Tensor

from puna.models.training.objectives.base import Metrics, Model, Objective, Targets, Totals, divide
from puna.models.training.objectives.language_modeling import language_modeling_loss, token_loss


def sft_loss(logprobs: Tensor, mask: Tensor, total: float) -> Tensor:
    """Cross-entropy in nats per answer token.

    logprobs [N] float of the answers' tokens, mask [N] bool, total: counted answer tokens of the whole
    step -> scalar. Each *token* of the step weighs the same (not each answer): TRL's convention.
    """
    return language_modeling_loss(logprobs, mask, total)


class Sft(Objective[Targets]):
    """Mean cross-entropy over the step's answer tokens.

    Batches come from `Targets.from_answers`: the prompt holds no target, which is its mask. Metric:
    ``answer_nll``, the mean negative log-likelihood of a whole answer, in nats.
    """

    def totals(self, batch: Targets) -> dict[str, float]:
        return {"tokens": float(batch.mask.sum()), "answers": float(batch.answers)}

    def loss(self, model: Model, batch: Targets, totals: Totals) -> tuple[Tensor, Metrics]:
        loss = token_loss(model, batch, totals["tokens"])
        nll = divide(loss.detach() * totals["tokens"], totals["answers"])
        return loss, {"answer_nll": nll}
