"""The reward model: a scalar head trained to order the ranked answers of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from puna.models.training.settings import TrainingSettings
from puna.stages.align.lora import AdaptableConfig, adapted
from puna.stages.align.preferences import Level
from puna.stages.contract import Model, Preferences, StageRun, stage
from puna.stages.conversations import Message, message_of, others_of
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.train import Example, by_answer, check_trl, fit, load_model, render, row_limit, save_model
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.tokenizer import Tokenizer
    from puna.models.training.objectives import RewardBatch
    from puna.models.transformer import Transformer

MEASURED = 32
"""Training prompts that accuracy is measured on, where no more are held out."""
CLEAR: tuple[Level, ...] = ("significantly_better", "better")


class RewardModelConfig(AdaptableConfig):
    """How the reward model is trained."""

    engine: Literal["puna", "trl"] = Field("puna", description="Whose trainer: Puna's own loop, or TRL's RewardTrainer")
    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels that are learned from and measured on")
    nll_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the best answers' negative log-likelihood under the policy's head (GRM): "
        "keeps what the policy knows while rewards are still equal; needs engine puna",
    )
    training: TrainingSettings = Field(TrainingSettings(), description="Optimisation; an example is one prompt with all its preferences")

    @model_validator(mode="after")
    def _engine(self) -> RewardModelConfig:
        if self.engine == "trl" and self.nll_weight:
            raise ValueError(f"TRL's RewardTrainer has no such term: nll_weight must be 0 with engine trl, not {self.nll_weight}")
        if self.engine == "trl":
            check_trl(self.training)
            if self.method == "lora":
                raise ValueError("engine trl trains all weights of a reward model here: set engine puna for method lora")
        return self


@stage(kind="model", device=True)
def reward_model(model: Model, preferences: list[Preferences], config: RewardModelConfig, run: StageRun) -> None:
    """Bradley-Terry without a margin over edited > chosen > rejected, all answers of a prompt in one row
    (Llama 3, section 4.1.2). A ranking of more answers is one group of as many tiers; equals make no pair.

    The metric `heldout_accuracy` is the share of held-out pairs, chosen against rejected, in the right order; `train_accuracy` that
    of as many training prompts as are held out, at least 32, drawn by chance. Preferences that
    the chat template refuses, and those longer than a packed row, are in `dropped`; see `bad_rows`.
    """
    _check_splits(preferences)
    rows = read_preferences(preferences, config.levels)
    train = [row for row in rows if row["split"] == "train"]
    if not train:
        raise PunaError(f"reward_model: there is no training preference of the levels {', '.join(config.levels)}: nothing to learn from")
    scorer, tokenizer = load_model(model, "scalar", new=True)
    bad, limit = BadRows(config, "reward_model"), row_limit(config.training)
    learned = render_ranked(tokenizer, train, limit, bad)
    bad.check_left(len(learned), f"{len(train)} training preferences")
    heldout = render_ranked(tokenizer, [row for row in rows if row["split"] == "heldout"], limit, bad)
    bad.write(run)
    if config.engine == "trl":
        from puna.stages.align.trl_engine import hub_tokenizer, train_reward

        scorer = train_reward(scorer, [one.example for one in learned], hub_tokenizer(model, tokenizer), config, run)
    else:
        head = load_model(model, "lm")[0].lm_head.weight.detach() if config.nll_weight else None
        _train(scorer, head, [one.example for one in learned], config, run)
    run.metric("train_pairs", sum(len(one.rows) for one in learned))
    run.metric("heldout_pairs", sum(len(one.rows) for one in heldout))
    for split, some in (("train", _drawn(learned, max(len(heldout), MEASURED), run)), ("heldout", heldout)):
        _measure(scorer, some, split, config, run)
    save_model(scorer, tokenizer, run.folder)


def read_preferences(artifacts: Sequence[Artifact], levels: Sequence[str]) -> list[dict[str, Any]]:
    """The pairs and rankings of the given levels, or of none; in an order that does not depend on that of the artifacts.

    Rows with only one side hold no comparison and are left out.
    """
    rows = [row for artifact in artifacts for row in artifact.read().to_pylist() if row["level"] is None or row["level"] in levels]
    rows = [row for row in rows if row["chosen"] is not None and row["rejected"] is not None]
    return sorted(rows, key=lambda row: str(row["id"]))


def _check_splits(artifacts: Sequence[Artifact]) -> None:
    """PunaError when one set of preferences trains on a prompt that another holds out: its accuracy would be no held-out one."""
    where: dict[str, dict[str, str]] = {"train": {}, "heldout": {}}
    for artifact in artifacts:
        table = artifact.read(columns=["prompt_id", "split"])
        for prompt, split in zip(table["prompt_id"].to_pylist(), table["split"].to_pylist(), strict=True):
            where[split].setdefault(prompt, artifact.id)
    if both := sorted(set(where["train"]) & set(where["heldout"])):
        prompt = both[0]
        raise PunaError(
            f"prompt {prompt} is held out in {where['heldout'][prompt]} and trained on in {where['train'][prompt]}; "
            "make both with one seed and one heldout_fraction"
        )


def ranked(row: dict[str, Any]) -> list[list[Message]]:
    """The answers of a preference in tiers of equals, best first: edited, chosen, others in between, rejected."""
    tiers: dict[int, list[Message]] = {}
    for other in others_of(row):
        tiers.setdefault(other.pop("rank"), []).append(other)
    edited, chosen, rejected = (message_of(row, side) for side in ("edited", "chosen", "rejected"))
    if chosen is None or rejected is None:
        raise PunaError(f"preference {row['id']} has one side only: there is nothing to rank")
    best, worst = [chosen, *tiers.pop(0, [])], [*tiers.pop(-1, []), rejected]
    return [*([[edited]] if edited else []), best, *(tiers[rank] for rank in sorted(tiers)), worst]


class Ranked(NamedTuple):
    """A prompt with the ranked answers of its preferences; `rows` are these, a group of the example each."""

    example: Example
    rows: list[dict[str, Any]]


def render_ranked(tokenizer: Tokenizer, rows: Sequence[dict[str, Any]], limit: Limit, bad: BadRows) -> list[Ranked]:
    """Each prompt with the ranked answers of all its preferences, or as many of them as a packed row holds."""
    limit = limit._replace(what="the prompt with its ranked answers")
    ordered = sorted(rows, key=lambda row: (row["prompt_id"], row["id"]))
    found: list[Ranked] = []
    for row, example in bad.examples(ordered, lambda row: render(tokenizer, row, [ranked(row)]), len, limit):
        if found and found[-1].rows[0]["prompt_id"] == row["prompt_id"] and found[-1].example.prompt == example.prompt:
            last, more = found[-1], len(example) - len(example.prompt)
            if len(last.example) + more <= limit.tokens:
                found[-1] = Ranked(_joined(last.example, example), [*last.rows, row])
                continue
        found.append(Ranked(example, [row]))
    return found


def _joined(one: Example, other: Example) -> Example:
    """The answers of both behind their common prompt."""
    start = len(one.answers)
    shifted = [[[start + index for index in tier] for tier in tiers] for tiers in other.groups]
    return Example(one.prompt, one.answers + other.answers, one.masks + other.masks, one.groups + shifted)


def collate(examples: list[Example]) -> RewardBatch:
    """One packed row: each prompt once, all its ranked answers as branches, compared within their group."""
    from dataclasses import replace

    import torch

    from puna.models.training.objectives import RewardBatch, Targets

    targets = Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples])
    groups = [group for e in examples for group in e.groups]
    number = [g for g, group in enumerate(groups) for tier in group for _ in tier]
    rank = [r for group in groups for r, tier in enumerate(group) for _ in tier]
    return RewardBatch(replace(targets, prompt=torch.tensor(number)), torch.tensor(rank))


def _train(model: Transformer, head: Tensor | None, examples: list[Example], config: RewardModelConfig, run: StageRun) -> None:
    """`head`: the policy's own, where its likelihood counts, too."""
    from puna.models.training.objectives import Reward
    from puna.models.training.packing import Sampler

    training = config.training
    size = training.compute.micro_batch_tokens
    sampler = Sampler(examples, training.batch_size, collate, length=len, micro_batch_tokens=size, seed=run.seed("order"))
    with adapted(model, config, run) as scales:
        fit(model, Reward(config.nll_weight, head), sampler, training.train_config(len(examples)), run, scales)


