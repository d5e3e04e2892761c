"""The reward model: a language model with a scalar head, trained to rank the answers to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from puna.stages.contract import Figure, Model, Preferences, StageRun, stage
from puna.stages.executors import ranks
from puna.stages.training.bad_rows import BadRows
from puna.stages.training.lora import adapters
from puna.stages.training.needs import training_needs
from puna.stages.training.rankings import Ranked, order, read_preferences, render_ranked
from puna.stages.training.reward_head import fit_head
from puna.stages.training.settings import RewardModelConfig
from puna.stages.training.train import Example, by_answer, fit, load_model, row_limit, save_model
from puna.stages.verifiers.reward_model import sigmoid
from puna.storage import PunaError

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.training.objectives import RewardBatch
    from puna.models.transformer import Transformer

MEASURED = 32  # minimum number of training prompts to measure accuracy on, if there are that many


@stage(kind="model", device=True, ranks=True, needs=training_needs)
def reward_model(model: Model, preferences: list[Preferences], config: RewardModelConfig, run: StageRun) -> None:
    """Train a reward model with the Bradley-Terry loss (no margin) on edited > chosen > rejected (Llama 3, section 4.1.2).

    All answers to a prompt share one packed row. A ranking of more than three answers has one tier per rank; equal answers form no pair.
    With `head_only`, only the head is trained. The metric `heldout_accuracy` is the share of held-out pairs (chosen against rejected) that
    are ordered correctly; `train_accuracy` is measured on as many random training prompts as there are held-out prompts, at least 32.
    `heldout_longer_accuracy` is the accuracy of always preferring the longer answer, `heldout_accuracy_LEVEL` that of the reward model on
    one level. `heldout_calibration_error` compares the probabilities implied by reward differences with observed shares. Preferences that
    the chat template rejects, or that are longer than a packed row, are in `dropped`; see `bad_rows`."""
    rows = read_preferences(preferences, config.levels)
    train = [row for row in rows if row["split"] == "train"]
    if not train:
        raise PunaError(f"reward_model: no training preference has one of the levels {', '.join(config.levels)}; give other levels")
    scorer, tokenizer = load_model(model, "scalar", new=True, quantization=config.quantization, layout=config.training.compute.layout)
    if scorer.config.reward_pooling != config.pooling:
        scorer.config = scorer.config.replace(reward_pooling=config.pooling, model_type="")
    bad, limit = BadRows(config, "reward_model"), row_limit(config.training)
    learned = render_ranked(tokenizer, train, limit, bad)
    bad.check_left(len(learned), f"{len(train)} training preferences")
    heldout = render_ranked(tokenizer, [row for row in rows if row["split"] == "heldout"], limit, bad)
    bad.write(run)
    if config.head_only and ranks.follows():  # rank 0 alone trains the head, with one folder of saved states
        return
    if config.head_only:
        fit_head(scorer, [one.example for one in learned], config.training.compute.micro_batch_tokens, run)
    elif config.engine == "trl":
        from puna.stages.training.trl_engine import hub_tokenizer, train_reward

        scorer = train_reward(scorer, [one.example for one in learned], hub_tokenizer(model, tokenizer), config, run)
    else:
        head = load_model(model, "lm")[0].lm_head.weight.detach() if config.nll_weight else None
        _train(scorer, head, [one.example for one in learned], config, run)
    run.metric("train_pairs", sum(len(one.rows) for one in learned))
    run.metric("heldout_pairs", sum(len(one.rows) for one in heldout))
    for split, some in (("train", _draw(learned, max(len(heldout), MEASURED), run)), ("heldout", heldout)):
        _measure(scorer, some, split, config, run)
    save_model(scorer, tokenizer, run.folder)


def collate(examples: list[Example]) -> RewardBatch:
    """Pack prompts into a batch of one row. The ranked answers are branches, and are compared only within their ranking.

    Every ranking has the same weight in the loss, so a prompt with several preferences is weighted by their number."""
    from dataclasses import replace

    import torch

    from puna.models.training.objectives import RewardBatch, Targets

    targets = Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples])
    groups = [group for e in examples for group in e.groups]
    number = [g for g, group in enumerate(groups) for tier in group for _ in tier]
    rank = [r for group in groups for r, tier in enumerate(group) for _ in tier]
    return RewardBatch(replace(targets, prompt=torch.tensor(number)), torch.tensor(rank))


def _train(model: Transformer, head: Tensor | None, examples: list[Example], config: RewardModelConfig, run: StageRun) -> None:
    """Train the model in place. `head`: the language-model head for the NLL term; None without this term."""
    from puna.models.training.objectives import Reward
    from puna.models.training.packing import Sampler

    training = config.training
    size = training.compute.micro_batch_tokens
    sampler = Sampler(examples, training.batch_size, collate, length=len, micro_batch_tokens=size, seed=run.seed("order"))
    objective = Reward(config.nll_weight, head, model.config.final_logit_softcapping)
    with adapters(model, config, run) as scales:
        fit(model, objective, sampler, training.train_config(len(examples)), run, scales)


def _draw(found: list[Ranked], most: int, run: StageRun) -> list[Ranked]:
    return [found[i] for i in sorted(run.generator("measured").permutation(len(found))[:most].tolist())]


def _measure(model: Transformer, found: list[Ranked], split: str, config: RewardModelConfig, run: StageRun) -> None:
    examples, size = [one.example for one in found], config.training.compute.micro_batch_tokens
    rewards = score_answers(model, examples, size, lambda done, total: run.progress(done, total, f"{split} accuracy"))
    report(*pairs(found, rewards), split, run)


def score_answers(
    model: Transformer, examples: Sequence[Example], micro_batch_tokens: int, progress: Callable[[int, int], None] | None = None
) -> list[list[float]]:
    """Return the reward of every answer, in the order of the examples and their answers."""
    import torch

    from puna.models.training.objectives import Targets, answer_rewards
    from puna.models.training.parallel.parallel import alone

    held = alone(model)

    @torch.no_grad()
    def compute(some: list[Example]) -> Tensor:
        targets = Targets.from_answers([e.prompt for e in some], [e.answers for e in some])
        return held.ask(answer_rewards, targets.to(held.device))

    return [values.tolist() for values in by_answer(examples, micro_batch_tokens, compute, progress)]


BINS = ((-0.5, "half or less"), (-0.1, "shorter"), (0.1, "about as long"), (0.5, "longer"), (1.0, "twice or more"))
"""Upper end and name of each bin of the length difference: (chosen - rejected) / length of the longer answer."""
STEPS = 10  # number of bins for the calibration error, which compares predicted and observed accuracy


class Pair(NamedTuple):
    """A chosen and a rejected answer. `right`: 1 if the chosen answer has the higher reward, 0.5 for a tie, else 0. `longer`: the same for
    lengths in tokens. `difference`: length difference as a share of the longer answer. `margin`: reward difference."""

    level: str | None
    right: float
    longer: float
    difference: float
    margin: float


def pairs(found: Sequence[Ranked], numbers: Sequence[Sequence[float]]) -> tuple[list[Pair], list[float]]:
    """Return one `Pair` per preference and, per edited answer, 1, 0.5 or 0: its reward is above, equal to or below the chosen answer's."""
    comparisons: list[Pair] = []
    edits: list[float] = []
    for one, values in zip(found, numbers, strict=True):
        lengths = [len(answer) for answer in one.example.answers]
        for row, tiers in zip(one.rows, one.example.groups, strict=True):
            if row["edited"] is not None:
                edits.append(order(values[tiers[0][0]] - values[tiers[1][0]]))
            better, worse = tiers[row["edited"] is not None][0], tiers[-1][-1]
            a, b = lengths[better], lengths[worse]
            margin = values[better] - values[worse]
            comparisons.append(Pair(row["level"], order(margin), order(a - b), (a - b) / max(a, b), margin))
    return comparisons, edits


