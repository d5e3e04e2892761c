"""Judging a small data set by annealing a half-trained model on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from puna.models.training.packing import batched
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings
from puna.stages.contract import Documents, Facts, Figure, Model, Prompts, SeededConfig, StageRun, Tokens, stage
from puna.stages.conversations import messages_of, rendering, tools_of
from puna.stages.training import intervals
from puna.stages.training import needs as needs_of
from puna.stages.training.bad_rows import BadRows, BadRowsConfig
from puna.stages.training.needs import chat_template, documents_apart
from puna.stages.training.packed import Packed, Reader, mean_loss, total_nats
from puna.stages.training.phase import OPTIMIZER, Phase
from puna.stages.training.pools import Mixed, PoolRows, Pools, Sizes, build_pools, grouped
from puna.stages.training.proxy_runs import run_trials, set_aside, trained, trial_row
from puna.stages.training.train import heldout_prompts
from puna.stages.training.vocabulary import check_tokens, tokenizer_of
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.transformer import Transformer

ARMS = ("default", "candidate")


class AnnealExperimentConfig(BadRowsConfig, SeededConfig):
    """Settings of the annealing with and without the candidate documents."""

    share: float = Field(0.3, gt=0, le=1, description="Share of the candidate documents in the annealing mixture, fraction")
    phase: Phase = Field(
        Phase(name="anneal", steps=100, rows_per_step=2, schedule=ScheduleSettings(warmup_steps=5, shape="linear")),
        description="The annealing: from learning_rate in a line to 0",
    )
    optimizer: OptimizerSettings = Field(OPTIMIZER, description="The optimizer")
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")
    repeats: int = Field(3, ge=2, le=100, description="Runs of each kind, over other rows each: what the interval is made of")
    document_tokens: int = Field(
        8192, ge=8, description="Tokens of a candidate document that are read, from its beginning: few tokens then hold many documents"
    )
    heldout_tokens: int = Field(
        8_000, ge=100, description="Held-out tokens of candidates and of the default mixture, each; at most pretrain's validation_tokens"
    )
    validation_share: float = Field(
        0.01, gt=0, lt=0.5, description="Share of the default documents set aside, as pretrain has it, fraction"
    )
    prompts_per_task: int = Field(100, ge=1, description="Held-out prompts of each task whose gold answers are scored")

    @model_validator(mode="after")
    def _rows_are_plain(self) -> AnnealExperimentConfig:
        self.phase.check_plain("the annealing draws single rows from two sources")
        return self


def needs(config: AnnealExperimentConfig, facts: Facts) -> list[str]:
    """Require a token between documents, a chat template if prompts are given, and memory."""
    rendered = chat_template(facts, "model") if facts.inputs.get("prompts") else []
    return [*documents_apart(facts, "model"), *rendered, *needs_of.trained(facts, "model", config.optimizer)]


@stage(kind="evaluation", needs=needs)
def anneal_experiment(
    model: Model, tokens: Tokens, documents: Documents, prompts: Prompts | None, config: AnnealExperimentConfig, run: StageRun
) -> None:
    """Measure whether a small data set is worth having (Llama 3, section 3.1.3; Blakeney et al. 2024).

    The model, best a half-trained one, is annealed twice over: on the default tokens alone, and with a share of
    the candidate documents among them; both from the same weights and for as many tokens. The gain is what the
    candidates take off the held-out loss: of candidates it has not read, of default documents that pretraining
    set aside, and of the gold answers to held-out prompts. Pairs of runs over other rows give its interval. Prompts that the
    chat template refuses are in `dropped`; see `bad_rows`.
    """
    check_tokens(tokens, model)
    packed = Packed.read(tokens)
    row = int(np.diff(packed.starts[packed.rows]).max())
    wanted = math.ceil(config.phase.steps * config.phase.rows_per_step * row * config.share)
    sizes = Sizes(wanted, config.heldout_tokens, row, config.document_tokens)
    pools = build_pools(documents, None, grouped(documents, None, 1, sizes, run), model, sizes, run)
    runs = [(arm, repeat) for arm in ARMS for repeat in range(config.repeats)]
    jobs = [(number, arm, repeat, run.seed("repeat", repeat)) for number, (arm, repeat) in enumerate(runs)]
    answers = {} if prompts is None else _answers(prompts, model, config, run)
    trials = list(run_trials(run, _anneal, jobs, tokens, str(model.path()), pools, answers))
    run.write_rows([{k: v for k, v in trial.items() if k != "losses"} for trial in trials], "trials")
    _report([trial["losses"] for trial in trials], config, run)


Pair = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its gold answer."""


