"""Pretraining of the built-in model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from puna.stages.align.fitting import device, divergence_named, save_model
from puna.stages.contract import Figure, SeededConfig, StageConfig, StageRun, Tokenizer, Tokens, stage
from puna.stages.pretrain.packed import Packed, Reader, mean_loss
from puna.stages.pretrain.tokenizer import check_tokens, tokenizer_of
from puna.storage import PunaError
from puna.storage.work import write_text

if TYPE_CHECKING:
    import torch

    from puna.models.config import ModelConfig
    from puna.models.training.config import TrainConfig
    from puna.models.training.schedules import Ramp
    from puna.models.transformer import Transformer


class Shape(StageConfig):
    """Sizes of the decoder."""

    hidden_size: int = Field(192, ge=8, description="Width of the model")
    intermediate_size: int = Field(512, ge=8, description="Width of the feed-forward layers")
    num_hidden_layers: int = Field(4, ge=1, description="Layers")
    num_attention_heads: int = Field(6, ge=1, description="Query heads")
    num_key_value_heads: int = Field(2, ge=1, description="Key-value heads, shared by the query heads (GQA)")
    head_dim: int | None = Field(None, ge=2, description="Width of one head; null: hidden_size / num_attention_heads")
    rope_theta: float = Field(10_000.0, gt=1, description="Base of the rotary position frequencies")
    rms_norm_eps: float = Field(1e-5, gt=0, lt=1, description="Added to the mean square in RMSNorm")
    tie_word_embeddings: bool = Field(True, description="The output layer shares the embedding's matrix")
    initializer_range: float = Field(0.08, gt=0, le=1, description="Standard deviation of the initial weights")

    @model_validator(mode="after")
    def _heads_fit(self) -> Shape:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        return self

    def model(self, vocab_size: int, positions: int) -> ModelConfig:
        """The model's configuration with a vocabulary and a longest context, in tokens."""
        from puna.models.config import ModelConfig

        values = self.model_dump() | {"head_dim": self.head_dim or 0}
        return ModelConfig(vocab_size=vocab_size, max_position_embeddings=positions, **values)


