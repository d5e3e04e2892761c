"""The basis of a run's alignment figures: its annotator, its tasks, and the distance of held-out questions to training ones."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from puna.flows.html.markup import Content, Html, part, table, tag
from puna.flows.report.run import Run
from puna.stages.conversations import messages_of, text_of
from puna.stages.training.intervals import Interval, wilson
from puna.stages.verifiers.base import BoundedVerifier, Item, Question, attempt, is_correct
from puna.stages.verifiers.registry import from_json
from puna.storage import PunaError

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MOST = 1_000
"""Held-out questions, and gold answers, that a report looks at."""


@dataclass(frozen=True)
class Near:
    """A question's text in the form that comparisons use."""

    words: Counter[str]
    wording: str
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, text: str) -> Near:
        """Return the words, the text without its numbers, and the numbers."""
        numbers = tuple(float(one) for one in NUMBER.findall(text))
        return cls(Counter(text.split()), NUMBER.sub("", text), numbers)


def shared_words(one: Near, other: Near) -> float:
    """Return the share of words that two questions have in common (Jaccard, with repeats)."""
    return (one.words & other.words).total() / max(1, (one.words | other.words).total())


def close_numbers(one: Near, other: Near) -> float:
    """Return minus the distance of two questions' numbers. Minus infinity if their wording differs."""
    if one.wording != other.wording or len(one.numbers) != len(other.numbers):
        return -math.inf
    return -sum(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))


def lookup(prompts: Sequence[Mapping[str, Any]]) -> Interval | None:
    """Return the share of held-out questions that the gold answer of the nearest training question answers correctly.

    The stronger of two lookups: by shared words, and by the same wording with the closest numbers. Of equally near questions the
    first by id counts. None without gold answers, or without verifiers that run in linear time in this process.
    """
    gold = sorted((row for row in prompts if row["split"] == "train" and row["reference"]), key=lambda row: row["id"])[:MOST]
    references = [(Near.of(text_of(messages_of(row))), str(row["reference"])) for row in gold]
    questions = []
    for row in sorted((row for row in prompts if row["split"] == "heldout" and row["verifier"]), key=lambda row: row["id"])[:MOST]:
        try:
            verifier = from_json(json.loads(row["verifier"]))
        except (PunaError, ValueError):
            continue
        if isinstance(verifier, BoundedVerifier):
            text = text_of(messages_of(row))
            questions.append((verifier, Question(row["id"], row["task"], text, row["reference"]), Near.of(text)))
    if not references or not questions:
        return None

    def right(nearness: Callable[[Near, Near], float]) -> int:
        answers = [max(references, key=lambda one: nearness(near, one[0]))[1] for _, _, near in questions]
        items = (Item(verifier, question, answer) for (verifier, question, _), answer in zip(questions, answers, strict=True))
        return sum(is_correct(attempt(item).value) for item in items)

    return wilson(max(right(shared_words), right(close_numbers)), len(questions))


def measured_view(run: Run) -> Html | None:
    """Return what the figures of alignment are of, from the configuration and the prompts of this run."""
    rows: list[list[Content]] = []
    for step in run.kind("preferences"):
        config = step.artifact.manifest.config
        if step.stage == "preferences":
            taste = f"its taste is the check {json.dumps(config['taste'])}" if config.get("taste") else "it has no taste of its own"
            flips = f"{float(config.get('flips', 0)):.0%} of its preferences are the wrong way round"
            rows.append(["annotator", f"simulated: {taste}; {flips}"])
            break
    for step in run.kind("prompts")[:1]:
        prompts = step.artifact.read().to_pylist()
        tasks = Counter(row["task"] for row in prompts if row["split"] == "heldout")
        rows.append(["tasks", ", ".join(f"{task} ({count:,} held-out questions)" for task, count in sorted(tasks.items()))])
        if (nearness := lookup(prompts)) is not None:
            share = f"{nearness.value:.3f} ({nearness.low:.3f} to {nearness.high:.3f})"
            rows.append(["lookup, no model", f"{share} right: the gold answer of the nearest training question, repeated"])
    note = (
        "An arm that is no better than the lookup has shown nothing that the training questions did not hold. The lookup goes by words or "
        "by numbers, whichever is right more often; a closer one may do better."
    )
    return part("What this was measured on", table(["what", "in this run"], rows), tag("p", note, class_="note")) if rows else None
