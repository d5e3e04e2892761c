"""Rewards of a policy's answers, from a reward model, the prompts' verifiers, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from puna.stages.contract import StageConfig, StageRun
from puna.stages.training.turns import steps_of, to_score
from puna.stages.verifiers.base import ScoringConfig
from puna.stages.verifiers.reward_model import sigmoid
from puna.stages.verifiers.scoring import Scorer
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.generation import Completion
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.training.parallel.base import Parallel
    from puna.models.transformer import Transformer

Completions = Sequence[Sequence["Completion"]]
Ids = Sequence[Sequence[int]]
Scores = Callable[[Ids, Completions], list[list[float]]]
"""A function that returns a number for each answer to each prompt."""
Parts = dict[str, list[list[Any]]]
Reward = Literal["reward_model", "verifier", "product"]
Ensemble = Literal["mean", "min"]
ENSEMBLE = (
    "Reward of several reward models: the mean of their outputs, or the minimum, which no answer raises by deceiving only some of them "
    "(Coste et al. 2023)"
)
REWARDS = (
    "Reward of an answer: the reward model's output; the score from the prompt's verifier, 0 to 1; "
    "or product: the score times the sum of `floor` and the sigmoid of the output minus `center`"
)
Center = Literal["start", "zero"]
CENTER = (
    "With reward product: the output whose sigmoid is one half. Preferences determine only differences of outputs, so 0 has no meaning. "
    "start: the mean over right answers (without any: over all) of the model before training (as in InstructGPT, Ouyang et al. 2022, 3.5); "
    "zero: 0"
)


class RewardSettings(StageConfig):
    """Settings of an answer's reward."""

    reward: Reward = Field("reward_model", description=REWARDS)
    floor: float = Field(0.0, ge=0, le=100, description="With reward product: added to the sigmoid, so that every right answer is rewarded")
    center: Center = Field("start", description=CENTER)
    ensemble: Ensemble = Field("mean", description=ENSEMBLE)
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits on the prompts' verifiers")

    @model_validator(mode="after")
    def _reward_has_these_parts(self) -> Self:
        if self.reward != "product":
            self.refuse_unused("it is a part of reward product", "floor", "center")
        return self if self.reward != "verifier" else self.refuse_unused("reward verifier asks no reward model", "ensemble")


@dataclass(frozen=True)
class Rewards:
    """Rewards of answers to prompts, both as token ids: `gold` returns the verifiers' scores, `numbers` the reward models' outputs.

    With both, the reward is score x (`floor` + sigmoid(output - `center`)); if `watched`, it is the output alone."""

    gold: Callable[[Ids, Completions], Parts] | None
    numbers: Scores | None
    floor: float = 0.0
    center: float = 0.0
    watched: bool = False

    def __call__(self, prompts: Ids, completions: Completions) -> list[list[float]]:
        return self.parts(prompts, completions)["score"]

    def parts(self, prompts: Ids, completions: Completions) -> Parts:
        """Return the rewards as `score`, their parts `verifier` and `reward_model` if they exist, and `steps` if `gold` returns steps."""
        parts = {} if self.gold is None else self.gold(prompts, completions)
        if self.numbers is not None:
            parts["reward_model"] = self.numbers(prompts, completions)
        if self.gold is None or self.numbers is None or self.watched:
            return {"score": parts["verifier" if self.numbers is None else "reward_model"], **parts}
        both = zip(parts["verifier"], parts["reward_model"], strict=True)
        scores = [[score * (self.floor + sigmoid(number, self.center)) for score, number in zip(*pair, strict=True)] for pair in both]
        return {"score": scores, **parts}

    def center_by(self, prompts: Ids, completions: Completions, run: StageRun) -> Rewards:
        """Return rewards whose `center` is the mean reward-model output of these answers, weighted by their verifier scores, or equally if
        all scores are 0 (the metric `center_of` then says so). Without scores or outputs, return the rewards unchanged."""
        if self.gold is None or self.numbers is None:
            return self
        both = zip(self.gold(prompts, completions)["verifier"], self.numbers(prompts, completions), strict=True)
        pairs = [(score, number) for some in both for score, number in zip(*some, strict=True)]
        if not any(score for score, _ in pairs):
            pairs = [(1.0, number) for _, number in pairs]
            run.metric("center_of", "all answers, because none was right")
        center = math.fsum(score * number for score, number in pairs) / math.fsum(score for score, _ in pairs)
        run.metric("center", center)
        return replace(self, center=center)


def rewards_of(
    scorer: Scorer | None, reward_models: Sequence[Transformer | Parallel], rows: Sequence[dict[str, Any]], asked: Ids,
    tokenizer: Tokenizer, micro_batch_tokens: int, floor: float = 0.0, ensemble: Ensemble = "mean", steps: bool = False, first: bool = True,
) -> Rewards:  # fmt: skip
    """Return rewards from the verifiers' scores, the reward models' outputs, or both. `asked`, `steps`: see `gold_of`. `first`: False on
    ranks that need not run the verifiers, since their scores are not used."""
    real = None if scorer is None else gold_of(scorer, rows, asked, tokenizer, steps)
    gold = real if first or real is None else lambda prompts, answers: {"verifier": [[0.0] * len(some) for some in answers]}
    return Rewards(gold, ensemble_of(reward_models, micro_batch_tokens, ensemble) if reward_models else None, floor)


def ensemble_of(models: Sequence[Transformer | Parallel], micro_batch_tokens: int, how: Ensemble) -> Scores:
    """Return a function that gives each answer the combined output of the reward models."""
    from puna.models.training.rollouts import reward_model_scorer

    members = [reward_model_scorer(model, micro_batch_tokens) for model in models]

    def numbers(prompts: Ids, completions: Completions) -> list[list[float]]:
        columns = [member(prompts, completions) for member in members]
        return [[combine(values, how) for values in zip(*some, strict=True)] for some in zip(*columns, strict=True)]

    return numbers


def combine(numbers: Sequence[float], how: Ensemble) -> float:
    """Return the minimum or the mean of the reward models' outputs for one answer, independently of their order."""
    return min(numbers) if how == "min" else math.fsum(numbers) / len(numbers)


def gold_of(
    scorer: Scorer, rows: Sequence[dict[str, Any]], asked: Ids, tokenizer: Tokenizer, steps: bool = False
) -> Callable[[Ids, Completions], Parts]:
    """Return a function that gives each answer its verifier's score (0 if the verifier fails); with `steps`, also (end in tokens, reward)
    of each step. `asked`: the token ids of the prompts in `rows`. Raise PunaError if equal prompts are scored in different ways."""
    by_ids: dict[tuple[int, ...], dict[str, Any]] = {}
    for ids, row in zip(asked, rows, strict=True):
        first_row = by_ids.setdefault(tuple(ids), row)
        if (first_row["verifier"], first_row["reference"]) != (row["verifier"], row["reference"]):
            raise PunaError(f"prompts {first_row['id']} and {row['id']} have the same text but are scored differently; leave one out")

    def gold(prompts: Ids, completions: Completions) -> Parts:
        pairs = zip(prompts, completions, strict=True)
        answers = [to_score(by_ids[tuple(ids)], one, tokenizer) for ids, some in pairs for one in some]
        scores = iter(scorer.scores(answers))
        rows = [[(one, next(scores)) for one in some] for some in completions]
        parts: Parts = {"verifier": [[score.value or 0.0 for _, score in some] for some in rows]}
        parts["unscored"] = [[int(score.value is None) for _, score in some] for some in rows]
        if steps:
            parts["steps"] = [[steps_of(score, one, tokenizer) for one, score in some] for some in rows]
        return parts

    return gold
