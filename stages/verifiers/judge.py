"""`judge`: a language model's grade by a rubric; also grades of instructions for quality, difficulty and number of intentions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field

from puna.models.training.packing import batch_by_size
from puna.stages.contract import StageConfig, StageRun
from puna.stages.conversations import as_text, messages_of
from puna.stages.endpoint import Endpoint, grade_of
from puna.stages.grading import mean_grades, tokens_apart
from puna.stages.verifiers.base import Item, Question, Score, Verifier
from puna.stages.verifiers.judges import BATCH_TOKENS, DIGEST, Loaded, Tools
from puna.stages.verifiers.registry import register

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer


@register
class Judge(Verifier):
    """Score by a language model: the mean of its grades, weighted by their probabilities, as a share of the highest grade.

    Scoring takes one forward pass without sampling, as in G-Eval (Liu et al., arXiv 2303.16634, section 2), so scores are not limited to
    whole grades. For a judge without `model`, the model at `scoring.endpoint`, if given, writes one grade instead."""

    name: ClassVar[str] = "judge"

    rubric: str = Field(min_length=1, description="Criteria of a good answer, and the meaning of each grade")
    max_grade: int = Field(5, ge=1, le=9, description="Highest grade, one digit; the lowest is 0")
    model: str | None = Field(
        None, min_length=DIGEST, pattern="^[0-9a-f]+$", description="First digits of the model's data digest; null: the only given model"
    )
    show_reference: bool = Field(True, description="Show the model the prompt's reference answer, if there is one")

    @classmethod
    def prepare(cls, verifiers: Sequence[Verifier], tools: Tools) -> None:
        for model, top in {(v.model, v.max_grade) for v in verifiers if isinstance(v, Judge)}:
            if model is None and tools.endpoint is not None:
                continue
            _grades_of(tools.judges.find(cls.name, "lm", model).tokenizer, top)

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score]:
        results: dict[int, Score] = {}
        kinds = [(v.model, v.max_grade) for item in items if isinstance(v := item.verifier, Judge)]
        for kind in sorted(set(kinds), key=str):
            numbers = [number for number, one in enumerate(kinds) if one == kind]
            requests = [verifier.request(items[n]) for n in numbers if isinstance(verifier := items[n].verifier, Judge)]
            if kind[0] is None and tools.endpoint is not None:
                scores = ask_endpoint(tools.endpoint, requests, kind[1], tools.config.reply_tokens)
            else:
                scores = [grade.score(kind[1]) for grade in grades(tools.judges.find(cls.name, "lm", kind[0]), requests, kind[1])]
            results |= zip(numbers, scores, strict=True)
        return [results[number] for number in range(len(items))]

    def request(self, item: Item) -> str:
        reference = item.question.reference if self.show_reference else None
        parts = [
            f"Grade the answer to a request with a number from 0 to {self.max_grade} by this rubric.", f"Rubric:\n{self.rubric}",
            f"The request:\n<<<\n{item.question.text}\n>>>", *([f"A right answer:\n<<<\n{reference}\n>>>"] if reference else []),
            f"The answer to grade:\n<<<\n{item.answer}\n>>>", f"Reply with the grade alone, one digit from 0 to {self.max_grade}.",
        ]  # fmt: skip
        return "\n\n".join(parts)


def ask_endpoint(endpoint: Endpoint, requests: Sequence[str], top: int, tokens: int) -> list[Score]:
    """Return scores from the grades that a remote model writes (None for a reply without one), one reply per request at temperature 0."""
    bodies = [{"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": tokens} for text in requests]
    scores = []
    for reply in endpoint.ask(bodies, "grades"):
        grade = grade_of(reply.final, top) if reply.finished else None
        message = reply.refused or f"{endpoint.config.name} gives no grade from 0 to {top}: {reply.final[:80]!r}"
        scores.append(Score(None, message) if grade is None else Score(round(grade / top, 4), f"grade {grade:g} of {top}"))
    return scores


class Grade(NamedTuple):
    """The mean grade, None if `tokens` exceed the judge's context. `answered`: the probability that the judge answers with a grade."""

    mean: float | None
    answered: float
    tokens: int

    def score(self, top: int) -> Score:
        if self.mean is None:
            return Score(None, f"{self.tokens} tokens exceed the judge's context")
        # Rounded, because the last digits depend on the rest of the batch.
        detail = f"grade {self.mean:.2f} of {top}; the model answers with a grade with probability {self.answered:.2g}"
        return Score(round(self.mean / top, 4), detail)


def grades(judge: Loaded, requests: Sequence[str], top: int) -> list[Grade]:
    """Return the judge's expected grade of each request, from 0 to `top`. A request longer than the judge's context gets the grade None."""
    import torch

    from puna.models.forest import Forest

    shared, tokens = _grades_of(judge.tokenizer, top)
    model, device = judge.model, next(judge.model.parameters()).device
    rows = [[*judge.tokenizer.chat([{"role": "user", "content": text}]), *shared] for text in requests]
    results = [Grade(None, 0.0, len(row)) for row in rows]
    fitting = [number for number, row in enumerate(rows) if len(row) <= model.config.max_position_embeddings]
    for numbers in batch_by_size(fitting, lambda number: len(rows[number]), BATCH_TOKENS):
        forest = Forest.pack([rows[number] for number in numbers])
        last = torch.tensor([len(rows[number]) for number in numbers], device=device).cumsum(0) - 1
        with torch.no_grad():
            means, distributions = mean_grades(model.logits(model.hidden(forest.to(device))[last]), tokens, range(top + 1))
        for number, mean, answered in zip(numbers, means.tolist(), distributions.tolist(), strict=True):
            results[number] = Grade(mean, answered, len(rows[number]))
    return results