def report(ordered: Sequence[Pair], edits: Sequence[float], split: str, run: StageRun) -> None:
    """Report the accuracies on a split; for held-out pairs also accuracies by level, the calibration error, and a figure by length."""
    if edits:
        run.metric(f"{split}_edit_accuracy", fmean(edits))
    if not ordered:
        return
    run.metric(f"{split}_accuracy", fmean([pair.right for pair in ordered]))
    run.metric(f"{split}_longer_accuracy", fmean([pair.longer for pair in ordered]))
    if split != "heldout":
        return
    levels = sorted({pair.level for pair in ordered if pair.level is not None})
    for level in levels:
        run.metric(f"{split}_accuracy_{level}", fmean([pair.right for pair in ordered if pair.level == level]))
    run.metric(f"{split}_calibration_error", calibration_error(ordered))
    bars: list[tuple[Any, float]] = []
    low = -1.1
    for high, name in BINS:
        if inside := [pair.right for pair in ordered if low < pair.difference <= high]:
            bars.append((f"{name} ({len(inside)})", fmean(inside)))
        low = high
    figure = Figure(
        title="Reward model by length", x="the chosen answer beside the rejected one (pairs)", y="held-out pairs in the right order",
        kind="bar", series={"accuracy": bars}, lines={"the longer answer": fmean([pair.longer for pair in ordered])},
        note="A model that judges by length is right on one side and wrong on the other.",
    )  # fmt: skip
    run.figure("length", figure)


def calibration_error(ordered: Sequence[Pair]) -> float:
    """Return the expected calibration error (Guo et al. 2017) of the Bradley-Terry probabilities, with bins from 0.5 to 1."""
    parts: dict[int, list[Pair]] = {}
    for pair in ordered:
        parts.setdefault(min(STEPS - 1, int((sigmoid(abs(pair.margin)) - 0.5) * 2 * STEPS)), []).append(pair)
    gaps = [abs(sum(pair.right - sigmoid(abs(pair.margin)) for pair in some)) for some in parts.values()]
    return sum(gaps) / len(ordered)
