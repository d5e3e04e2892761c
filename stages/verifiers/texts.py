"""The verifiers `exact` and `regex`: a comparison with the expected text, and a match with a regular expression in linear time."""

from __future__ import annotations

import unicodedata
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from puna.stages.verifiers.base import BoundedVerifier, Question, Score, reference_of
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.registry import register


@register
class Exact(BoundedVerifier):
    """Score 1 if the answer, or with `extract` its marked final answer, is one of the expected texts, else 0.

    White space around a text is ignored; Unicode is normalized (NFC)."""

    name: ClassVar[str] = "exact"

    answer: str | None = Field(None, description="Expected answer; null: the prompt's reference")
    also: tuple[str, ...] = Field((), description="Other correct answers")
    ignore_case: bool = Field(False, description="Ignore case")
    ignore_space: bool = Field(False, description="Treat each run of white space as one blank")
    ignore_punctuation: bool = Field(False, description="Ignore punctuation, and treat runs of blanks as one")
    extract: bool = Field(True, description="Also accept a final answer that the text marks (answer tags, \\boxed, ####, 'the answer is')")

    def score(self, question: Question, answer: str) -> Score:
        expected = reference_of(self, self.answer, question)
        accepted = {self._normal(text) for text in (expected, *self.also)}
        if self._normal(answer) in accepted:
            return Score(1.0)
        match = final_answer(answer) if self.extract else None
        if match is not None and self._normal(match) in accepted:
            return Score(1.0, f"final answer {match!r}")
        return Score(0.0, f"expected {expected!r}")

    def check(self, question: Question) -> None:
        reference_of(self, self.answer, question)

    def _normal(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split()) if self.ignore_space or self.ignore_punctuation else text.strip()


@register
class RegularExpression(BoundedVerifier):
    """Score 1 if the pattern matches the answer (with `absent`: if it does not), else 0.

    The syntax is RE2's: like Python's, but without look-around and back-references, which cannot be matched in linear time."""

    name: ClassVar[str] = "regex"

    pattern: str = Field(
        min_length=1, max_length=10_000, description="Regular expression in RE2's syntax; (?i) ignores case, (?s) lets . match line ends"
    )
    match: Literal["anywhere", "whole"] = Field("anywhere", description="Match anywhere, or match the whole answer without outer blanks")
    absent: bool = Field(False, description="Score 1 if the pattern does not match")
    extract: bool = Field(False, description="Search only the final answer that the text marks, if it marks one")

    @cached_property
    def regex(self) -> Any:
        import re2

        options = re2.Options()
        options.log_errors = False
        return re2.compile(self.pattern, options)

    @model_validator(mode="after")
    def _pattern_compiles(self) -> RegularExpression:
        import re2

        try:
            _ = self.regex
        except re2.error as error:
            message = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
            raise ValueError(f"pattern {self.pattern!r} is not valid RE2 syntax: {message}") from error
        return self

    def score(self, question: Question, answer: str) -> Score:
        marked = final_answer(answer) if self.extract else None
        text = answer if marked is None else marked
        match = self.regex.search(text) if self.match == "anywhere" else self.regex.fullmatch(text.strip())
        detail = f"found {match.group(0)[:200]!r}" if match is not None else f"{self.pattern!r} is not found"
        return Score(float((match is None) == self.absent), detail)
