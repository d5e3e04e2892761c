"""Answers in several turns: after each turn of the model a function replies, and the model continues after the reply.

An answer is one sequence: the model's turns and the replies between them. The engine keeps a turn's pages and computes only the reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from puna.models.generation.engine import Completion, Engine
from puna.models.generation.sampling_params import SamplingParams

Respond = Callable[[Sequence[tuple[list[int], Completion]]], Sequence[tuple[list[int], list[dict[str, Any]]] | None]]
"""A function that returns, for each (prompt, answer), a reply's tokens (up to the model's next turn) and messages; None: no reply."""


def converse(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, progress: Callable[[int, int], None] | None = None,
    turns: int = 1, respond: Respond = lambda answers: [None] * len(answers),
) -> list[list[Completion]]:  # fmt: skip
    """Return a list of answers per prompt, of at most `turns` model turns each; `params.max_tokens` limits an answer with its replies. If a
    reply leaves no room for another token, the answer ends before it and is not `finished`. `progress` restarts with each turn."""
    answers = [(prompt, one) for prompt, some in zip(prompts, engine.generate(prompts, params, progress), strict=True) for one in some]
    going = [number for number, (_, one) in enumerate(answers) if one.finished]
    for _ in range(1, turns):
        replies = respond([answers[number] for number in going])
        room: dict[int, int] = {}
        for number, reply in zip(going, replies, strict=True):
            (prompt, one), (tokens, messages) = answers[number], reply or ([], [])
            left = params.max_tokens - len(one.tokens) - len(tokens)
            if reply is not None and left > 0:
                room[number] = left
                own = (*one.replies, (len(one.tokens), len(one.tokens) + len(tokens), messages))
                one = Completion([*one.tokens, *tokens], [*one.logprobs, *[0.0] * len(tokens)], False, own)
            answers[number] = prompt, one._replace(finished=reply is None)
        each = [replace(params, n=1, max_tokens=left) for left in room.values()]
        contexts = [prompt + one.tokens for prompt, one in map(answers.__getitem__, room)]
        for number, (turn,) in zip(room, engine.generate(contexts, each, progress), strict=True):
            prompt, one = answers[number]
            answers[number] = prompt, Completion(one.tokens + turn.tokens, one.logprobs + turn.logprobs, turn.finished, one.replies)
        going = [number for number in room if answers[number][1].finished]
    return [[one for _, one in answers[at : at + params.n]] for at in range(0, len(answers), params.n)]
