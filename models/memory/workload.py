"""The properties of a model's requests that a memory plan depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The work to plan: tokens per prompt and answer, number of answers, tokens of the longest prompt with its answer (0: none longer)."""

    prompt: int = 512
    answer: int = 256
    answers: int = 64
    longest: int = 0
