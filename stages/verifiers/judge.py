"""`judge`: a grade by a language model with a rubric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field

from puna.stages.grading import mean_grades, tokens_apart
from puna.stages.verifiers.base import Item, Score, Verifier
from puna.stages.verifiers.judges import DIGEST, Loaded, batches
from puna.stages.verifiers.registry import register
from puna.stages.verifiers.tools import Tools

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer


@register
class Judge(Verifier):
    """Score by the mean grade, as a share of the highest: each grade weighted by its probability.

    One forward pass without sampling, as in G-Eval (Liu et al., arXiv 2303.16634, section 2), with finer steps than the digits.
    """

    name: ClassVar[str] = "judge"

    rubric: str = Field(min_length=1, description="What makes a good answer, and what each grade means")
    max_grade: int = Field(5, ge=1, le=9, description="Highest grade, one digit; the lowest is 0")
    model: str | None = Field(
        None, min_length=DIGEST, pattern="^[0-9a-f]+$", description="Beginning of the model's data digest; null: the only one given"
    )
    show_reference: bool = Field(True, description="Show the model the prompt's reference answer, where there is one")

    @classmethod
    def prepare(cls, verifiers: Sequence[Verifier], tools: Tools) -> None:
        """Raise PunaError if the model is missing or does not distinguish the grades."""
        for model, top in {(v.model, v.max_grade) for v in verifiers if isinstance(v, Judge)}:
            _grades_of(tools.judges.find(cls.name, "lm", model).tokenizer, top)

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score]:
        """Return the scores of many answers, batch by batch."""
        found: dict[int, Score] = {}
        kinds = [(v.model, v.max_grade) for item in items if isinstance(v := item.verifier, Judge)]
        for kind in sorted(set(kinds), key=str):
            numbers = [number for number, one in enumerate(kinds) if one == kind]
            requests = [verifier.request(items[n]) for n in numbers if isinstance(verifier := items[n].verifier, Judge)]
            made = grades(tools.judges.find(cls.name, "lm", kind[0]), requests, kind[1])
            found |= zip(numbers, [grade.score(kind[1]) for grade in made], strict=True)
        return [found[number] for number in range(len(items))]

    def request(self, item: Item) -> str:
        """Return the request to the model."""
        known = item.question.reference if self.show_reference else None
        parts = [
            f"Grade the answer to a request with a number from 0 to {self.max_grade} by this rubric.", f"Rubric:\n{self.rubric}",
            f"The request:\n<<<\n{item.question.text}\n>>>", *([f"A right answer:\n<<<\n{known}\n>>>"] if known else []),
            f"The answer to grade:\n<<<\n{item.answer}\n>>>", f"Reply with the grade alone, one digit from 0 to {self.max_grade}.",
        ]  # fmt: skip
        return "\n\n".join(parts)


class Grade(NamedTuple):
    """The mean grade, None if `tokens` exceed the judge's context; `answered`: probability that it answers with a grade."""

    mean: float | None
    answered: float
    tokens: int

    def score(self, top: int) -> Score:
        """Return the grade as a share of the highest."""
        if self.mean is None:
            return Score(None, f"{self.tokens} tokens are more than the judge reads")
        # The last digits of a network's numbers depend on what else is in the batch.
        detail = f"grade {self.mean:.2f} of {top}; the model answers with a grade with probability {self.answered:.2g}"
        return Score(round(self.mean / top, 4), detail)


def grades(judge: Loaded, requests: Sequence[str], top: int) -> list[Grade]:
    """Return the model's grade of each request, from 0 to `top`."""
    import torch

    from puna.models.forest import Forest

    shared, tokens = _grades_of(judge.tokenizer, top)
    model, device = judge.model, next(judge.model.parameters()).device
    rows = [[*judge.tokenizer.chat([{"role": "user", "content": text}]), *shared] for text in requests]
    found = [Grade(None, 0.0, len(row)) for row in rows]
    fitting = [number for number, row in enumerate(rows) if len(row) <= model.config.max_position_embeddings]
    for batch in batches([len(rows[number]) for number in fitting]):
        numbers = [fitting[i] for i in batch]
        forest = Forest.pack([rows[number] for number in numbers])
        last = torch.tensor([len(rows[number]) for number in numbers], device=device).cumsum(0) - 1
        with torch.no_grad():
            means, said = mean_grades(model.logits(model.hidden(forest.to(device))[last]), tokens, range(top + 1))
        for number, mean, answered in zip(numbers, means.tolist(), said.tolist(), strict=True):
            found[number] = Grade(mean, answered, len(rows[number]))
    return found


def _grades_of(tokenizer: Tokenizer, top: int) -> tuple[list[int], list[int]]:
    """Return the common first tokens of all grades, and the token of each grade from 0 to `top`."""
    grades = [str(grade) for grade in range(top + 1)]
    return tokens_apart([tokenizer.encode(grade) for grade in grades], grades)
