"""Grades of instructions by a language model: quality of the answer, difficulty and intentions of the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import Field

from puna.stages.contract import StageConfig, StageRun
from puna.stages.conversations import messages_of, shown
from puna.stages.verifiers.base import Item, Question
from puna.stages.verifiers.judge import Judge, grades
from puna.stages.verifiers.judges import Loaded

POINTS = (
    "Everything that the answer says is right.",
    "The answer does what the request asks for, all of it, in the form that it asks for.",
    "The answer is clear, well presented, and has the right tone for this request.",
)
CODE_POINTS = (
    "The code has no bug: it runs and does what it is meant to do.",
    "The code does what the author of the request wants to reach.",
)
RUBRIC = "Begin with 0 and add one point for each line that is true of the answer:\n{lines}"
LEVELS = 2
"""The highest of three levels of difficulty."""
DIFFICULTY = (
    "How difficult is it to answer the request below well?\n0: easy, anybody could.\n1: it takes care, knowledge or several steps.\n"
    "2: hard, an expert would have to think.\n\nThe request:\n<<<\n{request}\n>>>\n\nReply with the level alone, one digit from 0 to 2."
)
INTENTIONS = (
    "How many different things does the request below ask for? Count each task, each condition that the answer must meet and each "
    "form that it must have.\n\nThe request:\n<<<\n{request}\n>>>\n\n"
    "Reply with the number alone, one digit from 0 to {most}; {most} also stands for more."
)
DIGITS = 4
"""The last digits of a network's numbers depend on the machine."""


class JudgeSettings(StageConfig):
    """Questions to a language model about each instruction."""

    points: tuple[str, ...] = Field(POINTS, min_length=1, max_length=9, description="What an answer gets one point for, each")
    code_points: tuple[str, ...] = Field(
        CODE_POINTS, min_length=1, max_length=9, description="The same for an answer with a block of code, between lines of ```"
    )
    below_full: float = Field(
        0.5, ge=0, lt=9, description="An answer has the full score when its mean grade is at most this below all points, points"
    )
    difficulty: bool = Field(
        True, description="Also ask how difficult the request is and how many things it asks for; false: difficulty is one minus agreement"
    )
    max_intentions: int = Field(5, ge=1, le=9, description="A request that asks for so many things, or more, has all that this gives")


class Graded(NamedTuple):
    """Grades by instruction id: the share of the points, the answers with the full score, the difficulty from 0 to 1.

    An instruction that is too long for the judge is in none. `scores`: rows of that side table.
    """

    quality: dict[str, float]
    full: set[str]
    difficulty: dict[str, float]
    scores: list[dict[str, Any]]


def graded(rows: Sequence[dict[str, Any]], judge: Loaded, settings: JudgeSettings, run: StageRun) -> Graded:
    """Return grades of instructions from the judge's probabilities of the digits: one forward pass each, no sampling.

    Llama 3 (section 4.2.3) has points for accuracy, instruction following and tone, and for code bugs and the user's intention;
    difficulty on three levels; and the number of intentions (Instag, Lu et al., arXiv 2308.07074), here only counted. The difficulty
    is the mean of the two, each as a share of its highest. Metrics: `unjudged` instructions, and `judge_answers`, the mean
    probability that the model answers with a grade; a low value means that it does not understand the question.
    """
    messages = {row["id"]: messages_of(row) for row in rows}
    asked = {name: shown(turns[:-1]) for name, turns in messages.items()}
    said = {name: shown(turns[-1:]) for name, turns in messages.items()}
    of_code = {name for name, text in said.items() if "```" in text}
    answers: list[Answered] = []
    graded = Graded({}, set(), {}, [])
    for points, names in ((settings.points, sorted(said.keys() - of_code)), (settings.code_points, sorted(of_code))):
        verifier = Judge(rubric=RUBRIC.format(lines="\n".join(f"- {point}" for point in points)), max_grade=len(points))
        items = {name: Item(verifier, Question(name, "", asked[name], None), said[name]) for name in names}
        found = _grade(judge, "points", {name: verifier.request(item) for name, item in items.items()}, len(points))
        graded.quality.update({one.name: one.mean / len(points) for one in found})
        graded.full.update(one.name for one in found if one.mean >= len(points) - settings.below_full)
        answers += found
    if settings.difficulty:
        most = settings.max_intentions
        levels = _grade(judge, "difficulty", {name: DIFFICULTY.format(request=text) for name, text in asked.items()}, LEVELS)
        counts = _grade(judge, "intentions", {name: INTENTIONS.format(request=text, most=most) for name, text in asked.items()}, most)
        counted = {one.name: one.mean / most for one in counts}
        graded.difficulty.update({o.name: (o.mean / LEVELS + counted[o.name]) / 2 for o in levels if o.name in counted})
        answers += [*levels, *counts]
    graded.scores.extend({"id": one.name, "name": one.kind, "value": one.mean} for one in answers)
    run.metric("unjudged", len(rows) - len(graded.quality))
    if answers:
        run.metric("judge_answers", round(sum(one.probability for one in answers) / len(answers), DIGITS))
    return graded


class Answered(NamedTuple):
    """A grade of instruction `name`: the mean, and the probability that the judge answers with a grade."""

    kind: str
    name: str
    mean: float
    probability: float


def _grade(judge: Loaded, kind: str, requests: dict[str, str], top: int) -> list[Answered]:
    """Return the grade of each request that fits into the judge's context."""
    found = zip(requests, grades(judge, list(requests.values()), top), strict=True)
    return [Answered(kind, name, round(one.mean, DIGITS), one.answered) for name, one in found if one.mean is not None]
