"""Direct preference optimization (DPO) of a policy, and variants of DPO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from puna.stages.contract import Model, Preferences, StageRun, stage
from puna.stages.training.bad_rows import BadRows
from puna.stages.training.lora import adapters
from puna.stages.training.needs import training_needs
from puna.stages.training.rankings import by_label, by_tier, pairs_of, read_preferences, render_ranked
from puna.stages.training.reference import Reference, stored_logprobs, targets_of
from puna.stages.training.settings import DpoConfig
from puna.stages.training.train import Example, fit, load_model, report_ends, row_limit, save_model, training_precision
from puna.storage import PunaError

if TYPE_CHECKING:
    import numpy as np

    from puna.models.training.objectives import Dpo, DpoBatch, Kto, KtoBatch
    from puna.models.transformer import Transformer


@stage(kind="model", device=True, ranks=True, needs=training_needs)
def dpo(model: Model, preferences: list[Preferences], config: DpoConfig, run: StageRun) -> None:
    """Train by DPO or another preference loss, by default with template tokens masked and an NLL term (Llama 3, section 4.1.4).

    The reference is the policy at the start of training. If the loss needs the reference's log-probabilities, they are computed once,
    before the first step, for the preferences that training will use. Values stored by `reference_logprobs` are read instead; the metric
    `reference_answers` counts computed answers. With the loss kto, a preference's best answers (edited, chosen, and answers of equal rank)
    count as good and its worst as bad. `heldout_accuracy` and `heldout_margin` are measured on held-out pairs after training; with kto the
    margin is the mean reward of good answers minus that of bad ones. Preferences that the chat template rejects, that are longer than a
    packed row, or (except with kto) whose answers are all good or all bad are in `dropped`; see `bad_rows`."""
    rows = read_preferences(preferences, config.levels)
    train = [row for row in rows if row["split"] == "train"]
    if not train:
        raise PunaError(f"no training preference has one of the levels {', '.join(config.levels)}; give other preferences or levels")
    policy, tokenizer = load_model(model, "lm", quantization=config.quantization, layout=config.training.compute.layout)
    tiers_of, train_on, measure = (by_label, _train_kto, _measure_kto) if config.preference.of == "answers" else (by_tier, _train, _measure)
    bad, limit = BadRows(config, "dpo"), row_limit(config.training)
    examples = [one.example for one in render_ranked(tokenizer, train, limit, bad, tiers_of)]
    bad.check_left(len(examples), f"{len(train)} training preferences")
    run.metric("preferences", len(train) - len(bad.dropped))
    held = [row for row in rows if row["split"] == "heldout"]
    heldout = [one.example for one in render_ranked(tokenizer, held, limit, bad, tiers_of)]
    bad.write(run)
    reference = Reference(config, run, stored_logprobs(preferences, model, config, run))
    logprobs = reference.of(policy, heldout)
    if config.engine == "trl":
        from puna.stages.training.trl_engine import hub_tokenizer, train_dpo

        policy = train_dpo(policy, examples, hub_tokenizer(model, tokenizer), config, run)
    else:
        log = train_on(policy, examples, reference, config, run)
        report_ends(log, ("accuracy", "margin", "chosen_logprob", "rejected_logprob"), run)
    run.metric("reference_answers", reference.computed)
    measure(policy, heldout, logprobs, config, run)
    save_model(policy, tokenizer, run.folder)


def collate(examples: Sequence[tuple[Example, list[float]]], config: DpoConfig) -> DpoBatch:
    """Pack pairs and the reference log-probabilities of their answers into a batch of one row."""
    import torch

    from puna.models.training.objectives import DpoBatch

    chosen, rejected, start = [], [], 0
    for example, _ in examples:
        for better, worse in pairs_of(example, config.pairs):
            chosen.append(start + better)
            rejected.append(start + worse)
        start += len(example.answers)
    return DpoBatch(
        targets=targets_of([example for example, _ in examples], config.mask_format), chosen=torch.tensor(chosen),
        rejected=torch.tensor(rejected), reference=torch.tensor([value for _, values in examples for value in values], dtype=torch.float32),
    )  # fmt: skip


def objective(config: DpoConfig) -> Dpo:
    """Return the configured loss on preference pairs."""
    from puna.models.training.objectives import Dpo

    return Dpo(config.beta, config.nll_weight, config.nll_normalization, config.loss, config.loss_parameters)


def _measure(model: Transformer, examples: list[Example], known: list[list[float]], config: DpoConfig, run: StageRun) -> None:
    """Report the accuracy and the margin of the policy's implicit rewards on held-out pairs."""
    import torch

    from puna.models.training.packing import pack
    from puna.models.training.parallel.parallel import alone
    from puna.models.training.trainer import computing_in

    figures, pairs, precision = {"accuracy": 0.0, "margin": 0.0}, 0, training_precision(config.training.compute, run)
    held, loss = alone(model), objective(config)

    def compute(model: Transformer, batch: DpoBatch) -> torch.Tensor:
        metrics = loss(model, batch)[1]
        return torch.stack([metrics[name] for name in figures])

    for row in pack([len(example) for example in examples], config.training.compute.micro_batch_tokens):
        batch = collate([(examples[i], known[i]) for i in row], config)
        with torch.no_grad(), computing_in(held.model, precision):
            values = held.ask(compute, batch.to(held.device)).tolist()
        pairs += len(batch.chosen)
        for name, value in zip(figures, values, strict=True):
            figures[name] += value * len(batch.chosen)
    run.metric("heldout_pairs", pairs)
    for name, total in figures.items():
        if pairs:
            run.metric(f"heldout_{name}", total / pairs)


