"""The protocol of a verifier: described settings, and one method that scores an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from puna.stages.contract import StageConfig
from puna.stages.verifiers.question import Question, Score
from puna.stages.verifiers.tools import Tools
from puna.storage import PunaError

__all__ = [
    "BoundedVerifier", "Item", "Question", "Score", "Verifier", "attempt", "checked", "ended", "is_correct", "reference_of", "to_json",
]  # fmt: skip
CORRECT = 1.0 - 1e-6
"""An answer counts as correct from this score on; verifiers give part marks below it."""


class Item(NamedTuple):
    """One answer to score."""

    verifier: Verifier
    question: Question
    answer: str


class Verifier(StageConfig):
    """Base of every verifier: its fields are the parameters that a prompt's JSON gives, and `score` judges one answer.

    An instance is made once for equal settings and kept, so that a `functools.cached_property` prepares what is costly. `score`
    runs in a process of its own that is ended when an answer takes too long; what it raises becomes a score of None.
    """

    name: ClassVar[str]

    def score(self, question: Question, answer: str) -> Score:
        """The score of one answer."""
        raise NotImplementedError(f"{type(self).__name__} has no method score")

    def reaches(self) -> list[tuple[str, str]]:
        """Code that counts in the key of a stage whose prompts name this verifier, as module and symbol: its class."""
        return self.of_class()

    @classmethod
    def of_class(cls) -> list[tuple[str, str]]:
        """The class, as module and symbol."""
        return [(cls.__module__, cls.__qualname__.split(".")[0])]

    def parts(self) -> tuple[Verifier, ...]:
        """The verifiers whose scores this one combines; none: it scores answers itself."""
        return ()

    def combine(self, scores: Sequence[Score]) -> Score:
        """One score of those of `parts`, none of which is None."""
        raise NotImplementedError(f"{type(self).__name__} has no method combine")

    def check(self, question: Question) -> None:
        """PunaError where the settings do not suit the prompt; called before anything is scored."""

    @classmethod
    def prepare(cls, verifiers: Sequence[Verifier], tools: Tools) -> None:
        """PunaError where these verifiers lack a means to run: a model, an isolated process. Called once, before any answer."""

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score] | None:
        """Scores of many answers; None: by `score`, in processes of their own."""
        return None


class BoundedVerifier(Verifier):
    """A verifier of Puna's whose `score` takes time linear in the answer, so that it needs no process of its own."""

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score]:
        """Scores of many answers, here."""
        return [attempt(item) for item in items]


def to_json(verifier: Verifier) -> dict[str, Any]:
    """The JSON value of a verifier that combines no others."""
    return {"name": verifier.name, **verifier.model_dump(mode="json")}


def attempt(item: Item) -> Score:
    """The score of one answer; None with the error where the verifier fails."""
    try:
        found = item.verifier.score(item.question, item.answer)
    except Exception as error:  # noqa: BLE001  a verifier may be anybody's code: its failure is a result
        return Score(None, f"{item.verifier.name} failed: {type(error).__name__}: {error}"[:DETAIL])
    return checked(found, item.verifier.name)


def checked(found: Score, name: str) -> Score:
    """`found` where it is a score from 0 to 1, else a score of None that says what it is."""
    value = found.value if isinstance(found, Score) else found
    if not isinstance(found, Score) or not (value is None or (isinstance(value, int | float) and 0 <= value <= 1)):
        return Score(None, f"{name} gave {value!r}, not a Score from 0 to 1"[:DETAIL])
    return Score(None if value is None else float(value), str(found.detail)[:DETAIL])


def reference_of(verifier: Verifier, given: str | None, question: Question) -> str:
    """The expected answer: the verifier's own, else the prompt's reference; PunaError without either."""
    if given is not None:
        return given
    if question.reference is None:
        raise PunaError(f"prompt {question.id}: verifier {verifier.name} needs `answer`, for the prompt has no reference")
    return question.reference


def ended(value: float | None, finished: bool) -> float | None:
    """The score of an answer of a model, by that of its text: one that was cut off is wrong, whatever stands there so far."""
    return value if finished or value is None else 0.0


def is_correct(value: float | None) -> bool:
    """Whether a score means a right answer."""
    return value is not None and value >= CORRECT


DETAIL = 2000
"""Longest detail of a score, characters."""
