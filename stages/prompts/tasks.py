"""Puna's own tasks: questions with many correct answers, generated at random and checked by a verifier.

Every question has a structure, such as a group of nouns. Held-out questions have structures that no training question has."""

from __future__ import annotations

import json
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue

from puna.stages.contract import StageConfig, parse
from puna.stages.verifiers.base import Verifier, to_json
from puna.stages.verifiers.combinations import Product
from puna.stages.verifiers.json_schema import JsonSchema
from puna.stages.verifiers.lists import Numbers
from puna.stages.verifiers.texts import RegularExpression

_NOUNS = (
    "apple bridge candle desert engine feather garden hammer island jacket kettle ladder mirror needle ocean painter queen river saddle "
    "teacher umbrella valley window anchor basket camera doctor eagle farmer guitar helmet iron jungle kitchen lemon market nurse orchard "
    "pencil rabbit soldier tower uncle village wagon artist bottle castle dragon elephant forest glove harbor insect judge king lantern "
    "mountain neighbor owl planet ribbon shadow tunnel violin whale baker cloud dancer envelope fountain ghost horse bicycle"
)
_JOBS = (
    "baker carpenter dentist electrician farmer gardener historian inventor journalist knitter librarian mechanic nurse optician painter "
    "quilter receptionist sailor tailor umpire violinist waiter actor biologist chemist dancer engineer fisherman geologist hairdresser "
    "illustrator judge lawyer musician novelist pilot reporter singer teacher translator vet weaver astronomer butcher clockmaker driver"
)
NOUNS, JOBS = _NOUNS.split(), _JOBS.split()
GROUPS = 5  # number of groups of nouns
PLACES = ("by the old road", "in the morning light", "near the quiet station", "on a cold evening")
FIELDS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "name": ({"type": "string", "pattern": "^[A-Z][a-z]+"}, ("Anna Weber", "Omar Haddad", "Lucia Rossi", "John Miller", "Mei Tanaka")),
    "age": ({"type": "integer", "minimum": 18, "maximum": 99}, (24, 31, 38, 45, 57, 63)),
    "city": ({"type": "string", "pattern": "^[A-Z][a-z]+"}, ("Lima", "Oslo", "Cairo", "Boston", "Kyoto", "Madrid")),
    "hobby": ({"type": "string", "minLength": 4}, ("hiking", "chess", "cooking", "pottery", "sailing")),
    "years_of_work": ({"type": "integer", "minimum": 0, "maximum": 80}, (2, 5, 9, 14, 21)),
}


class Drawn(NamedTuple):
    """A question, one correct answer, the verifier's name and settings, and the structure that decides if the question is held out."""

    question: str
    answer: str
    verifier: dict[str, Any]
    structure: str


class Generator(StageConfig):
    """Base class of generators: the fields of a subclass are the task's parameters, and `draw` returns a question."""

    name: ClassVar[str]

    def draw(self, random: Random) -> Drawn:
        """Return one random question with an answer, a verifier and a structure."""
        raise NotImplementedError(f"{type(self).__name__} has no method draw")


