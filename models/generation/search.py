"""Answers by search: several tries of a model, and a choice among them. The cost of a search is counted in tokens.

- `best_of`: the answer of n that a score puts highest (Cobbe et al. 2021: by a verifier; without one, by the model's own likelihood);
- `majority`: the most frequent final answer of n (self-consistency, Wang et al. 2022);
- `tree`: steps of an answer as a tree, of which the most promising leaf is grown next (Tree of Thoughts, Yao et al. 2023, by best-first
search: without a beam or a limit of depth).

A score takes answers, each with the number of its prompt, and gives a number for each, the higher the better.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from puna.models.generation import AnswerEngine, Completion, SamplingParams

Score = Callable[[Sequence[tuple[int, Completion]]], Sequence[float]]
Read = Callable[[Completion], str]


@dataclass(frozen=True)
class Found:
    """The answer that was settled on, its value, and the tokens drawn for it and for all that were not taken.

    value: of the score, or the share of answers that say the same. tried: answers, or steps of a tree.
    """

    completion: Completion
    value: float
    tokens: int
    tried: int


def likelihood(answers: Sequence[tuple[int, Completion]]) -> list[float]:
    """Return the mean log-prob of a token, a score that needs no verifier."""
    return [sum(answer.logprobs) / len(answer.logprobs) for _, answer in answers]


def best_of(engine: AnswerEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, score: Score = likelihood) -> list[Found]:
    """Return the best-scored of `params.n` answers to each prompt, the first of equals."""
    rows = engine.generate(prompts, params)
    values = iter(score([(number, answer) for number, row in enumerate(rows) for answer in row]))
    results = []
    for row in rows:
        value, best = max(((next(values), answer) for answer in row), key=lambda one: one[0])
        results.append(Found(best, value, _drawn(row), len(row)))
    return results


def majority(engine: AnswerEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, read: Read) -> list[Found]:
    """Return the first of `params.n` answers to each prompt that gives the most frequent result, as `read` returns it."""
    answers = []
    for row in engine.generate(prompts, params):
        results = [read(answer) for answer in row]
        times = Counter(results)
        best = max(range(len(row)), key=lambda i: times[results[i]])
        answers.append(Found(row[best], times[results[best]] / len(row), _drawn(row), len(row)))
    return answers


def tree(
    engine: AnswerEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    score: Score = likelihood,
    *,
    expansions: int,
    step: str = "\n",
    step_tokens: int = 64,
    promise: Score = likelihood,
) -> list[Found]:
    """Return the best whole answer of a tree for each prompt, grown `expansions` times by `params.n` steps from the best leaf.

    A step ends with the text `step` ("": only by length), after `step_tokens`, or with the answer; the engine's cache holds the steps
    before it. Equal steps from one leaf are one leaf. If no answer is complete, return the most promising leaf.
    """
    if expansions < 1 or step_tokens < 1:
        raise ValueError(f"expansions and step_tokens must be at least 1, not {expansions} and {step_tokens}")
    limits = (params, score, promise, expansions, step, step_tokens)
    return [_grown(engine, number, list(prompt), *limits) for number, prompt in enumerate(prompts)]


def _grown(
    engine: AnswerEngine, number: int, prompt: list[int], params: SamplingParams, score: Score, promise: Score, expansions: int, step: str,
    step_tokens: int,
) -> Found:  # fmt: skip
    ends = engine.tokenizer.stop_ids if params.stop is None and engine.tokenizer is not None else params.stop or ()
    order = count()  # of equal promise, the older first
    leaves: list[tuple[float, int, Completion]] = [(0.0, next(order), Completion([], [], False))]
    whole: list[tuple[float, Completion]] = []
    drawn = tried = 0
    for _ in range(expansions):
        if not leaves:
            break
        _, _, leaf = heapq.heappop(leaves)
        left = params.max_tokens - len(leaf.tokens)
        step_params = replace(params, max_tokens=min(step_tokens, left), stop=(*ends, step) if step else tuple(ends))
        (row,) = engine.generate([[*prompt, *leaf.tokens]], step_params)
        drawn, tried = drawn + _drawn(row), tried + len(row)
        longer = {tuple(one.tokens): Completion(leaf.tokens + one.tokens, leaf.logprobs + one.logprobs, one.finished) for one in row}
        over: list[tuple[int, Completion]] = []
        more: list[tuple[int, Completion]] = []
        for one in longer.values():
            (over if _over(engine, one, ends, params.max_tokens) else more).append((number, one))
        whole += [(value, one) for value, (_, one) in zip(score(over), over, strict=True)]
        for value, (_, one) in zip(promise(more), more, strict=True):
            heapq.heappush(leaves, (-value, next(order), replace(one, finished=False)))
    if not whole:
        return Found(leaves[0][2], -leaves[0][0], drawn, tried)
    value, best = max(whole, key=lambda one: one[0])
    return Found(best, value, drawn, tried)


def _over(engine: AnswerEngine, answer: Completion, ends: Sequence[int | str], longest: int) -> bool:
    """True if an answer ended with its last step, by itself or by its length."""
    if len(answer.tokens) >= longest or answer.tokens[-1] in ends:
        return True
    texts = [end for end in ends if isinstance(end, str)]
    if not answer.finished or not texts or engine.tokenizer is None:
        return False
    text = engine.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    return any(end in text for end in texts)


def _drawn(answers: Sequence[Completion]) -> int:
    return sum(len(answer.tokens) for answer in answers)