class Optimizer(StageConfig):
    """The optimiser, and what it does with a step that goes wrong."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="AdamW; or Muon for the matrices inside the layers and AdamW for all else, at one learning rate"
    )
    weight_decay: float = Field(0.1, ge=0, le=1, description="Decoupled weight decay of matrices")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    beta2: float = Field(0.98, ge=0, lt=1, description="AdamW's decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, lt=1, description="Added to the root of AdamW's second moment")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum")
    clip: float = Field(1.0, gt=0, description="Largest global norm of the gradient")
    spike_window: int = Field(
        0, ge=0, le=10_000, description="Accepted steps against which loss and gradient norm are held, at least 8; 0: no spikes"
    )
    spike_limit: float = Field(
        10.0, gt=0, description="A step above the window's median by more than this is skipped, robust standard deviations"
    )
    max_skipped: int = Field(5, ge=1, description="Skipped steps in a row that stop the run")
    activation_checkpointing: bool = Field(
        False, description="Keep each layer's input only and compute the layer again in the backward pass: less memory, more time"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="fp32, or computing in bf16 over fp32 weights (GPU)")
    linear_precision: Literal["same", "int8", "fp8"] = Field(
        "same", description="Products of the layers' matrices: as the rest, or in 8 bits with a scale per row (fp8: GPU from 8.9 on)"
    )

    @model_validator(mode="after")
    def _window_holds(self) -> Optimizer:
        if 0 < self.spike_window < 8:
            raise ValueError(f"spike_window must be 0 or at least 8, not {self.spike_window}")
        return self


class Phase(StageConfig):
    """A stretch of training with its own schedule; the optimiser starts anew with it."""

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
    learning_rate: float = Field(6e-3, gt=0, le=1, description="Learning rate at the peak")
    warmup_steps: int = Field(50, ge=0, description="Steps in which the rate rises from 0")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="How the rate goes on: half a cosine, a line, a decay at the end (wsd), or constant"
    )
    final_ratio: float = Field(0.0, ge=0, le=1, description="Where the schedule ends, share of the peak")
    decay_steps: int = Field(0, ge=0, description="Steps of wsd's decay")
    anneal_steps: int = Field(0, ge=0, description="Last steps, in which the rate falls in a line to 0 (Llama 3, section 3.4.3)")
    average: int = Field(0, ge=0, description="Checkpoints of the annealing that are averaged into the model; 0: the last one is the model")

    ema: float = Field(
        0.0, ge=0, lt=1, description="Decay per step of a moving average of the weights that becomes the model; 0: none; not beside average"
    )

    @model_validator(mode="after")
    def _schedule_holds(self) -> Phase:
        self.train_config(Optimizer())
        if (self.ramp_steps > 0) != bool(self.rows_ramp or self.length_ramp):
            raise ValueError("ramp_steps goes with rows_ramp or length_ramp: set both or neither")
        for name in ("rows_ramp", "length_ramp"):
            values = getattr(self, name)
            if list(values) != sorted(values) or min(values, default=2) < (2 if name == "length_ramp" else 1):
                raise ValueError(f"{name} must not fall and must begin with {2 if name == 'length_ramp' else 1} at least, not {values}")
        if max(self.rows_ramp, default=0) > self.rows_per_step:
            raise ValueError(f"rows_ramp {self.rows_ramp} must not exceed rows_per_step {self.rows_per_step}")
        return self

    def train_config(self, optimizer: Optimizer) -> TrainConfig:
        """The loop's settings; ValueError where they contradict each other."""
        from puna.models.training.config import TrainConfig

        names = ("steps", "learning_rate", "warmup_steps", "schedule", "final_ratio", "decay_steps", "anneal_steps", "average", "ema")
        values = {name: getattr(self, name) for name in names} | optimizer.model_dump(exclude={"name"})
        return TrainConfig(**values, optimizer=optimizer.name)

    def growth(self) -> Ramp:
        """Rows of each step."""
        from puna.models.training.schedules import Ramp

        return Ramp((*self.rows_ramp, self.rows_per_step), max(1, self.ramp_steps))

    def reader(self, packed: Packed, excluded: NDArray[np.bool_], seed: int, begin: int) -> Reader:
        """What the phase reads, step by step."""
        from puna.models.training.schedules import Ramp

        row = int(np.diff(packed.starts[packed.rows]).max()) * self.join_rows
        longest = Ramp((*(min(length, row) for length in self.length_ramp), row), self.ramp_steps) if self.length_ramp else None
        return Reader(packed, excluded, self.rows_per_step, seed, begin, self.join_rows, self.growth(), longest)

    def check_plain(self, why: str) -> None:
        """ValueError where rows are joined or ramped, which an experiment cannot do."""
        if self.join_rows != 1 or self.ramp_steps:
            raise ValueError(f"phase.join_rows must be 1 and phase.ramp_steps 0: {why}")


class PretrainConfig(SeededConfig):
    """The model and how it is trained."""

    model: Shape = Field(Shape(), description="Sizes of the decoder")
    phases: tuple[Phase, ...] = Field((Phase(),), min_length=1, description="Stretches of training, in order")
    optimizer: Optimizer = Field(Optimizer(), description="The optimiser")
    pass_tokens: int = Field(8192, ge=16, description="Tokens computed at once; a larger step is split and its gradients added")
    validation_share: float = Field(0.01, gt=0, lt=0.5, description="Largest share of documents set aside to watch the loss on, fraction")
    validation_tokens: int = Field(40_000, ge=100, description="Tokens of those documents at most (the last one may go over)")
    validate_every: int = Field(100, ge=1, description="Steps between measurements of their loss")
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints to resume from; they change no result")


