"""The verifier `reward_model`: a reward model's score as a probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from puna.models.training.packing import batch_by_size
from puna.stages.verifiers.base import Item, Score, Verifier
from puna.stages.verifiers.judges import BATCH_TOKENS, DIGEST, Loaded, Tools
from puna.stages.verifiers.registry import register


@register
class RewardModel(Verifier):
    """Score by `sigmoid((reward - center) / scale)`.

    With the defaults, this is the Bradley-Terry probability that the answer is preferred to an answer with reward 0. The answer is scored
    as a finished turn. The score is None if the chat template rejects the answer, or if it exceeds the context."""

    name: ClassVar[str] = "reward_model"

    model: str | None = Field(
        None, min_length=DIGEST, pattern="^[0-9a-f]+$", description="First digits of the model's data digest; null: the only reward model"
    )
    center: float = Field(0.0, description="Reward that gives the score 0.5")
    scale: float = Field(1.0, gt=0, description="Divisor of the difference between reward and center")

    @classmethod
    def prepare(cls, verifiers: Sequence[Verifier], tools: Tools) -> None:
        for one in {v.model for v in verifiers if isinstance(v, RewardModel)}:
            tools.judges.find(cls.name, "scalar", one)

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score]:
        scores: dict[int, Score] = {}
        models = [item.verifier.model if isinstance(item.verifier, RewardModel) else None for item in items]
        for name in sorted(set(models), key=str):
            numbers = [number for number, model in enumerate(models) if model == name]
            judge = tools.judges.find(cls.name, "scalar", name)
            scores |= zip(numbers, _scores(judge, [items[number] for number in numbers]), strict=True)
        return [scores[number] for number in range(len(items))]


def _scores(judge: Loaded, items: Sequence[Item]) -> list[Score]:
    rendered = [_render(judge, item) for item in items]
    scores = {number: one for number, one in enumerate(rendered) if isinstance(one, Score)}
    pairs = {number: one for number, one in enumerate(rendered) if not isinstance(one, Score)}
    for number, reward in zip(pairs, rewards(judge, list(pairs.values())), strict=True):
        verifier = items[number].verifier
        assert isinstance(verifier, RewardModel)
        # Rounded, because the last digits of a reward depend on the rest of its batch.
        scores[number] = Score(sigmoid(round(reward, 4), verifier.center, verifier.scale), f"reward {reward:.4f}")
    return [scores[number] for number in range(len(items))]


def _render(judge: Loaded, item: Item) -> tuple[list[int], list[int]] | Score:
    """Return the token ids of prompt and answer, or a Score of None if the chat template rejects them or they exceed the context."""
    from puna.models.tokens.tokenizer import ChatError, TemplateError

    messages = list(item.question.messages) or [{"role": "user", "content": item.question.text}]
    try:
        prompt, answer, _ = judge.tokenizer.render_pair(messages, item.answer)
    except (ChatError, TemplateError) as error:
        return Score(None, f"the reward model's chat template rejects the answer: {error}")
    if len(prompt) + len(answer) > judge.model.config.max_position_embeddings:
        return Score(None, f"{len(prompt) + len(answer)} tokens exceed the reward model's context")
    return prompt, answer


def rewards(judge: Loaded, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Return the reward model's raw reward for each (prompt, answer), given as token ids."""
    import torch

    from puna.models.training.objectives import Targets, answer_rewards

    device, numbers = next(judge.model.parameters()).device, list[float]()
    for batch in batch_by_size(pairs, lambda pair: len(pair[0]) + len(pair[1]), BATCH_TOKENS):
        targets = Targets.from_answers([prompt for prompt, _ in batch], [[answer] for _, answer in batch])
        with torch.no_grad():
            numbers += answer_rewards(judge.model, targets.to(device)).tolist()
    return numbers


def sigmoid(reward: float, center: float = 0.0, scale: float = 1.0) -> float:
    """Return 1 / (1 + exp(-(reward - center) / scale)), without overflow."""
    return 0.5 * (1.0 + math.tanh(0.5 * (reward - center) / scale))
