"""`regex`: a match with a regular expression, in time linear in the answer."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.registry import register


@register
class RegularExpression(BoundedVerifier):
    """Score 1 if the pattern occurs in the answer (with `absent`: if it does not), else 0.

    RE2's syntax: that of Python without look-around and back-references, which have no bound on their time.
    """

    name: ClassVar[str] = "regex"

    pattern: str = Field(
        min_length=1, max_length=10_000, description="Regular expression in RE2's syntax; (?i) ignores case, (?s) lets . match line ends"
    )
    match: Literal["anywhere", "whole"] = Field(
        "anywhere", description="Found anywhere in the answer, or matching the whole of it without blanks around it"
    )
    absent: bool = Field(False, description="The answer is right where the pattern is not found")
    extract: bool = Field(False, description="Search only the final answer that the text marks, where it marks one")

    @cached_property
    def compiled(self) -> Any:
        """Return RE2's automaton."""
        import re2

        options = re2.Options()
        options.log_errors = False
        return re2.compile(self.pattern, options)

    @model_validator(mode="after")
    def _pattern_compiles(self) -> RegularExpression:
        import re2

        try:
            _ = self.compiled
        except re2.error as error:
            said = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
            raise ValueError(f"pattern {self.pattern!r} is none that RE2 takes: {said}") from error
        return self

    def score(self, question: Question, answer: str) -> Score:
        """Return 1 or 0."""
        text = (final_answer(answer) if self.extract else None) or answer
        found = self.compiled.search(text) if self.match == "anywhere" else self.compiled.fullmatch(text.strip())
        detail = f"found {found.group(0)[:200]!r}" if found is not None else f"{self.pattern!r} is not found"
        return Score(float((found is None) == self.absent), detail)
