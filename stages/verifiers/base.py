"""The base class of verifiers, the questions and scores that they exchange, and the limits of scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from puna.stages.contract import StageConfig
from puna.stages.endpoint import EndpointConfig
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.stages.verifiers.judges import Tools


class Question(NamedTuple):
    """The part of a prompt that a verifier sees: id, task, text, and the gold answer (`reference`), if there is one.

    `messages`: the turns of the conversation, each with role and content; if empty, `text` is the only user message."""

    id: str
    task: str
    text: str
    reference: str | None
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Score:
    """The quality of an answer, 0 to 1, and a note for readers. `value` None: the answer could not be scored.

    `steps`: for each step of an answer in order, the index after its last character, and its reward, 0 to 1 (`grpo.credit`)."""

    value: float | None
    detail: str = ""
    steps: Sequence[tuple[int, float]] = ()


DETAIL = 2000  # maximum characters of a score's detail
CORRECT = 1.0 - 1e-6  # minimum score of a correct answer; lower scores are partial credit


class Item(NamedTuple):
    """One answer to score, with its question and verifier."""

    verifier: Verifier
    question: Question
    answer: str


class Verifier(StageConfig):
    """The base class of all verifiers: its fields are the parameters in a prompt's JSON, and `score` scores one answer.

    Verifiers with equal settings share one instance, so costly state can be a `functools.cached_property`. Unless `score_many` is
    overridden, `score` runs in a separate process, which is killed if an answer takes too long. An exception becomes a score of None."""

    name: ClassVar[str]
    stepwise: ClassVar[bool] = False  # True if its scores have `steps`

    def score(self, question: Question, answer: str) -> Score:
        raise NotImplementedError(f"{type(self).__name__} has no method score")

    def reply(self, question: Question, messages: Sequence[dict[str, Any]]) -> str | None:
        """Return the user's next message after an answer's turns so far, the last of which is the model's; None: the answer is complete.

        A verifier that replies is an environment (see `grpo.turns`). `score` then gets the last turn as answer, and a question whose
        messages include the turns before it. `reply` runs in the same process as `score`; an exception's text becomes the reply."""
        return None

    def reaches(self) -> list[tuple[str, str]]:
        """Return the verifier's code, which is part of a stage's key: (module, symbol) of its class."""
        return self.of_class()

    @classmethod
    def of_class(cls) -> list[tuple[str, str]]:
        return [(cls.__module__, cls.__qualname__.split(".")[0])]

    def parts(self) -> tuple[Verifier, ...]:
        """Return the verifiers whose scores this verifier combines; () if it scores answers itself."""
        return ()

    def combine(self, scores: Sequence[Score]) -> Score:
        """Return one score from the scores of `parts`, whose values are never None."""
        raise NotImplementedError(f"{type(self).__name__} has no method combine")

    def check(self, question: Question) -> None:
        """Raise PunaError if the settings do not fit the prompt. Called before anything is scored."""

    @classmethod
    def prepare(cls, verifiers: Sequence[Verifier], tools: Tools) -> None:
        """Raise PunaError if a model is missing or programs cannot be isolated. Called once, before any answer is scored."""

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score] | None:
        """Return the scores of many answers, or None to use `score` in separate processes."""
        return None


class BoundedVerifier(Verifier):
    """A verifier of Puna's own whose `score` takes linear time, so that it needs no separate process."""

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score]:
        return [attempt(item) for item in items]


def to_json(verifier: Verifier) -> dict[str, Any]:
    """Return the JSON value of a verifier that combines no other verifiers."""
    return {"name": verifier.name, **verifier.model_dump(mode="json")}


def attempt(item: Item) -> Score:
    """Return the score of one answer, or a score of None with the error if the verifier fails."""
    try:
        score = item.verifier.score(item.question, item.answer)
    except Exception as error:  # noqa: BLE001  a verifier may be anybody's code: its failure is a result
        return Score(None, f"{item.verifier.name} failed: {type(error).__name__}: {error}"[:DETAIL])
    return check_score(score, item.verifier.name)


def check_score(score: Score, name: str) -> Score:
    """Return a score with its detail cut to `DETAIL`. An invalid one (value or rewards outside 0 to 1) becomes None with the reason."""
    value = score.value if isinstance(score, Score) else score
    if not isinstance(score, Score) or not (value is None or (isinstance(value, int | float) and 0 <= value <= 1)):
        return Score(None, f"{name} returned {value!r}, not a Score from 0 to 1"[:DETAIL])
    try:
        steps = [(int(end), float(reward)) for end, reward in score.steps]
    except (TypeError, ValueError):
        steps = [(0, -1.0)]
    if sorted(steps, key=itemgetter(0)) != steps or not all(0 <= reward <= 1 for _, reward in steps):
        return Score(None, f"{name} returned steps {score.steps!r}, not increasing ends with rewards from 0 to 1"[:DETAIL])
    return Score(None if value is None else float(value), str(score.detail)[:DETAIL].encode("utf-8", "replace").decode(), steps)


def reference_of(verifier: Verifier, answer: str | None, question: Question) -> str:
    """Return the expected answer: the verifier's own, else the prompt's reference. Raise PunaError without either."""
    if answer is not None:
        return answer
    if question.reference is None:
        raise PunaError(f"prompt {question.id}: verifier {verifier.name} needs `answer`, since the prompt has no reference")
    return question.reference


def score_ending(value: float | None, finished: bool) -> float | None:
    """Return the score of an answer from the score of its text: a truncated answer scores 0, unless the text's score is None."""
    return value if finished or value is None else 0.0


def is_correct(value: float | None) -> bool:
    return value is not None and value >= CORRECT


class ScoringConfig(StageConfig):
    """Limits of scoring by verifiers."""

    seconds: float = Field(
        10.0, gt=0, le=600, description="Maximum CPU seconds (wall time: tenfold) per answer; after that, no score (verifier code: 0)"
    )
    memory_mb: int = Field(512, ge=64, le=1 << 20, description="Maximum total memory of a program's processes, in MiB")
    disk_mb: int = Field(64, ge=1, le=1 << 20, description="Maximum size of a program's files, in MiB")
    processes: int = Field(32, ge=1, le=10_000, description="Maximum number of processes and threads of a program")
    endpoint: EndpointConfig | None = Field(
        None, description="Model at an endpoint that grades for `judge` verifiers without a model; null: a model of the input `judges`"
    )
    reply_tokens: int = Field(256, ge=1, le=65_536, description="Maximum tokens of an endpoint's reply, including its reasoning")

    @model_validator(mode="after")
    def _only_an_endpoint_replies(self) -> Self:
        return self if self.endpoint else self.refuse_unused("there is no endpoint", "reply_tokens", group="scoring.")

    def unmet(self, where: str) -> list[str]:
        """Return a message if the endpoint's API key is not set. `where`: the name of the field with these settings."""
        return [] if self.endpoint is None else self.endpoint.unmet(f"{where}.endpoint")
