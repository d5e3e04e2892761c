"""Supervised finetuning: cross-entropy on the answers of instructions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from puna.stages.contract import External, Instructions, Model, StageRun, stage
from puna.stages.training.bad_rows import BadRows
from puna.stages.training.lora import adapters
from puna.stages.training.needs import training_needs
from puna.stages.training.settings import SftConfig
from puna.stages.training.train import Example, code_of_tasks, fit, load_model, render_conversation, row_limit, save_model, task_watch
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.training.objectives import Targets
    from puna.models.transformer import Transformer
    from puna.stages.evaluation.training_tasks import TaskWatch


@stage(kind="model", device=True, ranks=True, needs=training_needs, named=code_of_tasks)
def sft(model: Model, instructions: list[Instructions], tasks: list[External] | None, config: SftConfig, run: StageRun) -> None:
    """Finetune on the assistant's turns of instructions (Llama 3, section 4.1.3; LoRA: Hu et al. 2021).

    Several inputs are concatenated, without their held-out rows. Within a step every learned token has the same weight. Rows that the chat
    template rejects, or that are longer than a packed row, are in `dropped`; see `bad_rows`. Scores on `tasks` (folders of task files and
    their data) are in the training log and the metrics."""
    rows = read_instructions(instructions)
    network, tokenizer = load_model(model, "lm", quantization=config.quantization, layout=config.training.compute.layout)
    bad = BadRows(config, "sft")
    examples = render_rows(tokenizer, rows, config, bad)
    bad.check_left(len(examples), f"{len(rows)} training instructions")
    bad.write(run)
    run.metric("instructions", len(rows) - len(bad.dropped))
    examples = join(examples, config.answers_together, config.training.compute.micro_batch_tokens)
    config = config.with_more_steps(len(examples))
    watch = task_watch(tasks, config.ask_every, tokenizer, config.training.compute, run)
    if config.engine == "trl":
        if watch:
            raise PunaError("sft: only engine=puna evaluates tasks; leave them out, or set engine to puna")
        from puna.stages.training.trl_engine import hub_tokenizer, train_sft

        network = train_sft(network, examples, hub_tokenizer(model, tokenizer), config, run)
    else:
        _train(network, examples, config, run, watch)
    save_model(network, tokenizer, run.folder)


def read_instructions(artifacts: Sequence[Artifact]) -> list[dict[str, Any]]:
    """Return the training rows of all artifacts, sorted, so that the artifacts' order does not matter. Raise PunaError without rows."""
    rows = [row for artifact in artifacts for row in artifact.read().to_pylist() if row["split"] == "train"]
    if not rows:
        raise PunaError(f"{', '.join(a.id for a in artifacts)}: no training instructions to finetune on; give rows of the split train")
    return sorted(rows, key=lambda row: (row["id"], row["messages"]))


def collate(examples: list[Example]) -> Targets:
    from puna.models.training.objectives import Targets

    return Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples], [e.masks for e in examples])


def render_rows(tokenizer: Tokenizer, rows: Sequence[dict[str, Any]], config: SftConfig, bad: BadRows) -> list[Example]:
    """Return training examples of the conversations. A chat template may split a row into several examples. Unusable rows go to `bad`."""

    def longest(examples: list[Example]) -> int:
        return max(map(len, examples))

    rendered = bad.examples(rows, lambda row: render_conversation(tokenizer, row), longest, row_limit(config.training))
    return [example for _, examples in rendered for example in examples]


def join(examples: Sequence[Example], most: int, tokens: int) -> list[Example]:
    """Merge examples with the same prompt, up to `most` answers and `tokens` tokens per merged example."""
    whole: list[Example] = []
    last: dict[tuple[int, ...], int] = {}
    for one in examples:
        at = last.get(tuple(one.prompt))
        if at is None or len(whole[at].answers) >= most or len(whole[at]) + sum(map(len, one.answers)) > tokens:
            last[tuple(one.prompt)] = len(whole)
            whole.append(one)
        else:
            whole[at] = Example(one.prompt, [*whole[at].answers, *one.answers], [*whole[at].masks, *one.masks], [])
    return whole


def _train(model: Transformer, examples: list[Example], config: SftConfig, run: StageRun, watch: TaskWatch | None) -> None:
    from puna.models.training.objectives import Sft
    from puna.models.training.packing import Sampler
    from puna.models.training.parallel.mesh import layout_of

    training, size = config.training, config.training.compute.micro_batch_tokens
    sampler = Sampler(examples, training.batch_size, collate, length=len, micro_batch_tokens=size, seed=run.seed("order"))
    steps = training.train_config(len(examples)).steps
    run.metric("trained_answers", training.batch_size * steps * sum(len(one.answers) for one in examples) / len(examples))
    if why := layout_of(training.compute.layout).refusal("cpu", neftune_alpha=config.neftune_alpha):
        raise PunaError(f"sft: {why}")
    with adapters(model, config, run) as scales, embedding_noise(model, config.neftune_alpha, sum(map(len, examples)) / len(examples)):
        fit(model, Sft(), sampler, training.train_config(len(examples)), run, scales, watch=watch)


@contextmanager
def embedding_noise(model: Transformer, alpha: float, tokens: float) -> Iterator[None]:
    """Add uniform noise, at most alpha / sqrt(tokens x width), to embeddings inside the context, in passes with gradients (NEFTune)."""
    import torch

    bound = alpha / math.sqrt(tokens * model.config.hidden_size)

    def add(_module: object, _given: object, embedded: torch.Tensor) -> torch.Tensor:
        return embedded + torch.empty_like(embedded).uniform_(-bound, bound) if torch.is_grad_enabled() else embedded

    hook = model.model.embed_tokens.register_forward_hook(add) if alpha else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
