"""What verifiers are run with: the stage's workers, limits of time, and the models that were given as judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from puna.stages.contract import StageRun
from puna.stages.verifiers.base import Item, Score, checked, to_json
from puna.stages.verifiers.child import score_chunk
from puna.stages.verifiers.judges import Judges
from puna.stages.verifiers.settings import ScoringConfig
from puna.storage import Artifact

T = TypeVar("T")
CHUNK = 64
"""Answers that a worker is given at once."""


class Tools:
    """Given to `Verifier.prepare` and `Verifier.score_many`."""

    def __init__(self, config: ScoringConfig, run: StageRun, judges: Sequence[Artifact] = ()) -> None:
        self.config = config
        self.run = run
        self.judges = Judges(judges)

    def in_children(self, items: Sequence[Item]) -> list[Score]:
        """Scores by `Verifier.score`, in processes of their own that are ended after `seconds` for an answer."""
        jobs = [{"verifier": to_json(i.verifier), "question": tuple(i.question), "answer": i.answer} for i in items]
        found = self.run.map(score_chunk, chunks(jobs, CHUNK), self.config.seconds)
        made = [Score(*one) for chunk in found for one in chunk]
        return [checked(score, item.verifier.name) for score, item in zip(made, items, strict=True)]


def chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """The items, `size` at a time."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
