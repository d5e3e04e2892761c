"""Answers by search: its settings, and scores by any verifier. The search itself is `models/generation/search.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, JsonValue

from puna.stages.contract import StageConfig
from puna.stages.conversations import answer_text
from puna.stages.verifiers.extraction import final_answer

if TYPE_CHECKING:
    from puna.models.generation import AnswerEngine, Completion, SamplingParams
    from puna.models.generation.search import Found

Method = Literal["best", "majority", "tree"]
Values = Callable[[Sequence[tuple[int, str]]], Sequence[float | None]]


class SearchConfig(StageConfig):
    """Settings of the search for an answer."""

    method: Method = Field(
        "best", description="best: the answer of n with the highest score; majority: the most frequent final one of n; tree: by steps"
    )
    n: int = Field(8, ge=2, description="Answers to each prompt, or steps from each leaf")
    verifier: dict[str, JsonValue] | None = Field(
        None, description="Verifier {name: …, …} of whole answers for best and tree; null: mean log-probability of a token"
    )
    expansions: int = Field(16, ge=1, description="tree: leaves that are grown, of each prompt")
    step: str = Field("\n", description="tree: the text that ends a step; empty: only its length does")
    step_tokens: int = Field(64, ge=1, description="tree: longest step, tokens")


def search(
    engine: AnswerEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, config: SearchConfig, values: Values | None = None
) -> list[Found]:
    """Search for an answer to each prompt. `values` scores (prompt number, text) pairs; None is worse than any score."""
    from dataclasses import replace

    from puna.models.generation.search import best_of, likelihood, majority, tree

    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def score(answers: Sequence[tuple[int, Completion]]) -> list[float]:
        assert values is not None
        scores = values([(number, answer_text(answer.tokens, tokenizer)) for number, answer in answers])
        return [-math.inf if value is None else value for value in scores]

    def final(answer: Completion) -> str:
        text = answer_text(answer.tokens, tokenizer).strip()
        return final_answer(text) or text

    params, by = replace(params, n=config.n), likelihood if values is None else score
    if config.method == "majority":
        return majority(engine, prompts, params, final)
    if config.method == "best":
        return best_of(engine, prompts, params, by)
    return tree(engine, prompts, params, by, expansions=config.expansions, step=config.step, step_tokens=config.step_tokens)
