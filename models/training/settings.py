"""Settings of training (optimizer, schedule, compute, adapters), shared by the training stages and their forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, model_validator

from puna.models.settings import NO_RESULT, Settings
from puna.models.training.optimizers import OPTIMIZERS
from puna.models.training.parallel.layout import Layout
from puna.models.training.registry import own_parameters, parameters_help
from puna.models.training.schedules import Schedule, learning_rate

Steps = float  # a number of optimization steps; below 1, a share of all steps


class OptimizerSettings(Settings):
    """Settings of the optimizer and of skipped steps: a step is skipped if its loss or gradient norm is not finite, or is a spike."""

    name: str = Field(
        "adamw", description="; ".join(f"{name}: {kind.description}" for name, kind in OPTIMIZERS.items()) + ". AdamW updates weights that "
        "an optimizer cannot, at the same learning rate", json_schema_extra=lambda schema: schema.update(enum=list(OPTIMIZERS)),
    )  # fmt: skip
    parameters: dict[str, float] = Field(
        {}, description=f"The optimizer's own parameters. {parameters_help({name: kind.__init__ for name, kind in OPTIMIZERS.items()})}"
    )
    weight_decay: float = Field(0.1, ge=0, le=1, description="Decoupled weight decay of matrices; none on norms, biases and embeddings")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, lt=1, description="Number added to the square root of AdamW's second moment")
    embedding_scale: float = Field(
        1.0, gt=0, le=100, description="Factor on the learning rate of the token embeddings; a step changes few of their rows"
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="Global norm to which the gradient is clipped; null: no clipping")
    spike_window: int = Field(
        0, ge=0, le=10_000, description="Number of accepted steps to compare a step with, at least 8; 0: no detection, as in PPO and GRPO"
    )
    spike_limit: float = Field(
        10.0, gt=0, description="A loss or gradient norm this many robust standard deviations above the window's median is a spike"
    )
    max_skipped: int = Field(5, ge=1, description="Number of skipped steps in a row that stops the run (PPO and GRPO: two rollouts)")
    state_in: Literal["memory", "file"] = Field(
        "memory", description="Place of the optimizer's state. memory: the device's memory. file: unnamed, memory-mapped files in TMPDIR; "
        "the CPU then updates the weights, and state that does not fit into free memory is on disk",
        json_schema_extra=NO_RESULT,
    )  # fmt: skip

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSettings:
        if 0 < self.spike_window < 8:
            raise ValueError(f"spike_window must be 0 or at least 8, not {self.spike_window}")
        self.own()
        return self

    def own(self) -> dict[str, float]:
        """Return the optimizer's own parameters; missing ones have their defaults."""
        return own_parameters(OPTIMIZERS[self.name].__init__, self.parameters, f"optimizer {self.name}")

    def implementations(self) -> list[Callable[..., Any]]:
        """Return the classes of the optimizers in use: the chosen optimizer's and AdamW's."""
        return [OPTIMIZERS[name] for name in sorted({self.name, "adamw"})]

    @property
    def state_bytes(self) -> int:
        """Return the minimum bytes of optimizer state per parameter in the device's memory."""
        return OPTIMIZERS[self.name].state_bytes if self.state_in == "memory" else 0


