"""Answers by search: a choice among answers drawn by the engine."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from puna.models.config import ModelConfig
from puna.models.generation import Completion, Engine, SamplingParams
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.conversations import answer_text
from puna.stages.search import SearchConfig, likelihood, search


@pytest.mark.parametrize("seed", [0, 1])
def test_best_and_majority_choose_among_the_same_answers(seed: int) -> None:
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1, initializer_range=1.0)  # fmt: skip
    model = Transformer(shape, seed=seed)
    prompts, params = [[1, 2], [3], [1, 1]], SamplingParams(max_tokens=1, stop=(), seed=2, temperature=0.3)
    rows = Engine(model, tokenizer).generate(prompts, SamplingParams(n=9, max_tokens=1, stop=(), seed=2, temperature=0.3))
    drawn = [sum(len(answer.tokens) for answer in row) for row in rows]
    texts = [[answer_text(answer.tokens, tokenizer) for answer in row] for row in rows]

    def values(answers: list[tuple[int, str]]) -> list[float | None]:
        return [None if len(text) % 3 == 2 else (7 * number + sum(map(ord, text))) % 5 for number, text in answers]

    best = search(Engine(model, tokenizer), prompts, params, SearchConfig(n=9), values)
    likely = search(Engine(model, tokenizer), prompts, params, SearchConfig(n=9))
    most = search(Engine(model, tokenizer), prompts, params, SearchConfig(n=9, method="majority"))
    for number, (row, said) in enumerate(zip(rows, texts, strict=True)):
        scores = [-np.inf if value is None else value for value in values([(number, text) for text in said])]
        assert best[number].completion == row[int(np.argmax(scores))] and best[number].value == max(scores)
        assert likely[number].completion == max(row, key=likelihood) and likely[number].tried == 9
        times = Counter(text.strip() for text in said)
        chosen = answer_text(most[number].completion.tokens, tokenizer).strip()
        assert times[chosen] == max(times.values()) and most[number].value == max(times.values()) / 9
    assert len({choice.value for choice in most}) > 1 or most[0].value > 1 / 9
    assert [[choice.tokens for choice in one] for one in (best, likely, most)] == [drawn] * 3


def test_likelihood_is_the_mean_of_logprobs() -> None:
    assert likelihood(Completion([1, 2], [-1.0, -3.0], True)) == -2.0
