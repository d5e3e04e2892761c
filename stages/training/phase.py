"""Phases of pretraining: their settings, steps and token readers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from puna.models.config import ModelShape, RopeScaling
from puna.models.training.schedules import Ramp
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings, TrainConfig
from puna.stages.contract import StageConfig
from puna.stages.training.token_rows import Packed, Reader, Relay
from puna.storage import PunaError

SHAPE = ModelShape(
    hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True,
    initializer_range=0.08,
)  # fmt: skip
"""Shape of a model that can be trained in minutes on a CPU."""
OPTIMIZER = OptimizerSettings(beta2=0.98)
Source = Literal["initial", "fresh", "long", "best"]
"""Names of the tokens that a phase reads, after the steps that make them: `tokenize` (initial), `tokenize_fresh` and so on."""
Places = dict[tuple[str, int], tuple[int, int]]
"""(name of tokens, number of packed rows joined into one) → (seed of the rows' order, rows read so far)."""


class Growth(StageConfig):
    """A change after a number of trained tokens: a larger step (batch), longer rows, or tokens of another mixture."""

    after_tokens: int = Field(ge=1, description="Tokens of the run after which the growth begins, counting every row as full")
    rows: int = Field(ge=1, description="Rows per step from then on")
    length: int | None = Field(None, ge=2, description="Row length in tokens from then on; null: whole rows")
    tokens: Source | None = Field(None, description="Tokens, of another mixture, that the phase reads from then on; null: no change")


class Acceptance(StageConfig):
    """Conditions for accepting a phase with a longer context (Llama 3, section 3.4.2). A phase that fails them is repeated."""

    short_loss: float = Field(0.01, ge=0, description="Maximum increase of the validation loss, nats per token, over "
        "the lowest before this phase or an earlier one with `accept`")  # fmt: skip
    needle: float = Field(1.0, ge=0, le=1, description="Minimum accuracy on pretrain.needle at every depth, at `length`; 0: any")
    length: int | None = Field(
        None, ge=2, description="Tokens of the needle's texts; null: the phase's length, which may exceed it to cut fewer documents"
    )
    attempts: int = Field(3, ge=1, le=100, description="Maximum runs of the phase; each continues from the previous one on other rows")


class Phase(StageConfig):
    """A phase of training with its own schedule and tokens."""

    name: str = Field("initial", min_length=1, description="Name of the phase in the log")
    tokens: Source = Field("initial", description="Tokens to read: of tokenize (initial), tokenize_fresh, tokenize_long or tokenize_best")
    steps: int = Field(1000, ge=0, description="Number of optimization steps; 0 if `until` ends the phase")
    until: int | None = Field(None, ge=1, description="Tokens of the run at which the phase ends, every row counted as full; null: `steps`")
    rows_per_step: int = Field(2, ge=1, description="Rows per step, each of join_rows packed rows, until `ramp` changes it")
    length: int | None = Field(None, ge=2, description="Row length in tokens until `ramp` changes it; null: whole rows")
    ramp: tuple[Growth, ...] = Field((), description="Changes in order: larger steps (Llama 3, section 3.4.1), or other tokens")
    optimizer: Literal["keep", "fresh"] = Field(
        "keep", description="keep: continue with the optimizer state of the previous phase or the input model, if any; fresh: begin at 0"
    )
    join_rows: int = Field(1, ge=1, description="Packed rows joined into one: the context grows by this factor (long context)")
    rope_theta: float | None = Field(None, gt=1, description="Base of the rotary frequencies from this phase on; null: unchanged")
    rope_scaling: RopeScaling | None = Field(None, description="Scaling of the rotary frequencies from this phase on; null: unchanged")
    accept: Acceptance | None = Field(
        None, description="Conditions for accepting the phase; null: none. A phase that fails them runs again; after the last attempt, "
        "training stops. `until` and `ramp` of later phases count only one run of this phase"
    )  # fmt: skip
    schedule: ScheduleSettings = Field(ScheduleSettings(learning_rate=6e-3), description="Learning rate over the phase")

    @model_validator(mode="after")
    def _schedule_holds(self) -> Phase:
        if (self.steps > 0) == (self.until is not None):
            raise ValueError("the phase ends after `steps` or at `until` tokens: set only one of the two, and steps to 0 with until")
        if self.steps:
            TrainConfig(steps=self.steps, schedule=self.schedule)
        after = [pair.after_tokens for pair in self.ramp]
        if any(a >= b for a, b in pairwise(after)) or (self.until and self.ramp and after[-1] >= self.until):
            raise ValueError(f"ramp: after_tokens must increase and be less than until, not {after}")
        rows = [self.rows_per_step, *(pair.rows for pair in self.ramp)]
        lengths = [self.length or math.inf, *(pair.length or math.inf for pair in self.ramp)]
        if rows != sorted(rows) or lengths != sorted(lengths):
            raise ValueError("ramp: rows and length must not decrease, starting from rows_per_step and the phase's length")
        return self

    @model_validator(mode="before")
    @classmethod
    def _until_replaces_steps(cls, values: Any) -> Any:
        only_until = isinstance(values, Mapping) and values.get("until") is not None and "steps" not in values
        return {**values, "steps": 0} if only_until else values

    def train_config(self, optimizer: OptimizerSettings, compute: ComputeSettings) -> TrainConfig:
        return TrainConfig(steps=self.steps, schedule=self.schedule, optimizer=optimizer, compute=compute)

    @property
    def full_rows(self) -> int:
        """Return the number of rows per step after all growth."""
        return self.ramp[-1].rows if self.ramp else self.rows_per_step

    def longest(self, row: int) -> int:
        """Return the length in tokens of the phase's longest sequences after all growth, for packed rows of `row` tokens."""
        return min(self.ramp[-1].length or row if self.ramp else self.length or row, row)

    @property
    def sources(self) -> set[str]:
        """Return the names of all tokens that the phase reads."""
        return {self.tokens, *(pair.tokens for pair in self.ramp if pair.tokens)}

    def _changes(self, row: int, before: int) -> tuple[list[tuple[int, int, int, Source]], int, int]:
        """Return (first step, rows, length, tokens) of each part between changes; the tokens read before the last part; and its first step.
        `row`: tokens of a row. `before`: tokens read before the phase."""
        changes, step, read, rows = [(1, self.rows_per_step, min(self.length or row, row), self.tokens)], 1, before, self.rows_per_step
        for pair in self.ramp:
            waited = max(0, -(-(pair.after_tokens - read) // (rows * row)))
            step, read, rows = step + waited, read + waited * rows * row, pair.rows
            source = pair.tokens or changes[-1][3]
            if not waited:
                changes.pop()
            changes.append((step, rows, min(pair.length or row, row), source))
        return changes, read, step

    def with_steps(self, row: int, before: int = 0) -> Phase:
        """Return the phase with `steps` instead of `until`. Raise PunaError if `until` is before the phase, or the schedule does not fit.

        `row`: tokens of `join_rows` packed rows together; `before`: tokens of the run before the phase."""
        steps = self.steps
        if self.until is not None:
            _, read, step = self._changes(row, before)
            steps = step - 1 - (read - self.until) // (self.full_rows * row)
            if self.until <= before:
                raise PunaError(f"phase {self.name}: the run reads {before} tokens before it; until={self.until} must be more than that")
        try:
            return self.replace(steps=steps, until=None)
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise PunaError(f"phase {self.name} has {steps} steps: {why}") from error

    def growth(self, row: int, before: int = 0) -> Ramp:
        """Return the number of rows of each step, as a ramp; see `with_steps` for the arguments."""
        starts, rows, *_ = zip(*self._changes(row, before)[0], strict=True)
        return Ramp(rows, starts)

    def relay(self, sources: Mapping[str, Packed], aside: Collection[str], seed: int, begin: int, places: Places, before: int = 0) -> Relay:
        """Return the readers of a phase that starts after `before` tokens of the run. They skip documents in `aside`. Update `places`."""
        row = sources[self.tokens].row_length * self.join_rows
        starts, _, _, names = zip(*self._changes(row, before)[0], strict=True)
        rows = [self.growth(row, before).before(min(step, self.steps + 1)) for step in (*starts, self.steps + 1)]
        readers = list[Reader]()
        for name, (start, end) in zip(names, pairwise(rows), strict=True):
            order, read = places.get((name, self.join_rows), (seed, 0))
            places[name, self.join_rows] = order, read + end - start
            same = [one for one in readers if one.packed is sources[name] and one.first == read - start]
            readers += same[:1] or [self.reader(sources[name], sources[name].of(aside), order, begin, before, read - start)]
        return Relay(readers, starts)

    def reader(self, packed: Packed, excluded: NDArray[np.bool_], seed: int, begin: int, before: int = 0, first: int = 0) -> Reader:
        """Return this phase's reader of `packed`, without the `excluded` pieces; the phase begins after `before` tokens of the run."""
        row = packed.row_length * self.join_rows
        starts, _, lengths, _ = zip(*self._changes(row, before)[0], strict=True)
        longest = Ramp(lengths, starts) if min(lengths) < row else None
        return Reader(packed, excluded, self.rows_per_step, seed, begin, self.join_rows, self.growth(row, before), longest, first)

    def check_plain(self, why: str) -> None:
        """Raise ValueError if the phase reads tokens other than `initial`, sets `until`, or joins, cuts or ramps rows."""
        if self.join_rows != 1 or self.ramp or self.length or self.until or self.tokens != "initial":
            raise ValueError(f"phase.join_rows must be 1, phase.tokens initial, and phase.ramp, length and until unset: {why}")


def control_phases(phases: Sequence[Phase], context: int) -> dict[str, tuple[Phase, ...]]:
    """Return name → phases of the control runs on equally many tokens: `short_rows`, in rows of at most `context` tokens; `constant`, not
    annealed; `fresh`, with new optimizer state in each phase; `natural`, on other tokens. Omit controls that would change nothing."""
    *before, last = phases
    rate = last.schedule.replace(shape="constant", final_ratio=0, decay_steps=0, anneal_steps=0, average=0, ema=0)
    same = {"rope_theta": None, "rope_scaling": None, "accept": None}
    short = [
        phase.replace(**same, length=min(context, phase.length or context),
                      ramp=tuple(part.replace(length=min(context, part.length or context)) for part in phase.ramp))
        if phase.sources != {"initial"} or phase.join_rows > 1 else phase.replace(**same)
        for phase in phases
    ]  # fmt: skip
    longer = any("long" in phase.sources or phase.join_rows > 1 for phase in phases)
    keeps = any(phase.optimizer == "keep" for phase in phases[1:])
    controls = {
        "short_rows": tuple(short if longer else phases),
        "constant": (*before, last.replace(schedule=rate, accept=None) if before and rate != last.schedule else last),
        "fresh": (phases[0], *(phase.replace(optimizer="fresh", accept=None) for phase in phases[1:])) if keeps else tuple(phases),
    }
    changed = {name: own for name, own in controls.items() if own != tuple(phases)}
    return changed | ({"natural": (*before, last.replace(accept=None))} if last.tokens == "best" else {})
