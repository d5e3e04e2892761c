"""`numeric`: a comparison of the number in the answer with the expected number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from puna.stages.verifiers.base import BoundedVerifier, Question, Score, reference_of
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.registry import register
from puna.storage import PunaError

Decimal = Literal["point", "comma"]
DIGITS = 400  # maximum digits and exponent of a number: without limits, exact arithmetic takes unbounded time
SPACES = "\u00a0\u2009\u202f"
FRACTION = r"\\[dt]?frac\{\s*(?P<top>[-−]?[\d.,]{1,400})\s*\}\{\s*(?P<bottom>[\d.,]{1,400})\s*\}"
POWER = r"\s?(?:\\times|\\cdot|×|·|\*)\s?10\s?(?:\^|\*\*)\s?\{?\s?(?P<power>[-−+]?\d{1,9})\s?\}?"
RAISED = r"(?:\s?\^\s?\{?\s?|\*\*)(?P<raised>[-−+]?\d{1,9})\s?\}?"
IS_POWER = r"(?<!\^)(?<!\^[-−+{ ])(?<!\^\{[-−+])(?<![\w)\]}]\*\*)(?<![\w)\]}]\*\*[-−+])"
"""A look-behind that keeps a match from starting at an exponent."""


class Number(NamedTuple):
    """A number in a text: its exact value, and the characters [start, end) that spell it."""

    value: Fraction
    start: int
    end: int


@register
class Numeric(BoundedVerifier):
    r"""Score 1 if the answer's number equals the expected number within the larger of the two tolerances, else 0.

    Numbers are read exactly: thousands separators, decimal point or comma, exponents, powers (`10^5`), `3/4`, `1 1/2`, `\frac{3}{4}`,
    `2 \times 10^3`. The number is read from the marked final answer, else from the whole answer."""

    name: ClassVar[str] = "numeric"

    answer: float | str | None = Field(None, description="Expected number; null: the last number of the (marked) reference")
    absolute: float = Field(0.0, ge=0, description="Maximum absolute difference that still counts as right")
    relative: float = Field(0.0, ge=0, lt=1, description="Maximum difference that still counts as right, as a share of the expected number")
    take: Literal["last", "first", "only"] = Field("last", description="Number to compare; only: there must be no other number")
    decimal: Decimal = Field("point", description="Decimal separator; the other one separates thousands")
    units: dict[str, float] = Field(
        default_factory=dict, description="Allowed units, with their sizes in the expected number's unit: {m: 1, cm: 0.01}; '' is a number "
        "without a unit. Empty: units are ignored",
    )  # fmt: skip

    @field_validator("units")
    @classmethod
    def _units_are_sizes(cls, units: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, size in units.items() if not size > 0 or name != name.strip()]:
            raise ValueError(f"the unit {wrong[0]!r} needs a size above 0 and no surrounding blanks")
        return units

    @model_validator(mode="after")
    def _answer_is_a_number(self) -> Numeric:
        if self.answer is not None and self._number(str(self.answer)) is None:
            raise ValueError(f"answer {self.answer!r} contains no number; give one")
        return self

    @cached_property
    def sizes(self) -> list[tuple[str, Fraction]]:
        """Return (name, size) of the named units, the longest name first."""
        return [(name, Fraction(repr(self.units[name]))) for name in sorted(self.units, key=lambda n: (-len(n), n)) if name]

    def score(self, question: Question, answer: str) -> Score:
        expected = self._right_number(question)
        final = final_answer(answer)
        text = final if final is not None and self._numbers(final) else answer
        candidates = self._numbers(text)
        if not candidates:
            return Score(0.0, "the answer holds no number")
        if self.take == "only" and len({number.value for number in candidates}) > 1:
            return Score(0.0, f"the answer holds {len(candidates)} numbers")
        number = candidates[0 if self.take == "first" else -1]
        value = self._in_unit(text, number)
        if value is None:
            return Score(0.0, f"{_format(number.value)} has none of the units {', '.join(map(repr, self.units))}")
        room = max(Fraction(repr(self.absolute)), Fraction(repr(self.relative)) * abs(expected))
        return Score(float(abs(value - expected) <= room), f"{_format(value)}, expected {_format(expected)}")

    def check(self, question: Question) -> None:
        self._right_number(question)

    def _right_number(self, question: Question) -> Fraction:
        text = reference_of(self, None if self.answer is None else str(self.answer), question)
        number = self._number(text)
        if number is None:
            raise PunaError(f"prompt {question.id}: its reference {text[:80]!r} contains no number for the verifier numeric")
        return number

    def _number(self, text: str) -> Fraction | None:
        final = final_answer(text)
        candidates = (self._numbers(final) if final is not None else []) or self._numbers(text)
        return candidates[-1].value if candidates else None

    def _numbers(self, text: str) -> list[Number]:
        return list(numbers(text, self.decimal))

    def _in_unit(self, text: str, number: Number) -> Fraction | None:
        """Return the number in the expected number's unit; None if the answer's unit is not allowed."""
        if not self.units:
            return number.value
        after, before = text[number.end : number.end + 60].lstrip(" \t\u00a0\u202f\\,{}$"), text[: number.start].rstrip()
        after = after.removeprefix("text{").removeprefix("mathrm{").lstrip()
        for name, size in self.sizes:
            if after.startswith(name) and not after[len(name) : len(name) + 1].isalpha():
                return number.value * size
            if not name[0].isalpha() and before.endswith(name):
                return number.value * size
        return number.value * Fraction(repr(self.units[""])) if "" in self.units and not after[:1].isalpha() else None


def numbers(text: str, decimal: Decimal = "point") -> Iterator[Number]:
    for match in _pattern(decimal).finditer(text):
        value = _value(match, decimal)
        if value is not None:
            yield Number(value, match.start(), match.end())


@lru_cache(maxsize=2)
def _pattern(decimal: Decimal) -> re.Pattern[str]:
    point, comma = (r"\.", ",") if decimal == "point" else (",", r"\.")
    group = rf"(?:{comma}|\{{{comma}\}}|\\,|[{SPACES}'’])"
    plain = rf"(?:\d{{1,3}}(?:{group}\d{{3}}){{1,100}}(?!\d)|\d{{1,{DIGITS}}}(?!\d))(?:{point}\d{{1,{DIGITS}}})?|{point}\d{{1,{DIGITS}}}"
    # A hyphen after a letter, a digit or a bracket is not a sign.
    return re.compile(
        rf"(?<![\w.]){IS_POWER}(?P<sign>(?<![\w)\]}}])[-−–+]?)?"
        rf"(?:(?P<whole>\d{{1,9}})?\s?{FRACTION}|(?P<mixed>\d{{1,9}})\s(?P<up>\d{{1,9}})/(?P<down>\d{{1,9}})(?![\d/])"
        rf"|(?P<number>{plain})(?:[eE](?P<e>[-−+]?\d{{1,9}})(?!\w)|{POWER}|{RAISED}|/(?P<over>\d{{1,{DIGITS}}})(?![\d/]))?)"
    )


def _value(found: re.Match[str], decimal: Decimal) -> Fraction | None:
    """Return the exact value of a match; None if an exponent or power is too large, or a denominator is 0."""
    try:
        if found["top"] is not None:
            value = int(found["whole"] or 0) + _plain(found["top"], decimal) / _plain(found["bottom"], decimal)
        elif found["mixed"]:
            value = int(found["mixed"]) + Fraction(int(found["up"]), int(found["down"]))
        else:
            value = _plain(found["number"], decimal)
            exponent = int((found["e"] or found["power"] or "0").replace("−", "-"))
            if abs(exponent) > DIGITS:
                return None
            power = int((found["raised"] or "1").replace("−", "-"))
            if abs(power) * len(str(value)) > 10 * DIGITS:
                return None
            value = value**power * Fraction(10) ** exponent / int(found["over"] or 1)
    except (ZeroDivisionError, ValueError):
        return None
    return -value if (found["sign"] or "") in ("-", "−", "–") else value


def _plain(text: str, decimal: Decimal) -> Fraction:
    point = "." if decimal == "point" else ","
    return Fraction("".join(c for c in text.replace("−", "-") if c.isdigit() or c in (point, "-")).replace(point, "."))


def _format(value: Fraction) -> str:
    return str(value) if len(str(value)) <= 40 else f"{float(value):.12g}" if abs(value) < 10**300 else "a very large number"
