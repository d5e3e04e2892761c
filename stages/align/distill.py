"""On-policy distillation: a student learns, on answers that it samples itself, what a teacher would have said next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from puna.models.training.settings import TrainingSettings
from puna.stages.contract import Facts, Model, Prompts, StageRun, stage
from puna.stages.conversations import prompt_ids
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.lora import adapted
from puna.stages.training.needs import chat_template, one_tokenizer, trained
from puna.stages.training.settings import AdapterConfig
from puna.stages.training.train import check_one_tokenizer, context_limit, fit, load_model, save_model
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.training.objectives import Targets
    from puna.models.transformer import Transformer


class DistillConfig(AdapterConfig):
    """Settings of the student's sampling and of its training."""

    answers: int = Field(1, ge=1, description="Answers that the student samples to each prompt of a step")
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature, and that at which both distributions are compared")
    max_tokens: int = Field(64, ge=1, description="Longest answer, its end token included, tokens")
    beta: float = Field(
        1.0, ge=0, le=1, description="Divergence: 1, KL(student || teacher), which takes from the student what the teacher would not say; "
        "0, KL(teacher || student), which also teaches what the student would not; between, a Jensen-Shannon divergence"
    )  # fmt: skip
    training: TrainingSettings = Field(TrainingSettings(), description="Optimisation; an example is one prompt with its answers")

    @model_validator(mode="after")
    def _answers_fit(self) -> DistillConfig:
        if self.answers * self.max_tokens >= self.training.compute.micro_batch_tokens:
            raise ValueError(
                f"training.compute.micro_batch_tokens {self.training.compute.micro_batch_tokens} cannot hold {self.answers} answers of "
                f"{self.max_tokens} tokens and a prompt"
            )
        if self.training.schedule.ema or self.training.schedule.average:
            raise ValueError("answers are sampled with the weights that are trained: training.schedule.ema and average must be 0")
        return self


def needs(config: DistillConfig, facts: Facts) -> list[str]:
    """Require a chat template, one tokenizer, and memory."""
    one = one_tokenizer(facts, "student", "teacher")
    memory = trained(facts, "student", config.training.optimizer, config.method)
    return [*chat_template(facts, "student"), *one, *memory, *config.unmet()]


@stage(kind="model", device=True, needs=needs)
def distill(student: Model, teacher: Model, prompts: Prompts, config: DistillConfig, run: StageRun) -> None:
    """Distil `teacher` into `student` on the student's own answers to the training prompts (GKD, Agarwal et al. 2024, its data
    all on-policy; Lu and Thinking Machines 2025). Both must have one tokenizer.

    In each step the student, as it is by then, answers the next `training.batch_size` prompts; the loss is the mean divergence of its
    and the teacher's distributions over the whole vocabulary, token by token of these answers, nats per token. Nothing is scored: it
    needs neither references nor a reward. The teacher must know something worth having on these prompts; compare with `sft` on
    answers that it samples. Prompts that the chat template refuses, and those too long, are in `dropped`; see `bad_rows`.
    """
    from puna.models.training.objectives import Distill

    check_one_tokenizer([student, teacher], "distill compares distributions over one vocabulary")
    network, tokenizer = load_model(student, "lm", quantization=config.quantization)
    guide, _ = load_model(teacher, "lm", frozen=True)
    rows = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    if not rows:
        raise PunaError(f"distill: {prompts.id} has no training prompts")
    bad = BadRows(config, "distill")
    within, answers = context_limit(network, config.max_tokens), config.answers * config.max_tokens
    what = f"the prompt with {config.answers} answers of max_tokens={config.max_tokens}"
    size = config.training.compute.micro_batch_tokens
    limit = Limit(size, "training.compute.micro_batch_tokens", what)
    asked = bad.examples(
        rows, lambda row: prompt_ids(tokenizer, row), lambda ids: len(ids) + config.max_tokens, within,
        (lambda ids: len(ids) + answers, limit),
    )  # fmt: skip
    bad.check_left(len(asked), f"{len(rows)} training prompts")
    bad.write(run)
    batches = _sampled(network, [ids for _, ids in asked], tokenizer.stop_ids, config, run)
    with adapted(network, config, run) as scales:
        log = fit(
            network, Distill(guide.requires_grad_(False), config.beta, config.temperature), batches,
            config.training.train_config(len(asked)), run, scales,
        )  # fmt: skip
    run.metric("prompts", len(asked))
    run.metric("first_loss", log[0]["loss"])
    save_model(network, tokenizer, run.folder)


def _sampled(
    model: Transformer, prompts: Sequence[list[int]], stop: Sequence[int], config: DistillConfig, run: StageRun
) -> Callable[[int], list[Targets]]:
    """Return a function of the step that samples its batches: prompts shuffled each epoch, answered by the current model."""
    from puna.models.generation import Engine, SamplingParams
    from puna.models.training.objectives import Targets
    from puna.models.training.packing import pack, step_indices

    order, seed, size = run.seed("order"), run.seed("answers"), config.training.compute.micro_batch_tokens

    def batches(step: int) -> list[Targets]:
        asked = [prompts[i] for i in step_indices(step, len(prompts), config.training.batch_size, order)]
        params = SamplingParams(
            n=config.answers, temperature=config.temperature, max_tokens=config.max_tokens, stop=tuple(stop), seed=(seed + step) % 2**31
        )
        answers = [[list(one.tokens) for one in some] for some in Engine(model).generate(asked, params)]
        lengths = [len(ids) + sum(map(len, some)) for ids, some in zip(asked, answers, strict=True)]
        return [Targets.from_answers([asked[i] for i in row], [answers[i] for i in row]) for row in pack(lengths, size)]

    return batches
