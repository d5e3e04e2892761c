"""The best model size for a training budget, and the forecast of its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from puna.models.config import ModelConfig, ModelShape
from puna.models.parameters import matrix_parameters, parameters
from puna.models.training.settings import OptimizerSettings, ScheduleSettings
from puna.stages.contract import Evaluation, StageRun, stage
from puna.stages.experiments.law import LawConfig, forecaster_of, loss_figure, read_points, task_laws, with_accuracy
from puna.stages.training.chosen_size import ChosenSize
from puna.stages.training.intervals import Interval, evaluation_row
from puna.stages.training.phase import Phase
from puna.stages.training.proxy_runs import resize
from puna.stages.training.scaling_laws import rows_and_rate
from puna.storage import PunaError, errors_at

WIDEST, MULTIPLE = 32_768, 8  # maximum width to try, and the number that all widths are multiples of
GROWTH, NEAR = (0.3, 0.7), 1.5
"""Range of exponents by which the best size may grow with the budget (published: .46 to .54), and the factor allowed beyond the range."""


class ChooseSizeConfig(LawConfig):
    """Settings of a forecast: a budget in `flops` or `hours`, or the training `tokens` of a given model."""

    flops: float | None = Field(None, gt=0, description="Training budget in FLOPs")
    hours: float | None = Field(None, gt=0, description="Training budget in hours on the device")
    gpu: str | None = Field(None, description="GPU for `hours` (H100, H200, A100, …) in bf16; null: this CPU")
    tokens: int | None = Field(None, ge=1, description="Training tokens of the given `model`; only the loss is forecast")
    model: ModelShape | None = Field(None, description="Shape of the model; null: the best of the ladder's family for the budget")
    sequence_length: int | None = Field(None, ge=2, description="Tokens per row, which determines attention's cost; null: the ladder's")

    @model_validator(mode="after")
    def _one_budget(self) -> ChooseSizeConfig:
        budgets = [name for name in ("flops", "hours", "tokens") if getattr(self, name) is not None]
        if len(budgets) != 1:
            raise ValueError(f"give exactly one of flops, hours and tokens, not {' and '.join(budgets) or 'none'}")
        if self.tokens is not None and self.model is None:
            raise ValueError("tokens needs a model: give the model's shape, or a budget in flops or hours")
        if self.gpu is not None and self.hours is None:
            raise ValueError("gpu applies to hours; give both, or only flops")
        return self


@dataclass(frozen=True)
class Size:
    """A model's configuration, its number of training tokens, and the FLOPs of the training run."""

    shape: ModelConfig
    tokens: float
    flops: float

    @property
    def parameters(self) -> int:
        """Return the number of matrix parameters that a token meets: with its own experts only, and the output layer."""
        return matrix_parameters(self.shape)


@stage(kind="evaluation")
def choose_size(law: Evaluation, config: ChooseSizeConfig, run: StageRun) -> None:
    """Choose shape and number of tokens for a budget, and forecast the loss before the run (Llama 3, section 3.2.1).

    Shapes come from the ladder's family (`model`: only this one), with as many tokens as the budget allows; the one with the lowest loss by
    the scaling law is chosen. The interval covers the bootstrap's interval, the forecast without the lowest budget, and the error of
    forecasts of known budgets, which grows with the distance from the ladder's largest run. `recipe.yaml` has shape, tokens, batch size,
    learning rate and optimizer; `pretrain` takes them from the input `size`, or from a recipe."""
    rows = read_points([law], config, run)
    forecaster = forecaster_of(rows, config, run)
    sizes = _sizes(config, rows)
    size = sizes[int(np.argmin(forecaster.surface([size.parameters for size in sizes], [size.tokens for size in sizes])[0]))]
    loss = Interval(*forecaster.at(size.parameters, size.tokens, size.flops))
    numbers = {"parameters": float(size.parameters), "total_parameters": float(parameters(size.shape).total)}
    numbers |= {"tokens": size.tokens, "flops": size.flops}
    numbers["extrapolation"] = size.flops / max(row["flops"] for row in rows)
    # 0: this forecast is not of a validation loss that `pretrain` can measure.
    texts = {row.get("heldout_tokens") or 0 for row in rows}
    numbers["validation_tokens"] = float(texts.pop()) if len(texts) == 1 and config.heldout == "validation" else 0.0
    for name, number in numbers.items():
        run.metric(name, number)
    if asked := with_accuracy(rows):
        surface, sigmoid = task_laws(asked)
        numbers["task_loss"] = float(surface([size.parameters], [size.tokens])[0, 0])
        numbers["accuracy"] = float(sigmoid(numbers["task_loss"]))
    intervals: dict[str, Interval | float] = {"loss": loss, **numbers}
    run.write_rows([evaluation_row("forecast", name, number, len(rows)) for name, number in intervals.items()])
    for name, number in zip(("predicted_loss", "predicted_loss_low", "predicted_loss_high"), loss, strict=True):
        run.metric(name, number)
    note = f"The forecast {loss.value:.3f}, and the ends of its interval, {loss.low:.3f} and {loss.high:.3f}."
    run.figure("forecast", loss_figure(forecaster, size.flops, note, forecast=[(size.flops, value) for value in loss]))
    experts = size.shape.moe and f", {size.shape.moe.num_experts_per_tok} of {size.shape.moe.num_experts} experts per token"
    run.metric("shape", f"{size.shape.num_hidden_layers} layers of width {size.shape.hidden_size}{experts or ''}")
    _recipe_of(size, rows).write(run.folder)


