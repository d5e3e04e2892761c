"""Supervised fine-tuning: cross-entropy on the answers of a set of instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from puna.stages.align.fitting import Example, Fitting, check_lengths, check_trl, fit, load_model, render, save_model
from puna.stages.align.lora import Lora
from puna.stages.contract import Instructions, Model, SeededConfig, StageRun, stage
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.tokenizer import Tokenizer
    from puna.models.training.objectives import Targets


class SftConfig(SeededConfig):
    """How the model is fine-tuned."""

    engine: Literal["puna", "trl"] = Field("puna", description="Whose trainer: Puna's own loop, or TRL's SFTTrainer")
    method: Literal["full", "lora"] = Field("full", description="All weights, or low-rank adapters that are merged at the end")
    fitting: Fitting = Field(default_factory=Fitting, description="Optimisation; an example is one instruction")
    lora: Lora = Field(default_factory=Lora, description="The adapters, where method is `lora`")

    @model_validator(mode="after")
    def _engine(self) -> SftConfig:
        if self.engine == "trl":
            check_trl(self.fitting)
        return self


@stage(kind="model")
def sft(model: Model, instructions: list[Instructions], config: SftConfig, run: StageRun) -> None:
    """Fine-tune on instructions with the prompt masked (Llama 3, section 4.1.3; LoRA: Hu et al. 2021).

    Several sets of instructions are read as one; each answer token of a step weighs the same.
    """
    rows = read_instructions(instructions)
    if config.engine == "trl":
        from puna.stages.align.trl_engine import train_sft

        train_sft(model, rows, config, run)
    else:
        _train(model, rows, config, run)
    run.metric("instructions", len(rows))


def read_instructions(artifacts: Sequence[Artifact]) -> list[dict[str, Any]]:
    """All rows, in an order that does not depend on that of the artifacts."""
    rows = [row for artifact in artifacts for row in artifact.read().to_pylist()]
    if not rows:
        raise PunaError(f"there are no instructions in {', '.join(a.id for a in artifacts)}: nothing to fine-tune on")
    return sorted(rows, key=lambda row: (row["id"], row["response"]))


def collate(examples: list[Example]) -> Targets:
    """One packed row."""
    from puna.models.training.objectives import Targets

    return Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples])


def render_rows(tokenizer: Tokenizer, rows: Sequence[dict[str, Any]], row_tokens: int) -> list[Example]:
    """Each instruction as a prompt with one answer."""
    examples = [render(tokenizer, row["prompt"], [[row["response"]]]) for row in rows]
    check_lengths(examples, [f"instruction {row['id']}" for row in rows], row_tokens)
    return examples


def _train(artifact: Artifact, rows: list[dict[str, Any]], config: SftConfig, run: StageRun) -> None:
    from puna.models.training.objectives import Sft
    from puna.models.training.packing import Sampler

    model, tokenizer = load_model(artifact, "lm")
    examples = render_rows(tokenizer, rows, config.fitting.row_tokens)
    if config.method == "lora":
        from puna.stages.align.lora import inject, merge

        trainable = inject(model, config.lora, run.seed("lora"))
        run.metric("trainable_parameters", trainable)
    sampler = Sampler(
        examples, config.fitting.batch_size, collate, length=len, capacity=config.fitting.row_tokens, seed=run.seed("order")
    )
    fit(model, Sft(), sampler, config.fitting, config.fitting.steps(len(examples)), run)
    if config.method == "lora":
        merge(model)
    save_model(model, tokenizer, run.folder)
