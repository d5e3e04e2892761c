"""A process for verifiers of users, killed with its children when an answer takes too long."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from puna.stages.executors.subprocess_worker import Apart
from puna.stages.verifiers.base import Item, Question, Score, attempt, checked, to_json
from puna.stages.verifiers.tools import Tools, chunks

CHUNK = 64
"""Answers that a worker is given at once."""


class Child(Apart):
    """A process that scores answers one at a time."""

    def score(self, item: Item, seconds: float) -> Score:
        """Return the score of one answer; None if it takes longer than `seconds`, or ends the process."""
        job = {"verifier": to_json(item.verifier), "question": item.question._asdict(), "answer": item.answer}
        said = self.ask(job, seconds)
        return Score(None, f"{item.verifier.name}: {said}") if isinstance(said, str) else Score(said["value"], said["detail"])


@lru_cache(maxsize=1)
def child() -> Child:
    """Return this process's child."""
    return Child(scored)


def scored(job: dict[str, Any]) -> dict[str, Any]:
    """Return the score of one answer, in the child process."""
    from puna.stages.verifiers.registry import from_text

    made = attempt(Item(from_text(json.dumps(job["verifier"])), Question(**job["question"]), job["answer"]))
    return {"value": made.value, "detail": made.detail}


def in_children(items: Sequence[Item], tools: Tools) -> list[Score]:
    """Return scores by `Verifier.score` in separate processes, each killed after `seconds` for an answer."""
    jobs = [{"verifier": to_json(i.verifier), "question": tuple(i.question), "answer": i.answer} for i in items]
    found = tools.run.map(score_chunk, chunks(jobs, CHUNK), tools.config.seconds)
    made = [Score(*one) for chunk in found for one in chunk]
    return [checked(score, item.verifier.name) for score, item in zip(made, items, strict=True)]


def score_chunk(chunk: list[dict[str, Any]], seconds: float) -> list[tuple[float | None, str]]:
    """Return (value, detail) of each job, in order, in a worker."""
    from puna.stages.verifiers.registry import from_json

    found = []
    for job in chunk:
        made = child().score(Item(from_json(job["verifier"]), Question(*job["question"]), job["answer"]), seconds)
        found.append((made.value, made.detail))
    return found
