"""What the training stages of this flow share: settings, loading, the loop, the log, the checkpoint."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from puna.stages.contract import Figure, StageConfig, StageRun
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    import torch

    from puna.models.tokenizer import Tokenizer
    from puna.models.training.loop import TrainConfig
    from puna.models.transformer import Transformer

CHECKPOINT_STEPS = 50
"""Steps between checkpoints of a run; they change no result."""


class Fitting(StageConfig):
    """How a model is trained on a set of examples."""

    epochs: float = Field(1.0, gt=0, le=1000, description="Passes over the examples")
    batch_size: int = Field(32, ge=1, description="Examples per step")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="AdamW; or Muon for the matrices inside the layers and AdamW for all else, at one learning rate"
    )
    learning_rate: float = Field(1e-3, gt=0, le=1, description="Learning rate at the peak")
    warmup: float = Field(0.05, ge=0, lt=1, description="Share of the steps in which the rate rises from 0, fraction")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="How the rate goes on after the warm-up: half a cosine or a line down to 0, or constant"
    )
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW's decoupled weight decay of matrices")
    beta2: float = Field(0.98, ge=0, lt=1, description="AdamW's decay of the second moment")
    clip: float = Field(1.0, gt=0, description="Largest global norm of the gradient")
    row_tokens: int = Field(
        4096, ge=16, description="Tokens of one packed row: a step's examples go into as many rows as they need, tokens"
    )

    def train_config(self, steps: int) -> TrainConfig:
        """The loop's settings for that many steps."""
        from puna.models.training.loop import TrainConfig

        return TrainConfig(
            steps=steps,
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,
            warmup_steps=min(round(self.warmup * steps), steps - 1),
            schedule=self.schedule,
            weight_decay=self.weight_decay,
            beta2=self.beta2,
            clip=self.clip,
        )

    def steps(self, examples: int) -> int:
        """Steps in `epochs` passes over that many examples, the last one full."""
        return max(1, math.ceil(self.epochs * examples / self.batch_size))


def check_trl(fitting: Fitting) -> None:
    """ValueError for settings that TRL's trainers do not have."""
    if fitting.optimizer != "adamw":
        raise ValueError(f"engine trl trains with adamw: fitting.optimizer cannot be {fitting.optimizer}")


@dataclass(frozen=True)
class Example:
    """One prompt with its answers as token ids.

    masks   per answer token, True where it counts in a preference term
    groups  answers that were ranked against each other, best first, as indices of answers
    """

    prompt: list[int]
    answers: list[list[int]]
    masks: list[list[bool]]
    groups: list[list[int]]

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.answers))


def render(tokenizer: Tokenizer, prompt: str, groups: Sequence[Sequence[str]]) -> Example:
    """A prompt and groups of finished answers in the chat format; format tokens are masked."""
    pairs = [tokenizer.render_pair(prompt, answer) for group in groups for answer in group]
    numbers = iter(range(len(pairs)))
    return Example(
        prompt=list(pairs[0][0]),
        answers=[list(ids) for _, ids, _ in pairs],
        masks=[[not flag for flag in mask] for _, _, mask in pairs],
        groups=[[next(numbers) for _ in group] for group in groups],
    )


def check_lengths(examples: Sequence[Example], names: Sequence[str], row_tokens: int) -> None:
    """PunaError names the first example that no row can hold."""
    for example, name in zip(examples, names, strict=True):
        if len(example) > row_tokens:
            raise PunaError(
                f"{name} has {len(example)} tokens, prompt and answers together, but a row holds "
                f"row_tokens={row_tokens}; raise row_tokens or leave it out"
            )


def device() -> torch.device:
    """The GPU where there is one."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


HEADS = {"lm": "a language model", "scalar": "a reward model"}


def load_model(artifact: Artifact, head: Literal["lm", "scalar"], *, new: bool = False) -> tuple[Transformer, Tokenizer]:
    """A model artifact's weights and tokenizer; PunaError when it has another head.

    `new`: a scalar head that it lacks is made, of zeros.
    """
    from puna.models.checkpoint import CheckpointError, load
    from puna.models.tokenizer import Tokenizer

    try:
        model = load(artifact.path())
        if model.head != head and new and head == "scalar":
            model = load(artifact.path(), head)
    except CheckpointError as error:
        raise PunaError(f"{artifact.id} cannot be read: {error}") from error
    if model.head != head:
        raise PunaError(f"{artifact.id} is {HEADS[model.head]}, made by {artifact.manifest.stage}; give {HEADS[head]}")
    return model.to(device()), Tokenizer.load(artifact.path())


def check_one_tokenizer(models: Sequence[Artifact], why: str) -> None:
    """PunaError when the models do not all have one tokenizer: a token id would mean different texts to them."""
    from tokenizers import Tokenizer as Backend

    # As this release writes them: two releases may write one tokenizer in different ways.
    first, *others = [Backend.from_file(str(model.path("tokenizer.json"))).to_str() for model in models]
    for model, other in zip(models[1:], others, strict=True):
        if other != first:
            raise PunaError(f"{models[0].id} and {model.id} have different tokenizers: {why}")


@contextlib.contextmanager
def divergence_named(what: str) -> Iterator[None]:
    """Training that diverges inside ends in a PunaError that names `what` was trained."""
    from puna.models.training.loop import TrainingDiverged

    try:
        yield
    except TrainingDiverged as error:
        raise PunaError(f"{what} diverged: {error}") from error


def fit(
    model: Any,
    objective: Callable[..., Any],
    batches: Callable[[int], Any],
    fitting: Fitting,
    steps: int,
    run: StageRun,
) -> list[dict[str, float]]:
    """Train with the one loop; the run's checkpoints lie in its scratch folder, the log in `training_log`."""
    from puna.models.training.loop import train

    with divergence_named(run.stage):
        log = train(
            model,
            objective,
            batches,
            fitting.train_config(steps),
            run.seed("loop"),
            checkpoint_dir=run.scratch / "training",
            checkpoint_every=CHECKPOINT_STEPS,
            on_step=lambda row: run.progress(row["step"], steps, f"loss {row['loss']:.3f}"),
        )
    write_log(log, run)
    return list(log)


def write_log(log: Sequence[dict[str, float]], run: StageRun) -> None:
    """The `training_log` table, a figure of the loss, and the end of the run as metrics."""
    rows = [{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in log]
    run.write_rows(rows, "training_log")
    run.metric("steps", len(rows))
    run.metric("trained_tokens", sum(row["tokens"] for row in rows))
    tail = [row["loss"] for row in log[-max(1, len(log) // 10) :] if math.isfinite(row["loss"])]
    if tail:
        run.metric("final_loss", sum(tail) / len(tail))
    points: list[tuple[Any, float]] = [(row["step"], row["loss"]) for row in log if math.isfinite(row["loss"])]
    run.figure("loss", Figure(title="Training loss", x="step", y="loss", series={run.stage: points}))


def save_model(model: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint and its tokenizer."""
    from puna.models.checkpoint import save

    save(model.to("cpu"), folder, tokenizer)
