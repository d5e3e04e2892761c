"""Averaging the weights of models."""

from __future__ import annotations

from pydantic import Field

from puna.stages.contract import Facts, Model, StageConfig, StageRun, stage
from puna.stages.training.needs import one_tokenizer
from puna.stages.training.train import check_one_tokenizer
from puna.storage import PunaError


class AverageConfig(StageConfig):
    """How much each model weighs."""

    weights: tuple[float, ...] = Field(
        (), description="One non-negative weight per model, in the order of the inputs; none: all weigh the same"
    )


def needs(config: AverageConfig, facts: Facts) -> list[str]:
    """One tokenizer."""
    return one_tokenizer(facts, "models")


@stage(kind="model", needs=needs)
def average(models: list[Model], config: AverageConfig, run: StageRun) -> None:
    """Mean of the weights of models of one shape, trained on different data or settings (Llama 3, section 4.1.5)."""
    from puna.models.training.average import average_checkpoints

    if config.weights and len(config.weights) != len(models):
        raise PunaError(f"average: {len(config.weights)} weights are given for {len(models)} models")
    check_one_tokenizer(models, "average: the rows of their embeddings stand for different tokens")
    try:
        average_checkpoints([m.path() for m in models], run.folder, config.weights or None)
    except ValueError as error:
        raise PunaError(f"average: {error}") from error
    run.metric("models", len(models))
