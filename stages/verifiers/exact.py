"""`exact`: a comparison with the expected text."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import ClassVar

from pydantic import Field

from puna.stages.verifiers.base import BoundedVerifier, Question, Score, reference_of
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.registry import register


@register
class Exact(BoundedVerifier):
    """Score 1 if the answer, or its marked final answer, is one of the expected texts, else 0.

    Blanks around a text do not count; Unicode is normalised (NFC).
    """

    name: ClassVar[str] = "exact"

    answer: str | None = Field(None, description="Expected answer; null: the prompt's reference")
    also: tuple[str, ...] = Field((), description="Other answers that are right too")
    ignore_case: bool = Field(False, description="Upper and lower case are the same")
    ignore_space: bool = Field(False, description="Any run of blanks and line ends is one blank")
    ignore_punctuation: bool = Field(False, description="Punctuation does not count")
    extract: bool = Field(True, description="A final answer that the text marks (answer tags, \\boxed, ####, 'the answer is') will do")

    def score(self, question: Question, answer: str) -> Score:
        """Return 1 or 0."""
        expected = reference_of(self, self.answer, question)
        wanted = {self._normal(text) for text in (expected, *self.also)}
        if self._normal(answer) in wanted:
            return Score(1.0)
        found = final_answer(answer) if self.extract else None
        if found is not None and self._normal(found) in wanted:
            return Score(1.0, f"final answer {found!r}")
        return Score(0.0, f"expected {expected!r}")

    def check(self, question: Question) -> None:
        """Raise PunaError without an expected answer."""
        reference_of(self, self.answer, question)

    def _normal(self, text: str) -> str:
        steps: list[Callable[[str], str]] = [lambda t: unicodedata.normalize("NFC", t)]
        if self.ignore_case:
            steps.append(str.casefold)
        if self.ignore_punctuation:
            steps.append(lambda t: "".join(c for c in t if not unicodedata.category(c).startswith("P")))
        if self.ignore_space or self.ignore_punctuation:
            steps.append(lambda t: " ".join(t.split()))
        for step in steps:
            text = step(text)
        return text.strip()
