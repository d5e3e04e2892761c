"""`filter_ablation`: gains and costs of a selection's rules, from small training runs with and without the documents that a rule drops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from puna.models.config import ModelShape
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings
from puna.stages.contract import Documents, Figure, SeededConfig, StageRun, Tokenizer, stage
from puna.stages.experiments.mix_experiment import PROXY
from puna.stages.training.corpus import KEPT
from puna.stages.training.intervals import Interval, evaluation_row, mean
from puna.stages.training.phase import OPTIMIZER, Phase
from puna.stages.training.pools import PoolRows, Pools, Sizes, build_pools, grouped_documents
from puna.stages.training.proxy_runs import fresh, run_trials, train_proxy, trial_row
from puna.stages.training.token_rows import mean_loss
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import PunaError


class FilterAblationConfig(SeededConfig):
    rules: int = Field(8, ge=1, le=100, description="Number of rules to measure: those that drop the most text, and all others as one")
    share: float = Field(
        0.3, gt=0, le=1, description="Share of rows from a rule's documents; higher than the real share, so that few tokens show an effect"
    )
    max_readings: float = Field(4.0, ge=1, description="Maximum passes over a rule's documents; a rule that needs more is not measured")
    model: ModelShape = Field(PROXY, description="Shape of the small models")
    phase: Phase = Field(
        Phase(name="proxy", steps=300, rows_per_step=4, schedule=ScheduleSettings(learning_rate=1.5e-2, warmup_steps=0.1)),
        description="Training settings of a small model",
    )
    optimizer: OptimizerSettings = Field(OPTIMIZER, description="The optimizer")
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")
    repeats: int = Field(3, ge=3, le=100, description="Seeds of weights and rows by which the runs are paired; two pairs decide nothing")
    sequence_length: int = Field(256, ge=8, description="Tokens per row")
    document_tokens: int = Field(1024, ge=8, description="Tokens read from the beginning of each document")
    heldout_tokens: int = Field(20_000, ge=100, description="Number of tokens of kept documents held out for measuring")

    @model_validator(mode="after")
    def _rows_are_plain(self) -> FilterAblationConfig:
        self.phase.check_plain("the small runs draw rows of sequence_length")
        return self


@stage(kind="evaluation")
def filter_ablation(documents: Documents, selected: Documents, tokenizer: Tokenizer, config: FilterAblationConfig, run: StageRun) -> None:
    """Measure what each rule of a selection gains or costs, in bits per byte of held-out kept documents (Penedo et al. 2024, section 3.5).

    `documents` is the selection's input, `selected` its output. One small model is trained only on kept documents. Another is trained from
    the same initial weights on the same number of tokens, a share of them from documents that the rule dropped. The excess loss of the
    second model is the rule's gain at that share; a negative excess is a cost. A document counts for the first rule that dropped it. A rule
    is not measured if its documents would be read more than `max_readings` times."""
    vocabulary = tokenizer_of(tokenizer)
    tokens_needed = config.phase.steps * config.phase.rows_per_step * config.sequence_length
    sizes = Sizes(tokens_needed, config.heldout_tokens, config.sequence_length, config.document_tokens)
    some = "dropped" in selected.tables and min(selected.rows("dropped"), selected.rows()) > 1  # else no document is read
    every = grouped_documents(documents, selected, config.rules + 1, sizes, run) if some else []
    groups = [group for group in every if group.amount.documents > 1]
    names = [group.name for group in groups]
    if KEPT not in names or len(names) < 2:
        raise PunaError(f"{selected.id} keeps or drops almost nothing of {documents.id}; give a selection, and its input documents")
    pools = build_pools(documents, selected, groups, tokenizer, sizes, run)
    kept_group, text = names.index(KEPT), Pools.read(pools)
    read = {name: config.share * tokens_needed / max(1, int(pool.sizes.sum())) for name, pool in zip(names, text.training, strict=True)}
    arms = [kept_group, *(number for number, name in enumerate(names) if name != KEPT and read[name] <= config.max_readings)]
    if len(arms) == 1:
        fewest = min(value for name, value in read.items() if name != KEPT)
        raise PunaError(f"no rule can be measured: the largest is read {fewest:.3g} times; see max_readings and phase.steps")
    runs = [(arm, repeat) for arm in arms for repeat in range(config.repeats)]
    jobs = [(job, arm, kept_group, f"{names[arm]} {repeat}", run.seed("weights", repeat)) for job, (arm, repeat) in enumerate(runs)]
    trials = list(run_trials(run, _trial, jobs, pools, vocabulary.vocab_size, vocabulary.begin))
    run.write_rows(trials, "trials")
    size = sum(len(vocabulary.decode(piece.tolist(), skip_special_tokens=True).encode()) for piece in text.heldout[kept_group])
    bits = sum(len(piece) - 1 for piece in text.heldout[kept_group]) / size / math.log(2)
    losses = {(names[arm], repeat): bits * trial["loss"] for (arm, repeat), trial in zip(runs, trials, strict=True)}
    per_byte = sum(map(len, text.heldout[kept_group])) / size
    dropped = {group.name: (group.amount.documents, group.amount.bytes * per_byte, read[group.name]) for group in groups}
    _report(dropped, losses, config, run)


def _report(
    rules: dict[str, tuple[int, float, float]], losses: dict[tuple[str, int], float], config: FilterAblationConfig, run: StageRun
) -> None:
    """Write rows and a figure: each rule's documents, tokens and passes and, if it was measured, its gain in bits per byte."""
    rows, bars, repeats = [], list[tuple[str, Interval]](), range(config.repeats)
    for name, (documents, tokens, read) in rules.items():
        rows += [evaluation_row(name, "tokens", tokens, documents), evaluation_row(name, "readings", read, documents)]
        if name == KEPT:
            rows.append(evaluation_row(name, "bits_per_byte", mean([losses[name, repeat] for repeat in repeats]), config.repeats))
        elif (name, 0) in losses:
            earned = mean([losses[name, repeat] - losses[KEPT, repeat] for repeat in repeats])
            rows.append(evaluation_row(name, "earned_bits_per_byte", earned, config.repeats))
            bars.append((name, earned))
    run.write_rows(rows)
    run.metric("rules_measured", len(bars))
    note = f"Where {config.share:.0%} of the rows are documents that the rule drops; below 0 the rule costs."
    title, y = "How the rules of the selection change the loss", "bits per byte of held-out kept documents"
    bars.sort(key=lambda bar: -bar[1].value)
    sides = {"interval beyond 0": False, "interval holds 0": True}
    series = {side: [(name, own.value) for name, own in bars if (own.low <= 0 <= own.high) == holds] for side, holds in sides.items()}
    run.figure("earned", Figure(title, x="rule", y=y, kind="bar", series=series, note=note))


def _trial(
    job: int, arm: int, kept: int, name: str, seed: int, pools: PoolRows, vocab_size: int, begin: int, config: FilterAblationConfig,
    state: Path,
) -> dict[str, Any]:  # fmt: skip
    """Train on kept documents and a share of documents that rule `arm` drops; return the trial with its loss on held-out kept documents."""
    text, shares = Pools.read(pools), np.zeros(len(pools.totals))
    shares[kept] = 1.0
    if arm != kept:
        shares[[arm, kept]] = config.share, 1 - config.share
    mixed = text.mix(shares.tolist(), config.phase.rows_per_step, seed, begin)
    size, settings = config.compute.micro_batch_tokens, config.phase.train_config(config.optimizer, config.compute)
    network = fresh(config.model.complete(vocab_size, config.sequence_length), seed)
    proxy = train_proxy(network, f"a small run, {name},", lambda step: mixed.batches(step, size), mixed.lengths, settings, seed, state)
    return trial_row(job, name, {"share": shares[arm], "seed": seed}, mean_loss(proxy.model, text.heldout[kept], size), proxy)