def _answers(prompts: Artifact, model: Artifact, config: AnnealExperimentConfig, run: StageRun) -> dict[str, list[Pair]]:
    """Return held-out prompts with their gold answers by task."""
    tokenizer = tokenizer_of(model)

    def pair(row: dict[str, Any]) -> Pair:
        if row["reference"] is None:
            raise PunaError(f"prompt {row['id']} has no reference answer, whose likelihood is measured here")
        with rendering(row):
            asked, answer, _ = tokenizer.render_pair(messages_of(row), row["reference"], tools=tools_of(row))
        return list(asked), list(answer)

    rows = heldout_prompts(prompts)
    bad = BadRows(config, "anneal_experiment")
    tasks = {task: [made for _, made in islice(bad.rendered(some, pair), config.prompts_per_task)] for task, some in rows.items()}
    bad.check_left(sum(map(len, tasks.values())), f"{sum(map(len, rows.values()))} held-out prompts")
    bad.write(run)
    return {task: pairs for task, pairs in tasks.items() if pairs}


def _anneal(
    number: int, arm: str, repeat: int, seed: int, tokens: Artifact, model: str, pools: PoolRows, answers: dict[str, list[Pair]],
    config: AnnealExperimentConfig, state: Path,
) -> dict[str, Any]:  # fmt: skip
    from puna.models.formats.checkpoint import load
    from puna.models.tokens.tokenizer import Tokenizer

    packed, held = set_aside(tokens, config.validation_share, config.heldout_tokens)
    candidates = Pools.read(pools)
    share = config.share if arm == "candidate" else 0.0
    new = candidates.training[0]
    # A document may be both a candidate and among the default ones: what is held out on either side is read on none.
    default_ids = {packed.ids[owner] for owner in np.unique(packed.owners[held])}
    excluded = (held | packed.of(candidates.heldout_ids[0]), new.of(default_ids))
    begin = Tokenizer.load(model).begin
    readers = [Reader(source, out, 1, seed, begin) for source, out in zip((packed, new), excluded, strict=True)]
    mixed = Mixed(readers, np.array([1.0 - share, share]), config.phase.rows_per_step)
    size, settings = config.compute.micro_batch_tokens, config.phase.train_config(config.optimizer, config.compute)
    name = f"anneal_experiment, run {arm} {repeat}"
    proxy = trained(load(Path(model)), name, lambda step: mixed.batches(step, size), mixed.lengths, settings, seed, state)
    losses = {
        "candidate": mean_loss(proxy.model, candidates.heldout[0], size),
        "default": mean_loss(proxy.model, packed.validation_pieces(held), size),
        **{task: _answer_loss(proxy.model, pairs, size) for task, pairs in answers.items()},
    }
    parameters = {"share": share, "repeat": repeat, "losses": losses}
    return {**trial_row(number, arm, parameters, losses["default"], proxy), "losses": losses}


def _answer_loss(network: Transformer, pairs: Sequence[Pair], micro_batch_tokens: int) -> float:
    """Return the mean loss over the tokens of gold answers, each after its prompt, in nats per token."""
    from puna.models.training.objectives import Targets

    rows = batched(pairs, lambda pair: len(pair[0]) + len(pair[1]), micro_batch_tokens)
    total, count = total_nats(network, (Targets.from_answers([p for p, _ in row], [[a] for _, a in row]) for row in rows))
    return total / count


def _report(losses: Sequence[dict[str, float]], config: AnnealExperimentConfig, run: StageRun) -> None:
    rows, bars = [], list[tuple[Any, float]]()
    without, with_ = losses[: config.repeats], losses[config.repeats :]
    for task in losses[0]:
        before, after = [one[task] for one in without], [one[task] for one in with_]
        gain = intervals.mean([b - a for b, a in zip(before, after, strict=True)])
        for metric, value in (("default_loss", intervals.mean(before)), ("candidate_loss", intervals.mean(after)), ("gain", gain)):
            rows.append(intervals.evaluation_row(task, metric, value, config.repeats))
        run.metric(f"gain_{task}", gain.value)
        bars.append((task, gain.value))
    run.write_rows(rows)
    title, y = "What the candidate documents are worth", "loss taken off, nats per token"
    run.figure("gain", Figure(title, x="held-out text", y=y, kind="bar", series={"gain": bars}))
