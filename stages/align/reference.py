"""Answers as the targets of a preference loss, and the reference's log-probabilities of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from puna.stages.contract import StageRun
from puna.stages.training.train import Example, by_answer

if TYPE_CHECKING:
    import torch

    from puna.models.training.objectives import Targets
    from puna.models.training.objectives.base import Model
    from puna.stages.align.settings import DpoConfig


def targets_of(examples: Sequence[Example], config: DpoConfig) -> Targets:
    """The prompts with their answers in one row; what is masked counts in no preference term."""
    from puna.models.training.objectives import Targets

    masks = [e.masks if config.mask_format else [[True] * len(a) for a in e.answers] for e in examples]
    return Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples], masks)


def reference(model: Model, examples: Sequence[Example], config: DpoConfig, run: StageRun, note: str = "reference") -> list[list[float]]:
    """Summed unmasked log-probability of every answer under the model, prompt by prompt; zeros where the loss needs no reference."""
    from puna.models.training import losses
    from puna.models.training.objectives import reference_logprobs

    if config.loss != "kto" and not losses.REGISTRY[config.loss].needs_reference:
        return [[0.0] * len(example.answers) for example in examples]

    def compute(some: list[Example]) -> torch.Tensor:
        return reference_logprobs(model, targets_of(some, config))

    size = config.training.compute.micro_batch_tokens
    return by_answer(examples, size, compute, lambda done, total: run.progress(done, total, note))
