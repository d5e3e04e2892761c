"""A ladder of small runs: each shape has one run at a constant learning rate (the trunk), and a decaying copy of it at each token count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from puna.models.config import ModelConfig, ModelShape
from puna.models.parameters import matrix_parameters
from puna.models.training.packing import batch_by_size
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings, TrainConfig
from puna.stages.contract import Figure, SeededConfig, StageRun, Tokenizer, Tokens, stage
from puna.stages.training.intervals import evaluation_row
from puna.stages.training.phase import OPTIMIZER, SHAPE
from puna.stages.training.proxy_runs import cached_object, fresh, moments_in, resize, run_trials, set_aside, train_proxy
from puna.stages.training.scaling_laws import rows_and_rate
from puna.stages.training.token_rows import Packed, Reader, mean_loss
from puna.stages.training.train import SMALL, device
from puna.stages.training.vocabulary import check_tokens, tokenizer_of
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    import torch

    from puna.models.transformer import Transformer

FEWEST_STEPS = 400
"""Minimum steps of a run. In a shorter run, warm-up and few updates dominate the loss, which then does not predict longer runs."""
PROMPT_TOKENS, OPTION_TOKENS, PARTS = 32, 12, 4
"""Number of tokens in a question's prompt, of tokens in an option, and of parts of an option; a wrong option has two parts swapped."""

Question = tuple[list[int], list[list[int]]]  # token ids of the prompt and of the options, the right one first


class LadderConfig(SeededConfig):
    model: ModelShape = Field(SHAPE, description="Shape of the largest model that the scaling law should predict, as in pretrain")
    widths: tuple[int, ...] = Field((32, 48, 64, 80, 96), min_length=3, description="Widths of the small models; other dimensions follow")
    tokens_per_parameter: float = Field(20.0, gt=0, le=10_000, description="Tokens per parameter, output layer included, at multiple 1")
    multiples: tuple[float, ...] = Field((0.5, 1.0, 2.0, 4.0), min_length=1, description="Multiples of tokens_per_parameter, one per point")
    max_flops: float | None = Field(None, gt=0, description="Maximum FLOPs of a point, 6 per parameter and token; null: no limit")
    decay_share: float = Field(0.25, gt=0, lt=1, description="Share of a point's steps in which the rate decays linearly to 0 (0 to 1)")
    warmup_share: float = Field(0.1, ge=0, lt=0.5, description="Share of a shape's shortest run in which the rate warms up (0 to 1)")
    repeats: int = Field(
        0, ge=0, le=100, description="Additional seeds for the narrower half of shapes, up to the second point, to widen intervals"
    )
    rows: tuple[int, ...] = Field((2, 4), min_length=1, description="Rows per step to try at two model sizes; a single value is not tuned")
    rates: tuple[float, ...] = Field((3e-3, 6e-3, 12e-3), min_length=1, description="Learning rates to try; a single value is not tuned")
    optimizer: OptimizerSettings = Field(OPTIMIZER, description="The optimizer, as in pretrain")
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")
    z_loss: float = Field(0.0, ge=0, le=1, description="Weight of the z-loss, as in pretrain; 0: none")
    validation_share: float = Field(0.01, gt=0, lt=0.5, description="Share of documents held out, as in pretrain (0 to 1)")
    validation_tokens: int = Field(40_000, ge=100, description="Maximum held-out tokens, as in pretrain")
    questions: int = Field(
        0, ge=0, le=100_000, description=f"Multiple-choice questions from held-out documents: {PROMPT_TOKENS} tokens, and the next "
        f"{OPTION_TOKENS} unchanged or with parts swapped (4 options); 0: none"
    )  # fmt: skip

    @model_validator(mode="after")
    def _design_is_possible(self) -> LadderConfig:
        for name in ("widths", "multiples", "rows", "rates"):
            values = getattr(self, name)
            if min(values) <= 0 or sorted(set(values)) != list(values):
                raise ValueError(f"{name} must be positive and increase, not {values}")
        for width in self.widths:
            resize(self.model, width)
        return self


