"""The chosen size of a model and its training settings, which the stage `choose_size` writes and `pretrain` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, model_validator

from puna.models.config import ModelShape
from puna.models.training.settings import OptimizerSettings
from puna.stages.contract import SeededConfig, StageConfig, StageRun
from puna.stages.training.phase import OPTIMIZER, SHAPE, Phase
from puna.storage import Artifact, PunaError

RECIPE = "recipe.yaml"
"""File in an artifact of `choose_size` with the recipe fields that train the chosen size."""


class ChosenSize(StageConfig):
    """The settings of a training run that `choose_size` derives from a budget and the points of a scaling ladder."""

    sequence_length: int = Field(ge=2, description="Tokens per row")
    model: ModelShape = Field(description="Shape and variations of the model")
    optimizer: OptimizerSettings = Field(description="The optimizer")
    phase: Phase = Field(description="The first phase")

    def write(self, folder: Path) -> None:
        """Write the recipe's fields to an artifact's folder, including defaults, since those of `pretrain` and the ladder differ."""
        training = self.model_dump(mode="json", include={"model", "optimizer"}) | {"phases": [self.phase.model_dump(mode="json")]}
        fields = {"tokenize": {"sequence_length": self.sequence_length}, "pretrain": training}
        (folder / RECIPE).write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")

    @classmethod
    def read(cls, artifact: Artifact) -> ChosenSize:
        """Return the chosen size in an artifact. Raise PunaError if it has none."""
        if RECIPE not in artifact.manifest.files:
            raise PunaError(f"{artifact.id} contains no size; give an artifact of the stage choose_size, not of {artifact.manifest.stage}")
        fields = yaml.safe_load(artifact.path(RECIPE).read_text(encoding="utf-8"))
        training = fields["pretrain"]
        return cls(**fields["tokenize"], model=training["model"], optimizer=training["optimizer"], phase=training["phases"][0])


class SizedConfig(SeededConfig):
    """Settings of a training run. An input model or an input size may determine some of them."""

    model: ModelShape = Field(SHAPE, description="Shape and variations of a decoder trained from scratch; an input model has its own")
    phases: tuple[Phase, ...] = Field((Phase(),), min_length=1, description="Phases of training, in order; an input size sets the first")
    optimizer: OptimizerSettings = Field(OPTIMIZER, description="The optimizer of all phases; an input size has its own")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [phase.name for phase in self.phases]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"phases: two are called {twice[0]!r}, but metrics are named after phases; give each a name of its own")
        return self

    def in_vain(self, source: str) -> list[str]:
        """Return the names of changed settings that have no effect because the input `source` (model or size) determines them."""
        first = self.phases[0].replace(name=Phase().name) != Phase()
        settings = {"model": self.model != SHAPE, "optimizer": self.optimizer != OPTIMIZER, "phases.0, but for its name,": first}
        return [name for name, is_set in settings.items() if is_set and (source == "size" or name == source)]

    def with_size(self, size: ChosenSize) -> Self:
        """Return the settings with the model, the optimizer and the first phase (except its name) of a chosen size."""
        first = size.phase.replace(name=self.phases[0].name)
        return self.replace(model=size.model, optimizer=size.optimizer, phases=(first, *self.phases[1:]))


def report_outcome(size: Artifact, loss: float, tokens: int, run: StageRun) -> None:
    """Write as metrics the measured loss of a chosen size on `tokens` held-out tokens, and the forecast loss with its bounds."""
    forecast = {row["metric"]: row for row in size.read().to_pylist()}
    if forecast.get("validation_tokens", {}).get("value") != tokens:
        return run.metric("outcome", f"none: {size.id} has no forecast for these {tokens:,} held-out tokens; see ladder.validation_tokens")
    columns = {"predicted_loss": "value", "predicted_loss_low": "low", "predicted_loss_high": "high"}
    for name, value in {**{name: forecast["loss"][column] for name, column in columns.items()}, "measured_loss": loss}.items():
        run.metric(name, value)
