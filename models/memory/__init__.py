"""Inference with models larger than the memory: plans of what stays in memory, and layers loaded for each pass."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """The work to plan: tokens per prompt and answer, number of answers, tokens of the longest prompt with its answer (0: all alike)."""

    prompt: int = 512
    answer: int = 256
    answers: int = 64
    longest: int = 0
