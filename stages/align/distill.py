"""On-policy distillation: a student learns a teacher's next-token distributions on answers sampled from the student."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from pydantic import Field, model_validator

from puna.models.training.settings import TrainingSettings
from puna.stages.contract import Facts, Model, Prompts, StageRun, stage
from puna.stages.executors import ranks
from puna.stages.training.bad_rows import BadRows
from puna.stages.training.lora import adapters
from puna.stages.training.needs import adaptable, one_tokenizer
from puna.stages.training.settings import AdapterConfig
from puna.stages.training.train import check_one_tokenizer, device, fit, frozen_dtype, load_model, row_limit, save_model, training_prompts
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.training.objectives import Targets
    from puna.models.transformer import Transformer


class DistillConfig(AdapterConfig):
    answers: int = Field(1, ge=1, description="Number of answers that the student samples per prompt")
    temperature: float = Field(1.0, gt=0, le=10, description="Temperature for sampling and for the compared distributions")
    max_tokens: int = Field(64, ge=1, description="Maximum tokens of an answer, including its end token")
    beta: float = Field(1.0, ge=0, le=1, description="1: KL(student || teacher); 0: KL(teacher || student); in between: Jensen-Shannon")
    training: TrainingSettings = Field(TrainingSettings(), description="Optimization settings; one example is one prompt with its answers")

    @model_validator(mode="after")
    def _answers_fit(self) -> DistillConfig:
        if self.answers * self.max_tokens >= self.training.compute.micro_batch_tokens:
            raise ValueError(
                f"training.compute.micro_batch_tokens={self.training.compute.micro_batch_tokens} cannot hold {self.answers} answers of "
                f"{self.max_tokens} tokens and a prompt"
            )
        if self.training.schedule.ema or self.training.schedule.average:
            raise ValueError("answers are sampled from the weights being trained; set training.schedule.ema and average to 0")
        return self


def needs(config: DistillConfig, facts: Facts) -> list[str]:
    return [*one_tokenizer(facts, "student", "teacher"), *adaptable(facts, "student", config.training, config)]


@stage(kind="model", device=True, ranks=True, needs=needs)
def distill(student: Model, teacher: Model, prompts: Prompts, config: DistillConfig, run: StageRun) -> None:
    """Distil `teacher` into `student` on the student's own answers to training prompts (GKD, Agarwal et al. 2024, on-policy only).

    In each step the current student answers the next `training.batch_size` prompts. The loss is the mean divergence between the student's
    and the teacher's next-token distributions over the tokens of these answers, in nats per token. No reference answers or rewards are
    needed. Both models must have the same tokenizer. See also Lu and Thinking Machines 2025; as a baseline, run `sft` on the teacher's
    samples. Prompts that the chat template rejects or that are too long are in `dropped`; see `bad_rows`."""
    from puna.models.training.objectives import Distill
    from puna.models.training.parallel.parallel import part_of

    check_one_tokenizer([student, teacher], "distill needs a student and a teacher with the same tokenizer")
    layout = config.training.compute.layout
    network, tokenizer = load_model(student, "lm", quantization=config.quantization, layout=layout)
    guide, _ = load_model(teacher, "lm", frozen=True, layout=layout)
    bad = BadRows(config, "distill")
    given = prompts.read().to_pylist()
    rows, prompt_tokens = training_prompts(given, network, tokenizer, config.answers, config.max_tokens, row_limit(config.training), bad)
    if not rows:
        raise PunaError(f"distill: {prompts.id} has no training prompts; set prompts.train to get some")
    bad.write(run)
    batches = _sampler(network, [ids for _, ids in prompt_tokens], tokenizer.stop_ids, config, run)
    mesh, guide = ranks.mesh(layout), guide.requires_grad_(False)
    if layout.pipeline == 1:
        guide = cast("Transformer", part_of(guide, layout, mesh, device()).model)
    elif mesh.is_last_stage:  # only the last pipeline stage runs the teacher, which it holds with all layers
        guide = guide.to(device(), frozen_dtype())
    objective = Distill(guide, config.beta, config.temperature)
    with adapters(network, config, run) as scales:
        log = fit(network, objective, batches, config.training.train_config(len(prompt_tokens)), run, scales, sampled=True)
    run.metric("prompts", len(prompt_tokens))
    run.metric("first_loss", next(row["loss"] for row in log if math.isfinite(row["loss"])))
    save_model(network, tokenizer, run.folder)


def _sampler(
    model: Transformer, prompts: Sequence[list[int]], stop: Sequence[int], config: DistillConfig, run: StageRun
) -> Callable[[int], list[Targets]]:
    """Return a function that samples a step's micro-batches: prompts, reshuffled every epoch, with the current model's answers."""
    from puna.models.generation import Engine, SamplingParams
    from puna.models.training.objectives import Targets
    from puna.models.training.packing import pack, step_indices

    order, seed, size = run.seed("order"), run.seed("answers"), config.training.compute.micro_batch_tokens

    def batches(step: int) -> list[Targets]:
        batch = [prompts[i] for i in step_indices(step, len(prompts), config.training.batch_size, order)]
        params = SamplingParams(
            n=config.answers, temperature=config.temperature, max_tokens=config.max_tokens, stop=tuple(stop), seed=(seed + step) % 2**31
        )
        answers = ranks.dealt(batch, lambda own: [[c.tokens for c in row] for row in Engine(model).generate(own, params)], ranks.ONE, tuple)
        lengths = [len(ids) + sum(map(len, some)) for ids, some in zip(batch, answers, strict=True)]
        return [Targets.from_answers([batch[i] for i in row], [answers[i] for i in row]) for row in pack(lengths, size)]

    return batches
