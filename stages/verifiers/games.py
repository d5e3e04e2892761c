"""`guess`: a game in turns, in which the model finds a number by hints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.registry import register


@register
class Guess(BoundedVerifier):
    """Score 1 if the last turn is the number. The replies to earlier turns say whether it is higher or lower.

    Without hints the replies say only that a guess is wrong: the control of what a model learns from them.
    """

    name: ClassVar[str] = "guess"

    number: int = Field(description="The number to find")
    hints: bool = Field(True, description="Say whether the number is higher or lower")

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
