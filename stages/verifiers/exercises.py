"""`guess` and `chain`: a number to guess in several turns with hints, and arithmetic whose steps are checked one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.registry import register


@register
class Guess(BoundedVerifier):
    """Score 1 if the last turn is the number, else 0. Replies to earlier turns say if the number is higher or lower.

    With `hints` false, the replies only say that a guess is wrong, as a control for the effect of hints."""

    name: ClassVar[str] = "guess"

    number: int = Field(description="The number to find")
    hints: bool = Field(True, description="Say if the number is higher or lower")

    def score(self, question: Question, answer: str) -> Score:
        return Score(float(self._read(answer) == self.number), f"the number is {self.number}")

    def reply(self, question: Question, messages: Sequence[dict[str, Any]]) -> str | None:
        guess = self._read(str(messages[-1]["content"]))
        if guess is None:
            return "Answer with a whole number only."
        if guess == self.number:
            return None
        return "wrong" if not self.hints else "higher" if guess < self.number else "lower"

    def _read(self, text: str) -> int | None:
        text = text.strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 19 else None


@register
class Chain(BoundedVerifier):
    """Score 1 if the lines, one per operation, end in the correct running values of an arithmetic chain, else 0.

    The chain is computed from left to right. Each line is a step, with reward 1 if its last number is right; see `grpo.credit`."""

    name: ClassVar[str] = "chain"
    stepwise: ClassVar[bool] = True

    numbers: tuple[int, ...] = Field(min_length=2, max_length=100, description="Numbers of the chain")
    signs: tuple[Literal["+", "-", "*"], ...] = Field(description="Operations between the numbers")
    partial: bool = Field(False, description="Score the share of correct lines")

    @model_validator(mode="after")
    def _signs_stand_between(self) -> Chain:
        if len(self.signs) != len(self.numbers) - 1:
            raise ValueError(f"{len(self.signs)} signs do not fit between {len(self.numbers)} numbers")
        return self

    def score(self, question: Question, answer: str) -> Score:
        operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
        pairs = zip(self.signs, self.numbers[1:], strict=True)
        values = [*accumulate(pairs, lambda value, pair: operations[pair[0]](value, pair[1]), initial=self.numbers[0])][1:]
        steps, end = list[tuple[int, float]](), 0
        for line in answer.splitlines(keepends=True):
            end += len(line)
            if line.strip():
                last = re.findall(r"-?(?<!\d)\d{1,18}(?!\d)", line)[-1:]
                steps.append((end, float(len(steps) < len(values) and last == [str(values[len(steps)])])))
        right = sum(int(reward) for _, reward in steps) / max(len(steps), len(values))
        return Score(right if self.partial else float(right == 1), f"{right:.3g} of the lines are right", steps)
