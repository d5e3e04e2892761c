"""Judging a small data set by annealing a half-trained model on it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from puna.models.training.packing import batched
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings
from puna.stages.contract import Documents, Facts, Figure, Model, Prompts, SeededConfig, StageRun, Tokens, stage
from puna.stages.conversations import messages_of, rendering, tools_of
from puna.stages.training import intervals
from puna.stages.training.bad_rows import BadRows, BadRowsConfig
from puna.stages.training.needs import chat_template, documents_apart, trained
from puna.stages.training.packed import Packed, Reader, mean_loss
from puna.stages.training.phase import OPTIMIZER, Phase
from puna.stages.training.pools import Mixed, PoolRows, Pools, Sizes, build_pools, grouped
from puna.stages.training.proxy_runs import one_thread, remembered
from puna.stages.training.train import divergence_named
from puna.stages.training.vocabulary import check_tokens, tokenizer_of
from puna.storage import Artifact, PunaError

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


class Job(NamedTuple):
    """One annealing, as workers get it."""

    number: int
    arm: str
    repeat: int
    seed: int


def needs(config: AnnealExperimentConfig, facts: Facts) -> list[str]:
    """Require a token between documents, a chat template if prompts are given, and memory."""
    rendered = chat_template(facts, "model") if facts.inputs.get("prompts") else []
    return [*documents_apart(facts, "model"), *rendered, *trained(facts, "model", config.optimizer)]


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
    jobs = [
        Job(config.repeats * a + repeat, arm, repeat, run.seed("repeat", repeat))
        for a, arm in enumerate(ARMS)
        for repeat in range(config.repeats)
    ]
    answers = {} if prompts is None else _answers(prompts, model, config, run)
    arguments = (config.model_dump_json(), tokens, str(model.path()), pools, answers, str(run.scratch))
    trials = list(run.map(_trial, jobs, *arguments, rows=len(jobs)))
    run.write_rows([{k: v for k, v in trial.items() if k != "losses"} for trial in trials], "trials")
    _report([trial["losses"] for trial in trials], config, run)


def _answers(
    prompts: Artifact, model: Artifact, config: AnnealExperimentConfig, run: StageRun
) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return (prompt ids, gold answer ids) of held-out prompts by task."""
    tokenizer = tokenizer_of(model)

    def pair(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        if row["reference"] is None:
            raise PunaError(f"prompt {row['id']} has no reference answer, whose likelihood is measured here")
        with rendering(row):
            asked, answer, _ = tokenizer.render_pair(messages_of(row), row["reference"], tools=tools_of(row))
        return list(asked), list(answer)

    rows: dict[str, list[dict[str, Any]]] = {}
    for row in prompts.read().to_pylist():
        if row["split"] == "heldout":
            rows.setdefault(row["task"], []).append(row)
    if not rows:
        raise PunaError(f"{prompts.id} has no held-out prompts")
    bad = BadRows(config, "anneal_experiment")
    tasks = {task: [made for _, made in islice(bad.rendered(some, pair), config.prompts_per_task)] for task, some in rows.items()}
    bad.check_left(sum(map(len, tasks.values())), f"{sum(map(len, rows.values()))} held-out prompts")
    bad.write(run)
    return {task: pairs for task, pairs in tasks.items() if pairs}


@lru_cache(maxsize=1)
def _default(source: Artifact, share: float, wanted: int) -> tuple[Packed, Any]:
    packed = Packed.read(source)
    return packed, packed.validation(share, wanted)


def _trial(
    job: Job, settings: str, tokens: Artifact, model: str, pools: PoolRows,
    answers: dict[str, list[tuple[list[int], list[int]]]], scratch: str,
) -> dict[str, Any]:  # fmt: skip
    config = AnnealExperimentConfig.model_validate_json(settings)
    return remembered(Path(scratch) / f"trial-{job.number}.json", lambda state: _anneal(job, config, tokens, model, pools, answers, state))


def _anneal(
    job: Job, config: AnnealExperimentConfig, tokens: Artifact, model: str, pools: PoolRows,
    answers: dict[str, list[tuple[list[int], list[int]]]], state: Path,
) -> dict[str, Any]:
    from puna.models import accounting
    from puna.models.formats.checkpoint import load
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.training.loop import train
    from puna.models.training.objectives import LanguageModeling

    begin = Tokenizer.load(model).begin
    packed, held = _default(tokens, config.validation_share, config.heldout_tokens)
    candidates = Pools.read(pools)
    share = config.share if job.arm == "candidate" else 0.0
    new = candidates.training[0]
    # A document may be both a candidate and among the default ones: what is held out on either side is read on none.
    set_aside = {packed.ids[owner] for owner in np.unique(packed.owners[held])}
    excluded = (held | packed.of(candidates.heldout_ids[0]), new.of(set_aside))
    readers = [Reader(source, out, 1, job.seed, begin) for source, out in zip((packed, new), excluded, strict=True)]
    mixed = Mixed(readers, np.array([1.0 - share, share]), config.phase.rows_per_step)
    size = config.compute.micro_batch_tokens
    with one_thread():
        network = load(Path(model))
        with divergence_named(f"anneal_experiment, run {job.arm} {job.repeat}"):
            loop_settings = config.phase.train_config(config.optimizer, config.compute)
            log = train(network, LanguageModeling(), lambda step: mixed.batches(step, size), loop_settings, job.seed, state)
        losses = {
            "candidate": mean_loss(network, candidates.heldout[0], size),
            "default": mean_loss(network, packed.validation_pieces(held), size),
            **{task: _answer_loss(network, pairs, size) for task, pairs in answers.items()},
        }
    steps = range(1, config.phase.steps + 1)
    return {
        "trial": job.number,
        "name": job.arm,
        "parameters": json.dumps({"share": share, "repeat": job.repeat, "losses": losses}),
        "loss": losses["default"],
        "tokens": int(sum(row["tokens"] for row in log)),
        "flops": float(sum(accounting.training_flops(network.config, mixed.lengths(step)) for step in steps)),
        "seconds": float(sum(row["seconds"] for row in log)),
        "losses": losses,
    }


def _answer_loss(network: Any, pairs: Sequence[tuple[list[int], list[int]]], micro_batch_tokens: int) -> float:
    """Return the mean loss over the tokens of gold answers, each after its prompt, in nats per token."""
    import torch

    from puna.models.training.objectives.base import Targets, target_logprobs

    total, count = 0.0, 0
    for batch in batched(pairs, lambda pair: len(pair[0]) + len(pair[1]), micro_batch_tokens):
        targets = Targets.from_answers([prompt for prompt, _ in batch], [[answer] for _, answer in batch])
        with torch.no_grad():
            total -= float(target_logprobs(network, targets).double().sum())
        count += len(targets.tokens)
    return total / count


def _report(losses: Sequence[dict[str, float]], config: AnnealExperimentConfig, run: StageRun) -> None:
    rows, bars = [], []
    without, with_ = losses[: config.repeats], losses[config.repeats :]
    for task in losses[0]:
        before, after = [found[task] for found in without], [found[task] for found in with_]
        gain = intervals.mean([b - a for b, a in zip(before, after, strict=True)])
        for metric, found in (("default_loss", intervals.mean(before)), ("candidate_loss", intervals.mean(after)), ("gain", gain)):
            rows.append({"task": task, "metric": metric, "value": found.value, "low": found.low, "high": found.high, "n": config.repeats})
        run.metric(f"gain_{task}", gain.value)
        bars.append((task, gain.value))
    run.write_rows(rows)
    figure = Figure(
        title="What the candidate documents are worth",
        x="held-out text",
        y="loss taken off, nats per token",
        kind="bar",
        series={"gain": [(name, value) for name, value in bars]},
    )
    run.figure("gain", figure)
