"""Sampling parameters of a prompt's answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

COLDEST = 1e-4  # the lowest temperature above 0. Below it, float32 cannot tell log-probs apart, and the likeliest token is taken.
Mask = Callable[[Sequence[int]], Tensor]  # an answer's tokens so far -> [V] bool on CPU, True for tokens that may follow


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one prompt's answers. Invalid values raise ValueError.

    n: number of answers. temperature: divides the logits; 0, or less than `COLDEST`, takes the likeliest token. top_k: draw from the k
    likeliest tokens only (0: all). top_p: from the smallest set of likeliest tokens whose probabilities reach top_p (nucleus sampling,
    Holtzman et al. 2020). min_p: from tokens with at least this share of the highest probability (Nguyen et al. 2024). max_tokens: maximum
    length. stop: token ids and texts that end an answer; None: the tokenizer's stop ids. seed: random numbers depend only on seed, prompt
    tokens and answer number. repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and the
    answer (Keskar et al. 2019). presence_penalty, frequency_penalty: subtracted from the logit of a token of the answer, once or for each
    occurrence. logit_bias: added to logits, by token id. mask: returns the tokens that may follow. speculate: maximum tokens that a step
    may guess ahead (`schedule.Pace`); 0 with a mask. priority: waiting requests with the lowest number start first."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    stop: tuple[int | str, ...] | None = None
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    mask: Mask | None = None
    speculate: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n and max_tokens must be at least 1, not {self.n} and {self.max_tokens}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or a positive number, not {self.temperature}")
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], not {self.min_p}")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty must be a positive number, not {self.repetition_penalty}")
        if not all(map(math.isfinite, (self.presence_penalty, self.frequency_penalty, *self.logit_bias.values()))):
            raise ValueError("presence_penalty, frequency_penalty and logit_bias must be finite numbers")
        if negative := [name for name in ("top_k", "seed", "speculate") if getattr(self, name) < 0]:
            raise ValueError(f"{negative[0]} must not be negative, not {getattr(self, negative[0])}")
        if self.speculate and self.mask is not None:
            raise ValueError("speculate may guess tokens that the mask forbids: set only one of the two")

    @cached_property
    def cuts(self) -> bool:
        """True if top_k, top_p or min_p limits the draw."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def shifts(self) -> bool:
        """True if penalties, biases or a mask change the logits before a draw."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias or self.mask is not None)

    @cached_property
    def biases(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of `logit_bias` and their biases, fp64."""
        return torch.tensor(list(self.logit_bias)), torch.tensor(list(self.logit_bias.values()), dtype=torch.float64)
