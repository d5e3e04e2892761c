"""`numbers` and `items`: lists with many right answers, checked by their properties."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.registry import register

LONGEST = 10_000
"""Characters of an answer that may be a list."""


@register
class Numbers(BoundedVerifier):
    """Score 1 if the answer is this many whole numbers with the required bounds, order, remainder and digits, else 0.

    Numbers are separated by blanks or commas, with nothing else in the answer. An order allows no repetition.
    """

    name: ClassVar[str] = "numbers"

    count: int = Field(ge=1, le=1000, description="Numbers that the answer has")
    lower: int = Field(description="Smallest number allowed")
    upper: int = Field(description="Largest number allowed")
    divisor: int = Field(1, ge=1, description="What the numbers are divided by")
    remainder: int = Field(0, ge=0, description="What each number leaves when divided by `divisor`")
    order: Literal["rising", "falling", "any"] = Field("any", description="From small to large, from large to small, or any order")
    digits: tuple[int, ...] = Field((), description="Digits, one for each number, in any order; none: any digits")
    place: Literal["first", "last"] = Field("first", description="Where each number has its digit of `digits`")

    @model_validator(mode="after")
    def _can_be_answered(self) -> Numbers:
        if self.digits and (len(self.digits) != self.count or not all(0 <= digit <= 9 for digit in self.digits)):
            raise ValueError(f"digits must be {self.count} of 0 to 9, not {list(self.digits)}")
        allowed = sum(n % self.divisor == self.remainder for n in range(self.lower, min(self.upper, self.lower + 1000 * self.divisor) + 1))
        if allowed < (1 if self.order == "any" else self.count):
            raise ValueError(f"{allowed} numbers from {self.lower} to {self.upper} leave {self.remainder} by {self.divisor}: too few")
        return self

    def score(self, question: Question, answer: str) -> Score:
        words = answer[:LONGEST].replace(",", " ").split()
        if len(words) != self.count or not all(word.isascii() and word.isdecimal() and len(word) < 19 for word in words):
            return Score(0.0, f"not {self.count} whole numbers")
        found = [int(word) for word in words]
        if wrong := [n for n in found if not self.lower <= n <= self.upper]:
            return Score(0.0, f"{wrong[0]} is out of bounds")
        if wrong := [n for n in found if n % self.divisor != self.remainder]:
            return Score(0.0, f"{wrong[0]} leaves {wrong[0] % self.divisor} by {self.divisor}")
        own = sorted(int(word[0 if self.place == "first" else -1]) for word in words)
        if self.digits and own != sorted(self.digits):
            return Score(0.0, f"the {self.place} digits are {', '.join(map(str, own))}")
        sign = {"rising": 1, "falling": -1, "any": 0}[self.order]
        if sign and any(sign * (b - a) <= 0 for a, b in pairwise(found)):
            return Score(0.0, f"not {self.order}")
        return Score(1.0)


@register
class Items(BoundedVerifier):
    """Score 1 if the answer is this many of the items, none twice, separated by blanks or commas, else 0."""

    name: ClassVar[str] = "items"

    of: tuple[str, ...] = Field(min_length=1, max_length=1000, description="Items that may be chosen, without blanks or commas")
    count: int = Field(ge=1, description="Items that the answer has")
    ordered: bool = Field(False, description="In the order in which they stand in `of`")

    @model_validator(mode="after")
    def _can_be_answered(self) -> Items:
        if len(set(self.of)) != len(self.of) or any(not item or "," in item or item.split() != [item] for item in self.of):
            raise ValueError("items must differ and hold no blanks or commas")
        if self.count > len(self.of):
            raise ValueError(f"{self.count} of {len(self.of)} items cannot be chosen")
        return self

    def score(self, question: Question, answer: str) -> Score:
        words = answer[:LONGEST].replace(",", " ").split()
        if len(words) != self.count or len(set(words)) != len(words):
            return Score(0.0, f"not {self.count} different items")
        places = [self.of.index(word) if word in self.of else -1 for word in words]
        if -1 in places:
            return Score(0.0, f"{words[places.index(-1)][:50]!r} was not to be chosen from")
        if self.ordered and places != sorted(places):
            return Score(0.0, "not in the order in which they stand")
        return Score(1.0)
