"""One training loop for every objective.

A step's batch is a function of the step's number, the learning rate too, and the random generator is
seeded from (seed, step): weights, optimiser moments and the running average are all the state there is,
and a run resumed from a checkpoint ends with bit-identical weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from puna.models.training.schedules import SCHEDULES, Schedule, learning_rate
from puna.models.training.state import load_state, save_state

Row = dict[str, float]
TrainLog = list[Row]
Batches = Callable[[int], Any]
RESERVED = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "seconds", "skipped")


class TrainingDiverged(RuntimeError):
    """Loss or gradient was not finite several steps in a row."""


@dataclass(frozen=True)
class TrainConfig:
    """How a model is optimised.

    steps           optimisation steps
    learning_rate   at the peak
    warmup_steps    linear warm-up
    schedule        see `schedules.learning_rate`
    final_ratio     where cosine, linear and wsd end, as a share of the peak
    decay_steps     length of wsd's decay
    anneal_steps    the last steps, in which the rate falls linearly to 0
    average         how many checkpoints, evenly spread over the annealing and ending with its last step,
                    are averaged into the final weights (Llama 3, section 3.4.3); 0 keeps the last ones
    weight_decay    decoupled (AdamW); matrices only: none on norms, biases and embeddings
    beta1, beta2, epsilon    Adam's
    clip            largest global gradient norm; None: no clipping
    max_skipped     a step whose loss or gradient is not finite changes nothing; this many in a row stop
                    the run
    precision       fp32, or bf16 autocast over fp32 weights (GPU)
    """

    steps: int
    learning_rate: float
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final_ratio: float = 0.0
    decay_steps: int = 0
    anneal_steps: int = 0
    average: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float | None = 1.0
    max_skipped: int = 5
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        problems = [
            (self.steps >= 1, "steps must be at least 1"),
            (self.learning_rate > 0, "learning_rate must be positive"),
            (self.schedule in SCHEDULES, f"schedule must be one of {', '.join(SCHEDULES)}"),
            (0 <= self.warmup_steps < max(self.steps, 2), "warmup_steps must lie in 0..steps-1"),
            (0 <= self.final_ratio <= 1, "final_ratio must lie in 0..1"),
            (self.schedule != "constant" or not self.final_ratio, "schedule constant has no final_ratio"),
            ((self.schedule == "wsd") == (self.decay_steps > 0), "decay_steps belongs to schedule wsd"),
            (self.decay_steps + self.warmup_steps <= self.steps, "warm-up and decay overlap"),
            (self.anneal_steps + self.warmup_steps <= self.steps, "warm-up and annealing overlap"),
            (self.anneal_steps >= 0, "anneal_steps must not be negative"),
            (0 <= self.average <= self.anneal_steps, "average must lie in 0..anneal_steps"),
            (self.weight_decay >= 0, "weight_decay must not be negative"),
            (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "beta1 and beta2 must lie in [0, 1)"),
            (self.clip is None or self.clip > 0, "clip must be positive or None"),
            (self.max_skipped >= 1, "max_skipped must be at least 1"),
            (self.precision in ("fp32", "bf16"), "precision must be fp32 or bf16"),
        ]
        wrong = [text for holds, text in problems if not holds]
        if wrong:
            raise ValueError("TrainConfig: " + "; ".join(wrong))

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        return learning_rate(
            step,
            steps=self.steps,
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            schedule=self.schedule,
            final_ratio=self.final_ratio,
            decay_steps=self.decay_steps,
            anneal_steps=self.anneal_steps,
        )

    def averaged_steps(self) -> frozenset[int]:
        """The steps after which the weights enter the average."""
        start = self.steps - self.anneal_steps
        return frozenset(
            start + math.ceil(self.anneal_steps * k / self.average) for k in range(1, self.average + 1)
        )


def train(
    model: nn.Module,
    objective: Callable[..., tuple[Tensor, dict[str, Any]]],
    batches: Batches,
    config: TrainConfig,
    seed: int,
    checkpoint_dir: Path | None = None,
    checkpoint_every: int = 0,
    on_step: Callable[[Row], None] | None = None,
) -> TrainLog:
    """Optimise `model` in place and return one row per step.

    batches(step) gives the batch of a step, counted from 1, or a list of micro-batches whose gradients
    are accumulated; the same step must always give the same batch. Only parameters that require a
    gradient are trained and checkpointed. Rows: step, loss, learning_rate, gradient_norm (before
    clipping), tokens (of this step's rows), seconds (of this step), skipped (0 or 1), and the
    objective's metrics.

    With `checkpoint_dir` the state is kept there every `checkpoint_every` steps and at the end, and a
    run that finds one continues after it, calling `on_step` for new steps only. It refuses the state of
    another configuration or seed, or of other initial weights, with ValueError. `TrainingDiverged` after
    `max_skipped` steps in a row without a finite loss and gradient.
    """
    updater = Updater(model, objective, config)
    identity = {"config": asdict(config), "seed": seed, "initial": weights_digest(model)}
    average: dict[str, Tensor] = {}
    first, log = _resume(checkpoint_dir, updater, average, identity)
    averaged_steps = config.averaged_steps()
    was_training = model.training
    model.train()
    for step in range(first, config.steps + 1):
        row = updater.step(step, batches(step), seed)
        log.append(row)
        check_skips(log, config.max_skipped)
        if step in averaged_steps:
            _include(average, updater.parameters, sum(s <= step for s in averaged_steps))
        if checkpoint_dir is not None and (
            step == config.steps or (checkpoint_every and step % checkpoint_every == 0)
        ):
            tensors = updater.tensors() | {f"average.{name}": value for name, value in average.items()}
            save_state(checkpoint_dir, step, tensors, {**identity, "log": log})
        if on_step is not None:
            on_step(row)
    model.train(was_training)
    with torch.no_grad():
        for name, value in average.items():
            updater.parameters[name].copy_(value)
    return log


class Updater:
    """A model, its objective and AdamW, one optimisation step at a time."""

    def __init__(
        self, model: nn.Module, objective: Callable[..., tuple[Tensor, dict[str, Any]]], config: TrainConfig
    ) -> None:
        self.model, self.objective, self.config = model, objective, config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        self.device = next(iter(self.parameters.values())).device
        plain = undecayed(model)
        groups = [
            {
                "params": [p for name, p in self.parameters.items() if (name in plain) == skip],
                "weight_decay": 0.0 if skip else config.weight_decay,
            }
            for skip in (False, True)
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def step(self, step: int, batch: Any, seed: int, rate: float | None = None) -> Row:
        """One step on a batch or on a list of micro-batches; a step that is not finite changes nothing."""
        started = time.perf_counter()
        rate = self.config.rate(step) if rate is None else rate
        micro = list(batch) if isinstance(batch, list | tuple) else [batch]
        loss, metrics = self._accumulate(micro, _step_seed(seed, step))
        norm = self._gradient_norm()
        names = list(metrics)
        # One transfer for everything that is logged.
        values = torch.stack([loss, norm, *metrics.values()]).tolist()
        skipped = not (math.isfinite(values[0]) and math.isfinite(values[1]))
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "step": step,
            "loss": values[0],
            "learning_rate": rate,
            "gradient_norm": values[1],
            "tokens": sum(len(part) for part in micro),
            "seconds": time.perf_counter() - started,
            "skipped": int(skipped),
            **dict(zip(names, values[2:], strict=True)),
        }

    def _accumulate(self, micro: Sequence[Any], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        if not micro:
            raise ValueError("a step needs at least one batch")
        count = getattr(self.objective, "totals", None)
        if count is None and len(micro) > 1:
            raise TypeError("only an objective with totals() can split a step into micro-batches")
        totals: dict[str, float] = {}
        for part in micro if count is not None else ():
            for name, value in count(part).items():
                totals[name] = totals.get(name, 0.0) + value
        loss = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}
        with _seeded(seed, self.device):
            for part in micro:
                moved = part.to(self.device) if hasattr(part, "to") else part
                with torch.autocast(
                    self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"
                ):
                    share, values = (
                        self.objective(self.model, moved)
                        if count is None
                        else self.objective(self.model, moved, totals)
                    )
                share.backward()
                loss = loss + share.detach().float()
                for name, value in values.items():
                    if name in RESERVED:
                        raise ValueError(f"metric {name!r} would hide a column of the training log")
                    value = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach()
                    metrics[name] = metrics[name] + value if name in metrics else value
        return loss, metrics

    def _gradient_norm(self) -> Tensor:
        parameters = list(self.parameters.values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.clip is not None and gradients:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip, norm)
        return norm.to(self.device, torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and Adam's moments, by name."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state[f"weight.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value
        return state

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight.{name}"])
                self.optimizer.state.pop(parameter, None)
                moments = {
                    key: tensors[f"{key}.{name}"].to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}.{name}" in tensors
                }
                if moments:
                    self.optimizer.state[parameter] = moments


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay: vectors (norms, biases) and embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name for name, p in model.named_parameters() if p.ndim < 2 or id(p) in embeddings}


def weights_digest(model: nn.Module) -> str:
    """sha256 over the names, types, shapes and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_identity(folder: Path | None, record: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise ValueError when a checkpoint's record is of another run."""
    for key, value in json.loads(json.dumps(identity)).items():
        if record.get(key) != value:
            raise ValueError(
                f"{folder} holds the state of another run: {key} was {record.get(key)!r}, now it is "
                f"{value!r}; remove the folder or restore what changed"
            )


def _resume(
    folder: Path | None, updater: Updater, average: dict[str, Tensor], identity: dict[str, Any]
) -> tuple[int, TrainLog]:
    found = None if folder is None else load_state(folder)
    if found is None:
        return 1, []
    tensors, record = found
    check_identity(folder, record, identity)
    updater.restore(tensors)
    average.update(
        {
            name.removeprefix("average."): value
            for name, value in tensors.items()
            if name.startswith("average.")
        }
    )
    return record["step"] + 1, record["log"]


def _include(average: dict[str, Tensor], parameters: dict[str, nn.Parameter], count: int) -> None:
    """Update the running mean with the `count`-th set of weights."""
    for name, parameter in parameters.items():
        value = parameter.detach()
        if count == 1:
            average[name] = value.clone()
        else:
            average[name] = average[name].to(value.device).lerp(value, 1.0 / count)


def check_skips(log: TrainLog, allowed: int) -> None:
    """Raise TrainingDiverged when the last `allowed` rows were all skipped."""
    recent = log[-allowed:]
    if len(recent) == allowed and all(row["skipped"] for row in recent):
        last = recent[-1]
        raise TrainingDiverged(
            f"loss or gradient was not finite in {allowed} steps in a row, up to step {last['step']:.0f} "
            f"(loss {last['loss']}, gradient norm {last['gradient_norm']}, learning rate "
            f"{last['learning_rate']:.3g}): lower the learning rate, warm up longer or clip harder"
        )


def _step_seed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


class _seeded:
    """The default torch generators seeded inside, as they were outside (dropout of adapters uses them)."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        devices = [device] if device.type == "cuda" else []
        self.fork = torch.random.fork_rng(devices=devices)

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        self.fork.__exit__(*error)
