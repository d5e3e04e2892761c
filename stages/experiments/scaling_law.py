"""Small runs that predict the loss of the large one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from puna.models.config import ModelConfig, ModelShape
from puna.models.training.settings import ComputeSettings, OptimizerSettings
from puna.stages.contract import Figure, SeededConfig, StageRun, Tokenizer, Tokens, stage
from puna.stages.training.intervals import Interval, evaluation_row
from puna.stages.training.packed import Reader, mean_loss
from puna.stages.training.phase import OPTIMIZER, SHAPE, Phase
from puna.stages.training.proxy_runs import fresh, run_trials, set_aside, trained, trial_row
from puna.stages.training.scaling_laws import PowerLaw, fit_power_law, predict
from puna.stages.training.vocabulary import check_tokens, tokenizer_of
from puna.storage import Artifact


class ScalingLawConfig(SeededConfig):
    """The run to predict, and the small ones it is predicted from."""

    model: ModelShape = Field(SHAPE, description="Sizes of the model to predict, as pretrain has them")
    phase: Phase = Field(Phase(), description="Its first phase of training, as pretrain has it")
    optimizer: OptimizerSettings = Field(OPTIMIZER, description="The optimizer, as pretrain has it")
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")
    widths: tuple[int, ...] = Field((32, 48, 64, 80, 96), min_length=4, description="Widths of the small models; all else shrinks along")
    rate_exponent: float = Field(0.5, ge=0, le=2, description="The peak learning rate grows as (target width / width) to this power")
    validation_share: float = Field(0.01, gt=0, lt=0.5, description="Share of documents set aside, as pretrain has it, fraction")
    validation_tokens: int = Field(40_000, ge=100, description="Tokens of those documents at most, as pretrain has it")
    draws: int = Field(1000, ge=100, le=100_000, description="Bootstrap draws behind the interval")

    @model_validator(mode="after")
    def _widths_are_small(self) -> ScalingLawConfig:
        if len(set(self.widths)) < len(self.widths) or max(self.widths) >= self.model.hidden_size:
            raise ValueError(f"widths must differ and lie below the model's hidden_size {self.model.hidden_size}, not {self.widths}")
        for width in self.widths:
            shrunk(self.model, width)
        return self


def shrunk(shape: ModelShape, width: int) -> ModelShape:
    """Return the shape at a smaller width: layers, heads and feed-forward in proportion, heads about as wide."""
    share = width / shape.hidden_size
    head = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    heads = max(1, round(width / head))
    if width % (2 * heads):
        raise ValueError(f"width {width} does not divide into {heads} heads of an even width")
    if shape.mla is not None or shape.sliding_layers is not None:
        raise ValueError("models with mla or sliding_layers are not shrunk: their parts have sizes of their own")
    groups = heads * shape.num_key_value_heads // shape.num_attention_heads
    moe = shape.moe and shape.moe.replace(moe_intermediate_size=max(8, 8 * round(shape.moe.moe_intermediate_size * share / 8)))
    return shape.replace(
        hidden_size=width,
        intermediate_size=max(8, 8 * round(shape.intermediate_size * share / 8)),
        # One layer alone cannot copy (it has no induction heads): its loss would lie on another line.
        num_hidden_layers=max(min(2, shape.num_hidden_layers), round(shape.num_hidden_layers * share)),
        num_attention_heads=heads,
        num_key_value_heads=groups if groups and heads % groups == 0 else 1,
        head_dim=width // heads,
        moe=moe,
        # Matrices keep the size of what they pass on: the usual 1 / sqrt(width).
        initializer_range=min(1.0, shape.initializer_range * share**-0.5),
    )


def shortened(phase: Phase, share: float, peak: float) -> Phase:
    """Return the phase on `share` of its tokens, each part of the schedule in proportion, at another peak rate.

    Rows of a step shrink with the root of the share: the best batch grows with the run (McCandlish et al. 2018).
    """
    whole = phase.full_rows
    rows = max(1, round(whole * math.sqrt(share)))

    def fewer(of: int) -> int:
        return max(1, round(of * rows / whole))

    growth = tuple(pair.replace(after_tokens=max(1, round(pair.after_tokens * share)), rows=fewer(pair.rows)) for pair in phase.ramp)
    share *= whole / rows
    steps = max(2, round(phase.steps * share))
    schedule = phase.schedule
    # Each is rounded for itself: together they must not be longer than the run.
    warmup = min(round(schedule.warmup(phase.steps) * share), steps - 1)
    anneal = min(round(schedule.anneal(phase.steps) * share), steps - warmup)
    decay = min(max(1, round(schedule.decay(phase.steps) * share)), steps - warmup) if schedule.decay_steps else 0
    return phase.replace(
        steps=steps,
        rows_per_step=fewer(phase.rows_per_step),
        ramp=growth,
        schedule=schedule.replace(
            warmup_steps=warmup,
            anneal_steps=anneal,
            decay_steps=decay,
            average=min(schedule.average, anneal),
            learning_rate=min(1.0, peak),
        ),
    )


@stage(kind="evaluation")
def scaling_law(tokens: Tokens, tokenizer: Tokenizer, config: ScalingLawConfig, run: StageRun) -> None:
    """Predict the loss of a training run from smaller ones (Llama 3, section 3.2.1; Kaplan et al. 2020).

    Every run has as many tokens per parameter as the one to predict, its schedule and the documents it sets
    aside, so that all lie on one line of growing compute C (operations of training). L = E + A C^-a is fitted
    to their losses and read off at the target's compute, with a bootstrap interval. As a test of the method on
    what is known, the largest small run is predicted from the others.
    """
    check_tokens(tokens, tokenizer)
    vocabulary = tokenizer_of(tokenizer)
    # The longest run first, so that no worker waits for it at the end.
    jobs = [(i, width, run.seed("trial", i)) for i, width in enumerate(sorted(config.widths))][::-1]
    trials = list(run_trials(run, _trial, jobs, tokens, vocabulary.vocab_size, vocabulary.begin))[::-1]
    run.write_rows(trials, "trials")
    target = _target(tokens, config, vocabulary.vocab_size, vocabulary.begin)
    compute, loss = [t["flops"] for t in trials], [t["loss"] for t in trials]
    law = fit_power_law(compute, loss)
    predicted = Interval(*predict(compute, loss, target["flops"], config.draws, run.generator("bootstrap")))
    backtest = float(fit_power_law(compute[:-1], loss[:-1])(compute[-1]))
    _report(trials, law, target, predicted, backtest, run)


def _reader(tokens: Artifact, config: ScalingLawConfig, phase: Phase, seed: int, begin: int) -> Reader:
    packed, held = set_aside(tokens, config.validation_share, config.validation_tokens)
    return phase.reader(packed, held, seed, begin)


def _positions(reader: Reader) -> int:
    return reader.packed.row_length * reader.join


def _target(tokens: Artifact, config: ScalingLawConfig, vocab_size: int, begin: int) -> dict[str, float]:
    """Return parameters, tokens and operations of the run to predict."""
    from puna.models import accounting

    reader = _reader(tokens, config, config.phase, 0, begin)
    shape = config.model.complete(vocab_size, _positions(reader))
    # The order of rows differs from that of the run itself; over many steps the cost does not.
    steps = [reader.lengths(step) for step in range(1, config.phase.counted(_positions(reader)).steps + 1)]
    return {
        "parameters": float(accounting.parameters(shape).total),
        "tokens": float(sum(map(sum, steps))),
        "flops": float(sum(accounting.training_flops(shape, lengths) for lengths in steps)),
    }


def _trial(
    number: int, width: int, seed: int, tokens: Artifact, vocab_size: int, begin: int, config: ScalingLawConfig, state: Path
) -> dict[str, Any]:
    from puna.models import accounting

    small = shrunk(config.model, width)
    positions = _positions(_reader(tokens, config, config.phase, seed, begin))
    shape: ModelConfig = small.complete(vocab_size, positions)
    share = accounting.matrix_parameters(shape) / accounting.matrix_parameters(config.model.complete(vocab_size, positions))
    rate = config.phase.schedule.peak(config.optimizer) * (config.model.hidden_size / width) ** config.rate_exponent
    phase = shortened(config.phase.counted(positions), share, rate)
    reader = _reader(tokens, config, phase, seed, begin)
    size, settings = config.compute.micro_batch_tokens, phase.train_config(config.optimizer, config.compute)
    what = f"a small run of width {width}"
    proxy = trained(fresh(shape, seed), what, lambda step: reader.batches(step, size), reader.lengths, settings, seed, state)
    loss = mean_loss(proxy.model, reader.packed.validation_pieces(reader.excluded))
    details = {
        "hidden_size": width, "num_hidden_layers": small.num_hidden_layers, "parameters": accounting.parameters(shape).total,
        "matrix_parameters": accounting.matrix_parameters(shape), "steps": phase.steps, "learning_rate": phase.schedule.learning_rate,
    }  # fmt: skip
    return trial_row(number, f"width {width}", details, loss, proxy)


def _report(
    trials: list[dict[str, Any]], law: PowerLaw, target: dict[str, float], predicted: Interval, backtest: float, run: StageRun
) -> None:
    n, largest = len(trials), trials[-1]["loss"]
    residual = math.sqrt(sum((float(law(t["flops"])) - t["loss"]) ** 2 for t in trials) / n)
    numbers: list[tuple[str, str, Interval | float, int]] = [
        ("prediction", "loss", predicted, n),
        ("prediction", "extrapolation", target["flops"] / max(t["flops"] for t in trials), n),
        ("law", "floor", law.floor, n),
        ("law", "exponent", law.exponent, n),
        ("law", "residual", residual, n),
        ("backtest", "predicted_loss", backtest, n - 1),
        ("backtest", "loss", largest, 1),
    ]
    run.write_rows([evaluation_row(*row) for row in numbers])
    metrics = {f"target_{name}": number for name, number in target.items()}
    metrics |= {"predicted_loss": predicted.value, "predicted_loss_low": predicted.low, "predicted_loss_high": predicted.high}
    metrics |= {"exponent": law.exponent, "floor": law.floor, "residual": residual, "backtest_error": backtest - largest}
    for name, number in metrics.items():
        run.metric(name, number)
    grid = np.geomspace(min(t["flops"] for t in trials), target["flops"], 40)
    series: dict[str, list[tuple[Any, float]]] = {
        "law": [(float(x), float(law(x))) for x in grid],
        "small runs": [(t["flops"], t["loss"]) for t in trials],
        "predicted": [(target["flops"], predicted.value)],
        "95 % low": [(target["flops"], predicted.low)],
        "95 % high": [(target["flops"], predicted.high)],
    }
    note = "Predicted for the run's own size, before it is made."
    run.figure("law", Figure("Loss against compute", x="operations", y="nats per token", kind="scatter", series=series, note=note))
