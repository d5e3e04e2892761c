"""`numbers` and `choice`: a check of a list of numbers by its properties, and a check of a choice among options."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.registry import register

LONGEST = 10_000  # maximum number of characters of an answer that `numbers` reads


@register
class Numbers(BoundedVerifier):
    """Score 1 if the answer is `count` whole numbers with the required bounds, order, remainder and digits, else 0.

    Numbers are separated by white space or commas; the answer may contain nothing else. With an order, no number may repeat."""

    name: ClassVar[str] = "numbers"

    count: int = Field(ge=1, le=1000, description="Number of numbers that the answer must have")
    lower: int = Field(description="Smallest number allowed")
    upper: int = Field(description="Largest number allowed")
    divisor: int = Field(1, ge=1, description="Divisor for `remainder`")
    remainder: int = Field(0, ge=0, description="Remainder of each number after division by `divisor`")
    order: Literal["rising", "falling", "any"] = Field("any", description="From small to large, from large to small, or any order")
    digits: tuple[int, ...] = Field((), description="Digits, one for each number, in any order; empty: any digits")
    place: Literal["first", "last"] = Field("first", description="Position of the digit from `digits` in each number")

    @model_validator(mode="after")
    def _can_be_answered(self) -> Numbers:
        if self.digits and (len(self.digits) != self.count or not all(0 <= digit <= 9 for digit in self.digits)):
            raise ValueError(f"digits must be {self.count} digits from 0 to 9, not {list(self.digits)}")
        allowed = sum(n % self.divisor == self.remainder for n in range(self.lower, min(self.upper, self.lower + 1000 * self.divisor) + 1))
        if allowed < (1 if self.order == "any" else self.count):
            raise ValueError(
                f"only {allowed} numbers from {self.lower} to {self.upper} leave {self.remainder} when divided by {self.divisor}: too few"
            )
        return self

    def score(self, question: Question, answer: str) -> Score:
        words = answer[:LONGEST].replace(",", " ").split()
        if len(words) != self.count or not all(word.isascii() and word.isdecimal() and len(word) < 19 for word in words):
            return Score(0.0, f"not {self.count} whole numbers")
        numbers = [int(word) for word in words]
        if wrong := [n for n in numbers if not self.lower <= n <= self.upper]:
            return Score(0.0, f"{wrong[0]} is out of bounds")
        if wrong := [n for n in numbers if n % self.divisor != self.remainder]:
            return Score(0.0, f"{wrong[0]} leaves {wrong[0] % self.divisor} by {self.divisor}")
        own = sorted(int(word[0 if self.place == "first" else -1]) for word in words)
        if self.digits and own != sorted(self.digits):
            return Score(0.0, f"the {self.place} digits are {', '.join(map(str, own))}")
        sign = {"rising": 1, "falling": -1, "any": 0}[self.order]
        if sign and any(sign * (b - a) <= 0 for a, b in pairwise(numbers)):
            return Score(0.0, f"not {self.order}")
        return Score(1.0)


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@register
class Choice(BoundedVerifier):
    """Score 1 if the answer chooses a right option, else 0.

    The answer, or its marked final answer, must be or start with an option's label or text: `B`, `(B) Lima`, `B. Because`, `Lima`. A label
    of one letter must be followed by punctuation or a line end, since `A dog` starts with an article."""

    name: ClassVar[str] = "choice"

    options: tuple[str, ...] = Field(min_length=2, max_length=26, description="Options, in the order shown in the prompt")
    right: tuple[int, ...] = Field(min_length=1, description="Indices of the right options, from 0")
    labels: tuple[str, ...] = Field((), description="Label of each option; empty: A, B, C, …")

    @model_validator(mode="after")
    def _options_are_clear(self) -> Choice:
        if wrong := [index for index in self.right if not 0 <= index < len(self.options)]:
            raise ValueError(f"right: {wrong[0]} is not an index of {len(self.options)} options")
        if self.labels and (len(self.labels) != len(self.options) or len({label.casefold() for label in self.labels}) < len(self.labels)):
            raise ValueError(f"{len(self.options)} options need {len(self.options)} different labels, not {', '.join(self.labels)}")
        return self

    def score(self, question: Question, answer: str) -> Score:
        labels = self.labels or tuple(LETTERS[: len(self.options)])
        option = self._option(final_answer(answer) or answer, labels)
        labels_text = " or ".join(labels[index] for index in self.right)
        if option is None:
            return Score(0.0, f"the answer chooses no option; expected {labels_text}")
        return Score(float(option in self.right), f"chose {labels[option]}, expected {labels_text}")

    def _option(self, answer: str, labels: tuple[str, ...]) -> int | None:
        """Return the index of the option whose label or text equals the answer; else whose label or (longest) text starts it; else None."""
        text = answer.strip().strip("*").strip()
        for options in (labels, self.options):
            for index, option in enumerate(options):
                if text.casefold().rstrip(".") == option.casefold().strip().rstrip("."):
                    return index
        for index, label in enumerate(labels):
            behind = r"\**(?:[.):,\]\n]|$)" if len(label) == 1 else r"(?!\w)"
            flags = 0 if len(label) == 1 else re.IGNORECASE
            if re.match(rf"[*(\[]*{re.escape(label)}{behind}", text, flags):
                return index
        matches = [
            (len(option), -index)
            for index, option in enumerate(self.options)
            if option.strip() and re.match(rf"{re.escape(option.strip())}(?!\w)", text, re.IGNORECASE)
        ]
        return -max(matches)[1] if matches else None
