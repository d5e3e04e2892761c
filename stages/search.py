"""Answers by search: a model gives n answers to a prompt, and one of them is chosen.

- `best` (best of n): the answer with the highest score, from a verifier (Cobbe et al. 2021) or, without one, by mean log-probability;
- `majority`: an answer with the most frequent final answer (self-consistency, Wang et al. 2022)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, JsonValue, model_validator

from puna.stages.contract import StageConfig
from puna.stages.conversations import answer_text
from puna.stages.verifiers.extraction import final_answer

if TYPE_CHECKING:
    from puna.models.generation import AnswerEngine, Completion, SamplingParams

Method = Literal["best", "majority"]
Values = Callable[[Sequence[tuple[int, str]]], Sequence[float | None]]


class SearchConfig(StageConfig):
    """Settings of the search for an answer."""

    method: Method = Field("best", description="best: the answer with the highest score of n; majority: the most frequent final answer")
    n: int = Field(8, ge=2, description="Number of answers per prompt")
    verifier: dict[str, JsonValue] | None = Field(
        None, description="Verifier {name: …, …} that scores answers for `best`; null: the mean log-probability of an answer's tokens"
    )

    @model_validator(mode="after")
    def _majority_has_no_verifier(self) -> Self:
        return self if self.method != "majority" else self.refuse_unused("method majority scores no answer", "verifier")


@dataclass(frozen=True)
class Choice:
    """The chosen answer, its value, and the number of tokens generated for all `tried` answers.

    `value`: the score (minus infinity if no answer could be scored), or the share of answers with the same final answer."""

    completion: Completion
    value: float
    tokens: int
    tried: int


def likelihood(answer: Completion) -> float:
    """Return the mean log-probability of an answer's tokens, a score that needs no verifier."""
    return sum(answer.logprobs) / len(answer.logprobs)


def search(
    engine: AnswerEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, config: SearchConfig, values: Values | None = None
) -> list[Choice]:
    """Return the chosen answer to each prompt (token ids); ties go to the first. `values`: a function from (prompt index, answer text)
    pairs to scores; a score of None ranks last."""
    tokenizer = engine.tokenizer
    rows = engine.generate(prompts, replace(params, n=config.n))

    def text(answer: Completion) -> str:
        assert tokenizer is not None
        return answer_text(answer.tokens, tokenizer)

    def final(answer: Completion) -> str:
        whole = text(answer).strip()
        return final_answer(whole) or whole

    if config.method == "majority":
        finals = [[final(answer) for answer in row] for row in rows]
        counts = [Counter(row) for row in finals]
        scores = [[count[one] / len(row) for one in row] for row, count in zip(finals, counts, strict=True)]
    elif values is None:
        scores = [[likelihood(answer) for answer in row] for row in rows]
    else:
        numbers = iter(values([(number, text(answer)) for number, row in enumerate(rows) for answer in row]))
        scores = [[-math.inf if (value := next(numbers)) is None else value for _ in row] for row in rows]
    best = [max(range(len(row)), key=row.__getitem__) for row in scores]
    token_counts = [sum(len(answer.tokens) for answer in row) for row in rows]
    return [Choice(row[i], score[i], tokens, len(row)) for row, score, i, tokens in zip(rows, scores, best, token_counts, strict=True)]