def _grades_of(tokenizer: Tokenizer, top: int) -> tuple[list[int], list[int]]:
    """Return the first tokens that all grades share, and then the token of each grade from 0 to `top`."""
    grades = [str(grade) for grade in range(top + 1)]
    return tokens_apart([tokenizer.encode(grade) for grade in grades], grades)


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
LEVELS = 2  # the highest of the three difficulty levels, which start at 0
DIFFICULTY = (
    "How difficult is it to answer the request below well?\n0: easy, anybody could.\n1: it takes care, knowledge or several steps.\n"
    "2: hard, an expert would have to think.\n\nThe request:\n<<<\n{request}\n>>>\n\nReply with the level alone, one digit from 0 to 2."
)
INTENTIONS = (
    "How many different things does the request below ask for? Count each task, each condition that the answer must meet and each "
    "form that it must have.\n\nThe request:\n<<<\n{request}\n>>>\n\n"
    "Reply with the number alone, one digit from 0 to {most}; {most} also stands for more."
)
DIGITS = 4  # decimals to which grades are rounded: further decimals depend on the machine


class JudgeSettings(StageConfig):
    """Settings of a language model's grades of instructions."""

    points: tuple[str, ...] = Field(POINTS, min_length=1, max_length=9, description="Criteria of an answer, one point each")
    code_points: tuple[str, ...] = Field(CODE_POINTS, min_length=1, max_length=9, description="Criteria of an answer with a code block")
    below_full: float = Field(0.5, ge=0, lt=9, description="Points by which a mean grade may fall short and still count as the top grade")
    difficulty: bool = Field(True, description="Also grade difficulty and number of intentions; false: difficulty is one minus agreement")
    max_intentions: int = Field(5, ge=1, le=9, description="Maximum number of intentions in a request; more count as this number")


class Graded(NamedTuple):
    """Grades by instruction id: the share of points, the ids with the top grade, and the difficulty from 0 to 1.

    Instructions too long for the judge are left out. `scores`: rows of the side table `scores`."""

    quality: dict[str, float]
    full: set[str]
    difficulty: dict[str, float]
    scores: list[dict[str, Any]]


def grade(rows: Sequence[dict[str, Any]], judge: Loaded, settings: JudgeSettings, run: StageRun) -> Graded:
    """Return grades of instructions from the judge's probabilities of the digits: one forward pass per grade, without sampling.

    As in Llama 3 (section 4.2.3): points for accuracy, instruction following and tone or, if the answer has code, for freedom from bugs and
    for the user's intention; three levels of difficulty; and the number of intentions (Instag, arXiv 2308.07074, but without tags). With
    `settings.difficulty`, difficulty is the mean of level and number, as shares of their maxima; else there is none. Metrics: `unjudged`,
    and `judge_answers`, the mean probability that the answer is a grade; if it is low, the judge misunderstands the question."""
    messages = {row["id"]: messages_of(row) for row in rows}
    questions = {name: as_text(turns[:-1]) for name, turns in messages.items()}
    texts = {name: as_text(turns[-1:]) for name, turns in messages.items()}
    of_code = {name for name, text in texts.items() if "```" in text}
    graded, probabilities = Graded({}, set(), {}, []), list[float]()

    def means(kind: str, requests: dict[str, str], top: int) -> dict[str, float]:
        """Return the mean grade of each request that fits into the judge's context; add it to `graded.scores`."""
        values: dict[str, float] = {}
        for name, grade in zip(requests, grades(judge, list(requests.values()), top), strict=True):
            if grade.mean is not None:
                values[name] = round(grade.mean, DIGITS)
                graded.scores.append({"id": name, "name": kind, "value": values[name]})
                probabilities.append(grade.answered)
        return values

    for points, names in ((settings.points, sorted(texts.keys() - of_code)), (settings.code_points, sorted(of_code))):
        verifier = Judge(rubric=RUBRIC.format(lines="\n".join(f"- {point}" for point in points)), max_grade=len(points))
        items = {name: Item(verifier, Question(name, "", questions[name], None), texts[name]) for name in names}
        results = means("points", {name: verifier.request(item) for name, item in items.items()}, len(points))
        graded.quality.update({name: mean / len(points) for name, mean in results.items()})
        graded.full.update(name for name, mean in results.items() if mean >= len(points) - settings.below_full)
    if settings.difficulty:
        most = settings.max_intentions
        levels = means("difficulty", {name: DIFFICULTY.format(request=text) for name, text in questions.items()}, LEVELS)
        counts = means("intentions", {name: INTENTIONS.format(request=text, most=most) for name, text in questions.items()}, most)
        graded.difficulty.update({name: (levels[name] / LEVELS + counts[name] / most) / 2 for name in levels if name in counts})
    run.metric("unjudged", len(rows) - len(graded.quality))
    if probabilities:
        run.metric("judge_answers", round(sum(probabilities) / len(probabilities), DIGITS))
    return graded