class ScheduleSettings(Settings):
    """Learning-rate schedule of a run, and the averaging of its final weights. Numbers of steps below 1 are shares of all steps."""

    learning_rate: float | None = Field(None, gt=0, le=1, description="Learning rate at the peak; null: the optimizer's default")
    warmup_steps: Steps = Field(0.05, ge=0, description="Steps in which the rate rises from 0; below 1: share of all steps")
    shape: Schedule = Field(
        "cosine", description="After the warm-up: half a cosine, a linear decay, constant, or constant with a decay at the end (wsd)"
    )
    final_ratio: float = Field(0.0, ge=0, le=1, description="Rate at the end, as a share of the peak")
    decay_steps: Steps = Field(0, ge=0, description="wsd: steps of the decay; below 1: share of all steps. cosine: steps of the whole "
        "curve, warm-up included, if the run ends earlier; 0: the run's steps")  # fmt: skip
    anneal_steps: Steps = Field(
        0, ge=0, description="Last steps, in which the rate falls linearly to 0 (Llama 3, section 3.4.3); below 1: share of all steps"
    )
    average: int = Field(0, ge=0, description="Number of annealing steps whose resulting weights are averaged; 0: no average")
    ema: float = Field(
        0.0, ge=0, lt=1, description="Decay per step of the weights' moving average, which becomes the model; 0: none; not with average"
    )

    @model_validator(mode="after")
    def _consistent(self) -> ScheduleSettings:
        for name in ("warmup_steps", "decay_steps", "anneal_steps"):
            value = getattr(self, name)
            if value >= 1 and value != int(value):
                raise ValueError(f"{name} must be a whole number, or a share below 1, not {value}")
        if self.shape == "constant" and self.final_ratio:
            raise ValueError("a constant schedule has no final_ratio")
        if (self.shape == "wsd") != (self.decay_steps > 0) and (self.shape != "cosine" or self.decay_steps < 1):
            raise ValueError("decay_steps belongs to the schedule wsd: set both or neither; for a cosine it is a number of steps")
        if self.ema and self.average:
            raise ValueError("ema and average are two ways to the final weights: choose one")
        return self

    def peak(self, optimizer: OptimizerSettings) -> float:
        return self.learning_rate or OPTIMIZERS[optimizer.name].learning_rate

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        return _resolve(self.warmup_steps, steps, steps - 1)

    def decay(self, steps: int) -> int:
        """Return the number of steps of wsd's decay, or of the whole cosine, in a run of `steps` steps; 0 if `decay_steps` is 0."""
        count = _resolve(self.decay_steps, steps, steps - self.warmup(steps))
        return max(1, count) if self.decay_steps else 0

    def anneal(self, steps: int) -> int:
        return _resolve(self.anneal_steps, steps, steps - self.warmup(steps))

    def check(self, steps: int) -> None:
        """Raise ValueError if the schedule does not fit into a run of `steps` steps."""
        warmup, decay, anneal = self.warmup(steps), self.decay(steps), self.anneal(steps)
        if warmup >= max(steps, 2):
            raise ValueError(f"schedule.warmup_steps must lie in 0..steps-1 ({steps - 1}), not {warmup}")
        if self.shape == "cosine":
            if 0 < decay < steps:
                raise ValueError(f"a cosine's schedule.decay_steps must be at least the run's steps ({steps}), not {decay}")
            decay = 0
        if decay + warmup > steps or anneal + warmup > steps:
            end = max(decay, anneal)
            raise ValueError(f"the schedule's warm-up and its decay or annealing overlap: {warmup} + {end} of {steps} steps")
        if self.average > anneal:
            raise ValueError(f"schedule.average must lie in 0..anneal_steps ({anneal}), not {self.average}")

    def of_part(self, share: float) -> ScheduleSettings:
        """Return the schedule for a share (0 to 1) of the run: all numbers of steps are multiplied by the share."""
        steps = {name: getattr(self, name) for name in ("warmup_steps", "decay_steps", "anneal_steps")}
        return self.replace(**{name: max(1, int(value * share)) if value >= 1 else value for name, value in steps.items()})


def _resolve(value: Steps, steps: int, most: int) -> int:
    """Return `value` if it is at least 1; else return the share `value` of `steps`, rounded, but at most `most`."""
    return min(round(value * steps), most) if value < 1 else int(value)


class ComputeSettings(Settings):
    """Settings of a step: precision, memory, processes and saving. Without MoE or dropout, they change results only by rounding."""

    precision: Literal["auto", "fastest", "fp32", "bf16"] = Field(
        "auto", description="fp32; or bf16: the model computes in bf16, gradients are added up and weights updated in fp32. "
        "auto: bf16 on a GPU, fp32 on a CPU; fastest: bf16 on a CPU too if a measurement at start finds it faster",
    )  # fmt: skip
    activation_checkpointing: bool = Field(
        False, description="Keep only each layer's input and recompute the layer in the backward pass: less memory, more time"
    )
    deterministic: bool = Field(
        False,
        description="On a GPU, sum in the same order in every run, so that a resumed run gives the same bits; torch's operators are then "
        "slower. On a CPU, the order is always the same",
    )
    micro_batch_tokens: int = Field(
        8192, ge=16, description="Maximum tokens of a forward and backward pass; a step with more is split, and its gradients are summed"
    )
    layout: Layout = Field(
        Layout(), description="Processes that train together, along each axis; repeated if more are started by torchrun or --processes",
        json_schema_extra=NO_RESULT,
    )  # fmt: skip
    save_seconds: float = Field(
        10.0, gt=0,
        description="Seconds between saves of the training state, from which a crashed run continues; longer if saving would take more "
        "than 2 % of the time. It changes no result", json_schema_extra=NO_RESULT,
    )  # fmt: skip

    def precision_on(self, device: str) -> Literal["fp32", "bf16"]:
        if self.precision in ("fp32", "bf16"):
            return self.precision
        from puna.models.accounting import bf16_pays
        from puna.models.training.parallel.mesh import measured_by_rank_0

        return "bf16" if device == "cuda" or (self.precision == "fastest" and measured_by_rank_0("bf16_pays", bf16_pays)) else "fp32"