def _train(
    model: Transformer, examples: Sequence[Example], reference: Reference, config: DpoConfig, run: StageRun
) -> list[dict[str, float]]:
    return _fit(model, objective(config), [(example,) for example in examples], collate, reference, config, run)


def _train_kto(
    model: Transformer, examples: Sequence[Example], reference: Reference, config: DpoConfig, run: StageRun
) -> list[dict[str, float]]:
    """Train in place by KTO (Ethayarajh et al. 2024) on examples with two tiers, good and bad answers; return the log.

    The loss compares rewards with the KL to the reference, estimated on other prompts' answers. Raise PunaError if there are none."""
    from puna.models.training.objectives import Kto

    others = mismatch(examples, config.training.compute.micro_batch_tokens, run.generator("mismatched"))
    if not any(other.answers for other in others):
        needed = "estimates a KL divergence on answers to other prompts; give preferences for at least two prompts"
        raise PunaError(f"dpo: loss {config.loss} {needed}")
    for index, name in enumerate(("good_answers", "bad_answers")):
        run.metric(name, sum(len(group[index]) for example in examples for group in example.groups))
    kto = Kto(config.beta, config.nll_weight, config.nll_normalization, config.loss, config.loss_parameters)
    return _fit(model, kto, list(zip(examples, others, strict=True)), _collate_kto, reference, config, run)


def _fit(
    model: Transformer, loss: Dpo | Kto, rows: Sequence[tuple[Example, ...]], collated: Callable[..., Any], reference: Reference,
    config: DpoConfig, run: StageRun,
) -> list[dict[str, float]]:  # fmt: skip
    """Train on rows of examples and return the log. First compute the reference's log-probabilities of the examples that training uses.
    `collated` packs rows into a batch. Each row is followed by the reference log-probabilities of its examples' answers."""
    from puna.models.training.packing import Sampler

    training, logprobs = config.training, dict[int, tuple[list[float], ...]]()
    sampler = Sampler(
        range(len(rows)), training.batch_size, lambda chosen: collated([(*rows[i], *logprobs[i]) for i in chosen], config),
        length=lambda i: max(map(len, rows[i])), micro_batch_tokens=training.compute.micro_batch_tokens, seed=run.seed("order"),
    )  # fmt: skip
    settings = training.train_config(len(rows))
    answers = sum(len(example.answers) for row in rows for example in row)
    run.metric("trained_answers", training.batch_size * settings.steps * answers / len(rows))
    visited = sampler.visited_examples(settings.steps)
    examples = [example for column in zip(*(rows[i] for i in visited), strict=True) for example in column]
    values = reference.of(model, examples)
    columns = [values[start : start + len(visited)] for start in range(0, len(values), len(visited))]
    logprobs |= zip(visited, zip(*columns, strict=True), strict=True)
    with adapters(model, config, run) as scales:
        return fit(model, loss, sampler, settings, run, scales)


def _measure_kto(model: Transformer, examples: Sequence[Example], known: list[list[float]], config: DpoConfig, run: StageRun) -> None:
    """Report the margin on held-out answers: the mean implicit reward of good answers minus that of bad answers."""
    rewards: list[list[float]] = [[], []]
    for example, before, after in zip(examples, known, Reference(config, run).of(model, examples, "heldout"), strict=True):
        for group in example.groups:
            for some, tier in zip(rewards, group, strict=True):
                some += [config.beta * (after[i] - before[i]) for i in tier]
    good, bad = rewards
    run.metric("heldout_answers", len(good) + len(bad))
    if good and bad:
        run.metric("heldout_margin", sum(good) / len(good) - sum(bad) / len(bad))


def mismatch(examples: Sequence[Example], micro_batch_tokens: int, generator: np.random.Generator) -> list[Example]:
    """Return each example's prompt with the same number of answers, taken from other examples; fewer if answers or tokens run out.

    Answers are taken in random order, cyclically. If all fit and no example has more than half of all answers, each is used once."""
    order = generator.permutation(len(examples)).tolist()
    ring = [(examples[i].answers[k], examples[i].masks[k]) for i in order for k in range(len(examples[i].answers))]
    remaining: list[Example] = list(examples)
    start, most = 0, max((len(example.answers) for example in examples), default=0)
    for i in order:
        own, room = len(examples[i].answers), micro_batch_tokens - len(examples[i].prompt)
        swaps: list[tuple[list[int], list[bool]]] = []
        for step in range(len(ring)):
            place = (start + most + step) % len(ring)
            if start <= place < start + own:
                continue
            answer = ring[place]
            if len(swaps) < own and len(answer[0]) <= room:
                swaps.append(answer)
                room -= len(answer[0])
            if len(swaps) == own:
                break
        start += own
        remaining[i] = Example(examples[i].prompt, [ids for ids, _ in swaps], [mask for _, mask in swaps], [])
    return remaining


def _collate_kto(chosen: Sequence[tuple[Example, Example, list[float], list[float]]], config: DpoConfig) -> KtoBatch:
    import torch

    from puna.models.training.objectives import KtoBatch

    good = [index in group[0] for example, *_ in chosen for group in example.groups for index in sorted(group[0] + group[1])]
    return KtoBatch(
        targets=targets_of([example for example, *_ in chosen], config.mask_format), desirable=torch.tensor(good),
        reference=torch.tensor([value for *_, values, _ in chosen for value in values], dtype=torch.float32),
        mismatched=targets_of([other for _, other, *_ in chosen], config.mask_format),
        mismatched_reference=torch.tensor([value for *_, values in chosen for value in values], dtype=torch.float32),
    )
