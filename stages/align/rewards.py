"""What a policy's answers are rewarded by: a reward model, the verifiers of the prompts, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from puna.stages.conversations import answer_text
from puna.stages.verifiers.reward_model import sigmoid
from puna.stages.verifiers.scoring import Scorer
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.generation import Completion
    from puna.models.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

Completions = Sequence[Sequence["Completion"]]
Ids = Sequence[Sequence[int]]
Scores = Callable[[Ids, Completions], list[list[float]]]
"""A number for each answer to each prompt."""
Reward = Literal["reward_model", "verifier", "product"]
REWARDS = (
    "What an answer is rewarded by: the reward model's number; the score of the prompt's verifier, 0 to 1; "
    "or product: the score times the sum of `floor` and the sigmoid of the number"
)


def rewards_of(
    scorer: Scorer | None,
    reward_model: Transformer | None,
    rows: Sequence[dict[str, Any]],
    asked: Ids,
    tokenizer: Tokenizer,
    micro_batch_tokens: int,
    floor: float = 0.0,
) -> Scores:
    """The rewards of answers to prompts, given as ids: the verifier's score, the reward model's number, or the product of the score
    and the sum of `floor` and the number's sigmoid. `asked` are the ids of `rows`.
    """
    from puna.models.training.rollouts import reward_model_scorer

    gold = None if scorer is None else gold_of(scorer, rows, asked, tokenizer)
    numbers = None if reward_model is None else reward_model_scorer(reward_model, micro_batch_tokens)

    def rewards(prompts: Ids, completions: Completions) -> list[list[float]]:
        if gold is None:
            assert numbers is not None
            return [list(some) for some in numbers(prompts, completions)]
        scores = gold(prompts, completions)
        if numbers is None:
            return scores
        both = zip(scores, numbers(prompts, completions), strict=True)
        return [[score * (floor + sigmoid(number)) for score, number in zip(*pair, strict=True)] for pair in both]

    return rewards


def gold_of(scorer: Scorer, rows: Sequence[dict[str, Any]], asked: Ids, tokenizer: Tokenizer) -> Scores:
    """The verifier's scores of answers to prompts, given as ids; 0 where it fails. `asked` are the ids of `rows`."""
    by_ids: dict[tuple[int, ...], dict[str, Any]] = {}
    for ids, row in zip(asked, rows, strict=True):
        known = by_ids.setdefault(tuple(ids), row)
        if (known["verifier"], known["reference"]) != (row["verifier"], row["reference"]):
            raise PunaError(f"prompts {known['id']} and {row['id']} are one text with two ways to score it; leave one of them out")

    def gold(prompts: Ids, completions: Completions) -> list[list[float]]:
        pairs = zip(prompts, completions, strict=True)
        answers = [(by_ids[tuple(ids)], answer_text(one.tokens, tokenizer)) for ids, some in pairs for one in some]
        found = iter([score.value or 0.0 for score in scorer.scores(answers)])
        return [[next(found) for _ in some] for some in completions]

    return gold
