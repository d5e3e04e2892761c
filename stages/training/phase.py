"""A phase of pretraining: its schedule and its reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from puna.models.config import ModelShape
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings, TrainConfig
from puna.stages.contract import StageConfig
from puna.stages.training.packed import Packed, Reader

if TYPE_CHECKING:
    from puna.models.training.schedules import Ramp

SHAPE = ModelShape(
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.08,
)
"""A model for minutes on a CPU."""
OPTIMIZER = OptimizerSettings(beta2=0.98)


class Phase(StageConfig):
    """A phase of training with its own schedule. The optimizer starts anew with it."""

    name: str = Field("initial", min_length=1, description="Name of the phase in the log")
    steps: int = Field(1000, ge=1, description="Optimisation steps")
    rows_per_step: int = Field(2, ge=1, description="Rows of a step, each of join_rows packed rows")
    rows_ramp: tuple[int, ...] = Field(
        (), description="Rows of a step in the first stretches of ramp_steps steps each, before rows_per_step (Llama 3, section 3.4.1)"
    )
    length_ramp: tuple[int, ...] = Field(
        (), description="Tokens to which rows are cut in the first stretches of ramp_steps steps each, before they stay whole"
    )
    ramp_steps: int = Field(0, ge=0, description="Steps of each stretch of rows_ramp and length_ramp")
    join_rows: int = Field(1, ge=1, description="Packed rows that make one: the context grows by this factor (long context)")
    rope_theta: float | None = Field(None, gt=1, description="Base of the rotary frequencies from here on; null: as before")
    schedule: ScheduleSettings = Field(ScheduleSettings(learning_rate=6e-3), description="Learning rate over the phase")

    @model_validator(mode="after")
    def _schedule_holds(self) -> Phase:
        TrainConfig(steps=self.steps, schedule=self.schedule)
        if (self.ramp_steps > 0) != bool(self.rows_ramp or self.length_ramp):
            raise ValueError("ramp_steps goes with rows_ramp or length_ramp: set both or neither")
        for name in ("rows_ramp", "length_ramp"):
            values = getattr(self, name)
            if list(values) != sorted(values) or min(values, default=2) < (2 if name == "length_ramp" else 1):
                raise ValueError(f"{name} must not fall and must begin with {2 if name == 'length_ramp' else 1} at least, not {values}")
        if max(self.rows_ramp, default=0) > self.rows_per_step:
            raise ValueError(f"rows_ramp {self.rows_ramp} must not exceed rows_per_step {self.rows_per_step}")
        return self

    def train_config(self, optimizer: OptimizerSettings, compute: ComputeSettings) -> TrainConfig:
        return TrainConfig(steps=self.steps, schedule=self.schedule, optimizer=optimizer, compute=compute)

    def growth(self) -> Ramp:
        from puna.models.training.schedules import Ramp

        return Ramp((*self.rows_ramp, self.rows_per_step), max(1, self.ramp_steps))

    def reader(self, packed: Packed, excluded: NDArray[np.bool_], seed: int, begin: int) -> Reader:
        from puna.models.training.schedules import Ramp

        row = int(np.diff(packed.starts[packed.rows]).max()) * self.join_rows
        longest = Ramp((*(min(length, row) for length in self.length_ramp), row), self.ramp_steps) if self.length_ramp else None
        return Reader(packed, excluded, self.rows_per_step, seed, begin, self.join_rows, self.growth(), longest)

    def check_plain(self, why: str) -> None:
        """Raise ValueError if rows are joined or ramped, which an experiment cannot do."""
        if self.join_rows != 1 or self.ramp_steps:
            raise ValueError(f"phase.join_rows must be 1 and phase.ramp_steps 0: {why}")
