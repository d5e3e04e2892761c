"""`product` and `weighted`: combinations of several verifiers' scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from puna.stages.verifiers.base import Question, Score, Verifier
from puna.stages.verifiers.registry import from_json, register


class Combination(Verifier):
    """Base class of verifiers that combine the scores of other verifiers."""

    of: tuple[Verifier, ...] = Field(min_length=1, max_length=100, description="Verifiers, each as JSON like in a prompt")

    @field_validator("of", mode="before")
    @classmethod
    def _parse_parts(cls, value: Any) -> Any:
        return tuple(one if isinstance(one, Verifier) else from_json(one) for one in value) if isinstance(value, list | tuple) else value

    def parts(self) -> tuple[Verifier, ...]:
        return self.of

    def check(self, question: Question) -> None:
        for one in self.of:
            one.check(question)

    def reaches(self) -> list[tuple[str, str]]:
        return [*super().reaches(), *(name for one in self.of for name in one.reaches())]

    def _details(self, scores: Sequence[Score]) -> str:
        pairs = zip(self.of, scores, strict=True)
        return "; ".join(f"{one.name} {score.value:.3g}" + (f" ({score.detail})" if score.detail else "") for one, score in pairs)


@register
class Product(Combination):
    """The product of the scores, which is high only if all of them are: for example, a checker times a reward model."""

    name: ClassVar[str] = "product"

    def combine(self, scores: Sequence[Score]) -> Score:
        return Score(math.prod(score.value or 0.0 for score in scores), self._details(scores))


@register
class Weighted(Combination):
    """The weighted mean of the scores."""

    name: ClassVar[str] = "weighted"

    weights: tuple[float, ...] = Field(description="Weight of each verifier, not negative; not all 0")

    @model_validator(mode="after")
    def _one_weight_each(self) -> Weighted:
        if len(self.weights) != len(self.of):
            raise ValueError(f"{len(self.weights)} weights for {len(self.of)} verifiers")
        if min(self.weights) < 0 or not sum(self.weights) > 0:
            raise ValueError("weights must not be negative, and not all 0")
        return self

    def combine(self, scores: Sequence[Score]) -> Score:
        total = math.fsum(weight * (score.value or 0.0) for weight, score in zip(self.weights, scores, strict=True))
        return Score(min(1.0, total / math.fsum(self.weights)), self._details(scores))