@stage(kind="model")
def pretrain(tokens: Tokens, tokenizer: Tokenizer, config: PretrainConfig, run: StageRun) -> None:
    """Train a Llama-family decoder from scratch on packed documents (Llama 3, sections 3.2 and 3.4).

    Attention stays inside each document. Every row is read once per epoch, in a new order each time. Phases
    follow each other: the first trains, later ones may lengthen the context; annealing takes the rate to 0 and
    averages the checkpoints on the way. A few training documents are set aside: their loss is in the log, and
    the metrics hold it before and after averaging. After a crash it goes on from the last checkpoint, bit by bit.
    """
    check_tokens(tokens, tokenizer)
    packed = Packed.read(tokens.path("tokens.parquet"))
    vocabulary = tokenizer_of(tokenizer)
    if int(packed.tokens.max()) >= vocabulary.vocab_size:
        raise PunaError(f"{tokens.id} holds token {int(packed.tokens.max())}, but {tokenizer.id} has {vocabulary.vocab_size} tokens")
    held = packed.validation(config.validation_share, config.validation_tokens)
    watch = Watch(packed.validation_pieces(held), config, run)
    row_length = int(np.diff(packed.starts[packed.rows]).max())
    model = _initial(config, vocabulary.vocab_size, row_length, run.seed("weights"))
    for number, phase in enumerate(config.phases):
        model = _prepared(model, phase, row_length)
        reader = phase.reader(packed, held, run.seed("rows", number), vocabulary.bos)
        _train(model, phase, number, reader, watch, config, run)
    _finish(model, watch, run)
    save_model(model, vocabulary, run.folder)


def _initial(config: PretrainConfig, vocab_size: int, positions: int, seed: int) -> Transformer:
    import torch

    from puna.kernels.quantized_linear import require_products
    from puna.models.transformer import Transformer

    if config.optimizer.linear_precision != "same":
        try:
            require_products(config.optimizer.linear_precision, device())
        except ValueError as error:
            raise PunaError(f"optimizer.linear_precision: {error}") from error
    shape = config.model.model(vocab_size, positions)
    return Transformer(shape, generator=torch.Generator().manual_seed(seed)).to(device())


def _prepared(model: Transformer, phase: Phase, row_length: int) -> Transformer:
    """The model as the phase needs it: its context, and its rotary base."""
    from puna.models.transformer import Transformer

    theta = phase.rope_theta or model.config.rope_theta
    positions = max(model.config.max_position_embeddings, row_length * phase.join_rows)
    shape = replace(model.config, rope_theta=theta, max_position_embeddings=positions)
    if shape == model.config:
        return model
    longer = Transformer(shape)
    longer.load_state_dict(model.state_dict())
    return longer.to(device())


class Watch:
    """The log of a run over its phases, and the loss on the documents set aside."""

    def __init__(self, pieces: Sequence[Any], config: PretrainConfig, run: StageRun) -> None:
        self.pieces, self.config, self.run = pieces, config, run
        self.total = sum(phase.steps for phase in config.phases)
        self.log: list[dict[str, Any]] = []
        self.validation: list[tuple[float, float]] = []
        self.before = self.after = math.nan
        self.flops = 0.0
        run.metric("validation_tokens", sum(len(piece) - 1 for piece in pieces))

    def loss(self, model: Transformer) -> float:
        """Loss on the documents set aside, in nats per token."""
        return mean_loss(model, self.pieces, self.config.pass_tokens)

    def file(self, number: int) -> Path:
        """Where the measurements of a phase survive a crash."""
        return self.run.scratch / f"validation-{number}.json"


