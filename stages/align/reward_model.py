"""The reward model: a scalar head trained to order the ranked answers of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from puna.stages.align.fitting import Example, Fitting, check_lengths, check_trl, fit, load_model, render, save_model
from puna.stages.align.preferences import Level
from puna.stages.contract import Model, Preferences, SeededConfig, StageRun, stage
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.tokenizer import Tokenizer
    from puna.models.training.objectives import RewardBatch
    from puna.models.transformer import Transformer

CLEAR: tuple[Level, ...] = ("significantly_better", "better")


class RewardModelConfig(SeededConfig):
    """How the reward model is trained."""

    engine: Literal["puna", "trl"] = Field("puna", description="Whose trainer: Puna's own loop, or TRL's RewardTrainer")
    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels that are learned from and measured on")
    nll_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the best answers' negative log-likelihood under the policy's head (GRM): "
        "keeps what the policy knows while rewards are still equal; needs engine puna",
    )
    fitting: Fitting = Field(default_factory=Fitting, description="Optimisation; an example is one prompt with all its preferences")

    @model_validator(mode="after")
    def _engine(self) -> RewardModelConfig:
        if self.engine == "trl" and self.nll_weight:
            raise ValueError(f"TRL's RewardTrainer has no such term: nll_weight must be 0 with engine trl, not {self.nll_weight}")
        if self.engine == "trl":
            check_trl(self.fitting)
        return self


@stage(kind="model")
def reward_model(model: Model, preferences: list[Preferences], config: RewardModelConfig, run: StageRun) -> None:
    """Bradley-Terry without a margin over edited > chosen > rejected, all answers of a prompt in one row
    (Llama 3, section 4.1.2).

    The metric `heldout_accuracy` is the share of held-out pairs, chosen against rejected, in the right order.
    """
    _check_splits(preferences)
    rows = read_preferences(preferences, config.levels)
    train = [row for row in rows if row["split"] == "train"]
    if not train:
        raise PunaError(f"reward_model: there is no training preference of the levels {', '.join(config.levels)}: nothing to learn from")
    if config.engine == "trl":
        from puna.stages.align.trl_engine import train_reward

        scorer, tokenizer = train_reward(model, train, config, run)
    else:
        scorer, tokenizer = _train(model, train, config, run)
    for split in ("train", "heldout"):
        _measure(scorer, tokenizer, [row for row in rows if row["split"] == split], split, config, run)
    save_model(scorer, tokenizer, run.folder)


def read_preferences(artifacts: Sequence[Artifact], levels: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the given levels, in an order that does not depend on that of the artifacts."""
    rows = [row for artifact in artifacts for row in artifact.read().to_pylist() if row["level"] in levels]
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


def ranked(row: dict[str, Any]) -> list[str]:
    """The answers of a preference, best first: edited, chosen, rejected."""
    return [text for text in (row["edited"], row["chosen"], row["rejected"]) if text is not None]


def by_prompt(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The preferences of each prompt, so that it is computed once for all of them."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["prompt_id"], row["id"])):
        grouped.setdefault(row["prompt_id"], []).append(row)
    return grouped


def render_ranked(tokenizer: Tokenizer, rows: Sequence[dict[str, Any]], row_tokens: int) -> list[Example]:
    """Each prompt with the two or three ranked answers of each of its preferences."""
    grouped = by_prompt(rows)
    examples = [render(tokenizer, group[0]["prompt"], [ranked(row) for row in group]) for group in grouped.values()]
    check_lengths(examples, [f"prompt {name} with its ranked answers" for name in grouped], row_tokens)
    return examples


def collate(examples: list[Example]) -> RewardBatch:
    """One packed row: each prompt once, all its ranked answers as branches, compared within their group."""
    from dataclasses import replace

    import torch

    from puna.models.training.objectives import RewardBatch, Targets

    targets = Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples])
    groups = [group for e in examples for group in e.groups]
    number = [g for g, group in enumerate(groups) for _ in group]
    rank = [r for group in groups for r in range(len(group))]
    return RewardBatch(replace(targets, prompt=torch.tensor(number)), torch.tensor(rank))


def _train(
    artifact: Artifact, rows: list[dict[str, Any]], config: RewardModelConfig, run: StageRun
) -> tuple[Transformer, Tokenizer]:
    from puna.models.training.objectives import Reward
    from puna.models.training.packing import Sampler

    model, tokenizer = load_model(artifact, "scalar", new=True)
    head = load_model(artifact, "lm")[0].lm_head.weight.detach() if config.nll_weight else None
    fitting = config.fitting
    examples = render_ranked(tokenizer, rows, fitting.row_tokens)
    sampler = Sampler(examples, fitting.batch_size, collate, length=len, capacity=fitting.row_tokens, seed=run.seed("order"))
    fit(model, Reward(config.nll_weight, head), sampler, fitting, fitting.steps(len(examples)), run)
    return model, tokenizer


def _measure(
    model: Transformer,
    tokenizer: Tokenizer,
    rows: list[dict[str, Any]],
    split: str,
    config: RewardModelConfig,
    run: StageRun,
) -> None:
    """Accuracy on chosen against rejected, and on edited against chosen where there is an edit."""
    run.metric(f"{split}_pairs", len(rows))
    if not rows:
        return
    examples = render_ranked(tokenizer, rows, config.fitting.row_tokens)
    rewards = score_answers(model, examples, config.fitting.row_tokens)
    groups = [[r[i] for i in group] for e, r in zip(examples, rewards, strict=True) for group in e.groups]
    right = [_order(values[-2], values[-1]) for values in groups]
    run.metric(f"{split}_accuracy", sum(right) / len(right))
    edits = [_order(values[0], values[1]) for values in groups if len(values) == 3]
    if edits:
        run.metric(f"{split}_edit_accuracy", sum(edits) / len(edits))


def _order(better: float, worse: float) -> float:
    """1 when in the right order, one half for a tie."""
    return float(better > worse) + 0.5 * float(better == worse)


def score_answers(model: Transformer, examples: Sequence[Example], row_tokens: int) -> list[list[float]]:
    """The scalar head's number for every answer of every prompt, in order."""
    import torch

    from puna.models.training.objectives import Targets, answer_rewards
    from puna.models.training.packing import pack

    place = next(model.parameters()).device
    found: dict[int, list[float]] = {}
    with torch.no_grad():
        for row in pack([len(e) for e in examples], row_tokens):
            targets = Targets.from_answers([examples[i].prompt for i in row], [examples[i].answers for i in row])
            rewards = answer_rewards(model, targets.to(place)).tolist()
            for i in row:
                count = len(examples[i].answers)
                found[i], rewards = rewards[:count], rewards[count:]
    return [found[i] for i in range(len(examples))]