class TrainConfig(Settings):
    """Settings of the training loop: number of steps, schedule, optimizer and computation."""

    steps: int = Field(ge=1, description="Optimization steps")
    schedule: ScheduleSettings = Field(ScheduleSettings(), description="Learning rate over the run")
    optimizer: OptimizerSettings = Field(OptimizerSettings(), description="The optimizer")
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainConfig:
        self.schedule.check(self.steps)
        return self

    @property
    def warmup_steps(self) -> int:
        return self.schedule.warmup(self.steps)

    @property
    def anneal_steps(self) -> int:
        return self.schedule.anneal(self.steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return learning_rate(
            step, steps=self.steps, peak=self.schedule.peak(self.optimizer), warmup_steps=self.warmup_steps, schedule=self.schedule.shape,
            final_ratio=self.schedule.final_ratio, decay_steps=self.schedule.decay(self.steps), anneal_steps=self.anneal_steps,
        )  # fmt: skip

    def averaged_steps(self) -> frozenset[int]:
        """Return the steps whose resulting weights are averaged: evenly spaced over the annealing, the last step included."""
        count, anneal = self.schedule.average, self.anneal_steps
        return frozenset(self.steps - anneal + math.ceil(anneal * k / count) for k in range(1, count + 1))


class TrainingSettings(Settings):
    """Settings for training a model on a set of examples."""

    epochs: float = Field(1.0, gt=0, le=1000, description="Passes over the examples")
    steps: int | None = Field(None, ge=1, description="Number of optimization steps; null: computed from `epochs`")
    batch_size: int = Field(32, ge=1, description="Examples per step")
    schedule: ScheduleSettings = Field(ScheduleSettings(), description="Learning rate over the run")
    optimizer: OptimizerSettings = Field(OptimizerSettings(weight_decay=0.0, beta2=0.98), description="The optimizer")
    compute: ComputeSettings = Field(ComputeSettings(micro_batch_tokens=4096), description="Precision and memory")

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainingSettings:
        if self.steps is not None:
            self.schedule.check(self.steps)
        return self

    def train_config(self, examples: int) -> TrainConfig:
        """Return the training loop's settings for `examples` examples. Without `steps`, epochs are rounded up to whole steps."""
        steps = self.steps or max(1, math.ceil(self.epochs * examples / self.batch_size))
        return TrainConfig(steps=steps, schedule=self.schedule, optimizer=self.optimizer, compute=self.compute)


Projection = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"
]


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021): a matrix W becomes W + alpha / rank * B A; the adapters are merged into W at the end."""

    rank: int = Field(16, ge=1, description="Rank of the adapters")
    alpha: float = Field(32.0, gt=0, description="Numerator of the adapters' scale, alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the adapters' input")
    targets: tuple[Projection, ...] = Field((), description="Projections that get an adapter; empty: all in the model's layers")
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) in place of alpha / rank (rsLoRA, Kalajdzievski 2023)")
    dora: bool = Field(False, description="Train each row's norm separately from its direction (DoRA, Liu et al. 2024)")
    initialization: Literal["zero", "pissa"] = Field(
        "zero", description="zero: B starts at 0; pissa: A and B start as W's largest singular directions (Meng et al. 2024)"
    )
    loraplus_ratio: float = Field(1.0, ge=1, description="Learning rate of B over that of A (LoRA+, Hayou et al. 2024)")
    quantization: Literal["none", "nf4"] = Field(
        "none",
        description="Format of the layers' frozen matrices: as stored, or 4-bit NF4 with double quantization (QLoRA, Dettmers et al. 2023; "
        "needs bitsandbytes). The adapters are then merged into the 4-bit values",
    )
    keep: bool = Field(
        True, description="Keep the adapters beside the merged model, in PEFT's layout (`puna export --format adapter`); not with pissa"
    )

    @model_validator(mode="after")
    def _methods_go_together(self) -> LoraSettings:
        if self.dora and self.initialization == "pissa":
            raise ValueError("dora and initialization pissa do not go together: choose one")
        if self.quantization != "none" and (self.dora or self.initialization == "pissa"):
            raise ValueError("dora and initialization pissa need unquantized matrices: set quantization to none")
        return self

    def unmet(self, where: str) -> list[str]:
        missing = self.quantization == "nf4" and find_spec("bitsandbytes") is None
        return [f"{where}.quantization: bitsandbytes is not installed; pip install 'puna[qlora]', or set it to none"] if missing else []