def _sizes(config: ChooseSizeConfig, rows: Sequence[dict[str, Any]]) -> list[Size]:
    """Return the candidate shapes, each with the training tokens and FLOPs that the budget allows."""
    from puna.models import accounting

    largest = ModelConfig.model_validate_json(max(rows, key=lambda row: row["parameters"])["shape"])
    row = config.sequence_length or largest.max_position_embeddings

    def complete(shape: ModelShape) -> ModelConfig:
        return shape.complete(largest.vocab_size, row)

    if config.model is not None:
        shapes = [complete(config.model)]
    else:
        base = ModelShape(**{name: getattr(largest, name) for name in ModelShape.model_fields})
        shapes = [complete(shape) for shape in _family(base)]
    sizes: list[Size] = []
    for shape in shapes:
        flops = accounting.training_flops(shape, [row]) / row
        if config.tokens is not None:
            tokens = float(config.tokens)
        elif config.flops is not None:
            tokens = config.flops / flops
        else:
            assert config.hours is not None
            tokens = config.hours * 3600 / _seconds(shape, row, config.gpu)
        sizes.append(Size(shape, tokens, flops * tokens))
    return sizes if config.model is not None else _growing(sizes, rows)


def _growing(sizes: Sequence[Size], rows: Sequence[dict[str, Any]]) -> list[Size]:
    """Return sizes that grow as usual (`GROWTH`) from the ladder's best: few points leave it unsure. Raise PunaError if there are none."""
    largest = max(row["flops"] for row in rows)
    best = min((row for row in rows if 1.5 * row["flops"] > largest), key=lambda row: row["loss"])

    def follows(size: Size) -> bool:
        low, high = sorted((size.flops / best["flops"]) ** exponent for exponent in GROWTH)
        return bool(low / NEAR <= size.parameters / best["parameters"] <= high * NEAR)

    if not (following := [size for size in sizes if follows(size)]):
        raise PunaError(f"choose_size: no shape of the ladder's family fits the budget: up to width {WIDEST:,}, none grows with the budget "
            f"(beyond {largest:.2e} operations) to the power of {GROWTH[0]} to {GROWTH[1]}; give a model, or a larger ladder")  # fmt: skip
    return following


def _family(base: ModelShape) -> Iterator[ModelShape]:
    """Yield `base` resized to widths up to `WIDEST`, in steps of about 6 %, except widths that do not fit its heads."""
    width = float(MULTIPLE)
    shapes = set()
    while width <= WIDEST:
        fitting = MULTIPLE * round(width / MULTIPLE)
        if fitting not in shapes:
            shapes.add(fitting)
            with contextlib.suppress(ValueError):
                yield resize(base, fitting)
        width *= 1.06


def _seconds(shape: ModelConfig, row: int, gpu: str | None) -> float:
    """Return the training seconds per token, from a GPU's data sheet or from matrix products measured on this CPU."""
    from puna.models import accounting
    from puna.models.accounting import Machine, matrix_rate

    if gpu is None:
        return accounting.training_flops(shape, [row]) / row / matrix_rate()
    with errors_at(f"choose_size: gpu {gpu}", ValueError):
        machine = Machine.gpu(gpu)
    return accounting.step_time(shape, [row], machine, "bf16", update=False).total / row


def _recipe_of(size: Size, rows: Sequence[dict[str, Any]]) -> ChosenSize:
    """Return the chosen size, with batch size and learning rate by power laws of the ladder's runs, and their schedule and optimizer.
    Raise PunaError if the runs do not record `decay_share`."""
    if (decay := max(rows, key=lambda row: row["flops"]).get("decay_share")) is None:
        raise PunaError("choose_size: this law's points do not record the share of steps in which the learning rate decays; run law again")
    shape = ModelShape(**{name: getattr(size.shape, name) for name in ModelShape.model_fields})
    sizes, many, rates = ([row[name] for row in rows] for name in ("parameters", "rows", "learning_rate"))
    count, rate = rows_and_rate(sizes, many, rates, size.parameters)
    # The schedule of the ladder's points: constant, then linear to 0.
    schedule = ScheduleSettings(learning_rate=float(f"{rate:.3g}"), warmup_steps=0.02, shape="constant", anneal_steps=decay)
    phase = Phase(until=round(size.tokens), rows_per_step=count, schedule=schedule)
    optimizer = OptimizerSettings.model_validate_json(rows[0]["optimizer"])
    return ChosenSize(sequence_length=size.shape.max_position_embeddings, model=shape, optimizer=optimizer, phase=phase)
