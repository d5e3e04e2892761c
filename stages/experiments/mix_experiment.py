"""Small proxy runs on trial mixtures of categories, and the mixture that they recommend."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from puna.models.config import ModelShape
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings
from puna.stages.contract import Documents, Figure, Mixture, SeededConfig, StageRun, Tokenizer, stage
from puna.stages.training import mixing_laws
from puna.stages.training.corpus import check_mixture, token_counts
from puna.stages.training.intervals import Interval, evaluation_row, mean
from puna.stages.training.phase import OPTIMIZER, SHAPE, Phase
from puna.stages.training.pools import Group, PoolRows, Pools, Sizes, build_pools, grouped_documents
from puna.stages.training.proxy_runs import fresh, run_trials, train_proxy, trial_row
from puna.stages.training.token_rows import mean_loss
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import PunaError

PROXY = SHAPE.replace(
    hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.14
)


class MixExperimentConfig(SeededConfig):
    categories: int = Field(4, ge=2, le=12, description="Number of categories: the largest ones, and all others together as one")
    trials: int = Field(12, ge=4, le=500, description="Number of trial mixtures; at least two more than categories")
    min_share: float = Field(0.05, ge=0, lt=0.5, description="Minimum share of a category, in trials and in the recommendation (0 to 1)")
    max_share: float = Field(0.7, gt=0, le=1, description="Maximum recommended share of a category (0 to 1)")
    max_repeats: float = Field(4.0, ge=1, le=100, description="Maximum passes over a category's text per pass over the whole text")
    divergence_weight: float = Field(
        0.01, ge=0, le=10, description="Minimum loss reduction per nat of divergence from the natural mixture, nats per token"
    )
    target: dict[str, float] = Field(default_factory=dict, description="Category → weight of its loss in the objective; default: 1")
    model: ModelShape = Field(PROXY, description="Shape of the proxy model")
    phase: Phase = Field(
        Phase(name="proxy", steps=300, rows_per_step=1, schedule=ScheduleSettings(learning_rate=1.5e-2, warmup_steps=0.1)),
        description="Training of each proxy",
    )
    optimizer: OptimizerSettings = Field(OPTIMIZER, description="The optimizer")
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")
    repeats: int = Field(
        3, ge=2, le=100, description="Seeds to compare the natural and the recommended mixture; the recommended one is used only if the "
        "95 % interval of its mean gain is above 0"
    )  # fmt: skip
    sequence_length: int = Field(256, ge=8, description="Tokens per row")
    document_tokens: int = Field(1024, ge=8, description="Tokens read from each document's beginning; fewer tokens cover more documents")
    heldout_tokens: int = Field(8_000, ge=100, description="Held-out tokens of each category to measure the loss on")

    @model_validator(mode="after")
    def _design_is_possible(self) -> MixExperimentConfig:
        if self.trials < self.categories + 2:
            raise ValueError(f"{self.trials} trials cannot show how {self.categories} categories act; use at least {self.categories + 2}")
        if self.min_share * self.categories >= 1 or self.max_share * self.categories < 1:
            between = f"min_share={self.min_share} and max_share={self.max_share}"
            raise ValueError(f"no mixture of {self.categories} categories lies between {between}")
        self.phase.check_plain("proxies read rows of sequence_length")
        return self


@stage(kind="evaluation")
def mix_experiment(documents: Documents, split: Mixture, tokenizer: Tokenizer, config: MixExperimentConfig, run: StageRun) -> None:
    """Find mixture weights with small models (Llama 3, section 3.1.2; data mixing laws, Ye et al. 2024).

    Proxies start from the same weights and are trained on mixtures that cover the simplex. Two surrogates fit each category's held-out
    loss: a law of the shares, and a Gaussian process over the shares' square roots. They are weighted by their errors on left-out mixtures
    (`left_out_error`). The recommended shares minimize the weighted loss of the categories plus a penalty on divergence from the natural
    mixture. Both mixtures are then compared in training runs with `repeats` seeds. The table `weights` has the recommended shares if the 95
    % interval of the gain (Student's t over the seeds) is above 0, else the natural shares; see the metric `mixture_used`.

    Losses are measured on training documents of the split that no proxy reads; the split's held-out documents are not used."""
    check_mixture(run, documents, split)
    vocabulary = tokenizer_of(tokenizer)
    tokens_needed = config.phase.steps * config.phase.rows_per_step * config.sequence_length
    sizes = Sizes(tokens_needed, config.heldout_tokens, config.sequence_length, config.document_tokens)
    groups = grouped_documents(documents, split, config.categories, sizes, run)
    run.metric("categories", len(groups))
    if len(groups) == 1:
        run.write_rows([evaluation_row(name, "weight", 1.0, groups[0].amount.documents) for name in groups[0].members])
        run.write_rows([{"category": name, "weight": 1.0} for name in groups[0].members], "weights")
        return
    if config.max_share * len(groups) < 1:
        raise PunaError(
            f"mix_experiment: {documents.id} has {len(groups)} categories, whose shares of at most max_share={config.max_share} "
            f"do not add up to 1; raise max_share to {math.ceil(100 / len(groups)) / 100} at least"
        )
    pools = build_pools(documents, split, groups, tokenizer, sizes, run)
    amounts = {name: (amount.documents, amount.bytes) for group in groups for name, amount in group.members.items()}
    tokens = token_counts(documents, split, amounts, tokenizer, run)
    natural = np.array([sum(tokens[name] for name in group.members) for group in groups], dtype=np.float64)
    natural /= natural.sum()
    design = mixing_laws.simplex_design(len(groups), config.trials - 1, config.min_share, run.generator("design"))
    mixtures = [("natural", natural, 0), *((f"design {i + 1}", shares, 0) for i, shares in enumerate(design))]
    trials = _run_mixtures(mixtures, 0, pools, config, vocabulary.vocab_size, vocabulary.begin, run)
    shares = np.array([trial.shares for trial in trials])
    losses = np.array([trial.losses for trial in trials])
    target = _target(config.target, groups)
    fitted = [mixing_laws.fit_surrogate(shares, losses[:, i]) for i in range(len(groups))]
    best = _recommend(fitted, shares, natural, target, config)
    compared = [("optimum", best, 0)]
    for repeat in range(1, config.repeats):
        compared += [(f"natural, seed {repeat + 1}", natural, repeat), (f"optimum, seed {repeat + 1}", best, repeat)]
    again = _run_mixtures(compared, len(trials), pools, config, vocabulary.vocab_size, vocabulary.begin, run)
    naturals, optima = [trials[0], *again[1::2]], again[::2]
    gain = mean([float(np.dot(target, a.losses) - np.dot(target, b.losses)) for a, b in zip(naturals, optima, strict=True)])
    winner = optima[0] if gain.low > 0 else trials[0]
    _write(trials + optima + naturals[1:], groups, target, winner, tokens, run)
    _report(trials, optima[0], winner, gain, config.repeats, groups, target, fitted, run)


def _recommend(
    fitted: Sequence[mixing_laws.Surrogate], shares: mixing_laws.Floats, natural: mixing_laws.Floats, target: mixing_laws.Floats,
    config: MixExperimentConfig,
) -> mixing_laws.Floats:  # fmt: skip
    """Return the shares that minimize the loss plus a penalty on divergence from the natural mixture, in bounds widened to contain it."""

    def value(mixtures: mixing_laws.Floats) -> mixing_laws.Floats:
        losses = np.stack([surrogate(mixtures) for surrogate in fitted], 1) @ target
        return np.asarray(losses + config.divergence_weight * mixing_laws.divergence(mixtures, natural))

    high = np.maximum(np.minimum(config.max_share, config.max_repeats * natural), natural)
    return mixing_laws.best_mixture(value, np.minimum(config.min_share, natural), high, np.concatenate([natural[None], shares]))


def _target(given: dict[str, float], groups: Sequence[Group]) -> mixing_laws.Floats:
    """Return the weights of the groups' losses, scaled to sum to 1. Raise PunaError for an unknown group, negative weight or all zeros."""
    names = [group.name for group in groups]
    if unknown := sorted(set(given) - set(names)):
        raise PunaError(f"mix_experiment.target: {unknown[0]!r} is not among the categories {', '.join(names)}")
    weights = np.array([given.get(name, 1.0) for name in names])
    if weights.min() < 0 or weights.sum() <= 0:
        raise PunaError(f"mix_experiment.target: weights must not be negative, and not all 0: {given}")
    return np.asarray(weights / weights.sum(), dtype=np.float64)


class Trial(NamedTuple):
    """One proxy run: its row of `trials` without details, its mixture, and each category's held-out loss in nats per token."""

    row: dict[str, Any]
    shares: list[float]
    losses: list[float]


def _run_mixtures(
    mixtures: Sequence[tuple[str, mixing_laws.Floats, int]], first: int, pools: PoolRows, config: MixExperimentConfig, vocab_size: int,
    begin: int, run: StageRun,
) -> list[Trial]:  # fmt: skip
    """Train a proxy on each mixture (name, shares, repeat); return the trials, numbered from `first`."""
    # Proxies of one repeat share initial weights and each category's row order: two trials differ only in the mixture.
    seeds = [run.seed("weights", repeat) if repeat else run.seed("weights") for _, _, repeat in mixtures]
    jobs = [(first + i, name, shares.tolist(), seeds[i]) for i, (name, shares, _) in enumerate(mixtures)]
    total = config.trials - 1 + 2 * config.repeats
    trials = run_trials(run, _trial, jobs, pools, vocab_size, begin, first=first, total=total)
    return [Trial(trial["row"], trial["shares"], trial["losses"]) for trial in trials]


def _trial(
    number: int, name: str, shares: list[float], seed: int, pools: PoolRows, vocab_size: int, begin: int, config: MixExperimentConfig,
    state: Path,
) -> dict[str, Any]:  # fmt: skip
    texts = Pools.read(pools)
    mixed = texts.mix(shares, config.phase.rows_per_step, seed, begin)
    shape = config.model.complete(vocab_size, config.sequence_length)
    size, settings = config.compute.micro_batch_tokens, config.phase.train_config(config.optimizer, config.compute)
    what = f"a small run of width {shape.hidden_size}"
    proxy = train_proxy(fresh(shape, seed), what, lambda step: mixed.batches(step, size), mixed.lengths, settings, seed, state)
    losses = [mean_loss(proxy.model, pieces, size) for pieces in texts.heldout]
    return {"name": name, "row": trial_row(number, name, {}, 0.0, proxy), "shares": shares, "losses": losses}


def _write(
    trials: Sequence[Trial], groups: Sequence[Group], target: mixing_laws.Floats, used: Trial, tokens: dict[str, int], run: StageRun
) -> None:
    rows, names = [], [group.name for group in groups]
    for trial in sorted(trials, key=lambda trial: trial.row["trial"]):
        details = {"shares": dict(zip(names, trial.shares, strict=True)), "losses": dict(zip(names, trial.losses, strict=True))}
        rows.append({**trial.row, "parameters": json.dumps(details), "loss": float(np.dot(target, trial.losses))})
    run.write_rows(rows, "trials")
    weights = []
    for group, share in zip(groups, used.shares, strict=True):
        total = sum(tokens[name] for name in group.members)
        weights += [{"category": name, "weight": share * tokens[name] / total} for name in group.members]
    run.write_rows(weights, "weights")


def _report(
    tried: Sequence[Trial], optimum: Trial, used: Trial, gain: Interval, repeats: int, groups: Sequence[Group], target: mixing_laws.Floats,
    fitted: list[mixing_laws.Surrogate], run: StageRun,
) -> None:  # fmt: skip
    """Write rows, metrics and figures on the surrogates fitted to `tried` (the natural mixture first), and on the gain of the optimum."""
    natural, names = tried[0], [group.name for group in groups]
    shares, losses = np.array([t.shares for t in tried]), np.array([t.losses for t in tried])
    best = np.array(optimum.shares)
    left_out = np.array([surrogate.left_out for surrogate in fitted])
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        values = {
            "weight": optimum.shares[i], "natural_weight": natural.shares[i], "loss": optimum.losses[i], "natural_loss": natural.losses[i],
            "predicted_loss": fitted[i](best), "fit_error": np.abs(fitted[i](shares) - losses[:, i]).mean(),
            "left_out_error": np.abs(left_out[i]).mean(), "loss_range": np.ptp(losses[:, i]),
        }  # fmt: skip
        rows += [evaluation_row(name, metric, float(value), len(tried)) for metric, value in values.items()]
    overall = {
        "loss": float(np.dot(target, optimum.losses)),
        "natural_loss": float(np.dot(target, natural.losses)),
        "predicted_loss": float(sum(w * float(law(best)) for w, law in zip(target, fitted, strict=True))),
        "left_out_error": float(np.abs(target @ left_out).mean()),
    }
    rows += [evaluation_row("target", metric, value, len(tried)) for metric, value in overall.items()]
    rows.append(evaluation_row("target", "loss_range", float(np.ptp(losses @ target)), len(tried)))
    rows.append(evaluation_row("target", "gain", gain, repeats))
    run.write_rows(rows)
    run.metric("trials", len(tried) - 1 + 2 * repeats)
    run.metric("divergence", float(mixing_laws.divergence(best[None], np.array(natural.shares))[0]))
    run.metric("process_share", float(np.dot(target, [surrogate.share for surrogate in fitted])))
    run.metric("gain", gain.value)
    run.metric("mixture_used", "natural" if used is natural else "recommended")
    for name, value in overall.items():
        run.metric("optimum_loss" if name == "loss" else name, value)
    run.metric("best_tried_loss", float((losses @ target).min()))
    verdict = "it contains 0, so the natural mixture is used" if used is natural else "the recommended mixture is used"
    interval = f"{gain.low:.4f} to {gain.high:.4f} over {repeats} seeds"
    note = f"Gain over the natural mixture {gain.value:.4f} nats a token ({interval}): {verdict}."
    series: dict[str, list[tuple[Any, float]]] = {
        name: list(zip(names, trial.shares, strict=True)) for name, trial in (("natural", natural), ("recommended", optimum))
    }
    run.figure("weights", Figure(title="Mixture", x="category", y="share of training tokens", kind="bar", series=series, note=note))
    points: dict[str, list[tuple[Any, float]]] = {
        name: [(float(y), float(y + e)) for y, e in zip(losses[:, i], left_out[i], strict=True)] for i, name in enumerate(names)
    }
    note = "Held-out loss of each category, nats per token; each point is predicted by the surrogates through all others."
    title = "Mixing laws on mixtures they were not fitted to"
    run.figure("law", Figure(title=title, x="measured loss", y="predicted loss", kind="scatter", series=points, note=note))