def _train(model: Transformer, phase: Phase, number: int, reader: Reader, watch: Watch, config: PretrainConfig, run: StageRun) -> None:
    from puna.models import accounting
    from puna.models.training.loop import train
    from puna.models.training.objectives import LanguageModeling
    from puna.models.training.state import load_state

    done = len(watch.log)
    file = watch.file(number)
    measured: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}

    def measure(step: int, weights: Callable[[], Transformer]) -> None:
        if (step % config.validate_every == 0 or step == phase.steps) and str(step) not in measured:
            measured[str(step)] = watch.loss(weights())
            write_text(file, json.dumps(measured))

    def on_step(row: dict[str, float]) -> None:
        measure(int(row["step"]), lambda: model)
        run.progress(done + row["step"], watch.total, f"{phase.name}: loss {row['loss']:.3f}")

    folder = run.scratch / f"phase-{number}"
    # A crash between a checkpoint and its measurement: the weights of that step are in the checkpoint alone.
    if found := load_state(folder):
        tensors, record = found
        measure(record["step"], lambda: _restored(model, tensors))
    with divergence_named(f"{run.stage}, phase {phase.name},"):
        log = train(
            model,
            LanguageModeling(),
            lambda step: reader.batches(step, config.pass_tokens),
            phase.train_config(config.optimizer),
            run.seed("loop", number),
            checkpoint_dir=folder,
            checkpoint_every=config.checkpoint_every,
            on_step=on_step,
        )
    watch.before = measured[str(phase.steps)]
    watch.after = watch.loss(model) if phase.average or phase.ema else watch.before
    watch.flops += sum(accounting.training_flops(model.config, reader.lengths(step)) for step in range(1, phase.steps + 1))
    tokens_at = np.cumsum([row["tokens"] for row in log]) + sum(row["tokens"] for row in watch.log)
    watch.validation += [(float(tokens_at[int(step) - 1]), loss) for step, loss in sorted(measured.items(), key=lambda m: int(m[0]))]
    watch.log += [
        {**row, "step": done + int(row["step"]), "phase": float(number), "validation_loss": measured.get(str(int(row["step"])))}
        for row in log
    ]
    run.metric(f"epochs_{phase.name}", reader.rows_before(phase.steps + 1) / reader.epoch_rows)


def _restored(model: Transformer, tensors: dict[str, torch.Tensor]) -> Transformer:
    """A model with the weights of a checkpoint, before averaging."""
    from puna.models.transformer import Transformer

    restored = Transformer(model.config)
    weights = {name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")}
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    restored.load_state_dict(weights)
    return restored.to(device())


SMOOTH = 100
"""Points of the plotted training loss; each is the mean of the steps it stands for."""


def _finish(model: Transformer, watch: Watch, run: StageRun) -> None:
    from puna.models import accounting

    log = watch.log
    run.write_rows([{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in log], "training_log")
    tokens, seconds = sum(row["tokens"] for row in log), sum(row["seconds"] for row in log)
    costs = accounting.parameters(model.config)
    rate = accounting.matrix_rate() if device().type == "cpu" else None
    run.metric("parameters", costs.total)
    run.metric("parameters_without_embeddings", costs.layers)
    run.metric("steps", len(log))
    run.metric("trained_tokens", int(tokens))
    run.metric("flops", watch.flops)
    run.metric("tokens_per_second", tokens / seconds)
    run.metric("flops_per_second", watch.flops / seconds)
    if rate is not None:
        run.metric("matrix_flops_per_second", rate)
        run.metric("model_flops_utilization", watch.flops / seconds / rate)
    run.metric("skipped_steps", int(sum(row["skipped"] for row in log)))
    tail = [row["loss"] for row in log[-max(1, len(log) // 20) :] if math.isfinite(row["loss"])]
    if tail:
        run.metric("final_training_loss", sum(tail) / len(tail))
    run.metric("validation_loss", watch.after)
    run.metric("validation_loss_before_averaging", watch.before)
    run.metric("averaging_gain", watch.before - watch.after)
    x = np.cumsum([row["tokens"] for row in log])
    groups = np.array_split(np.arange(len(log)), min(SMOOTH, len(log)))
    training = [(float(x[g[-1]]), float(np.mean([log[i]["loss"] for i in g]))) for g in groups]
    series: dict[str, list[tuple[Any, float]]] = {
        "training": [point for point in training if math.isfinite(point[1])],
        "set aside": list(watch.validation),
    }
    run.figure("loss", Figure(title="Pretraining loss", x="tokens", y="nats per token", series=series))
    rates: list[tuple[Any, float]] = [(float(x[g[-1]]), log[g[-1]]["learning_rate"]) for g in groups]
    run.figure("learning_rate", Figure(title="Learning rate", x="tokens", y="learning rate", series={"rate": rates}))
