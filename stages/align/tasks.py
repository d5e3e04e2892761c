"""Tasks of Puna's own: questions with many right answers, drawn by code and checked by a verifier.

Each question names its structure, by which held-out questions are chosen: a model that answers those has not met that structure.
"""

from __future__ import annotations

import string
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field, JsonValue, model_validator

from puna.stages.contract import StageConfig, parse
from puna.stages.verifiers.lists import Items, Numbers

G = TypeVar("G", bound="Generator")


class Drawn(NamedTuple):
    """A question, one of its right answers, its verifier's name and settings, and the structure by which it is held out."""

    question: str
    answer: str
    verifier: dict[str, Any]
    structure: str


class Generator(StageConfig):
    """Base of the generators: fields are a task's parameters, `draw` gives one question."""

    name: ClassVar[str]

    def draw(self, random: Random) -> Drawn:
        """One question."""
        raise NotImplementedError(f"{type(self).__name__} has no method draw")


GENERATORS: dict[str, type[Generator]] = {}


def generator(kind: type[G]) -> type[G]:
    """Make a generator known by its name; a decorator."""
    if kind.name in GENERATORS and GENERATORS[kind.name].__qualname__ != kind.__qualname__:
        raise TypeError(f"two generators have the name {kind.name!r}")
    GENERATORS[kind.name] = kind
    return kind


@generator
class NumbersTask(Generator):
    """So many numbers of a kind between two bounds, in order. Structure: the lower bound's remainder by 5."""

    name: ClassVar[str] = "numbers"

    kind: Literal["parity", "ending"] = Field("parity", description="Even or odd numbers, or numbers that end in a digit")
    order: Literal["rising", "falling"] = Field("rising", description="From small to large, or from large to small")
    count: int = Field(4, ge=1, le=20, description="Numbers that are asked for")
    lowest: int = Field(10, ge=0, description="Smallest lower bound")
    highest: int = Field(98, description="Largest upper bound")
    room: int = Field(8, ge=1, description="Fewest numbers of the kind between the bounds")

    @model_validator(mode="after")
    def _has_room(self) -> NumbersTask:
        if self.count > self.room:
            raise ValueError(f"count {self.count} must not exceed room {self.room}")
        if self.highest - self.lowest < self.divisor * (self.room + 1):
            raise ValueError(f"highest must be at least {self.lowest + self.divisor * (self.room + 1)} for room {self.room}")
        return self

    @property
    def divisor(self) -> int:
        """By which the kind is a remainder."""
        return 2 if self.kind == "parity" else 10

    def draw(self, random: Random) -> Drawn:
        """One question."""
        span = self.divisor * (self.room + 1)
        lower = random.randint(self.lowest, self.highest - span)
        upper = random.randint(lower + span, self.highest)
        remainder = random.randrange(self.divisor)
        fitting = [n for n in range(lower, upper + 1) if n % self.divisor == remainder]
        chosen = sorted(random.sample(fitting, self.count), reverse=self.order == "falling")
        what = f"{('even', 'odd')[remainder]} numbers" if self.kind == "parity" else f"numbers that end in {remainder}"
        way = "from small to large" if self.order == "rising" else "from large to small"
        bounds = {"lower": lower, "upper": upper, "divisor": self.divisor, "remainder": remainder}
        verifier = {"name": Numbers.name, "count": self.count, "order": self.order, **bounds}
        question = f"Write {self.count} {what} between {lower} and {upper}, {way}."
        return Drawn(question, " ".join(map(str, chosen)), verifier, f"lower bound {lower % 5} by 5")


@generator
class LettersTask(Generator):
    """So many of some letters, in their order. Structure: the first letter's place in the alphabet by 5."""

    name: ClassVar[str] = "letters"

    given: int = Field(8, ge=2, le=26, description="Letters to choose from")
    count: int = Field(4, ge=1, description="Letters that are asked for")

    @model_validator(mode="after")
    def _enough(self) -> LettersTask:
        if self.count > self.given:
            raise ValueError(f"{self.count} of {self.given} letters cannot be chosen")
        return self

    def draw(self, random: Random) -> Drawn:
        """One question."""
        letters = random.sample(string.ascii_lowercase, self.given)
        places = sorted(random.sample(range(self.given), self.count))
        question = f"Write {self.count} of these letters in the same order: {' '.join(letters)}."
        verifier = {"name": Items.name, "of": letters, "count": self.count, "ordered": True}
        first = string.ascii_lowercase.index(letters[0])
        return Drawn(question, " ".join(letters[i] for i in places), verifier, f"first letter {first % 5} by 5")


def of(name: str, parameters: dict[str, JsonValue]) -> Generator | None:
    """The generator of that name with its parameters; None where Puna has none of that name. PunaError names a wrong parameter."""
    return parse(GENERATORS[name], dict[str, Any](parameters), f"task {name}") if name in GENERATORS else None
