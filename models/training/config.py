"""How a model is optimised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from puna.models.training.schedules import SCHEDULES, Schedule, learning_rate


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
    ema             decay per step of an exponential moving average that becomes the final weights; 0: none
    optimizer       adamw; or muon for the matrices inside the layers and AdamW for all other weights, at the
                    same learning rate and weight decay
    weight_decay    decoupled (AdamW); matrices only: none on norms, biases and embeddings
    beta1, beta2, epsilon    Adam's
    momentum        Muon's
    clip            largest global gradient norm; None: no clipping
    spike_window    accepted steps against which a step's loss and gradient norm are held; 0: no detection
    spike_limit     above median + this many (robust) standard deviations of that window is a spike
    max_skipped     a step that is not finite or is a spike changes nothing; this many in a row stop the run
    activation_checkpointing    keep each layer's input only and compute the layer again in the backward pass
    precision       fp32; or bf16: the model computes in bf16, gradients are added up in fp32 and
                    AdamW works on fp32 weights (for GPUs: a CPU is far slower in bf16)
    linear_precision    same: the layers' matrices multiply in `precision`; or int8, fp8: both factors rounded to
                    8 bits with a scale per row, forward and for the gradient of the input, never for that of
                    the weights (`kernels.quantized_linear`). Embedding, heads and routers stay as they are
    """

    steps: int
    learning_rate: float
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final_ratio: float = 0.0
    decay_steps: int = 0
    anneal_steps: int = 0
    average: int = 0
    ema: float = 0.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95
    clip: float | None = 1.0
    spike_window: int = 0
    spike_limit: float = 10.0
    max_skipped: int = 5
    activation_checkpointing: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    linear_precision: Literal["same", "int8", "fp8"] = "same"

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
            (0 <= self.ema < 1, "ema must lie in [0, 1)"),
            (not (self.ema and self.average), "ema and average are two ways to the final weights: choose one"),
            (self.optimizer in ("adamw", "muon"), "optimizer must be adamw or muon"),
            (0 <= self.momentum < 1, "momentum must lie in [0, 1)"),
            (self.spike_window == 0 or self.spike_window >= 8, "spike_window must be 0 or at least 8"),
            (self.spike_limit > 0, "spike_limit must be positive"),
            (self.weight_decay >= 0, "weight_decay must not be negative"),
            (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "beta1 and beta2 must lie in [0, 1)"),
            (self.clip is None or self.clip > 0, "clip must be positive or None"),
            (self.max_skipped >= 1, "max_skipped must be at least 1"),
            (self.precision in ("fp32", "bf16"), "precision must be fp32 or bf16"),
            (self.linear_precision in ("same", "int8", "fp8"), "linear_precision must be same, int8 or fp8"),
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
