"""`choice`: a comparison of the option that an answer chooses with the right ones."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field, model_validator

from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.registry import register

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@register
class Choice(BoundedVerifier):
    """Score 1 if the answer chooses a right option, else 0.

    The answer, or its marked final answer, is an option's label or text, or begins with one: `B`, `(B) Lima`, `B. Because`, `Lima`.
    A label of one letter needs punctuation or a line end behind it, since `A dog` begins with an article.
    """

    name: ClassVar[str] = "choice"

    options: tuple[str, ...] = Field(min_length=2, max_length=26, description="Options, in the order in which the prompt shows them")
    right: tuple[int, ...] = Field(min_length=1, description="Indices of the right options, from 0")
    labels: tuple[str, ...] = Field((), description="Label of each option; empty: A, B, C, …")

    @model_validator(mode="after")
    def _options_are_clear(self) -> Choice:
        if wrong := [index for index in self.right if not 0 <= index < len(self.options)]:
            raise ValueError(f"right {wrong[0]} is no index of {len(self.options)} options")
        if self.labels and (len(self.labels) != len(self.options) or len({label.casefold() for label in self.labels}) < len(self.labels)):
            raise ValueError(f"{len(self.options)} options need as many different labels, not {', '.join(self.labels)}")
        return self

    def score(self, question: Question, answer: str) -> Score:
        labels = self.labels or tuple(LETTERS[: len(self.options)])
        chosen = self._chosen(final_answer(answer) or answer, labels)
        wanted = " or ".join(labels[index] for index in self.right)
        if chosen is None:
            return Score(0.0, f"the answer chooses no option; expected {wanted}")
        return Score(float(chosen in self.right), f"chose {labels[chosen]}, expected {wanted}")

    def _chosen(self, answer: str, labels: tuple[str, ...]) -> int | None:
        """Return the index of the chosen option: by the whole text, a label at the beginning, an option at the beginning."""
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
        begun = [
            (len(option), -index)
            for index, option in enumerate(self.options)
            if option.strip() and re.match(rf"{re.escape(option.strip())}(?!\w)", text, re.IGNORECASE)
        ]
        return -max(begun)[1] if begun else None
