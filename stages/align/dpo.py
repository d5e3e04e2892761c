"""Direct preference optimisation of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from puna.stages.contract import Facts, Model, Preferences, StageRun, stage
from puna.stages.training.bad_rows import BadRows
from puna.stages.training.kto import measure_kto, train_kto
from puna.stages.training.lora import adapted
from puna.stages.training.needs import chat_template, trained
from puna.stages.training.rankings import labelled, pairs_of, ranked, read_preferences, render_ranked
from puna.stages.training.reference import Reference, stored_logprobs, targets_of
from puna.stages.training.settings import DpoConfig
from puna.stages.training.train import Example, fit, load_model, row_limit, save_model, training_precision
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.training.objectives import Dpo, DpoBatch
    from puna.models.transformer import Transformer


def needs(config: DpoConfig, facts: Facts) -> list[str]:
    """A chat template, and memory."""
    return [*chat_template(facts, "model"), *trained(facts, "model", config.training.optimizer, config.method), *config.unmet()]


@stage(kind="model", device=True, needs=needs)
def dpo(model: Model, preferences: list[Preferences], config: DpoConfig, run: StageRun) -> None:
    """Train by DPO, or another preference loss, with format tokens masked and an NLL term on the better answer (Llama 3, section 4.1.4).

    The reference is the policy that training starts from; where the loss needs its log-probabilities, those of the preferences
    that training comes to are computed once, before the first step, but for those that `reference_logprobs` has stored_logprobs beside them
    (the metric `reference_answers` counts what was computed).
    With loss kto the best answers of a preference (edited, chosen and their equals) are good ones, the worst are bad ones.
    The metrics `heldout_accuracy` and `heldout_margin` are of the held-out pairs, after training; with kto the latter is between the
    means of good and bad answers.
    Preferences that the chat template refuses, those longer than a packed row, and but for kto those with one side only are in
    `dropped`; see `bad_rows`.
    """
    rows = read_preferences(preferences, config.levels)
    train = [row for row in rows if row["split"] == "train"]
    if not train:
        raise PunaError(f"there is no training preference of the levels {', '.join(config.levels)}: nothing to learn from")
    policy, tokenizer = load_model(model, "lm", quantization=config.quantization)
    tiers_of, train_on, measure = (labelled, train_kto, measure_kto) if config.preference.of == "answers" else (ranked, _train, _measure)
    bad, limit = BadRows(config, "dpo"), row_limit(config.training)
    examples = [one.example for one in render_ranked(tokenizer, train, limit, bad, tiers_of)]
    bad.check_left(len(examples), f"{len(train)} training preferences")
    run.metric("preferences", len(train) - len(bad.dropped))
    held = [row for row in rows if row["split"] == "heldout"]
    heldout = [one.example for one in render_ranked(tokenizer, held, limit, bad, tiers_of)]
    bad.write(run)
    reference = Reference(config, run, stored_logprobs(preferences, model, config, run))
    known = reference.of(policy, heldout)
    if config.engine == "trl":
        from puna.stages.training.trl_engine import hub_tokenizer, train_dpo

        policy = train_dpo(policy, examples, hub_tokenizer(model, tokenizer), config, run)
    else:
        log = train_on(policy, examples, reference, config, run)
        for name in ("accuracy", "margin", "chosen_logprob", "rejected_logprob"):
            if name in log[0]:
                run.metric(f"first_{name}", log[0][name])
                run.metric(f"final_{name}", log[-1][name])
    run.metric("reference_answers", reference.computed)
    measure(policy, heldout, known, config, run)
    save_model(policy, tokenizer, run.folder)


def collate(examples: Sequence[tuple[Example, list[float]]], config: DpoConfig) -> DpoBatch:
    """Pack pairs into one row, with their answers' reference log-probabilities."""
    import torch

    from puna.models.training.objectives import DpoBatch

    chosen, rejected, start = [], [], 0
    for example, _ in examples:
        for better, worse in pairs_of(example, config.pairs):
            chosen.append(start + better)
            rejected.append(start + worse)
        start += len(example.answers)
    return DpoBatch(
        targets=targets_of([example for example, _ in examples], config.mask_format),
        chosen=torch.tensor(chosen),
        rejected=torch.tensor(rejected),
        reference=torch.tensor([value for _, values in examples for value in values], dtype=torch.float32),
    )


def objective(config: DpoConfig) -> Dpo:
    """The loss, as configured."""
    from puna.models.training.objectives import Dpo

    return Dpo(config.beta, config.nll_weight, config.nll_normalization, config.loss, config.loss_parameters)


def _measure(model: Transformer, examples: list[Example], known: list[list[float]], config: DpoConfig, run: StageRun) -> None:
    """Report the accuracy and the margin of the policy's implicit reward on held-out pairs."""
    import torch

    from puna.models.training.packing import pack
    from puna.models.training.trainer import computing_in

    found, pairs, precision = {"accuracy": 0.0, "margin": 0.0}, 0, training_precision(config.training.compute, run)
    for row in pack([len(example) for example in examples], config.training.compute.micro_batch_tokens):
        batch = collate([(examples[i], known[i]) for i in row], config)
        with torch.no_grad(), computing_in(model, precision):
            _, metrics = objective(config)(model, batch.to(next(model.parameters()).device))
        pairs += len(batch.chosen)
        for name in found:
            found[name] += float(metrics[name]) * len(batch.chosen)
    run.metric("heldout_pairs", pairs)
    for name, total in found.items():
        if pairs:
            run.metric(f"heldout_{name}", total / pairs)


def _train(
    model: Transformer, examples: Sequence[Example], reference: Reference, config: DpoConfig, run: StageRun
) -> list[dict[str, float]]:
    from puna.models.training.packing import Sampler

    training = config.training
    known = {i: [0.0] * len(example.answers) for i, example in enumerate(examples)}
    sampler = Sampler(
        range(len(examples)),
        training.batch_size,
        lambda chosen: collate([(examples[i], known[i]) for i in chosen], config),
        length=lambda i: len(examples[i]),
        micro_batch_tokens=training.compute.micro_batch_tokens,
        seed=run.seed("order"),
    )
    settings = training.train_config(len(examples))
    visited = sampler.visited(settings.steps)
    known |= zip(visited, reference.of(model, [examples[i] for i in visited]), strict=True)
    with adapted(model, config, run) as scales:
        return fit(model, objective(config), sampler, settings, run, scales)