def _drawn(found: list[Ranked], most: int, run: StageRun) -> list[Ranked]:
    """At most so many of them, by chance."""
    return [found[i] for i in sorted(run.generator("measured").permutation(len(found))[:most].tolist())]


def _measure(model: Transformer, found: list[Ranked], split: str, config: RewardModelConfig, run: StageRun) -> None:
    """Accuracy on chosen against rejected, and on edited against chosen where there is an edit."""
    ordered = [row for one in found for row in one.rows]
    if not ordered:
        return
    examples = [one.example for one in found]
    size = config.training.compute.micro_batch_tokens
    rewards = score_answers(model, examples, size, lambda done, total: run.progress(done, total, f"{split} accuracy"))
    groups = [[[r[i] for i in tier] for tier in tiers] for e, r in zip(examples, rewards, strict=True) for tiers in e.groups]
    right, edits = [], []
    for row, tiers in zip(ordered, groups, strict=True):
        if row["edited"] is not None:
            edits.append(_order(tiers[0][0], tiers[1][0]))
            tiers = tiers[1:]
        right.append(_order(tiers[0][0], tiers[-1][-1]))
    run.metric(f"{split}_accuracy", sum(right) / len(right))
    if edits:
        run.metric(f"{split}_edit_accuracy", sum(edits) / len(edits))


def _order(better: float, worse: float) -> float:
    """1 when in the right order, one half for a tie."""
    return float(better > worse) + 0.5 * float(better == worse)


def score_answers(
    model: Transformer, examples: Sequence[Example], micro_batch_tokens: int, progress: Callable[[int, int], None] | None = None
) -> list[list[float]]:
    """The scalar head's number for every answer of every prompt, in order."""
    import torch

    from puna.models.training.objectives import Targets, answer_rewards

    place = next(model.parameters()).device

    @torch.no_grad()
    def compute(some: list[Example]) -> Tensor:
        return answer_rewards(model, Targets.from_answers([e.prompt for e in some], [e.answers for e in some]).to(place))

    return by_answer(examples, micro_batch_tokens, compute, progress)
