"""KTO: a policy trained on answers that are called good or bad one by one (Ethayarajh et al. 2024), for stage `dpo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from puna.stages.contract import StageRun
from puna.stages.training.lora import adapted
from puna.stages.training.reference import Reference, targets_of
from puna.stages.training.train import Example, fit
from puna.storage import PunaError

if TYPE_CHECKING:
    import numpy as np

    from puna.models.training.objectives import KtoBatch
    from puna.models.transformer import Transformer
    from puna.stages.training.settings import DpoConfig


def train_kto(
    model: Transformer, examples: Sequence[Example], reference: Reference, config: DpoConfig, run: StageRun
) -> list[dict[str, float]]:
    """Train in place on examples whose groups are two tiers, the good and the bad answers; returns the log.

    The distance to the reference, which the loss measures from, is estimated on answers to other prompts (`mismatched`).
    """
    from puna.models.training.objectives import Kto
    from puna.models.training.packing import Sampler

    training = config.training
    others = mismatched(examples, training.compute.micro_batch_tokens, run.generator("mismatched"))
    if not any(other.answers for other in others):
        needed = "measures from answers to other prompts, and there is none: give preferences of two prompts at least"
        raise PunaError(f"dpo: loss {config.loss} {needed}")
    for index, name in enumerate(("good_answers", "bad_answers")):
        run.metric(name, sum(len(group[index]) for example in examples for group in example.groups))
    known: dict[int, tuple[list[float], list[float]]] = {}
    sampler = Sampler(
        range(len(examples)),
        training.batch_size,
        lambda chosen: _collate([(examples[i], others[i], *known[i]) for i in chosen], config),
        length=lambda i: max(len(examples[i]), len(others[i])),
        micro_batch_tokens=training.compute.micro_batch_tokens,
        seed=run.seed("order"),
    )
    settings = training.train_config(len(examples))
    visited = sampler.visited(settings.steps)
    found = reference.of(model, [some[i] for some in (examples, others) for i in visited])
    known |= zip(visited, zip(found[: len(visited)], found[len(visited) :], strict=True), strict=True)
    objective = Kto(config.beta, config.nll_weight, config.nll_normalization, config.loss, config.loss_parameters)
    with adapted(model, config, run) as scales:
        return fit(model, objective, sampler, settings, run, scales)


def measure_kto(model: Transformer, examples: Sequence[Example], known: list[list[float]], config: DpoConfig, run: StageRun) -> None:
    """Report the mean implicit reward of held-out good answers less that of bad ones."""
    found = zip(examples, known, Reference(config, run).of(model, examples, "heldout"), strict=True)
    rewards: list[list[float]] = [[], []]
    for example, before, after in found:
        for group in example.groups:
            for some, tier in zip(rewards, group, strict=True):
                some += [config.beta * (after[i] - before[i]) for i in tier]
    good, bad = rewards
    run.metric("heldout_answers", len(good) + len(bad))
    if good and bad:
        run.metric("heldout_margin", sum(good) / len(good) - sum(bad) / len(bad))


def mismatched(examples: Sequence[Example], micro_batch_tokens: int, generator: np.random.Generator) -> list[Example]:
    """Pair each prompt with as many answers of other examples as it has of its own, or as a row holds.

    They follow in a drawn order that goes around: where all fit, every answer is taken about as often as any other.
    """
    order = generator.permutation(len(examples)).tolist()
    ring = [(examples[i].answers[k], examples[i].masks[k]) for i in order for k in range(len(examples[i].answers))]
    found: list[Example] = list(examples)
    start = 0
    for i in order:
        own, room = len(examples[i].answers), micro_batch_tokens - len(examples[i].prompt)
        taken: list[tuple[list[int], list[bool]]] = []
        start += own
        for step in range(len(ring) - own):
            answer = ring[(start + step) % len(ring)]
            if len(taken) < own and len(answer[0]) <= room:
                taken.append(answer)
                room -= len(answer[0])
            if len(taken) == own:
                break
        found[i] = Example(examples[i].prompt, [ids for ids, _ in taken], [mask for _, mask in taken], [])
    return found


def _collate(chosen: Sequence[tuple[Example, Example, list[float], list[float]]], config: DpoConfig) -> KtoBatch:
    """Pack examples and their mismatched ones into one row, with the reference's log-probabilities of both."""
    import torch

    from puna.models.training.objectives import KtoBatch

    good = [index in group[0] for example, *_ in chosen for group in example.groups for index in sorted(group[0] + group[1])]
    return KtoBatch(
        targets=targets_of([example for example, *_ in chosen], config.mask_format),
        desirable=torch.tensor(good),
        reference=torch.tensor([value for *_, values, _ in chosen for value in values], dtype=torch.float32),
        mismatched=targets_of([other for _, other, *_ in chosen], config.mask_format),
        mismatched_reference=torch.tensor([value for *_, values in chosen for value in values], dtype=torch.float32),
    )