class DigitsTask(Generator):
    """Questions that ask for ordered two-digit numbers with given first or last digits. Structure: the sum of the given digits modulo 5.

    So no training question has the digits of a held-out question, and no answer to a training question is correct for a held-out one."""

    name: ClassVar[str] = "digits"
    place: Literal["first", "last"] = Field("first", description="Position of the given digit in each number; the other digit is free")
    order: Literal["rising", "falling"] = Field("rising", description="From small to large, or from large to small")
    count: int = Field(3, ge=2, le=4, description="Number of numbers that a question asks for")

    def draw(self, random: Random) -> Drawn:
        digits = random.sample(range(1 if self.place == "first" else 0, 10), self.count)
        digits_text = f"{', '.join(map(str, digits[:-1]))} and {digits[-1]}"
        way = "from small to large" if self.order == "rising" else "from large to small"
        verifier = {"name": Numbers.name, "count": self.count, "order": self.order, "digits": digits, "place": self.place}
        if self.place == "first":
            remainder = random.randrange(2)
            numbers = [10 * digit + random.randrange(remainder, 10, 2) for digit in digits]
            verifier |= {"lower": 10, "upper": 99, "divisor": 2, "remainder": remainder}
            question = f"Write {self.count} {('even', 'odd')[remainder]} numbers of two digits, {way}, that begin with {digits_text}."
        else:
            lower, upper = random.randint(10, 29), random.randint(70, 99)
            # All numbers with these tens digits lie between the bounds. There are at least four such digits, enough for `count`.
            tens = sorted(random.sample(range(lower // 10 + 1, upper // 10), self.count), reverse=self.order == "falling")
            numbers = [10 * ten + digit for ten, digit in zip(tens, digits, strict=True)]
            verifier |= {"lower": lower, "upper": upper}
            question = f"Write {self.count} numbers between {lower} and {upper}, {way}, that end in {digits_text}."
        answer = sorted(numbers, reverse=self.order == "falling")
        return Drawn(question, " ".join(map(str, answer)), verifier, f"digit sum {sum(digits) % 5} by 5")


class SentenceTask(Generator):
    """Questions that ask for one sentence with two given nouns. Structure: the group to which both nouns belong."""

    name: ClassVar[str] = "sentence"
    min_characters: int = Field(24, ge=2, le=200, description="Minimum number of characters of the sentence")

    def draw(self, random: Random) -> Drawn:
        """Return one question. An answer with double quotation marks, a colon, or the words "word" or "sentence" scores 0."""
        group = random.randrange(GROUPS)
        one, other = random.sample(NOUNS[group::GROUPS], 2)
        spoken_of = RegularExpression(pattern=r"(?i)\b(words?|sentences?)\b", absent=True)
        verifier = Product(of=(_has(one), _has(other), spoken_of, _sentence(self.min_characters)))
        answer = f"The {one} stood beside the {other} {random.choice(PLACES)}."
        question = f'Write one sentence that contains the words "{one}" and "{other}".'
        return Drawn(question, answer, _verifier_json(verifier), f"nouns {group} of {GROUPS}")


class SceneTask(Generator):
    """Questions that ask for one sentence in which a person of a given job finds a thing. Structure: the group of the thing's noun."""

    name: ClassVar[str] = "scene"
    min_characters: int = Field(24, ge=2, le=200, description="Minimum number of characters of the sentence")

    def draw(self, random: Random) -> Drawn:
        group = random.randrange(GROUPS)
        noun = random.choice(NOUNS[group::GROUPS])
        job = random.choice([job for job in JOBS if job != noun])
        verifier = Product(of=(_has(noun), _has(job), _sentence(self.min_characters)))
        answer = f"The {job} found {_a(noun)} {random.choice(PLACES)}."
        question = f"Write one sentence in which {_a(job)} finds {_a(noun)}."
        return Drawn(question, answer, _verifier_json(verifier), f"nouns {group} of {GROUPS}")


class RecordTask(Generator):
    """Questions that ask for a JSON object with given fields that describes a person of a given job (unchecked). Structure: the fields."""

    name: ClassVar[str] = "record"
    fields: int = Field(3, ge=1, lt=len(FIELDS), description="Number of fields of the object")

    def draw(self, random: Random) -> Drawn:
        job, keys = random.choice(JOBS), random.sample(sorted(FIELDS), self.fields)
        properties = {key: FIELDS[key][0] for key in keys}
        schema = {"type": "object", "required": keys, "additionalProperties": False, "properties": properties}
        answer = json.dumps({key: random.choice(FIELDS[key][1]) for key in keys})
        question = f"Describe a made-up {job} as a JSON object with the keys {', '.join(keys)}."
        return Drawn(question, answer, _verifier_json(JsonSchema(json_schema=schema)), f"fields {', '.join(sorted(keys))}")


def _a(word: str) -> str:
    """Return a noun with its indefinite article. None of the listed nouns starts with a silent letter or the sound of "you"."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _has(noun: str) -> RegularExpression:
    return RegularExpression(pattern=rf"(?i)\b{noun}s?\b")


def _sentence(characters: int) -> RegularExpression:
    return RegularExpression(pattern=rf"[A-Z][^.!?\"“”:\n]{{{characters - 2},}}[.!]", match="whole")


def _verifier_json(verifier: Verifier) -> dict[str, Any]:
    own = to_json(verifier)
    return {**own, "of": [_verifier_json(part) for part in verifier.parts()]} if verifier.parts() else own


GENERATORS: dict[str, type[Generator]] = {kind.name: kind for kind in (DigitsTask, SentenceTask, SceneTask, RecordTask)}


def of(name: str, parameters: dict[str, JsonValue]) -> Generator | None:
    """Return Puna's generator `name` with these parameters, or None if there is none. Raise PunaError for a wrong parameter."""
    return parse(GENERATORS[name], dict[str, Any](parameters), f"task {name}") if name in GENERATORS else None