class Rung(NamedTuple):
    """One shape of the ladder: configuration, rows per step, learning rate, and the number of steps at each point."""

    shape: ModelConfig
    rows: int
    rate: float
    steps: tuple[int, ...]


@stage(kind="evaluation", device=True)
def ladder(tokens: Tokens, tokenizer: Tokenizer, heldout: list[Tokens] | None, config: LadderConfig, run: StageRun) -> None:
    """Train models of several small sizes on several token counts, for a scaling law (Llama 3, section 3.2.1; Bhagia et al. 2024).

    Each shape is trained once at a constant learning rate. At each of `multiples` times `tokens_per_parameter`, a copy's learning rate
    decays to 0, which gives a point. Batch size and learning rate are tuned first, at two model sizes and the middle multiple, since the
    best rate of short runs is too high for long runs. Other shapes follow the power law through the two optima. A shape whose first point
    has fewer than 400 steps is an error. The loss is measured on documents held out as in pretrain, and on the `heldout` sets. Runs share
    the CPU's cores. If the largest model is too large for a core and there is a GPU, the runs use the GPU one after another."""
    import torch

    for artifact in (tokens, *(heldout or ())):
        check_tokens(artifact, tokenizer)
    vocabulary = tokenizer_of(tokenizer)
    packed, _ = set_aside(tokens, config.validation_share, config.validation_tokens)
    shapes = [resize(config.model, width).complete(vocabulary.vocab_size, packed.row_length) for width in config.widths]
    place = device() if matrix_parameters(shapes[-1]) > SMALL else torch.device("cpu")
    shared = (tokens, tuple(heldout or ()), vocabulary.begin, place)
    for shape in shapes:  # raise errors before the first run
        _rung(shape, max(config.rows), config.rates[0], packed.row_length, config)
    tuned = _tune(shapes, packed.row_length, shared, config, run)
    rungs = [_rung(shape, *tuned.at(matrix_parameters(shape)), packed.row_length, config) for shape in shapes]
    # The longest run comes first, so that no worker waits for it at the end.
    jobs = [(f"{shape.hidden_size}", rung, run.seed("trunk", shape.hidden_size)) for shape, rung in zip(shapes, rungs, strict=True)][::-1]
    for shape, rung in zip(shapes[: len(shapes) // 2], rungs, strict=False):
        again = rung._replace(steps=rung.steps[:2])
        jobs += [(f"{shape.hidden_size}-{i + 2}", again, run.seed("trunk", shape.hidden_size, i)) for i in range(config.repeats)]
    trials = list(run_trials(run, _trunk, jobs, *shared, here=place.type != "cpu"))
    points = [point for trial in (*trials[: len(shapes)][::-1], *trials[len(shapes) :]) for point in trial["points"]]
    _report(points, tuned, config.optimizer, run)


class Tuned(NamedTuple):
    """Tuned batch sizes (rows) and learning rates at two model sizes (parameters), and the tuning runs' losses by name (inf: diverged)."""

    parameters: tuple[float, ...]
    rows: tuple[float, ...]
    rates: tuple[float, ...]
    trials: dict[str, float]

    def at(self, parameters: int) -> tuple[int, float]:
        """Return rows per step and learning rate for a model of `parameters` parameters, by the power law through the two model sizes."""
        return rows_and_rate(self.parameters, self.rows, self.rates, parameters)


def _tune(shapes: Sequence[ModelConfig], row: int, shared: tuple[Any, ...], config: LadderConfig, run: StageRun) -> Tuned:
    """Tune learning rates at two model sizes with the smallest batch, then batch sizes at the best rates, at the middle token multiple."""
    if len(config.rows) == len(config.rates) == 1:
        return Tuned((1.0, 2.0), (config.rows[0],) * 2, (config.rates[0],) * 2, {})
    scales = [shapes[0], shapes[len(shapes) // 2]]
    reached = len(_rung(scales[1], config.rows[0], config.rates[0], row, config).steps)
    middle = min((len(config.multiples) - 1) // 2, reached - 1)
    losses: list[dict[tuple[int, float], float]] = [{}, {}]
    tries = [(i, config.rows[0], rate) for i in (0, 1) for rate in config.rates]
    for again in (False, True):
        if again:
            rates = [_lowest(config.rates, [some[config.rows[0], rate] for rate in config.rates]) for some in losses]
            tries = [(i, rows, rates[i]) for i in (0, 1) for rows in config.rows[1:]]
        rungs = [(i, _rung(scales[i], rows, rate, row, config, slice(middle, middle + 1))) for i, rows, rate in tries]
        jobs = [(f"tuning-{i}-{rung.rows}-{rung.rate:.6g}", rung, run.seed("tuning", i)) for i, rung in rungs]
        trials = run_trials(run, _try, jobs, *shared, here=shared[-1].type != "cpu")
        for (i, rung), trial in zip(rungs, trials, strict=True):
            loss = trial["points"][0]["losses"]["validation"]
            losses[i][rung.rows, rung.rate] = float(np.nan_to_num(loss, nan=math.inf, posinf=math.inf))
    best = [min(some, key=some.__getitem__)[0] for some in losses]
    names = {
        f"width {shape.hidden_size}, {rows} rows, rate {rate:.3g}": loss
        for shape, some in zip(scales, losses, strict=True) for (rows, rate), loss in some.items()
    }  # fmt: skip
    return Tuned(tuple(float(matrix_parameters(shape)) for shape in scales), tuple(map(float, best)), tuple(rates), names)


def _try(name: str, *arguments: Any) -> dict[str, Any]:
    """Return the result of `_trunk`, or one point of infinite loss if training diverges because the learning rate is too high."""
    from puna.models.training.loop import TrainingDiverged

    try:
        return _trunk(name, *arguments)
    except PunaError as error:
        if not isinstance(error.__cause__, TrainingDiverged):
            raise
        return {"name": name, "points": [{"losses": {"validation": math.inf}}]}


def _lowest(values: Sequence[float], losses: Sequence[float]) -> float:
    """Return the minimum of the parabola in log(value) through the point with the lowest loss and its neighbours, if their losses are
    finite; else that point's value. Raise PunaError if every loss is infinite."""
    if losses[best := int(np.argmin(losses))] == math.inf:
        raise PunaError(f"ladder: training diverges at each of rates={values}; give lower rates")
    around = slice(best - 1, best + 2)
    if not 0 < best < len(values) - 1 or not np.isfinite(losses[around]).all():
        return values[best]
    a, b, _ = np.polyfit(np.log(values[around]), losses[around], 2)
    return float(np.exp(-b / (2 * a)))


def _rung(shape: ModelConfig, rows: int, rate: float, row: int, config: LadderConfig, points: slice = slice(None)) -> Rung:
    """Return a shape's rung. Raise PunaError if no point is within `max_flops`, or if the first point has too few steps."""
    parameters = matrix_parameters(shape)
    tokens = [multiple * config.tokens_per_parameter * parameters for multiple in config.multiples[points]]
    within = [one for one in tokens if config.max_flops is None or 6 * parameters * one <= config.max_flops]
    steps = tuple(round(one / (rows * row)) for one in within)
    where = f"ladder: width {shape.hidden_size} ({parameters:,} parameters)"
    if not steps:
        raise PunaError(f"{where} needs {6 * parameters * tokens[0]:.2g} FLOPs for its shortest run, more than max_flops="
            f"{config.max_flops:.2g}; leave the width out, or raise max_flops")  # fmt: skip
    if steps[0] < FEWEST_STEPS:
        raise PunaError(
            f"{where} on {within[0]:,.0f} tokens has {steps[0]} steps of {rows} rows of {row} tokens, below {FEWEST_STEPS}: its loss would "
            "not predict longer runs; use fewer rows, wider models, a larger first multiple or more tokens_per_parameter"
        )
    return Rung(shape, rows, rate, steps)


def _trunk(
    name: str, rung: Rung, seed: int, tokens: Artifact, heldout: tuple[Artifact, ...], begin: int, place: torch.device,
    config: LadderConfig, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Train a shape and return its points. Finished points are not computed again."""
    packed, held = set_aside(tokens, config.validation_share, config.validation_tokens)
    reader = Reader(packed, held, rung.rows, seed, begin)
    sets = {"validation": packed.validation_pieces(held)}
    for one in heldout:
        sets[one.id] = (whole := Packed.read(one)).validation_pieces(np.ones(len(whole.owners), dtype=bool))
    same = {"decay_share": config.decay_share, "heldout_tokens": {one: sum(map(len, pieces)) - len(pieces) for one, pieces in sets.items()}}
    questions = _questions(sets["validation"], config.questions)
    model, moments, at, points = fresh(rung.shape, seed).to(place), None, 0, []
    warmup = round(config.warmup_share * rung.steps[0])
    flops = 0.0
    for number, steps in enumerate(rung.steps):
        stem = steps - max(1, round(config.decay_share * steps))
        schedule = ScheduleSettings(learning_rate=rung.rate, warmup_steps=0 if number else warmup, shape="constant")
        state = folder / f"trunk-{number}"
        flops += _train(model, reader, at, stem, schedule, rung, seed, config, state, moments)
        at, moments = stem, moments_in(state)
        decay = partial(_decay, model, reader, at, steps, rung, seed, config, moments, sets, questions, flops)
        point = cached_object(folder / f"point-{number}.json", decay)
        read = sum(sum(reader.lengths(step)) for step in range(1, steps + 1))
        about = {"shape": rung.shape.model_dump_json(), "parameters": matrix_parameters(rung.shape), "tokens": read, "steps": steps}
        points.append({**about, "rows": rung.rows, "learning_rate": rung.rate, "seed": seed, **same, **point})
    return {"name": f"width {name}", "points": points}


def _decay(
    trunk: Transformer, reader: Reader, first: int, last: int, rung: Rung, seed: int, config: LadderConfig, moments: Any,
    sets: dict[str, list[Any]], questions: list[Question], flops: float, state: Path,
) -> dict[str, Any]:  # fmt: skip
    """Train a copy of the trunk while the learning rate falls to 0. Return both runs' FLOPs, losses and accuracy. `flops`: the trunk's."""
    from puna.models.training.trainer import computing_in

    size = config.compute.micro_batch_tokens
    branch = fresh(rung.shape, seed).to(next(trunk.parameters()).device)
    branch.load_state_dict(trunk.state_dict())
    schedule = ScheduleSettings(learning_rate=rung.rate, warmup_steps=0, shape="linear")
    flops += _train(branch, reader, first, last, schedule, rung, seed, config, state, moments)
    # As in pretrain, the loss is measured in the precision of training.
    with computing_in(branch, config.compute.precision_on(next(branch.parameters()).device.type)):
        losses = {name: mean_loss(branch, pieces, size) for name, pieces in sets.items()}
        task_loss, accuracy = _answer(branch, questions, size)
    return {"flops": flops, "losses": losses, "task_loss": task_loss, "accuracy": accuracy}


def _train(
    model: Transformer, reader: Reader, first: int, last: int, schedule: ScheduleSettings, rung: Rung, seed: int, config: LadderConfig,
    state: Path, moments: Any,
) -> float:  # fmt: skip
    """Train on the steps first + 1 to last; return the number of FLOPs."""
    settings = TrainConfig(steps=last - first, schedule=schedule, optimizer=config.optimizer, compute=config.compute)
    size, what = config.compute.micro_batch_tokens, f"a model of width {rung.shape.hidden_size} at rate {rung.rate:.3g}"
    return train_proxy(
        model, what, lambda step: reader.batches(first + step, size), lambda step: reader.lengths(first + step), settings, seed, state,
        moments, config.z_loss,
    ).flops  # fmt: skip


def _questions(pieces: Sequence[Any], wanted: int) -> list[Question]:
    """Return `wanted` questions, which ask if a held-out text continues unchanged or with two parts swapped. Raise PunaError if too few."""
    generator, questions = np.random.default_rng(0), list[Question]()
    size, part = PROMPT_TOKENS + OPTION_TOKENS, OPTION_TOKENS // PARTS
    starts = [(piece, start) for piece in pieces for start in range(0, len(piece) - size + 1, size)]
    swaps = [(i, j) for i in range(PARTS) for j in range(i + 1, PARTS)]
    for piece, start in starts:
        right = piece[start + PROMPT_TOKENS : start + size].reshape(PARTS, part)
        wrong = []
        for i, j in (swaps[k] for k in generator.permutation(len(swaps))):
            order = np.arange(PARTS)
            order[[i, j]] = j, i
            if (right[order] != right).any():
                wrong.append(right[order].ravel().tolist())
        if len(wrong) >= 3 and len(questions) < wanted:
            questions.append((piece[start : start + PROMPT_TOKENS].tolist(), [right.ravel().tolist(), *wrong[:3]]))
    if len(questions) < wanted:
        raise PunaError(f"ladder: the held-out documents give only {len(questions)} of {wanted} questions; raise validation_tokens")
    return questions


def _answer(model: Transformer, questions: Sequence[Question], micro_batch_tokens: int) -> tuple[float | None, float | None]:
    """Return the mean loss of the right options in nats per token, and the share of correct answers; None without questions."""
    import torch

    from puna.models.training.objectives.base import Targets, target_logprobs

    if not questions:
        return None, None
    nats, right = 0.0, 0
    for some in batch_by_size(questions, lambda one: len(one[0]) + sum(map(len, one[1])), micro_batch_tokens):
        targets = Targets.from_answers([prompt for prompt, _ in some], [options for _, options in some])
        targets = targets.to(next(model.parameters()).device)
        with torch.no_grad():
            sums = targets.sum_by_answer(target_logprobs(model, targets)).view(len(some), PARTS)
        nats -= float(sums[:, 0].double().sum())
        right += int((sums.argmax(1) == 0).sum())
    return nats / (OPTION_TOKENS * len(questions)), right / len(questions)


COLUMNS = ("shape", "parameters", "tokens", "flops", "task_loss", "accuracy", "seed", "rows", "learning_rate", "steps", "decay_share")


def _report(points: Sequence[dict[str, Any]], tuned: Tuned, optimizer: OptimizerSettings, run: StageRun) -> None:
    rows, series = [], dict[str, list[tuple[Any, float]]]()
    evaluations = [evaluation_row("tuning", name, loss, 1) for name, loss in tuned.trials.items() if loss < math.inf]
    run.metric("diverged_tries", len(tuned.trials) - len(evaluations))
    seeds: dict[int, list[int]] = {}
    for number, point in enumerate(points):
        if point["seed"] not in (own := seeds.setdefault(point["parameters"], [])):
            own.append(point["seed"])
        again = f", seed {len(own)}" if len(own) > 1 else ""
        columns = {name: point[name] for name in COLUMNS} | {"optimizer": optimizer.model_dump_json()}
        for name, loss in point["losses"].items():
            rows.append({"point": number, "heldout": name, "heldout_tokens": point["heldout_tokens"][name], "loss": loss, **columns})
        loss = point["losses"]["validation"]
        series.setdefault(f"{point['parameters']:,} parameters", []).append((point["flops"], loss))
        evaluations.append(evaluation_row(f"{point['parameters']:,} parameters", f"loss after {point['tokens']:,} tokens{again}", loss, 1))
    run.write_rows(rows, "points")
    run.write_rows(evaluations)
    run.metric("points", len(points))
    note = "One line is one trunk: each point is a decay from it."
    run.figure("ladder", Figure("Loss of the small runs", x="operations", y="nats per token", kind="scatter", series=series, note=note))
